from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from safetensors.torch import load_file
from torch import nn

import cbdsl
from cbdsl import register
from cbdsl.algorithm.methods import CbDsl
from cbdsl.data.dataset import Dataset
from cbdsl.errors import UserError
from cbdsl.runs.baseline import measure_server_alone
from cbdsl.runs.build import Experiment, UserParts, draw_initial
from cbdsl.runs.records import FinalMeasurements, Summary, lowest_of, summarise
from cbdsl.runs.resolve import resolve
from cbdsl.spec import read as read_spec
from support.helpers import (
    After,
    StoppedError,
    blobs,
    module_named,
    perceptron,
    read_rounds,
    run_until,
    small_spec,
)
from support.refusals import refused_as


@pytest.mark.parametrize("method", register.method.names())
def test_every_method_runs_and_says_the_same_of_itself(method: str) -> None:
    result = cbdsl.run(small_spec(method=method), model=perceptron, data=blobs())
    summary = result.summary
    assert (summary.method, summary.rounds, len(result.rounds)) == (method, 5, 5)
    assert summary.uploads == sum(line.uploads for line in result.rounds)
    assert summary.uplink_bytes == sum(line.uplink_bytes for line in result.rounds)
    assert summary.final_accuracy == result.rounds[-1].test_accuracy
    if summary.worst_tenth is not None:  # a mean over workers
        return
    with torch.no_grad():
        predicted = result.model(torch.from_numpy(blobs().test.features)).argmax(1).numpy()
    assert float((predicted == blobs().test.labels).mean()) == pytest.approx(summary.final_accuracy)


def test_a_summary_has_the_accuracy_of_every_class() -> None:
    data, spec = blobs(), small_spec(method="fedavg")
    result = cbdsl.run(spec, model=perceptron, data=data)
    with torch.no_grad():
        predicted = result.model(torch.from_numpy(data.test.features)).argmax(1).numpy()
    right = predicted == data.test.labels
    expected = [round(float(right[data.test.labels == one].mean()), 4) for one in range(3)]
    assert result.summary.class_accuracy == expected
    assert len(set(expected)) > 1
    lacking = Dataset.from_arrays(
        data.train.features, data.train.labels, data.test.features[data.test.labels > 0],
        data.test.labels[data.test.labels > 0], name="lacking",
    )  # fmt: skip
    found = cbdsl.run(spec, model=perceptron, data=lacking).summary.class_accuracy
    assert found == [None, *expected[1:]]


def test_a_summary_has_the_worst_of_the_classes_an_attack_aims_at() -> None:
    class Aiming(cbdsl.Attack):
        aims = (0, 2, 7)  # there is no class 7

    def summary(byzantine: int) -> Summary:
        spec = small_spec(attack__byzantine=byzantine)
        return cbdsl.run(spec, model=perceptron, data=blobs(), attack=Aiming() if byzantine else None).summary

    found = summary(1)
    first, _, last = found.class_accuracy
    assert first is not None
    assert last is not None
    assert found.aimed_accuracy == min(first, last)
    assert summary(0).aimed_accuracy is None
    assert lowest_of([0.5, None, 0.25], (1,)) is None


def test_a_summary_counts_the_honest_workers_that_were_banned() -> None:
    result = cbdsl.run(small_spec(attack__byzantine=1, attack__name="liar"), model=perceptron, data=blobs())
    assert (result.summary.banned, result.summary.honest_banned) == (result.summary.byzantine, 0)
    lines = [replace(line, banned=[1, 4, 5]) for line in result.rounds]
    wrong = summarise(result.spec, "", lines, CbDsl(), result.engine, [4], FinalMeasurements(()))
    assert (wrong.banned, wrong.honest_banned) == ([1, 4, 5], 2)


@pytest.mark.parametrize("method", ["cb-dsl", "fedavg", "fedpso"])
def test_methods_with_gradients_learn(method: str) -> None:
    result = cbdsl.run(small_spec(method=method, rounds=10, local__epochs=6), model=perceptron, data=blobs())
    assert result.summary.final_accuracy > 0.8


def test_fedavg_uploads_everything_and_cbdsl_at_most_one_model_a_round() -> None:
    fedavg, swarm = (
        cbdsl.run(small_spec(method=method), model=perceptron, data=blobs()).summary for method in ("fedavg", "cb-dsl")
    )
    assert fedavg.uploads == 6 * 5
    assert fedavg.model_uplink_bytes == fedavg.fedavg_model_uplink_bytes == swarm.fedavg_model_uplink_bytes
    assert swarm.uploads <= 5
    assert swarm.traffic["score"] == [30, 120]
    assert "score" not in fedavg.traffic


