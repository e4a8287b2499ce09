"""Run a spec: play its rounds, keep its records, resume where it was stopped."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from cbdsl.algorithm.aggregators import AggregationRule
from cbdsl.algorithm.messages import Order, RoundLog, ServerState, Swarm, WorkerId
from cbdsl.algorithm.methods import Method
from cbdsl.algorithm.selection import Selection
from cbdsl.attacks.base import Attack
from cbdsl.data.dataset import Dataset
from cbdsl.data.partition import Partition
from cbdsl.errors import UserError
from cbdsl.models.saved_model import ModelMetadata
from cbdsl.presets import preset
from cbdsl.register import CUSTOM
from cbdsl.runs.build import Client, Experiment, Init, ModelBuilder, gather, workers_on
from cbdsl.runs.callbacks import Callback, CallbackList, RunStart, default_callbacks
from cbdsl.runs.folder import Checkpoint, RunFolder
from cbdsl.runs.records import RoundRecord, record, summarise
from cbdsl.runs.resolve import resolve
from cbdsl.runs.result import Result
from cbdsl.spec import Spec
from cbdsl.swarms.local import SwarmWithAttackers

Watch = Callable[[Experiment, Order], None]
_CHECKPOINT_SECONDS = 5.0
_CHECKPOINT_SHARE = 20.0  # a checkpoint may take one part in twenty of the time
_CHECKPOINT_SPEED = 3e8  # bytes a second, before the first one was measured


def run(  # noqa: PLR0913 - all but the first by name
    spec: Spec | str = "paper-iid",
    *,
    model: ModelBuilder | str | None = None,
    data: Dataset | None = None,
    clients: Sequence[Client] | None = None,
    method: Method | str | None = None,
    attack: Attack | str | None = None,
    aggregator: AggregationRule | str | None = None,
    selection: Selection | str | None = None,
    partition: Partition | str | None = None,
    participation: float | None = None,
    init: Init | None = None,
    swarm: Callable[[Experiment], Swarm] | None = None,
    on: str | None = None,
    shards: int | None = None,
    out: Path | str | None = None,
    threads: int | None = None,
    callbacks: Sequence[Callback] | None = None,
    watch: Watch | None = None,
) -> Result:
    """Run a spec, or a preset by its name.

    model: a function without arguments that returns a fresh `nn.Module` (a class will do), or a network's name.
    data: arrays of your own; instead of `spec.data.source`.
    clients: natural clients, a set of samples and a worker each; D_G, hold-out and test set come from the data.
    method, attack, aggregator, selection, partition: parts of your own, as objects or by their registered names.
    participation: who takes part in a round, a share of the workers or their number.
    init: start from this model: a run's result or folder, a .safetensors file, or flat weights (D,).
    swarm: makes workers that live elsewhere; given the stage, it returns what the server talks to.
    on: a Ray cluster for the workers: "ray" starts one here, "auto" finds one, or its address. It changes no number.
    shards: into how many parts the workers are divided there, one a processor if not given; nor does this.
    out: a new folder for the records; none are written without it.
    threads: how many threads to use, all cores if not given. It changes the time and no number.
    callbacks: hear of the start, of every round and of the end; in a notebook a progress bar if not given.
    watch: called after every round with all that was built and the order that was carried out.
    """
    start = preset(spec) if isinstance(spec, str) else spec
    with workers_on(on, shards, threads, swarm) as make:
        chosen, given = gather(
            start, model, data, clients, method, attack, aggregator, selection, partition, participation, init, make
        )
        whole = resolve(chosen, given.parts.method)
        stage = Experiment.prepare(whole, given, threads)
        if on is not None:
            assert stage.swarm  # made now: a cluster that cannot be had leaves no folder behind
        folder = RunFolder.create(Path(out), stage.spec) if out is not None else None
        if folder is not None and whole.init:
            folder.keep_init(whole.init, stage.network.tensors(stage.initial[0]))
        return _play(stage, folder, None, [], callbacks, watch)


def resume(  # noqa: PLR0913 - all but the first by name
    path: Path | str,
    *,
    model: ModelBuilder | None = None,
    data: Dataset | None = None,
    clients: Sequence[Client] | None = None,
    method: Method | None = None,
    attack: Attack | None = None,
    aggregator: AggregationRule | None = None,
    selection: Selection | None = None,
    partition: Partition | None = None,
    swarm: Callable[[Experiment], Swarm] | None = None,
    on: str | None = None,
    shards: int | None = None,
    threads: int | None = None,
    callbacks: Sequence[Callback] | None = None,
) -> Result:
    """Go on with the run in a folder; the numbers are those of a run that was never stopped.

    What was given to `run` as objects has to be given again; plugins are imported as the folder says. Workers that live
    elsewhere (swarm=...) must answer an order that they carried out before as they did then: rounds since the last
    checkpoint are played again. on, shards: see `run`; a run can go on elsewhere than it was started.
    """
    with ExitStack() as stack:
        make = stack.enter_context(workers_on(on, shards, threads, swarm))
        folder, spec = RunFolder.open(Path(path))
        stack.callback(folder.close)
        if (folder.path / "deployment.json").exists():
            raise UserError(
                f"The workers of {path} live in processes of their own. Go on with the command that started it: "
                "cbdsl serve or cbdsl swarm, with the same --out."
            )
        if (folder.path / "flower.json").exists():
            raise UserError(
                f"The workers of {path} are nodes of a Flower federation. Go on with flwr run, as it was started and "
                f"with -c 'out=\"{folder.path.resolve()}\"'."
            )
        chosen, given = gather(
            spec, model, data, clients, method, attack, aggregator, selection, partition, None, None, make
        )
        if spec.init:
            kept = folder.path / "init.safetensors"
            given = replace(given, init=kept)
            chosen = replace(chosen, init=spec.init if spec.init == CUSTOM else str(kept))
        stage = Experiment.prepare(resolve(chosen, given.parts.method), given, threads)
        checkpoint, records = folder.go_on(stage.key, mapped=on is not None)
        unfinished = checkpoint is not None and checkpoint.state.round < spec.rounds and checkpoint.particles is None
        if unfinished and stage.remembers and swarm is None:
            raise UserError(
                f"The workers of {path} lived elsewhere (swarm=...), and what they remember is not in the folder. Give "
                "the swarm again: cbdsl.resume(..., swarm=...)."
            )
        return _play(stage, folder, checkpoint, records, callbacks)


def _play(
    stage: Experiment,
    folder: RunFolder | None,
    checkpoint: Checkpoint | None,
    records: list[RoundRecord],
    callbacks: Sequence[Callback] | None,
    watch: Watch | None = None,
) -> Result:
    """Play the rounds that are left, and write down what happens."""
    listeners = CallbackList(default_callbacks() if callbacks is None else callbacks)
    try:
        where, swarm = folder.path if folder else None, stage.swarm
        rows = swarm if isinstance(swarm, SwarmWithAttackers) else None
        note = " ".join(filter(None, (stage.note, rows.note if rows else "")))
        if note and not callbacks:
            logging.getLogger("cbdsl").warning(note)
        listeners.start(RunStart(stage.spec, where, note, len(records), tuple(records)))
        state = checkpoint.state if checkpoint else stage.first_state()
        if checkpoint and rows:
            received = stage.server.method.broadcast(state.global_best, state.memory)
            rows.restore(checkpoint.particles, state.round, received)
        keeper = Checkpointer(stage, folder)
        for played in play_rounds(stage, state):
            state = played.state
            records.append(played.record)
            if watch is not None:
                watch(stage, played.order)
            if folder is not None:
                folder.append(played.record)
            keeper.consider(state)
            listeners.round(played.record)
        result = finish_run(stage, folder, records, state)
        listeners.finish(result)
        return result
    finally:
        if folder is not None:
            folder.close()
        listeners.close()


@dataclass(frozen=True, eq=False)
class CompletedRound:
    """A round: what was ordered, what happened, and the server after it."""

    order: Order
    log: RoundLog
    state: ServerState
    record: RoundRecord


def play_rounds(
    stage: Experiment,
    state: ServerState,
    swarm: Swarm | None = None,
    measured: bool = True,
    members: Callable[[], Sequence[WorkerId]] | None = None,
) -> Iterator[CompletedRound]:
    """Play the rounds that are left, with the stage's swarm or another one. The one loop over rounds there is.

    measured: test w^g after every round; who does not look at the accuracy need not wait for it, and gets NaN.
    members: asked before every round who is in the swarm, where workers join and leave.
    """
    while state.round < stage.spec.rounds:
        started = time.perf_counter()
        order = stage.server.order(state, members() if members is not None else None)
        state, log = stage.server.play(state, order, stage.swarm if swarm is None else swarm)
        accuracy = stage.test_accuracy(state) if measured else math.nan
        seconds = round(time.perf_counter() - started, 4)
        yield CompletedRound(order, log, state, record(log, state, len(order.participants), accuracy, seconds))


def finish_run(
    stage: Experiment, folder: RunFolder | None, records: Sequence[RoundRecord], state: ServerState
) -> Result:
    """Sum a run up, and leave its results in its folder."""
    method, finale = stage.server.method, stage.finale(state)
    summary = summarise(stage.spec, stage.spec_key, records, method, stage.engine, stage.byzantine, finale)
    if folder is not None:
        card = ModelMetadata.of(stage.network, stage.dataset.scaling, stage.dataset.class_names)
        folder.finish(summary, stage.network.tensors(state.global_best), card)
    where = folder.path if folder else None
    return Result(stage.spec, summary, tuple(records), state.global_best, where, stage.network, stage.engine)


class Checkpointer:
    """Decides when a checkpoint is due: not too often for its cost, and once, without the swarm, at the end."""

    def __init__(self, stage: Experiment, folder: RunFolder | None) -> None:
        self._stage, self._folder = stage, folder
        swarm = stage.swarm if stage.remembers else None
        self._swarm = swarm if isinstance(swarm, SwarmWithAttackers) else None
        size = sum(array.nbytes for array in self._swarm.kept.values()) if self._swarm else 0
        self._last, self._cost = time.monotonic(), size / _CHECKPOINT_SPEED  # a guess, until one was written

    def consider(self, state: ServerState) -> None:
        """Write a checkpoint if it is time."""
        if self._folder is None:
            return
        started = time.monotonic()
        finished = state.round == self._stage.spec.rounds
        if finished or started - self._last >= max(_CHECKPOINT_SECONDS, _CHECKPOINT_SHARE * self._cost):
            swarm = None if finished else self._swarm
            self._folder.save_checkpoint(state, swarm.kept if swarm else None, self._stage.key)
            if swarm:
                swarm.saved(self._folder.mapped_rows, state.round)
            self._last = time.monotonic()
            self._cost = self._last - started
