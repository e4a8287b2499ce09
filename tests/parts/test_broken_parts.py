"""For every law of attacks, aggregators, selections and methods a small part that breaks it."""

from __future__ import annotations

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
from cbdsl.attacks.attack import AttackPreparation

Situation = cbdsl.AttackContext
Rng = np.random.Generator


# Attacks that break a law.


class Forgetful(cbdsl.Attack):
    """Keeps count."""

    calls = 0

    def claim(self, seen: Situation) -> float:
        type(self).calls += 1
        return seen.score / self.calls


class Dice(cbdsl.Attack):
    def upload(self, seen: Situation) -> Floats:
        return np.random.default_rng().normal(size=seen.model.shape).astype(np.float32)


class Overwriting(cbdsl.Attack):
    omniscient = True

    def upload(self, seen: Situation) -> Floats:
        if seen.honest is not None and len(seen.honest):
            seen.honest[0] = 0
        return seen.model


class OverwritingReceived(cbdsl.Attack):
    def upload(self, seen: Situation) -> Floats:
        np.multiply(seen.global_best, 2, out=seen.global_best)
        return seen.global_best


class OverwritingSamples(cbdsl.Attack):
    def poison(self, own: Samples, scoring: Samples, classes: int, rng: Rng) -> Samples:  # noqa: ARG002
        own.labels[:] = 0
        return own


class WholeClaim(cbdsl.Attack):
    def claim(self, seen: Situation) -> float:  # noqa: ARG002
        return 0


class ListUpload(cbdsl.Attack):
    def upload(self, seen: Situation) -> Floats:
        return seen.model.tolist()  # type: ignore[no-any-return]


class WholeUpload(cbdsl.Attack):
    def upload(self, seen: Situation) -> Floats:
        return np.zeros(len(seen.model), np.int32)


class ShortUpload(cbdsl.Attack):
    def upload(self, seen: Situation) -> Floats:
        return seen.model[:5]


class Nothing(cbdsl.Attack):
    """An honest worker."""


class Slip(cbdsl.Attack):
    def uplaod(self, seen: Situation) -> Floats:
        return -seen.model


class SlipBesideAHook(Slip):
    def claim(self, seen: Situation) -> float:
        return seen.score / 2


class WrongLabels(cbdsl.Attack):
    def poison(self, own: Samples, scoring: Samples, classes: int, rng: Rng) -> Samples:  # noqa: ARG002
        return Samples(own.features, own.labels + np.int32(classes))


class PoisonPair(cbdsl.Attack):
    def poison(self, own: Samples, scoring: Samples, classes: int, rng: Rng) -> Any:  # noqa: ARG002, ANN401
        return own.features, own.labels


class PoisonNan(cbdsl.Attack):
    def poison(self, own: Samples, scoring: Samples, classes: int, rng: Rng) -> Samples:  # noqa: ARG002
        return Samples(own.features * np.float32(np.nan), own.labels)


class PoisonDice(cbdsl.Attack):
    def poison(self, own: Samples, scoring: Samples, classes: int, rng: Rng) -> Samples:  # noqa: ARG002
        return Samples(own.features + np.float32(np.random.default_rng().normal()), own.labels)


class NeedsOthers(cbdsl.Attack):
    omniscient = True

    def upload(self, seen: Situation) -> Floats:
        return seen.honest[0] if seen.honest is not None else seen.model


class NeedsKnowledge(cbdsl.Attack):
    omniscient = True

    def upload(self, seen: Situation) -> Floats:
        return np.asarray(seen.honest.sum(0))  # type: ignore[union-attr]


class BadCraft(cbdsl.Attack):
    crafts = True

    def craft(self, home: AttackPreparation) -> Floats:
        return home.initial[:3]


class BadTrigger(cbdsl.Attack):
    target = 0

    def triggered(self, features: Floats) -> Floats:
        return features[:1]


