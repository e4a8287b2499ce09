"""ARM machines on this one: cross compilers, the engine and C programs under qemu, and what is missing for that."""

from __future__ import annotations

import hashlib
import runpy
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cbdsl.arrays import Doubles, Floats, Indices, Samples, Seeds
from cbdsl.engines.engine import Sgd
from cbdsl.engines.native_engine import OPTIMISERS, LayerTable
from cbdsl.models.architecture import Architecture

ROOT = Path(__file__).parents[2]
HERE = ROOT / "tests" / "arm"  # the programs that run under qemu
STRICT = ["-std=c99", "-Wall", "-Wextra", "-Werror", "-pedantic"]
PACKAGES = {
    "aarch64-linux-gnu-g++": "g++-aarch64-linux-gnu",
    "arm-linux-gnueabihf-g++": "g++-arm-linux-gnueabihf",
    "arm-none-eabi-gcc": "gcc-arm-none-eabi libnewlib-arm-none-eabi",
    "qemu-aarch64": "qemu-user",
    "qemu-arm": "qemu-user",
}


def needs(*programs: str) -> pytest.MarkDecorator:
    """Skip where programs are missing, with the line that installs them."""
    missing = dict.fromkeys(PACKAGES[program] for program in programs if not shutil.which(program))
    return pytest.mark.skipif(bool(missing), reason=f"NO ARM TOOLS: apt-get install {' '.join(missing)}")


@dataclass(frozen=True)
class Machine:
    """One kind of ARM: who compiles for it, with which flags, and who runs it."""

    name: str
    compiler: str  # the beginning of its programs' names
    flags: tuple[str, ...]
    qemu: tuple[str, ...]
    multiply_add: str  # what its vectors of four are multiplied and added by, in assembly
    extra: tuple[str, ...] = ()  # for the engine alone

    @property
    def needed(self) -> pytest.MarkDecorator:
        return needs(f"{self.compiler}-g++", self.qemu[0])


SETUP = runpy.run_path(str(ROOT / "setup.py"))
"""The flags that the engine is built with where it is installed, but for -mcpu=native."""
PI4 = Machine(
    "aarch64", "aarch64-linux-gnu", ("-march=armv8-a",), ("qemu-aarch64", "-cpu", "cortex-a72"), r"fmla\s+v\d+\.4s"
)
PI2 = Machine(
    "armv7", "arm-linux-gnueabihf", ("-march=armv7-a", "-mfpu=neon-vfpv4"), ("qemu-arm", "-cpu", "cortex-a7"),
    r"vfma\.f32\s+q\d+", tuple(SETUP["ARM32"]),
)  # fmt: skip
MACHINES = [pytest.param(machine, id=machine.name, marks=machine.needed) for machine in (PI4, PI2)]


def call(*words: str | Path, **options: Any) -> subprocess.CompletedProcess[Any]:  # noqa: ANN401
    done = subprocess.run([str(word) for word in words], capture_output=True, check=False, **options)
    assert done.returncode == 0, (words, done.stderr[-3000:])
    return done


def engine_program(machine: Machine, *changed: str) -> Path:
    """The engine as a program, built once for the same sources and flags. changed: flags that come last."""
    compiler = f"{machine.compiler}-g++"
    flags = [*SETUP["flags_of"](compiler), "-Werror", *machine.flags, *machine.extra, *changed]
    sources = [*SETUP["SOURCES"], *SETUP["HEADERS"]]
    paths = [ROOT / source for source in sources] + [HERE / "driver.cpp"]
    key = hashlib.sha256(b"".join([repr(flags).encode(), *(path.read_bytes() for path in paths)])).hexdigest()[:12]
    program = ROOT / "build" / "arm" / f"{machine.name}-{key}"
    if not program.exists():
        program.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=program.parent) as scratch:
            objects = [Path(scratch) / f"{path.stem}.o" for path in paths if path.suffix == ".cpp"]
            for made, path in zip(objects, (path for path in paths if path.suffix == ".cpp"), strict=True):
                call(compiler, *flags, "-c", path, "-o", made)
            # Linked apart from -funsafe-math-optimizations, which would change the mode of the whole process.
            call(compiler, "-static", "-pthread", *objects, "-o", Path(scratch) / "program")
            (Path(scratch) / "program").rename(program)
    return program


