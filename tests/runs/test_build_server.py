from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from torch import nn

import cbdsl
from cbdsl import register
from cbdsl.algorithm.selection import COPIED
from cbdsl.algorithm.worker_round import pad_rows
from cbdsl.arrays import Floats
from cbdsl.data.dataset import Dataset
from cbdsl.engines.native_engine import available
from cbdsl.runs.build import Experiment, UserParts, batch_losses
from cbdsl.runs.resolve import resolve
from cbdsl.spec import Spec
from support.helpers import blobs, perceptron, run_until, small_spec
from support.refusals import refused_as


def stage_of(spec: Spec) -> Experiment:
    return Experiment.prepare(resolve(spec), UserParts(model=perceptron, data=blobs()), 1)


@pytest.mark.parametrize("name", [*register.aggregator.names(), "nnm+median", "nnm+krum"])
def test_every_aggregator_plays_a_run_with_attackers(name: str) -> None:
    spec = small_spec(
        method="fedavg", shared="train", defence__aggregator=name, attack__byzantine=2, attack__name="nan"
    )
    result = cbdsl.run(spec, model=perceptron, data=blobs(), threads=1)
    assert result.summary.final_accuracy > 0.5
    assert np.isfinite(result.weights).all()


@pytest.mark.parametrize("name", [*register.aggregator.names(), "nnm+median", "nnm+krum", "nnm+bulyan"])
@pytest.mark.parametrize("declared", [-1, 0, 2])
def test_every_aggregator_plays_a_run_without_the_absent(name: str, declared: int) -> None:
    """Of five workers two are missing: three models, and still two attackers to reckon with."""
    spec = small_spec(
        method="fedavg", shared="train", workers=5, defence__aggregator=name, defence__declared=declared,
        attack__byzantine=2, attack__name="absent",
    )  # fmt: skip
    result = cbdsl.run(spec, model=perceptron, data=blobs(), threads=1)
    there = sorted(set(range(5)) - set(result.summary.byzantine))
    assert [(line.accepted, line.silent) for line in result.rounds] == [(there, result.summary.byzantine)] * 5
    assert result.summary.uploads == 3 * 5
    assert result.summary.final_accuracy > 0.5
    assert np.isfinite(result.weights).all()


@pytest.mark.parametrize("settings", [{}, {"defence__guard": True, "defence__commitment": True}])
def test_cbdsl_never_invites_and_never_bans_the_absent(settings: dict[str, object]) -> None:
    result = cbdsl.run(
        small_spec(attack__byzantine=2, attack__name="absent", **settings), model=perceptron, data=blobs(), threads=1
    )
    gone = result.summary.byzantine
    for line in result.rounds:
        assert sorted(map(int, line.set_aside)) == gone
        assert not {verdict["worker"] for verdict in line.verdicts} & set(gone)
        assert not line.banned
    assert result.summary.final_accuracy > 0.5


def test_the_mean_by_rule_is_fedavg() -> None:
    plain = cbdsl.run(small_spec(method="fedavg"), model=perceptron, data=blobs())
    trimmed = small_spec(method="fedavg", defence__aggregator="trimmed-mean", defence__declared=0)
    np.testing.assert_allclose(
        plain.weights, cbdsl.run(trimmed, model=perceptron, data=blobs()).weights, rtol=1e-4, atol=1e-5
    )


def test_declared_and_actual_attackers_are_separate() -> None:
    assert resolve(small_spec(attack__byzantine=2)).defence.declared == 2
    assert resolve(small_spec(attack__byzantine=2, defence__declared=1)).defence.declared == 1
    assert resolve(small_spec(attack__byzantine=2, defence__declared=0)).defence.declared == 0