@pytest.mark.parametrize(
    ("attack", "words"),
    [
        (Forgetful(), "Forgetful breaks a law: the same situation leads to the same claim and upload"),
        (Dice(), "the same situation leads to the same claim and upload.*uploads other numbers"),
        (Overwriting(), "does not write into what it is given. It changed the honest workers' models"),
        (OverwritingReceived(), "changed the model it received in place"),
        (OverwritingSamples(), "changed its own samples in place"),
        (WholeClaim(), "a claim is a float. It is 0, a int"),
        (ListUpload(), r"an upload is a model \(D,\) of floats, or None to stay silent. It is a list"),
        (WholeUpload(), "or None to stay silent. It is a ndarray of int32"),
        (ShortUpload(), r"or None to stay silent. It has shape \(5,\), where D is 24"),
        (Nothing(), "at least one of poison, craft, triggered, claim, upload is its own"),
        (Slip(), r"Slip breaks a law.* It has uplaod: did you mean upload\?"),
        (SlipBesideAHook(), r"It has uplaod: did you mean upload\?"),
        (WrongLabels(), "int32 labels of its classes"),
        (PoisonPair(), "poison gives Samples.*It gives a tuple"),
        (PoisonNan(), "finite float32 features"),
        (PoisonDice(), "poison is the same for the same generator"),
        (NeedsOthers(), "it works in a swarm of one worker. It raises IndexError"),
        (NeedsKnowledge(), "it works where it knows nothing of the honest workers. It raises AttributeError"),
        (BadCraft(), r"craft gives None or a model \(D,\)"),
        (BadTrigger(), "samples of the same shape"),
        (Best(), "extends cbdsl.Attack"),
    ],
)
def test_attacks_that_break_a_law(attack: Any, words: str) -> None:  # noqa: ANN401
    with pytest.raises(AssertionError, match=words):
        testing.check_attack(attack)


def test_a_helper_whose_name_is_like_that_of_a_hook_of_the_attacks_own_is_no_slip() -> None:
    class WithHelper(cbdsl.Attack):
        def uploaded(self, seen: Situation) -> Floats:
            return -seen.model

        def upload(self, seen: Situation) -> Floats:
            return self.uploaded(seen)

    testing.check_attack(WithHelper)


def test_a_hook_may_be_an_attribute_of_the_object() -> None:
    attack = cbdsl.Attack()
    attack.upload = lambda seen: -seen.model  # type: ignore[method-assign]
    testing.check_attack(attack)


# Aggregators that break a law; all rules are called alike.


def first_row(rows: Any, attackers: int, trust: Any) -> Any:  # noqa: ANN401, ARG001
    return rows[0]


def keeps_axis(rows: Any, attackers: int, trust: Any) -> Any:  # noqa: ANN401, ARG001
    return rows.mean(0, keepdims=True)


def single_precision(rows: Any, attackers: int, trust: Any) -> Any:  # noqa: ANN401, ARG001
    return np.sqrt((rows.astype(np.float32) ** 2).mean(0))


def unbiased(rows: Any, attackers: int, trust: Any) -> Any:  # noqa: ANN401, ARG001
    return rows.sum(0) / (len(rows) - 1)


def in_place(rows: Any, attackers: int, trust: Any) -> Any:  # noqa: ANN401, ARG001
    rows.sort(axis=0)
    return rows[len(rows) // 2]


def shrinking(rows: Any, attackers: int, trust: Any) -> Any:  # noqa: ANN401, ARG001
    return 0.9 * rows.mean(0)


def three_or_more(rows: Any, attackers: int, trust: Any) -> Any:  # noqa: ANN401, ARG001
    return np.sort(rows, axis=0)[1:-1][0]


def random_row(rows: Any, attackers: int, trust: Any) -> Any:  # noqa: ANN401, ARG001
    return rows.mean(0) + 1e-3 * np.random.default_rng().normal()


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        (first_row, "first_row breaks a law: the order of the rows does not matter"),
        (keeps_axis, r"one model \(D,\) of floats. For rows \(1, 12\) it gives float64 \(1, 12\)"),
        (single_precision, "finite rows give finite numbers"),
        (unbiased, "finite rows give finite numbers. Not so with 1 rows"),
        (in_place, "does not write into what it is given. It changed the rows"),
        (shrinking, "equal rows give that row"),
        (three_or_more, "it works with 1 rows and 0 attackers. It raises IndexError"),
        (random_row, "the same rows give the same model"),
    ],
)
def test_aggregators_that_break_a_law(rule: Any, words: str) -> None:  # noqa: ANN401
    with pytest.raises(AssertionError, match=words):
        testing.check_aggregator(rule)


