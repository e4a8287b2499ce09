"""Owners of nodes who have read the code: they may waste their own place, and nobody else's."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Error, Message, RecordDict

from cbdsl.errors import UserError
from cbdsl.flower import flower_messages, server
from cbdsl.flower.flower_messages import Context, FlowerMessage
from cbdsl.flower.server import play
from cbdsl.network.timeouts import Deadlines
from cbdsl.network.wire import ClaimMessage, Hello
from support.flower_federation import SMALL, own_files, played, rounds_of, simulated
from support.local_grid import HANDLERS, Handler, LocalGrid, LocalNode, context_of, federation
from support.refusals import refused_as

LIAR = 102  # the node of worker 2
HONEST = HANDLERS[flower_messages.ORDER]


@pytest.fixture(autouse=True)
def _in_haste(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "LEAST_SECONDS", 1.0)


def sent(message: Message) -> tuple[str, int, str]:
    """Kind, node and round of a message."""
    return message.metadata.message_type, message.metadata.dst_node_id, message.metadata.group_id


def with_extra_upload(message: Message, context: Context) -> Message:
    """Claims a score for which it is never invited, and sends a model all the same."""
    claim = flower_messages.read(HONEST(message, context).content).form(ClaimMessage)
    form = ClaimMessage(claim.run, claim.round, 1e6, claim.commitment)
    return flower_messages.make_reply(flower_messages.make_flower_message([form], {"upload": b"x"}), message)


def test_a_model_that_nobody_asked_for_silences_nobody(tmp_path: Path) -> None:
    grid = federation(5, tmp_path / "state")
    grid.nodes[LIAR].instead = {flower_messages.ORDER: with_extra_upload}
    played(tmp_path, grid=grid)
    lines = rounds_of(tmp_path / "run")
    assert [line["silent"] for line in lines] == [[], [], []]
    assert all(line["accepted"] and line["accepted"] != [2] for line in lines)


class Doubled(LocalGrid):
    """In the first round the owner of a node starts another one with the same files; both hold their answers back until
    both were asked, and the one that was there first answers first."""

    def __init__(self, nodes: dict[int, LocalNode], double: LocalNode) -> None:
        super().__init__(nodes)
        self._double, self._orders = double, set[int]()

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        messages = list(messages)
        self._orders |= {node for kind, node, _ in map(sent, messages) if kind == flower_messages.ORDER}
        if LIAR in self._orders:
            self.nodes[999] = self._double
        return super().push_messages(messages)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        def is_held(key: str) -> bool:
            message = self._waiting.get(key)
            return (
                message is not None and sent(message)[:2] == (flower_messages.ORDER, LIAR) and 999 not in self._orders
            )

        return super().pull_messages([key for key in message_ids if not is_held(key)])


@pytest.mark.parametrize(
    ("first", "second"), [("an answer", "stranger"), ("stranger", "stranger"), ("stranger", "lacks")]
)
def test_two_nodes_with_one_token_are_no_more_than_one_worker(tmp_path: Path, first: str, second: str) -> None:
    def saying(what: str) -> dict[str, Handler]:
        return {
            flower_messages.ORDER: lambda message, _: flower_messages.make_reply(FlowerMessage({what: True}), message)
        }

    nodes = federation(5, tmp_path / "state").nodes
    nodes[LIAR].instead = {} if first == "an answer" else saying(first)
    played(tmp_path, grid=Doubled(nodes, LocalNode(nodes[LIAR].config, saying(second))), rounds=2)
    lines = rounds_of(tmp_path / "run")
    assert all(line["traffic"]["score"][0] >= 4 and line["accepted"] for line in lines)
    assert lines[-1]["banned"] == []


class Slow(Doubled):
    """The double answers its order a while after the first node has failed."""

    looks = 0

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        self.looks += 999 in self._orders

        def is_late(key: str) -> bool:
            return key in self._waiting and sent(self._waiting[key])[1] == 999 and 0 < self.looks < 5

        return super().pull_messages([key for key in message_ids if not is_late(key)])


def test_what_fails_at_a_node_that_a_worker_has_left_does_not_matter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A SuperNode starts again, and Flower says only then that the old one cannot answer."""
    monkeypatch.setattr(server, "_NODE_POLL_SECONDS", 0.0)
    wanted = simulated(tmp_path / "simulated", SMALL, 2)
    nodes = federation(5, tmp_path / "state").nodes
    failing = Error(code=3, reason="the node is unavailable")
    nodes[LIAR].instead = {flower_messages.ORDER: lambda message, _: Message(failing, reply_to=message)}
    played(tmp_path, grid=Slow(nodes, LocalNode(nodes[LIAR].config)), rounds=2)
    assert rounds_of(tmp_path / "run") == wanted


