"""Ctrl-C, as a terminal sends it: to every process of the command at once."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from support.helpers import SMALL, cbdsl

pytestmark = pytest.mark.slow

LONG = [*SMALL, "--rounds", "100000"]
DEAF = {"PYTHONUNBUFFERED": "1", "COLUMNS": "200", "NO_COLOR": "1"}


# What Python says when it is interrupted while it starts itself, on a busy machine: nothing of ours runs yet.
NOT_UP = re.compile("Could not import runpy module|Fatal Python error: init")


def interrupted(words: list[str], cwd: Path, ready: Callable[[], bool] | float) -> tuple[int, str, str]:
    """Start a command, wait until it is ready or for so many seconds, press Ctrl-C: exit code, output, errors."""
    process = subprocess.Popen(
        [sys.executable, "-m", "cbdsl", *words], cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True, env={**os.environ, **DEAF},
    )  # fmt: skip
    if callable(ready):
        deadline = time.monotonic() + 60
        while not ready() and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.02)
    else:
        time.sleep(ready)
    os.killpg(process.pid, signal.SIGINT)
    try:
        out, errors = process.communicate(timeout=60)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    if not callable(ready) and NOT_UP.search(errors):
        return interrupted(words, cwd, 2 * ready)
    return process.returncode, out, errors


# What Python itself says in a child that was being started when its parent ended: rare, and nothing of ours runs yet.
STARTING = re.compile(
    r'Traceback [^\n]*\n  File "<string>", line 1, in <module>\n.*?spawn_main.*?\nEOFError: [^\n]*\n', re.DOTALL
)


def check(code: int, out: str, errors: str, advice: str) -> None:
    assert code == 130, errors
    errors = STARTING.sub("", errors)
    assert "Traceback" not in out + errors
    assert "Error" not in out + errors
    last = errors.strip().splitlines()[-1]
    assert re.fullmatch(f"cbdsl: interrupted. {advice}", last), last


@pytest.mark.parametrize(
    ("words", "seconds"),
    [
        (["run", *LONG, "--out", "here"], 0.15),
        (["run", *LONG, "--out", "here"], 0.4),
        (["sweep", *LONG, "--over", "seed=0..3", "--out", "here"], 0.8),
        (["swarm", *LONG, "--out", "here"], 0.8),
        (["bench"], 0.4),
    ],
)
def test_within_the_first_second_there_is_one_sentence_and_no_traceback(
    words: list[str], seconds: float, tmp_path: Path
) -> None:
    check(*interrupted(words, tmp_path, seconds), f".*with: cbdsl (resume here|{words[0]}.*)")


def test_an_interrupted_run_says_how_to_go_on_and_does(tmp_path: Path) -> None:
    words = ["run", *SMALL, "--rounds", "3000", "--out", "my run"]
    rounds = tmp_path / "my run" / "rounds.jsonl"
    check(*interrupted(words, tmp_path, rounds.exists), "Go on with: cbdsl resume 'my run'")
    before = rounds.read_text()
    again = interrupted(["resume", "my run"], tmp_path, lambda: rounds.read_text() != before)
    check(*again, "Go on with: cbdsl resume 'my run'")


@pytest.mark.parametrize(
    "words",
    [
        ["sweep", *LONG, "--over", "seed=0..3"],
        ["reproduce", "--quick", "--set", "model=softmax", "--set", "rounds=100000"],
        ["arena", "--quick", "--set", "model=softmax", "--set", "rounds=100000"],
    ],
    ids=lambda words: words[0],
)
@pytest.mark.parametrize("playing", [False, True], ids=["starting", "playing"])
def test_an_interrupted_study_goes_on_with_the_same_command(words: list[str], playing: bool, tmp_path: Path) -> None:
    def started() -> bool:
        pattern = "here/runs/*/rounds.jsonl" if playing else "here"
        return any(tmp_path.glob(pattern))

    result = interrupted([*words, "--out", "here"], tmp_path, started)
    check(*result, f"Go on with: cbdsl {re.escape(words[0])} .*--out here")


def test_an_interrupted_sweep_ends_with_the_results_of_one_that_was_not(tmp_path: Path) -> None:
    words = ["sweep", *SMALL, "--rounds", "40", "--over", "seed=0..2", "--out"]
    interrupted([*words, "here"], tmp_path, lambda: any(tmp_path.glob("here/runs/*/rounds.jsonl")))
    assert cbdsl(*words, "here", cwd=tmp_path).returncode == 0
    assert cbdsl(*words, "there", cwd=tmp_path).returncode == 0
    assert accuracies(tmp_path / "here") == accuracies(tmp_path / "there")


def accuracies(folder: Path) -> dict[int, float]:
    rows = map(json.loads, (folder / "results.jsonl").read_text().splitlines())
    return {row["seed"]: row["final_accuracy"] for row in rows}


def test_an_interrupted_swarm_goes_on_in_its_folder(tmp_path: Path) -> None:
    words = ["swarm", *LONG]
    folder = "runs/swarm-mnist-iid-cb-dsl-seed0"
    result = interrupted(words, tmp_path, (tmp_path / folder / "rounds.jsonl").exists)
    check(*result, f"Go on with: cbdsl swarm .* --out {folder}")


def test_an_interrupted_server_goes_on_with_the_same_command(tmp_path: Path) -> None:
    words = ["serve", *SMALL[:4], "--broker", "mqtt://127.0.0.1:1", "--out", "here"]
    result = interrupted(words, tmp_path, (tmp_path / "here" / "events.jsonl").exists)
    check(*result, "Go on with: cbdsl serve .*--out here")


def test_an_interrupted_measurement_is_started_again(tmp_path: Path) -> None:
    check(
        *interrupted(["theory", *LONG], tmp_path, 2.5), "(Nothing was kept of it. )?Start again with: cbdsl theory .*"
    )
    check(*interrupted(["bench"], tmp_path, 4.0), "(Nothing was kept of it. )?Start again with: cbdsl bench")


def test_a_second_one_ends_at_once(tmp_path: Path) -> None:
    script = (
        "import os, signal, time\n"
        "from cbdsl.cli.interrupts import INTERRUPTS\n"
        "INTERRUPTS.__enter__()\n"
        "try:\n    os.kill(os.getpid(), signal.SIGINT); time.sleep(5)\n"
        "except KeyboardInterrupt:\n    os.kill(os.getpid(), signal.SIGINT); time.sleep(5)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (130, "")


def test_one_that_comes_in_a_destructor_is_not_lost(tmp_path: Path) -> None:
    script = (
        "import os, signal, time\n"
        "from cbdsl.cli.interrupts import INTERRUPTS\n"
        "INTERRUPTS.__enter__()\n"
        "class Thing:\n    def __del__(self):\n        os.kill(os.getpid(), signal.SIGINT); time.sleep(1)\n"
        "try:\n    thing = Thing(); del thing; time.sleep(5)\n"
        "except KeyboardInterrupt:\n    INTERRUPTS.conclude()\n"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 130
    assert done.stderr.strip().startswith("cbdsl: interrupted. ")


def test_one_that_comes_within_an_exec_ends_with_our_exit_code(tmp_path: Path) -> None:
    """Python remembers an interrupt of an exec(), although it was handled, and would end by the signal."""
    script = (
        "from cbdsl.cli.interrupts import INTERRUPTS\n"
        "INTERRUPTS.__enter__()\n"
        "import numpy\n"  # has threads that would take a signal that we block
        "try:\n    exec('import os, signal, time; os.kill(os.getpid(), signal.SIGINT); time.sleep(5)')\n"
        "except KeyboardInterrupt:\n    INTERRUPTS.conclude()\n"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 130