# Selections that break a law.


class Chooser(Best):
    """Best, but for whom it invites."""

    def __init__(
        self, choose: Callable[[Sequence[Candidate], Sequence[VerifiedUpload], RoundContext], Any], most: int = 1
    ) -> None:
        self._choose, self.most = choose, most

    def invite(self, waiting: Sequence[Candidate], believed: Sequence[VerifiedUpload], view: RoundContext) -> Any:  # noqa: ANN401
        return self._choose(waiting, believed, view)


class Maker(Best):
    """Best, but for what it makes."""

    def __init__(self, make: Callable[[Sequence[VerifiedUpload]], SelectionResult]) -> None:
        self._make = make

    def combine(self, believed: Sequence[VerifiedUpload], view: RoundContext) -> SelectionResult:
        return replace(self._make(believed), declined={}) if view else SelectionResult()


class Moody(Best):
    """Takes a model every other time."""

    turn = 0

    def combine(self, believed: Sequence[VerifiedUpload], view: RoundContext) -> SelectionResult:
        type(self).turn += 1
        return super().combine(believed, view) if self.turn % 2 else SelectionResult()


class Scribbling(Best):
    def combine(self, believed: Sequence[VerifiedUpload], view: RoundContext) -> SelectionResult:
        believed[0].model[:] += 1
        return super().combine(believed, view)


class Grudging(Best):
    def objection(self, upload: VerifiedUpload, believed: Sequence[VerifiedUpload], view: RoundContext) -> Any:  # noqa: ANN401, ARG002
        return None


class Blaming(Best):
    def combine(self, believed: Sequence[VerifiedUpload], view: RoundContext) -> SelectionResult:
        return replace(super().combine(believed, view), declined={99: "who?"})


@pytest.mark.parametrize(
    ("selection", "words"),
    [
        (Chooser(lambda *_: 42), "invites only a worker that is waiting.*it invites 42"),
        (Chooser(lambda _waiting, _believed, view: next(iter(view.state.banned))), "never invites a banned worker"),
        (Chooser(lambda waiting, _believed, _view: waiting[0].worker if waiting else 3, 8), "stops when none is"),
        (
            Chooser(lambda waiting, _believed, _view: waiting[0].worker if waiting else None),
            "no more models than `most`",
        ),
        (Chooser(lambda waiting, _believed, _view: waiting[0].worker, 8), "IndexError"),
        (Maker(lambda believed: SelectionResult(believed[0].model[:3], 0.5)), r"finite model \(D,\).*shape is \(3,\)"),
        (Maker(lambda believed: SelectionResult(believed[0].model * np.float32(np.nan), 0.5)), "NaN or infinity in it"),
        (Maker(lambda believed: SelectionResult(believed[0].model)), "The score is inf"),
        (Maker(lambda believed: SelectionResult(believed[0].model.tolist(), 1.0)), "It makes a list"),
        (Moody(), "the order in which claims arrive does not matter"),
        (Scribbling(), "does not write into what it is given. It changed a model"),
        (Grudging(), "an objection is text"),
        (Blaming(), "it declines only verified uploads"),
        (Dice(), "extends cbdsl.Selection"),
    ],
)
def test_selections_that_break_a_law(selection: Any, words: str) -> None:  # noqa: ANN401
    with pytest.raises(AssertionError, match=words):
        testing.check_selection(selection)


