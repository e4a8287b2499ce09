"""Run a spec: build what it names, play its rounds, keep its records, resume where it was stopped."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
from torch import nn

from cbdsl.byzantine.adversary import Adversary
from cbdsl.byzantine.attacks import Attack, make_attack, stamped
from cbdsl.protocol.fedavg import Combination, play_average_round
from cbdsl.data import Dataset, Split, load, split
from cbdsl.data.sources import CUSTOM
from cbdsl.runs.defence import combination_of, policy_of, rate_at, verifier_of
from cbdsl.arrays import Floats, Samples
from cbdsl.engines.base import Engine
from cbdsl.engines.choose import choose_engine
from cbdsl.engines.native import default_threads
from cbdsl.errors import UserError, unknown
from cbdsl.methods.table import Method, method_of, resolve
from cbdsl.models.modules import MODELS, initial_weights, load_flat
from cbdsl.presets import preset
from cbdsl.runs.records import RoundRecord, Summary, record, summarise
from cbdsl.rng import seed_of, stream
from cbdsl.runs.folder import Checkpoint, RunFolder
from cbdsl.protocol.server import Order, RoundLog, ServerState, Swarm, WorkerId, fresh_state, next_order, play_round
from cbdsl.swarms.memory import SimulatedSwarm, holdings
from cbdsl.spec import Spec
from cbdsl.workers.swarm import inertia_at
from cbdsl.protocol.verification import Verifier

ModelBuilder = Callable[[], nn.Module]
OnStart = Callable[[Spec, Path | None, str], None]
OnRound = Callable[[RoundRecord], None]
Watch = Callable[["Stage", Order], None]
_CHECKPOINT_SECONDS = 5.0
_CHECKPOINT_SHARE = 20.0  # a checkpoint may take one part in twenty of the time
_CHECKPOINT_SPEED = 3e8  # bytes a second, before the first one was measured


@dataclass(frozen=True, eq=False)
class Result:
    """What a run leaves."""

    spec: Spec
    summary: Summary
    rounds: tuple[RoundRecord, ...]
    model: nn.Module  # with the final global weights in it
    weights: Floats  # the same, flat: (D,)
    folder: Path | None


def run(  # noqa: PLR0913 - all but the first by name
    spec: Spec | str = "paper-iid",
    *,
    model: ModelBuilder | None = None,
    data: Dataset | None = None,
    out: Path | str | None = None,
    threads: int | None = None,
    on_start: OnStart | None = None,
    on_round: OnRound | None = None,
    watch: Watch | None = None,
) -> Result:
    """Run a spec, or a preset by its name.

    model: a function without arguments that returns a fresh `nn.Module` (a class will do); instead of `spec.model`.
    data: arrays of your own; instead of `spec.data.source`.
    out: a new folder for the records; none are written without it.
    threads: how many threads to use, all cores if not given. It changes the time and no number.
    on_start: called with the resolved spec and the folder, once everything that the spec names was found, and a note
        if the model could not have the native engine.
    on_round: called with the record of every round that was played.
    watch: called after every round with all that was built and the order that was carried out.
    """
    chosen = preset(spec) if isinstance(spec, str) else spec
    if model is not None:
        chosen = replace(chosen, model=CUSTOM)
    if data is not None:
        chosen = replace(chosen, data=replace(chosen.data, source=data.name))
    stage = Stage.prepare(resolve(chosen), model, data, threads)
    folder = RunFolder.create(Path(out), stage.spec) if out is not None else None
    return _play(stage, folder, None, [], on_start, on_round, watch)


def resume(
    path: Path | str,
    *,
    model: ModelBuilder | None = None,
    data: Dataset | None = None,
    threads: int | None = None,
    on_start: OnStart | None = None,
    on_round: OnRound | None = None,
) -> Result:
    """Go on with the run in a folder; the numbers are those of a run that was never stopped."""
    folder, spec = RunFolder.open(Path(path))
    try:
        if (folder.path / "deployment.json").exists():
            raise UserError(
                f"The workers of {path} live in processes of their own. Go on with the command that started it: "
                "cbdsl serve or cbdsl swarm, with the same --out."
            )
        stage = Stage.prepare(spec, model, data, threads)
        checkpoint, records = folder.go_on(stage.key)
    except BaseException:
        folder.close()
        raise
    return _play(stage, folder, checkpoint, records, on_start, on_round)


@dataclass(frozen=True, eq=False)
class Stage:
    """Everything a spec names, built."""

    spec: Spec
    method: Method
    dataset: Dataset
    split: Split
    build_model: ModelBuilder
    engine: Engine
    initial: Floats  # (1, D), or (U, D) if workers start apart
    verifier: Verifier
    combine: Combination
    attack: Attack
    byzantine: tuple[WorkerId, ...]
    note: str  # why the fastest engine is not used; empty if it is

    @staticmethod
    def prepare(
        spec: Spec, model: ModelBuilder | None, data: Dataset | None, threads: int | None, deal: bool = True
    ) -> Stage:
        """Build what a resolved spec names; everything that can be wrong with it is found here.

        deal: give workers their samples; not if they have their own, somewhere else.
        """
        if threads is not None and threads < 1:
            raise UserError(f"threads must be at least 1; given {threads}.")
        method = method_of(spec)
        attack = make_attack(spec.attack)
        dataset = data or load(spec.data.source)
        build = model or _builder(spec.model, dataset)
        parts = split(dataset.train.labels, spec.data, spec.workers if deal else 0, spec.seed)
        choice = choose_engine(spec.engine, build(), dataset.shape, threads or default_threads())
        engine = choice.engine
        starts = spec.workers if spec.swarm.start == "apart" else 1
        initial = np.stack(
            [initial_weights(build, seed_of(spec.seed, "initial-weights", worker=number)) for number in range(starts)]
        )
        byzantine = _byzantine(spec)
        return Stage(
            spec, method, dataset, parts, build, engine, initial,
            verifier_of(spec, engine, dataset.train, parts), combination_of(spec, engine, dataset.train, parts),
            attack, byzantine, choice.note,
        )  # fmt: skip

    @cached_property
    def swarm(self) -> SimulatedSwarm:
        """The workers in memory, made when they are first needed."""
        spec, parts, dataset = self.spec, self.split, self.dataset
        adversary = Adversary(spec, self.attack, self.byzantine, self.engine, dataset, parts, self.initial[0])
        return SimulatedSwarm(spec, self.engine, dataset.train, holdings(parts, spec), self.initial, adversary)

    @property
    def key(self) -> str:
        """What the numbers of a run depend on: the spec, and the engine that was chosen for it."""
        return f"{self.spec.key()}-{self.engine.name}"

    def first_state(self) -> ServerState:
        """The server before round 1; it scores the initial model itself where it has D_sc."""
        can_score = self.method.task == "swarm" and self.method.verifies and self.spec.shares_scoring
        score = self.verifier.score(self.initial[0]) if can_score and self.verifier.score else np.inf
        return fresh_state(self.initial[0], float(np.float32(score)))

    def order(self, state: ServerState) -> Order:
        """The order that starts the next round."""
        number, spec = state.round + 1, self.spec
        inertia = inertia_at(number, spec.rounds, spec.swarm.inertia)
        return next_order(state, self.method.task, range(spec.workers), inertia, rate_at(spec, number))

    def play(self, state: ServerState, swarm: Swarm | None = None) -> tuple[ServerState, RoundLog]:
        """The next round, with workers elsewhere if they are given."""
        order, swarm = self.order(state), swarm or self.swarm
        if self.method.task == "average":
            return play_average_round(state, order, swarm, self.combine)
        return play_round(state, order, swarm, self.verifier, policy_of(self.spec))

    def test_accuracy(self, state: ServerState) -> float:
        """Share of the test set that w^g classifies correctly."""
        everything = np.arange(len(self.dataset.test), dtype=np.int32)
        return float(self.engine.accuracies(state.global_best[None], self.dataset.test, everything)[0])

    def attack_success(self, state: ServerState) -> float | None:
        """Share of test samples of other classes that a trigger turns into the attack's target, if it has one."""
        target, test = self.attack.target, self.dataset.test
        if target is None or not self.byzantine:
            return None
        others = np.flatnonzero(test.labels != target).astype(np.int32)
        marked = Samples(stamped(test.features[others]), np.full(len(others), target, np.int32))
        return float(self.engine.accuracies(state.global_best[None], marked, np.arange(len(others), dtype=np.int32))[0])


