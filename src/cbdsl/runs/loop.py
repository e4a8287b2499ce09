"""Runs a spec: plays its rounds, keeps records and checkpoints, resumes where a run was stopped."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from cbdsl.algorithm.aggregators import AggregationRule
from cbdsl.algorithm.messages import Order, RoundLog, ServerState, Swarm, WorkerId
from cbdsl.algorithm.methods import Method
from cbdsl.algorithm.selection import Selection
from cbdsl.arrays import Floats
from cbdsl.attacks.attack import Attack
from cbdsl.data.dataset import Dataset
from cbdsl.data.partition import Partition
from cbdsl.engines.augmentations import Augmentation
from cbdsl.engines.loss import LossFunction
from cbdsl.errors import UserError
from cbdsl.models.saved_model import ModelMetadata
from cbdsl.presets import preset
from cbdsl.register import CUSTOM
from cbdsl.runs.baseline import measure_server_alone
from cbdsl.runs.build import Client, Experiment, Init, ModelBuilder, UserParts, collect_parts
from cbdsl.runs.callbacks import Callback, CallbackList, RunStart, default_callbacks
from cbdsl.runs.folder import Checkpoint, RunFolder
from cbdsl.runs.metrics import Detection
from cbdsl.runs.records import NO_CLAIMS, Claims, RoundRecord, claims_of, finite, record, summarise
from cbdsl.runs.resolve import find_schedules, resolve
from cbdsl.runs.result import Result
from cbdsl.runs.worker_results import measure_workers
from cbdsl.spec import INIT_SERVER, Spec
from cbdsl.swarms.drop_outs import with_drop_outs
from cbdsl.swarms.local import SwarmWithAttackers
from cbdsl.swarms.ray_swarm import swarm_maker

Watch = Callable[[Experiment, Order], None]
_CHECKPOINT_SECONDS = 5.0
_CHECKPOINT_SHARE = 20.0  # checkpoints may take a twentieth of the time
_CHECKPOINT_SPEED = 3e8  # bytes per second, before the first one is measured


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
    augmentation: Augmentation | str | None = None,
    participation: float | None = None,
    init: Init | None = None,
    loss: LossFunction | str | None = None,
    swarm: Callable[[Experiment], Swarm] | None = None,
    on: str | None = None,
    shards: int | None = None,
    out: Path | str | None = None,
    threads: int | None = None,
    baseline: bool | Path = False,
    metrics: bool = False,
    callbacks: Sequence[Callback] | None = None,
    watch: Watch | None = None,
) -> Result:
    """Run a spec, or a preset by its name, and return the result.

    model: a function without arguments that returns a fresh `nn.Module` (a class will do), or a network's name.
    data: arrays of your own; instead of `spec.data.source`.
    clients: natural clients, a set of samples and a worker each; D_G, hold-out and test set come from the data.
    method, attack, aggregator, selection, partition: parts of your own, as objects or by their registered names.
    augmentation: a function of the features of a batch, applied while a model trains on them; on the torch engine.
    participation: the workers that take part in a round, as a share or as a number.
    init: start from this model: a run's result or folder, a .safetensors file, or flat weights (D,).
    loss: a loss by name, or a function of outputs and targets (torch tensors) that returns the loss of each sample,
        (N,), never negative; it runs on the torch engine.
    swarm: a function that builds workers elsewhere; given the experiment, it returns what the server talks to.
    on: a Ray cluster for the workers: "ray" starts one here, "auto" finds one, or its address. It changes no number.
    shards: the number of parts the workers are divided into there; one per processor if None. It changes no number.
    out: a new folder for the records; without it none are written.
    threads: the number of threads to use; all cores if None. It changes the time and no number.
    baseline: at the end, also train the server alone and put its accuracy into the summary; a folder keeps that for
        other runs with the same data, model and seed.
    metrics: measure every metric (of a classifier its test loss and macro-F1) after every round, not only at the end.
    callbacks: called at the start, after every round and at the end; if None, a progress bar in a notebook.
    watch: called after every round with the experiment and the order that was carried out.

    >>> spec = Spec(workers=2, rounds=1, model="softmax").with_settings({"data.samples_per_worker": 20})
    >>> result = run(spec, threads=1)
    >>> len(result.rounds), result.weights.shape
    (1, (7850,))
    """
    chosen, parts = collect_parts(
        preset(spec) if isinstance(spec, str) else spec,
        model=model, data=data, clients=clients, method=method, attack=attack, aggregator=aggregator,
        selection=selection, partition=partition, augmentation=augmentation, participation=participation, init=init,
        loss=loss,
        make_swarm=swarm,
    )  # fmt: skip
    return run_resolved(
        resolve(chosen, parts.method), parts, on=on, shards=shards, out=out, threads=threads, baseline=baseline,
        metrics=metrics, callbacks=callbacks, watch=watch,
    )  # fmt: skip


def run_resolved(  # noqa: PLR0913 - all but the first two by name
    spec: Spec,
    parts: UserParts | None = None,
    *,
    on: str | None = None,
    shards: int | None = None,
    out: Path | str | None = None,
    threads: int | None = None,
    baseline: bool | Path = False,
    metrics: bool = False,
    callbacks: Sequence[Callback] | None = None,
    watch: Watch | None = None,
) -> Result:
    """Run a spec that is resolved already; see `run`."""
    parts = parts or UserParts()
    with ExitStack() as stack:
        make_swarm = stack.enter_context(swarm_maker(on, shards, threads, parts.make_swarm))
        experiment = Experiment.prepare(spec, replace(parts, make_swarm=make_swarm), threads)
        swarm = experiment.swarm  # built before the folder: workers that cannot be reached leave no folder behind
        folder = RunFolder.create(Path(out), spec) if out is not None else None
        if folder is not None:
            stack.callback(folder.close)
            if spec.init:
                folder.keep_init(spec.init, experiment.network.tensors(experiment.initial[0]))
        opened = OpenRun(folder, baseline=baseline, metrics=metrics)
        listeners = _start(experiment, opened, callbacks, stack)
        for completed in play_rounds(experiment, experiment.first_state(), swarm, opened=opened):
            if watch is not None:
                watch(experiment, completed.order)
            listeners.round(completed.record)
        return _finish(experiment, opened, listeners, swarm)


def resume(  # noqa: PLR0913 - all but the first by name
    path: Path | str,
    *,
    rounds: int | None = None,
    model: ModelBuilder | None = None,
    data: Dataset | None = None,
    clients: Sequence[Client] | None = None,
    method: Method | None = None,
    attack: Attack | None = None,
    aggregator: AggregationRule | None = None,
    selection: Selection | None = None,
    partition: Partition | None = None,
    augmentation: Augmentation | None = None,
    loss: LossFunction | None = None,
    swarm: Callable[[Experiment], Swarm] | None = None,
    on: str | None = None,
    shards: int | None = None,
    threads: int | None = None,
    baseline: bool | Path = False,
    metrics: bool = False,
    callbacks: Sequence[Callback] | None = None,
) -> Result:
    """Resume the run in a folder and return its result; the numbers are those of an uninterrupted run.

    rounds: the new total number of rounds. A finished run continues, with the numbers of a run that had as many from
    the start. Refused if a schedule depends on the number of rounds. A finished run's folder does not contain what
    workers keep between rounds; if they keep something, the run starts again from round 1.

    Objects that were given to `run` have to be given again; plugins are imported as the folder says. Workers elsewhere
    (swarm=...) must answer an order that they carried out before as they did then: rounds since the last checkpoint are
    played again. on, shards, baseline, metrics: see `run`; a run can be resumed elsewhere than it was started.

    >>> from tempfile import TemporaryDirectory
    >>> spec = Spec(workers=2, rounds=1, model="softmax").with_settings({"data.samples_per_worker": 20})
    >>> with TemporaryDirectory() as folder:  # a finished run has no rounds left to play
    ...     first = run(spec, out=folder, threads=1)
    ...     resume(folder, threads=1).summary == first.summary
    True
    """
    with ExitStack() as stack:
        make_swarm = stack.enter_context(swarm_maker(on, shards, threads, swarm))
        folder, spec = RunFolder.open(Path(path))
        stack.callback(folder.close)
        _check_place(folder.path)
        chosen, parts = collect_parts(
            spec, model=model, data=data, clients=clients, method=method, attack=attack, aggregator=aggregator,
            selection=selection, partition=partition, augmentation=augmentation, loss=loss, make_swarm=make_swarm,
        )  # fmt: skip
        if spec.init:
            kept = folder.path / "init.safetensors"
            parts = replace(parts, init=kept)
            chosen = replace(chosen, init=spec.init if spec.init in {CUSTOM, INIT_SERVER} else str(kept))
        resolved = resolve(chosen, parts.method)
        longer = replace(resolved, rounds=resolved.rounds if rounds is None else rounds)
        experiment = Experiment.prepare(longer, parts, threads)
        if longer != resolved:
            _prolong(folder, spec, replace(experiment, spec=resolved), experiment)
        checkpoint, records = folder.resume(experiment.key)
        unfinished = checkpoint is not None and checkpoint.state.round < longer.rounds and checkpoint.rows is None
        if unfinished and experiment.remembers and swarm is None:
            raise UserError(
                f"The workers of {path} were elsewhere (swarm=...), and their state is not in the folder. Give the "
                "swarm again: cbdsl.resume(..., swarm=...).",
                code="missing-part",
            )
        opened = OpenRun(folder, checkpoint, records, baseline=baseline, metrics=metrics)
        listeners = _start(experiment, opened, callbacks, stack)
        for completed in play_rounds(experiment, opened.state_of(experiment), opened=opened):
            listeners.round(completed.record)
        return _finish(experiment, opened, listeners, experiment.swarm)


def _prolong(folder: RunFolder, spec: Spec, before: Experiment, after: Experiment) -> None:
    """Prolong the run in a folder. spec: the folder's."""
    path, rounds = folder.path, after.spec.rounds
    if folder.path.name == spec.key():
        raise UserError(
            f"{path} belongs to a study, whose folders are named by their specs. Run the study with more rounds "
            f"(--set rounds={rounds}), or copy the folder first.",
            code="conflict",
        )
    schedules = find_schedules(before.spec, before.server.method)
    if schedules:
        raise UserError(
            f"{' and '.join(schedules)} follow the number of rounds, so a run of {rounds} rounds differs from "
            f"the start from this one of {before.spec.rounds}. Start a new run with --rounds {rounds}, or one with a "
            "constant schedule (--set swarm.inertia=0.5), which can be prolonged.",
            code="conflict",
        )
    state = folder.load_checkpoint(before.key, also=after.key)
    played = state.state.round if state else 0
    if rounds < played:
        raise UserError(
            f"{path} has played {played} rounds already, and --rounds {rounds} is the total. Give a larger number.",
            code="out-of-range",
        )
    lost = before.remembers and state is not None and state.rows is None and rounds > played
    if lost:
        logging.getLogger("cbdsl").warning(
            f"{path} is played again from round 1: what its workers keep between rounds is not in the folder of a "
            "finished run."
        )
    folder.prolong(replace(spec, rounds=rounds), after.key, before.key, keep=not lost)


