"""A generator: it learns in our rounds, makes what it has seen, repeats itself, and goes on where it was stopped."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import cbdsl
from cbdsl.arrays import Floats, Samples
from cbdsl.data.dataset import load
from cbdsl.data.shared import read_shared
from cbdsl.runs.resolve import resolve
from cbdsl.spec import Spec
from cbdsl.studies.generate import (
    GenerationPlan,
    GeneratorTraining,
    describe_result,
    gather_generator_data,
    run_generation,
)
from support.helpers import blobs, perceptron, small_spec
from support.refusals import refused_as


@pytest.fixture
def source(tmp_path: Path) -> Path:
    data = blobs()
    np.savez(
        tmp_path / "blobs.npz",
        train_features=data.train.features,
        train_labels=data.train.labels,
        test_features=data.test.features,
        test_labels=data.test.labels,
    )
    return tmp_path / "blobs.npz"


def spec_of(source: Path, **settings: object) -> Spec:
    return resolve(small_spec(data__source=str(source), model="softmax", **settings))


def plan_of(source: Path, learned_from: str = "server", passes: int = 4, **settings: object) -> GenerationPlan:
    return GenerationPlan(spec_of(source, **settings), learned_from, 30, 80, passes=passes)


def centres(samples: Samples) -> Floats:
    return np.stack([samples.features[samples.labels == one].mean(0) for one in range(3)])


@pytest.mark.parametrize("learned_from", ["server", "workers"])
def test_what_is_generated_looks_like_its_class(source: Path, tmp_path: Path, learned_from: str) -> None:
    made = run_generation(replace(plan_of(source, learned_from, 60), scoring=600), tmp_path / "out", 1)
    data = load(str(source))
    real = centres(data.train)
    own = centres(made.shared.scoring)
    distances = np.linalg.norm(own[:, None] - real, axis=2)
    assert distances.argmin(1).tolist() == [0, 1, 2]
    assert made.passes[-1].loss < made.passes[0].loss


def test_a_run_takes_the_file_and_learns(source: Path, tmp_path: Path) -> None:
    made = run_generation(plan_of(source, passes=40), tmp_path / "out", 1)
    spec = small_spec(data__shared_source=str(made.file), rounds=8)
    assert cbdsl.run(spec, data=blobs(), model=perceptron, callbacks=[]).summary.final_accuracy > 0.6


@pytest.mark.parametrize("learned_from", ["server", "workers"])
def test_the_same_plan_makes_the_same_file(source: Path, tmp_path: Path, learned_from: str) -> None:
    files = [
        run_generation(plan_of(source, learned_from), tmp_path / name, threads).file
        for threads, name in ((1, "a"), (2, "b"))
    ]
    assert files[0].read_bytes() == files[1].read_bytes()
    other = run_generation(plan_of(source, learned_from, seed=1), tmp_path / "c", 1).file
    assert files[0].read_bytes() != other.read_bytes()


class Stopped(Exception):  # noqa: N818 - not an error
    pass


def stopping_at(number: int) -> Callable[[int, int, float], None]:
    def stop(played: int, total: int, loss: float) -> None:
        del total, loss
        if played == number:
            raise Stopped

    return stop


def hearing(heard: list[int]) -> Callable[[int, int, float], None]:
    return lambda number, *_: heard.append(number)


@pytest.mark.parametrize("codec", ["none", "topk"])
def test_learning_goes_on_where_it_was_stopped(source: Path, tmp_path: Path, codec: str) -> None:
    plan = plan_of(source, "workers", passes=7, codec__up=codec)
    with pytest.raises(Stopped):
        run_generation(plan, tmp_path / "stopped", 1, stopping_at(6))
    heard: list[int] = []
    stopped = run_generation(plan, tmp_path / "stopped", 1, hearing(heard))
    whole = run_generation(plan, tmp_path / "whole", 1)
    assert heard == [6, 7]
    assert stopped.file.read_bytes() == whole.file.read_bytes()
    assert stopped.passes == whole.passes


def test_a_finished_folder_makes_more_samples_without_learning_again(source: Path, tmp_path: Path) -> None:
    plan, heard = plan_of(source), list[int]()
    run_generation(plan, tmp_path / "out", 1)
    more = run_generation(replace(plan, training=50), tmp_path / "out", 1, hearing(heard))
    assert heard == []
    assert len(read_shared(more.file, load(str(source))).training) == 50


def test_workers_send_weights_and_the_server_alone_sends_none_of_its_samples(source: Path) -> None:
    spec = spec_of(source)
    learning = GeneratorTraining(gather_generator_data(spec, "workers"), spec, 1, 1)
    [first] = list(learning.train_passes())
    assert first.uplink_bytes == spec.workers * 4 * learning.engine.size


def test_all_classes_are_made_alike(source: Path, tmp_path: Path) -> None:
    made = run_generation(plan_of(source), tmp_path / "out", 1)
    assert np.bincount(made.shared.training.labels).tolist() == [10, 10, 10]


def test_the_folder_explains_itself(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    made = run_generation(replace(plan_of(source), holdout=25), out, 1)
    assert {path.name for path in out.iterdir() if not path.name.startswith(".")} == {
        "README.txt", "generate.json", "passes.jsonl", "checkpoint.npz", "shared.npz", "privacy.json",
    }  # fmt: skip
    assert json.loads((out / "generate.json").read_text())["source"] == "server"
    assert "membership" in "".join(describe_result(made))
    stored = read_shared(made.file, load(str(source)))
    assert stored.holdout is not None
    assert len(stored.holdout) == 25


def test_a_class_without_samples_is_named(source: Path, tmp_path: Path) -> None:
    with np.load(source) as stored:
        arrays = {name: stored[name] for name in stored}
    kept = arrays["train_labels"] != 1
    np.savez(
        source,
        **{**arrays, "train_features": arrays["train_features"][kept], "train_labels": arrays["train_labels"][kept]},
    )
    for learned_from, advice in (("server", "shared_training"), ("workers", "partition"), (str(source), "every class")):
        with refused_as("out-of-range", "class 1", advice):
            run_generation(plan_of(source, learned_from), tmp_path / "out", 1)
    assert not (tmp_path / "out").exists()


def test_another_plan_leaves_a_folder_alone(source: Path, tmp_path: Path) -> None:
    run_generation(plan_of(source), tmp_path / "out", 1)
    with refused_as("exists-already", tmp_path / "out"):
        run_generation(plan_of(source, passes=5), tmp_path / "out", 1)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").write_text("")
    with refused_as("exists-already", tmp_path / "full"):
        run_generation(plan_of(source), tmp_path / "full", 1)


def test_a_folder_is_left_alone_when_the_samples_of_a_file_have_changed(source: Path, tmp_path: Path) -> None:
    plan = plan_of(source)
    run_generation(plan, tmp_path / "out", 1)
    before = (tmp_path / "out" / "privacy.json").read_bytes()
    with np.load(source) as stored:
        arrays = {name: stored[name] for name in stored}
    np.savez(source, **{**arrays, "train_features": 2 * arrays["train_features"]})
    with refused_as("exists-already", tmp_path / "out"):
        run_generation(plan, tmp_path / "out", 1)
    assert (tmp_path / "out" / "privacy.json").read_bytes() == before


def test_a_folder_is_one_process_s_at_a_time(source: Path, tmp_path: Path) -> None:
    plan, out = plan_of(source), tmp_path / "out"

    def meanwhile(*_: object) -> None:
        with refused_as("conflict", out):
            run_generation(plan, out, 1)

    first = run_generation(plan, out, 1, meanwhile)
    assert run_generation(plan, out, 1).passes == first.passes  # and free when it is done


def test_a_folder_is_free_after_a_refusal(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    run_generation(plan_of(source), out, 1)
    with refused_as("exists-already", tmp_path / "out"):
        run_generation(plan_of(source, passes=5), out, 1)
    run_generation(plan_of(source), out, 1)


@pytest.mark.parametrize("sizes", [(0, 80, 0), (30, 0, 0), (30, 80, -1), (-5, 80, 0)])
def test_no_samples_are_refused(source: Path, sizes: tuple[int, int, int]) -> None:
    with refused_as("out-of-range"):
        GenerationPlan(spec_of(source), "server", *sizes)


def test_fewer_samples_than_classes_are_refused_before_anything_is_learned(source: Path, tmp_path: Path) -> None:
    with refused_as("out-of-range", "--samples 2", "--scoring 2", "3 classes"):
        run_generation(GenerationPlan(spec_of(source), "server", 2, 2), tmp_path / "out", 1)
    assert not (tmp_path / "out").exists()


def test_a_hold_out_that_every_worker_could_make_is_refused(source: Path) -> None:
    with refused_as("conflict", "--holdout 25"):
        GenerationPlan(spec_of(source), "workers", 30, 80, holdout=25)
    GenerationPlan(spec_of(source), "server", 30, 80, holdout=25)


def test_attackers_codecs_that_measure_and_a_d_g_that_is_there_already_are_refused(source: Path) -> None:
    with refused_as("no-effect", "--byzantine"):
        GenerationPlan(spec_of(source, attack__byzantine=1), "workers", 30, 80)
    with refused_as("not-supported", "adaptive", "q4"):
        GenerationPlan(spec_of(source, codec__up="adaptive"), "workers", 30, 80)
    with refused_as("conflict", "data.shared_source"):
        GenerationPlan(spec_of(source, data__shared_source="x.npz"), "server", 30, 80)
