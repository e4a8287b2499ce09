"""Nodes that answer what they should not, come and go, or have lost what they knew: nobody else suffers from it."""

from __future__ import annotations

import math
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict

from cbdsl.flower import flower_messages, server
from cbdsl.flower.flower_messages import Context
from cbdsl.network.wire import ClaimMessage, Hello
from support.flower_federation import SMALL, played, rounds_of, simulated
from support.local_grid import HANDLERS, Handler, LocalGrid, LocalNode, federation

LIAR = 102  # the node of worker 2


@pytest.fixture
def _in_haste(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "LEAST_SECONDS", 1.0)


def with_node(tmp_path: Path, **instead: Handler) -> LocalGrid:
    """Five nodes, one of which answers otherwise."""
    grid = federation(5, tmp_path / "state")
    kinds = {"join": flower_messages.JOIN, "order": flower_messages.ORDER, "upload": flower_messages.UPLOAD}
    grid.nodes[LIAR].instead = {kinds[key]: act for key, act in instead.items()}
    return grid


def claiming(score: float, **fields: object) -> Handler:
    """Carries orders out, and claims another score, for another round or of another run."""

    def answer(message: Message, context: Context) -> Message:
        true = flower_messages.read(HANDLERS[flower_messages.ORDER](message, context).content).form(ClaimMessage)
        changed = {**vars(true), "score": float(np.float32(score)), **fields}
        return flower_messages.make_reply(flower_messages.make_flower_message([ClaimMessage(**changed)]), message)

    return answer


def uploading(content: bytes) -> Handler:
    def answer(message: Message, context: Context) -> Message:
        honest = flower_messages.read(HANDLERS[flower_messages.UPLOAD](message, context).content)
        assert not honest.large, "the worker does not know the claim that it is asked about"
        said = flower_messages.read(message.content)
        form = ClaimMessage(said.values["Invitation"][4:12], 1, 0.0, b"")
        return flower_messages.make_reply(flower_messages.make_flower_message([form], {"upload": content}), message)

    return answer


GARBAGE = {
    "nothing": RecordDict(),
    "other records": RecordDict({"cbdsl": MetricRecord({"score": 0.0}), "cbdsl-large": ConfigRecord({"upload": b"x"})}),
    "another type": RecordDict({"cbdsl": ConfigRecord({"ClaimMessage": 0.0})}),
    "no form": RecordDict({"cbdsl": ConfigRecord({"ClaimMessage": b"\x00" * 99})}),
    "a pickle": RecordDict({"cbdsl": ConfigRecord({"ClaimMessage": pickle.dumps(print)})}),
    "a number": RecordDict({"cbdsl": ConfigRecord({"ClaimMessage": 2**62, "worker": 1, "lacks": 0})}),
    "arrays": RecordDict({"cbdsl-large": ArrayRecord([np.zeros(3)])}),
}


@pytest.mark.parametrize("what", GARBAGE)
def test_garbage_is_silence_and_costs_nobody_anything(tmp_path: Path, what: str) -> None:
    grid = with_node(tmp_path, order=lambda message, _: Message(GARBAGE[what], reply_to=message))
    played(tmp_path, grid=grid)
    lines = rounds_of(tmp_path / "run")
    assert [line["traffic"]["score"][0] for line in lines] == [4, 4, 4]
    assert lines[-1]["banned"] == []
    assert all(line["accepted"] for line in lines)


@pytest.mark.parametrize("score", [math.nan, math.inf, -1.0])
def test_a_claim_that_cannot_be_true_is_set_aside(tmp_path: Path, score: float) -> None:
    played(tmp_path, grid=with_node(tmp_path, order=claiming(score)))
    lines = rounds_of(tmp_path / "run")
    assert all(list(line["set_aside"]) == ["2"] for line in lines)
    assert lines[-1]["banned"] == []


@pytest.mark.parametrize("changed", [{"round": 7}, {"run": b"another1"}], ids=["round", "run"])
def test_an_answer_for_another_round_or_run_is_not_heard(tmp_path: Path, changed: dict[str, Any]) -> None:
    played(tmp_path, grid=with_node(tmp_path, order=claiming(0.0, **changed)))
    lines = rounds_of(tmp_path / "run")
    assert all(line["traffic"]["score"][0] == 4 and line["accepted"] not in ([2], []) for line in lines)


def test_the_first_of_two_answers_counts(tmp_path: Path) -> None:
    honest = HANDLERS[flower_messages.ORDER]
    grid = with_node(
        tmp_path, order=lambda message, context: [honest(message, context), claiming(0.0)(message, context)]
    )
    played(tmp_path, grid=grid)
    assert rounds_of(tmp_path / "run") == simulated(tmp_path / "simulated", SMALL, 3)


@pytest.mark.parametrize(
    "content", [bytes(8_000_000), b"", pickle.dumps(print), b"\xff" * 4 * 7850], ids=["large", "empty", "pickle", "nan"]
)
def test_a_liar_is_banned_whatever_it_uploads(tmp_path: Path, content: bytes) -> None:
    played(tmp_path, grid=with_node(tmp_path, order=claiming(0.0), upload=uploading(content)))
    lines = rounds_of(tmp_path / "run")
    assert lines[0]["refuted"] == [2]
    assert lines[-1]["banned"] == [2]
    assert all(line["accepted"] for line in lines)


