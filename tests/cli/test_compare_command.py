"""Runs side by side in the terminal, by `cbdsl compare` and at the end of `cbdsl sweep`."""

from __future__ import annotations

from pathlib import Path

from helpers import SMALL, cbdsl


def test_a_sweep_ends_with_its_runs_their_means_over_seeds_and_a_page(tmp_path: Path) -> None:
    words = ["sweep", *SMALL, "--rounds", "1", "--over", "seed=0,1", "--over", "swarm.inertia=0.5,0.9", "--out", "here"]
    done = cbdsl(*words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].split()[:2] == ["seed", "swarm.inertia"]
    assert sum("±" in line for line in lines) >= 2
    assert lines[-1] == "page: here/index.html"
    assert {"index.html", "results.csv", "results.jsonl"} <= {path.name for path in (tmp_path / "here").iterdir()}
    folders = [str(path) for path in sorted((tmp_path / "here" / "runs").iterdir())]
    done = cbdsl("compare", *folders, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "±" in done.stdout
    done = cbdsl("compare", *folders, "--out", "there", cwd=tmp_path)
    assert done.stdout.splitlines()[-1] == "page: there/comparison.html"
    assert (tmp_path / "there" / "comparison.html").exists()


def test_what_is_no_finished_run_cannot_be_compared(tmp_path: Path) -> None:
    done = cbdsl("compare", "nowhere", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert "nowhere is not the folder of a finished run" in done.stderr
