"""A hostile server against a worker: it cannot make it write elsewhere, run code, take more memory, or end.

The server here holds everything a server holds and speaks the protocol without a fault. Processes and broker are real.
"""

from __future__ import annotations

import json
import os
import stat
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from cbdsl.arrays import Samples
from cbdsl.models.layers import AvgPool2d, Conv2d, Flatten, Linear, MaxPool2d, Relu
from cbdsl.network.budget import needs_of
from cbdsl.network.device_worker import parse_announcement
from cbdsl.network.mqtt import Address
from cbdsl.network.wire import Announcement
from support.hostile_server import (
    HostileServer,
    Victim,
    announcement,
    broker,
    deep,
    fill,
    network,
    own_samples,
    play,
    slow_line,
    spec_text,
    victim,
    wait_until,
    wide,
    with_shared,
    zeros_of,
)

pytestmark = pytest.mark.slow

MEMORY = 300 * 10**6


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Address]:
    with broker(tmp_path_factory.mktemp("broker")) as made:
        yield made


@pytest.fixture
def server(address: Address) -> Iterator[HostileServer]:
    made = HostileServer(address)
    yield made
    made.forget()
    made.close()


def assert_it_still_works(server: HostileServer, worker: Victim) -> None:
    """A fair run after all that is played, and the worker ends when it is told to."""
    fair = announcement()
    play(server, fair)
    wait_until(lambda: bool(server.claims(fair.run)))
    assert worker.alive()
    assert "Traceback" not in worker.log
    worker.stop()
    assert worker.process.returncode == 0


TOO_MUCH: dict[str, Callable[[], Announcement]] = {
    "a model of 200 million parameters": lambda: announcement(wide(18_000_000)),
    "the largest model that can be said": lambda: announcement(architecture="", size=2**28, vectors=2,
                                                               spec=spec_text(method="scaffold")),
    "activations": lambda: announcement(wide(3_000_000)),
    "a billion epochs": lambda: announcement(spec=spec_text(local__epochs=10**9)),
    "more steps than a machine counts": lambda: announcement(spec=spec_text(local__steps=10**30)),
    "a batch of a billion": lambda: announcement(spec=spec_text(local__batch_size=10**9)),
    "shared samples that unpack to 180 MB": lambda: with_shared(announcement(), 5_000_000)[0],
    "shared samples without end": lambda: announcement(shared_training=2**31 - 1, shared_scoring=2**31 - 1,
                                                       shared_size=2**30),
    "a border of a billion": lambda: announcement(network(
        Conv2d(1, 1, (1, 1), (15_000, 15_000)), MaxPool2d((30_000, 30_000), (9, 9)), Flatten(), Linear(1, 3),
        shape=(1, 1, 1))),
    "torch": lambda: announcement(architecture=""),
}  # fmt: skip


def test_what_asks_for_too_much_is_refused_in_a_line_and_nothing_is_made(
    address: Address, server: HostileServer, tmp_path: Path
) -> None:
    with victim(tmp_path, address, "--memory", "300M") as worker:
        wait_until(lambda: bool(server.hellos()))
        for name, make in TOO_MUCH.items():
            asked, lines = make(), worker.log.count("\n")
            server.announce(asked)
            wait_until(lambda before=lines: worker.log.count("\n") > before)  # type: ignore[misc]
            said = worker.log.splitlines()[-1]
            assert ("300.0 MB are allowed" in said and "--memory" in said) or "must be at most" in said, name
            server.welcome(asked.run)
            server.send(asked.run, "model", bytes(100_000), 1)
        assert worker.peak() < MEMORY / 3
        assert_it_still_works(server, worker)


def thousand(count: int = 40) -> Samples:
    rng = np.random.default_rng(1)
    return Samples(rng.normal(size=(count, 1000)).astype(np.float32), (np.arange(count) % 3).astype(np.int32))


def pictures() -> tuple[Announcement, bytes, Samples]:
    described = network(
        Conv2d(1, 8, (3, 3), (1, 1)), Relu(), MaxPool2d((2, 2), (2, 2)), Conv2d(8, 8, (3, 3)),
        AvgPool2d((31, 31), (31, 31)), Flatten(), Linear(128, 3), shape=(1, 256, 256),
    )  # fmt: skip
    what, packed = with_shared(announcement(described, spec=spec_text(shared="score")), 60, (1, 256, 256))
    own = Samples(np.zeros((10, 1, 256, 256), np.float32), (np.arange(10) % 3).astype(np.int32))
    return replace(what, shared_training=0, shared_scoring=60), packed, own


