"""Runs everything behind the paper's figures, claims and theorems."""

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
    FULL_PLAN,
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
from cbdsl.studies.sweep import RUN, OnProgress, Task, TaskKind, read_run, run_or_resume, run_tasks
from cbdsl.theory.genie import Companion, divergence_curve
from cbdsl.theory.measure import TheoryResult, measure
from cbdsl.util.files import write_atomically, write_json

Report = Callable[[object], None]

DIVERGENCE = TaskKind("divergence", f"{__name__}:measure_divergence", "divergence.json", "theory")
RUN_AND_DIVERGENCE = TaskKind(
    "watched", f"{__name__}:run_with_divergence", "divergence.json", "theory", factor=1.05, with_run=True
)
THEORY = TaskKind("theory", f"{__name__}:measure_theory", "theory.json", "theory", factor=3.0)


def measure_divergence(spec: Spec, folder: Path, threads: int, report: Report) -> None:
    """Run a spec beside its genie and keep only the divergence."""
    _write(folder / "divergence.json", divergence_curve(spec, threads, report))


def run_with_divergence(spec: Spec, folder: Path, threads: int, report: Report) -> None:
    """Make a run and its divergence together; a run that exists is finished and repeated beside the genie."""
    run, out = Task(spec), folder.parents[1]
    own, companion = run.folder(out), Companion()
    if not (own / "spec.toml").exists():
        run_or_resume(spec, own, threads, report, watch=companion)
        _write(folder / "divergence.json", [found.to_json() for found in companion.curve])
        return
    if not run.is_done(out):
        run_or_resume(spec, own, threads, report)
    if not (folder / "divergence.json").exists():
        measure_divergence(spec, folder, threads, report)


def measure_theory(spec: Spec, folder: Path, threads: int, report: Report) -> None:
    """Measure both theorems on one run."""
    _write(folder / "theory.json", measure(spec, threads, report).to_json())


def _write(path: Path, content: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, content)


_DIVERGENCE = FIGURES[DIVERGENCE_FIGURE - 1]


@dataclass(frozen=True, eq=False)
class Reproduction:
    """The results of a reproduction."""

    plan: ReproductionPlan
    out: Path
    evidence: tuple[Evidence, ...]  # one per regime
    claims: tuple[JudgedClaim, ...]

    def theory(self) -> dict[tuple[Regime, str], TheoryResult]:
        """Read the measured theorems: (regime, approach) -> findings."""
        return {
            key: TheoryResult.from_json(_read_json(Task(spec, THEORY).folder(self.out) / "theory.json"))
            for key, spec in theory_specs(self.plan).items()
        }


def run_reproduction(
    plan: ReproductionPlan,
    out: Path,
    jobs: int | None = None,
    on_progress: OnProgress | None = None,
    on: str | None = None,
) -> Reproduction:
    """Run everything that is missing in a folder and judge the claims."""
    _check_folder(out, plan)
    run_tasks(list_tasks(plan), out, jobs, on_progress, on)
    evidence = tuple(read_evidence(plan, regime, out) for regime in plan.regimes)
    claims = judge(evidence, plan.figures, alone=not plan.settings)
    write_json(out / "claims.json", [asdict(claim) for claim in claims])
    return Reproduction(plan, out, evidence, tuple(claims))


def list_tasks(plan: ReproductionPlan) -> list[Task]:
    """Return every run, divergence curve and theory measurement, the longest first so that no core idles at the end."""
    runs = [resolve(spec) for spec in specs_of(plan.needed, plan)]
    theory = [Task(spec, THEORY) for spec in theory_specs(plan).values()]
    measured = {task.spec for task in theory}  # a theory measurement brings its curve with it
    figure = (
        [
            *specs_of([_DIVERGENCE], plan),
            *(equal_work_spec(r, seed, plan) for r in plan.regimes for seed in plan.seeds),
        ]
        if plan.diverges
        else []
    )
    curves = {spec for spec in map(resolve, figure) if spec not in measured}  # measured while they are run
    plain = [Task(spec, RUN_AND_DIVERGENCE if spec in curves else RUN) for spec in runs]
    alone = [Task(spec, DIVERGENCE) for spec in curves - set(runs)]
    tasks = dict.fromkeys([*theory, *alone, *plain])
    return sorted(tasks, key=lambda task: (-task.work, task.kind.name, task.spec.key()))


def theory_specs(plan: ReproductionPlan) -> dict[tuple[Regime, str], Spec]:
    """Return the specs that the theorems are measured on: those of Figure 5, with the first seed."""
    return {
        (regime, approach): resolve(spec_of(_DIVERGENCE, approach, regime, plan.seeds[0], plan))
        for regime in plan.regimes
        for approach in _DIVERGENCE.approaches
        if plan.measures_theory
    }


def read_evidence(plan: ReproductionPlan, regime: Regime, out: Path) -> Evidence:
    """Read the results of one regime."""

    def seeds(figure: PaperFigure, approach: str) -> list[Spec]:
        return [resolve(spec_of(figure, approach, regime, seed, plan)) for seed in plan.seeds]

    runs = {
        (figure.number, approach): [read_run(Task(spec).folder(out)) for spec in seeds(figure, approach)]
        for figure in plan.needed
        for approach in figure.approaches
    }
    if not plan.diverges:
        return Evidence(regime, runs, {})
    divergence = {
        approach: [_read_curve(Task(spec, DIVERGENCE), out) for spec in seeds(_DIVERGENCE, approach)]
        for approach in _DIVERGENCE.approaches
    }
    equal = [resolve(equal_work_spec(regime, seed, plan)) for seed in plan.seeds]
    divergence[EQUAL_WORK] = [_read_curve(Task(spec, DIVERGENCE), out) for spec in equal]
    return Evidence(regime, runs, divergence)


def _read_curve(task: Task, out: Path) -> list[float]:
    """Read the median divergence over workers by round; NaN once most of them overflowed."""
    alone, whole = task.folder(out) / "divergence.json", task.folder(out) / "theory.json"
    rows: list[dict[str, Any]] = _read_json(alone) if alone.exists() else _read_json(whole)["divergence"]
    return [math.nan if 2 * row["lost"] > task.spec.workers else float(row["median"]) for row in rows]


def _read_json(path: Path) -> Any:  # noqa: ANN401 - what JSON holds
    return json.loads(path.read_text(encoding="utf-8"))


def _check_folder(out: Path, plan: ReproductionPlan) -> None:
    """Raise if a folder has the results of another plan."""
    wanted = {**asdict(plan)}
    for name in ("figures", "rounds", "theory"):  # earlier versions did not write them
        if wanted[name] == getattr(FULL_PLAN, name):
            del wanted[name]
    path, text = out / "plan.json", json.dumps(wanted, indent=2, default=str) + "\n"
    try:
        out.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            if any(out.iterdir()):
                raise UserError(
                    f"{out} is not empty and not the folder of a reproduction. Give another --out.",
                    code="exists-already",
                )
            write_atomically(path, text.encode())
        elif path.read_text(encoding="utf-8") != text:
            raise UserError(
                f"{out} holds a reproduction with other seeds, regimes or rounds. Give another --out.",
                code="exists-already",
            )
    except OSError as error:
        raise UserError(
            f"The folder {out} cannot be written: {error.strerror}. Give another --out.", code="unwritable-file"
        ) from error
