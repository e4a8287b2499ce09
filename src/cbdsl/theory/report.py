"""What the theory found on a run, as one frozen value: to and from JSON, as a table and as sentences."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from cbdsl.plain import from_plain, to_plain
from cbdsl.theory.constants import Constants, DirectionBounds, Range
from cbdsl.theory.genie import Divergence
from cbdsl.theory.theorem1 import RateBound, Theorem1
from cbdsl.theory.theorem2 import DistanceBound, Theorem2


@dataclass(frozen=True)
class TheoryResult:
    """theory.json: the divergence of Fig. 5, the constants of Sec. IV and both theorems, on one run."""

    spec_key: str
    preset: str
    method: str
    shared: str
    partition: str
    seed: int
    engine: str
    parameters: int  # D
    workers: int  # that were measured: all but attackers and the lost
    lost: int  # workers whose weights did not stay finite
    rounds: int  # T
    steps: float  # how many steps of size alpha the local work of a round amounts to
    divergence: tuple[Divergence, ...]  # one a round
    constants: Constants
    theorem1: Theorem1
    theorem2: Theorem2

    def to_json(self) -> dict[str, Any]:
        """Plain values for JSON; a number that is not finite is null."""
        return to_plain(self)  # type: ignore[no-any-return]

    @staticmethod
    def from_json(values: Mapping[str, Any]) -> TheoryResult:
        """The inverse of `to_json`, except that null becomes NaN; fails with KeyError if a field is missing."""
        return from_plain(TheoryResult, values)

    def to_text(self) -> str:
        """The JSON text."""
        return json.dumps(self.to_json(), indent=2, allow_nan=False) + "\n"


def table_of(result: TheoryResult) -> Table:
    """Both theorems, one line a form."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in ("", "bound", "measured", "tightness", "verdict"):
        table.add_column(name, justify="left" if name in ("", "verdict") else "right")
    first, second = result.theorem1, result.theorem2
    for name, rate in (
        ("Theorem 1, printed", first.printed),
        ("  alpha: a whole round", first.printed_whole),
        ("Theorem 1, corrected", first.corrected),
        ("Theorem 1, as played", first.played),
    ):
        table.add_row(name, number(rate.bound), number(rate.measured), number(rate.tightness), _short_rate(rate))
    for name, bound in (
        ("Theorem 2, printed", second.printed),
        ("  alpha: a whole round", second.printed_whole),
        ("Theorem 2, corrected", second.corrected),
        ("  beta round by round", second.played),
        ("  alpha: a whole round", second.corrected_whole),
    ):
        last = bound.rounds[-1]
        table.add_row(
            name, number(last.bound), number(last.measured), number(last.tightness), _short(bound.held, bound.checked)
        )
    return table


def constants_table(constants: Constants) -> Table:
    """The bounds that Sec. IV assumes, as measured."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in ("direction", "cosine q", "ratio u", "product q u"):
        table.add_column(name, justify="left" if name == "direction" else "right")
    for name, bounds in _directions(constants):
        table.add_row(name, span(bounds.cosine), span(bounds.ratio), span(bounds.product))
    return table


def _directions(constants: Constants) -> list[tuple[str, DirectionBounds]]:
    return [
        ("own velocity v", constants.velocity),
        ("personal best v^p", constants.personal),
        ("global best v^g", constants.social),
        ("local work", constants.local),
    ]


def verdict(result: TheoryResult) -> list[str]:
    """The findings in sentences."""
    first, second, curve = result.theorem1, result.theorem2, result.divergence
    last = second.corrected.rounds[-1].terms
    total = sum(vars(last).values())
    shares = ", ".join(f"{name} {value / total:.0%}" for name, value in vars(last).items()) if total else "all 0"
    return [
        f"Model divergence: {number(curve[0].mean)} after round 1, {number(curve[-1].mean)} ± "
        f"{number(curve[-1].deviation)} after round {curve[-1].round}; EMD {_mean(second.emd):.3f} on average."
        + (f" Left out: {result.lost} workers whose weights did not stay finite." if result.lost else ""),
        f"L is at least {number(result.constants.smoothness)} (secants); the descent lemma needs "
        f"{number(result.constants.curvature)} on the moves made.",
        f"Theorem 1 as printed {rate_verdict(first.printed)}; corrected, it {rate_verdict(first.corrected)}; over the "
        f"moves as they were played, it {rate_verdict(first.played)}.",
        f"Remark 1 (CB-DSL faster than FedAvg): {_remark(first.remark_printed)} as printed, "
        f"{_remark(first.remark_corrected)} corrected. Of the progress along -grad F, {first.swarm_share:.0%} came "
        f"from the swarm's terms; {first.uphill:,} of {first.moves:,} moves went uphill.",
        f"Theorem 2 as printed {distance_verdict(second.printed)}; corrected, it {distance_verdict(second.corrected)}. "
        f"Its last bound is made of: {shares}.",
    ]


def _short_rate(rate: RateBound) -> str:
    return _short(rate.held, rate.speaks) if rate.speaks else "says nothing"


def _short(held: int, of: int) -> str:
    return f"holds, {held:,} of {of:,}" if held == of else f"fails, holds on {held:,} of {of:,}"


def rate_verdict(rate: RateBound) -> str:
    """One form of Theorem 1 in words."""
    if not rate.speaks:
        worst = "is not defined" if math.isnan(rate.phi.low) else f"= {number(rate.phi.low)}, not positive"
        return f"says nothing: Phi_E {worst}"
    of_whom = "" if rate.speaks == rate.workers else f", and says nothing of {rate.workers - rate.speaks}"
    word = "holds" if rate.held == rate.speaks else "fails"
    return f"{word} for {rate.held} of {rate.speaks} workers{of_whom}"


def distance_verdict(bound: DistanceBound) -> str:
    """One form of Theorem 2 in words."""
    if bound.holds:
        return f"holds on all {bound.checked:,} worker-rounds, {span(bound.tightness)} times what is measured"
    return f"fails on {bound.checked - bound.held:,} of {bound.checked:,} worker-rounds"


def number(value: float) -> str:
    """A number for people; a dash where there is none."""
    if not math.isfinite(value):
        return "–" if math.isnan(value) else "infinite"
    return f"{value:.3g}"


def span(values: Range) -> str:
    """A range for people."""
    return f"{number(values.low)} … {number(values.high)}"


def _remark(values: Range) -> str:
    if math.isnan(values.low):
        return "not defined"
    if values.low > 0:
        return "met in every round"
    return "met in some rounds" if values.high > 0 else "met in no round"


def _mean(values: tuple[float, ...]) -> float:
    return math.fsum(values) / len(values)