def large(**settings: object) -> tuple[Announcement, bytes, Samples]:
    return announcement(deep(2), spec=spec_text(**settings)), b"", thousand()


def shared(**settings: object) -> tuple[Announcement, bytes, Samples]:
    return (*with_shared(announcement(spec=spec_text(**settings)), 1_500_000), own_samples())


def scaffold() -> tuple[Announcement, bytes, Samples]:
    return announcement(deep(2), vectors=2, spec=spec_text(method="scaffold")), b"", thousand()


MUCH: dict[str, Callable[[], tuple[Announcement, bytes, Samples]]] = {
    "whole models": lambda: large(swarm__draw="parameter", local__momentum=0.9, defence__commitment=True),
    "packed models": lambda: large(codec__up="q8", codec__down="q8", options={"q8": {"block": 1}}),
    "adaptive": lambda: large(codec__up="adaptive", codec__down="adaptive"),
    "topk": lambda: large(codec__up="topk", options={"topk": {"share": 1.0}}),
    "scaffold": scaffold,
    "activations": lambda: (announcement(wide(150_000)), b"", own_samples()),
    "pictures": pictures,
    "shared samples": lambda: shared(shared="train"),
    "epochs": lambda: (announcement(spec=spec_text(local__epochs=100_000, local__batch_size=40)), b"", own_samples()),
    "a large batch": lambda: (announcement(spec=spec_text(local__batch_size=10_000_000)), b"", own_samples()),
}


SHORT = ("whole models", "shared samples", "a large batch")


@pytest.mark.parametrize(
    "name", [name if name in SHORT else pytest.param(name, marks=pytest.mark.hostile) for name in MUCH]
)
def test_what_fits_is_played_within_the_memory_that_was_given(
    name: str, address: Address, server: HostileServer, tmp_path: Path
) -> None:
    what, packed, own = MUCH[name]()
    needs = needs_of(parse_announcement(what), own, 1, 1e9)
    memory = 90 * 10**6 + needs.memory  # a process of this kind has 60 MB before, and 24 MB are set aside
    with victim(tmp_path, address, "--memory", str(memory), own=own) as worker:
        wait_until(lambda: bool(server.hellos()))
        server.announce(what)
        wait_until(lambda: len(server.hellos()) >= 2)
        fill(server, what, packed)
        wait_until(lambda: bool(server.claims(what.run)), 180)
        for _ in range(20):
            server.invite(what.run, 1)
        wait_until(lambda: bool(server.said("upload")))
        assert worker.peak() < memory
        assert worker.alive()
        assert "Traceback" not in worker.log


def test_a_reckoning_that_fails_is_caught_by_the_system_and_leaves_the_state_alone(
    address: Address, server: HostileServer, tmp_path: Path
) -> None:
    blind = (  # a worker that reckons with nothing
        "import sys, cbdsl.network.budget as budget;"
        "budget.needs_of = lambda *_: budget.ResourceNeeds({'all': 0}, 0.0);"
        "sys.argv[0] = 'cbdsl'; from cbdsl.cli.main import main; main()"
    )
    with victim(tmp_path, address, "--memory", "300M", program=("-c", blind)) as worker:
        wait_until(lambda: bool(server.hellos()))
        fair = announcement()
        play(server, fair)
        wait_until(lambda: bool(server.claims(fair.run)))
        state = (tmp_path / "state" / "state.npz").read_bytes()
        for absurd in (
            announcement(spec=spec_text(local__epochs=100_000, local__batch_size=10_000_000)),
            announcement(wide(3_000_000)),
        ):
            server.announce(absurd)
            server.welcome(absurd.run)
            server.send(absurd.run, "model", zeros_of(absurd), 1)
            server.order(absurd.run, 1, zeros_of(absurd))
            time.sleep(1.0)
        wait_until(lambda: "not enough memory. Waiting for another one" in worker.log)
        assert worker.peak() < 1.3 * MEMORY
        assert (tmp_path / "state" / "state.npz").read_bytes() == state
        assert_it_still_works(server, worker)


def test_too_little_memory_to_begin_with_is_said_at_once(address: Address, tmp_path: Path) -> None:
    with victim(tmp_path, address, "--memory", "20M") as worker:
        assert worker.process.wait(60) == 2
        assert "--memory 20.0 MB is too little" in worker.log
        assert "Traceback" not in worker.log


