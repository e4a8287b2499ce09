"""Tasks beside plain runs: how far a run's workers are from the genie, and both theorems measured on it."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from cbdsl.errors import UserError
from cbdsl.runs.resolve import resolve
from cbdsl.spec import Spec
from cbdsl.studies.paper import (
    DIVERGENCE_FIGURE,
    EQUAL_WORK,
    FIGURES,
    Evidence,
    JudgedClaim,
    PaperFigure,
    Regime,
    ReproductionPlan,
    equal_work_spec,
    judge,
    spec_of,
    specs_of,
)
from cbdsl.studies.sweep import RUN, OnProgress, Task, TaskKind, finished, perform, perform_run
from cbdsl.theory.genie import Companion, divergence_curve
from cbdsl.theory.measure import TheoryResult, measure
from cbdsl.util.files import write_atomically, write_json

Report = Callable[[object], None]

DIVERGENCE = TaskKind("divergence", f"{__name__}:perform_divergence", "divergence.json", "theory")
WATCHED = TaskKind("watched", f"{__name__}:perform_watched", "divergence.json", "theory", factor=1.05, with_run=True)
THEORY = TaskKind("theory", f"{__name__}:perform_theory", "theory.json", "theory", factor=3.0)


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


_DIVERGENCE = FIGURES[DIVERGENCE_FIGURE - 1]


@dataclass(frozen=True, eq=False)
class Reproduction:
    """What was run, and what came out."""

    plan: ReproductionPlan
    out: Path
    evidence: tuple[Evidence, ...]  # one a regime
    claims: tuple[JudgedClaim, ...]

    def theory(self) -> dict[tuple[Regime, str], TheoryResult]:
        """The theorems as they were measured: (regime, approach) -> findings."""
        return {
            key: TheoryResult.from_json(_read_json(Task(spec, THEORY).folder(self.out) / "theory.json"))
            for key, spec in theory_specs(self.plan).items()
        }


def reproduce(
    plan: ReproductionPlan,
    out: Path,
    jobs: int | None = None,
    on_progress: OnProgress | None = None,
    on: str | None = None,
) -> Reproduction:
    """Run everything that is missing in a folder, then judge the claims anew."""
    _claim_folder(out, plan)
    perform(tasks_of(plan), out, jobs, on_progress, on)
    evidence = tuple(gather(plan, regime, out) for regime in plan.regimes)
    claims = judge(evidence)
    write_json(out / "claims.json", [asdict(claim) for claim in claims])
    return Reproduction(plan, out, evidence, tuple(claims))


def tasks_of(plan: ReproductionPlan) -> list[Task]:
    """Every run, divergence curve and theory measurement; the long ones first, so that no core waits at the end."""
    runs = [resolve(spec) for spec in specs_of(FIGURES, plan)]
    theory = [Task(spec, THEORY) for spec in theory_specs(plan).values()]
    measured = {task.spec for task in theory}  # a theory measurement brings its curve with it
    figure = [
        *specs_of([_DIVERGENCE], plan),
        *(equal_work_spec(r, seed, plan) for r in plan.regimes for seed in plan.seeds),
    ]
    curves = {spec for spec in map(resolve, figure) if spec not in measured}  # "watched": measured while they are run
    plain = [Task(spec, WATCHED if spec in curves else RUN) for spec in runs]
    alone = [Task(spec, DIVERGENCE) for spec in curves - set(runs)]
    tasks = dict.fromkeys([*theory, *alone, *plain])
    return sorted(tasks, key=lambda task: (-task.work, task.kind.name, task.spec.key()))


def theory_specs(plan: ReproductionPlan) -> dict[tuple[Regime, str], Spec]:
    """The runs that the theorems are measured on: those of Figure 5, with the first seed."""
    return {
        (regime, approach): resolve(spec_of(_DIVERGENCE, approach, regime, plan.seeds[0], plan))
        for regime in plan.regimes
        for approach in _DIVERGENCE.approaches
    }


def gather(plan: ReproductionPlan, regime: Regime, out: Path) -> Evidence:
    """Read the results of one regime."""

    def seeds(figure: PaperFigure, approach: str) -> list[Spec]:
        return [resolve(spec_of(figure, approach, regime, seed, plan)) for seed in plan.seeds]

    runs = {
        (figure.number, approach): [finished(Task(spec).folder(out)) for spec in seeds(figure, approach)]
        for figure in FIGURES
        for approach in figure.approaches
    }
    divergence = {
        approach: [_curve(Task(spec, DIVERGENCE), out) for spec in seeds(_DIVERGENCE, approach)]
        for approach in _DIVERGENCE.approaches
    }
    equal = [resolve(equal_work_spec(regime, seed, plan)) for seed in plan.seeds]
    divergence[EQUAL_WORK] = [_curve(Task(spec, DIVERGENCE), out) for spec in equal]
    return Evidence(regime, runs, divergence)


def _curve(task: Task, out: Path) -> list[float]:
    """Median divergence over workers by round, measured alone or with the theory; NaN once most overflowed."""
    alone, whole = task.folder(out) / "divergence.json", task.folder(out) / "theory.json"
    rows: list[dict[str, Any]] = _read_json(alone) if alone.exists() else _read_json(whole)["divergence"]
    return [math.nan if 2 * row["lost"] > task.spec.workers else float(row["median"]) for row in rows]


def _read_json(path: Path) -> Any:  # noqa: ANN401 - what JSON holds
    return json.loads(path.read_text(encoding="utf-8"))


def _claim_folder(out: Path, plan: ReproductionPlan) -> None:
    """Keep a plan's folder for that plan: another plan's results would be mixed with it."""
    path, text = out / "plan.json", json.dumps(asdict(plan), indent=2, default=str) + "\n"
    try:
        out.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            if any(out.iterdir()):
                raise UserError(f"{out} is not empty and not the folder of a reproduction. Give another --out.")
            write_atomically(path, text.encode())
        elif path.read_text(encoding="utf-8") != text:
            raise UserError(f"{out} holds a reproduction with other seeds, regimes or rounds. Give another --out.")
    except OSError as error:
        raise UserError(f"The folder {out} cannot be written: {error.strerror}. Give another --out.") from error
