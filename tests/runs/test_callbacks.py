"""What hears of a run, and what a run leaves in Python."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import cbdsl
from cbdsl.runs import loop
from cbdsl.runs.callbacks import (
    Bar,
    Callback,
    MLflow,
    RunStart,
    TensorBoard,
    WandB,
    default_callbacks,
    flat,
)
from cbdsl.runs.records import RoundRecord
from cbdsl.runs.result import Result
from cbdsl.util.console import progress_html
from support.helpers import SMALL, blobs, cbdsl as run_command, perceptron, small_spec
from support.refusals import refused_as


class BrokenError(RuntimeError):
    """A callback's own."""


class Breaks(Callback):
    """Raises after a round, or at another time."""

    def __init__(self, when: int | str) -> None:
        self.when = when

    def start(self, run: RunStart) -> None:  # noqa: ARG002
        if self.when == "start":
            raise BrokenError

    def round(self, record: RoundRecord) -> None:
        if self.when == record.round:
            raise BrokenError

    def finish(self, result: Result) -> None:  # noqa: ARG002
        if self.when == "finish":
            raise BrokenError


class Notes(Callback):
    """Writes down what it hears."""

    def __init__(self) -> None:
        self.heard: list[Any] = []
        self.started: RunStart | None = None

    def start(self, run: RunStart) -> None:
        self.started = run
        self.heard.append("start")

    def round(self, record: RoundRecord) -> None:
        self.heard.append(record.round)

    def finish(self, result: Result) -> None:
        self.heard.append(result.summary.final_accuracy)

    def close(self) -> None:
        self.heard.append("close")


@pytest.fixture(autouse=True)
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "_CHECKPOINT_SECONDS", 0.0)
    monkeypatch.setattr(loop, "_CHECKPOINT_SHARE", 0.0)


def run(*callbacks: Callback, **arguments: Any) -> Result:  # noqa: ANN401
    spec = small_spec(model="softmax", rounds=4, **arguments.pop("settings", {}))
    return cbdsl.run(spec, data=blobs(), callbacks=callbacks, **arguments)


def test_a_callback_hears_everything_in_order() -> None:
    notes = Notes()
    result = run(notes)
    assert notes.heard == ["start", 1, 2, 3, 4, result.summary.final_accuracy, "close"]
    assert notes.started is not None
    assert notes.started.spec == result.spec


@pytest.mark.parametrize(("when", "played"), [("start", 0), (1, 1), (3, 3), (4, 4), ("finish", 4)])
def test_an_error_in_a_callback_loses_nothing(tmp_path: Path, when: int | str, played: int) -> None:
    """The round is in the folder, other callbacks have heard of it, and the run goes on."""
    whole, notes = run(), Notes()
    with pytest.raises(BrokenError):
        run(Breaks(when), notes, out=tmp_path / "run")
    assert len(whole.rounds) == 4
    rounds = tmp_path / "run" / "rounds.jsonl"
    assert (rounds.read_bytes().count(b"\n") if rounds.exists() else 0) == played
    assert [each for each in notes.heard if isinstance(each, int)] == list(range(1, played + 1))
    assert notes.heard[-1] == "close"
    again = Notes()
    result = cbdsl.resume(tmp_path / "run", data=blobs(), callbacks=[again])
    np.testing.assert_array_equal(result.weights, whole.weights)
    assert again.heard[1:-2] == list(range(played + 1, 5))
    assert again.started is not None
    assert [record.round for record in again.started.before] == list(range(1, played + 1))


SCALARS = {"accuracy", "global_score", "uplink_bytes", "downlink_bytes", "uploads", "bans", "seconds"}


def accumulated(folder: Path) -> Any:  # noqa: ANN401
    accumulator = import_module("tensorboard.backend.event_processing.event_accumulator")
    events = accumulator.EventAccumulator(str(folder))
    events.Reload()
    return events


def test_tensorboard_reads_what_was_written(tmp_path: Path) -> None:
    result = run(TensorBoard(tmp_path / "board"), settings={"attack__byzantine": 1})
    events = accumulated(tmp_path / "board")
    assert set(events.Tags()["scalars"]) == SCALARS
    found = {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in SCALARS}
    uplink = np.cumsum([line.uplink_bytes for line in result.rounds])
    downlink = np.cumsum([line.downlink_bytes for line in result.rounds])
    uploads = np.cumsum([line.uploads for line in result.rounds])
    for number, line in enumerate(result.rounds):
        expected = {
            "accuracy": line.test_accuracy,
            "global_score": line.global_score,
            "uplink_bytes": uplink[number],
            "downlink_bytes": downlink[number],
            "uploads": uploads[number],
            "bans": len(line.banned),
            "seconds": line.seconds,
        }
        for tag, value in expected.items():
            assert found[tag][number] == (line.round, pytest.approx(value, rel=1e-6))
    assert {"spec", "_hparams_/session_start_info"} <= set(events.Tags()["tensors"])
    text = events.Tensors("spec")[0].tensor_proto.string_val[0].decode()
    assert 'method = "cb-dsl"' in text


