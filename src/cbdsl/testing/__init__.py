"""Checks for your own components: each check tests a component on small cases.

    cbdsl.testing.check_attack(MyAttack())

A component is given as an object or by its registered name. An AssertionError names the component, the law that it
breaks and what was observed.
"""

from cbdsl.testing.check_attack import check_attack
from cbdsl.testing.check_codec import check_codec
from cbdsl.testing.check_data import check_augmentation, check_dataset, check_model, check_partition
from cbdsl.testing.check_method import check_method
from cbdsl.testing.check_server import check_aggregator, check_selection

__all__ = [
    "check_aggregator",
    "check_attack",
    "check_augmentation",
    "check_codec",
    "check_dataset",
    "check_method",
    "check_model",
    "check_partition",
    "check_selection",
]
