"""Build the native engine's library if a C++ compiler is at hand; without one the package still installs.

CBDSL_PORTABLE=1 builds for any machine of this kind (x86-64: three levels, the best is chosen when it is loaded).
CBDSL_DEVICE=1 leaves out MNIST, most of the package: devices have samples of their own.
CBDSL_SANITIZE=address,undefined builds with those sanitizers, for tests.
"""

from __future__ import annotations

import hashlib
import os
import platform
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

NATIVE = Path("src/cbdsl/engines/native")
SOURCES = [str(NATIVE / name) for name in ("engine.cpp", "machine.cpp", "plan.cpp")]
HEADERS = sorted(str(path) for path in NATIVE.glob("*.hpp"))
# NaN must stay NaN from a weight to a loss, so nothing of -ffast-math that assumes it away.
FLAGS = ["-std=c++17", "-O3", "-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math"]
FLAGS += ["-fvisibility=hidden", "-pthread", "-Wall", "-Wextra"]

# Tuned for some processors, gcc leaves sums in a loop with one accumulator unfused. A loss would then depend on how
# many samples are scored together. clang has no such flag and needs none.
FUSED = "--param=avoid-fma-max-bits=0"


def flags_of(compiler: str) -> list[str]:
    """The flags of all machines that a compiler knows."""
    asked = [compiler, FUSED, "-E", "-x", "c++", os.devnull]
    known = subprocess.run(asked, capture_output=True, check=False).returncode == 0
    return [*FLAGS, FUSED] if known else FLAGS


# Without the first of these gcc computes vectors of floats number by number on 32-bit ARM, where NEON takes numbers too
# small for a normal float as zero, as the engine does everywhere. The rest takes back what else the first allows.
ARM32 = ["-funsafe-math-optimizations", "-fno-associative-math", "-fno-reciprocal-math", "-fsigned-zeros"]


def levels() -> dict[str, list[str]]:
    """The libraries to build: the end of each name, and the flags that choose its instructions."""
    machine = platform.machine().lower()
    arm = machine.startswith(("arm", "aarch64"))
    narrow = ARM32 if arm and sys.maxsize < 2**32 else []  # a 64-bit kernel may run a 32-bit Python
    if os.environ.get("CBDSL_PORTABLE", "0") in {"", "0"}:
        return {"": ["-mcpu=native" if arm else "-march=native", *narrow]}
    if machine in {"x86_64", "amd64"}:
        return {
            "_v1": ["-march=x86-64"],
            "_v3": ["-march=x86-64-v3"],
            "_v4": ["-march=x86-64-v4", "-mprefer-vector-width=512"],
        }
    return {"": narrow}


def kernels() -> str:
    """A digest of the kernels' sources and flags, by which machines see that they compute alike."""
    content = b"".join(Path(name).read_bytes() for name in (*SOURCES, *HEADERS))
    return hashlib.sha256(content + " ".join([*FLAGS, FUSED]).encode()).hexdigest()[:12]


def extension(suffix: str, flags: list[str]) -> Extension:
    """One library; a failure to build it is a warning, and the torch engine takes over."""
    sanitize = os.environ.get("CBDSL_SANITIZE")
    extra = [f"-fsanitize={sanitize}", "-fno-sanitize-recover=all", "-g", "-O1"] if sanitize else []
    return Extension(
        f"cbdsl.engines.native._lanes{suffix}",
        SOURCES,
        depends=HEADERS,
        define_macros=[("CBDSL_KERNELS", f'"{kernels()}"')],
        language="c++",
        extra_compile_args=[*flags, *extra],
        extra_link_args=["-pthread", *extra],
        optional=True,
    )


class BuildLibraries(build_ext):
    """Builds each library from its own objects: the same sources are compiled with different flags."""

    def run(self) -> None:
        """Start clean: a library left over from other flags would be shipped, and might suit no other machine."""
        built = Path(self.build_lib) / "cbdsl/engines/native"
        for directory in (built, NATIVE) if self.inplace else (built,):
            for old in directory.glob("_lanes*"):
                old.unlink()
        super().run()

    def build_extension(self, ext: Extension) -> None:
        """Compile into a directory of its own, so that no level reuses the objects of another."""
        ext.extra_compile_args[:0] = flags_of(self.compiler.compiler_so[0])
        shared = self.build_temp
        self.build_temp = str(Path(shared) / ext.name.rpartition(".")[2])
        try:
            super().build_extension(ext)
        finally:
            self.build_temp = shared

    def get_export_symbols(self, _ext: Extension) -> list[str]:
        """None: the library is loaded through ctypes and has no Python module inside."""
        return []


# For the package and each folder of it: setuptools takes every folder with data for a package.
MNIST = {"cbdsl": ["data/mnist/*"], "cbdsl.data": ["mnist/*"], "cbdsl.data.mnist": ["*"]}


if __name__ == "__main__":  # the tests for ARM and tools/portable_kernels.py read the flags
    setup(
        ext_modules=[extension(suffix, flags) for suffix, flags in levels().items()],
        cmdclass={"build_ext": BuildLibraries},
        exclude_package_data={} if os.environ.get("CBDSL_DEVICE", "0") in {"", "0"} else MNIST,
    )
