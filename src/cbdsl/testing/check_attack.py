"""Laws of an attack."""

from __future__ import annotations

import copy
import difflib
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from cbdsl import register
from cbdsl.arrays import Doubles, Floats, NamedArrays, Samples, copy_memory
from cbdsl.attacks.attack import Attack, AttackContext, AttackPreparation, AttackTools
from cbdsl.engines.engine import Sgd
from cbdsl.models.architecture import Architecture
from cbdsl.models.layers import Linear, Relu
from cbdsl.spec import LocalSpec
from cbdsl.testing.laws import Laws, is_floats, is_identical, make_part, survives_stop

SIZE, CLASSES = 24, 4
HOOKS = ("poison", "craft", "triggered", "claim", "upload")  # the behaviour of a worker that an attack may change
NAMES = (*HOOKS, "remember")
NETWORK = Architecture((1,), (Linear(1, CLASSES), Relu(), Linear(CLASSES, CLASSES, bias=False)))  # of SIZE numbers


def check_attack(attack: Attack | type[Attack] | str) -> None:
    """Fail unless an attack changes something, is deterministic, and leaves its arguments unchanged, in all cases.

    Among them: a network that it knows and one that it does not, a swarm of one worker, a swarm of only attackers, and
    an omniscient attacker without honest workers.

    >>> check_attack("sign-flip")
    """
    part, laws = make_part(register.attack, attack)
    laws.require(isinstance(part, Attack), "it extends cbdsl.Attack", f"It is a {type(part).__name__}.")
    _check_hooks(part, laws)
    part = part.member(1)
    crafted = _check_craft(part, laws)
    _check_poison(part, laws)
    _check_trigger(part, laws)
    for case, seen in _make_cases(part.omniscient, crafted).items():
        _check_messages(part, laws, case, seen)
    _check_memory(part, laws, _make_cases(part.omniscient, crafted)["among honest workers"])


def _check_hooks(attack: Attack, laws: Laws) -> None:
    """Check names: a hook with a misspelt name is never called, and the attack would be an honest worker."""
    own = {hook for hook in NAMES if getattr(getattr(attack, hook), "__func__", None) is not getattr(Attack, hook)}
    for name in dir(type(attack)):
        if name.startswith("_") or hasattr(Attack, name) or not callable(getattr(type(attack), name)):
            continue
        close = difflib.get_close_matches(name, NAMES, n=1, cutoff=0.75)
        laws.require(
            not close or close[0] in own,
            "its hooks have the names that are called",
            f"It has {name}: did you mean {''.join(close)}? If not, begin its name with an underscore.",
        )
    laws.require(
        own - {"remember"},
        f"it changes an honest worker: at least one of {', '.join(HOOKS)} is its own",
        "None of them is.",
    )


def _make_cases(omniscient: bool, crafted: Floats | None) -> dict[str, Callable[[], AttackContext]]:
    """Return the cases, each created anew whenever it is called, as a server would."""

    def make_context(workers: int, attackers: int, known: bool = True) -> AttackContext:
        rng = np.random.default_rng(1)
        model, received = rng.normal(size=(2, SIZE)).astype(np.float32)
        honest = rng.normal(size=(workers - attackers, SIZE)).astype(np.float32)
        told = omniscient and known
        return AttackContext(
            model=model,
            score=0.7,
            global_best=received,
            workers=workers,
            attackers=attackers,
            rng=np.random.default_rng(2),
            score_of=lambda weights: float(np.mean(np.square(weights, dtype=np.float64))),
            honest=honest if told else None,
            honest_scores=np.linspace(0.5, 0.9, len(honest)) if told else None,
            crafted=None if crafted is None else crafted.copy(),
        )

    def losses_of(weights: Floats) -> tuple[Doubles, Doubles]:
        return np.abs(weights[:9], dtype=np.float64), np.abs(weights, dtype=np.float64)

    return {
        "among honest workers": lambda: make_context(6, 2),
        "where it knows its network": lambda: replace(make_context(6, 2), network=NETWORK, losses_of=losses_of),
        "where it trains in its own way": lambda: replace(make_context(6, 2), tools=_make_tools),
        "with one honest worker": lambda: make_context(2, 1),
        "in a swarm of one worker": lambda: make_context(1, 1),
        "where all workers are attackers": lambda: make_context(3, 3),
        "where it knows nothing of the honest workers": lambda: make_context(6, 2, known=False),
        "where its own score is not finite": lambda: replace(make_context(6, 2), score=math.inf),
    }


