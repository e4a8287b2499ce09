"""`cbdsl reproduce`: run what the paper's figures need, judge its claims, draw the figures, write the page."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cbdsl.errors import UserError
from cbdsl.files import write_atomically
from cbdsl.runs.resolve import resolve
from cbdsl.spec import Spec
from cbdsl.study.paper import (
    DIVERGENCE_FIGURE,
    EQUAL_WORK,
    FIGURES,
    PaperFigure,
    Plan,
    Regime,
    equal_work_spec,
    spec_of,
    specs_of,
)
from cbdsl.study.paper_claims import Evidence, JudgedClaim, judge
from cbdsl.study.sweep import RUN, OnProgress, Task, finished, perform
from cbdsl.study.theory_tasks import DIVERGENCE, THEORY, WATCHED

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_DIVERGENCE = FIGURES[DIVERGENCE_FIGURE - 1]


@dataclass(frozen=True, eq=False)
class Reproduction:
    """What a reproduction leaves."""

    claims: tuple[JudgedClaim, ...]
    page: Path


def reproduce(
    plan: Plan, out: Path, command: str, jobs: int | None = None, on_progress: OnProgress | None = None
) -> Reproduction:
    """Run everything that is missing in a folder, then write claims, figures and page anew."""
    _claim_folder(out, plan)
    perform(tasks_of(plan), out, jobs, on_progress)
    evidence = [gather(plan, regime, out) for regime in plan.regimes]
    claims = judge(evidence)
    rows = [asdict(claim) for claim in claims]
    write_atomically(out / "claims.json", (json.dumps(rows, indent=2, allow_nan=False) + "\n").encode())
    page = _draw(plan, evidence, claims, out, command)
    return Reproduction(tuple(claims), page)


def tasks_of(plan: Plan) -> list[Task]:
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


def theory_specs(plan: Plan) -> dict[tuple[Regime, str], Spec]:
    """The runs that the theorems are measured on: those of Figure 5, with the first seed."""
    return {
        (regime, approach): resolve(spec_of(_DIVERGENCE, approach, regime, plan.seeds[0], plan))
        for regime in plan.regimes
        for approach in _DIVERGENCE.approaches
    }


def gather(plan: Plan, regime: Regime, out: Path) -> Evidence:
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


def _draw(plan: Plan, evidence: Sequence[Evidence], claims: Sequence[JudgedClaim], out: Path, command: str) -> Path:
    """Write the figures and the page."""
    from cbdsl.report import page, paper_figures, style, theory_section  # noqa: PLC0415 - matplotlib loads slowly
    from cbdsl.theory.report import TheoryResult  # noqa: PLC0415

    (out / "figures").mkdir(exist_ok=True)

    def keep(drawn: Figure, name: str, description: str) -> str:
        style.save(drawn, out / "figures" / name)
        return style.themed_svg(drawn, name, description)

    pictures = {
        (figure.number, item.regime): keep(
            paper_figures.draw(figure, item, published=not plan.settings),
            f"figure{figure.number}-{item.regime}",
            f"Figure {figure.number}: {figure.title}, {item.regime} regime",
        )
        for item in evidence
        for figure in FIGURES
    }
    results = {
        key: TheoryResult.from_json(_read_json(Task(spec, THEORY).folder(out) / "theory.json"))
        for key, spec in theory_specs(plan).items()
    }
    bounds = {
        regime: keep(
            theory_section.draw({approach: result for (name, approach), result in results.items() if name == regime}),
            f"theorem2-{regime}",
            f"Theorem 2, {regime} regime",
        )
        for regime in plan.regimes
    }
    text = page.build(plan, claims, pictures, theory_section.build(results, bounds, plan), command)
    write_atomically(out / "report.html", text.encode())
    return out / "report.html"


def _read_json(path: Path) -> Any:  # noqa: ANN401 - what JSON holds
    return json.loads(path.read_text(encoding="utf-8"))


def _claim_folder(out: Path, plan: Plan) -> None:
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
