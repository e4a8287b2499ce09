"""The swarm on a Ray cluster of two nodes on this machine: the same rounds as in one process, whatever dies."""

from __future__ import annotations

import gc
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import cbdsl
from cbdsl.algorithm.messages import Order
from cbdsl.algorithm.methods import CbDsl
from cbdsl.runs import loop
from cbdsl.runs.callbacks import Callback
from cbdsl.runs.records import RoundRecord
from cbdsl.swarms import ray_swarm
from support.helpers import blobs, small_spec
from support.ray_nodes import Nodes, plain
from support.refusals import refused_as

ray = pytest.importorskip("ray", reason="Ray is not installed: pip install 'cbdsl[ray]'")
pytestmark = pytest.mark.cluster

CASES: dict[str, dict[str, object]] = {
    "cb-dsl": {},
    "fedavg": {"method": "fedavg"},
    "scaffold": {"method": "scaffold"},
    "rotation with a codec": {"selection__name": "rotation", "codec__up": "q4", "codec__down": "q4"},
    "an average with feedback": {"method": "fedavg", "codec__up": "topk", "codec__down": "q8"},
    "alie": {"attack__byzantine": 2, "attack__name": "alie"},
    "a lie about labels": {"attack__byzantine": 2, "attack__name": "label-flip"},
    "commitments": {"attack__byzantine": 1, "attack__name": "sign-flip", "defence__commitment": True},
    "participation": {"participation": 0.4},
    "apart": {"swarm__start": "apart"},
    "nothing shared": {"shared": "none"},
    "overlap": {
        "data__overlap": True,
        "data__samples_per_worker": 300,
        "participation": 4,
        "shared": "none",
        "attack__byzantine": 4,
        "attack__name": "label-flip",
    },
    "overlap, no state": {"data__overlap": True, "method": "fedavg", "participation": 4},
}


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    with Nodes(2) as made:
        yield made


def spec_of(**settings: object) -> cbdsl.Spec:
    return small_spec(workers=11, model="mlp", **settings)


def played(on: str | None, spec: cbdsl.Spec, **rest: Any) -> list[dict[str, Any]]:  # noqa: ANN401
    result = cbdsl.run(spec, data=blobs(), on=on, threads=1, callbacks=[], **rest)
    return [*map(plain, result.rounds), {"weights": result.weights.tobytes()}]


@pytest.mark.parametrize("case", CASES)
def test_a_run_on_a_cluster_is_the_run_in_one_process(nodes: Nodes, case: str) -> None:
    spec = spec_of(**CASES[case])
    assert played(nodes.address, spec, shards=3) == played(None, spec)


@pytest.mark.parametrize("shards", [1, 2, 7])
def test_any_number_of_shards_gives_the_same_rounds(nodes: Nodes, shards: int) -> None:
    spec = spec_of(attack__byzantine=3, attack__name="mimic", participation=0.6)
    assert played(nodes.address, spec, shards=shards) == played(None, spec)


def test_every_machine_has_shards(nodes: Nodes) -> None:
    places: set[str] = set()

    def look(stage: Any, _: Any) -> None:  # noqa: ANN401
        places.update(nodes.home_of(actor.handle) for actor in stage.swarm.shards.actors)

    cbdsl.run(spec_of(rounds=1), data=blobs(), on=nodes.address, shards=2, callbacks=[], watch=look)
    assert len(places) == 2


class Killer(Callback):
    """Does something after some of the rounds."""

    def __init__(self, deeds: dict[int, Callable[[], None]]) -> None:
        self._deeds = deeds

    def round(self, record: RoundRecord) -> None:
        self._deeds.get(record.round, lambda: None)()


def test_actors_that_die_between_rounds_and_within_them_change_no_number(
    nodes: Nodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "_CHECKPOINT_SECONDS", 0.2)
    spec = spec_of(rounds=14, attack__byzantine=2, attack__name="alie", codec__up="q4", codec__down="q4")
    expected = played(None, spec)
    chosen, crews = random.Random(5), list[Any]()

    def kill(soon: float) -> None:
        handle = chosen.choice(crews[-1].actors).handle
        process = nodes.process_of(handle)
        threading.Timer(soon, os.kill, (process, signal.SIGKILL)).start()

    def watch(stage: Any, order: Order) -> None:  # noqa: ANN401
        crews.append(stage.swarm.shards)
        if order.round % 3 == 0:
            kill(0.0 if order.round % 2 else 0.01)
            time.sleep(0.005)

    assert played(nodes.address, spec, shards=3, watch=watch, out=tmp_path / "killed") == expected