def _check_place(folder: Path) -> None:
    """Refuse a run whose workers are other processes."""
    if (folder / "deployment.json").exists():
        raise UserError(
            f"The workers of {folder} are processes of their own. Resume with the command that started it: cbdsl "
            "serve or cbdsl swarm, with the same --out.",
            code="not-supported",
        )
    if (folder / "flower.json").exists():
        raise UserError(
            f"The workers of {folder} are nodes of a Flower federation. Resume with flwr run, as it was started and "
            f"with -c 'out=\"{folder.resolve()}\"'.",
            code="not-supported",
        )


def _start(
    experiment: Experiment, opened: OpenRun, callbacks: Sequence[Callback] | None, stack: ExitStack
) -> CallbackList:
    """Restore the workers from the checkpoint, if there is one, and tell the callbacks that the run starts."""
    listeners = CallbackList(default_callbacks() if callbacks is None else callbacks)
    stack.callback(listeners.close)
    simulated = experiment.swarm if isinstance(experiment.swarm, SwarmWithAttackers) else None
    note = " ".join(filter(None, (experiment.note, simulated.note if simulated else "")))
    if note and not callbacks:
        logging.getLogger("cbdsl").warning(note)
    played = tuple(opened.records)
    listeners.start(RunStart(experiment.spec, opened.path, note, len(played), played))
    if opened.checkpoint and simulated:
        state = opened.checkpoint.state
        received = experiment.server.method.broadcast(state.global_best, state.memory)
        simulated.restore(opened.checkpoint.rows, state.round, received)
        if simulated.adversary is not None:
            simulated.adversary.memory = opened.checkpoint.attackers
    return listeners