def test_a_worker_stops_when_it_is_told_to_in_the_middle_of_an_endless_order(
    address: Address, server: HostileServer, tmp_path: Path
) -> None:
    endless = announcement(wide(20_000), spec=spec_text(local__epochs=100_000, local__batch_size=40))
    with victim(tmp_path, address, "--longest-round", "1e9") as worker:
        wait_until(lambda: bool(server.hellos()))
        play(server, endless)
        time.sleep(3.0)  # by then it trains, and would for an hour
        assert worker.stop() < 30
        assert worker.process.returncode == 0
        assert not server.claims(endless.run)
        assert server.said("status")[-1] == b""  # it said goodbye: nobody waits for it


def test_rounds_that_take_too_long_are_refused(address: Address, server: HostileServer, tmp_path: Path) -> None:
    with victim(tmp_path, address, "--longest-round", "60") as worker:
        wait_until(lambda: bool(server.hellos()))
        server.announce(announcement(wide(20_000), spec=spec_text(local__epochs=100_000, local__batch_size=40)))
        wait_until(lambda: "the longest allowed is 1:00" in worker.log)
        assert_it_still_works(server, worker)


NONSENSE: dict[str, Callable[[], Announcement]] = {
    "shared samples that never were": lambda: announcement(shared_training=5),
    "another shape": lambda: announcement(network(Linear(9, 3), shape=(9,))),
    "one class too few": lambda: announcement(network(Linear(8, 2))),
    "scaffold through a codec": lambda: announcement(vectors=2, spec=spec_text(method="scaffold", codec__up="q4")),
    "a seed of ten thousand digits": lambda: announcement(spec="seed = 0x" + 8000 * "f"),
    "a number of five thousand digits": lambda: announcement(spec="workers = " + 5000 * "9"),
    "deep tables": lambda: announcement(spec="a = " + 15_000 * "["),
    "a method that is a module": lambda: announcement(spec='method = "os.system"'),
    "NaN": lambda: announcement(spec="[local]\nlearning_rate = nan"),
    "no scoring set": lambda: announcement(spec=spec_text(shared="score")),
}


def test_nonsense_ends_no_worker(address: Address, server: HostileServer, tmp_path: Path) -> None:
    with victim(tmp_path, address) as worker:
        wait_until(lambda: bool(server.hellos()))
        for make in NONSENSE.values():
            what = make()
            server.announce(what)
            server.welcome(what.run)
            server.send(what.run, "model", zeros_of(what), 1)
            server.order(what.run, 1, zeros_of(what))
            time.sleep(0.3)
        assert_it_still_works(server, worker)


def test_absurd_orders_and_models_that_are_no_numbers_end_no_worker(
    address: Address, server: HostileServer, tmp_path: Path
) -> None:
    with victim(tmp_path, address) as worker:
        wait_until(lambda: bool(server.hellos()))
        orders: list[dict[str, object]] = [
            {"learning_rate": 1e300}, {"learning_rate": -1e38}, {"inertia": 1e308}, {"inertia": -3e38}, {"version": 0},
            {"participants": b""}, {"task": "average"}, {"round": 2**31 - 1, "version": 2**31 - 1},
        ]  # fmt: skip
        for codec in ("none", "q4"):
            for changes in orders:
                what = announcement(spec=spec_text(codec__up=codec))
                server.announce(what)
                server.welcome(what.run)
                model = np.full(what.size, np.nan, "<f4").tobytes()
                server.send(what.run, "model", model, 1)
                server.order(what.run, 1, model, **changes)
                server.order(what.run, 2, model)
                server.invite(what.run, 2)
                server.order(what.run, 1, model)
                time.sleep(0.1)
        assert_it_still_works(server, worker)


@pytest.mark.hostile
def test_run_after_run_fills_neither_log_nor_disk_nor_memory(
    address: Address, server: HostileServer, tmp_path: Path
) -> None:
    with victim(tmp_path, address, "--memory", "300M") as worker:
        wait_until(lambda: bool(server.hellos()))
        for number in range(1500):
            if number % 3:
                server.announce(announcement(spec=f'"setting-{number}" = 1'))
            else:
                what, packed = with_shared(announcement(spec=spec_text(shared="train")), 2000 + number)
                server.announce(what)
                server.welcome(what.run)
                server.send(what.run, "shared", packed)
        wait_until(lambda: len(server.hellos()) > 500)
        assert worker.peak() < MEMORY
        assert worker.log.count("\n") < 200
        assert sum(one.stat().st_size for one in (tmp_path / "state").iterdir()) < 10**6
        assert_it_still_works(server, worker)


