"""Laws of an aggregator and of a selection."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from cbdsl import register
from cbdsl.algorithm.aggregators import AggregationRule, TrialSet, TrustedReference
from cbdsl.algorithm.messages import Claim, Order, RoundLog, ServerState, WorkerId
from cbdsl.algorithm.round import ServerPolicy, play_round
from cbdsl.algorithm.selection import Candidate, RoundContext, Selection, SelectionResult, VerifiedUpload
from cbdsl.algorithm.verification import UNTRAINABLE, Verifier, make_verifier
from cbdsl.arrays import Doubles, Floats, Indices, NamedArrays, copy_memory
from cbdsl.testing.laws import Laws, is_floats, is_identical, make_part, survives_stop

SIZE = 12
CAP = 3


def check_aggregator(rule: AggregationRule | str) -> None:
    """Fail unless a rule gives one finite model (D,) for any number of rows, in any order, and leaves them unchanged.

    The order is tested where rows do not tie, as Krum's do among few; the server sorts rows before it calls a rule.

    >>> check_aggregator("median")
    """
    apply, laws = make_part(register.aggregator, rule)
    for count in (1, 2, 3, 5, 8):
        for attackers in range((count + 1) // 2):
            rows = np.random.default_rng(count).normal(size=(count, SIZE))
            found = _apply_rule(apply, laws, rows, attackers)
            again = _apply_rule(apply, laws, rows, attackers)
            laws.require(is_identical(found, again), "the same rows give the same model", f"Not so for {count} rows.")
            if attackers <= count - 4:
                turned = _apply_rule(apply, laws, rows[np.random.default_rng(0).permutation(count)], attackers)
                laws.require(
                    np.allclose(found, turned, rtol=1e-9, atol=1e-9),
                    "the order of the rows does not matter",
                    f"With {count} rows in another order, numbers change by {np.abs(found - turned).max():.3g}.",
                )
            far = rows.copy()
            far[0] = 1e30
            _apply_rule(apply, laws, far, attackers)
            equal = np.repeat(rows[:1], count, axis=0)
            kept = _apply_rule(apply, laws, equal, attackers, own=rows[0])
            laws.require(
                np.allclose(kept, rows[0], rtol=1e-6, atol=1e-6),
                "equal rows give that row, if w_t and the server's own model are that row, too",
                f"{count} equal rows became something else, by {np.abs(kept - rows[0]).max():.3g}.",
            )
    _check_memory(apply, laws)


def _check_memory(apply: AggregationRule, laws: Laws) -> None:
    """Check that four rounds stopped and resumed after two give the same numbers."""

    def rounds(apply: AggregationRule, memory: NamedArrays, world: int, numbers: range) -> list[tuple[Any, ...]]:
        played = []
        for number in numbers:
            rows = np.random.default_rng([world, number]).normal(size=(6, SIZE))
            found = _apply_rule(apply, laws, rows, 1, memory=(memory := dict(memory)), number=number)
            memory = copy_memory(memory, "It")
            played.append((found, memory))
        return played

    laws.require(
        survives_stop(rounds, apply),
        "a resumed run gives the numbers of one that was never stopped",
        "They differ. Only `trust.memory` is saved; keep no state on the rule or in the module.",
    )


def _apply_rule(
    apply: AggregationRule,
    laws: Laws,
    rows: Doubles,
    attackers: int,
    own: Doubles | None = None,
    memory: NamedArrays | None = None,
    number: int = 1,
) -> Doubles:
    given, before = rows.copy(), np.zeros(SIZE, np.float32) if own is None else own.astype(np.float32)
    reference = before.copy()
    root = (np.full(SIZE, 0.5) if own is None else own).astype(np.float32)

    def losses(models: Floats) -> Doubles:
        return np.asarray(np.square(models - np.float32(0.1), dtype=np.float64).mean(1))

    def gradient(weights: Floats, rows: Indices | None = None) -> Floats:
        return np.asarray(weights - np.float32(0.1 if rows is None else 0.1 * len(rows)), np.float32)

    def differentiate(weights: Floats, rows: Indices) -> tuple[float, Floats]:
        return float(losses(weights[None])[0]), gradient(weights, rows)

    count = len(rows)
    trust = TrustedReference(
        reference, lambda: root, losses, np.full(count, 20.0), np.arange(count, dtype=np.int32), number,
        np.random.default_rng(number), gradient, {} if memory is None else memory,
        TrialSet(40, losses, differentiate), ((0, 5), (5, SIZE)),
    )  # fmt: skip
    case = f"with {len(rows)} rows and {attackers} attackers"
    with laws.expect_no_error(case), np.errstate(all="ignore"):
        found = np.asarray(apply(given, attackers, trust))
    laws.require_unchanged({"the rows": rows, "w_t": before}, {"the rows": given, "w_t": reference})
    laws.require(
        is_floats(found) and found.shape == (SIZE,),
        "a rule gives one model (D,) of floats",
        f"For rows {rows.shape} it gives {found.dtype} {found.shape}.",
    )
    laws.require(np.isfinite(found).all(), "finite rows give finite numbers", f"Not so {case}.")
    return found.astype(np.float64)


def check_selection(selection: Selection | type[Selection] | str) -> None:
    """Fail unless a selection invites only waiting workers, stops, and makes a finite model, in real rounds.

    Among the cases: attackers that claim the best scores, silent workers, a guard, no workers at all.

    >>> check_selection("best")
    """
    part, laws = make_part(register.selection, selection)
    laws.require(isinstance(part, Selection), "it extends cbdsl.Selection", f"It is a {type(part).__name__}.")
    laws.require(
        isinstance(part.most, int) and part.most >= 1, "most is a whole number from 1 on", f"It is {part.most}."
    )
    scores = {worker: 0.9 - 0.07 * worker for worker in range(8)}
    cases: dict[str, tuple[dict[int, float], set[int], set[int], float]] = {
        "where all are honest": (scores, set(), set(), 1.0),
        "where the best claims are false": (scores, {5, 7}, set(), 1.0),
        "where the best stay silent": (scores, set(), {6, 7}, 1.0),
        "where no claim beats the global best": (scores, set(), set(), 0.01),
        "where nothing was verified before": (scores, set(), set(), np.inf),
        "where all claims are false": (scores, set(scores), set(), 1.0),
        "with one worker": ({4: 0.5}, set(), set(), 1.0),
        "where there are no claims": ({}, set(), set(), 1.0),
        "where claims are equal": (dict.fromkeys(scores, 0.5), set(), set(), 1.0),
    }
    for case, (claims, attackers, silent, before) in cases.items():
        for guarded in (False, True):
            outcomes = [
                _play_round(part, laws, case, _ScriptedWorkers(claims, attackers, silent, turn), before, guarded)
                for turn in range(3)
            ]
            for state, log in outcomes[1:]:
                kept = (
                    is_identical(state.global_best, outcomes[0][0].global_best)
                    and log.verdicts == outcomes[0][1].verdicts
                )
                laws.require(
                    kept and state.global_score == outcomes[0][0].global_score,
                    "the order in which claims arrive does not matter",
                    f"{case.capitalize()}, another order led to another outcome.",
                )


class _ScriptedWorkers:
    """Workers whose model is a constant; its score is the square of that."""

    def __init__(self, claims: Mapping[int, float], attackers: set[int], silent: set[int], turn: int) -> None:
        order = np.random.default_rng(turn).permutation(sorted(claims)) if turn else sorted(claims)
        self.claims = {int(worker): claims[int(worker)] for worker in order}
        self.attackers, self.silent = attackers, silent

    def report(self, order: Order) -> Mapping[WorkerId, Claim]:
        del order
        return {worker: Claim(score) for worker, score in self.claims.items()}

    def upload(self, workers: Sequence[WorkerId]) -> Mapping[WorkerId, Floats]:
        return {worker: self.model(worker) for worker in workers if worker not in self.silent}

    def model(self, worker: WorkerId) -> Floats:
        right = np.full(SIZE, np.sqrt(self.claims[worker]), np.float32)
        return right + np.float32(1 + worker) if worker in self.attackers else right


class _CheckedSelection(Selection):
    """A selection whose every result is checked."""

    def __init__(self, inner: Selection, laws: Laws, case: str) -> None:
        self._inner, self._laws, self._case = inner, laws, case
        self.most = inner.most

    def invite(
        self, waiting: Sequence[Candidate], believed: Sequence[VerifiedUpload], view: RoundContext
    ) -> WorkerId | None:
        given = list(waiting)
        with self._laws.expect_no_error(self._case):
            worker = self._inner.invite(waiting, believed, view)
        self._laws.require(
            list(waiting) == given, "it does not write into what it is given", "It changed the list of waiting workers."
        )
        if worker is None:
            return None
        self._laws.require(
            worker not in view.state.banned, "it never invites a banned worker", f"It invites worker {worker}."
        )
        self._laws.require(
            worker in [one.worker for one in waiting],
            "it invites only a worker that is waiting, and stops when none is",
            f"{self._case.capitalize()}, it invites {worker!r} of {[one.worker for one in waiting]}.",
        )
        return worker

    def objection(self, upload: VerifiedUpload, believed: Sequence[VerifiedUpload], view: RoundContext) -> str:
        with self._laws.expect_no_error(self._case):
            words = self._inner.objection(upload, believed, view)
        self._laws.require(isinstance(words, str), "an objection is text, or empty", f"It is {words!r}.")
        return words

    def combine(self, believed: Sequence[VerifiedUpload], view: RoundContext) -> SelectionResult:
        self._laws.require(
            len(believed) <= self.most,
            "it asks for no more models than `most`",
            f"{self._case.capitalize()}, it had {len(believed)}; most is {self.most}.",
        )
        before = copy.deepcopy([one.model for one in believed])
        with self._laws.expect_no_error(self._case):
            combined = self._inner.combine(believed, view)
        self._laws.require_unchanged(
            {"a model": np.stack(before)}, {"a model": np.stack([one.model for one in believed])}
        )
        model = combined.model
        if model is not None:
            law = "it makes a finite model (D,) with a finite score"
            self._laws.require(is_floats(model), law, f"It makes a {type(model).__name__}.")
            self._laws.require(model.shape == (SIZE,), law, f"The shape is {model.shape}.")
            self._laws.require(np.isfinite(model).all(), law, "The model has NaN or infinity in it.")
            self._laws.require(np.isfinite(combined.score), law, f"The score is {combined.score}.")
        strangers = set(combined.declined) - {one.worker for one in believed}
        self._laws.require(not strangers, "it declines only verified uploads", f"It declines {strangers}.")
        return combined


def _play_round(
    selection: Selection, laws: Laws, case: str, swarm: _ScriptedWorkers, before: float, guarded: bool
) -> tuple[ServerState, RoundLog]:
    banned = frozenset({8, 9})
    state = ServerState(3, np.full(SIZE, 1.5, np.float32), before, banned=banned)
    order = Order(4, "swarm", tuple(swarm.claims), 0.5, 0.1, None)
    policy = ServerPolicy(_CheckedSelection(selection, laws, case), max(CAP, selection.most))
    with laws.expect_no_error(case):
        after, log = play_round(state, order, swarm, _verifier(guarded), policy)
    laws.require_unchanged({"w^g": np.full(SIZE, 1.5, np.float32)}, {"w^g": state.global_best})
    laws.require(
        len(log.verdicts) <= policy.invitations,
        "a round has no more invitations than the cap",
        f"{case.capitalize()}, there were {len(log.verdicts)}; the cap is {policy.invitations}.",
    )
    return after, log


def _verifier(guarded: bool) -> Verifier:
    def score(weights: Floats) -> float:
        return float(np.square(weights, dtype=np.float64).mean())

    plain = make_verifier(score, SIZE, 1e-4)
    if not guarded:
        return plain

    def copies(_current: Floats, others: Sequence[Floats], proposed: Floats, _round: int) -> bool:
        return any(np.array_equal(proposed, other) for other in others)

    def doubt(current: Floats, proposed: Floats, _round: int) -> str:
        return UNTRAINABLE if score(proposed) > 4 * score(current) else ""

    return Verifier(plain.check, plain.score, copies, doubt, loss=score)
