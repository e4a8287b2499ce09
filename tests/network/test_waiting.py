"""A worker that waits says so, and for what; by a clock of its own, and as a process at a real broker."""

from __future__ import annotations

import contextlib
import logging
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from cbdsl.network.broker import find_mosquitto, running_broker
from cbdsl.network.journal import Events
from cbdsl.network.provision import provision
from cbdsl.network.worker import BROKER, WaitLog, WaitReason, WorkerInbox
from support.deployment import SWARM, Deployment, deployment, pictures, tiny_spec, wait_until
from support.member_keys import options
from support.mqtt_client import wait_for

pytestmark = pytest.mark.slow

needs_mosquitto = pytest.mark.skipif(find_mosquitto() is None, reason="no mosquitto: apt-get install mosquitto")


def said_within(
    seconds: int, waits: list[tuple[int, WaitReason | None]], caplog: pytest.LogCaptureFixture
) -> list[str]:
    """What is said in so many seconds; waits: from when on for what."""
    caplog.set_level(logging.INFO, "cbdsl.network")
    now, said = 0.0, []
    waiting = WaitLog("anna", lambda: now)
    for second in range(seconds):
        now = float(second)
        waiting.update(next(wait for start, wait in reversed(waits) if start <= second))
        said += [f"{second}: {line}" for line in caplog.messages]
        caplog.clear()
    return said


def test_it_is_said_at_once_and_then_at_growing_intervals(caplog: pytest.LogCaptureFixture) -> None:
    said = said_within(8000, [(0, WaitReason("tea", "boil water"))], caplog)
    assert said[:3] == [
        "2: worker anna waits for tea (boil water)",
        "32: worker anna waits still, after 0:32, for tea (boil water)",
        "92: worker anna waits still, after 1:32, for tea (boil water)",
    ]
    times = [int(line.partition(":")[0]) for line in said]
    pauses = np.diff(times)
    assert len(said) < 12
    assert all(later in {2 * before, 3600} for before, later in pairwise(pauses))


def test_something_else_is_said_when_it_changes_and_nothing_while_it_works(caplog: pytest.LogCaptureFixture) -> None:
    waits: list[tuple[int, WaitReason | None]] = [
        (0, WaitReason("tea")),
        (10, WaitReason("milk")),
        (20, None),
        (40, WaitReason("tea")),
    ]
    said = said_within(50, waits, caplog)
    assert said == [
        f"{second}: worker anna waits for {what}" for second, what in ((2, "tea"), (12, "milk"), (42, "tea"))
    ]


def test_the_pause_between_quick_rounds_is_not_worth_a_word(caplog: pytest.LogCaptureFixture) -> None:
    waits = [
        (second, None if second % 30 == 0 else WaitReason("the next order", patience=60.0)) for second in range(600)
    ]
    assert not said_within(600, waits, caplog)


def test_without_an_announcement_it_waits_for_a_run_and_says_what_to_look_at() -> None:
    events = Events()
    inbox = WorkerInbox("lab", "anna", events)
    wait = inbox.wait_reason(b"", b"")
    assert wait.what == "a run: none is announced in the swarm 'lab'"
    assert "--swarm lab" in wait.advice
    events.refuse("too large", "the server")
    assert inbox.wait_reason(b"", b"").what.startswith("another run")
    assert BROKER.what == "the broker"


@contextlib.contextmanager
def worker(home: Path, *words: str) -> Iterator[Path]:
    """A worker's process, and what it says."""
    home.mkdir(parents=True, exist_ok=True)
    np.savez(home / "samples.npz", features=np.zeros((9, 4), np.float32), labels=np.zeros(9, np.int32))
    log = home / "worker.log"
    command = [sys.executable, "-m", "cbdsl", "work", "--data", str(home / "samples.npz"), "--threads", "1", *words]
    with log.open("wb") as file:
        process = subprocess.Popen([*command, "--state", str(home / "state")], stdout=file, stderr=file)
    try:
        yield log
    finally:
        process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(20)
        process.kill()
        process.wait()


def says(log: Path, words: str) -> bool:
    return wait_for(lambda: re.search(words, log.read_text()), 60)


@needs_mosquitto
def test_a_worker_waits_for_the_broker_then_for_a_run(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    provision(keys, ["anna"], "lab", ["localhost"])
    with running_broker(tmp_path / "log", config=keys / "broker" / "mosquitto.conf") as broker:
        port = broker.port
    words = ["--id", "anna", "--swarm", "lab", "--broker", f"mqtts://localhost:{port}", *options(keys)]
    with worker(tmp_path / "anna", *words) as log:
        assert says(log, "nothing listens there")
        assert says(log, "worker anna waits for the broker")
        with running_broker(tmp_path / "log", config=keys / "broker" / "mosquitto.conf", port=port):
            assert says(log, r"connected to the broker at mqtts://localhost:\d+ after \d+ s")
            assert says(log, "worker anna waits for a run: none is announced in the swarm 'lab'")


@needs_mosquitto
def test_another_name_or_swarm_than_the_certificates_ends_at_once(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    provision(keys, ["anna"], "lab", ["localhost"])
    for given, words in (
        (["--id", "bert", "--swarm", "lab"], "is the certificate of 'anna', not of 'bert'"),
        (["--id", "anna"], "is a certificate of the swarm 'lab', not of 'swarm'"),
    ):
        with worker(tmp_path / "home", *given, "--broker", "mqtts://localhost:1", *options(keys)) as log:
            assert says(log, words)
            assert log.read_text().count("\n") == 1


@pytest.fixture
def few(tmp_path: Path) -> Iterator[Deployment]:
    spec = tiny_spec(pictures(tmp_path / "data"), workers=2, rounds=2)
    with deployment(tmp_path, spec, "mosquitto" if find_mosquitto() else "embedded") as made:
        yield made


def test_who_is_not_in_the_roster_is_told_what_may_be_the_reason(few: Deployment, tmp_path: Path) -> None:
    few.start_server("--join-seconds", "300")
    few.start_worker(few.names[0], "--stay")  # its mate does not come, so it waits for the first order
    first = few.folder / "workers" / few.names[0] / "worker.log"
    words = ["--id", "carl", "--swarm", SWARM, "--broker", str(few.address)]
    with worker(tmp_path / "carl", *words) as log:
        assert says(
            log, "worker carl waits for the server's welcome: a run is announced, but 'carl' has no place in it"
        )
        assert "its roster does not name 'carl' or is full" in log.read_text()
        assert says(few.out / "events.jsonl", "hello: from an unknown worker.*carl")
    assert says(first, "waits for the first order")
    few.start_worker(few.names[1])
    wait_until(few.server_ended, 120)
    assert says(first, "waits for the next run; this one is over")
