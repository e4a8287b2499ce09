"""Members that come and go while a run is played, by the file that names them."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cbdsl
from cbdsl.algorithm.messages import Order
from cbdsl.errors import UserError
from cbdsl.network import topics, wire
from cbdsl.network.mqtt import Address
from cbdsl.network.roster import Roster, RosterFile
from cbdsl.network.server import NetworkSwarm, ServerConfig
from cbdsl.network.session import ServedRun, open_run, serve
from cbdsl.network.timeouts import Deadlines
from cbdsl.rng import stream
from cbdsl.runs.build import Experiment, UserParts
from support.bus import Bus
from support.deployment import brokers, deployment, pictures, tiny_spec, wait_until
from support.helpers import blobs, perceptron, small_spec
from support.refusals import refused_as
from support.worker_threads import PACE, Crew, prepared, without_time

LATE = {
    "claim: too late for its round", "claim: from an earlier round", "upload: from an earlier round",
    "upload: not requested",
}  # fmt: skip
"""What may be refused to one who joins in the middle of a round."""
OLD = tuple(f"w{number}" for number in range(6))


def write(path: Path, names: Iterable[str]) -> Path:
    """As `cbdsl provision` writes it: whole, or not at all."""
    beside = path.with_name("beside")
    beside.write_text("".join(f"{name}\n" for name in names))
    beside.replace(path)
    return path


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cbdsl.network.roster._SETTLED_SECONDS", 0.01)
    monkeypatch.setattr("cbdsl.network.worker._HELLO_SECONDS", (0.2, 0.5))
    monkeypatch.setattr("cbdsl.network.worker._WAIT_SECONDS", 0.05)


# --- the two files


def test_numbers_are_never_given_twice_and_a_name_keeps_its_own(tmp_path: Path) -> None:
    path = tmp_path / "roster.json"
    roster = Roster(path, 3, ("a", "b", "c"))
    assert roster.follow(("c", "a", "b")) == ([], [])  # another order changes nothing
    assert roster.follow(("d", "c", "a")) == (["d"], ["b"])
    assert roster.follow(("c", "a", "e", "d")) == (["e"], [])
    again = Roster(path, 3)
    assert again.names == ("a", "b", "c", "d", "e")
    assert (list(again.members()), again.places, again.listed()) == ([0, 2, 3, 4], 4, ["a", "c", "d", "e"])
    assert again.has_left("b")
    assert again.follow(("b", "a")) == (["b"], ["c", "d", "e"])
    assert (again.number("b"), again.number("e"), list(again.members())) == (1, 4, [0, 1])
    assert not again.has_room_for("f")


def test_a_run_that_was_open_to_all_is_closed_to_all_but_those_who_are_named(tmp_path: Path) -> None:
    roster = Roster(tmp_path / "roster.json", 4)
    roster.enrol(["a", "b"])
    assert (list(roster.members()), roster.places) == ([0, 1, 2, 3], 4)
    assert roster.follow(("b", "c")) == (["c"], ["a"])
    again = Roster(tmp_path / "roster.json", 4)
    assert (list(again.members()), again.places, again.has_room_for("d")) == ([1, 2], 2, False)


def test_more_members_than_numbers_are_refused_and_nothing_is_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cbdsl.network.roster.MAX_WORKERS", 3)
    roster = Roster(tmp_path / "roster.json", 2, ("a", "b"))
    roster.follow(("a", "c"))
    with refused_as("too-large", "3 workers"):
        roster.follow(("a", "d"))  # the number of b is not free
    assert roster.listed() == ["a", "c"]


def test_a_folder_of_an_earlier_version_is_read(tmp_path: Path) -> None:
    (tmp_path / "roster.json").write_text(json.dumps({"names": ["a", "b"], "closed": True, "samples": {}}))
    assert list(Roster(tmp_path / "roster.json", 2).members()) == [0, 1]


def test_a_file_is_read_again_when_it_changes_and_only_then(tmp_path: Path) -> None:
    path = write(tmp_path / "roster.txt", ("a", "# a note", "b"))
    listed = RosterFile(path)
    assert listed.names == ("a", "b")
    assert not listed.has_changed()
    write(path, ("b", "a"))
    assert listed.has_changed()
    assert listed.names == ("b", "a")
    os.utime(path, (1, 1))
    assert not listed.has_changed()  # touched


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "contains no names"),
        (b"# everybody has gone\n\n", "contains no names"),
        (b"a\nb\na\n", "'a' 2 times"),
        (b"a\nb/c\n", "cannot be the name"),
        (b"\xff\xfe\0", "cannot be read"),
        (b"a\n" * 2**21 + b"a", "longer than"),
        (None, "cannot be read"),
    ],
)
def test_a_damaged_file_changes_nothing_and_is_told_of_once(
    content: bytes | None, reason: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write(tmp_path / "roster.txt", ("a", "b"))
    listed = RosterFile(path)
    if content is None:
        path.unlink()
    else:
        path.write_bytes(content)
    for _ in range(3):
        assert not listed.has_changed()
    assert listed.names == ("a", "b")
    assert len(caplog.messages) == 1
    assert reason in caplog.text
    assert "The swarm stays as it is: 2 names" in caplog.text
    write(path, ("a", "c"))
    assert listed.has_changed()
    if content is not None:
        path.write_bytes(content)
        with pytest.raises(UserError, match=reason):
            RosterFile(path)


def test_half_a_file_changes_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write(tmp_path / "roster.txt", ("north", "south", "porch"))
    listed = RosterFile(path)
    path.write_text("north\nsou")
    assert not listed.has_changed()
    assert "its last line has no end" in caplog.text
    assert listed.names == ("north", "south", "porch")
    path.write_text("north\nsouth\n")
    assert listed.has_changed()
    path.write_text("north\nsouth")
    assert RosterFile(path).names == ("north", "south")  # as an editor may leave it, before a run


def test_a_file_that_is_being_written_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "roster.txt", ("a", "b", "porch"))
    listed = RosterFile(path)
    path.write_text("a\nb\npor")  # an editor that writes in place, half-way

    def meanwhile(_: float) -> None:
        path.write_text("a\nb\nporch\nshed\n")

    monkeypatch.setattr(time, "sleep", meanwhile)
    assert not listed.has_changed()
    monkeypatch.setattr(time, "sleep", lambda _: None)
    assert listed.has_changed()
    assert listed.names == ("a", "b", "porch", "shed")


# --- who takes part


def test_without_changes_the_draw_is_what_it_was() -> None:
    for participation in (0.5, 4, 1.0, 6):
        server = prepared(small_spec(participation=participation)).server
        for number in range(1, 6):
            banned = frozenset({2} if number > 2 else ())
            drawn = [int(one) for one in stream(0, "participation", number).permutation(6) if one not in banned]
            count = {0.5: 3, 4: 4, 1.0: 6, 6: 6}[participation]
            assert server.participants(number, banned, range(6)) == tuple(sorted(drawn[:count]))


def test_the_draw_is_among_the_members_and_of_as_many_as_they_are() -> None:
    members = [0, 1, 4, 5, 6, 7, 8, 9]
    server = prepared(small_spec(participation=0.5)).server
    drawn = [server.participants(number, frozenset({9}), members) for number in range(1, 40)]
    assert {len(one) for one in drawn} == {4}
    assert {worker for one in drawn for worker in one} == set(members) - {9}
    fixed = prepared(small_spec(participation=6)).server
    assert len(fixed.participants(1, frozenset(), members)) == 6
    assert fixed.participants(1, frozenset(), [3, 8]) == (3, 8)
    assert server.participants(1, frozenset(), []) == ()


def test_an_order_says_how_many_members_there_are() -> None:
    stage = prepared(small_spec(method="scaffold"))
    assert stage.server.order(stage.first_state()).members == 6
    order = stage.server.order(stage.first_state(), [0, 7])
    assert (order.members, order.participants) == (2, (0, 7))


# --- a run whose members change


class ChangingCrew(Crew):
    """Workers of a stage, and further ones, who have the samples of the first."""

    def own(self, number: int) -> Any:  # noqa: ANN401
        return super().own(number % 6)

    def add(self, name: str) -> int:
        self.names = (*self.names, name)
        self.start(len(self.names) - 1)
        return len(self.names) - 1


def served(bus: Bus, stage: Experiment, folder: Path, pace: Deadlines = PACE, **callbacks: Any) -> ServedRun:  # noqa: ANN401
    listed = RosterFile(folder / "roster.txt")
    config = ServerConfig("s", Address("127.0.0.1", 1), pace, listed.names, listed)
    return serve(stage, open_run(stage, folder / "run"), config, make_link=bus.link, **callbacks)


def events(folder: Path, kind: str) -> list[dict[str, Any]]:
    lines = (folder / "run" / "events.jsonl").read_text().splitlines()
    return [found for line in lines if (found := json.loads(line))["event"] == kind]


@pytest.fixture
def crew(tmp_path: Path) -> Iterable[ChangingCrew]:
    made = ChangingCrew(Bus(), prepared(small_spec(rounds=12)), tmp_path)
    write(tmp_path / "roster.txt", OLD)
    for number in range(6):
        made.start(number)
    yield made
    for number in made.workers:
        made.stop(number)


def at(number: int, act: Callable[[], object]) -> Callable[[cbdsl.RoundRecord], None]:
    def on_round(line: cbdsl.RoundRecord) -> None:
        if line.round == number:
            act()

    return on_round


def until(condition: Callable[[], bool]) -> Callable[[cbdsl.RoundRecord], None]:
    """Slow the server down until something has come to pass."""

    def on_round(_: cbdsl.RoundRecord) -> None:
        deadline = time.monotonic() + 30
        while not condition() and time.monotonic() < deadline:
            time.sleep(0.02)

    return on_round


def test_a_device_joins_a_running_swarm_and_another_one_leaves_it(tmp_path: Path, crew: ChangingCrew) -> None:
    bus, said = crew.bus, []

    def on_round(line: cbdsl.RoundRecord) -> None:
        if line.round == 2:
            write(tmp_path / "roster.txt", ("porch", *OLD))
        if line.round == 3:  # it is in; its hello is answered
            crew.add("porch")
            until(lambda: "porch" in said)(line)
        if line.round == 6:
            write(tmp_path / "roster.txt", ("porch", *OLD[:4], "w5"))
        if line.round == 8:
            claim = wire.ClaimMessage(b"run-0001", 8, 0.0, b"")
            bus.publish(topics.from_worker("s", "w4", "claim"), wire.encode(claim))

    def on_event(event: str, details: dict[str, Any]) -> None:
        if event == "connected":
            said.append(details["worker"])

    outcome = served(bus, crew.stage, tmp_path, on_round=on_round, on_event=on_event)
    records = outcome.result.rounds
    assert [line.participants for line in records] == [6, 6, 7, 7, 7, 7, 6, 6, 6, 6, 6, 6]
    claims = [json.loads(line)["claims"] for line in (tmp_path / "run" / "claims.jsonl").read_text().splitlines()]
    assert "porch" in claims[4]
    assert "w4" in claims[5]
    assert all("w4" not in said_then for said_then in claims[6:])
    assert [(one["worker"], one["members"]) for one in events(tmp_path, "enrolled")] == [("porch", 7)]
    assert [(one["worker"], one["members"]) for one in events(tmp_path, "left")] == [("w4", 6)]
    assert outcome.refused["claim: from a worker that is no longer in the roster"] == 1
    stored = json.loads((tmp_path / "run" / "roster.json").read_text())
    assert (stored["names"], stored["left"]) == ([*OLD, "porch"], ["w4"])
    assert outcome.result.summary.banned == []
    for name in ("porch", "w0"):
        crew.threads[crew.names.index(name)].join(20)
        found = cbdsl.load(tmp_path / name / "model.safetensors")
        assert np.array_equal(found.weights, outcome.result.weights)


def test_a_run_without_changes_has_the_numbers_of_the_simulator(tmp_path: Path, crew: ChangingCrew) -> None:
    def touch(line: cbdsl.RoundRecord) -> None:
        write(tmp_path / "roster.txt", OLD if line.round % 2 else reversed(OLD))

    outcome = served(crew.bus, crew.stage, tmp_path, on_round=touch)
    simulated = cbdsl.run(small_spec(rounds=12), model=perceptron, data=blobs())
    assert without_time(outcome.result) == without_time(simulated)
    assert np.array_equal(outcome.result.weights, simulated.weights)


@pytest.mark.parametrize(
    "settings",
    [
        {"method": "scaffold"},
        {"selection__name": "rotation", "selection__k": 3},
        {"codec__up": "q4", "codec__down": "q4"},
        {"method": "fedavg", "participation": 0.5},
        {"swarm__start": "apart"},
    ],
    ids=str,
)
def test_members_change_whatever_the_method(settings: dict[str, Any], tmp_path: Path) -> None:
    bus, stage = Bus(), prepared(small_spec(rounds=8, **settings))
    write(tmp_path / "roster.txt", OLD)
    made = ChangingCrew(bus, stage, tmp_path)
    for number in range(6):
        made.start(number)
    said: list[str] = []

    def on_round(line: cbdsl.RoundRecord) -> None:
        if line.round == 2:
            write(tmp_path / "roster.txt", (*OLD[1:], "porch", "shed"))
        if line.round == 3:
            made.add("porch")
            until(lambda: "porch" in said)(line)

    serving = Experiment.prepare(stage.spec, UserParts(model=perceptron, data=blobs()), 1, deal=False)
    outcome = served(
        bus, serving, tmp_path, on_round=on_round,
        on_event=lambda event, details: said.append(details["worker"]) if event == "connected" else None,
    )  # fmt: skip
    for number in made.workers:
        made.stop(number)
    assert outcome.result.summary.rounds == 8
    assert outcome.result.summary.banned == []
    assert set(outcome.refused) <= LATE
    whole = [line.participants for line in outcome.result.rounds]
    assert whole == ([3, 3, 4, 4, 4, 4, 4, 4] if settings.get("participation") else [6, 6, 7, 7, 7, 7, 7, 7])


def test_a_server_that_is_started_again_with_another_roster_goes_on(tmp_path: Path, crew: ChangingCrew) -> None:
    def stop() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        served(crew.bus, crew.stage, tmp_path, on_round=at(4, stop))
    write(tmp_path / "roster.txt", ("shed", *OLD[:2], *OLD[3:]))
    crew.add("shed")
    outcome = served(crew.bus, crew.stage, tmp_path)
    assert [line.participants for line in outcome.result.rounds] == [6] * 12
    assert [one["worker"] for one in events(tmp_path, "enrolled")] == ["shed"]
    assert [one["worker"] for one in events(tmp_path, "left")] == ["w2"]
    assert json.loads((tmp_path / "run" / "roster.json").read_text())["names"] == [*OLD, "shed"]


def test_a_server_killed_between_a_change_and_the_round_after_it_goes_on_as_if_it_had_not_been(
    tmp_path: Path, crew: ChangingCrew, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = NetworkSwarm.report

    def dies(self: NetworkSwarm, order: Order) -> Any:  # noqa: ANN401
        if order.round == 4:
            monkeypatch.setattr(NetworkSwarm, "report", honest)
            raise KeyboardInterrupt
        return honest(self, order)

    monkeypatch.setattr(NetworkSwarm, "report", dies)
    change = at(3, lambda: write(tmp_path / "roster.txt", ("shed", *OLD[1:])))
    with pytest.raises(KeyboardInterrupt):
        served(crew.bus, crew.stage, tmp_path, on_round=change)
    stored = json.loads((tmp_path / "run" / "roster.json").read_text())
    assert (stored["names"], stored["left"]) == ([*OLD, "shed"], ["w0"])
    write(tmp_path / "roster.txt", ("attic", "shed", *OLD[1:]))  # and another one meanwhile
    pace = replace(PACE, join_seconds=0.5)  # neither of the new ones is there
    outcome = served(crew.bus, crew.stage, tmp_path, pace)
    assert [line.participants for line in outcome.result.rounds] == [6, 6, 6, *[7] * 9]
    assert json.loads((tmp_path / "run" / "roster.json").read_text())["names"] == [*OLD, "shed", "attic"]


def test_who_is_removed_while_it_is_invited_ends_its_round_and_is_not_in_the_next(
    tmp_path: Path, crew: ChangingCrew
) -> None:
    removed: list[str] = []

    def lose(topic: str) -> bool:
        if topic.endswith("/invitation") and not removed:
            removed.append(topic.split("/")[3])
            write(tmp_path / "roster.txt", [name for name in OLD if name != removed[0]])
            crew.stop(OLD.index(removed[0]))  # revoked: the broker ends its connection
        return False

    crew.bus.lose = lose
    outcome = served(crew.bus, crew.stage, tmp_path)
    assert removed
    number = OLD.index(removed[0])
    first = next(line for line in outcome.result.rounds if any(v["worker"] == number for v in line.verdicts))
    later = outcome.result.rounds[first.round :]
    assert {line.participants for line in later} == {5}
    assert all(number not in (*line.accepted, *line.silent, *line.declined) for line in later)
    assert outcome.result.summary.banned == []


def test_who_is_put_back_has_its_number_again(tmp_path: Path, crew: ChangingCrew) -> None:
    def on_round(line: cbdsl.RoundRecord) -> None:
        if line.round == 2:
            write(tmp_path / "roster.txt", OLD[1:])
        if line.round == 4:
            write(tmp_path / "roster.txt", OLD)

    outcome = served(crew.bus, crew.stage, tmp_path, on_round=on_round)
    assert [line.participants for line in outcome.result.rounds] == [6, 6, 5, 5, *[6] * 8]
    claims = [json.loads(line)["claims"] for line in (tmp_path / "run" / "claims.jsonl").read_text().splitlines()]
    assert "w0" in claims[-1]
    assert set(outcome.refused) <= LATE
    assert json.loads((tmp_path / "run" / "roster.json").read_text()).get("left") is None


def test_who_is_taken_from_the_roster_says_so_once(
    tmp_path: Path, crew: ChangingCrew, caplog: pytest.LogCaptureFixture
) -> None:
    served(crew.bus, crew.stage, tmp_path, on_round=at(2, lambda: write(tmp_path / "roster.txt", OLD[1:])))
    told = [line for line in caplog.messages if "takes no part in the run any more" in line]
    assert len(told) == 1
    assert told[0].startswith("worker w0 ")


def test_everybody_may_be_replaced(tmp_path: Path, crew: ChangingCrew) -> None:
    """A file of nobody is an error; a file of nobody that was there before is not."""

    def on_round(line: cbdsl.RoundRecord) -> None:
        if line.round == 2:
            write(tmp_path / "roster.txt", ["new"])
            crew.add("new")

    outcome = served(crew.bus, crew.stage, tmp_path, on_round=on_round)
    assert {line.participants for line in outcome.result.rounds[2:]} == {1}
    assert outcome.result.summary.rounds == 12


def test_everybody_may_be_replaced_while_a_round_waits_for_them(
    tmp_path: Path, crew: ChangingCrew, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cbdsl.network.server.REPEAT_SECONDS", 0.1)

    def lose(topic: str) -> bool:
        rounds = tmp_path / "run" / "rounds.jsonl"
        if not topic.endswith("/down/order") or not rounds.exists() or rounds.read_text().count("\n") < 2:
            return False
        crew.bus.lose = lambda _: False
        for number in range(6):
            crew.stop(number)
        write(tmp_path / "roster.txt", ["new"])
        crew.add("new")
        return True

    crew.bus.lose = lose
    outcome = served(crew.bus, crew.stage, tmp_path)
    assert [line.participants for line in outcome.result.rounds[:3]] == [6, 6, 6]
    assert {line.participants for line in outcome.result.rounds[3:]} == {1}
    assert outcome.result.summary.rounds == 12
    claims = [json.loads(line)["claims"] for line in (tmp_path / "run" / "claims.jsonl").read_text().splitlines()]
    assert set(claims[-1]) == {"new"}


@pytest.mark.slow
def test_the_same_command_goes_on_with_another_roster_and_gives_everybody_the_model(tmp_path: Path) -> None:
    spec = tiny_spec(pictures(tmp_path / "data"), workers=3, rounds=40)
    with deployment(tmp_path, spec, brokers()[0]) as made:
        made.start_workers()
        made.start_server()
        wait_until(lambda: made.rounds_played() >= 3)
        made.kill_server()
        write(tmp_path / "roster.txt", ("porch", *made.names[:2]))
        (tmp_path / "workers" / "porch").mkdir()
        shutil.copy(tmp_path / "workers" / made.names[0] / "samples.npz", tmp_path / "workers" / "porch")
        made.names = (*made.names, "porch")
        made.start_worker("porch")
        made.start_server()
        made.wait_for_end()
        for name in ("porch", *made.names[:2]):
            made.workers[name].wait(60)
    stored = json.loads((tmp_path / "run" / "roster.json").read_text())
    assert (stored["names"], stored["left"]) == (list(made.names), ["worker-2"])
    trained = cbdsl.load(tmp_path / "run").weights
    for name in ("porch", *made.names[:2]):
        assert np.array_equal(cbdsl.load(tmp_path / "workers" / name / "model.safetensors").weights, trained)
