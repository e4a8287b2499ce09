"""Laws for parts of your own: each check puts a part through small cases and fails with a sentence that says why.

    cbdsl.testing.check_attack(MyAttack())

A part is given as an object or by its registered name. An AssertionError names the part, the law and what was seen.
"""

from cbdsl.testing.attacks import check_attack
from cbdsl.testing.codecs import check_codec
from cbdsl.testing.methods import check_method
from cbdsl.testing.servers import check_aggregator, check_selection
from cbdsl.testing.sources import check_dataset, check_model, check_partition

__all__ = [
    "check_aggregator",
    "check_attack",
    "check_codec",
    "check_dataset",
    "check_method",
    "check_model",
    "check_partition",
    "check_selection",
]
