"""`cbdsl watch` as a command, and beside the commands that start it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from cbdsl.cli import watch_command
from cbdsl.cli.network_display import ConnectionNews
from cbdsl.network.broker import find_mosquitto
from cbdsl.network.journal import Events
from cbdsl.network.server import Phases
from cbdsl.runs.folder import read_result
from support.deployment import pictures, tiny_spec, wait_until
from support.helpers import cbdsl
from support.refusals import refused_as
from support.run_folders import line, write_run

pytestmark = pytest.mark.slow

BEST = "mosquitto" if find_mosquitto() else "embedded"


def test_watch_prints_the_address_and_ctrl_c_ends_it(tmp_path: Path) -> None:
    write_run(tmp_path / "run", [line(1)])
    process = subprocess.Popen(
        [sys.executable, "-m", "cbdsl", "watch", str(tmp_path / "run"), "--port", "0"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    said = process.stdout.readline()
    address = said.split()[-1]
    assert address.startswith("http://127.0.0.1:")
    assert b"cbdsl_round 1" in urllib.request.urlopen(f"{address}metrics", timeout=20).read()
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Watch it again with: cbdsl watch" in errors
    assert "Traceback" not in errors


def test_watch_refuses_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with refused_as("wrong-type", "file"):
        watch_command.watch(tmp_path / "file")


@pytest.mark.parametrize("ending", [signal.SIGKILL, signal.SIGINT])
def test_the_page_beside_a_swarm_ends_with_it(ending: signal.Signals, tmp_path: Path) -> None:
    (tmp_path / "spec.toml").write_text(tiny_spec(pictures(tmp_path / "pictures"), rounds=100_000).to_toml())
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "cbdsl", "swarm", str(tmp_path / "spec.toml"), "--workers", "2", "--broker", BEST,
             "--out", str(tmp_path / "run"), "--watch"],
            stderr=log, start_new_session=True,
        )  # fmt: skip
    wait_until((tmp_path / "run" / "rounds.jsonl").exists)
    pages = [pid for pid in children_of(process.pid) if "watch" in words_of(pid)]
    assert len(pages) == 1
    address = next(word for word in (tmp_path / "log").read_text().split() if word.startswith("http://")).rstrip(";")
    assert b"cbdsl_running 1" in urllib.request.urlopen(f"{address}metrics", timeout=20).read()
    process.send_signal(ending)
    process.wait(120)
    wait_until(lambda: not words_of(pages[0]), 20)


def test_the_readme_of_a_swarms_folder_explains_every_file_and_rounds_have_names(tmp_path: Path) -> None:
    spec = tiny_spec(pictures(tmp_path / "pictures"), workers=4, rounds=3, attack__byzantine=1)
    (tmp_path / "spec.toml").write_text(spec.to_toml())
    done = cbdsl("swarm", "spec.toml", "--broker", BEST, "--out", "run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "run"
    readme = (folder / "README.txt").read_text()
    explained = {text.split()[0].rstrip("/") for text in readme.splitlines() if text}
    assert {path.name for path in folder.iterdir()} - {"README.txt"} <= explained
    assert {"journal.bin", ".secret", "refused.json", "events.jsonl"} <= explained
    names = json.loads((folder / "summary.json").read_text())["names"]
    assert names == {str(number): f"worker-{number}" for number in range(4)}
    lines = [json.loads(text) for text in (folder / "rounds.jsonl").read_text().splitlines()]
    banned = lines[-1]["banned"]
    assert banned
    for one in lines:
        assert {one["names"][str(worker)] for worker in banned} == {f"worker-{worker}" for worker in banned}
        assert sum(one["phases"].values()) == pytest.approx(one["seconds"], abs=1e-3)
    said = [json.loads(text) for text in (folder / "claims.jsonl").read_text().splitlines()]
    assert [one["round"] for one in said] == [1, 2, 3]
    assert set(said[0]["claims"]) == set(names.values())
    assert (folder / "claims.jsonl").stat().st_mode & 0o777 == 0o600
    assert read_result(folder)[2][-1].names == lines[-1]["names"]  # and read again they are the same


def children_of(parent: int) -> list[int]:
    text = Path(f"/proc/{parent}/task/{parent}/children").read_text()
    return [int(word) for word in text.split()]


def words_of(pid: int) -> list[str]:
    """A process's command line; nothing if it is gone, or dead and not yet fetched."""
    try:
        return [word for word in os.fsdecode(Path(f"/proc/{pid}/cmdline").read_bytes()).split("\0") if word]
    except OSError:
        return []


def test_the_news_of_connections_names_workers_that_came_and_left() -> None:
    attendance = ConnectionNews(20)
    for number in range(18):
        assert attendance.take("connected", {"worker": f"w{number:02}"})
    assert attendance.line() == "18 of 20 here; came: w00, w01, w02, w03, w04 and 13 more"
    assert not attendance.take("closed", {"round": 1})
    assert attendance.take("disconnected", {"worker": "w03"})
    assert attendance.line() == "17 of 20 here; left: w03"
    assert attendance.take("enrolled", {"worker": "porch", "members": 21})
    assert attendance.take("left", {"worker": "w00", "members": 20})
    assert attendance.line() == "16 of 20 here; new in the swarm: porch; no longer in the swarm: w00"
    attendance.take("over", {})
    assert not attendance.take("disconnected", {"worker": "w04"})  # everybody leaves in the end
    again = ConnectionNews(20)  # a server that goes on: some had joined since the run began
    assert not again.take("started", {"round": 3, "members": 23})
    assert again.count() == "0 of 23 here"


def test_counts_of_refusals_survive_a_restart(tmp_path: Path) -> None:
    path = tmp_path / "refused.json"
    first = Events(tmp_path / "events.jsonl", lambda name: name == "shed", path)
    for _ in range(3):
        first.refuse("too late", "shed")
    first.refuse("nonsense")
    first.save()
    assert path.stat().st_mode & 0o777 == 0o600
    again = Events(tmp_path / "events.jsonl", lambda name: name == "shed", path)
    again.refuse("too late", "shed")
    assert dict(again.refusals) == {"too late": 4, "nonsense": 1}
    assert again.offences()[0] == ("shed", "too late", 4)
    assert (tmp_path / "events.jsonl").read_text().count("too late") == 1  # the first of a kind was logged long ago
    path.write_text("{")
    assert not Events(None, None, path).refusals


def test_the_phases_of_a_round_are_its_seconds() -> None:
    phases = Phases()
    phases.begin()
    phases.note_answers(2.0, [0.5, 0.6, 0.7, 1.9])
    phases.note_uploads(0.3)
    phases.note_uploads(0.2)
    found = phases.split(3.0)
    assert found == {"train": 0.7, "wait": 1.3, "upload": 0.5, "verify": 0.5}
    phases.begin()
    phases.note_answers(1.0, [])
    assert phases.split(1.0) == {"train": 0.0, "wait": 1.0, "upload": 0.0, "verify": 0.0}


def test_a_page_that_does_not_start_does_not_keep_the_run_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    silent = tmp_path / "python"
    silent.write_text("#!/bin/sh\nexec sleep 60\n")
    silent.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(silent))
    monkeypatch.setattr(watch_command, "_START_SECONDS", 0.1)
    monkeypatch.setattr(watch_command, "_LAST_NEWS_SECONDS", 0.0)
    with watch_command.page_beside(tmp_path, wanted=True):
        assert "the run goes on without it" in capsys.readouterr().err
