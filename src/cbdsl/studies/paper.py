"""The paper's Section VI: its figures as specs, its published numbers, and its claims with their checks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any, Literal

from cbdsl.presets import preset
from cbdsl.runs.records import RoundRecord, finite
from cbdsl.spec import Spec
from cbdsl.studies.sweep import FinishedRun
from cbdsl.util.paired_test import PairedTest

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
    """One figure: the runs that it shows, and the values read off the published plot."""

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
"""Names of the approaches on the page."""


@dataclass(frozen=True)
class ReproductionPlan:
    """How much to run."""

    regimes: tuple[Regime, ...]
    seeds: tuple[int, ...]
    rounds_share: float  # of the preset's rounds
    settings: tuple[tuple[str, Any], ...] = ()  # other settings for every run, such as another model or other data
    figures: tuple[int, ...] = (1, 2, 3, 4, 5)
    rounds: int = 0  # of every run; 0: the share
    theory: bool = True  # whether the theorems are measured, on the runs of Figure 5

    @property
    def as_published(self) -> bool:
        """Return whether the runs are the paper's, and as long."""
        return self.rounds_share >= 1 and not self.settings and not self.rounds

    @property
    def shown(self) -> tuple[PaperFigure, ...]:
        """The figures."""
        return tuple(figure for figure in FIGURES if figure.number in self.figures)

    @property
    def needed(self) -> tuple[PaperFigure, ...]:
        """The figures, and those against whose runs they are judged."""
        clean = {CLEAN[number] for number in self.figures if number in CLEAN}
        return tuple(figure for figure in FIGURES if figure.number in {*self.figures, *clean})

    @property
    def diverges(self) -> bool:
        """Whether weight divergence is measured."""
        return DIVERGENCE_FIGURE in self.figures

    @property
    def measures_theory(self) -> bool:
        """Whether the theorems are measured."""
        return self.theory and self.diverges


CLEAN = {3: 1, 4: 2}  # figures with an attacker, and the same without
FULL_PLAN = ReproductionPlan(("paper", "script"), (0, 1, 2), 1.0)
QUICK_PLAN = ReproductionPlan(("script",), (0,), 0.3, theory=False)  # the regime that learns in few rounds


def spec_of(figure: PaperFigure, approach: str, regime: Regime, seed: int, plan: ReproductionPlan) -> Spec:
    """Return the spec of one curve of one figure."""
    start = preset(f"{regime}-{figure.setting}")
    chosen = APPROACHES[approach]
    return start.with_settings(
        {
            "method": chosen.method,
            "shared": chosen.shared,
            "seed": seed,
            "attack.byzantine": figure.byzantine,
            "rounds": plan.rounds or max(3, round(start.rounds * plan.rounds_share)),
            **dict(plan.settings),
        }
    )