def _play(
    stage: Stage,
    folder: RunFolder | None,
    checkpoint: Checkpoint | None,
    records: list[RoundRecord],
    on_start: OnStart | None,
    on_round: OnRound | None,
    watch: Watch | None = None,
) -> Result:
    """Play the rounds that are left, and write down what happens."""
    try:
        if on_start is not None:
            on_start(stage.spec, folder.path if folder else None, stage.note)
        elif stage.note:
            logging.getLogger("cbdsl").warning(stage.note)
        first = state = checkpoint.state if checkpoint else stage.first_state()
        if checkpoint and checkpoint.particles:
            stage.swarm.restore(checkpoint.particles, state.round, state.global_best)
        keeper = _Keeper(stage, folder)
        for state, line in rounds(stage, first, watch=watch):
            records.append(line)
            if folder is not None:
                folder.append(line)
            keeper.consider(state)
            if on_round is not None:
                on_round(line)
        return conclude(stage, folder, records, state)
    finally:
        if folder is not None:
            folder.close()


def conclude(stage: Stage, folder: RunFolder | None, records: Sequence[RoundRecord], state: ServerState) -> Result:
    """Sum a run up, and leave its results in its folder."""
    summary = summarise(
        stage.spec, records, stage.engine.name, stage.engine.size, stage.byzantine, stage.attack_success(state)
    )
    module = stage.build_model()
    load_flat(module, state.global_best)
    if folder is not None:
        from cbdsl.report.plots import save_accuracy_plot  # noqa: PLC0415 - half a second, and only for a folder

        tensors = {name: tensor.detach().numpy() for name, tensor in module.state_dict().items()}
        save_accuracy_plot(folder.path / "accuracy.png", summary, records)
        folder.finish(summary, tensors)
    return Result(stage.spec, summary, tuple(records), module, state.global_best, folder.path if folder else None)