class Forging(LocalGrid):
    """Before an honest node answers an order, the liar answers it, in its own name or (Flower would not let it) not."""

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        message_ids = list(message_ids)
        asked = [self._waiting[key] for key in message_ids if key in self._waiting]
        forged = [
            flower_messages.make_reply(FlowerMessage({"refusal": "I am off"}), one)
            for one in asked
            if sent(one)[0] == flower_messages.ORDER and sent(one)[1] != LIAR
        ]
        for one in forged:
            one.metadata.__dict__["_src_node_id"] = LIAR
        return [*forged, *super().pull_messages(message_ids)]


def test_nobody_answers_for_somebody_else(tmp_path: Path) -> None:
    wanted = simulated(tmp_path / "simulated", SMALL, 2)
    played(tmp_path, grid=Forging(federation(5, tmp_path / "state").nodes), rounds=2)
    assert rounds_of(tmp_path / "run") == wanted


class Unreadable(LocalGrid):
    """Flower fetches several replies at once; if it cannot read one of them, all of them are lost."""

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        replies = list(super().pull_messages(message_ids))
        if any(
            reply.metadata.message_type == flower_messages.ORDER and reply.metadata.src_node_id == LIAR
            for reply in replies
        ):
            raise ValueError("Unexpected format for object content")
        return replies


def test_a_reply_that_flower_cannot_read_costs_nobody_else_a_round(tmp_path: Path) -> None:
    played(tmp_path, grid=Unreadable(federation(5, tmp_path / "state").nodes))
    lines = rounds_of(tmp_path / "run")
    assert [line["traffic"]["score"][0] for line in lines] == [4, 4, 4]
    assert all(line["accepted"] for line in lines)
    assert lines[-1]["banned"] == []


def greeting(worker: int) -> FlowerMessage:
    return flower_messages.make_flower_message(
        [Hello(b"attacker", 1, 0, bytes(8), 0, bytes(16), "")], worker=worker, partitions=0
    )