def _finish(experiment: Experiment, opened: OpenRun, listeners: Callback, swarm: Swarm) -> Result:
    result = finish_run(experiment, opened, swarm)
    listeners.finish(result)
    return result


@dataclass(eq=False)
class OpenRun:
    """The rounds of a run so far, and its folder, which this process holds."""

    folder: RunFolder | None = None
    checkpoint: Checkpoint | None = None  # where the run goes on
    records: list[RoundRecord] = field(default_factory=list)
    state: ServerState | None = None  # after the last round that `play_rounds` played
    every_round: bool = False  # save a checkpoint after every round, whatever it costs
    baseline: bool | Path = False  # at the end, also train the server alone; a folder where that is kept
    metrics: bool = False  # measure every metric of a classifier after every round, too
    claims: list[Claims] = field(default_factory=list)  # of each round, if there is no folder

    def keep_claims(self, log: RoundLog) -> None:
        """Store the claims of a round, unless a folder does."""
        if self.folder is None and log.claims:
            self.claims.append(claims_of(log))

    @property
    def path(self) -> Path | None:
        """The folder's path."""
        return self.folder.path if self.folder else None

    def close(self) -> None:
        """Let other processes use the folder."""
        if self.folder is not None:
            self.folder.close()

    def state_of(self, experiment: Experiment) -> ServerState:
        """Return the state after the last round, or before the first one."""
        if self.state is not None:
            return self.state
        return self.checkpoint.state if self.checkpoint else experiment.first_state()


