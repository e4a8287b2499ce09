"""`cbdsl serve`: play a spec's rounds with workers on a network, and go on where an earlier process was stopped.

The folder is a run's folder like any other. A checkpoint follows every round before the next order is given, and the
journal holds what was heard since, so a server that is killed at any moment loses no accepted model and no ban.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from cbdsl.deploy import wire
from cbdsl.deploy.events import Events
from cbdsl.deploy.journal import Journal
from cbdsl.deploy.link import Address, MqttLink
from cbdsl.deploy.meter import Counts, Meter
from cbdsl.deploy.pace import Pace
from cbdsl.deploy.roster import Roster
from cbdsl.deploy.samples import pack_shared
from cbdsl.deploy.server import MakeLink, NetworkSwarm
from cbdsl.deploy.wire import Announcement
from cbdsl.engines.architecture import ArchitectureError, from_module
from cbdsl.engines.base import Samples
from cbdsl.errors import UserError
from cbdsl.experiment import OnRound, Result, Stage, conclude
from cbdsl.records import RoundRecord, record
from cbdsl.runs import Checkpoint, RunFolder, write_atomically


@dataclass(frozen=True, eq=False)
class Served:
    """What a served run leaves."""

    result: Result
    wire: Counts  # what the server's connection carried
    refused: dict[str, int]  # messages that were refused, by reason


def serve(
    stage: Stage,
    swarm: str,
    out: Path,
    address: Address,
    pace: Pace,
    names: Sequence[str] = (),
    on_ready: Callable[[NetworkSwarm], None] | None = None,
    on_round: OnRound | None = None,
) -> Served:
    """Play the rounds of a stage with whoever connects as a worker of `swarm`; resumes if `out` holds this run."""
    folder, checkpoint, records = _open(stage, out)
    try:
        run = _run_of(out, swarm)
        state = checkpoint.state if checkpoint else stage.first_state()
        roster = Roster(out / "roster.json", stage.spec.workers, names)
        meter, events = Meter(out / "wire.json"), Events(out / "events.jsonl")
        events.note("started", round=state.round, resumed=checkpoint is not None)
        shared = _shared(stage)
        network = NetworkSwarm(
            swarm, announce(stage, run, shared), shared, roster, pace, Journal(out / "journal.bin"), events,
            stage.initial if len(stage.initial) > 1 else (),
        )  # fmt: skip
        network.set_model(state.global_best, state.round)
        make_link: MakeLink = lambda handle, greet: MqttLink(address, handle, greet, meter)  # noqa: E731
        try:
            network.start(make_link)
            if on_ready is not None:
                on_ready(network)
            if state.round < stage.spec.rounds:
                network.gather()
            while state.round < stage.spec.rounds:
                started = time.perf_counter()
                state, log = stage.play(state, network)
                line = record(log, state, stage.test_accuracy(state), round(time.perf_counter() - started, 4))
                records.append(line)
                folder.append(line)
                folder.save_checkpoint(Checkpoint(state, None), stage.key)
                meter.save()
                if on_round is not None:
                    on_round(line)
            network.finish(state.round)
        finally:
            network.close()
            meter.save()
        (out / "journal.bin").unlink(missing_ok=True)
        events.note("finished", round=state.round, refused=dict(events.refusals))
        return Served(conclude(stage, folder, records, state), meter.counts(), dict(events.refusals))
    finally:
        folder.close()


def announce(stage: Stage, run: bytes, shared: bytes) -> Announcement:
    """What workers are told of a run."""
    spec, dataset, parts = stage.spec, stage.dataset, stage.split
    architecture = ""
    if spec.engine != "torch":
        try:
            architecture = json.dumps(from_module(stage.build_model(), dataset.shape).to_dict())
        except ArchitectureError:
            pass  # only torch can run it
    return Announcement(
        run=run,
        spec=spec.to_toml(),
        architecture=architecture,
        size=stage.engine.size,
        shape=json.dumps(dataset.shape),
        classes=dataset.classes,
        shared_training=len(parts.shared_training) if spec.shares_training else 0,
        shared_scoring=len(parts.shared_scoring) if spec.shares_scoring else 0,
        shared_digest=wire.digest_of(shared) if shared else bytes(wire.DIGEST_BYTES),
        shared_size=len(shared),
    )


def _shared(stage: Stage) -> bytes:
    """D_tr and D_sc as they are sent, as far as the spec shares them."""
    spec, parts, train = stage.spec, stage.split, stage.dataset.train
    chosen = np.concatenate(
        [
            parts.shared_training if spec.shares_training else parts.shared_training[:0],
            parts.shared_scoring if spec.shares_scoring else parts.shared_scoring[:0],
        ]
    )
    return pack_shared(Samples(train.features[chosen], train.labels[chosen]))


def _open(stage: Stage, out: Path) -> tuple[RunFolder, Checkpoint | None, list[RoundRecord]]:
    """A new folder, or the folder of this very run with what was played so far."""
    if not (out / "spec.toml").exists():
        return RunFolder.create(out, stage.spec), None, []
    folder, spec = RunFolder.open(out)
    try:
        if spec != stage.spec:
            raise UserError(f"{out} holds another run. Give another --out, or serve {out / 'spec.toml'} to go on.")
        checkpoint = folder.load_checkpoint(stage.key)
        records = folder.records(checkpoint.state.round if checkpoint else 0)
        folder.rewind(records)
    except BaseException:
        folder.close()
        raise
    return folder, checkpoint, records


def _run_of(out: Path, swarm: str) -> bytes:
    """The number by which this run's messages are known; drawn once and kept."""
    path = out / "deployment.json"
    if path.exists():
        try:
            stored = json.loads(path.read_text(encoding="utf-8"))
            run, of = bytes.fromhex(stored["run"]), str(stored["swarm"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(f"{path} is damaged ({error}). Restore it: workers know the run by what is in it.") from error
        if of != swarm:
            raise UserError(f"{out} is a run of the swarm '{of}', not of '{swarm}'. Give --swarm {of}.")
        return run
    run = os.urandom(wire.RUN_BYTES)
    write_atomically(path, (json.dumps({"run": run.hex(), "swarm": swarm}) + "\n").encode())
    return run