def equal_work_spec(regime: Regime, seed: int, plan: ReproductionPlan) -> Spec:
    """Return Figure 5's spec without D_G, with as many steps per round as with D_G."""
    figure = FIGURES[DIVERGENCE_FIGURE - 1]
    without, with_set = (spec_of(figure, approach, regime, seed, plan) for approach in ("cb-dsl", "cb-dsl-g"))
    samples = with_set.data.shard_size * with_set.data.shards_per_worker + with_set.data.shared_training
    steps = with_set.local.epochs * -(-samples // with_set.local.batch_size)
    return without.with_settings({"local.steps": steps})


def specs_of(figures: Sequence[PaperFigure], plan: ReproductionPlan) -> list[Spec]:
    """Return all specs of some figures; figures may share runs."""
    return [
        spec_of(figure, approach, regime, seed, plan)
        for seed in plan.seeds
        for regime in plan.regimes
        for figure in figures
        for approach in figure.approaches
    ]


ClaimVerdict = Literal["holds", "holds in this regime", "undecided", "does not hold", "not judged"]

SIGNIFICANCE = 0.05  # one-sided, of the paired t-test over seeds
FAILED = 0.20  # a ten-class model below this has learned next to nothing
NEAR = 0.01  # "effectively defends": within one point of the clean run
FLAT = 0.2  # "flattens": the last third's slope is at most this share of the first third's
DIVERGED = 100.0  # a model that is farther from the genie than this, in lengths of the genie, has diverged
FEWEST_ROUNDS = 3  # a curve's first and last third, each with a slope of its own


@dataclass(frozen=True, eq=False)
class Evidence:
    """The results of one regime."""

    regime: str
    runs: Mapping[tuple[int, str], Sequence[FinishedRun]]  # (figure, approach) -> one run per seed
    divergence: Mapping[str, Sequence[Sequence[float]]]  # approach -> one curve per seed: mean divergence by round

    @property
    def seeds(self) -> int:
        """Return the number of seeds of every run."""
        return min(map(len, self.runs.values()))

    def final(self, figure: int, approach: str) -> list[float]:
        """Return the final test accuracy of every seed."""
        return [run.summary.final_accuracy for run in self.runs[figure, approach]]

    def rounds(self, figure: int, approach: str) -> list[Sequence[RoundRecord]]:
        """Return the rounds of every seed."""
        return [run.rounds for run in self.runs[figure, approach]]

    def final_divergence(self, approach: str) -> list[float]:
        """Return the weight divergence after the last round of every seed."""
        return [curve[-1] for curve in self.divergence[approach]]


def has_diverged(value: float) -> bool:
    """Return whether a weight divergence is so large that there is no model left."""
    return not value <= DIVERGED


@dataclass(frozen=True)
class Judgement:
    """The result of a check in one regime."""

    holds: bool | None  # None: undecided; the sign is right but not significant, or rounds are too few
    measured: str
    numbers: dict[str, Any]


@dataclass(frozen=True)
class PaperClaim:
    """One sentence of Sec. VI, paraphrased."""

    id: str
    figure: int
    text: str
    check: Callable[[Evidence], Judgement]
    alone: Literal["", "either way", "if it holds"] = ""  # what one seed and few rounds can decide


@dataclass(frozen=True)
class JudgedClaim:
    """A claim and its verdict in one regime; a row of claims.json."""

    id: str
    claim: str
    figure: int
    regime: str
    verdict: ClaimVerdict
    measured: str
    numbers: dict[str, Any]
    unjudged: str = ""  # why there is no verdict


def judge(
    evidence: Sequence[Evidence], figures: Sequence[int] = (1, 2, 3, 4, 5), alone: bool = False
) -> list[JudgedClaim]:
    """Judge every claim about some figures in every regime; a single seed decides none of them.

    alone: judge the claims that one seed can decide: counts of bytes, and attacks that end as in the paper.
    """
    rows = []
    for claim in PAPER_CLAIMS:
        if claim.figure not in figures:
            continue
        found = {item.regime: claim.check(item) for item in evidence}
        single = {item.regime for item in evidence if item.seeds == 1}
        everywhere = all(judgement.holds for judgement in found.values())
        for regime, judgement in found.items():
            verdict: ClaimVerdict = "undecided" if judgement.holds is None else "does not hold"
            if judgement.holds:
                verdict = "holds" if everywhere else "holds in this regime"
            why = _explain_unjudged(claim, judgement, alone) if regime in single else ""
            rows.append(
                JudgedClaim(
                    claim.id,
                    claim.text,
                    claim.figure,
                    regime,
                    "not judged" if why else verdict,
                    judgement.measured,
                    judgement.numbers,
                    why,
                )
            )
    return rows


def _explain_unjudged(claim: PaperClaim, judgement: Judgement, alone: bool) -> str:
    """Return the reason why one seed does not decide a claim; "" if it does."""
    if alone and (claim.alone == "either way" or (claim.alone and judgement.holds)):
        return ""
    return "it may be the few rounds, or the one seed" if alone and claim.alone else "a difference takes several seeds"


def is_above_zero(differences: Sequence[float]) -> tuple[bool | None, float | None]:
    """Test whether the mean of paired differences is above zero; return the verdict and the one-sided p-value.

    A paired t-test. With one seed there is nothing to test and no verdict.
    """
    if len(differences) < 2:
        return None, None
    test = PairedTest.of(differences)
    if test.mean <= 0:
        return False, test.above
    return (True if test.above < SIGNIFICANCE else None), test.above


def _format_percent(values: Sequence[float]) -> str:
    spread = f" ± {100 * stdev(values):.1f}" if len(values) > 1 else ""
    return f"{100 * fmean(values):.1f}{spread} %"


def _format_p_value(p: float | None) -> str:
    return "" if p is None else f" (p = {p:.3f})" if p >= 0.001 else " (p < 0.001)"


def _better(figure: int, one: str, other: str) -> Callable[[Evidence], Judgement]:
    """Check that one approach ends above another, paired by seed."""

    def check(evidence: Evidence) -> Judgement:
        first, second = evidence.final(figure, one), evidence.final(figure, other)
        holds, p = is_above_zero([a - b for a, b in zip(first, second, strict=True)])
        text = (
            f"{LABELS[one]}: {_format_percent(first)}; {LABELS[other]}: {_format_percent(second)}{_format_p_value(p)}"
        )
        return Judgement(holds, text, {one: first, other: second, "p": p})

    return check


def _best_of_all(figure: int, one: str, others: Sequence[str]) -> Callable[[Evidence], Judgement]:
    def check(evidence: Evidence) -> Judgement:
        first = evidence.final(figure, one)
        rivals = {other: evidence.final(figure, other) for other in others}
        strongest = max(rivals, key=lambda other: fmean(rivals[other]))
        holds, p = is_above_zero([a - b for a, b in zip(first, rivals[strongest], strict=True)])
        next_best = f"{LABELS[strongest]}: {_format_percent(rivals[strongest])}"
        text = f"{LABELS[one]}: {_format_percent(first)}; the best of the others, {next_best}{_format_p_value(p)}"
        return Judgement(holds, text, {one: first, **rivals, "p": p})

    return check


def _fails(figure: int, approaches: Sequence[str], clean: int = 0) -> Callable[[Evidence], Judgement]:
    """Check that every seed of every approach ends below 20 %.

    clean: the figure without the attacker. With one seed the first approach must have learned there; otherwise the
    attacker is not the reason.
    """

    def check(evidence: Evidence) -> Judgement:
        finals = {approach: evidence.final(figure, approach) for approach in approaches}
        text = "; ".join(f"{LABELS[approach]}: {_format_percent(values)}" for approach, values in finals.items())
        holds: bool | None = all(max(values) < FAILED for values in finals.values())
        if clean and evidence.seeds == 1 and max(evidence.final(clean, approaches[0])) < FAILED:
            holds = None
        return Judgement(holds, text, dict(finals))

    return check


def _survives(figure: int, clean_figure: int, approach: str) -> Callable[[Evidence], Judgement]:
    """Check that every seed ends within one point of the clean run, and that only attackers are banned."""

    def check(evidence: Evidence) -> Judgement:
        attacked, clean = evidence.final(figure, approach), evidence.final(clean_figure, approach)
        runs = evidence.runs[figure, approach]
        caught = all(run.summary.banned == run.summary.byzantine for run in runs)
        near = all(a > c - NEAR for a, c in zip(attacked, clean, strict=True))
        alone = max(len(run.summary.byzantine) for run in runs) <= 1
        whom = "only the attacker was banned" if alone else "all attackers and no others were banned"
        banned = whom if caught else "bans and attackers differ"
        text = f"{_format_percent(attacked)} attacked, {_format_percent(clean)} clean; {banned}"
        return Judgement(near and caught, text, {"attacked": attacked, "clean": clean, "caught": caught})

    return check


def _uplink(evidence: Evidence) -> Judgement:
    ours, theirs = evidence.runs[1, "cb-dsl-g"], evidence.runs[1, "fedavg"]
    shares = [a.summary.uplink_bytes / b.summary.uplink_bytes for a, b in zip(ours, theirs, strict=True)]
    workers = ours[0].summary.workers
    uploads = fmean(run.summary.uploads for run in ours)
    text = (
        f"1/{1 / fmean(shares):.1f} of FedAvg's uplink, scores included; 1/U = 1/{workers}; "
        f"{uploads:.0f} uploads against {theirs[0].summary.uploads}"
    )
    return Judgement(max(shares) <= 1.05 / workers, text, {"share": shares, "workers": workers})


def _fewer_rounds(figure: int, rival: str) -> Callable[[Evidence], Judgement]:
    """Check that CB-DSL + D_G reaches the rival's final accuracy before the rival does."""

    def check(evidence: Evidence) -> Judgement:
        targets = evidence.final(figure, rival)
        length = len(evidence.rounds(figure, rival)[0])
        pairs = [
            (_find_first_round(ours, target), _find_first_round(theirs, target))
            for ours, theirs, target in zip(
                evidence.rounds(figure, "cb-dsl-g"), evidence.rounds(figure, rival), targets, strict=True
            )
        ]
        # A run that never gets there counts as one round more than it had.
        gains = [(theirs or length + 1) - (ours or length + 1) for ours, theirs in pairs]
        holds, p = is_above_zero([float(gain) for gain in gains])
        words = ", ".join(f"round {ours or 'never'} against {theirs}" for ours, theirs in pairs)
        text = f"to the final accuracy of {LABELS[rival]}, {_format_percent(targets)}: {words}{_format_p_value(p)}"
        return Judgement(holds, text, {"rounds": pairs, "p": p})

    return check


def _find_first_round(rounds: Sequence[RoundRecord], target: float) -> int | None:
    return next((line.round for line in rounds if line.test_accuracy >= target), None)


def _rises_then_flattens(evidence: Evidence) -> Judgement:
    approaches = ("cb-dsl", "cb-dsl-g")
    rounds = min(len(curve) for approach in approaches for curve in evidence.divergence[approach])
    if rounds < FEWEST_ROUNDS:
        text = f"too few rounds: {rounds} instead of {FEWEST_ROUNDS} or more"
        return Judgement(None, text, {"rounds": rounds})
    slopes = {}
    for approach in approaches:
        curve = [fmean(values) for values in zip(*evidence.divergence[approach], strict=True)]
        third = max(1, len(curve) // 3)
        early = (curve[third] - curve[0]) / third
        late = (curve[-1] - curve[-1 - third]) / third
        slopes[approach] = (early, late)
    gone = {name for name in approaches if any(map(has_diverged, evidence.final_divergence(name)))}
    holds = not gone and all(early > 0 and abs(late) <= FLAT * early for early, late in slopes.values())
    text = "; ".join(
        f"{LABELS[name]}: diverged"
        if name in gone
        else f"{LABELS[name]}: slope {early:+.3f} per round in the first third, {late:+.3f} in the last"
        for name, (early, late) in slopes.items()
    )
    return Judgement(holds, text, {"slopes": {name: list(map(finite, pair)) for name, pair in slopes.items()}})


def _lower_divergence(without: str) -> Callable[[Evidence], Judgement]:
    """Check that divergence ends lower with D_G than in another run, paired by seed."""

    def check(evidence: Evidence) -> Judgement:
        ours, theirs = (evidence.final_divergence(name) for name in ("cb-dsl-g", without))
        numbers = {"cb-dsl-g": list(map(finite, ours)), without: list(map(finite, theirs))}
        ours_gone, theirs_gone = (any(map(has_diverged, values)) for values in (ours, theirs))
        words = [
            "diverged" if gone else f"{fmean(values):.2f}"
            for values, gone in ((ours, ours_gone), (theirs, theirs_gone))
        ]
        text = f"{words[0]} with D_G, {words[1]} without"
        if ours_gone or theirs_gone:
            return Judgement(theirs_gone and not ours_gone, text, numbers)
        holds, p = is_above_zero([a - b for a, b in zip(theirs, ours, strict=True)])
        return Judgement(holds, text + _format_p_value(p), {**numbers, "p": p})

    return check


_RIVALS = ("fedavg", "fedavg-tr", "cb-dsl", "cb-dsl-sc")

PAPER_CLAIMS: tuple[PaperClaim, ...] = (
    PaperClaim(
        "iid-swarm-beats-fedavg",
        1,
        "Without shared data, CB-DSL is slightly better than FedAvg.",
        _better(1, "cb-dsl", "fedavg"),
    ),
    PaperClaim("iid-scoring-helps", 1, "A shared scoring set improves CB-DSL.", _better(1, "cb-dsl-sc", "cb-dsl")),
    PaperClaim(
        "iid-training-helps-fedavg", 1, "A shared training set improves FedAvg.", _better(1, "fedavg-tr", "fedavg")
    ),
    PaperClaim(
        "iid-training-helps-cbdsl",
        1,
        "A shared training set further improves CB-DSL.",
        _better(1, "cb-dsl-g", "cb-dsl-sc"),
    ),
    PaperClaim("iid-best", 1, "CB-DSL with D_G is the best of the five.", _best_of_all(1, "cb-dsl-g", _RIVALS)),
    PaperClaim(
        "noniid-collapse",
        2,
        "Without a shared training set, CB-DSL cannot work on non-i.i.d. data.",
        _fails(2, ["cb-dsl"]),
    ),
    PaperClaim(
        "noniid-scoring-helps", 2, "A shared scoring set slightly improves it.", _better(2, "cb-dsl-sc", "cb-dsl")
    ),
    PaperClaim(
        "noniid-scoring-not-enough",
        2,
        "With the scoring set alone it stays worse than FedAvg.",
        _better(2, "fedavg", "cb-dsl-sc"),
    ),
    PaperClaim(
        "noniid-training-helps-fedavg", 2, "A shared training set improves FedAvg.", _better(2, "fedavg-tr", "fedavg")
    ),
    PaperClaim("noniid-beats-fedavg", 2, "With D_G, CB-DSL outperforms FedAvg.", _better(2, "cb-dsl-g", "fedavg")),
    PaperClaim("noniid-best", 2, "CB-DSL with D_G is the best of the five.", _best_of_all(2, "cb-dsl-g", _RIVALS)),
    PaperClaim(
        "iid-attack-breaks",
        3,
        "One attacker breaks FedAvg and CB-DSL without D_G.",
        _fails(3, ["fedavg", "cb-dsl"], 1),
        "if it holds",
    ),
    PaperClaim(
        "iid-attack-survived", 3, "CB-DSL with D_G defends against it.", _survives(3, 1, "cb-dsl-g"), "if it holds"
    ),
    PaperClaim(
        "noniid-attack-breaks",
        4,
        "One attacker breaks FedAvg and CB-DSL without D_G.",
        _fails(4, ["fedavg", "cb-dsl"], 2),
        "if it holds",
    ),
    PaperClaim(
        "noniid-attack-survived", 4, "CB-DSL with D_G defends against it.", _survives(4, 2, "cb-dsl-g"), "if it holds"
    ),
    PaperClaim("divergence-flattens", 5, "Weight divergence first rises, then flattens.", _rises_then_flattens),
    PaperClaim("divergence-lower", 5, "Steady weight divergence is lower with D_G.", _lower_divergence("cb-dsl")),
    PaperClaim(
        "divergence-lower-equal-work",
        5,
        "The same, if workers without D_G take as many local steps as those with it.",
        _lower_divergence(EQUAL_WORK),
    ),
    PaperClaim("uplink", 1, "The uplink of CB-DSL is 1/U of FedAvg's.", _uplink, "either way"),
    PaperClaim(
        "iid-fewer-rounds",
        1,
        "CB-DSL with D_G needs fewer rounds than FedAvg for the same accuracy.",
        _fewer_rounds(1, "fedavg"),
    ),
    PaperClaim(
        "noniid-fewer-rounds",
        2,
        "CB-DSL with D_G needs fewer rounds than FedAvg for the same accuracy.",
        _fewer_rounds(2, "fedavg"),
    ),
)