def rounds(
    stage: Stage, state: ServerState, swarm: Swarm | None = None, watch: Watch | None = None
) -> Iterator[tuple[ServerState, RoundRecord]]:
    """Play the rounds that are left, with the simulated swarm or another one; the state and the record after each."""
    while state.round < stage.spec.rounds:
        started, order = time.perf_counter(), stage.order(state)
        state, log = stage.play(state, swarm)
        accuracy = stage.test_accuracy(state)
        if watch is not None:
            watch(stage, order)
        yield state, record(log, state, accuracy, round(time.perf_counter() - started, 4))


class _Keeper:
    """Decides when a checkpoint is due: not too often for its cost, and once, without the swarm, at the end."""

    def __init__(self, stage: Stage, folder: RunFolder | None) -> None:
        self._stage, self._folder = stage, folder
        self._keeps_swarm = stage.method.task == "swarm"
        size = sum(array.nbytes for array in vars(stage.swarm.particles).values()) if self._keeps_swarm else 0
        self._last, self._cost = time.monotonic(), size / _CHECKPOINT_SPEED  # a guess, until one was written

    def consider(self, state: ServerState) -> None:
        """Write a checkpoint if it is time."""
        if self._folder is None:
            return
        started = time.monotonic()
        finished = state.round == self._stage.spec.rounds
        if finished or started - self._last >= max(_CHECKPOINT_SECONDS, _CHECKPOINT_SHARE * self._cost):
            particles = self._stage.swarm.particles if self._keeps_swarm and not finished else None
            self._folder.save_checkpoint(Checkpoint(state, particles), self._stage.key)
            self._last = time.monotonic()
            self._cost = self._last - started


def _builder(name: str, dataset: Dataset) -> ModelBuilder:
    if name == CUSTOM:
        raise UserError("The model of this run was given in Python; give it again with model=...")
    if name not in MODELS:
        raise unknown("model", name, MODELS)
    return lambda: MODELS[name](dataset.shape, dataset.classes)


def _byzantine(spec: Spec) -> tuple[WorkerId, ...]:
    """Who the attackers are, drawn at random."""
    drawn = stream(spec.seed, "byzantine").permutation(spec.workers)[: spec.attack.byzantine]
    return tuple(sorted(int(worker) for worker in drawn))
