"""For every law of attacks, aggregators, selections and methods a small part that breaks it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import cbdsl
from cbdsl import testing
from cbdsl.algorithm.particles import Particles
from cbdsl.algorithm.selection import Best, Candidate, RoundContext, SelectionResult, VerifiedUpload
from cbdsl.algorithm.worker_round import WorkerRound
from cbdsl.arrays import Floats, Samples

Situation = cbdsl.AttackContext


def own(kind: type, name: str = "Own", **members: Any) -> Any:  # noqa: ANN401
    """A part of a class of its own with these attributes and methods."""
    return type(name, (kind,), members)()


def attack(name: str = "Own", **members: Any) -> Any:  # noqa: ANN401
    return own(cbdsl.Attack, name, **members)


def overwriting_honest(_: object, seen: Situation) -> Floats:
    if seen.honest is not None and len(seen.honest):
        seen.honest[0] = 0
    return seen.model


def overwriting_received(_: object, seen: Situation) -> Floats:
    np.multiply(seen.global_best, 2, out=seen.global_best)
    return seen.global_best


def overwriting_samples(_: object, samples: Samples, *__: object) -> Samples:
    samples.labels[:] = 0
    return samples


def dice() -> Any:  # noqa: ANN401
    return attack(upload=lambda _, seen: np.random.default_rng().normal(size=seen.model.shape).astype(np.float32))


def poison(make: Callable[[Samples, int], object]) -> Any:  # noqa: ANN401
    """An attack that makes this of its samples and the number of classes."""
    return attack(poison=lambda _, samples, _scoring, classes, _rng: make(samples, classes))


def count_in_object(part: Any, seen: Situation) -> Any:  # noqa: ANN401
    part.count = seen.round + getattr(part, "count", 0)
    return {}


SEEN: dict[str, Any] = {}


def count_in_module(_: object, seen: Situation) -> Any:  # noqa: ANN401
    SEEN["count"] = seen.model[0] if seen.round <= 1 else SEEN["count"]
    return {}


def last_rows(rows: Any, *_: object) -> Any:  # noqa: ANN401
    """Moves a little by the rows of the round before."""
    if not np.array_equal(SEEN.get("now", 0.0), rows):
        SEEN["before"], SEEN["now"] = SEEN.get("now", rows), rows.copy()
    return rows.mean(0) + 1e-12 * np.tanh(SEEN["before"].mean())


COUNT = itertools.count(1)


@pytest.mark.parametrize(
    ("attack", "words"),
    [
        (
            attack("Forgetful", claim=lambda _, seen: seen.score / next(COUNT)),
            "Forgetful breaks a law: the same situation leads to the same claim and upload",
        ),
        (dice(), "the same situation leads to the same claim and upload.*uploads other numbers"),
        (
            attack(omniscient=True, upload=overwriting_honest),
            "does not write into what it is given. It changed the honest workers' models",
        ),
        (attack(upload=overwriting_received), "changed the model it received in place"),
        (attack(poison=overwriting_samples), "changed its own samples in place"),
        (attack(claim=lambda *_: 0), "a claim is a float. It is 0, a int"),
        (
            attack(upload=lambda _, seen: seen.model.tolist()),
            r"an upload is a model \(D,\) of floats, or None to stay silent. It is a list",
        ),
        (
            attack(upload=lambda _, seen: np.zeros(len(seen.model), np.int32)),
            "or None to stay silent. It is a ndarray of int32",
        ),
        (attack(upload=lambda _, seen: seen.model[:5]), r"stay silent. It has shape \(5,\), where D is 24"),
        (attack(), "at least one of poison, craft, triggered, claim, upload is its own"),
        (
            attack("Slip", uplaod=lambda _, seen: -seen.model),
            r"Slip breaks a law.* It has uplaod: did you mean upload\?",
        ),
        (
            attack(uplaod=lambda _, seen: -seen.model, claim=lambda _, seen: seen.score / 2),
            r"It has uplaod: did you mean upload\?",
        ),
        (
            poison(lambda samples, classes: Samples(samples.features, samples.labels + np.int32(classes))),
            "int32 labels of its classes",
        ),
        (poison(lambda samples, _: (samples.features, samples.labels)), "poison gives Samples.*It gives a tuple"),
        (
            poison(lambda samples, _: Samples(samples.features * np.float32(np.nan), samples.labels)),
            "finite float32 features",
        ),
        (
            poison(
                lambda samples, _: Samples(
                    samples.features + np.float32(np.random.default_rng().normal()), samples.labels
                )
            ),
            "poison is the same for the same generator",
        ),
        (
            attack(omniscient=True, upload=lambda _, seen: seen.model if seen.honest is None else seen.honest[0]),
            "it works in a swarm of one worker. It raises IndexError",
        ),
        (
            attack(omniscient=True, upload=lambda _, seen: np.asarray(seen.honest.sum(0))),
            "it works where it knows nothing of the honest workers. It raises AttributeError",
        ),
        (attack(remember=count_in_object, upload=lambda part, seen: seen.model * part.count), "a resumed run gives"),
        (attack(remember=count_in_module, upload=lambda _, seen: seen.model * SEEN["count"]), "a resumed run gives"),
        (attack(upload=lambda _, seen: -seen.model, remember=lambda *_: {"a": [1]}), "remembers a, a list"),
        (attack(upload=lambda _, seen: -seen.model, remember=lambda *_: {"a b": np.ones(1)}), "the name 'a b'"),
        (attack(remember=lambda *_: {}), "at least one of poison, craft, triggered, claim, upload is its own"),
        (attack(crafts=True, craft=lambda _, home: home.initial[:3]), r"craft gives None or a model \(D,\)"),
        (attack(target=0, triggered=lambda _, features: features[:1]), "samples of the same shape"),
        (Best(), "extends cbdsl.Attack"),
    ],
)
def test_attacks_that_break_a_law(attack: Any, words: str) -> None:  # noqa: ANN401
    with pytest.raises(AssertionError, match=words):
        testing.check_attack(attack)


def test_a_helper_whose_name_is_like_that_of_a_hook_of_the_attacks_own_is_no_slip() -> None:
    helped = attack(uploaded=lambda _, seen: -seen.model, upload=lambda part, seen: part.uploaded(seen))
    testing.check_attack(helped)


def test_a_hook_may_be_an_attribute_of_the_object() -> None:
    changed = cbdsl.Attack()
    changed.upload = lambda seen: -seen.model  # type: ignore[method-assign]
    testing.check_attack(changed)


def in_place(rows: Any, *_: object) -> Any:  # noqa: ANN401
    rows.sort(axis=0)
    return rows[len(rows) // 2]


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        (lambda rows, *_: rows[0], "lambda> breaks a law: the order of the rows does not matter"),
        (
            lambda rows, *_: rows.mean(0, keepdims=True),
            r"one model \(D,\) of floats. For rows \(1, 12\) it gives float64 \(1, 12\)",
        ),
        (lambda rows, *_: np.sqrt((rows.astype(np.float32) ** 2).mean(0)), "finite rows give finite numbers"),
        (lambda rows, *_: rows.sum(0) / (len(rows) - 1), "finite rows give finite numbers. Not so with 1 rows"),
        (in_place, "in_place breaks a law: it does not write into what it is given. It changed the rows"),
        (lambda rows, *_: 0.9 * rows.mean(0), "equal rows give that row"),
        (
            lambda rows, *_: np.sort(rows, axis=0)[1:-1][0],
            "it works with 1 rows and 0 attackers. It raises IndexError",
        ),
        (last_rows, "a resumed run gives"),
        (lambda rows, *_: rows.mean(0) + 1e-3 * np.random.default_rng().normal(), "the same rows give the same model"),
    ],
)
def test_aggregators_that_break_a_law(rule: Any, words: str) -> None:  # noqa: ANN401
    with pytest.raises(AssertionError, match=words):
        testing.check_aggregator(rule)


def chooser(choose: Callable[[Sequence[Candidate], RoundContext], Any], most: int = 1) -> Any:  # noqa: ANN401
    """Best, but for whom it invites."""
    return own(Best, invite=lambda _, waiting, _believed, view: choose(waiting, view), most=most)


def maker(make: Callable[[Floats], SelectionResult]) -> Any:  # noqa: ANN401
    """Best, but for what it makes of the first model."""
    return own(Best, combine=lambda _, believed, _view: make(believed[0].model))


def scribble(_: object, believed: Sequence[VerifiedUpload], view: RoundContext) -> SelectionResult:
    believed[0].model[:] += 1
    return Best().combine(believed, view)


def blame(_: object, believed: Sequence[VerifiedUpload], view: RoundContext) -> SelectionResult:
    return replace(Best().combine(believed, view), declined={99: "who?"})


def change_mind(_: object, believed: Sequence[VerifiedUpload], view: RoundContext) -> SelectionResult:
    """Takes a model every other time."""
    return Best().combine(believed, view) if next(COUNT) % 2 else SelectionResult()


@pytest.mark.parametrize(
    ("selection", "words"),
    [
        (chooser(lambda *_: 42), "invites only a worker that is waiting.*it invites 42"),
        (chooser(lambda _, view: next(iter(view.state.banned))), "never invites a banned worker"),
        (chooser(lambda waiting, _: waiting[0].worker if waiting else 3, 8), "stops when none is"),
        (chooser(lambda waiting, _: waiting[0].worker if waiting else None), "no more models than `most`"),
        (chooser(lambda waiting, _: waiting[0].worker, 8), "IndexError"),
        (maker(lambda model: SelectionResult(model[:3], 0.5)), r"finite model \(D,\).*shape is \(3,\)"),
        (maker(lambda model: SelectionResult(model * np.float32(np.nan), 0.5)), "NaN or infinity in it"),
        (maker(SelectionResult), "The score is inf"),
        (maker(lambda model: SelectionResult(model.tolist(), 1.0)), "It makes a list"),
        (own(Best, combine=change_mind), "the order in which claims arrive does not matter"),
        (own(Best, combine=scribble), "does not write into what it is given. It changed a model"),
        (own(Best, objection=lambda *_: None), "an objection is text"),
        (own(Best, combine=blame), "it declines only verified uploads"),
        (dice(), "extends cbdsl.Selection"),
    ],
)
def test_selections_that_break_a_law(selection: Any, words: str) -> None:  # noqa: ANN401
    with pytest.raises(AssertionError, match=words):
        testing.check_selection(selection)


def average(**members: Any) -> Any:  # noqa: ANN401
    return own(cbdsl.AveragingMethod, **members)


def gossip(_: object, work: WorkerRound, start: Floats) -> Floats:
    """Workers look at each other."""
    trained = work.train(start)
    return np.asarray(trained - 0.1 * trained.mean(0), np.float32)


def spread(_: object, work: WorkerRound, rows: Particles, received: Floats) -> Particles:
    """NaN of one gets into all."""
    mixed = replace(rows, positions=np.asarray(rows.positions + 0 * rows.positions.sum(0), np.float32))
    return cbdsl.SwarmMethod().move(work, mixed, received)


def favour_the_first(_: object, work: WorkerRound, start: Floats) -> Floats:
    """Who is moved first trains twice."""
    trained = work.train(start)
    trained[0] = work.train(trained)[0]
    return trained


def halve_received(_: object, work: WorkerRound, rows: Particles, received: Floats) -> Particles:
    received *= 0.5
    return cbdsl.AveragingMethod().move(work, rows, received)


def draw(_: object, work: WorkerRound, start: Floats) -> Floats:
    return np.asarray(work.train(start) + np.random.default_rng().normal(), np.float32)


class Moving(cbdsl.AveragingMethod):
    """Remembers in the object what a checkpoint does not hold."""

    def __init__(self) -> None:
        self._memory: dict[int, Any] = {}

    def update(self, seen: cbdsl.ServerStep) -> tuple[Floats, Floats]:
        before = self._memory.get(id(seen.memory), 0.0)
        self._memory[id(seen.memory)] = seen.combined - seen.current
        return np.asarray(seen.combined + 0.5 * before, np.float32), seen.memory


def keep_in_module(_: object, seen: cbdsl.ServerStep) -> tuple[Floats, Floats]:
    before = SEEN.get("step", 0.0) if seen.round > 1 else 0.0
    SEEN["step"] = seen.combined - seen.current
    return np.asarray(seen.combined + 0.5 * before, np.float32), seen.memory


@pytest.mark.parametrize(
    ("method", "words"),
    [
        (average(train=gossip), "a worker's numbers do not depend on the others"),
        (own(cbdsl.SwarmMethod, move=spread), "NaN in one worker does not spread"),
        (average(train=favour_the_first), "do not depend on the others|the order of workers does not matter"),
        (average(vectors=2), r"sends \(V D,\).*With V = 2 and D = 21 it sends \(21,\)"),
        (average(upload=lambda _, rows: rows.positions[:, :4]), r"k workers upload \(k, V D\)"),
        (
            average(update=lambda _, seen: (seen.combined.astype(np.float64), seen.memory)),
            r"update gives a model \(D,\) of float32",
        ),
        (
            average(update=lambda _, seen: (seen.combined, np.append(seen.memory, np.float32(1)))),
            "memory keeps its shape and type",
        ),
        (average(move=halve_received), "changed what the server sent in place"),
        (average(train=draw), "equal runs give equal numbers"),
        (average(update=keep_in_module), "a resumed run gives the numbers of one that was never stopped"),
        (Moving(), "Moving breaks a law: "),
        (Best(), "extends cbdsl.Method"),
    ],
)
def test_methods_that_break_a_law(method: Any, words: str) -> None:  # noqa: ANN401
    with pytest.raises(AssertionError, match=words):
        testing.check_method(method)
