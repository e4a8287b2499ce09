"""Whole runs in which models travel through codecs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cbdsl
from cbdsl import register
from cbdsl.codecs.topk import TopK
from cbdsl.runs.build import Experiment, UserParts
from cbdsl.runs.loop import play_rounds
from cbdsl.runs.resolve import resolve
from cbdsl.spec import Spec
from support.helpers import blobs, perceptron, run_until, small_spec
from support.refusals import refused_as

CODECS = [name for name in register.codec.names() if name != "none"]


def spec_with(codec: str, **settings: Any) -> Spec:  # noqa: ANN401 - any setting
    return small_spec(codec__up=codec, codec__down=codec, **settings)


def run(spec: Spec, **more: Any) -> cbdsl.Result:  # noqa: ANN401
    return cbdsl.run(spec, model=perceptron, data=blobs(), callbacks=[], **more)


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize(
    ("method", "engine"), [("cb-dsl", "native"), ("restart", "native"), ("pso", "native"), ("cb-dsl", "torch")]
)
def test_claims_are_true_to_the_last_bit(method: str, codec: str, engine: str) -> None:
    settings: dict[str, Any] = {"selection__name": "rotation", "selection__k": 3} if method == "restart" else {}
    spec = spec_with(
        codec, method=method, engine=engine, rounds=8, verification__tolerance=0.0, defence__commitment=True, **settings
    )
    result = run(spec)
    assert result.summary.banned == []
    assert result.summary.uploads > 0
    assert all(not line.set_aside for line in result.rounds)


@pytest.mark.parametrize("codec", CODECS)
def test_bytes_are_those_that_were_sent(codec: str) -> None:
    plain, short = run(small_spec()), run(spec_with(codec))
    for summary in (plain.summary, short.summary):
        assert summary.uplink_bytes == summary.traffic["score"][1] + summary.traffic["upload"][1]
    assert short.summary.traffic["upload"][1] / short.summary.uploads < 4 * plain.summary.parameters
    assert short.summary.downlink_bytes < plain.summary.downlink_bytes


@pytest.mark.parametrize("settings", [{}, {"participation": 3}, {"method": "fedavg", "shared": "train"}])
@pytest.mark.parametrize("codec", ["q4", "topk"])
def test_a_run_that_was_stopped_goes_on_with_the_same_numbers(
    codec: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    spec = spec_with(codec, rounds=9, **settings)
    expected = run(spec)
    run_until(6, spec, model=perceptron, data=blobs(), out=tmp_path / "run")
    found = cbdsl.resume(tmp_path / "run", model=perceptron, data=blobs(), callbacks=[])
    assert found.weights.tobytes() == expected.weights.tobytes()
    assert [replace(line, seconds=0.0) for line in found.rounds] == [
        replace(line, seconds=0.0) for line in expected.rounds
    ]


@pytest.mark.parametrize("method", ["cb-dsl", "restart", "fedavg"])
def test_grouping_and_threads_change_no_number(method: str) -> None:
    spec = resolve(spec_with("q4", method=method, shared="both", rounds=6))
    found = []
    for block, threads in ((100, 1), (1, 1), (2, 2)):
        stage = Experiment.prepare(spec, UserParts(model=perceptron, data=blobs()), threads)
        stage.memory_swarm.block = block
        found.append([played.state.global_best.tobytes() for played in play_rounds(stage, stage.first_state())])
    assert found[0] == found[1] == found[2]


def test_everybody_has_the_servers_model_to_the_bit() -> None:
    spec = resolve(spec_with("q3", rounds=7, selection__name="soup"))
    stage = Experiment.prepare(spec, UserParts(model=perceptron, data=blobs()), 1)
    for played in play_rounds(stage, stage.first_state()):
        received = stage.memory_swarm._received
        if played.order.global_best is not None:
            assert received is played.order.global_best
        assert len(played.state.references) <= 4
        assert played.state.references[-1] is played.state.global_best


def test_what_topk_leaves_out_is_sent_later() -> None:
    spec = resolve(spec_with("topk", method="fedavg", options__topk__share=0.1))
    stage = Experiment.prepare(spec, UserParts(model=perceptron, data=blobs()), 1)
    swarm = stage.memory_swarm
    work = swarm.workers.at(np.arange(1, dtype=np.int32), 1, 0.0, 0.1, 1)
    rows = type(swarm.particles)(*(array[:1] for array in vars(swarm.particles).values()))
    received = np.zeros(stage.engine.size, np.float32)
    uploads = np.random.default_rng(1).normal(size=(1, len(received))).astype(np.float32)
    first = work.pack_uploads(rows, uploads, received)
    codec = TopK(share=0.1)
    arrived = codec.unpack(first.packs[0].tobytes(), received)
    np.testing.assert_array_equal(first.velocities[0], uploads[0] - arrived)
    second = work.pack_uploads(first, uploads, received)
    again = codec.unpack(second.packs[0].tobytes(), received)
    np.testing.assert_allclose(again + second.velocities[0], uploads[0] + first.velocities[0], atol=1e-6)


@pytest.mark.parametrize(
    ("settings", "code", "fact"),
    [
        ({"method": "scaffold"}, "conflict", "scaffold"),
        ({"method": "fedavg", "codec__up": "adaptive"}, "conflict", "D_sc"),
        ({"codec__up": "q5"}, "unknown-name", "codec 'q5'"),
        ({"options__q8__block": 9}, "no-effect", "q8"),
        ({"options__q4__block": 0}, "out-of-range", "0"),
    ],
)
def test_codecs_that_cannot_be_are_refused(settings: dict[str, Any], code: str, fact: str) -> None:
    with refused_as(code, fact):
        resolve(spec_with("q4").with_settings({key.replace("__", "."): value for key, value in settings.items()}))


def test_a_method_that_scores_what_it_does_not_send_is_refused() -> None:
    class Own(cbdsl.SwarmMethod):
        verifies = True

        def move(self, work: cbdsl.WorkerRound, rows: cbdsl.Particles, received: Any) -> cbdsl.Particles:  # noqa: ANN401
            trained = work.train(work.from_server(received))
            return replace(rows, positions=trained, personal_best=trained, personal_score=work.scores(trained))

    with refused_as("invalid-part", "work.remember_best"):
        run(spec_with("q4"), method=Own())


@pytest.mark.parametrize("codec", ["q4", "q2"])
@pytest.mark.parametrize("name", ["liar", "copycat", "nan", "label-flip", "gaussian", "fifth", "rescaler"])
def test_attackers_use_the_codec_too(name: str, codec: str) -> None:
    result = run(spec_with(codec, attack__byzantine=2, attack__name=name, defence__commitment=True, rounds=6))
    assert result.summary.honest_banned == 0
    truthful = name in {"copycat", "label-flip", "fifth", "rescaler"}
    assert bool(result.summary.banned) is not truthful