def test_without_a_folder_a_dead_shard_plays_all_its_rounds_again(nodes: Nodes) -> None:
    spec = spec_of(rounds=6)

    def watch(stage: Any, order: Order) -> None:  # noqa: ANN401
        if order.round == 4:
            ray.kill(stage.swarm.shards.actors[1].handle, no_restart=False)

    assert played(nodes.address, spec, shards=2, watch=watch) == played(None, spec)


def test_a_node_that_is_removed_and_one_that_is_added(nodes: Nodes, tmp_path: Path) -> None:
    spec = spec_of(rounds=8, participation=0.7)

    def watch(_: object, order: Order) -> None:
        if order.round == 3:
            nodes.remove()
        if order.round == 4:
            nodes.add()

    with nodes.spare():
        assert played(nodes.address, spec, shards=2, watch=watch, out=tmp_path / "r") == played(None, spec)


def test_a_cluster_that_stays_too_small_ends_the_run_and_the_run_goes_on_here(
    nodes: Nodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(ray_swarm, "WAIT_SECONDS", 1.0)
    monkeypatch.setattr(ray_swarm, "_POLL_SECONDS", 0.5)
    spec = spec_of(rounds=6)

    def watch(_: object, order: Order) -> None:
        if order.round == 2:
            nodes.remove()

    try:
        with refused_as("too-large", "too small: 2 shards need 1 processors"):
            played(nodes.address, spec, shards=2, watch=watch, out=tmp_path / "r")
    finally:
        nodes.add()
    assert "Waiting" in caplog.text
    result = cbdsl.resume(tmp_path / "r", data=blobs(), callbacks=[])
    assert [*map(plain, result.rounds), {"weights": result.weights.tobytes()}] == played(None, spec)


def test_a_run_that_waits_for_processors_of_others_says_so(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(ray_swarm, "_POLL_SECONDS", 0.2)
    others = [ray.remote(num_cpus=1)(threading.Event).remote() for _ in range(2)]
    ray.get([one.is_set.remote() for one in others])
    said = ray_swarm.ShardActors._warn_of_waiting

    def leave(crew: ray_swarm.ShardActors) -> None:
        said(crew)
        for one in others:
            ray.kill(one)

    monkeypatch.setattr(ray_swarm.ShardActors, "_warn_of_waiting", leave)
    spec = spec_of(rounds=1)
    assert played(nodes.address, spec, shards=2) == played(None, spec)
    assert "2 of 2 shards have not started yet" in caplog.text


def test_a_run_changes_places_at_a_checkpoint(nodes: Nodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "_CHECKPOINT_SECONDS", 0.0)
    monkeypatch.setattr(loop, "_CHECKPOINT_SHARE", 0.0)
    spec = spec_of(rounds=9, codec__up="q4", codec__down="q4")

    class StopError(Exception):
        """As if the driver had been killed."""

    def stop() -> None:
        raise StopError

    folder = tmp_path / "r"
    with pytest.raises(StopError):
        cbdsl.run(spec, data=blobs(), out=folder, on=nodes.address, shards=3, callbacks=[Killer({3: stop})])
    with pytest.raises(StopError):
        cbdsl.resume(folder, data=blobs(), callbacks=[Killer({6: stop})])
    result = cbdsl.resume(folder, data=blobs(), on=nodes.address, shards=2, callbacks=[])
    assert [*map(plain, result.rounds), {"weights": result.weights.tobytes()}] == played(None, spec)


def test_workers_without_a_memory_go_on_from_the_model_that_was_kept(
    nodes: Nodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "_CHECKPOINT_SECONDS", 0.0)
    monkeypatch.setattr(loop, "_CHECKPOINT_SHARE", 0.0)
    spec = spec_of(rounds=12, method="restart", local__learning_rate=2.0)
    expected = played(None, spec)
    kept = next(line["round"] for line in expected[1:-2] if not line["accepted"])

    def stop() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cbdsl.run(spec, data=blobs(), out=tmp_path / "r", on=nodes.address, shards=2, callbacks=[Killer({kept: stop})])
    result = cbdsl.resume(tmp_path / "r", data=blobs(), on=nodes.address, shards=3, callbacks=[])
    assert [*map(plain, result.rounds), {"weights": result.weights.tobytes()}] == expected


class Fatal(CbDsl):
    """A method whose arrival ends every process but the one that made it."""

    def __init__(self) -> None:
        self.home = os.getpid()

    def __setstate__(self, state: dict[str, Any]) -> None:
        if os.getpid() != state["home"]:
            os._exit(1)
        self.__dict__.update(state)


def test_a_shard_that_dies_whenever_it_is_started_ends_the_run_with_a_word(nodes: Nodes, tmp_path: Path) -> None:
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    with refused_as("too-large", "The shard of workers 0 to", "started 5 times"):
        played(nodes.address, spec_of(rounds=1), shards=2, method=Fatal(), out=tmp_path / "r")
    assert not (tmp_path / "r").exists()


def test_parts_of_a_users_own_go_along(nodes: Nodes, tmp_path: Path) -> None:
    plugin = tmp_path / "slow_swarm.py"
    plugin.write_text(
        "import cbdsl\nfrom cbdsl import register\nfrom cbdsl.algorithm.methods import CbDsl\n\n\n"
        "@register.method('slow')\nclass Slow(CbDsl):\n    def move(self, work, rows, received):\n"
        "        return super().move(work, rows, 0.5 * received)\n"
    )
    spec = spec_of(method="slow", plugins=(str(plugin),))
    assert played(nodes.address, spec, shards=2) == played(None, spec)


def test_a_part_that_machines_cannot_import_is_one_message(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    here_alone = ModuleType("here_alone")
    exec("from cbdsl.algorithm.methods import CbDsl\nclass Mine(CbDsl):\n    pass", here_alone.__dict__)
    monkeypatch.setitem(sys.modules, "here_alone", here_alone)
    with refused_as("missing-package", "here_alone"):
        played(nodes.address, spec_of(rounds=1), shards=2, method=here_alone.__dict__["Mine"]())
    gc.collect()
    assert "Unhandled error" not in capfd.readouterr().err


def test_a_module_of_a_users_own_runs_on_torch(nodes: Nodes) -> None:
    def build() -> Any:  # noqa: ANN401
        from torch import nn  # noqa: PLC0415

        return nn.Sequential(nn.Linear(8, 5), nn.Softsign(), nn.Linear(5, 3))

    spec = small_spec(workers=5, rounds=2, engine="torch")
    assert played(nodes.address, spec, shards=2, model=build) == played(None, spec, model=build)


def test_more_than_fits_is_refused_before_anything_is_made(nodes: Nodes, tmp_path: Path) -> None:
    spec = spec_of(rounds=1)
    with nodes.without_memory(), refused_as("too-large", "The cluster is too small: 2 shards"):
        played(nodes.address, spec, shards=2, out=tmp_path / "r")
    assert not (tmp_path / "r").exists()


def test_machines_with_other_code_are_refused(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_swarm, "code_digest", lambda: "0" * 12)
    with refused_as("connection-failed", "has another cbdsl", "Install the same one on every machine"):
        played(nodes.address, spec_of(rounds=1), shards=2)


def test_machines_that_compute_otherwise_are_named(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_swarm, "describe_build", lambda _: "other instructions")
    notes: list[str] = []

    def look(stage: Any, _: object) -> None:  # noqa: ANN401
        notes.append(stage.swarm.note)

    played(nodes.address, spec_of(rounds=1), shards=2, watch=look)
    assert "the server computes with other instructions" in notes[0]


def test_a_machine_that_ended_while_it_was_asked_is_named(nodes: Nodes) -> None:
    with nodes.spare():
        have = ray_swarm.list_nodes(ray)
    told = ray_swarm._ask_nodes(ray, have)
    lines = [ray_swarm._describe_node(*one) for one in zip(have, told, strict=True)]
    assert ["cannot take part" in line for line in lines].count(True) == 1