@dataclass(frozen=True, eq=False)
class CompletedRound:
    """A round: what was ordered, what happened, and the server after it."""

    order: Order
    log: RoundLog
    state: ServerState
    record: RoundRecord


def play_rounds(
    experiment: Experiment,
    state: ServerState,
    swarm: Swarm | None = None,
    measured: bool = True,
    enter_round: Callable[[ServerState], tuple[ServerState, Sequence[WorkerId]]] | None = None,
    opened: OpenRun | None = None,
    annotate: Callable[[CompletedRound], RoundRecord] | None = None,
) -> Iterator[CompletedRound]:
    """Play the rounds that are left, with the experiment's swarm or another one; the only loop over rounds.

    measured: test w^g after every round; otherwise the accuracy in the record is NaN.
    enter_round: called before every round; returns the state to go on with, and who is in the swarm, where workers
        join and leave.
    opened: where records and checkpoints are kept. annotate: completes a record before it is kept.
    """
    swarm = experiment.swarm if swarm is None else swarm
    checkpointer = Checkpointer(experiment, opened, swarm) if opened is not None and opened.folder else None
    reached = with_drop_outs(swarm, experiment.spec.dropout, experiment.spec.seed)
    every_metric = experiment.dataset.task != "classification" or (opened is not None and opened.metrics)
    while state.round < experiment.spec.rounds:
        started = time.perf_counter()
        state, members = enter_round(state) if enter_round is not None else (state, None)
        order = experiment.server.order(state, members)
        state, log = experiment.server.play(state, order, reached)
        accuracy = experiment.test_accuracy(state) if measured else math.nan
        others = experiment.test_metrics(state) if measured and every_metric else {}
        every = experiment.spec.data.local_test_every
        found = measure_workers(experiment, state, swarm) if measured and every and state.round % every == 0 else None
        seconds = round(time.perf_counter() - started, 4)
        line = record(log, state, len(order.participants), accuracy, seconds, others, found.summary if found else None)
        completed = CompletedRound(order, log, state, line)
        if annotate is not None:
            completed = replace(completed, record=annotate(completed))
        if opened is not None:
            opened.state = state
            opened.records.append(completed.record)
            opened.keep_claims(log)
        if checkpointer is not None:
            checkpointer.keep(completed)
        yield completed


