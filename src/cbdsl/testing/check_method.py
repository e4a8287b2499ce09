"""Laws of a method."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import numpy as np

from cbdsl import register
from cbdsl.algorithm.messages import Claim, Order, ServerState, Upload, WorkerId
from cbdsl.algorithm.methods import Conversation, Method, ServerStep, update_server
from cbdsl.algorithm.particles import Particles
from cbdsl.arrays import Floats
from cbdsl.runs.build import Experiment, UserParts, collect_parts
from cbdsl.runs.folder import RunFolder
from cbdsl.runs.loop import OpenRun, play_rounds, resume
from cbdsl.runs.resolve import resolve
from cbdsl.swarms.local import LocalSwarm
from cbdsl.testing.laws import Laws, is_identical, make_part, small_data, small_spec


def check_method(method: Method | type[Method] | str) -> None:
    """Fail unless a method gives the same numbers however its workers are grouped, ordered, stopped and resumed.

    It is run on small data, with four of five workers per round.

    >>> check_method("fedavg")
    """
    part, laws = make_part(register.method, method)
    laws.require(isinstance(part, Method), "it extends cbdsl.Method", f"It is a {type(part).__name__}.")
    laws.require(
        part.conversation in get_args(Conversation),
        f"conversation is one of {', '.join(get_args(Conversation))}",
        f"It is {part.conversation!r}.",
    )
    with laws.expect_no_error("with a small spec"):
        chosen, given = collect_parts(small_spec(participation=4), data=small_data(), method=part)
        whole = resolve(chosen, given.method)
    _check_shapes(part, laws, _prepare(whole, part))

    with laws.expect_no_error("in a small run"):
        expected = _run_rounds(_prepare(whole, part))
        again = _run_rounds(_prepare(whole, part))
    laws.require(_equal(expected, again), "equal runs give equal numbers", "Two equal runs differ.")
    for block in (1, 2):
        experiment = _prepare(whole, part)
        experiment.memory_swarm.block = block
        with laws.expect_no_error(f"when {block} workers are moved at a time"):
            found = _run_rounds(experiment)
        laws.require(
            _equal(expected, found),
            "a worker's numbers do not depend on the others that are moved with it",
            f"Moved {block} at a time, the numbers differ. Row i may depend on row i alone.",
        )
    experiment = _prepare(whole, part)
    with laws.expect_no_error("when workers are in another order"):
        found = _run_rounds(experiment, _Reversed)
    laws.require(
        _equal(expected, found), "the order of workers does not matter", "In another order, the numbers differ."
    )
    _check_nan_stays(part, laws, _prepare(whole, part))
    _check_resume(part, laws, whole, expected)


class _Reversed:
    """A swarm whose workers move in reverse order."""

    def __init__(self, inner: LocalSwarm) -> None:
        self._inner = inner

    def report(self, order: Order) -> Mapping[WorkerId, Claim]:
        return self._inner.report(replace(order, participants=order.participants[::-1]))

    def upload(self, workers: Sequence[WorkerId]) -> Mapping[WorkerId, Upload]:
        return self._inner.upload(workers)


def _prepare(spec: Any, method: Method) -> Experiment:  # noqa: ANN401 - a Spec
    return Experiment.prepare(spec, UserParts(data=small_data(), method=method), threads=1)


Numbers = list[tuple[Floats, Floats, float]]


def _run_rounds(experiment: Experiment, wrapped: Callable[[LocalSwarm], Any] = lambda swarm: swarm) -> Numbers:
    """Return the server's model, memory and score after every round."""
    swarm = wrapped(experiment.memory_swarm)
    return [
        _get_numbers(played.state)
        for played in play_rounds(experiment, experiment.first_state(), swarm, measured=False)
    ]


def _get_numbers(state: ServerState) -> tuple[Floats, Floats, float]:
    return state.global_best, state.memory, state.global_score


def _equal(one: Numbers, other: Numbers) -> bool:
    pairs = zip(one, other, strict=True)
    return all(is_identical(left, right) for ours, theirs in pairs for left, right in zip(ours, theirs, strict=True))


