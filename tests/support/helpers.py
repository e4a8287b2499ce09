"""Small data and specs that tests share."""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import numpy as np
import pytest
from torch import nn

from cbdsl import register
from cbdsl.algorithm.messages import Order, ServerState
from cbdsl.algorithm.methods import Conversation
from cbdsl.arrays import Floats
from cbdsl.cli.main import main
from cbdsl.data.dataset import Dataset
from cbdsl.models.to_torch import module_of
from cbdsl.runs import loop
from cbdsl.runs.callbacks import Callback
from cbdsl.runs.records import RoundRecord
from cbdsl.spec import Spec

FEATURES, CLASSES = 8, 3


def blobs(train: int = 600, test: int = 150, seed: int = 7) -> Dataset:
    """Three clouds of points in eight dimensions, somewhat mixed: learnable in milliseconds."""
    rng = np.random.default_rng(seed)
    centres = rng.normal(size=(CLASSES, FEATURES))

    def draw(count: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        labels = rng.integers(0, CLASSES, count)
        return centres[labels] + rng.normal(size=(count, FEATURES)), labels

    return Dataset.from_arrays(*draw(train), *draw(test), name="blobs")


def perceptron() -> nn.Module:
    """A small network for the blobs."""
    return nn.Sequential(nn.Linear(FEATURES, 6), nn.Tanh(), nn.Linear(6, CLASSES))


def small_spec(**settings: object) -> Spec:
    """A run on the blobs that takes a fraction of a second; keywords use __ for a dot."""
    base: dict[str, object] = {
        "workers": 6,
        "rounds": 5,
        "data.samples_per_worker": 40,
        "data.shared_training": 20,
        "data.shared_scoring": 60,
        "data.holdout": 30,
        "data.shard_size": 20,
        "local.learning_rate": 0.05,
    }
    base |= {key.replace("__", "."): value for key, value in settings.items()}
    return Spec().with_settings(base)


SMALL = [
    "--model",
    "softmax",
    "--workers",
    "4",
    "--set",
    "data.shared_scoring=200",
    "--set",
    "data.samples_per_worker=50",
]


@dataclass(frozen=True)
class CommandResult:
    """What a command printed, its exit code, and the code of the error that it ended with."""

    returncode: int
    stdout: str
    stderr: str
    error: str = ""

    def check_refused(self, code: str, *facts: str) -> None:
        """Check that the command ended with one message, this code and these facts in it, and printed no result."""
        assert (self.returncode, self.stdout, self.error) == (2, "", code), self.stderr
        assert self.stderr.strip().splitlines()[-1].startswith("cbdsl: ")
        assert "Traceback" not in self.stderr
        assert not [fact for fact in facts if fact not in self.stderr], self.stderr


def cbdsl(*words: str, cwd: Path) -> CommandResult:
    """Run the command in this process, as a user would in the folder `cwd`."""
    out, err = (io.TextIOWrapper(io.BytesIO(), "utf-8", errors="backslashreplace") for _ in range(2))
    modules, plugins, code, error = set(sys.modules), set(register._loaded), 0, ""
    with (
        contextlib.chdir(cwd),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        mock.patch.dict(os.environ, _ENVIRONMENT),
        mock.patch.object(sys, "argv", ["cbdsl", *words]),
        mock.patch.object(sys, "path", [str(cwd), *sys.path]),
    ):
        try:
            main()
        except SystemExit as ended:
            code, error = _exit_code(ended), getattr(ended.__context__, "code", "")
        finally:
            _forget_plugins(plugins, modules, cwd)
    for stream in (out, err):
        stream.seek(0)
    return CommandResult(code, out.read(), err.read(), error)


_ENVIRONMENT = {"COLUMNS": "100", "NO_COLOR": "1"}


def _exit_code(ended: SystemExit) -> int:
    return ended.code if isinstance(ended.code, int) else int(ended.code is not None)


def _forget_plugins(plugins: set[str], modules: set[str], cwd: Path) -> None:
    """Undo what a command loaded from files, so that the next one starts without it."""
    for name in set(register._loaded) - plugins:
        register._forget(register._loaded.pop(name)[1])
    for name in set(sys.modules) - modules:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(cwd)):
            del sys.modules[name]


def cbdsl_process(*words: str, cwd: Path) -> CommandResult:
    """Run the command in a process of its own, where that matters."""
    done = subprocess.run(
        [sys.executable, "-m", "cbdsl", *words], cwd=cwd, capture_output=True, text=True, check=False,
        env={**os.environ, **_ENVIRONMENT},
    )  # fmt: skip
    return CommandResult(done.returncode, done.stdout, done.stderr)


def shape_for(model: str) -> tuple[int, ...]:
    """Samples that one of the package's networks takes."""
    return {"har-cnn": (6, 128), "har-gru": (6, 128), "mobilenet-025": (3, 32, 32)}.get(model, (1, 28, 28))


def module_named(name: str, shape: tuple[int, ...], classes: int) -> nn.Module:
    """One of the package's networks as a torch module."""
    return module_of(register.model.get(name)(shape, classes))


def fresh_state(initial: Floats, score: float = math.inf) -> ServerState:
    """A server before round 1 that nobody has heard of."""
    return ServerState(0, initial, score)


def next_order(state: ServerState, task: Conversation, workers: Sequence[int], inertia: float, rate: float) -> Order:
    """The order that starts the next round, to everybody who is not banned."""
    participants = tuple(worker for worker in workers if worker not in state.banned)
    receivers = sum(state.told.get(worker, -1) < state.version for worker in participants)
    news = state.global_best if receivers else None
    payload = receivers * 4 * len(state.global_best)
    kind: Literal["swarm", "average"] = "swarm" if task == "swarm" else "average"
    return Order(state.round + 1, kind, participants, inertia, rate, news, receivers, payload, state.version)


class After(Callback):
    """Calls a function after every round."""

    def __init__(self, call: Callable[[RoundRecord], None]) -> None:
        self._call = call

    def round(self, record: RoundRecord) -> None:
        self._call(record)


class StoppedError(Exception):
    """Ends a run that a test stops."""


def run_until(last: int, spec: Spec, **arguments: Any) -> None:  # noqa: ANN401 - those of `cbdsl.run`
    """Run a spec, with a checkpoint after every round, and stop it after one of them."""

    def stop(record: RoundRecord) -> None:
        if record.round == last:
            raise StoppedError

    with pytest.MonkeyPatch.context() as patch, pytest.raises(StoppedError):
        patch.setattr(loop, "_CHECKPOINT_SECONDS", 0.0)
        patch.setattr(loop, "_CHECKPOINT_SHARE", 0.0)
        loop.run(spec, callbacks=[After(stop)], **arguments)


def read_rounds(folder: Path) -> list[dict[str, Any]]:
    """The rounds of a run, but for the time they took."""
    records = [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]
    return [{key: value for key, value in record.items() if key != "seconds"} for record in records]