def _make_tools() -> AttackTools:
    """Return tools with a loss that depends on weights and features."""

    def losses(weights: Floats, samples: Samples) -> Doubles:
        return np.asarray(np.abs(samples.features.mean((1, 2, 3), dtype=np.float64) + weights[0] - samples.labels))

    def gradient(weights: Floats, samples: Samples) -> Floats:
        return np.asarray(0.1 * weights + samples.features.mean(), np.float32)

    model = np.random.default_rng(1).normal(size=(2, SIZE)).astype(np.float32)[1]
    return AttackTools(model, _samples(15), _samples(9), LocalSpec(), gradient, losses)


def _check_messages(attack: Attack, laws: Laws, case: str, make: Callable[[], AttackContext]) -> None:
    def once() -> tuple[float, Floats | None]:
        answers: list[Any] = []
        for ask in (attack.claim, attack.upload):
            seen = make()
            before = copy.deepcopy(_arrays(seen))
            with laws.expect_no_error(case):
                seen = replace(seen, memory=copy_memory(attack.remember(seen), "It"))
                answers.append(ask(seen))
            laws.require_unchanged(before, _arrays(seen))
        return answers[0], copy.deepcopy(answers[1])

    (claim, upload), (claim_again, upload_again) = once(), once()
    laws.require(
        isinstance(claim, (float, np.floating)), "a claim is a float", f"It is {claim!r}, a {type(claim).__name__}."
    )
    law = "an upload is a model (D,) of floats, or None to stay silent"
    array = f" of {upload.dtype}" if isinstance(upload, np.ndarray) else ""
    laws.require(upload is None or is_floats(upload), law, f"It is a {type(upload).__name__}{array}.")
    sent = np.asarray(upload)
    laws.require(upload is None or sent.shape == (SIZE,), law, f"It has shape {sent.shape}, where D is {SIZE}.")
    same_claim = is_identical(float(claim), float(claim_again))
    laws.require(
        same_claim and is_identical(upload, upload_again),
        "the same situation leads to the same claim and upload",
        f"Asked twice {case}, it claims {claim:g} and {claim_again:g}"
        + ("." if is_identical(upload, upload_again) else " and uploads other numbers.")
        + " Draw from seen.rng, and keep between rounds only what `remember` returns.",
    )


def _check_memory(attack: Attack, laws: Laws, make: Callable[[], AttackContext]) -> None:
    """Check that four rounds stopped and resumed after two give the same numbers."""

    def rounds(attack: Attack, memory: NamedArrays, world: int, numbers: range) -> list[tuple[Any, ...]]:
        played = []
        for number in numbers:
            shift = np.float32(0.3 * number * (-1) ** world)

            def see(memory: NamedArrays, number: int = number, shift: np.float32 = shift) -> AttackContext:
                base = make()
                return replace(
                    base, model=base.model + shift, global_best=base.global_best - shift, round=number, worker=1,
                    memory=memory, common=lambda which: np.random.default_rng([which, world]),
                )  # fmt: skip

            with laws.expect_no_error(f"in round {number}"):
                memory = copy_memory(attack.remember(see(memory)), "It")
                played.append((attack.upload(see(memory)), float(attack.claim(see(memory))), memory))
        return played

    laws.require(
        survives_stop(rounds, attack),
        "a resumed run gives the numbers of one that was never stopped",
        "They differ. Only what `remember` returns is saved; keep no state on the object or in the module.",
    )


def _arrays(seen: AttackContext) -> dict[str, Any]:
    return {
        "its own model": seen.model,
        "the model it received": seen.global_best,
        "the honest workers' models": seen.honest,
        "the honest workers' scores": seen.honest_scores,
        "the model that it prepared": seen.crafted,
    }


def _samples(count: int) -> Samples:
    rng = np.random.default_rng(count)
    return Samples(rng.normal(size=(count, 1, 6, 6)).astype(np.float32), (np.arange(count) % CLASSES).astype(np.int32))


