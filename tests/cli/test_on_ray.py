"""`cbdsl run --on ray` as a user has it: a cluster is started for the command, and nothing of it is left afterwards."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

pytest.importorskip("ray", reason="Ray is not installed: pip install 'cbdsl[ray]'")

COMMAND = [sys.executable, "-m", "cbdsl"]
SPEC = [
    "paper-iid", "--workers", "6", "--model", "softmax", "--set", "data.samples_per_worker=20", "--set",
    "data.shared_scoring=300",
]  # fmt: skip
LONG, ROUNDS = 180, 400
# The paper's selection, which takes its time where a test asks for it: a run lasts, however fast the machine is.
UNHURRIED = """
import os, time
import cbdsl
from cbdsl.algorithm.selection import Best

@cbdsl.register.selection("unhurried")
class Unhurried(Best):
    def invite(self, waiting, believed, view):
        time.sleep(float(os.environ.get("CBDSL_TEST_PAUSE", "0")))
        return super().invite(waiting, believed, view)
"""


@pytest.fixture(autouse=True)
def no_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)


def cbdsl(*words: str | Path, timeout: float = LONG) -> subprocess.CompletedProcess[str]:
    done = [*COMMAND, *map(str, words)]
    return subprocess.run(done, capture_output=True, text=True, timeout=timeout, check=False)


def rounds_in(folder: Path) -> list[dict[str, Any]]:
    lines = (folder / "rounds.jsonl").read_text().splitlines()
    return [{key: value for key, value in json.loads(line).items() if key != "seconds"} for line in lines]


def told(process: int | str, what: str) -> str:
    """What the system says of a process; nothing if it is gone, or goes meanwhile."""
    try:
        return Path(f"/proc/{process}/{what}").read_text(errors="replace")
    except OSError:
        return ""


def descendants(process: int) -> set[int]:
    """The processes that one started, and those that they did."""
    found = {process}
    stats = {int(place.name): told(place.name, "stat") for place in Path("/proc").glob("[0-9]*")}
    parents = {one: int(stat.rpartition(")")[2].split()[1]) for one, stat in stats.items() if stat}
    while more := {one for one, parent in parents.items() if parent in found and one not in found}:
        found |= more
    return found


def alive(process: int) -> bool:
    return told(process, "stat").rpartition(")")[2].split()[:1] not in ([], ["Z"])


def gone(processes: set[int], but: str = "nobody") -> bool:
    """Whether all of them end soon; but: those with this in their title may take their time."""
    for _ in range(600):
        if not any(alive(one) and but not in told(one, "cmdline") for one in processes):
            return True
        time.sleep(0.1)
    return False


def unhurried(home: Path) -> list[str]:
    """The words for a long run, and the file that they name."""
    (home / "unhurried.py").write_text(UNHURRIED)
    return [*SPEC, "--rounds", str(ROUNDS), "--plugin", str(home / "unhurried.py"), "--set", "selection.name=unhurried"]


def started(folder: Path, until: str) -> tuple[subprocess.Popen[str], set[int]]:
    """A run on a cluster of its own that has written some file, and all its processes; it would take 40 s at least."""
    words = [*COMMAND, "run", *unhurried(folder.parent), "--on", "ray", "--out", str(folder)]
    slow = {**os.environ, "CBDSL_TEST_PAUSE": "0.1"}
    run = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=slow)
    for _ in range(10 * LONG):
        if run.poll() is not None or (folder / until).exists():
            break
        time.sleep(0.1)
    assert run.poll() is None, run.communicate()[1]
    assert (folder / until).exists(), f"no {until} after {LONG} seconds"
    return run, descendants(run.pid)


@pytest.mark.cluster
def test_a_run_on_a_cluster_of_its_own_leaves_the_numbers_and_nothing_else(tmp_path: Path) -> None:
    here = cbdsl("run", *SPEC, "--rounds", "6", "--out", tmp_path / "here", "--json")
    there = cbdsl("run", *SPEC, "--rounds", "6", "--out", tmp_path / "there", "--json", "--on", "ray", "--shards", "2")
    assert there.returncode == 0, there.stderr
    assert rounds_in(tmp_path / "there") == rounds_in(tmp_path / "here")
    first, second = (json.loads(one.stdout) for one in (here, there))
    assert {**first, "seconds": 0} == {**second, "seconds": 0}
    assert (tmp_path / "there" / "spec.toml").read_text() == (tmp_path / "here" / "spec.toml").read_text()


@pytest.mark.cluster
def test_a_driver_that_is_killed_leaves_nothing_and_the_run_goes_on(tmp_path: Path) -> None:
    folder = tmp_path / "killed"
    run, all_of_it = started(folder, "checkpoint.npz")
    run.kill()
    run.wait(LONG)
    assert gone(all_of_it, but="Agent")  # they look whether their machine is there once a minute
    assert 0 < len(rounds_in(folder)) < ROUNDS
    done = cbdsl("resume", folder, "--on", "ray", "--shards", "3")
    assert done.returncode == 0, done.stderr
    assert cbdsl("run", *unhurried(tmp_path), "--out", tmp_path / "here").returncode == 0
    assert rounds_in(folder) == rounds_in(tmp_path / "here")


@pytest.mark.cluster
def test_ctrl_c_says_how_to_go_on_and_ends_the_cluster(tmp_path: Path) -> None:
    run, all_of_it = started(tmp_path / "stopped", "rounds.jsonl")
    run.send_signal(signal.SIGINT)
    _, said = run.communicate(timeout=LONG)
    assert run.returncode == 130, said
    assert f"Go on with: cbdsl resume {tmp_path / 'stopped'} --on ray" in said
    assert "Traceback" not in said
    assert gone(all_of_it)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--on", "127.0.0.1:1"], "No connection to 127.0.0.1:1"),
        (["--on", "ray://127.0.0.1:1"], "No connection to ray://127.0.0.1:1"),
        (["--on", "nowhere"], "--on is 'nowhere'"),
        (["--shards", "2"], "the workers are in this process"),
    ],
)
def test_a_place_that_cannot_be_had_is_one_message(tmp_path: Path, words: list[str], said: str) -> None:
    done = cbdsl("run", *SPEC, "--rounds", "1", "--out", tmp_path / "none", *words)
    assert done.returncode == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "none").exists()


@pytest.mark.cluster
def test_auto_without_a_cluster_is_one_message(tmp_path: Path) -> None:
    if any(told(place.name, "comm") == "raylet\n" for place in Path("/proc").glob("[0-9]*")):
        pytest.skip("somebody's Ray runs on this machine: --on auto would find it")
    done = cbdsl("run", *SPEC, "--rounds", "1", "--out", tmp_path / "none", "--on", "auto")
    assert done.returncode == 2, done.stderr
    assert "Ray cannot be reached at 'auto'" in done.stderr
    assert not (tmp_path / "none").exists()


@pytest.mark.cluster
def test_doctor_says_what_a_cluster_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")  # another cluster is not asked for
    done = cbdsl("doctor", "--on", "ray", "--model", "softmax")
    assert done.returncode == 0, done.stderr
    assert "the cbdsl of this machine" in done.stdout
    assert "workers of softmax (7,850 numbers" in done.stdout