def test_tensorboard_of_a_resumed_run_goes_on_counting(tmp_path: Path) -> None:
    whole = run(TensorBoard(tmp_path / "whole"))
    with pytest.raises(BrokenError):
        run(TensorBoard(tmp_path / "parts"), Breaks(2), out=tmp_path / "run")
    cbdsl.resume(tmp_path / "run", data=blobs(), callbacks=[TensorBoard(tmp_path / "parts")])
    for tag in ("accuracy", "uplink_bytes", "uploads"):
        one, two = (
            [(event.step, event.value) for event in accumulated(tmp_path / name).Scalars(tag)]
            for name in ("whole", "parts")
        )
        assert one == two
    assert len(whole.rounds) == 4


def test_tensorboard_leaves_out_a_score_that_there_is_not(tmp_path: Path) -> None:
    run(TensorBoard(tmp_path), settings={"method": "fedavg"})
    assert set(accumulated(tmp_path).Tags()["scalars"]) == SCALARS - {"global_score"}


class FakeRun:
    def __init__(self) -> None:
        self.logged: list[tuple[dict[str, float], int]] = []
        self.summary: dict[str, float] = {}
        self.code: int | None = None

    def log(self, values: dict[str, float], step: int) -> None:
        self.logged.append((values, step))

    def finish(self, exit_code: int) -> None:
        self.code = exit_code


def test_weights_and_biases(monkeypatch: pytest.MonkeyPatch) -> None:
    fake, made, run_object = ModuleType("wandb"), [], FakeRun()

    def init(**settings: Any) -> FakeRun:  # noqa: ANN401
        made.append(settings)
        return run_object

    monkeypatch.setattr(fake, "init", init, raising=False)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    callback = WandB("swarm", mode="offline")
    assert not made  # nothing is opened before a run starts
    result = run(callback)
    assert (made[0]["project"], made[0]["mode"]) == ("swarm", "offline")
    assert made[0]["config"]["local"]["learning_rate"] == 0.05
    assert [step for _, step in run_object.logged] == [1, 2, 3, 4]
    assert run_object.logged[-1][0]["uplink_bytes"] == result.summary.uplink_bytes
    assert run_object.summary["final_accuracy"] == result.summary.final_accuracy
    assert run_object.code == 0
    with pytest.raises(BrokenError):
        run(callback, Breaks(2))
    assert run_object.code == 1


def test_mlflow(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = ModuleType("mlflow")
    calls: list[tuple[str, Any]] = []
    for name in ("set_experiment", "start_run", "log_params", "log_metrics", "end_run"):
        monkeypatch.setattr(
            fake, name, lambda *given, _name=name, **named: calls.append((_name, (given, named))), raising=False
        )
    monkeypatch.setitem(sys.modules, "mlflow", fake)
    callback = MLflow("swarm", run_name="one")
    assert not calls
    result = run(callback)
    assert [name for name, _ in calls] == [
        "set_experiment", "start_run", "log_params", *["log_metrics"] * 5, "end_run",
    ]  # fmt: skip
    assert calls[0][1] == (("swarm",), {})
    assert calls[1][1] == ((), {"run_name": "one"})
    assert calls[2][1][0][0]["data.shared_scoring"] == 60
    (values,), named = calls[6][1]
    assert (values["uploads"], named) == (result.summary.uploads, {"step": 4})
    assert calls[-1][1] == (("FINISHED",), {})
    calls.clear()
    with pytest.raises(BrokenError):
        run(callback, Breaks(1))
    assert calls[-1] == ("end_run", (("FAILED",), {}))


@pytest.mark.parametrize(
    ("module", "make", "words"),
    [
        ("tensorboard", lambda: TensorBoard("x"), "TensorBoard is not installed. Install it: pip install tensorboard"),
        ("wandb", lambda: WandB("x"), "Weights & Biases is not installed. Install it: pip install wandb"),
        ("mlflow", lambda: MLflow("x"), "MLflow is not installed. Install it: pip install mlflow"),
    ],
)
def test_a_library_that_is_missing(monkeypatch: pytest.MonkeyPatch, module: str, make: Any, words: str) -> None:  # noqa: ANN401
    monkeypatch.setitem(sys.modules, module, None)
    with refused_as("missing-package", words):
        make()


def test_the_bar_is_quiet_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    run(Bar())
    assert capsys.readouterr() == ("", "")


def test_the_bar_in_a_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "120")
    for _ in range(2):  # a bar that was not closed would stand in the way of the next
        with pytest.raises(BrokenError):
            run(Bar(), Breaks(2))
    run(Bar())
    errors = capsys.readouterr().err
    assert "4/4" in errors
    assert "accuracy" in errors