def test_invitation_after_invitation_fills_no_memory(address: Address, server: HostileServer, tmp_path: Path) -> None:
    what = announcement(deep(1))
    with (
        slow_line(address, 2_000_000) as line,
        victim(tmp_path, line, "--memory", "300M", own=thousand()) as worker,
    ):
        wait_until(lambda: bool(server.hellos()))
        play(server, what)
        wait_until(lambda: bool(server.claims(what.run)))
        for _ in range(500):  # 2 GB if each were answered at once
            server.invite(what.run, 1)
            time.sleep(0.01)
        wait_until(lambda: len(server.said("upload")) > 41)  # more than one whole model came
        assert worker.peak() < MEMORY
        assert worker.alive()
        assert "cannot take part" not in worker.log


def test_nothing_is_read_written_or_run_outside_the_state_folder(
    address: Address, server: HostileServer, tmp_path: Path
) -> None:
    trap = tmp_path / "trap.py"
    trap.write_text(f"from pathlib import Path; Path({str(tmp_path / 'sprung')!r}).write_text('x')")
    secret, outside = tmp_path / "secret.npz", str(tmp_path / "written")
    np.savez(secret, features=np.zeros((3, 8)), labels=np.zeros(3, int))
    os.utime(secret, (1, 1))
    specs = [
        f'plugins = ["{trap}"]',
        'plugins = ["trap"]',
        f'init = "{outside}"',
        f'preset = "../../{outside}"',
        f'method = "{trap}"',
        'method = "../../trap"',
        f'model = "{trap}"',
        'engine = "torch"\nmodel = "../../trap"',
        f'[data]\nsource = "{secret}"',
        f'[data]\npartition = "{trap}"',
        f'[codec]\nup = "{trap}"',
        '[codec]\ndown = "cbdsl.codecs.quantize:Q8"',
        f'[attack]\nname = "{trap}"\nbyzantine = 1',
        f'[selection]\nname = "{trap}"',
        f'[defence]\naggregator = "{trap}"',
        f'[options."{trap}"]\npath = "{outside}"',
        f'[options.cb-dsl]\npath = "{outside}"',
        f'[options.q4]\nblock = "{outside}"',
    ]  # fmt: skip
    home = tmp_path / "home"
    with victim(home, address) as worker:
        wait_until(lambda: bool(server.hellos()))
        before = set(tmp_path.rglob("*"))
        for text in specs:
            for described in (announcement().architecture, ""):
                what = announcement(spec=text, architecture=described)
                server.announce(what)
                server.welcome(what.run)
                server.send(what.run, "model", zeros_of(what), 1)
                server.order(what.run, 1, zeros_of(what))
                server.send(what.run, "start/../../..", b"x" * 100)
                time.sleep(0.1)
        assert_it_still_works(server, worker)
        new = set(tmp_path.rglob("*")) - before
        assert {path.relative_to(home / "state").parts[0] for path in new} <= {"state.npz", "shared.bin", "wire.json"}
        assert not (tmp_path / "sprung").exists()
        assert secret.stat().st_atime == 1


def test_texts_of_the_server_cannot_write_on_the_terminal(
    address: Address, server: HostileServer, tmp_path: Path
) -> None:
    escape = "\\u001b]0;owned\\u0007\\u001b[2J\\r\\n09:00:00 worker victim: the run is over\\u202e"
    with victim(tmp_path, address) as worker:
        wait_until(lambda: bool(server.hellos()))
        for text in (f'"{escape}" = 1', f'method = "{escape}"', f'[codec]\nup = "{escape}"'):
            server.announce(announcement(spec=text))
        for text in (f'model = "{escape}"', 'model = "' + 30_000 * "x" + '"'):
            what = announcement(spec=text, architecture="")
            server.announce(what)
            server.welcome(what.run)
            time.sleep(0.5)
        server.announce(announcement(architecture=json.dumps({"kind\x1b[31m": "\x1b[2J"})))
        wait_until(lambda: worker.log.count("refused a message") >= 4)
        assert_it_still_works(server, worker)
        assert not any(sign for sign in worker.log if not sign.isprintable() and sign != "\n")
        assert not any(line.startswith("09:00:00") for line in worker.log.splitlines())
        assert max(map(len, worker.log.splitlines())) < 1100


def test_what_a_worker_keeps_is_for_its_owner_alone(address: Address, server: HostileServer, tmp_path: Path) -> None:
    with victim(tmp_path, address) as worker:
        wait_until(lambda: bool(server.hellos()))
        what, packed = with_shared(announcement(spec=spec_text(shared="train")), 10)
        play(server, what, packed)
        wait_until(lambda: bool(server.claims(what.run)))
        assert stat.S_IMODE((tmp_path / "state").stat().st_mode) == 0o700
        for name in ("state.npz", "shared.bin"):
            assert stat.S_IMODE((tmp_path / "state" / name).stat().st_mode) == 0o600
        assert worker.alive()