def test_the_global_score_never_rises_and_is_what_was_measured() -> None:
    result = cbdsl.run(small_spec(rounds=12), model=perceptron, data=blobs())
    scores = [line.global_score for line in result.rounds]
    assert scores == sorted(scores, reverse=True)  # type: ignore[type-var]
    for line in result.rounds:
        assert all(verdict["measured"] == pytest.approx(verdict["claimed"], abs=1e-6) for verdict in line.verdicts)


@pytest.mark.slow
@given(
    seed=st.integers(0, 10_000),
    batch=st.integers(1, 25),
    model=st.sampled_from(["mlp", "softmax"]),
    method=st.sampled_from(["cb-dsl", "pso"]),
    partition=st.sampled_from(["iid", "shards", "dirichlet"]),
    draw=st.sampled_from(["worker", "parameter"]),
)
def test_no_honest_worker_is_ever_banned_in_a_clean_run(
    seed: int, batch: int, model: str, method: str, partition: str, draw: str
) -> None:
    data = blobs(seed=seed)
    spec = small_spec(
        seed=seed, method=method, local__batch_size=batch, data__partition=partition, swarm__draw=draw, rounds=4
    )
    result = cbdsl.run(spec, model=lambda: module_named(model, data.shape, data.classes), data=data)
    assert result.summary.banned == []
    assert not any(line.refuted or line.silent for line in result.rounds)


def test_a_liar_is_refuted_once_and_costs_nothing_else() -> None:
    clean, attacked = (
        cbdsl.run(small_spec(rounds=10, attack__byzantine=count), model=perceptron, data=blobs()) for count in (0, 1)
    )
    assert attacked.summary.banned == attacked.summary.byzantine
    assert [line.refuted for line in attacked.rounds] == [attacked.summary.byzantine] + [[]] * 9
    assert attacked.summary.final_accuracy > clean.summary.final_accuracy - 0.05
    assert attacked.summary.uploads <= 11


@pytest.mark.parametrize(
    ("method", "shared"), [("fedavg", "none"), ("fedavg", "train"), ("cb-dsl", "none"), ("fedpso", "none")]
)
def test_one_liar_breaks_every_method_that_cannot_verify(method: str, shared: str) -> None:
    """The fake model of a liar wins or poisons the mean; nobody is banned."""
    spec = small_spec(method=method, shared=shared, rounds=6, attack__byzantine=1, attack__scale=100.0)
    result = cbdsl.run(spec, model=perceptron, data=blobs())
    assert result.summary.banned == []
    assert result.summary.final_accuracy < 0.6  # chance is 0.33; a clean run is above 0.85


@pytest.mark.parametrize("method", register.method.names())
def test_threads_change_no_number(method: str, tmp_path: Path) -> None:
    for threads in (1, 2, 3):
        cbdsl.run(
            small_spec(method=method), model=perceptron, data=blobs(), out=tmp_path / str(threads), threads=threads
        )
    assert read_rounds(tmp_path / "1") == read_rounds(tmp_path / "2") == read_rounds(tmp_path / "3")


def test_a_run_in_a_folder_can_be_read_again(tmp_path: Path) -> None:
    result = cbdsl.run(small_spec(), model=perceptron, data=blobs(), out=tmp_path / "run")
    module = perceptron()
    module.load_state_dict(load_file(tmp_path / "run" / "model.safetensors"))
    np.testing.assert_array_equal(
        np.concatenate([p.detach().numpy().ravel() for p in module.parameters()]), result.weights
    )
    assert (
        json.loads((tmp_path / "run" / "summary.json").read_text())["final_accuracy"] == result.summary.final_accuracy
    )
    assert read_spec(tmp_path / "run" / "spec.toml") == result.spec
    assert result.spec.model == "custom"


def interrupted(spec: cbdsl.Spec, after: int, folder: Path) -> cbdsl.Result:
    """A run that is stopped after a round and resumed."""
    run_until(after, spec, model=perceptron, data=blobs(), out=folder)
    return cbdsl.resume(folder, model=perceptron, data=blobs())


@pytest.mark.parametrize("method", register.method.names())
def test_an_interrupted_run_resumes_to_the_same_numbers(method: str, tmp_path: Path) -> None:
    spec = small_spec(method=method, attack__byzantine=1)
    whole = cbdsl.run(spec, model=perceptron, data=blobs(), out=tmp_path / "whole")
    for stop_after in (1, 3, 5):
        folder = tmp_path / str(stop_after)
        resumed = interrupted(spec, stop_after, folder)
        assert read_rounds(folder) == read_rounds(tmp_path / "whole")
        np.testing.assert_array_equal(resumed.weights, whole.weights)


