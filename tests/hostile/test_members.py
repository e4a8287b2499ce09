"""Members that are late, stall, flood, lie and come and go: what they cost the others, over a real broker."""

from __future__ import annotations

import asyncio
import contextlib
import json
import statistics
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from cbdsl.network import wire
from cbdsl.network.wire import OrderMessage
from support import light_workers
from support.deployment import Deployment, brokers, deployment, memory_of, pictures, tiny_spec
from support.light_workers import Crowd, LightWorker

pytestmark = pytest.mark.slow

WORKERS = 20
LEAGUE = 5  # members that take turns
BEST = float.fromhex("0x1p-20")  # a score that is always invited


class Late(LightWorker):
    """Claims just before the deadline."""

    seconds = 1.9

    def answer(self, order: OrderMessage, score: float) -> None:
        asyncio.get_running_loop().call_later(self.seconds, super().answer, order, score)


class Staller(LightWorker):
    """Claims to be the best, and never uploads."""

    def answer(self, order: OrderMessage, score: float = BEST) -> None:
        super().answer(order, min(score, BEST))


class Flooder(LightWorker):
    """Answers, and sends three hundred messages a second that nobody asked for."""

    flooding = False

    def answer(self, order: OrderMessage, score: float) -> None:
        super().answer(order, score)
        if not self.flooding:
            self.flooding = True
            self.flood(0)

    def flood(self, number: int) -> None:
        for turn in range(30):
            what = ("hello", "claim", "upload/0", "status")[(number + turn) % 4]
            self._say(what, b"junk %d" % number)
        if self._transport is not None:
            asyncio.get_running_loop().call_later(0.1, self.flood, number + 30)


class FalseClaimer(LightWorker):
    """Claims to be the best and uploads something else: banned the first time."""

    def answer(self, order: OrderMessage, score: float = BEST) -> None:
        super().answer(order, min(score, BEST))

    def invited(self, round_number: int) -> None:
        for piece in wire.split_content(self._run, round_number, bytes(4 * self._crowd.size)):
            self._say(f"upload/{piece.index}", wire.encode(piece))


class Restless(LightWorker):
    """Says goodbye after every answer and is back at once."""

    def answer(self, order: OrderMessage, score: float) -> None:
        super().answer(order, score)
        assert self._transport is not None
        self._transport.close()


class Turns(Late):
    """One of five in league: in every round another one is late or, when its turn comes again, is the best and stalls.

    So each keeps its place among those who are waited for, as far as four rounds in five of good conduct will do it.
    """

    def answer(self, order: OrderMessage, score: float) -> None:
        times, whose = divmod(order.round, LEAGUE)
        if whose != self._number % LEAGUE:
            LightWorker.answer(self, order, score)
        elif times % 2:
            super().answer(order, score)
        else:
            LightWorker.answer(self, order, BEST)


NOT_YET = pytest.mark.xfail(
    reason="Who stalls in every tenth round has sat out its back-off of 2, 4 and 8 rounds by its turn, and each "
    "stall costs the whole upload deadline: 27 rounds of 100, and a median of eight times the clean one.",
)
HOSTILE = (Late, Staller, Flooder, FalseClaimer, Restless)


@dataclass
class Outcome:
    seconds: list[float]
    missing: dict[str, int]  # the most rounds in a row in which somebody's answer was missing
    banned: list[int]
    server: int  # kilobytes at most
    broker: int


@contextlib.contextmanager
def members(made: Deployment, kinds: tuple[type[LightWorker], ...]) -> Iterator[None]:
    """Everybody in a thread of their own, the hostile ones last."""
    honest = len(made.names) - len(kinds)
    crowd = Crowd("test", size=made.stage.engine.size)
    chosen = {
        name: kinds[number - honest] if number >= honest else LightWorker for number, name in enumerate(made.names)
    }
    thread = threading.Thread(
        target=lambda: asyncio.run(light_workers.play(crowd, made.broker.port, chosen)), daemon=True
    )
    thread.start()
    yield
    crowd.finished = True
    thread.join(30)


def played(folder: Path, rounds: int, kinds: tuple[type[LightWorker], ...]) -> Outcome:
    folder.mkdir()
    spec = tiny_spec(pictures(folder / "data", train=2000), workers=WORKERS, rounds=rounds)
    with deployment(folder, spec, brokers()[0]) as made:
        made.start_server("--round-seconds", "20", "--upload-seconds", "10", "--least-seconds", "2",
                          "--grace-seconds", "1", "--join-seconds", "10")  # fmt: skip
        assert made.server is not None
        pid, most = made.server.pid, [0, 0]
        with members(made, kinds):
            while not made.server_ended():
                with contextlib.suppress(OSError, StopIteration):
                    most = [max(most[0], memory_of(pid)), max(most[1], memory_of(made.broker.pid))]
                time.sleep(0.05)
            made.wait_for_end()
        records = [json.loads(line) for line in (made.out / "rounds.jsonl").read_text().splitlines()]
        events = [json.loads(line) for line in (made.out / "events.jsonl").read_text().splitlines()]
        closed = [event for event in events if event["event"] == "closed"]
        honest = made.names[: WORKERS - len(kinds)]
        assert len(records) == rounds
        return Outcome(
            [record["seconds"] for record in records],
            {name: longest([name in event["missing"] for event in closed]) for name in honest},
            records[-1]["banned"],
            *most,
        )


def longest(flags: list[bool]) -> int:
    """How many in a row are true, at most."""
    best = now = 0
    for flag in flags:
        now = now + 1 if flag else 0
        best = max(best, now)
    return best


@pytest.mark.parametrize(
    ("rounds", "kinds"),
    [
        pytest.param(30, HOSTILE, id="30-all"),
        pytest.param(100, HOSTILE[:1], id="100-late", marks=pytest.mark.hostile),
        pytest.param(100, HOSTILE, id="100-all", marks=pytest.mark.hostile),
        pytest.param(100, (Turns,) * LEAGUE, id="100-turns", marks=[pytest.mark.hostile, NOT_YET]),
    ],
)
def test_hostile_members_hold_nobody_up(rounds: int, kinds: tuple[type[LightWorker], ...], tmp_path: Path) -> None:
    clean = played(tmp_path / "clean", rounds, ())
    held, hostile = played(tmp_path / "held", rounds, kinds), len(kinds)
    usual = statistics.median(clean.seconds)
    print(f"median {usual:.3f} s clean, {statistics.median(held.seconds):.3f} s with {hostile}")
    print(f"{sum(clean.seconds):.0f} s in all clean, {sum(held.seconds):.0f} s with them")
    print(f"server {clean.server} and {held.server} kB, broker {clean.broker} and {held.broker} kB")
    print(f"rounds in a row without somebody honest: {max(held.missing.values())}")
    assert statistics.median(held.seconds) <= 3 * usual + 0.05
    assert set(held.banned) <= set(range(WORKERS - hostile, WORKERS))
    assert max(held.missing.values()) <= 3
    assert held.server < 2 * clean.server
    assert held.broker < 2 * clean.broker
