"""Runs side by side in the terminal, by `cbdsl compare` and at the end of `cbdsl sweep`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.helpers import SMALL, cbdsl


@pytest.mark.slow
def test_a_sweep_ends_with_its_runs_their_means_over_seeds_and_a_page(tmp_path: Path) -> None:
    words = ["sweep", *SMALL, "--rounds", "1", "--over", "seed=0,1", "--over", "swarm.inertia=0.5,0.9", "--out", "here"]
    done = cbdsl(*words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].split()[:2] == ["seed", "inertia"]
    assert sum("±" in line for line in lines) >= 2
    assert lines[-1] == "page: here/index.html"
    assert {"index.html", "results.csv", "results.jsonl"} <= {path.name for path in (tmp_path / "here").iterdir()}
    folders = [str(path) for path in sorted((tmp_path / "here" / "runs").iterdir())]
    done = cbdsl("compare", *folders, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "±" in done.stdout
    named = ("--label", "inertia 0.5=half", "--order", "best", "--against", "inertia 0.9")
    done = cbdsl("compare", *folders, *named, "--to", "tex", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "\\toprule" in done.stdout
    assert any(line.startswith("half & ") for line in done.stdout.splitlines())
    assert cbdsl("compare", *folders, "--label", "half", cwd=tmp_path).returncode == 2
    assert cbdsl("compare", *folders, "--measures", "final", cwd=tmp_path).returncode == 2
    done = cbdsl("compare", *folders, "--out", "there", cwd=tmp_path)
    assert done.stdout.splitlines()[-1] == "page: there/comparison.html"
    assert (tmp_path / "there" / "comparison.html").exists()


@pytest.mark.slow
def test_a_narrow_terminal_gets_fewer_columns_and_is_told_which(tmp_path: Path) -> None:
    words = ["sweep", *SMALL, "--rounds", "1", "--over", "seed=0,1", "--over", "swarm.inertia=0.5,0.9", "--out", "here"]
    assert cbdsl(*words, cwd=tmp_path).returncode == 0
    folders = [str(path) for path in sorted((tmp_path / "here" / "runs").iterdir())]
    command = [sys.executable, "-m", "cbdsl", "compare", *folders]
    printed = {
        width: subprocess.run(
            command, cwd=tmp_path, capture_output=True, text=True, check=False, env={**os.environ, "COLUMNS": width}
        ).stdout
        for width in ("160", "80")
    }
    wide, lines = printed["160"].splitlines(), printed["80"].splitlines()
    assert "downlink" in wide[0]
    assert "seeds: 0, 1" in wide
    assert lines[0].split()[:3] == ["inertia", "runs", "final"]
    assert "downlink" not in lines[0]
    assert max(map(len, lines[:3])) <= 80
    assert ": best accuracy, downlink" in printed["80"]


@pytest.mark.slow
def test_a_study_writes_nothing_over_another_ones_results(tmp_path: Path) -> None:
    grid = ["sweep", *SMALL, "--rounds", "1", "--over", "seed=0,1", "--out", "here"]
    search = [
        "tune",
        *SMALL,
        "--rounds",
        "1",
        "--over",
        "local.learning_rate=0.01..0.1",
        "--budget",
        "1",
        "--confirm",
        "0",
    ]
    assert cbdsl(*grid, cwd=tmp_path).returncode == 0
    before = (tmp_path / "here" / "results.csv").read_bytes()
    done = cbdsl(*search, "--out", "here", cwd=tmp_path)
    done.check_refused("exists-already", "here", "results.csv")
    assert (tmp_path / "here" / "results.csv").read_bytes() == before
    assert cbdsl(*search, "--out", "there", cwd=tmp_path).returncode == 0
    assert cbdsl(*search, "--out", "there", cwd=tmp_path).returncode == 0  # its own
    done = cbdsl(*grid[:-1], "there", cwd=tmp_path)
    done.check_refused("exists-already", "there", "tuning.json")
    assert cbdsl(*grid, cwd=tmp_path).returncode == 0


def test_a_folder_of_many_runs_says_how_to_give_them(tmp_path: Path) -> None:
    for name in ("a", "b"):
        assert cbdsl("run", *SMALL, "--rounds", "1", "--out", f"runs/{name}", cwd=tmp_path).returncode == 0
    cbdsl("compare", "runs", cwd=tmp_path).check_refused("unreadable-file", "runs/*")
    cbdsl("resume", "runs", cwd=tmp_path).check_refused("missing-file", "runs/")


def test_what_is_no_finished_run_cannot_be_compared(tmp_path: Path) -> None:
    cbdsl("compare", "nowhere", cwd=tmp_path).check_refused("unreadable-file", "nowhere")