def _check_shapes(method: Method, laws: Laws, experiment: Experiment) -> None:
    """Check the shapes of one round's messages."""
    size, vectors, current = experiment.engine.size, method.vectors, experiment.initial[0]
    with laws.expect_no_error("before the first round"):
        memory = method.memory(size)
        sent = method.broadcast(current, memory)
    laws.require(isinstance(memory, np.ndarray), "memory is an array", f"It is a {type(memory).__name__}.")
    laws.require(
        np.shape(sent) == (vectors * size,),
        "the server sends (V D,), V being `vectors`",
        f"With V = {vectors} and D = {size} it sends {np.shape(sent)}.",
    )
    swarm, kept = experiment.memory_swarm, sent.copy()
    work = swarm.workers.at(np.arange(3, dtype=np.int32), 1, 0.5, 0.05)
    with laws.expect_no_error("with three workers"):
        rows = method.move(work, _rows(swarm.particles, [0, 1, 2]), sent)
    laws.require_unchanged({"what the server sent": kept}, {"what the server sent": sent})
    laws.require(
        isinstance(rows, Particles) and rows.positions.shape == (3, size),
        "move gives Particles with a row for each worker",
        f"It gives a {type(rows).__name__}.",
    )
    before = {name: array.copy() for name, array in vars(rows).items()}
    with laws.expect_no_error("with three workers"):
        uploads = method.upload(rows)
    laws.require_unchanged(before, vars(rows))
    laws.require(
        np.shape(uploads) == (3, vectors * size),
        "k workers upload (k, V D)",
        f"With k = 3, V = {vectors} and D = {size} they upload {np.shape(uploads)}.",
    )
    given = current.copy(), memory.copy(), np.array(uploads[0])
    with laws.expect_no_error("when its server makes a step"):
        step = ServerStep(
            current, memory, given[2].copy(), 0.6, 1, (0, 1, 2), 4, tuple(np.array(uploads)), np.random.default_rng(0)
        )
        after, remembered = update_server(method, step)
    laws.require_unchanged({"w_t": given[0], "its memory": given[1]}, {"w_t": current, "its memory": memory})
    if method.conversation == "average":
        laws.require(
            np.shape(after) == (size,) and after.dtype == np.float32,
            "update gives a model (D,) of float32",
            f"With D = {size} it gives {getattr(after, 'dtype', type(after).__name__)} {np.shape(after)}.",
        )
    kind = (np.shape(remembered), getattr(remembered, "dtype", None))
    laws.require(
        kind == (memory.shape, memory.dtype),
        "memory keeps its shape and type",
        f"It was {memory.dtype} {memory.shape} and became {kind[1]} {kind[0]}.",
    )


def _rows(particles: Particles, chosen: list[int]) -> Particles:
    return Particles(*(array[chosen].copy() for array in vars(particles).values()))


def _check_nan_stays(method: Method, laws: Laws, experiment: Experiment) -> None:
    """Check that NaN in one worker leaves the others unchanged."""
    swarm, state = experiment.memory_swarm, experiment.first_state()
    played = next(iter(play_rounds(experiment, state, swarm, measured=False)))
    sent = method.broadcast(played.state.global_best, played.state.memory)
    work = swarm.workers.at(np.arange(5, dtype=np.int32), 2, 0.5, 0.05)
    healthy, broken = _rows(swarm.particles, list(range(5))), _rows(swarm.particles, list(range(5)))
    for array in (broken.positions, broken.velocities, broken.personal_best, broken.personal_score):
        array[2] = np.nan
    with laws.expect_no_error("where a worker's numbers are NaN"), np.errstate(invalid="ignore", over="ignore"):
        expected, found = method.move(work, healthy, sent), method.move(work, broken, sent)
        uploads, uploads_found = method.upload(expected), method.upload(found)
    others = [0, 1, 3, 4]
    pairs = [*zip(vars(expected).values(), vars(found).values(), strict=True), (uploads, uploads_found)]
    laws.require(
        all(is_identical(one[others], other[others]) for one, other in pairs if len(one)),
        "NaN in one worker does not spread to others",
        "Other workers' rows change. Row i may depend on row i alone.",
    )


def _check_resume(method: Method, laws: Laws, spec: Any, expected: Numbers) -> None:  # noqa: ANN401 - a Spec
    """Check a run that is stopped after two rounds and resumed from disk, with a copy of the method.

    Another run in between overwrites state that is hidden in a module or a class.
    """
    kept = copy.deepcopy(method)
    with tempfile.TemporaryDirectory() as place:
        experiment = _prepare(spec, method)
        folder = RunFolder.create(Path(place) / "run", experiment.spec)
        try:
            for played in play_rounds(experiment, experiment.first_state(), opened=OpenRun(folder, every_round=True)):
                if played.record.round == 2:
                    break
        finally:
            folder.close()
        _run_rounds(_prepare(replace(spec, seed=spec.seed + 1), method))
        with laws.expect_no_error("when it is resumed"):
            result = resume(folder.path, data=small_data(), method=kept, threads=1, callbacks=[])
    laws.require(
        is_identical(result.weights, expected[-1][0]),
        "a resumed run gives the numbers of one that was never stopped",
        "They differ. Only Particles (of workers; set `remembers`) and memory (of the server) are saved.",
    )
