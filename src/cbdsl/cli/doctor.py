"""What this installation can do, for `cbdsl doctor`: engine, threads, vector width, data, versions."""

from __future__ import annotations

import os
import platform
from importlib import metadata

from cbdsl import __version__
from cbdsl.data.sources import EMBEDDED, load
from cbdsl.engines import native_engine
from cbdsl.errors import UserError

_LIBRARIES = ("torch", "numpy", "matplotlib", "safetensors")


def examine() -> list[tuple[str, str]]:
    """Findings as pairs of a name and a sentence."""
    return [
        ("cbdsl", __version__),
        ("python", f"{platform.python_version()} on {platform.system()} {platform.machine()}"),
        *_engine(),
        ("threads", f"{native_engine.default_threads()} for this process, {os.cpu_count()} cores in the machine"),
        ("data", _data()),
        *((name, metadata.version(name)) for name in _LIBRARIES),
    ]


def _engine() -> list[tuple[str, str]]:
    obstacle = native_engine.available()
    if obstacle is not None:
        return [("engine", f"torch ({obstacle})")]
    info = native_engine.info()
    return [
        ("engine", "native, for sequential models; torch for the rest"),
        ("vectors", f"{info.instructions}, {info.lanes} samples at once; {info.library}, built by {info.compiler}"),
    ]


def _data() -> str:
    try:
        data = load(EMBEDDED)
    except UserError as error:
        return f"embedded MNIST is damaged: {error}"
    return f"embedded MNIST is whole: {len(data.train):,} training and {len(data.test):,} test images"
