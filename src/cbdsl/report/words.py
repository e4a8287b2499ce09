"""Phrases that several pages use."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from cbdsl import register
from cbdsl.spec import LocalSpec

_NUMBERS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")


def join_words(values: Iterable[object]) -> str:
    """Return `1, 5 and 10`."""
    words = [str(value) for value in values]
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def join_span(values: Iterable[int]) -> str:
    """Return `3`, or `3 to 9`."""
    found = sorted(set(values))
    return str(found[0]) if len(found) == 1 else f"{found[0]} to {found[-1]}"


def describe_seeds(seeds: Sequence[int]) -> str:
    """Return `seeds 0, 1 and 2`, or `one seed (0)`."""
    return f"seeds {join_words(seeds)}" if len(seeds) > 1 else f"one seed ({seeds[0]})"


def describe_rounds(rounds: Sequence[tuple[int, int]]) -> str:
    """Return `9 of 30 rounds`, or `30 rounds`; rounds: pairs of those here and those of the preset."""
    here, whole = (join_span(column) for column in zip(*rounds, strict=True))
    return f"{here} rounds" if here == whole else f"{here} of {whole} rounds"


def describe_training(local: LocalSpec) -> str:
    """Return `one epoch of plain SGD per round`, or the epochs and the options of SGD."""
    count, noun = (local.steps, "batch") if local.steps else (local.epochs, "epoch")
    plural = "" if count == 1 else "es" if noun == "batch" else "s"
    amount = f"{_NUMBERS[count] if count < len(_NUMBERS) else count} {noun}{plural}"
    besides = [f"momentum {local.momentum:g}"] * bool(local.momentum)
    besides += [f"weight decay {local.weight_decay:g}"] * bool(local.weight_decay)
    if local.decay != 1:
        change = "halved" if local.decay == 0.5 else f"times {local.decay:g}"
        besides.append(f"learning rate {change} every round")
    return ", ".join([amount, *besides]) if besides else f"{amount} of plain SGD per round"


def describe_attack(name: str) -> str:
    """Return the description of an attack."""
    return " ".join((register.attack.get(name).__doc__ or "").split())
