"""A copy of the package whose numbers are the same on every x86-64 machine, and the environment to run it in.

Three things choose instructions by the processor, and with them the last digits: the native engine's build, numpy with
OpenBLAS, and the C library's mathematical functions. Here all three use instructions that every x86-64 processor has.
Without fused multiply-adds, and without reassociation, which setup.py does not allow, IEEE arithmetic leaves a compiler
no choice: -O1 and -O3 gave the same hashes.
The torch engine is not covered: its libraries choose instructions by the processor in several more places.
"""

from __future__ import annotations

import hashlib
import os
import platform
import runpy
import shutil
import subprocess
from pathlib import Path

import numpy as np

LEVEL = "_v1"  # setup.py's name for plain x86-64


def missing() -> str:
    """Return why portable kernels cannot be built here, or an empty string."""
    if platform.machine().lower() not in {"x86_64", "amd64"} or platform.system() != "Linux":
        return f"recorded for Linux on x86-64; this is {platform.system()} on {platform.machine()}"
    return "" if shutil.which(_compiler()) else f"there is no C++ compiler ({_compiler()})"


def environment() -> dict[str, str]:
    """Return the environment variables of a process whose numbers do not depend on its processor.

    They work only if they are set before the process starts.
    """
    found = np.show_config(mode="dicts")["SIMD Extensions"]["found"]  # what numpy chooses by the processor
    disabled = dict.fromkeys([*os.environ.get("NPY_DISABLE_CPU_FEATURES", "").replace(",", " ").split(), *found])
    features = ("FMA", "FMA4", "AVX", "AVX2", "AVX512F")
    hidden = [f"-{feature}{end}" for feature in features for end in ("", "_Usable")]  # the names of glibc before 2.33
    return {
        "NPY_DISABLE_CPU_FEATURES": " ".join(disabled),
        "OPENBLAS_CORETYPE": "Prescott",
        "OPENBLAS_NUM_THREADS": "1",
        "GLIBC_TUNABLES": f"glibc.cpu.hwcaps={','.join(hidden)}",
    }


def portable_copy(source: Path, folder: Path) -> Path:
    """Make a copy of a checkout's package with portable kernels alone, and return the folder to import it from.

    The library is kept in the checkout's build folder and used again for the same sources, flags and compiler.
    """
    before = Path.cwd()
    os.chdir(source)  # setup.py names its files from there
    os.environ["CBDSL_PORTABLE"] = "1"
    try:
        setup = runpy.run_path("setup.py")
        flags = [*setup["flags_of"](_compiler()), *setup["levels"]()[LEVEL], "-shared", "-fPIC"]
        flags.append(f'-DCBDSL_KERNELS="{setup["kernels"]()}"')
    finally:
        del os.environ["CBDSL_PORTABLE"]
        os.chdir(before)
    compiler = subprocess.run([_compiler(), "--version"], capture_output=True, text=True, check=True).stdout
    key = hashlib.sha256("\n".join([*flags, compiler]).encode()).hexdigest()[:12]
    library = source / "build" / "portable" / f"{key}.so"
    if not library.exists():
        library.parent.mkdir(parents=True, exist_ok=True)
        partial = library.with_suffix(f".{os.getpid()}")
        subprocess.run([_compiler(), *flags, *setup["SOURCES"], "-o", str(partial)], cwd=source, check=True)
        partial.rename(library)
    skipped = shutil.ignore_patterns("_lanes*", "__pycache__", "*.egg-info")
    shutil.copytree(source / "src", folder / "src", ignore=skipped, copy_function=os.symlink)
    (folder / setup["NATIVE"] / f"_lanes{LEVEL}.so").symlink_to(library)
    return folder / "src"


def _compiler() -> str:
    return os.environ.get("CXX", "g++")