def _check_poison(attack: Attack, laws: Laws) -> None:
    for count in (1, 2, 15):
        case = f"when it poisons {count} samples"
        found = []
        for _ in range(2):
            own, scoring = _samples(count), _samples(9)
            before = copy.deepcopy((own, scoring))
            with laws.expect_no_error(case):
                poison = attack.poison(own, scoring, CLASSES, np.random.default_rng(4))
            for what, then, now in zip(("its own samples", "D_sc"), before, (own, scoring), strict=True):
                laws.require_unchanged({what: then.features}, {what: now.features})
                laws.require_unchanged({what: then.labels}, {what: now.labels})
            found.append(poison)
        first, second = found
        alike = (first is None) == (second is None)
        laws.require(alike, "poison is the same for the same generator", "One of two calls gave None.")
        if first is None or second is None:
            continue
        law = "poison gives Samples: finite float32 features of the data's shape, and int32 labels of its classes"
        laws.require(isinstance(first, Samples), law, f"It gives a {type(first).__name__}.")
        features, labels = first.features, first.labels
        laws.require(is_floats(features) and np.isfinite(features).all(), law, "The features are not.")
        laws.require(
            features.dtype == np.float32 and features.shape == (len(labels), 1, 6, 6),
            law,
            f"The features are {features.dtype} of shape {features.shape}, for {len(labels)} labels.",
        )
        whole = labels.dtype == np.int32 and labels.ndim == 1 and len(labels) > 0
        laws.require(
            whole and labels.min() >= 0 and labels.max() < CLASSES, law, f"The labels are {labels.dtype}: {labels[:9]}."
        )
        laws.require(
            is_identical(features, second.features) and is_identical(labels, second.labels),
            "poison is the same for the same generator",
            f"Two calls with the same {count} samples differ.",
        )


def _check_craft(attack: Attack, laws: Laws) -> Floats | None:
    """Return the model that the attack prepares, with a training that only moves weights a little."""
    if not attack.crafts:
        return None

    def fit(weights: Floats, samples: Samples, sgd: Sgd, batch: int, rng: np.random.Generator) -> Floats:
        del samples, sgd, batch
        return np.asarray(0.9 * weights + 0.01 * rng.normal(size=SIZE), np.float32)

    def craft() -> Any:  # noqa: ANN401 - whatever the attack makes
        initial = np.random.default_rng(7).normal(size=SIZE).astype(np.float32)
        before = initial.copy()
        preparation = AttackPreparation(
            _samples(9), _samples(max(1, min(attack.images, 20))), CLASSES, initial, fit,
            lambda weights: float(np.mean(np.square(weights, dtype=np.float64))), np.random.default_rng(8),
        )  # fmt: skip
        with laws.expect_no_error("when it prepares a model"):
            crafted = attack.craft(preparation)
        laws.require_unchanged({"the initial model": before}, {"the initial model": preparation.initial})
        return copy.deepcopy(crafted)

    first, second = craft(), craft()
    laws.require(
        first is None or (is_floats(first) and first.shape == (SIZE,)),
        "craft gives None or a model (D,) of floats",
        f"It gives {getattr(first, 'shape', type(first).__name__)}.",
    )
    laws.require(is_identical(first, second), "craft is the same for the same generator", "Two calls gave two models.")
    return None if first is None else np.asarray(first, np.float32)


def _check_trigger(attack: Attack, laws: Laws) -> None:
    if attack.target is None:
        return
    with laws.expect_no_error("when it names its victims"):
        victims = attack.victims(_samples(5), _samples(9))
    laws.require(
        isinstance(victims, np.ndarray) and victims.dtype == np.bool_ and victims.shape == (5,),
        "victims gives a bool for every sample",
        f"It gives {getattr(victims, 'shape', type(victims).__name__)} for 5.",
    )
    features = _samples(5).features
    before = features.copy()
    for put in (attack.triggered, lambda given: attack.triggered_for(given, _make_tools())):
        with laws.expect_no_error("when it puts its trigger on samples"):
            marked = put(features)
        laws.require_unchanged({"the samples": before}, {"the samples": features})
        laws.require(
            is_floats(marked) and marked.shape == features.shape,
            "triggered gives samples of the same shape",
            f"It gives {getattr(marked, 'shape', type(marked).__name__)} for {features.shape}.",
        )
