"""Tasks beside plain runs: how far a run's workers are from the genie, and both theorems measured on it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from cbdsl.files import write_json
from cbdsl.spec import Spec
from cbdsl.study.sweep import Kind, Task, perform_run
from cbdsl.theory.genie import Companion, divergence_curve
from cbdsl.theory.measure import measure

Report = Callable[[object], None]

DIVERGENCE = Kind("divergence", f"{__name__}:perform_divergence", "divergence.json", "theory")
WATCHED = Kind("watched", f"{__name__}:perform_watched", "divergence.json", "theory", factor=1.05, with_run=True)
THEORY = Kind("theory", f"{__name__}:perform_theory", "theory.json", "theory", factor=3.0)


def perform_divergence(spec: Spec, folder: Path, threads: int, report: Report) -> None:
    """Play a run beside its genie and keep the divergence alone."""
    _keep(folder / "divergence.json", divergence_curve(spec, threads, report))


def perform_watched(spec: Spec, folder: Path, threads: int, report: Report) -> None:
    """A run and its divergence in one go; if the run was begun before, it is finished and replayed."""
    run, out = Task(spec), folder.parents[1]
    own, companion = run.folder(out), Companion()
    if not (own / "spec.toml").exists():
        perform_run(spec, own, threads, report, watch=companion)
        _keep(folder / "divergence.json", [found.to_json() for found in companion.curve])
        return
    if not run.is_done(out):
        perform_run(spec, own, threads, report)
    if not (folder / "divergence.json").exists():
        perform_divergence(spec, folder, threads, report)


def perform_theory(spec: Spec, folder: Path, threads: int, report: Report) -> None:
    """Both theorems on one run."""
    _keep(folder / "theory.json", measure(spec, threads, report).to_json())


def _keep(path: Path, content: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, content)