@pytest.mark.parametrize("method", ["cb-dsl", "restart"])
def test_a_run_that_was_stopped_after_a_round_without_a_better_model_remembers_the_one_before(
    method: str, tmp_path: Path
) -> None:
    spec = small_spec(method=method, rounds=12, local__learning_rate=2.0)
    whole = cbdsl.run(spec, model=perceptron, data=blobs(), out=tmp_path / "whole")
    kept = [line.round for line in whole.rounds[1:-1] if not line.accepted and whole.rounds[0].accepted]
    assert kept, "every round had a better model: nothing is tested"
    for number in kept[:2]:
        interrupted(spec, number, tmp_path / f"part-{number}")
        assert read_rounds(tmp_path / f"part-{number}") == read_rounds(tmp_path / "whole")


def test_a_run_stopped_before_its_first_checkpoint_starts_again(tmp_path: Path) -> None:
    def stop(_: cbdsl.RoundRecord) -> None:
        raise StoppedError

    with pytest.raises(StoppedError):
        cbdsl.run(small_spec(), model=perceptron, data=blobs(), out=tmp_path / "part", callbacks=[After(stop)])
    assert not (tmp_path / "part" / "checkpoint.npz").exists()
    cbdsl.resume(tmp_path / "part", model=perceptron, data=blobs())
    cbdsl.run(small_spec(), model=perceptron, data=blobs(), out=tmp_path / "whole")
    assert read_rounds(tmp_path / "part") == read_rounds(tmp_path / "whole")


def test_a_finished_run_resumes_to_itself(tmp_path: Path) -> None:
    first = cbdsl.run(small_spec(), model=perceptron, data=blobs(), out=tmp_path / "run")
    before = read_rounds(tmp_path / "run")
    again = cbdsl.resume(tmp_path / "run", model=perceptron, data=blobs())
    assert read_rounds(tmp_path / "run") == before
    assert again.summary.final_accuracy == first.summary.final_accuracy