def finish_run(experiment: Experiment, opened: OpenRun, swarm: Swarm) -> Result:
    """Sum a run up, and write its results into its folder."""
    state, method = opened.state_of(experiment), experiment.server.method
    workers = measure_workers(experiment, state, swarm, keep=True)
    measured = replace(experiment.measure_final(state), local_test=workers.summary if workers else None)
    labelled = len(experiment.split.shared_training) + len(experiment.split.shared_scoring)
    if opened.baseline and labelled and method.conversation != "alone":
        kept = opened.baseline if isinstance(opened.baseline, Path) else None
        measured = replace(measured, server_alone=measure_server_alone(experiment, kept))
    summary = summarise(
        experiment.spec, experiment.spec_key, opened.records, method, experiment.engine, experiment.byzantine,
        measured,
    )  # fmt: skip
    network, card = experiment.network, describe_model(experiment, state.global_best)
    if opened.folder is not None:
        opened.folder.finish(summary, network.tensors(state.global_best), card, workers)
    records = tuple(opened.records)
    claims = opened.folder.claims() if opened.folder else np.concatenate([NO_CLAIMS, *opened.claims])
    return Result(
        experiment.spec, summary, records, state.global_best, opened.path, network, experiment.engine, card,
        workers.columns if workers else {}, workers.models if workers else None, claims,
    )  # fmt: skip


def describe_model(experiment: Experiment, weights: Floats) -> ModelMetadata:
    """Return what the file of a model says of it, with the threshold of an anomaly detector."""
    data = experiment.dataset
    card = ModelMetadata.of(experiment.network, data.scaling, data.class_names)
    if data.task == "classification":
        return replace(card, target_names=data.target_names)  # of a table, the column of classes
    loss, detection = experiment.loss, experiment.metrics.get("detection")
    threshold = (
        experiment.evaluate(weights).threshold(detection.false_alarm) if isinstance(detection, Detection) else None
    )
    return replace(
        card, task=data.task, loss=loss.name, loss_setting=loss.setting, target_scaling=data.target_scaling,
        target_names=data.target_names, threshold=finite(threshold),
    )  # fmt: skip


class Checkpointer:
    """Appends each round to the folder and saves a checkpoint when it is due.

    Checkpoints cost at most a twentieth of the time, unless one per round is requested. The last one, at the end, is
    without the workers' rows, unless their own models are measured.
    """

    def __init__(self, experiment: Experiment, opened: OpenRun, swarm: Swarm) -> None:
        assert opened.folder is not None
        self._experiment, self._folder, self._every_round = experiment, opened.folder, opened.every_round
        simulated = swarm if isinstance(swarm, SwarmWithAttackers) else None
        self._swarm = simulated if experiment.remembers else None
        self._adversary = simulated.adversary if simulated else None
        self._last, self._cost = time.monotonic(), -1.0  # seconds; below 0: not measured yet

    def keep(self, completed: CompletedRound) -> None:
        """Write a round's record, and a checkpoint if it is time."""
        self._folder.append(completed.record, claims_of(completed.log))
        state, started = completed.state, time.monotonic()
        finished = state.round == self._experiment.spec.rounds
        if not (finished or self._every_round or self._is_due(started - self._last)):
            return
        measured = bool(self._experiment.split.tests)  # then the workers' own models are part of the results
        swarm = self._swarm if measured or not finished else None
        attackers = self._adversary.memory if self._adversary else None
        self._folder.save_checkpoint(state, swarm.kept if swarm else None, self._experiment.key, attackers)
        if swarm:
            swarm.saved(self._folder.mapped_rows, state.round)
        self._last = time.monotonic()
        self._cost = self._last - started

    def _is_due(self, passed: float) -> bool:
        if passed < _CHECKPOINT_SECONDS:
            return False
        size = sum(array.nbytes for array in self._swarm.kept.values()) if self._swarm and self._cost < 0 else 0
        return passed >= _CHECKPOINT_SHARE * max(self._cost, size / _CHECKPOINT_SPEED)