@pytest.mark.parametrize("what", ["lacks", "stranger"])
def test_a_node_that_always_lacks_something_is_not_served_for_ever(tmp_path: Path, what: str) -> None:
    lacking = flower_messages.FlowerMessage({what: True})
    grid = with_node(tmp_path, order=lambda message, _: flower_messages.make_reply(lacking, message))
    played(tmp_path, grid=grid)
    assert [line["traffic"]["score"][0] for line in rounds_of(tmp_path / "run")] == [4, 4, 4]
    assert grid.nodes[LIAR].heard.count(flower_messages.ORDER) <= 9


def test_an_answer_in_anothers_name_is_not_heard(tmp_path: Path) -> None:
    grid = with_node(tmp_path)

    class Crooked(LocalNode):
        def answer(self, message: Message, node: int) -> list[Message]:
            return super().answer(message, node if message.metadata.message_type == flower_messages.JOIN else 101)

    grid.nodes[LIAR] = Crooked(grid.nodes[LIAR].config)
    played(tmp_path, grid=grid)
    assert [line["traffic"]["score"][0] for line in rounds_of(tmp_path / "run")] == [4, 4, 4]


def test_a_node_that_fails_is_silent(tmp_path: Path) -> None:
    failing = Error(code=3, reason="\x1b[2Jit broke")
    grid = with_node(tmp_path, order=lambda message, _: Message(failing, reply_to=message))
    played(tmp_path, grid=grid)
    assert rounds_of(tmp_path / "run")[-1]["banned"] == []


@pytest.mark.usefixtures("_in_haste")
def test_nobody_takes_the_place_of_a_worker_that_is_there(tmp_path: Path) -> None:
    grid = with_node(tmp_path)
    grid.nodes[999] = LocalNode({"partition-id": 2, "state-path": str(tmp_path / "elsewhere")})
    played(tmp_path, grid=grid)
    settings = rounds_of(tmp_path / "run")
    assert flower_messages.ORDER not in grid.nodes[999].heard
    assert settings[-1]["banned"] == []


@pytest.mark.usefixtures("_in_haste")
def test_a_greeting_that_is_none_is_no_member(tmp_path: Path) -> None:
    grid = with_node(tmp_path)
    form = Hello(bytes(8), 1, 0, bytes(8), 0, bytes(16), "")

    def greeting(worker: object) -> Handler:
        return lambda message, _: flower_messages.make_reply(
            flower_messages.make_flower_message([form], worker=worker), message
        )

    for number, worker in enumerate((-1, 2**40, "two", b"")):
        grid.nodes[500 + number] = LocalNode({}, {flower_messages.JOIN: greeting(worker)})
    played(tmp_path, grid=grid)
    assert len(rounds_of(tmp_path / "run")) == 3


def down_after(grid: LocalGrid, number: int, orders: int, then: Callable[[], None]) -> None:
    """After so many orders something happens to a node, before it answers."""

    def answer(message: Message, context: Context) -> Message:
        if grid.nodes[number].heard.count(flower_messages.ORDER) == orders + 1:
            then()
            return []
        return HANDLERS[flower_messages.ORDER](message, context)

    grid.nodes[number].instead = {flower_messages.ORDER: answer}


def test_a_worker_on_another_node_goes_on_from_its_files(tmp_path: Path) -> None:
    """To the same numbers: the state is there, and the order it was killed over is given to it again."""
    wanted = simulated(tmp_path / "simulated", SMALL, 4)
    grid = with_node(tmp_path)

    def move() -> None:
        grid.nodes[LIAR].down = True
        grid.nodes[777] = LocalNode(grid.nodes[LIAR].config)

    down_after(grid, LIAR, 2, move)
    played(tmp_path, grid=grid, rounds=4)
    assert rounds_of(tmp_path / "run") == wanted
    assert grid.nodes[777].heard.count(flower_messages.ORDER) == 2


@pytest.mark.usefixtures("_in_haste")
def test_a_worker_that_is_gone_is_silent_and_not_banned(tmp_path: Path) -> None:
    grid = with_node(tmp_path)
    down_after(grid, LIAR, 1, lambda: setattr(grid.nodes[LIAR], "down", True))
    played(tmp_path, grid=grid, rounds=4)
    lines = rounds_of(tmp_path / "run")
    assert [line["traffic"]["score"][0] for line in lines] == [5, 4, 4, 4]
    assert lines[-1]["banned"] == []


@pytest.mark.parametrize("settings", ["method=cb-dsl", "method=cb-dsl codec.up=q4 codec.down=q4"])
def test_a_worker_that_lost_its_files_begins_again(tmp_path: Path, settings: str) -> None:
    grid = with_node(tmp_path)
    honest = HANDLERS[flower_messages.ORDER]

    def forgetful(message: Message, context: Context) -> Message:
        if grid.nodes[LIAR].heard.count(flower_messages.ORDER) == 3:
            for folder in (tmp_path / "state").glob("*/worker-2"):
                shutil.rmtree(folder)
        return honest(message, context)

    grid.nodes[LIAR].instead = {flower_messages.ORDER: forgetful}
    played(tmp_path, f"{SMALL} {settings}", grid=grid, rounds=6)
    lines = rounds_of(tmp_path / "run")
    assert all(line["traffic"]["score"][0] == 5 for line in lines)
    assert lines[-1]["banned"] == []
    assert grid.nodes[LIAR].heard.count(flower_messages.JOIN) == 2