def test_the_guard_uses_another_half_of_the_hold_out_every_round() -> None:
    stage = stage_of(small_spec(defence__guard=True))
    seen: list[set[int]] = []
    losses = stage.engine.sample_losses

    def watching(weights, samples, indices):  # type: ignore[no-untyped-def] # noqa: ANN001, ANN202
        found = set(indices.tolist())
        if found <= set(stage.split.holdout.tolist()):
            seen.append(found)
        return losses(weights, samples, indices)

    stage.engine.sample_losses = watching  # type: ignore[method-assign]
    for number in (1, 2, 1):
        assert stage.server.verifier.doubt is not None
        stage.server.verifier.doubt(stage.initial[0], stage.initial[0] + 1, number)
    halves = seen[::3]  # a round measures w^g, the upload, and the upload after training
    assert [len(part) for part in seen] == [15] * 9  # half of 30
    assert seen[:3] == halves[:1] * 3
    assert halves[0] == halves[2] != halves[1]


@pytest.mark.parametrize("engine", ["native", "torch"])
@pytest.mark.parametrize("count", [1, 37, 100, 101, 530])
def test_batch_losses_are_the_mean_losses_of_as_many_copies_of_the_model(engine: str, count: int) -> None:
    if engine == "native" and available() is not None:
        pytest.skip("NO NATIVE ENGINE: install a C++ compiler")
    stage = stage_of(small_spec(engine=engine))
    samples, weights = stage.dataset.train, stage.initial[0]
    indices = np.random.default_rng(3).permutation(len(samples))[:count].astype(np.int32)
    rows = pad_rows(np.array_split(indices, min(100, count)))
    expected = stage.engine.losses(np.tile(weights, (len(rows), 1)), samples, rows)
    found = batch_losses(stage.engine, weights, samples, indices)
    if engine == "native":
        np.testing.assert_array_equal(found, expected)
    else:
        np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_a_guarded_run_bans_nobody_honest_and_resumes_to_the_same_numbers(tmp_path: Path) -> None:
    spec = small_spec(defence__guard=True, defence__commitment=True, selection__name="soup", selection__k=2, rounds=6,
                      attack__byzantine=2, attack__name="staller")  # fmt: skip
    whole = cbdsl.run(spec, model=perceptron, data=blobs(), out=tmp_path / "whole")
    assert whole.summary.banned == []
    assert any(line.silent for line in whole.rounds)

    run_until(3, spec, model=perceptron, data=blobs(), out=tmp_path / "part")
    resumed = cbdsl.resume(tmp_path / "part", model=perceptron, data=blobs())
    np.testing.assert_array_equal(resumed.weights, whole.weights)
    assert [line.verdicts for line in resumed.rounds] == [line.verdicts for line in whole.rounds]


def test_stallers_and_flooders_end_rounds_within_the_cap_and_harm_nobody_honest() -> None:
    for name in ("staller", "flooder"):
        attack: dict[str, object] = {"attack__name": name, "attack__byzantine": 6, "defence__declared": 0}
        spec = small_spec(workers=10, defence__invitations=3, rounds=8, **attack)
        result = cbdsl.run(spec, model=perceptron, data=blobs())
        assert all(len(line.verdicts) <= 3 for line in result.rounds)
        assert set(result.summary.banned) <= set(result.summary.byzantine)
        assert result.summary.final_accuracy > 0.6
        size = result.summary.parameters * 4
        wasted = sum(len(line.refuted) + len(line.declined) for line in result.rounds) * size
        assert result.summary.wasted_uplink_bytes == wasted
        assert (wasted > 0) is (name == "flooder")
        uploaded = sum(line.uploads for line in result.rounds) * size
        assert result.summary.model_uplink_bytes == uploaded


def test_the_cap_leaves_room_for_the_attackers_that_the_server_reckons_with() -> None:
    def cap(**settings: object) -> int:
        return stage_of(small_spec(**{"data__samples_per_worker": 5, **settings})).server.policy.invitations

    assert cap() == 10
    assert cap(workers=40, attack__byzantine=15, selection__name="soup", selection__k=3) == 18
    assert cap(workers=40, attack__byzantine=15, defence__declared=2) == 10
    assert cap(defence__invitations=0, attack__byzantine=3) == 0


