"""Studies on benchmark data sets: several methods on one data set, clean and attacked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from cbdsl.data.catalogue import ENTRIES
from cbdsl.data.download import require_cached
from cbdsl.errors import UserError, unknown
from cbdsl.presets import preset
from cbdsl.runs.records import Summary
from cbdsl.runs.resolve import resolve
from cbdsl.spec import Spec
from cbdsl.studies.compare import Spread, format_percent
from cbdsl.studies.sweep import FinishedRun, OnProgress, run_all, write_rows
from cbdsl.util.files import write_atomically, write_json
from cbdsl.util.formatting import format_bytes


@dataclass(frozen=True)
class StudyMethod:
    """A method of a study."""

    label: str
    settings: Mapping[str, Any]
    plain: bool = False  # needs SGD without momentum


STUDY_METHODS: dict[str, StudyMethod] = {
    "fedavg": StudyMethod("FedAvg", {"method": "fedavg", "shared": "none"}),
    "fedavg-tr": StudyMethod("FedAvg + D_tr", {"method": "fedavg", "shared": "train"}),
    "fedprox-tr": StudyMethod("FedProx + D_tr", {"method": "fedprox", "shared": "train"}),
    "scaffold-tr": StudyMethod("SCAFFOLD + D_tr", {"method": "scaffold", "shared": "train"}, plain=True),
    "cb-dsl": StudyMethod("CB-DSL + D_G", {"method": "cb-dsl", "shared": "both"}),
    "rotation": StudyMethod(
        "verified rotation",
        {
            "method": "restart", "shared": "both", "selection.name": "rotation",
            "defence.guard": True, "defence.commitment": True, "codec.up": "q4", "codec.down": "q4",
        },
    ),
}  # fmt: skip
"""Methods by name; all but the first train on D_tr beside their own data."""


@dataclass(frozen=True)
class BenchmarkDataset:
    """One benchmark data set; its preset has the same name."""

    title: str
    in_turn: int  # workers that upload per round of rotation: about a quarter, more if there are few
    attackers: int  # about a tenth of the workers


BENCHMARKS = {
    "hapt": BenchmarkDataset("Activities of people who are not in the training data", 8, 2),
    "fashion": BenchmarkDataset("Fashion-MNIST, different classes on every worker", 12, 5),
    "cifar10": BenchmarkDataset("CIFAR-10, different classes on every worker", 5, 1),
}

# Settings of a method that it does not set itself; they replace those of the preset.
PLAIN: dict[str, Any] = {
    "selection.name": "best", "selection.k": 0, "defence.guard": False, "defence.commitment": False,
    "codec.up": "none", "codec.down": "none",
}  # fmt: skip
# Averaging methods accept it; methods that verify can detect it or not.
ATTACK: dict[str, Any] = {"attack.name": "sign-flip", "attack.scale": 5.0}
_INSTEAD_OF_MOMENTUM = 2  # times the rate; at five times one of three seeds diverged on hapt
_QUICK_SHARE = 0.2  # of the rounds


@dataclass(frozen=True)
class StudyPlan:
    """The data set, methods and seeds of a study."""

    name: str
    seeds: tuple[int, ...] = (0, 1, 2)
    ways: tuple[str, ...] = tuple(STUDY_METHODS)
    attacked: bool = True
    quick: bool = False  # a fifth of the rounds
    settings: Mapping[str, Any] = field(default_factory=dict)  # other settings of every run

    def __post_init__(self) -> None:
        if self.name not in BENCHMARKS:
            raise unknown("study", self.name, BENCHMARKS)
        for way in self.ways:
            if way not in STUDY_METHODS:
                raise unknown("way of learning", way, STUDY_METHODS)
        if not self.ways or not self.seeds:
            raise UserError("A study needs at least one way of learning and one seed.", code="out-of-range")

    @property
    def start(self) -> Spec:
        """Return the spec that all runs begin with."""
        whole = preset(self.name)
        rounds = max(3, round(_QUICK_SHARE * whole.rounds)) if self.quick else whole.rounds
        return whole.with_settings({"rounds": rounds, **self.settings})

    @property
    def attackers(self) -> int:
        """Return the number of attackers in attacked runs."""
        return max(1, min(BENCHMARKS[self.name].attackers, self.start.workers // 4))

    def spec(self, way: str, attacked: bool, seed: int) -> Spec:
        """Return one run, resolved."""
        settings = {**PLAIN, **STUDY_METHODS[way].settings, "seed": seed}
        if settings["selection.name"] == "rotation":
            settings["selection.k"] = BENCHMARKS[self.name].in_turn
        if (
            STUDY_METHODS[way].plain and self.start.local.momentum
        ):  # with momentum its corrections overshoot, and it diverges
            rate = _INSTEAD_OF_MOMENTUM * self.start.local.learning_rate
            settings |= {"local.momentum": 0.0, "local.learning_rate": rate}
        if attacked:
            settings |= {**ATTACK, "attack.byzantine": self.attackers}
        return resolve(self.start.with_settings({**self.settings, **settings}))

    def specs(self) -> list[Spec]:
        """Return every run: seed by seed, clean ones first, so that a stopped study has whole rows."""
        return [self.spec(*key) for key in self._keys()]

    def _keys(self) -> list[tuple[str, bool, int]]:
        conditions = (False, True) if self.attacked else (False,)
        return [(way, attacked, seed) for seed in self.seeds for attacked in conditions for way in self.ways]


@dataclass(frozen=True, eq=False)
class StudyEntry:
    """One method and its runs, one per seed."""

    label: str
    clean: tuple[FinishedRun, ...]
    attacked: tuple[FinishedRun, ...]

    def accuracy(self, attacked: bool = False) -> Spread:
        """Return the final test accuracy."""
        return Spread.of([run.summary.final_accuracy for run in (self.attacked if attacked else self.clean)])

    def mean(self, measure: str) -> float:
        """Return the mean of a number of the summary over clean runs."""
        return Spread.of([float(getattr(run.summary, measure)) for run in self.clean]).mean

    @property
    def traffic(self) -> float:
        """Return the bytes in both directions."""
        return self.mean("uplink_bytes") + self.mean("downlink_bytes")

    @property
    def share(self) -> float:
        """Return the uplink as a share of what FedAvg uploads in as many rounds."""
        return self.mean("uplink_bytes") / self.mean("fedavg_model_uplink_bytes")

    @property
    def bans(self) -> tuple[int, int]:
        """Return the numbers of attackers and honest workers that were banned in all attacked runs."""
        summaries = [run.summary for run in self.attacked]
        honest = sum(one.honest_banned for one in summaries)
        return sum(len(one.banned) for one in summaries) - honest, honest


@dataclass(frozen=True, eq=False)
class Study:
    """The results of a study."""

    plan: StudyPlan
    entries: tuple[StudyEntry, ...]

    @property
    def runs(self) -> tuple[FinishedRun, ...]:
        """Return all runs, method by method."""
        return tuple(run for entry in self.entries for run in (*entry.clean, *entry.attacked))


def run_study(
    plan: StudyPlan, out: Path, jobs: int | None = None, on_progress: OnProgress | None = None, on: str | None = None
) -> Study:
    """Run what is missing in a folder; write study.json, the results and the table."""
    source = plan.start.data.source
    if source in ENTRIES:
        require_cached(ENTRIES[source])  # once instead of in every run
    found = dict(zip(plan._keys(), run_all(plan.specs(), out, jobs, on_progress, on), strict=True))
    entries = tuple(
        StudyEntry(
            STUDY_METHODS[way].label,
            tuple(found[way, False, seed] for seed in plan.seeds),
            tuple(found[way, True, seed] for seed in plan.seeds if plan.attacked),
        )
        for way in plan.ways
    )
    study = Study(plan, entries)
    rows = [
        {"way": way, "attacked": attacked, "seed": seed, **_measured(run.summary), "folder": f"runs/{run.folder.name}"}
        for (way, attacked, seed), run in found.items()
    ]
    write_rows(rows, out)
    write_json(out / "study.json", asdict(plan))
    write_atomically(out / "table.md", f"{describe_study(plan)}\n\n{markdown_table(study)}".encode())
    return study


def _measured(summary: Summary) -> dict[str, Any]:
    return {key: value for key, value in summary.to_json().items() if key not in {"seed", "attack"}}


def describe_study(plan: StudyPlan) -> str:
    """Describe what was run in two sentences, beginning with how little a quick look is."""
    start, whole = plan.start, preset(plan.name)
    seeds = f"seeds {', '.join(map(str, plan.seeds))}" if len(plan.seeds) > 1 else f"one seed ({plan.seeds[0]})"
    spread = ", mean ± standard deviation" if len(plan.seeds) > 1 else ""
    rounds = f"{start.rounds} of {whole.rounds} rounds" if start.rounds < whole.rounds else f"{start.rounds} rounds"
    quick = f"A quick look, not a result: {rounds}, {seeds}. " if is_quick(plan) else ""
    other = ", ".join(f"{key} = {value}" for key, value in plan.settings.items())
    changed = f" Not the preset: {other}." if other else ""
    return (
        f"{quick}{BENCHMARKS[plan.name].title}: preset {plan.name}, {start.workers} workers"
        f"{'' if quick else f', {rounds}, {seeds}'}; final test accuracy{spread}.{describe_attack(plan)}{changed}"
    )


def is_quick(plan: StudyPlan) -> bool:
    """Return whether a study has too few rounds or seeds for a result."""
    return len(plan.seeds) == 1 or plan.start.rounds < preset(plan.name).rounds


def describe_attack(plan: StudyPlan) -> str:
    """Describe the attack in a sentence."""
    if not plan.attacked:
        return ""
    name, scale = ATTACK["attack.name"], ATTACK["attack.scale"]
    return (
        f" Attacked: {plan.attackers} of {plan.start.workers} workers send their step reversed and {scale:g} times as "
        f"long ({name})."
    )


def study_table(study: Study) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Return the headings and the cells, one row per method."""
    attacked = ("attacked", "banned") if study.plan.attacked else ()
    heads = ("", "clean", *attacked, "uplink", "of FedAvg's", "both ways")
    return heads, [_cells(entry, study.plan) for entry in study.entries]


def _cells(entry: StudyEntry, plan: StudyPlan) -> tuple[str, ...]:
    there = plan.attackers * len(entry.attacked)
    caught, honest = entry.bans
    screens = entry.clean[0].summary.conversation == "swarm"
    bans = (f"{caught} of {there}" + (f", and {honest} honest" if honest else "")) if screens else "–"
    attacked = (format_percent(entry.accuracy(attacked=True)), bans) if entry.attacked else ()
    return (
        entry.label, format_percent(entry.accuracy()), *attacked,
        format_bytes(entry.mean("uplink_bytes")), f"{100 * entry.share:.1f} %", format_bytes(entry.traffic),
    )  # fmt: skip


def markdown_table(study: Study) -> str:
    """Return the table as Markdown."""
    return format_markdown(*study_table(study))


def format_markdown(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table as Markdown."""
    lines = [heads, ["---"] * len(heads), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)
