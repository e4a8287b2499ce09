"""The whole life of a swarm as `examples/garden.py` plays it: real processes, a real broker, in the end a C program."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from cbdsl.network.broker import find_mosquitto

SCRIPT = Path(__file__).parents[2] / "examples" / "garden.py"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        find_mosquitto() is None or not (shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")),
        reason="no mosquitto or C compiler: apt-get install mosquitto gcc",
    ),
]


def left_running(folder: Path) -> list[str]:
    """Processes whose command line names a folder."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = os.fsdecode(entry.read_bytes()).replace("\0", " ")
        except OSError:
            continue
        if str(folder) in words:
            found.append(words)
    return found


def test_a_swarm_lives_through_everything_and_ends_as_a_c_program(tmp_path: Path) -> None:
    folder = tmp_path / "garden"
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(folder)], capture_output=True, text=True, timeout=900, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for words in (
        "killed worker-1 and worker-2 and started them again",
        "it went on",
        "added porch while the run is played; it takes part",
        "revoked worker-8",
        "second run, from there",
        "8 devices have the trained model in a file, the same to the bit",
        "as a C program",
    ):
        assert words in done.stdout
    assert left_running(folder) == []