def test_copycats_take_no_place_in_the_soup_and_nobody_honest_is_taken_for_one() -> None:
    settings = {"model": "softmax", "workers": 8, "rounds": 6, "local.learning_rate": 0.1,
                "selection.name": "soup", "selection.k": 2, "attack.name": "copycat"}  # fmt: skip
    for attackers in (0, 3):
        result = cbdsl.run(Spec().with_settings(settings | {"attack.byzantine": attackers}))
        copies = [one["worker"] for line in result.rounds for one in line.verdicts if one["reason"] == COPIED]
        assert set(copies) == set(result.summary.byzantine)
        assert result.summary.banned == []
        assert all(sum(one["reason"] != COPIED for one in line.verdicts) <= 2 for line in result.rounds)


def test_the_memoriser_fools_the_paper_and_not_the_guard() -> None:
    settings = {"model": "mlp", "workers": 4, "rounds": 3, "data.shared_scoring": 100, "attack.byzantine": 1,
                "attack.name": "memoriser", "local.learning_rate": 0.01}  # fmt: skip
    spec = Spec().with_settings(settings)
    fooled, saved = (
        cbdsl.run(spec.with_settings({"defence.guard": guard, "defence.commitment": guard})) for guard in (False, True)
    )
    assert fooled.summary.banned == []
    assert fooled.rounds[0].accepted == fooled.summary.byzantine
    assert saved.summary.banned == []  # a suspicion is no proof
    assert saved.rounds[0].declined == saved.summary.byzantine
    assert "by heart" in saved.rounds[0].verdicts[0]["reason"]
    assert not set(saved.rounds[1].declined) & set(saved.summary.byzantine)  # it has to wait
    assert saved.summary.final_accuracy > fooled.summary.final_accuracy + 0.1


@pytest.mark.parametrize("settings", [{"defence__guard": True}, {"selection__name": "soup"}])
def test_a_server_without_the_scoring_set_cannot_guard(settings: dict[str, object]) -> None:
    for more in ({"shared": "train"}, {"method": "fedpso"}, {"method": "fedavg", "shared": "both"}):
        with refused_as("conflict", "D_sc"):
            stage_of(small_spec(**settings, **more))


def test_fltrust_needs_data_at_the_server() -> None:
    with refused_as("conflict", "fltrust", "data.shared_training is 0"):
        stage_of(small_spec(method="fedavg", defence__aggregator="fltrust", data__shared_training=0))
    stage_of(small_spec(method="fedavg", defence__aggregator="zeno", data__shared_training=0))  # it scores, on D_sc


def test_copies_are_looked_for_only_where_everybody_trains_on_the_shared_set() -> None:
    def looks(**settings: object) -> bool:
        return stage_of(small_spec(**settings)).server.verifier.copies is not None

    assert looks()
    assert looks(defence__guard=True)
    assert not looks(shared="score")
    assert not looks(method="pso", shared="both")
    assert not looks(data__shared_training=0)


def test_a_model_made_at_home_is_made_anew_for_another_architecture() -> None:
    spec, data = resolve(small_spec(attack__name="memoriser", attack__byzantine=1, model="custom")), blobs()

    def crafted(activation: type[nn.Module], samples: Dataset) -> Floats:
        build = lambda: nn.Sequential(nn.Linear(8, 16), activation(), nn.Linear(16, 3))  # noqa: E731
        stage = Experiment.prepare(spec, UserParts(model=build, data=samples), 1)
        attackers = stage.memory_swarm.adversary
        assert attackers is not None
        made = attackers.crafted
        assert made is not None
        return made

    crafted(nn.Tanh, data)
    np.testing.assert_array_equal(crafted(nn.ReLU, data), crafted(nn.ReLU, blobs()))  # as if nothing was made before


def test_an_attack_that_knows_all_models_is_refused_where_workers_are_elsewhere() -> None:
    for name, refused in (("fang-krum", True), ("min-max", True), ("poisoned-fl", False)):
        for attackers in (0, 2):
            stage = stage_of(small_spec(method="fedavg", attack__name=name, attack__byzantine=attackers))
            if refused and attackers:
                with refused_as("not-supported", name, "cbdsl run"):
                    stage.require_messages()
            else:
                stage.require_messages()