class EmulatedEngine:
    """One network on an ARM machine's kernels; fulfils `base.Engine`. Arguments are taken as they come."""

    name = "native"

    def __init__(self, network: Architecture, machine: Machine, *changed: str) -> None:
        """Start the emulator. changed: flags of the compiler."""
        program = engine_program(machine, *changed)
        self._process = subprocess.Popen(
            [*machine.qemu, program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=1 << 20
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._in, self._out = self._process.stdin, self._process.stdout
        table, self._classes = LayerTable(network), network.classes
        for array in (table.layers, table.reads, table.shape, table.constants):
            self._write(array)
        self._in.flush()
        self.size, self.lanes, text = struct.unpack("<qq32s", self._read(48))
        self.instructions = text.rstrip(b"\0").decode()

    def close(self) -> None:
        """End the emulator; it must not have stopped by itself."""
        self._in.close()
        code = self._process.wait(timeout=60)
        self._out.close()
        assert code == 0

    def _write(self, array: np.ndarray[Any, Any]) -> None:
        self._in.write(struct.pack("<q", array.size) + np.ascontiguousarray(array).tobytes())

    def _read(self, count: int) -> bytes:
        found = self._out.read(count)
        assert len(found) == count, f"the emulated engine stopped: {self._process.wait(timeout=60)}"
        return found

    def _ask(
        self, what: int, weights: Floats, samples: Samples, indices: Indices, *, sgd: Sgd | None = None,
        seeds: Seeds | None = None, corrections: Floats | None = None, ceilings: Doubles | None = None,
        outputs: int = 0,
    ) -> None:  # fmt: skip
        steps, room = indices.shape[1:] if indices.ndim == 3 else (0, outputs)
        step = sgd or Sgd(0.0)
        self._in.write(
            struct.pack(
                "<6q6f", what, weights.size // self.size, steps, room, indices.ndim == 2, 2, step.learning_rate,
                step.momentum, step.weight_decay, step.proximal, step.clip, OPTIMISERS.index(step.optimiser),
            )
        )  # fmt: skip
        empty = np.empty(0)
        for array, kind in (
            (weights, np.float32), (samples.features, np.float32), (corrections, np.float32),
            (step.rates(indices) if steps else None, np.float32),
            (samples.labels, np.int32), (indices, np.int32), (seeds, np.uint64), (ceilings, np.float64),
        ):  # fmt: skip
            self._write(np.asarray(empty if array is None else array, kind))
        self._in.flush()

    def train(
        self, weights: Floats, samples: Samples, batches: Indices, sgd: Sgd, seeds: Seeds | None = None,
        corrections: Floats | None = None,
    ) -> Floats:  # fmt: skip
        self._ask(0, weights, samples, batches, sgd=sgd, seeds=seeds, corrections=corrections)
        return self._models(weights)

    def gradients(self, weights: Floats, samples: Samples, indices: Indices) -> Floats:
        self._ask(1, weights, samples, indices)
        return self._models(weights)

    def _models(self, weights: Floats) -> Floats:
        return np.frombuffer(self._read(4 * weights.size), np.float32).reshape(weights.shape).copy()

    def _scores(
        self, weights: Floats, samples: Samples, indices: Indices, ceilings: Doubles | None = None
    ) -> tuple[Doubles, Doubles]:
        self._ask(2, weights, samples, indices, ceilings=ceilings)
        losses, accuracies = np.frombuffer(self._read(16 * len(weights))).reshape(2, -1)
        return losses, accuracies

    def losses(self, weights: Floats, samples: Samples, indices: Indices, ceilings: Doubles | None = None) -> Doubles:
        return self._scores(weights, samples, indices, ceilings)[0]

    def accuracies(self, weights: Floats, samples: Samples, indices: Indices) -> Doubles:
        return self._scores(weights, samples, indices)[1]

    def sample_losses(self, weights: Floats, samples: Samples, indices: Indices) -> Doubles:
        self._ask(3, weights, samples, indices)
        return np.frombuffer(self._read(8 * len(indices)))

    def outputs(self, weights: Floats, samples: Samples, indices: Indices) -> Floats:
        self._ask(4, weights, samples, indices, outputs=self._classes)
        return np.frombuffer(self._read(4 * self._classes * len(indices)), np.float32).reshape(len(indices), -1)


@contextmanager
def emulated(network: Architecture, machine: Machine, *changed: str) -> Iterator[EmulatedEngine]:
    engine = EmulatedEngine(network, machine, *changed)
    try:
        yield engine
    finally:
        engine.close()


def c_program(text: str, machine: Machine, folder: Path, flags: Sequence[str] = ("-O2",)) -> Path:
    """An exported C file as a program that reads samples and writes logits."""
    source, made = folder / "model.c", folder / f"model-{len(list(folder.iterdir()))}"
    source.write_text(f'{text}\n#include "{HERE / "main.c"}"\n')
    call(f"{machine.compiler}-gcc", *STRICT, *machine.flags, *flags, "-static", source, "-o", made, "-lm")
    return made


def predicted(program: Path, machine: Machine, features: Floats, classes: int) -> Floats:
    """Logits of samples, (N, classes)."""
    done = call(*machine.qemu, program, input=features.tobytes())
    return np.frombuffer(done.stdout, np.float32).reshape(len(features), classes)
