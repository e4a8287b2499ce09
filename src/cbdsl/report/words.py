"""Words that more than one page needs, made from what was run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from cbdsl import register
from cbdsl.attacks.base import make_attack
from cbdsl.presets import preset
from cbdsl.spec import LocalSpec, Spec
from cbdsl.studies.paper import FIGURES, REGIMES, Regime, ReproductionPlan, spec_of

_NUMBERS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")


def listed(values: Iterable[object]) -> str:
    """`1, 5 and 10`."""
    words = [str(value) for value in values]
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def rounds_words(plan: ReproductionPlan) -> str:
    """`9 of 30 rounds`, or `30 rounds` if they are all that the presets have."""
    pairs = [
        (spec_of(figure, figure.approaches[0], regime, plan.seeds[0], plan).rounds, whole.rounds)
        for figure in FIGURES
        for regime in plan.regimes
        for whole in [preset(f"{regime}-{figure.setting}")]
    ]
    here, there = (listed_span(column) for column in zip(*pairs, strict=True))
    return f"{here} rounds" if here == there else f"{here} of {there} rounds"


def listed_span(values: Iterable[int]) -> str:
    """`3`, or `3 to 9`."""
    found = sorted(set(values))
    return str(found[0]) if len(found) == 1 else f"{found[0]} to {found[-1]}"


def seeds_words(seeds: Sequence[int]) -> str:
    """`seeds 0, 1 and 2`, or `one seed (0)`."""
    return f"seeds {listed(seeds)}" if len(seeds) > 1 else f"one seed ({seeds[0]})"


def regime_words(regime: Regime, plan: ReproductionPlan) -> str:
    """Where a regime is from, and what a worker does in a round of it."""
    changed = ", with other settings" if plan.settings else ""
    return f"{REGIMES[regime]}{changed}: {work_words(_spec(1, regime, plan).local)}"


def work_words(local: LocalSpec) -> str:
    """`one epoch of plain SGD a round`, or the epochs and what SGD has besides."""
    count, noun = (local.steps, "batch") if local.steps else (local.epochs, "epoch")
    plural = "" if count == 1 else "es" if noun == "batch" else "s"
    amount = f"{_NUMBERS[count] if count < len(_NUMBERS) else count} {noun}{plural}"
    besides = [f"momentum {local.momentum:g}"] * bool(local.momentum)
    besides += [f"weight decay {local.weight_decay:g}"] * bool(local.weight_decay)
    if local.decay != 1:
        change = "halved" if local.decay == 0.5 else f"times {local.decay:g}"
        besides.append(f"learning rate {change} every round")
    return ", ".join([amount, *besides]) if besides else f"{amount} of plain SGD a round"


def attackers_words(plan: ReproductionPlan) -> str:
    """Who attacks in the figures that have attackers, in sentences; empty if nobody does."""
    specs = {figure.number: _spec(figure.number, plan.regimes[0], plan) for figure in FIGURES}
    attacked = [number for number, spec in specs.items() if spec.attack.byzantine]
    if not attacked:
        return ""
    spec = specs[attacked[0]]
    attack, count = spec.attack, spec.attack.byzantine
    numbers, verb = listed(attacked), "attacks" if count == 1 else "attack"
    return (
        f"In Figures {numbers}, {count} of {spec.workers} workers {verb}: {attack.name}{attack_scale(spec)}. "
        f"{attack_words(attack.name)}"
    )


def attack_words(name: str) -> str:
    """What an attack does, as its own description says."""
    return " ".join((register.attack.get(name).__doc__ or "").split())


def attack_scale(spec: Spec) -> str:
    """How strong an attack is in its own measure, such as ` (scale 10)`; empty if it has none or finds its own."""
    scale = getattr(make_attack(spec), "scale", 0.0)
    return f" (scale {scale:g})" if scale else ""


def _spec(figure: int, regime: Regime, plan: ReproductionPlan) -> Spec:
    chosen = FIGURES[figure - 1]
    return spec_of(chosen, chosen.approaches[0], regime, plan.seeds[0], plan)