@pytest.fixture
def notebook(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A kernel as IPython has it: display gives a handle, which can be updated."""
    shown: list[str] = []
    ipython, display = ModuleType("IPython"), ModuleType("IPython.display")

    def show(content: str, display_id: bool) -> Any:  # noqa: ANN401
        assert display_id
        shown.append(content)
        return SimpleNamespace(update=shown.append)

    monkeypatch.setattr(ipython, "get_ipython", lambda: SimpleNamespace(kernel=object()), raising=False)
    monkeypatch.setattr(display, "HTML", str, raising=False)
    monkeypatch.setattr(display, "display", show, raising=False)
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    return shown


def test_the_bar_in_a_notebook(notebook: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert [type(each) for each in default_callbacks()] == [Bar]
    result = cbdsl.run(small_spec(model="softmax", rounds=4), data=blobs())
    assert "round 0/4" in notebook[0]
    assert "round 4/4" in notebook[-1]
    assert f"accuracy {result.summary.final_accuracy:.2%}" in notebook[-1]
    assert all(page.startswith("<pre>") for page in notebook)
    assert capsys.readouterr() == ("", "")


def test_no_bar_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    assert default_callbacks() == []
    ipython = ModuleType("IPython")
    monkeypatch.setattr(ipython, "get_ipython", SimpleNamespace, raising=False)  # a terminal's IPython
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    assert default_callbacks() == []


def test_a_bar_is_as_long_as_the_run() -> None:
    assert "round 3/6  half of it" in progress_html(3, 6, "half of it")
    assert progress_html(6, 6, "").count("━") == 60


def test_a_spec_as_flat_settings() -> None:
    found = flat(small_spec(plugins=["a.py", "b.py"], method="fedprox", options__fedprox__mu=0.5))
    assert found["plugins"] == "a.py, b.py"
    assert found["swarm.inertia"] == "1.0, 0.0"
    assert found["options.fedprox.mu"] == 0.5
    assert found["workers"] == 6


# What a run leaves.


def test_a_result_prints_as_a_short_summary(tmp_path: Path) -> None:
    result = run(out=tmp_path / "run")
    text = repr(result)
    assert f"{result.summary.final_accuracy:.2%} on the test set" in text
    assert f"folder        {tmp_path / 'run'}" in text
    assert 4 <= len(text.splitlines()) <= 10
    assert max(map(len, text.splitlines())) < 200


@pytest.mark.parametrize("model", ["softmax", perceptron])
def test_predictions_are_torchs(model: Any) -> None:  # noqa: ANN401
    result = cbdsl.run(small_spec(rounds=2), model=model, data=blobs(), callbacks=[])
    assert not result.model.training
    features = blobs().test.features
    with torch.no_grad():
        expected = result.model(torch.from_numpy(features)).argmax(1).numpy()
    np.testing.assert_array_equal(result.predict(features), expected)
    np.testing.assert_array_equal(result.predict(features.tolist()), expected)
    assert float((expected == blobs().test.labels).mean()) == pytest.approx(result.summary.final_accuracy)
    assert result.predict(features[:0]).shape == (0,)
    with refused_as("wrong-shape", "(N, *(8,))", "given (8,)"):
        result.predict(features[0])


def test_rounds_as_a_frame_and_as_csv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = run()
    frame = result.to_frame()
    assert list(frame.index) == [1, 2, 3, 4]
    assert frame["test_accuracy"].tolist() == [line.test_accuracy for line in result.rounds]
    assert frame["uplink_bytes"].sum() == result.summary.uplink_bytes
    result.to_csv(tmp_path / "rounds.csv")
    assert (tmp_path / "rounds.csv").read_text().count("\n") == 5
    monkeypatch.setitem(sys.modules, "pandas", None)
    with refused_as("missing-package", "pip install pandas"):
        result.to_frame()


def test_the_command_line_names_loggers(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    done = run_command("run", *SMALL, "--rounds", "2", "--out", "run", "--log", "tensorboard", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    done = run_command("resume", "run", "--log", "tensorboard=board", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for place in ("run/tensorboard", "board"):
        assert list((tmp_path / place).glob("events.out.tfevents.*"))
    run_command("run", *SMALL, "--log", "excel", cwd=tmp_path).check_refused("unknown-name", "excel", "mlflow")
