"""The paper's Section VI: its figures as lists of specs, and the numbers that were published.

Only says what to run and what was claimed to come out; `paper_claims` judges, `reproduce` runs, `report` draws.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from cbdsl.presets import preset
from cbdsl.spec import Spec

Regime = Literal["paper", "script"]
REGIMES: dict[Regime, str] = {
    "paper": "as the text says",
    "script": "as the authors' published script",
}


@dataclass(frozen=True)
class Approach:
    """One of the five approaches of Sec. VI.C."""

    key: str
    label: str
    method: str
    shared: str


APPROACHES = {
    approach.key: approach
    for approach in (
        Approach("fedavg", "FedAvg", "fedavg", "none"),
        Approach("fedavg-tr", "FedAvg + D_tr", "fedavg", "train"),
        Approach("cb-dsl", "CB-DSL, no D_G", "cb-dsl", "none"),
        Approach("cb-dsl-sc", "CB-DSL + D_sc", "cb-dsl", "score"),
        Approach("cb-dsl-g", "CB-DSL + D_G", "cb-dsl", "both"),
    )
}


@dataclass(frozen=True)
class PaperFigure:
    """One figure: which runs it shows, and what was read off the published plot."""

    number: int
    title: str
    setting: Literal["iid", "noniid"]
    byzantine: int
    approaches: tuple[str, ...]
    published_round: int  # where the published values were read; 0: at the end
    published: dict[str, tuple[float, float]]  # approach -> lowest and highest value read, each within READING_ERROR


FIGURES = (
    PaperFigure(
        1, "i.i.d. data", "iid", 0, ("fedavg", "fedavg-tr", "cb-dsl", "cb-dsl-sc", "cb-dsl-g"), 10,
        {"fedavg": (0.903, 0.903), "fedavg-tr": (0.927, 0.927), "cb-dsl": (0.905, 0.905), "cb-dsl-sc": (0.91, 0.91),
         "cb-dsl-g": (0.937, 0.937)},
    ),
    PaperFigure(
        2, "non-i.i.d. data", "noniid", 0, ("fedavg", "fedavg-tr", "cb-dsl", "cb-dsl-sc", "cb-dsl-g"), 15,
        {"fedavg": (0.77, 0.77), "fedavg-tr": (0.835, 0.835), "cb-dsl": (0.10, 0.10), "cb-dsl-sc": (0.39, 0.39),
         "cb-dsl-g": (0.90, 0.90)},
    ),
    PaperFigure(
        3, "i.i.d. data, one Byzantine attacker", "iid", 1, ("fedavg", "cb-dsl", "cb-dsl-g"), 0,
        {"fedavg": (0.10, 0.10), "cb-dsl": (0.11, 0.11), "cb-dsl-g": (0.92, 0.97)},
    ),
    PaperFigure(
        4, "non-i.i.d. data, one Byzantine attacker", "noniid", 1, ("fedavg", "cb-dsl", "cb-dsl-g"), 0,
        {"fedavg": (0.09, 0.11), "cb-dsl": (0.10, 0.10), "cb-dsl-g": (0.85, 0.89)},
    ),
    PaperFigure(
        5, "weight divergence from a genie worker, non-i.i.d. data", "noniid", 0, ("cb-dsl", "cb-dsl-g"), 0,
        {"cb-dsl": (1.23, 1.23), "cb-dsl-g": (0.81, 0.81)},
    ),
)  # fmt: skip

READING_ERROR = 0.01
DIVERGENCE_FIGURE = 5
EQUAL_WORK = "cb-dsl-equal"
"""CB-DSL without D_G, but with as many local steps as with D_G: sharing D_tr makes an epoch longer."""


LABELS = {key: approach.label for key, approach in APPROACHES.items()} | {EQUAL_WORK: "CB-DSL, no D_G, equal steps"}
"""What figures, tables and sentences call an approach."""


@dataclass(frozen=True)
class Plan:
    """How much to run."""

    regimes: tuple[Regime, ...]
    seeds: tuple[int, ...]
    rounds_share: float  # of the preset's rounds
    settings: tuple[tuple[str, Any], ...] = ()  # other settings for every run, such as another model or other data

    @property
    def as_published(self) -> bool:
        """Whether its runs are the paper's, and as long."""
        return self.rounds_share >= 1 and not self.settings


FULL = Plan(("paper", "script"), (0, 1, 2), 1.0)
QUICK = Plan(("script",), (0,), 0.3)  # the regime that learns in few rounds


def spec_of(figure: PaperFigure, approach: str, regime: Regime, seed: int, plan: Plan) -> Spec:
    """The run behind one curve of one figure."""
    start = preset(f"{regime}-{figure.setting}")
    chosen = APPROACHES[approach]
    return start.with_settings(
        {
            "method": chosen.method,
            "shared": chosen.shared,
            "seed": seed,
            "attack.byzantine": figure.byzantine,
            "rounds": max(3, round(start.rounds * plan.rounds_share)),
            **dict(plan.settings),
        }
    )


def equal_work_spec(regime: Regime, seed: int, plan: Plan) -> Spec:
    """Figure 5's run without D_G, with as many steps a round as the run with D_G takes."""
    figure = FIGURES[DIVERGENCE_FIGURE - 1]
    without, with_set = (spec_of(figure, approach, regime, seed, plan) for approach in ("cb-dsl", "cb-dsl-g"))
    samples = with_set.data.shard_size * with_set.data.shards_per_worker + with_set.data.shared_training
    steps = with_set.local.epochs * -(-samples // with_set.local.batch_size)
    return without.with_settings({"local.steps": steps})


def specs_of(figures: Sequence[PaperFigure], plan: Plan) -> list[Spec]:
    """All runs behind some figures; figures may share runs."""
    return [
        spec_of(figure, approach, regime, seed, plan)
        for seed in plan.seeds
        for regime in plan.regimes
        for figure in figures
        for approach in figure.approaches
    ]
