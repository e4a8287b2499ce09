"""Shards without a cluster: any cut of a swarm gives its numbers, and what a shard is given is its own alone."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cbdsl.algorithm.messages import Order
from cbdsl.algorithm.worker_table import KeptRows
from cbdsl.arrays import PADDING
from cbdsl.runs.build import Experiment, UserParts
from cbdsl.runs.resolve import resolve
from cbdsl.swarms.ray_swarm import (
    ClusterNode,
    bytes_of_shard,
    connect_ray,
    count_room,
    cpus_per_shard,
    parse_cluster_address,
    swarm_maker,
)
from cbdsl.swarms.shard import (
    Shard,
    ShardAnswer,
    ShardData,
    ShardRecipe,
    ShardRestarted,
    code_digest,
    take_workers,
)
from cbdsl.util.npz import InBlocks, load_arrays, map_arrays, save_arrays
from support.helpers import blobs, small_spec
from support.refusals import refused_as


def stage_of(**settings: object) -> Experiment:
    return Experiment.prepare(resolve(small_spec(model="mlp", **settings)), UserParts(data=blobs()), 1)


def shard_of(stage: Experiment, first: int, last: int) -> Shard:
    spec, server = stage.spec, stage.server
    recipe = ShardRecipe(
        server.method, server.policy.codecs.up, stage.network, stage.engine.name, spec.local, spec.swarm, spec.seed,
        spec.defence.commitment,
    )  # fmt: skip
    made = Shard(code_digest(), 1)
    made.prepare(
        3,
        recipe,
        ShardData(range(first, last), stage.initial, take_workers(stage.worker_data_and_adversary()[0], first, last)),
    )
    made.settle(3, 0, None)
    return made


def first_order(stage: Experiment, participants: tuple[int, ...]) -> Order:
    return replace(stage.server.order(stage.first_state()), participants=participants)


@pytest.mark.parametrize("shared", ["both", "none"])
def test_a_shard_has_the_rows_of_the_whole_and_its_own_samples_alone(shared: str) -> None:
    stage = stage_of(shared=shared, attack__byzantine=2, attack__name="label-flip")
    order = first_order(stage, (1, 3, 4, 5))
    whole = stage.memory_swarm
    claims = whole.report(order)
    shard = shard_of(stage, 3, 6)
    answer = shard.report(0, replace(order, participants=(3, 4, 5), global_best=None), order.global_best, (4,))
    assert isinstance(answer, ShardAnswer)
    assert answer.scores.tolist() == [claims[worker].score for worker in (3, 4, 5)]
    np.testing.assert_array_equal(answer.models[0], whole.models_and_scores([4])[0][0])
    assert whole.table.workers.tolist() == [1, 3, 4, 5]
    own = shard.kept_workers(1)
    assert not isinstance(own, ShardRestarted)
    assert own.tolist() == [3, 4, 5]
    for name in whole.table.layout:
        np.testing.assert_array_equal(
            shard.block(1, name, own), np.concatenate(list(whole.table.blocks(name)))[1:], err_msg=name
        )


def test_a_shard_is_given_the_samples_of_its_own_workers_and_no_others() -> None:
    stage = stage_of(shared="score")
    held, whole = take_workers(stage.worker_data_and_adversary()[0], 2, 4), stage.worker_data_and_adversary()[0]
    pools = {id(lesson.samples) for lesson in held.training} | {id(held.scored)}
    assert len(pools) == 1
    needed = np.unique(np.concatenate([*(one.indices for one in whole.training[2:4]), whole.scoring]))
    np.testing.assert_array_equal(held.scored.features, stage.dataset.train.features[needed])
    for own, before in zip(held.training, whole.training[2:4], strict=True):
        np.testing.assert_array_equal(own.samples.features[own.indices], before.samples.features[before.indices])


def test_padding_stays_padding_in_a_shard() -> None:
    stage = stage_of(shared="none")
    held = stage.worker_data_and_adversary()[0]
    scoring = np.array(held.scoring)
    scoring[2:, -3:] = PADDING
    part = take_workers(replace(held, scoring=scoring), 2, 4)
    found = np.asarray(part.scoring)
    assert (found[:, -3:] == PADDING).all()
    np.testing.assert_array_equal(part.scored.labels[found[0, :-3]], held.scored.labels[scoring[2, :-3]])


def test_a_shard_that_lost_its_rows_says_so_and_takes_them_from_nobody_who_began_before() -> None:
    stage = stage_of()
    shard, order, nobody = shard_of(stage, 0, 3), first_order(stage, (0, 1, 2)), np.zeros(0, np.int32)
    for lost in (
        shard.report(7, replace(order, round=8), order.global_best, ()), shard.models_and_scores(7, [0]),
        shard.contents(7, [0]), shard.block(7, "positions", nobody), shard.settle(2, 7, None), shard.facts(7),
        shard.kept_workers(7), shard.put(2, KeptRows(nobody, {})),
    ):  # fmt: skip
        assert lost == ShardRestarted()


def test_an_order_given_twice_is_carried_out_once() -> None:
    stage = stage_of()
    shard, order = shard_of(stage, 0, 3), first_order(stage, (0, 1, 2))
    first, again = (shard.report(0, order, order.global_best, ()) for _ in range(2))
    assert isinstance(first, ShardAnswer)
    assert isinstance(again, ShardAnswer)
    np.testing.assert_array_equal(first.scores, again.scores)


def test_a_shard_of_other_code_is_refused() -> None:
    with refused_as("conflict", "has another cbdsl"):
        Shard("0" * 12, 1)


def test_arrays_in_blocks_are_written_as_numpy_writes_them(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    whole: dict[str, np.ndarray[Any, Any]] = {
        "a": rng.normal(size=(7, 3)).astype(np.float32),
        "b": np.zeros((7, 0), np.uint8),
        "c": np.arange(7.0),
    }
    path = tmp_path / "blocks.npz"
    with path.open("wb") as file:
        save_arrays(file, {"a": _in_threes(whole["a"]), "b": _in_threes(whole["b"]), "c": whole["c"]})
    with np.load(path) as read:
        for name, array in whole.items():
            np.testing.assert_array_equal(read[name], array)
    mapped, left = map_arrays(path, ("a", "b", "missing")), load_arrays(path, without=("a",))
    (tmp_path / "other").touch()
    (tmp_path / "other").replace(path)  # as when another checkpoint takes its place
    np.testing.assert_array_equal(mapped["a"], whole["a"])
    assert sorted(mapped) == ["a", "b"]
    assert sorted(left) == ["b", "c"]


def test_damage_is_found_in_arrays_that_are_not_read(tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    with path.open("wb") as file:
        save_arrays(file, {"a": np.arange(1000.0), "b": np.zeros(1)})
    content = bytearray(path.read_bytes())
    content[2000] ^= 1
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"a\.npy is not what was written"):
        load_arrays(path, without=("a",))


def _in_threes(array: np.ndarray[Any, Any]) -> InBlocks:
    return InBlocks(array.shape, array.dtype, lambda: (array[at : at + 3] for at in range(0, len(array), 3)))


@pytest.mark.parametrize(
    ("cpus", "shards", "each"),
    [([2], 1, 2), ([2], 2, 1), ([1, 1], 2, 1), ([1, 1], 7, 0.25), ([8, 3], 3, 3), ([4], 3, 1), ([0], 1, 0), ([], 2, 0)],
)
def test_processors_are_shared_out_so_that_all_shards_fit(cpus: list[float], shards: int, each: float) -> None:
    assert cpus_per_shard(cpus, shards) == each
    have = [ClusterNode("m", "n", one, 1e9) for one in cpus]
    assert not each or count_room(have, each, 1.0) >= shards
    assert count_room(have, each, 2e9) == 0


def test_memory_is_estimated_per_worker() -> None:
    stage = stage_of()
    one, two = bytes_of_shard(stage, 1), bytes_of_shard(stage, 2)
    rows = stage.memory_swarm.table.row_bytes
    assert two - one == rows + 40 * (8 * 4 + 4 + 4)  # forty samples of eight numbers, a label and an index


@pytest.mark.parametrize("place", ["", "here", "ray:/1", "host:", ":6379", "host:99999", "host:port", "ray://host"])
def test_a_place_that_is_none_is_refused(place: str) -> None:
    with refused_as("invalid-input", "--on is", "give ray"):
        parse_cluster_address(place)


def test_an_address_that_nobody_answers_at_is_refused_at_once() -> None:
    pytest.importorskip("ray", reason="no Ray: pip install 'cbdsl[ray]'")
    with refused_as("connection-failed", "127.0.0.1:1", "ray start --head"), connect_ray("127.0.0.1:1"):
        pass


def test_without_ray_the_message_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with refused_as("missing-package", "pip install 'cbdsl[ray]'"), connect_ray("ray"):
        pass


@pytest.mark.parametrize(
    ("place", "shards", "own", "code"),
    [
        (None, 2, None, "no-effect"),
        ("ray", 0, None, "out-of-range"),
        ("ray", None, lambda stage: stage.memory_swarm, "conflict"),
    ],
)
def test_contradictions_about_the_place_are_refused(place: str | None, shards: int, own: Any, code: str) -> None:  # noqa: ANN401
    with refused_as(code), swarm_maker(place, shards, None, own):
        pass