# Methods that break a law.


class Gossip(cbdsl.AveragingMethod):
    """Workers look at each other."""

    def train(self, work: WorkerRound, start: Floats) -> Floats:
        trained = work.train(start)
        return np.asarray(trained - 0.1 * trained.mean(0), np.float32)


class Gossiping(cbdsl.SwarmMethod):
    """NaN of one gets into all."""

    def move(self, work: WorkerRound, rows: Particles, received: Floats) -> Particles:
        mixed = replace(rows, positions=np.asarray(rows.positions + 0 * rows.positions.sum(0), np.float32))
        return super().move(work, mixed, received)


class FirstComes(cbdsl.AveragingMethod):
    """Who is moved first trains twice."""

    def train(self, work: WorkerRound, start: Floats) -> Floats:
        trained = work.train(start)
        trained[0] = work.train(trained)[0]
        return trained


class Moving(cbdsl.AveragingMethod):
    """Remembers in the object what a checkpoint does not hold."""

    def __init__(self) -> None:
        self._memory: dict[int, Any] = {}

    def step(self, current: Floats, memory: Floats, combined: Floats, share: float) -> tuple[Floats, Floats]:
        del share
        before = self._memory.get(id(memory), 0.0)
        self._memory[id(memory)] = combined - current
        return np.asarray(combined + 0.5 * before, np.float32), memory


class Absent(cbdsl.SwarmMethod):
    """Says that its workers remember nothing, but they do."""

    remembers = False


class Broadcaster(cbdsl.AveragingMethod):
    vectors = 2


class HalfUpload(cbdsl.AveragingMethod):
    def upload(self, rows: Particles) -> Floats:
        return rows.positions[:, :4]


class DoubleStep(cbdsl.AveragingMethod):
    def step(self, current: Floats, memory: Floats, combined: Floats, share: float) -> tuple[Floats, Floats]:
        del current, share
        return combined.astype(np.float64), memory


class GrowingMemory(cbdsl.AveragingMethod):
    def step(self, current: Floats, memory: Floats, combined: Floats, share: float) -> tuple[Floats, Floats]:
        del current, share
        return combined, np.append(memory, np.float32(1))


class WritingReceived(cbdsl.AveragingMethod):
    def move(self, work: WorkerRound, rows: Particles, received: Floats) -> Particles:
        received *= 0.5
        return super().move(work, rows, received)


class Chance(cbdsl.AveragingMethod):
    def train(self, work: WorkerRound, start: Floats) -> Floats:
        return np.asarray(work.train(start) + np.random.default_rng().normal(), np.float32)


@pytest.mark.parametrize(
    ("method", "words"),
    [
        (Gossip(), "a worker's numbers do not depend on the others"),
        (Gossiping(), "NaN in one worker does not spread"),
        (FirstComes(), "do not depend on the others|the order of workers does not matter"),
        (Absent(), "a resumed run gives the numbers of one that was never stopped"),
        (Broadcaster(), r"sends \(V D,\).*With V = 2 and D = 21 it sends \(21,\)"),
        (HalfUpload(), r"k workers upload \(k, V D\)"),
        (DoubleStep(), r"step gives a model \(D,\) of float32"),
        (GrowingMemory(), "memory keeps its shape and type"),
        (WritingReceived(), "changed what the server sent in place"),
        (Chance(), "equal runs give equal numbers"),
        (Best(), "extends cbdsl.Method"),
    ],
)
def test_methods_that_break_a_law(method: Any, words: str) -> None:  # noqa: ANN401
    with pytest.raises(AssertionError, match=words):
        testing.check_method(method)


def test_a_method_that_keeps_something_in_itself_breaks_a_law() -> None:
    with pytest.raises(AssertionError, match="Moving breaks a law: "):
        testing.check_method(Moving())
