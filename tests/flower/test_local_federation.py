"""The whole app on a Grid in this process: the simulator's rounds for every conversation, and nodes that misbehave."""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from flwr.app import Message

from cbdsl.errors import UserError
from cbdsl.flower import flower_messages, server
from cbdsl.flower.flower_messages import Context
from cbdsl.runs import loop as simulator
from support.flower_federation import SMALL, own_files, played, rounds_of, simulated
from support.local_grid import HANDLERS, LocalGrid, federation
from support.refusals import refused_as


@pytest.fixture
def _in_haste(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "LEAST_SECONDS", 1.0)


@pytest.mark.parametrize(
    "settings",
    [
        "method=cb-dsl",
        "method=cb-dsl defence.guard=true defence.commitment=true selection.name=soup selection.k=2",
        "method=restart selection.name=rotation selection.k=2 codec.up=q4 codec.down=q4",
        "method=cb-dsl codec.up=q8 codec.down=topk",
        "method=cb-dsl participation=0.6",
        "method=fedavg",
        "method=scaffold",
        "method=fedavg codec.up=topk",
        "method=pso",
        "method=cb-dsl attack.name=sign-flip attack.byzantine=1",
        "method=cb-dsl attack.name=liar attack.byzantine=2",
        "method=fedavg attack.name=sign-flip attack.byzantine=2 defence.aggregator=median",
    ],
)
def test_the_rounds_are_those_of_the_simulator(tmp_path: Path, settings: str) -> None:
    wanted = simulated(tmp_path / "simulated", f"{SMALL} {settings}", 6)
    played(tmp_path, f"{SMALL} {settings}", 6)
    assert rounds_of(tmp_path / "run") == wanted
    if "cb-dsl attack" in settings:
        assert wanted[-1]["banned"], "the liars are found out, here and there"
    assert (tmp_path / "run/model.safetensors").read_bytes() == (tmp_path / "simulated/model.safetensors").read_bytes()
    assert not list((tmp_path / "state").iterdir()), "desks are cleared when the run is over"


class StoppedError(BaseException):
    """As a signal ends a process, whatever it is about."""


@pytest.mark.parametrize(
    "settings", ["method=cb-dsl", "method=restart selection.name=rotation codec.up=q4 codec.down=q4"]
)
def test_a_run_that_was_stopped_goes_on_to_the_same_numbers(tmp_path: Path, settings: str) -> None:
    wanted = simulated(tmp_path / "simulated", f"{SMALL} {settings}", 5)
    grid = federation(5, tmp_path / "state")

    def stopping(message: Message, context: Context) -> Message:
        reply = HANDLERS[flower_messages.ORDER](message, context)
        if grid.nodes[103].heard.count(flower_messages.ORDER) == 4:
            raise StoppedError
        return reply

    grid.nodes[103].instead = {flower_messages.ORDER: stopping}
    with pytest.raises(StoppedError):
        played(tmp_path, f"{SMALL} {settings}", 5, grid)
    assert len(rounds_of(tmp_path / "run")) == 3
    grid.nodes[103].instead = {}
    played(tmp_path, f"{SMALL} {settings}", 5, LocalGrid(dict(grid.nodes)))
    assert rounds_of(tmp_path / "run") == wanted


@pytest.mark.parametrize("method", ["cb-dsl", "fedavg"])
def test_nodes_work_on_samples_of_their_own(tmp_path: Path, method: str) -> None:
    grid = federation(5, tmp_path / "state")
    for node, path in zip(grid.nodes.values(), own_files(tmp_path, 5), strict=True):
        node.config["data-path"] = path
    played(tmp_path, f"{SMALL} method={method}", 2, grid, own_data=True)
    lines = rounds_of(tmp_path / "run")
    assert len(lines) == 2
    assert (tmp_path / "run/.secret").is_file(), "the hold-out is drawn by a number that nodes do not know"


@pytest.mark.usefixtures("_in_haste")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"partition-id": None}, "no partition-id"),
        ({"partition-id": "two"}, "partition-id='two'"),
        ({"data-path": "/nowhere.npz"}, "own-data=true"),
    ],
)
def test_what_a_node_lacks_is_said(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    grid = federation(5, tmp_path / "state")
    for key, value in change.items():
        grid.nodes[102].config.pop(key) if value is None else grid.nodes[102].config.update({key: value})
    with pytest.raises(UserError, match=message):
        played(tmp_path, grid=grid)


@pytest.mark.usefixtures("_in_haste")
@pytest.mark.parametrize("path", ["", "/nowhere/samples.npz"])
def test_a_node_without_its_samples_says_so(tmp_path: Path, path: str) -> None:
    grid = federation(5, tmp_path / "state", **({"data-path": path} if path else {}))
    with pytest.raises(UserError, match=r"Node 10. cannot take part.*(data-path|/nowhere/samples.npz)"):
        played(tmp_path, grid=grid, own_data=True)


@pytest.mark.usefixtures("_in_haste")
@pytest.mark.parametrize(
    ("wishes", "message"),
    [
        ({"settings": f"{SMALL} workers=9"}, "9 workers and the federation 5 nodes.*num-supernodes=9"),
        ({"spec": "paper-iod"}, "Did you mean 'paper-iid'"),
        ({"rounds": "many"}, "rounds must be a whole number; given 'many'"),
        ({"settings": f"{SMALL} attack.name=alie attack.byzantine=2"}, "needs all workers' models"),
        ({"settings": f"{SMALL} defence.aggregator=krum"}, "defence.aggregator has no effect here"),
        ({"settings": SMALL, "join_seconds": -1.0}, "join_seconds must be"),
        ({"settings": f"{SMALL} model='softmax"}, r"cannot be read.*No closing quotation.*close every quote"),
    ],
)
def test_what_cannot_be_run_is_said(tmp_path: Path, wishes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        played(tmp_path, **wishes)


def test_another_run_in_the_folder_is_left_alone(tmp_path: Path) -> None:
    played(tmp_path, rounds=1)
    with refused_as("wrong-run", tmp_path / "run"):
        played(tmp_path, f"{SMALL} seed=1", rounds=1)


def test_the_simulator_does_not_go_on_with_a_run_whose_workers_are_nodes(tmp_path: Path) -> None:
    played(tmp_path, rounds=1)
    with pytest.raises(UserError, match=r'nodes of a Flower federation.*flwr run.*out=".*run"'):
        simulator.resume(tmp_path / "run", callbacks=[])


def test_a_damaged_number_of_the_run_is_said(tmp_path: Path) -> None:
    played(tmp_path, rounds=1)
    (tmp_path / "run/flower.json").write_text("{")
    with refused_as("damaged-file", "flower.json"):
        played(tmp_path, rounds=1)


def test_what_takes_longer_to_send_than_to_wait_for_is_looked_for_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    grid = federation(5, tmp_path / "state")
    push = grid.push_messages

    def slow(messages: Iterable[Message]) -> Iterable[str]:
        time.sleep(0.05)
        return push(messages)

    monkeypatch.setattr(grid, "push_messages", slow)
    played(tmp_path, grid=grid, upload_seconds=0.01)
    assert rounds_of(tmp_path / "run") == simulated(tmp_path / "simulated", SMALL, 3)
