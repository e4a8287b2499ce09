"""The C++ kernels of the native engine, and the one place that finds and loads the library built from them.

The library is a plain shared object next to the sources, with no Python in it. Nothing here knows a network.
"""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


class NativeEngineError(RuntimeError):
    """The library is missing, or refused a call."""


@dataclass(frozen=True)
class NativeInfo:
    """What `cbdsl doctor` says of the engine."""

    library: str
    instructions: str
    lanes: int  # samples in one vector register
    compiler: str
    kernels: str  # a digest of the sources it was built from
    threads: int


def available() -> str | None:
    """None if the library is there and loads; otherwise why not."""
    try:
        library()
    except NativeEngineError as error:
        return str(error)
    return None


def info() -> NativeInfo:
    """Describe the loaded library; raises NativeEngineError with the reason if there is none."""
    path, loaded = library()
    return NativeInfo(
        library=path.name,
        instructions=loaded.cbdsl_instructions().decode(),
        lanes=loaded.cbdsl_lanes(),
        compiler=loaded.cbdsl_compiler().decode(),
        kernels=loaded.cbdsl_kernels().decode(),
        threads=default_threads(),
    )


def default_threads() -> int:
    """Processors that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def peak_multiply_adds(threads: int | None = None, seconds: float = 0.2) -> float:
    """Multiply-adds per second that the machine reaches with everything in registers, measured."""
    return float(library()[1].cbdsl_peak(threads or default_threads(), seconds))


@cache
def library() -> tuple[Path, Any]:
    """Load the library that suits this processor best; cached, because loading twice would be two libraries."""
    built = sorted(HERE.glob("_lanes*.so")) + sorted(HERE.glob("_lanes*.dylib"))
    if not built:
        raise NativeEngineError(
            "the native engine was not built when the package was installed; install a C++ compiler "
            "(g++ or clang++) and install the package again, or use the torch engine"
        )
    by_level = {path.name.split(".")[0].removeprefix("_lanes"): path for path in built}
    try:
        if "" not in by_level:
            baseline = _load(by_level["_v1"])
            fitting = (f"_v{level}" for level in range(baseline[1].cbdsl_level(), 1, -1))
            return next((_load(by_level[level]) for level in fitting if level in by_level), baseline)
        path, loaded = _load(by_level[""])  # built for one machine: this one, unless it was copied
        if loaded.cbdsl_level() < loaded.cbdsl_needed_level():
            raise NativeEngineError(
                "the native engine was built for another processor; install the package again on this machine, "
                "or with CBDSL_PORTABLE=1 for several"
            )
        return path, loaded
    except (OSError, KeyError, AttributeError) as error:
        raise NativeEngineError(f"the native engine does not load ({error}); install the package again") from None


def _load(path: Path) -> tuple[Path, Any]:
    library = ctypes.CDLL(str(path))
    pointer, whole, large, real, double = (
        ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64, ctypes.c_float, ctypes.c_double,
    )  # fmt: skip
    signatures: dict[str, tuple[Any, list[Any]]] = {
        "cbdsl_create": (pointer, [pointer, whole, pointer, pointer, pointer]),
        "cbdsl_destroy": (None, [pointer]),
        "cbdsl_parameters": (large, [pointer]),
        "cbdsl_workspace": (large, [pointer]),
        "cbdsl_train": (whole, [pointer, large, *[pointer] * 4, *[large] * 2, *[real] * 4, *[pointer] * 3, whole]),
        "cbdsl_gradients": (whole, [pointer, large, *[pointer] * 4, large, whole, pointer, whole]),
        "cbdsl_score": (whole, [pointer, large, *[pointer] * 4, large, whole, pointer, pointer, pointer, whole]),
        "cbdsl_sample_losses": (whole, [pointer, *[pointer] * 4, large, pointer, whole]),
        "cbdsl_lanes": (whole, []),
        "cbdsl_compiler": (ctypes.c_char_p, []),
        "cbdsl_kernels": (ctypes.c_char_p, []),
        "cbdsl_instructions": (ctypes.c_char_p, []),
        "cbdsl_level": (whole, []),
        "cbdsl_needed_level": (whole, []),
        "cbdsl_peak": (double, [whole, double]),
    }
    for name, (result, arguments) in signatures.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return path, library