KILLABLE = """
import sys, cbdsl, cbdsl.runs.loop
sys.path.insert(0, sys.argv[1])
from support.helpers import blobs, perceptron, small_spec
cbdsl.runs.loop._CHECKPOINT_SECONDS = cbdsl.runs.loop._CHECKPOINT_SHARE = 0.0
cbdsl.run(small_spec(rounds=600, attack__byzantine=1), model=perceptron, data=blobs(), out=sys.argv[2])
"""


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "whole"
    cbdsl.run(small_spec(rounds=600, attack__byzantine=1), model=perceptron, data=blobs(), out=folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("delay", [0.0, 0.31, 0.93])
def test_a_killed_process_resumes_to_the_same_numbers(delay: float, tmp_path: Path, uninterrupted: Path) -> None:
    """SIGKILL at some moment after the first round, with a checkpoint in the making most of the time."""
    process = subprocess.Popen([sys.executable, "-c", KILLABLE, str(Path(__file__).parents[1]), str(tmp_path / "part")])
    deadline = time.monotonic() + 60
    while not (tmp_path / "part" / "rounds.jsonl").exists() and time.monotonic() < deadline:
        time.sleep(0.002)
    time.sleep(delay)
    os.kill(process.pid, signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    assert not (tmp_path / "part" / "summary.json").exists(), "it was killed too late for this test to mean anything"
    cbdsl.resume(tmp_path / "part", model=perceptron, data=blobs())
    assert read_rounds(tmp_path / "part") == read_rounds(uninterrupted)
    weights = [load_file(folder / "model.safetensors") for folder in (tmp_path / "part", uninterrupted)]
    assert all(torch.equal(weights[0][key], weights[1][key]) for key in weights[1])


@pytest.mark.parametrize("damage", ["truncated", "rubbish", "empty", "other"])
def test_a_corrupt_checkpoint_is_an_error_and_nothing_is_changed(damage: str, tmp_path: Path) -> None:
    cbdsl.run(small_spec(), model=perceptron, data=blobs(), out=tmp_path / "run")
    path = tmp_path / "run" / "checkpoint.npz"
    if damage == "other":
        cbdsl.run(small_spec(seed=9), model=perceptron, data=blobs(), out=tmp_path / "other")
        (tmp_path / "other" / "checkpoint.npz").replace(path)
    else:
        whole = path.read_bytes()
        path.write_bytes({"truncated": whole[: len(whole) // 2], "rubbish": b"rubbish", "empty": b""}[damage])
    before = {file.name: file.read_bytes() for file in (tmp_path / "run").iterdir()}
    with pytest.raises(UserError, match=r"checkpoint.npz (is damaged|belongs to another spec)"):
        cbdsl.resume(tmp_path / "run", model=perceptron, data=blobs())
    assert {file.name: file.read_bytes() for file in (tmp_path / "run").iterdir()} == before


def test_a_run_does_not_go_on_with_another_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cbdsl.run(small_spec(), model=perceptron, data=blobs(), out=tmp_path / "run")
    monkeypatch.setattr("cbdsl.runs.build.Experiment.key", "another-engine")
    with refused_as("wrong-run", "checkpoint.npz", "another-engine"):
        cbdsl.resume(tmp_path / "run", model=perceptron, data=blobs())


def test_a_model_that_the_native_engine_cannot_run_is_announced(caplog: pytest.LogCaptureFixture) -> None:
    def unusual() -> nn.Module:
        return nn.Sequential(nn.Linear(8, 6), nn.PReLU(), nn.Linear(6, 3))

    result = cbdsl.run(small_spec(rounds=1), model=unusual, data=blobs())
    assert result.summary.engine == "torch"
    assert [record.message.startswith("torch engine: ") for record in caplog.records] == [True]


def test_a_folder_in_use_is_left_alone(tmp_path: Path) -> None:
    def second(_: cbdsl.RoundRecord) -> None:
        with refused_as("conflict", tmp_path / "run"):
            cbdsl.resume(tmp_path / "run", model=perceptron, data=blobs())

    cbdsl.run(small_spec(rounds=1), model=perceptron, data=blobs(), out=tmp_path / "run", callbacks=[After(second)])


def test_a_custom_run_is_resumed_with_its_model_and_data(tmp_path: Path) -> None:
    cbdsl.run(small_spec(), model=perceptron, data=blobs(), out=tmp_path / "run")
    with pytest.raises(UserError, match="neither a data set by name"):
        cbdsl.resume(tmp_path / "run")
    with pytest.raises(UserError, match="given in Python"):
        cbdsl.resume(tmp_path / "run", data=blobs())


def test_the_same_seed_gives_every_method_the_same_data() -> None:
    from cbdsl.runs.build import Experiment, UserParts  # noqa: PLC0415
    from cbdsl.runs.resolve import resolve  # noqa: PLC0415

    stages = [
        Experiment.prepare(resolve(small_spec(method=method)), UserParts(model=perceptron, data=blobs()), 1)
        for method in register.method.names()
    ]
    for stage in stages[1:]:
        np.testing.assert_array_equal(np.stack(stage.split.workers), np.stack(stages[0].split.workers))


def test_impossible_sizes_are_found_before_a_folder_is_made(tmp_path: Path, mnist: Dataset) -> None:
    with pytest.raises(UserError, match="need 2,000 shards"):
        cbdsl.run(cbdsl.preset("paper-noniid").with_settings({"workers": 1000}), data=mnist, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_the_same_run_writes_the_same_model_file_to_the_byte(tmp_path: Path) -> None:
    files = []
    for name in ("one", "other"):
        cbdsl.run(small_spec(rounds=1), model=perceptron, data=blobs(), out=tmp_path / name)
        files.append((tmp_path / name / "model.safetensors").read_bytes())
    assert files[0] == files[1]
    assert len(load_file(tmp_path / "one" / "model.safetensors")) == 4


def test_a_run_can_start_from_what_the_server_learns_from_d_tr() -> None:
    spec = small_spec(init="server", data__shared_training=60)
    made = Experiment.prepare(resolve(spec), UserParts(data=blobs(), model=perceptron), threads=1)
    drawn = Experiment.prepare(resolve(replace(spec, init="")), UserParts(data=blobs(), model=perceptron), threads=1)
    accuracy = {name: one.test_accuracy(one.first_state()) for name, one in (("server", made), ("drawn", drawn))}
    assert accuracy["server"] > accuracy["drawn"] + 0.2


def test_where_the_server_takes_part_its_model_has_learned_from_d_sc_too() -> None:
    """Where claims compete with F^g it has not: no claim would beat a model that was trained on D_sc."""
    plain = small_spec(init="server", method="restart", defence__guard=True)
    losses = {}
    for name in ("best", "rotation"):
        made = Experiment.prepare(
            resolve(plain.with_settings({"selection.name": name})), UserParts(data=blobs(), model=perceptron), threads=1
        )
        drawn = replace(made, spec=replace(made.spec, init=""))
        losses[name] = made.first_state().global_score
        assert measure_server_alone(made) == measure_server_alone(replace(drawn, initial=draw_initial(
            drawn.spec, made.network)))  # fmt: skip
    assert losses["rotation"] < losses["best"] / 2


def test_a_run_from_the_servers_model_resumes_from_its_folder(tmp_path: Path) -> None:
    parts: dict[str, Any] = {"model": perceptron, "data": blobs()}
    spec = small_spec(init="server")
    whole = cbdsl.run(spec, **parts)
    run_until(2, spec, out=tmp_path / "run", **parts)
    assert (tmp_path / "run" / "init.safetensors").is_file()
    again = cbdsl.resume(tmp_path / "run", **parts)
    assert np.array_equal(again.weights, whole.weights)
