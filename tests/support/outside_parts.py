"""A folder outside the package with a user's file in it."""

from __future__ import annotations

import shutil
from pathlib import Path

from cbdsl import register
from cbdsl.spec import Spec

EXAMPLE = Path(__file__).parents[2] / "examples" / "my_parts.py"


def outside_file(folder: Path) -> Path:
    """The example, copied to where a user would have it."""
    return Path(shutil.copy(EXAMPLE, folder / "my_parts.py"))


def forget_guests() -> None:
    """Take all plugins' parts out of the registers, as a new process would find them."""
    while register._loaded:
        register._forget(register._loaded.popitem()[1][1])


def outside_spec(plugin: Path | str, **settings: object) -> Spec:
    """A small run on data, network and partition of the file; keywords use __ for a dot."""
    base: dict[str, object] = {
        "plugins": [str(plugin)],
        "model": "tanh-net",
        "workers": 6,
        "rounds": 4,
        "data.source": "spirals",
        "data.partition": "unequal",
        "data.samples_per_worker": 30,
        "data.shared_training": 20,
        "data.shared_scoring": 60,
        "data.holdout": 30,
        "local.learning_rate": 0.1,
    }
    return Spec().with_settings(base | {key.replace("__", "."): value for key, value in settings.items()})
