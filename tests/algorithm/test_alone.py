"""Baselines without messages: the server alone, every worker alone, all data in one place."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cbdsl
from cbdsl.algorithm.alone import PATIENCE, AloneTraining, BaselineSamples, Central, LocalOnly, ServerOnly
from cbdsl.algorithm.messages import Order, ServerState
from cbdsl.arrays import Doubles, Floats, Samples
from cbdsl.data.partition import Split
from cbdsl.engines.engine import Sgd
from cbdsl.presets import PRESETS, preset
from cbdsl.runs.baseline import measure_server_alone
from cbdsl.runs.build import Experiment, UserParts
from cbdsl.runs.records import ServerAlone, Vote, summary_rows
from cbdsl.runs.resolve import resolve
from cbdsl.spec import LocalSpec, Spec
from support.helpers import blobs, cbdsl as command, perceptron, run_until, small_spec
from support.refusals import refused_as


def rows(*numbers: int) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    return np.array(numbers, np.int32)


PARTS = Split(rows(0, 1), rows(2), rows(3, 4), (rows(5, 6), rows(7)))


@pytest.mark.parametrize(("use", "expected"), [("training", [0, 1]), ("shared", [0, 1, 2])])
def test_the_server_trains_on_what_it_is_told_to_use(use: str, expected: list[int]) -> None:
    assigned = ServerOnly(use).assign(PARTS, shares_training=False)  # type: ignore[arg-type]
    assert ([own.tolist() for own in assigned.samples], assigned.deciding) == ([expected], 1)


def test_with_the_hold_out_a_model_without_it_chooses_the_round() -> None:
    assigned = ServerOnly("all").assign(PARTS, shares_training=False)
    assert [own.tolist() for own in assigned.samples] == [[0, 1, 2], [0, 1, 2, 3, 4]]
    assert list(range(2))[assigned.results] == [1]


@pytest.mark.parametrize("shared", [False, True])
def test_workers_learn_from_their_own_samples_and_perhaps_from_d_tr(shared: bool) -> None:
    assigned = LocalOnly().assign(PARTS, shared)
    extra = [0, 1] * shared
    assert [own.tolist() for own in assigned.samples] == [[5, 6, *extra], [7, *extra]]
    assert list(range(2))[assigned.results] == [0, 1]


def test_in_one_place_are_all_samples_but_the_hold_out() -> None:
    (everything,) = Central().assign(PARTS, shares_training=False).samples
    assert sorted(everything) == [0, 1, 2, 5, 6, 7]


class Falling:
    """An engine whose "training" adds 1 to a model of one number; its loss is the distance to 3."""

    size, name = 1, "falling"

    def train(self, weights: Floats, *_: object) -> Floats:
        return weights + 1

    def losses(self, weights: Floats, *_: object) -> Doubles:
        return np.abs(weights[:, 0].astype(np.float64) - 3.0)


def training(assigned: BaselineSamples, holdout: int = 1) -> AloneTraining:
    samples = Samples(np.zeros((5, 1), np.float32), np.zeros(5, np.int32))
    return AloneTraining(assigned, Falling(), samples, np.arange(holdout, dtype=np.int32), LocalSpec(), 0)  # type: ignore[arg-type]


def play(alone: AloneTraining, rounds: int) -> ServerState:
    state = ServerState(0, np.zeros(1, np.float32), np.inf)
    for number in range(1, rounds + 1):
        state, log = alone.play(state, Order(number, "average", (), 0.0, 0.1, None))
        assert (log.claims, log.verdicts, log.traffic) == ({}, (), ())
    return state


def test_the_result_is_the_model_with_the_lowest_loss_on_the_hold_out_and_training_goes_on() -> None:
    state = play(training(BaselineSamples((rows(0),), deciding=1)), 5)
    assert (state.global_best.tolist(), state.global_score, state.memory[0].tolist()) == ([3.0], 0.0, [[5.0]])


def test_a_round_in_which_the_model_with_the_hold_out_diverged_does_not_count() -> None:
    class Diverging(Falling):
        def train(self, weights: Floats, *_: object) -> Floats:
            return weights + np.array([[1], [1 if weights[1, 0] < 2 else 50]], np.float32)

    alone = replace(training(BaselineSamples((rows(0), rows(1)), deciding=1)), engine=Diverging())  # type: ignore[arg-type]
    assert play(alone, 5).global_best.tolist() == [2.0]  # round 3 is best for the first, but the second is at 52


def test_without_a_hold_out_the_last_round_counts() -> None:
    assert play(training(BaselineSamples((rows(0),), deciding=1), holdout=0), 5).global_best.tolist() == [5.0]


def test_training_stops_when_the_hold_out_sees_no_gain() -> None:
    weights, epochs = training(BaselineSamples((rows(0),), deciding=1)).train(np.zeros(1, np.float32))
    assert (weights.tolist(), epochs) == ([3.0], 3)
    assert epochs + PATIENCE < 60


def experiment(spec: Spec) -> Experiment:
    return Experiment.prepare(resolve(spec), UserParts(data=blobs(), model=perceptron), threads=1)


def test_the_server_alone_is_sgd_on_its_samples() -> None:
    made = experiment(small_spec(method="server-only", rounds=1, local__batch_size=1000, local__momentum=0.9))
    order = made.server.order(made.first_state())
    assert (order.participants, order.receivers) == ((), 0)
    state, _ = made.server.play(made.first_state(), order, made.swarm)
    own = np.concatenate([made.split.shared_training, made.split.shared_scoring])
    batch = np.full((1, 1, 1000), -1, np.int32)
    batch[0, 0, : len(own)] = own
    expected = made.engine.train(made.initial, made.dataset.train, batch, Sgd(0.05, 0.9, 0.0))[0]
    assert state.global_best == pytest.approx(expected, abs=1e-6)  # one batch: the order in it moves a sum alone


def test_workers_alone_are_measured_by_mean_and_worst_tenth_and_send_nothing() -> None:
    spec = small_spec(method="local-only", data__partition="shards", data__shards_per_worker=1)
    result = cbdsl.run(spec, model=perceptron, data=blobs())
    made = experiment(spec)
    state = made.first_state()
    for _ in range(spec.rounds):
        state, _ = made.server.play(state, made.server.order(state), made.swarm)
    each = made.test_accuracies(state)
    assert len(each) == spec.workers
    assert result.summary.final_accuracy == pytest.approx(each.mean())
    assert result.summary.worst_tenth == each.min() < each.mean()
    summary = result.summary
    assert (summary.uploads, summary.uplink_bytes, summary.downlink_bytes, summary.traffic) == (0, 0, 0, {})


@pytest.mark.parametrize("method", ["server-only", "local-only", "central"])
def test_a_resumed_baseline_has_the_numbers_of_one_that_was_not_stopped(method: str, tmp_path: Path) -> None:
    parts: dict[str, Any] = {"model": perceptron, "data": blobs()}
    whole = cbdsl.run(small_spec(method=method), **parts)
    run_until(2, small_spec(method=method), out=tmp_path / "run", **parts)
    again = cbdsl.resume(tmp_path / "run", **parts)
    assert [line.test_accuracy for line in again.rounds] == [line.test_accuracy for line in whole.rounds]
    assert np.array_equal(again.weights, whole.weights)


def test_the_ceiling_is_above_the_workers_alone() -> None:
    spec = small_spec(rounds=20)
    central, local = (
        cbdsl.run(replace(spec, method=method), model=perceptron, data=blobs()).summary.final_accuracy
        for method in ("central", "local-only")
    )
    assert central > local


def test_a_run_says_what_the_server_reaches_alone_if_asked() -> None:
    plain = cbdsl.run(small_spec(), model=perceptron, data=blobs()).summary
    asked = cbdsl.run(small_spec(), model=perceptron, data=blobs(), baseline=True).summary
    assert plain.server_alone is None
    assert asked.server_alone is not None
    assert (asked.server_alone.samples, plain) == (80, replace(asked, server_alone=None, seconds=plain.seconds))


def test_a_vote_is_counted_and_certified_by_hand() -> None:
    choices = np.array([[0, 1, 2, 0, 1], [0, 1, 2, 1, 2], [0, 0, 1, 2, 2], [0, 0, 2, 2, 1]])  # 4 workers, 5 samples
    labels = np.array([0, 0, 2, 2, 2])  # votes: 4:0; 2:2, the lower class wins; 3:1; 2:1; 2:2, lost to class 1
    assert Vote.count(choices, labels, 3, 0) == Vote(0.8, 0.6, 0)
    assert Vote.count(choices, labels, 3, 1) == Vote(0.8, 0.2, 1)
    assert Vote.count(choices, labels, 3, 2).certified == 0


def test_workers_that_never_meet_vote() -> None:
    spec = small_spec(method="local-only").with_settings({"options.local-only.attackers": 1})
    summary = cbdsl.run(spec, model=perceptron, data=blobs()).summary
    assert summary.vote is not None
    assert summary.vote.attackers == 1
    assert summary.final_accuracy - 0.1 < summary.vote.certified <= summary.vote.accuracy
    assert "whatever any 1 workers vote" in " ".join(line for _, line in summary_rows(summary))
    assert cbdsl.run(small_spec(rounds=1), model=perceptron, data=blobs()).summary.vote is None


@pytest.mark.parametrize(("alone", "named"), [(0.9, True), (0.5, False)])
def test_where_the_server_alone_is_better_the_summary_names_a_preset_in_which_the_swarm_pays(
    alone: float, named: bool
) -> None:
    summary = cbdsl.run(small_spec(rounds=1), model=perceptron, data=blobs()).summary
    made = replace(summary, final_accuracy=0.7, server_alone=ServerAlone(alone, 80, 5))
    text = " ".join(line for _, line in summary_rows(made))
    assert ("small-iid" in text) is named


@pytest.mark.parametrize("name", [name for name in PRESETS if name.startswith("small-")])
def test_small_presets_have_few_labelled_samples_and_verify(name: str) -> None:
    spec = preset(name)
    assert spec.data.shared_training + spec.data.shared_scoring + spec.data.holdout == (250 if "hapt" in name else 550)
    assert (spec.selection.name, spec.defence.guard, spec.init, spec.preset) == ("rotation", True, "server", name)
    resolve(spec)


def test_the_summary_says_how_many_honest_uploads_were_not_used() -> None:
    spec = small_spec(method="restart", selection__name="rotation", selection__k=4, attack__byzantine=2,
                      attack__name="label-flip")  # fmt: skip
    result = cbdsl.run(spec, model=perceptron, data=blobs())
    unused = [one for line in result.rounds for one in line.declined]
    honest = [one for one in unused if one not in result.summary.byzantine]
    assert 0 < len(honest) == result.summary.honest_unused < len(unused)
    assert f"{len(honest)} of them by honest workers" in " ".join(line for _, line in summary_rows(result.summary))


def test_runs_with_the_same_data_model_and_seed_share_the_measurement(tmp_path: Path) -> None:
    found = measure_server_alone(experiment(small_spec()), tmp_path)
    (kept,) = tmp_path.glob("*.json")
    kept.write_text(json.dumps({"accuracy": 0.5, "samples": 1, "epochs": 2}))
    assert measure_server_alone(experiment(small_spec(method="fedavg", rounds=3)), tmp_path).accuracy == 0.5
    assert measure_server_alone(experiment(small_spec(seed=1)), tmp_path).accuracy != 0.5
    kept.unlink()
    assert measure_server_alone(experiment(small_spec()), tmp_path) == found


SMALL_RUN = ("run", "--model", "softmax", "--workers", "2", "--rounds", "1", "--set", "data.shared_scoring=50")


def test_the_command_prints_the_line_and_leaves_it_out_on_request(tmp_path: Path) -> None:
    assert "server alone" in command(*SMALL_RUN, "--out", "with", cwd=tmp_path).stdout
    assert "server alone" not in command(*SMALL_RUN, "--no-baseline", "--out", "without", cwd=tmp_path).stdout
    found = [json.loads((tmp_path / name / "summary.json").read_text())["server_alone"] for name in ("with", "without")]
    assert (found[0]["samples"], found[1]) == (200, None)


@pytest.mark.parametrize(
    "words",
    [("--set", "codec.up=q4"), ("--byzantine", "1"), ("--participation", "0.5"), ("--shared", "both")],
)
def test_settings_of_workers_have_no_effect_on_the_server_alone(words: tuple[str, ...], tmp_path: Path) -> None:
    command(*SMALL_RUN, "--method", "server-only", *words, cwd=tmp_path).check_refused("no-effect", "server-only")


def test_what_it_trains_on_is_an_option_of_the_command(tmp_path: Path) -> None:
    words = ("--method", "server-only", "--use", "all", "--out", "run")
    assert command(*SMALL_RUN, *words, cwd=tmp_path).returncode == 0
    assert "all" in (tmp_path / "run" / "spec.toml").read_text()
    command(*SMALL_RUN, "--use", "all", cwd=tmp_path).check_refused("no-effect", "server-only")
    command(*SMALL_RUN, "--method", "server-only", "--use", "some", cwd=tmp_path).check_refused("unknown-name", "some")


def test_a_server_without_samples_is_refused() -> None:
    spec = small_spec(method="server-only", data__shared_training=0).with_settings(
        {"options.server-only.use": "training"}
    )
    with refused_as("out-of-range", "D_tr"):
        experiment(spec)


def test_there_is_nothing_to_serve(tmp_path: Path) -> None:
    words = ("serve", "--method", "server-only", "--workers", "2", "--broker", "mqtt://127.0.0.1:1", "--out", "served")
    command(*words, cwd=tmp_path).check_refused("conflict", "server-only")
