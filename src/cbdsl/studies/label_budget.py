"""The study `budget`: where a swarm pays. Accuracy over the number of labelled samples that the server has."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from cbdsl.data.catalogue import ENTRIES
from cbdsl.data.download import cached_file
from cbdsl.errors import UserError, unknown
from cbdsl.presets import preset
from cbdsl.runs.resolve import resolve
from cbdsl.spec import INIT_SERVER, Spec
from cbdsl.studies.benchmark_datasets import PLAIN, STUDY_METHODS, format_markdown
from cbdsl.studies.compare import Spread, format_percent, format_points
from cbdsl.studies.sweep import FinishedRun, OnProgress, run_all, write_rows
from cbdsl.util.files import write_atomically, write_json


@dataclass(frozen=True)
class BudgetData:
    """One panel of the study: a preset, and how many workers upload in turn."""

    title: str
    preset: str
    in_turn: int


BUDGET_DATA = {
    "iid": BudgetData("MNIST, i.i.d.", "strong-iid", 12),
    "noniid": BudgetData("MNIST, two classes per worker", "strong-noniid", 20),
    "fashion": BudgetData("Fashion-MNIST, Dirichlet(0.3)", "fashion", 12),
    "hapt": BudgetData("HAPT, people not trained on", "hapt", 8),
}
BUDGETS = {100: (20, 40, 40), 250: (50, 100, 100), 550: (150, 200, 200), 2150: (150, 1000, 1000)}
"""Labelled samples at the server in all: D_tr, D_sc and the hold-out."""

SERVER_ALONE, SWARM = "server-only", "rotation"
LABELS = {
    SERVER_ALONE: "the server alone",
    "fedavg-tr": STUDY_METHODS["fedavg-tr"].label,
    "cb-dsl": STUDY_METHODS["cb-dsl"].label,
    SWARM: STUDY_METHODS[SWARM].label,
    "central": "all data in one place",
}
_SERVER_EPOCHS = 60  # the most; the hold-out chooses how many count


@dataclass(frozen=True)
class BudgetPlan:
    """Which data, seeds and numbers of labelled samples."""

    data: tuple[str, ...] = tuple(BUDGET_DATA)
    seeds: tuple[int, ...] = (0, 1, 2)
    budgets: tuple[int, ...] = tuple(BUDGETS)
    settings: Mapping[str, Any] = field(default_factory=dict)  # other settings of every run

    def __post_init__(self) -> None:
        if not self.data or not self.seeds or not self.budgets:
            raise UserError("The study budget needs data, a seed and a number of samples.", code="out-of-range")

    def spec(self, data: str, way: str, budget: int, seed: int) -> Spec:
        """Return one run, resolved."""
        start = preset(BUDGET_DATA[data].preset)
        sizes = dict(zip(("shared_training", "shared_scoring", "holdout"), BUDGETS[budget], strict=True))
        settings: dict[str, Any] = {**PLAIN, "seed": seed, **{f"data.{name}": size for name, size in sizes.items()}}
        if way in STUDY_METHODS:
            settings |= STUDY_METHODS[way].settings
        else:
            settings |= {"method": way}
        if way == SWARM:
            settings |= {"selection.k": BUDGET_DATA[data].in_turn, "init": INIT_SERVER}
        if way == SERVER_ALONE:
            epochs = -(-_SERVER_EPOCHS // start.local.epochs)
            settings |= {"options.server-only.use": "all", "rounds": epochs}
        return resolve(start.with_settings({**self.settings, **settings}))

    def points(self) -> list[tuple[str, str, int, int]]:
        """Return every run: seed by seed, so that a stopped study has whole tables; `central` once per seed."""
        return [
            (data, way, budget, seed)
            for seed in self.seeds
            for data in self.data
            for way in LABELS
            for budget in (self.budgets if way != "central" else self.budgets[-1:])
        ]


@dataclass(frozen=True, eq=False)
class BudgetStudy:
    """The results of the study."""

    plan: BudgetPlan
    runs: Mapping[tuple[str, str, int, int], FinishedRun]  # by data, way, budget and seed

    def accuracies(self, data: str, way: str, budget: int) -> list[float]:
        """Return the final test accuracy of each seed."""
        at = self.plan.budgets[-1] if way == "central" else budget
        return [self.runs[data, way, at, seed].summary.final_accuracy for seed in self.plan.seeds]

    def gain(self, data: str, budget: int) -> Spread:
        """Return what rotation is better than the server alone with all it has, paired by seed."""
        swarm, server = (self.accuracies(data, way, budget) for way in (SWARM, SERVER_ALONE))
        return Spread.of([one - other for one, other in zip(swarm, server, strict=True)])


def list_available(names: tuple[str, ...] = tuple(BUDGET_DATA)) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the data that are here, and those that have to be fetched first."""
    for name in names:
        if name not in BUDGET_DATA:
            raise unknown("data of the study budget", name, BUDGET_DATA)
    sources = {name: preset(BUDGET_DATA[name].preset).data.source for name in names}
    here = tuple(name for name, source in sources.items() if source not in ENTRIES or cached_file(source).is_file())
    return here, tuple(sources[name] for name in names if name not in here)


def run_budget_study(
    plan: BudgetPlan, out: Path, jobs: int | None = None, on_progress: OnProgress | None = None, on: str | None = None
) -> BudgetStudy:
    """Run what is missing in a folder; write study.json, the results and the table."""
    points = plan.points()
    found = dict(zip(points, run_all([plan.spec(*point) for point in points], out, jobs, on_progress, on), strict=True))
    study = BudgetStudy(plan, found)
    write_rows(
        [
            {"data": data, "way": way, "labelled": budget, "seed": seed, "final_accuracy": run.summary.final_accuracy,
             "uplink_bytes": run.summary.uplink_bytes, "folder": f"runs/{run.folder.name}"}
            for (data, way, budget, seed), run in found.items()
        ],
        out,
    )  # fmt: skip
    write_json(out / "study.json", {"name": "budget", **asdict(plan)})
    table = format_markdown(*budget_table(study))
    write_atomically(out / "table.md", f"{describe_budget_study(plan)}\n\n{table}".encode())
    return study


def budget_table(study: BudgetStudy) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Return headings and cells: a row per data set and number of labelled samples."""
    heads = ("data", "labelled", *LABELS.values(), "rotation minus server")
    rows = [
        (
            BUDGET_DATA[data].title,
            f"{budget:,}",
            *(format_percent(Spread.of(study.accuracies(data, way, budget))) for way in LABELS),
            format_points(study.gain(data, budget)),
        )
        for data in study.plan.data
        for budget in study.plan.budgets
    ]
    return heads, rows


def describe_budget_study(plan: BudgetPlan) -> str:
    """Describe what was run."""
    seeds = f"seeds {', '.join(map(str, plan.seeds))}" if len(plan.seeds) > 1 else f"one seed ({plan.seeds[0]})"
    spread = ", mean ± standard deviation" if len(plan.seeds) > 1 else ""
    other = ", ".join(f"{key} = {value}" for key, value in plan.settings.items())
    changed = f" Not the presets: {other}." if other else ""
    return (
        f"Final test accuracy over the labelled samples that the server has in all (D_tr, D_sc and hold-out); {seeds}"
        f"{spread}. The server alone trains on all of them. All ways have the same model and optimiser.{changed}"
    )