def test_a_node_is_one_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It comes before the others, goes and comes again, and each time says that it is another one."""
    wanted = simulated(tmp_path / "simulated", SMALL, 2)
    nodes = federation(5, tmp_path / "state").nodes
    numbers = [2, 0, 1, 3, 4]
    taken: list[int] = []

    def join(message: Message, context: Context) -> Message:
        if not taken:
            taken.append(numbers[0])
            return HANDLERS[flower_messages.JOIN](message, context)
        taken.append(numbers[len(taken) % 5])
        return flower_messages.make_reply(greeting(taken[-1]), message)

    nodes[LIAR].instead = {flower_messages.JOIN: join}

    class Early(LocalGrid):
        looks = 0

        def get_node_ids(self) -> Iterable[int]:
            self.looks += 1
            if self.looks < 10:
                return [LIAR] if self.looks % 2 else []
            return super().get_node_ids()

    monkeypatch.setattr(server, "_NODE_POLL_SECONDS", 0.05)
    played(tmp_path, grid=Early(nodes), rounds=2)
    assert len(taken) > 4
    assert rounds_of(tmp_path / "run") == wanted


def test_a_node_that_claims_another_nodes_worker_is_asked_later_and_new_nodes_at_once() -> None:
    known = server.NodeTable(3, Deadlines())
    lost: Callable[[Hello], bool] = lambda _: False  # noqa: E731
    assert known.poll_nodes(lambda: [1, 2]) == [1, 2]
    known.admit(1, greeting(0), lost)
    stranger = flower_messages.make_flower_message([Hello(b"somebody", 1, 0, bytes(8), 0, bytes(16), "")], worker=0)
    known.admit(2, stranger, lost)
    assert known.by_worker[0].node == 1
    time.sleep(server._NODE_POLL_SECONDS)
    assert known.poll_nodes(lambda: [1, 2, 3]) == [3], "seen at the next look; the other one is asked later"


def test_nodes_that_come_and_go_leave_no_questions_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "_NODE_POLL_SECONDS", 0.0)
    most = 0

    class Flickering(LocalGrid):
        number = 1000

        def get_node_ids(self) -> Iterable[int]:
            self.number += 1
            return [*super().get_node_ids(), self.number]

        def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
            nonlocal most
            message_ids = list(message_ids)
            most = max(most, len(message_ids))
            return super().pull_messages(message_ids)

    grid = Flickering(federation(5, tmp_path / "state").nodes)
    played(tmp_path, grid=grid, rounds=10)
    assert len(rounds_of(tmp_path / "run")) == 10
    assert grid.number > 1020
    assert most < 12


class Outage(LocalGrid):
    """When the orders of a round are given all nodes go but those who stay, for so many seconds."""

    def __init__(
        self, nodes: dict[int, LocalNode], round_number: int, stay: Iterable[int] = (), seconds: float = 1e9
    ) -> None:
        super().__init__(nodes)
        self._when, self._stay, self._seconds, self._since = str(round_number), set(stay), seconds, 0.0

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        messages = list(messages)
        if not self._since and any(
            (kind, when) == (flower_messages.ORDER, self._when) for kind, _, when in map(sent, messages)
        ):
            self._since = time.monotonic()
            for number, node in self.nodes.items():
                node.down = number not in self._stay
        return super().push_messages(messages)

    def get_node_ids(self) -> Iterable[int]:
        if self._since and time.monotonic() > self._since + self._seconds:
            for node in self.nodes.values():
                node.down = False
        return super().get_node_ids()


@pytest.mark.parametrize("settings", ["method=cb-dsl", "method=fedavg", "method=cb-dsl participation=0.4"])
def test_when_nobody_is_there_no_round_is_played_and_the_run_can_go_on(tmp_path: Path, settings: str) -> None:
    wanted = simulated(tmp_path / "simulated", f"{SMALL} {settings}", 5)
    nodes = federation(5, tmp_path / "state").nodes
    with pytest.raises(
        UserError, match=r'Round 3: none of \d workers answered.*1 seconds \(join-seconds\).*out=".*run"'
    ):
        played(tmp_path, f"{SMALL} {settings}", 5, Outage(nodes, 3), join_seconds=1)
    assert rounds_of(tmp_path / "run") == wanted[:2]
    assert not (tmp_path / "run/summary.json").exists()
    for node in nodes.values():
        node.down = False
    played(tmp_path, f"{SMALL} {settings}", 5, LocalGrid(nodes))
    assert rounds_of(tmp_path / "run") == wanted


def test_whoever_comes_back_in_time_goes_on(tmp_path: Path) -> None:
    wanted = simulated(tmp_path / "simulated", SMALL, 5)
    played(tmp_path, SMALL, 5, Outage(federation(5, tmp_path / "state").nodes, 3, seconds=3.0), join_seconds=60)
    assert rounds_of(tmp_path / "run") == wanted


@pytest.mark.parametrize("method", ["cb-dsl", "fedavg"])
def test_a_node_that_answers_nonsense_burns_no_rounds_while_the_others_are_away(tmp_path: Path, method: str) -> None:
    nodes = federation(5, tmp_path / "state").nodes

    def answer(message: Message, context: Context) -> Message:
        if sent(message)[2] != "2":
            return HONEST(message, context)
        return Message(RecordDict(), reply_to=message)

    nodes[LIAR].instead = {flower_messages.ORDER: answer}
    with refused_as("connection-failed", "Round 2: none of 5 workers"):
        played(tmp_path, f"{SMALL} method={method}", 4, Outage(nodes, 2, [LIAR]), join_seconds=1)
    assert len(rounds_of(tmp_path / "run")) == 1


def test_a_banned_node_burns_no_rounds_while_the_others_are_away(tmp_path: Path) -> None:
    """It is there and was not asked; that does not mean that those who were asked are the only ones to be away."""
    nodes = federation(5, tmp_path / "state").nodes
    nodes[LIAR].config["attack"] = "liar"
    with refused_as("connection-failed", "Round 3: none of 4 workers"):
        played(tmp_path, SMALL, 5, Outage(nodes, 3, [LIAR]), join_seconds=1)
    assert rounds_of(tmp_path / "run")[-1]["banned"] == [2]


def test_a_sample_of_workers_that_all_stay_away_does_not_end_the_run(tmp_path: Path) -> None:
    nodes = federation(5, tmp_path / "state").nodes
    nodes[LIAR].instead = {flower_messages.ORDER: lambda message, _: Message(RecordDict(), reply_to=message)}
    played(tmp_path, f"{SMALL} participation=0.2", 12, LocalGrid(nodes), join_seconds=20)
    lines = rounds_of(tmp_path / "run")
    heard = [line["traffic"]["score"][0] for line in lines]
    assert set(heard) == {0, 1}
    assert lines[-1]["banned"] == []


def test_a_node_that_stays_away_does_not_keep_a_run_from_going_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "_NODE_POLL_SECONDS", 0.0)
    nodes = federation(5, tmp_path / "state").nodes
    for node, path in zip(nodes.values(), own_files(tmp_path, 5), strict=True):
        node.config["data-path"] = path
    more: dict[str, Any] = {"own_data": True, "join_seconds": 1}
    with refused_as("connection-failed", "Round 3"):
        played(tmp_path, f"{SMALL} method=fedavg", 6, Outage(nodes, 3), **more)
    for number, node in nodes.items():
        node.down = number == LIAR
    later = Outage(nodes, 5, nodes)  # then it comes, and says only now how many samples it holds
    played(tmp_path, f"{SMALL} method=fedavg", 6, later, **more)
    lines = rounds_of(tmp_path / "run")
    assert [len(line["accepted"]) for line in lines[:4]] == [5, 5, 4, 4]
    assert len(lines[-1]["accepted"]) == 5
    assert np.isfinite([line["test_accuracy"] for line in lines]).all()


def test_who_refuses_does_not_keep_a_run_from_going_on(tmp_path: Path) -> None:
    nodes = federation(5, tmp_path / "state").nodes
    with refused_as("connection-failed", "Round 2"):
        played(tmp_path, SMALL, 3, Outage(nodes, 2), join_seconds=1)
    for node in nodes.values():
        node.down = False
    nodes[LIAR].instead = {
        flower_messages.JOIN: lambda message, _: flower_messages.make_reply(
            FlowerMessage({"refusal": "I will not"}), message
        ),
    }
    played(tmp_path, SMALL, 3, LocalGrid(nodes), join_seconds=2)
    assert [line["traffic"]["score"][0] for line in rounds_of(tmp_path / "run")] == [5, 4, 4]


def test_questions_are_asked_again_once(tmp_path: Path) -> None:
    """Where everything is unreadable, the server does not ask for ever."""

    class Broken(LocalGrid):
        asked = 0

        def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
            messages = list(messages)
            self.asked += sum(kind == flower_messages.ORDER for kind, *_ in map(sent, messages))
            return super().push_messages(messages)

        def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
            replies = list(super().pull_messages(message_ids))
            if any(reply.metadata.message_type == flower_messages.ORDER for reply in replies):
                raise KeyError("object")
            return replies

    grid = Broken(federation(5, tmp_path / "state").nodes)
    with refused_as("connection-failed", "Round 1: none of 5 workers"):
        play(grid, context_of(tmp_path / "run", settings=SMALL, rounds=2, join_seconds=3))
    assert grid.asked <= 5 * 5
