"""`cbdsl serve`: opens or continues a run's folder, announces the run to workers, and plays its rounds over MQTT."""

from __future__ import annotations

import json
import logging
import os
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np

from cbdsl import register
from cbdsl.algorithm.broadcast import keyframe_of
from cbdsl.algorithm.messages import ServerState, WorkerId
from cbdsl.arrays import Floats
from cbdsl.engines.loss import make_loss
from cbdsl.errors import UserError
from cbdsl.models.network import Network
from cbdsl.models.saved_model import ModelMetadata
from cbdsl.network import wire
from cbdsl.network.journal import Events, Journal
from cbdsl.network.mqtt import NOW_AND_THEN, Address, Counts, Meter, MqttLink
from cbdsl.network.roster import Roster
from cbdsl.network.samples import pack_shared
from cbdsl.network.server import MakeLink, NetworkSwarm, ServerConfig, upload_bytes
from cbdsl.network.tls import LIMITS, read_largest_model
from cbdsl.network.unban import UnbanRequests
from cbdsl.network.wire import Announcement
from cbdsl.register import CUSTOM
from cbdsl.runs.build import Experiment
from cbdsl.runs.folder import RunFolder
from cbdsl.runs.loop import CompletedRound, OpenRun, finish_run, play_rounds
from cbdsl.runs.records import RoundRecord, finite
from cbdsl.runs.result import Result
from cbdsl.spec import (
    INIT_SERVER,
    DataSpec,
    DefenceSpec,
    Options,
    SelectionSpec,
    ServerSpec,
    Spec,
    Task,
    VerificationSpec,
    read as read_spec,
)
from cbdsl.util.files import read_json, read_text, write_atomically, write_json
from cbdsl.util.formatting import format_bytes
from cbdsl.util.serialize import Bounds, from_plain

_log = logging.getLogger("cbdsl.network")


@dataclass(frozen=True, eq=False)
class ServedRun:
    """The outcome of a served run."""

    result: Result
    wire: Counts  # messages and bytes of the server's connection
    refused: dict[str, int]  # number of refused messages by reason


def use_kept_init(spec: Spec, out: Path) -> Spec:
    """Return the spec; of a run that has begun, with the folder's copy of the model that it started from."""
    kept, begun = out / "init.safetensors", out / "spec.toml"
    own = (
        spec.init not in {"", INIT_SERVER} and kept.is_file() and begun.is_file() and read_spec(begun).init == spec.init
    )
    return replace(spec, init=str(kept)) if own else spec


def open_run(experiment: Experiment, out: Path, baseline: bool = False) -> OpenRun:
    """Create a run's folder, or open the folder of the same run to continue it. baseline: see `cbdsl.run`."""
    experiment.require_messages()
    if not (out / "spec.toml").exists():
        folder = RunFolder.create(out, experiment.spec, private=True)
        if experiment.spec.init:
            folder.keep_init(experiment.spec.init, experiment.network.tensors(experiment.initial[0]))
        return OpenRun(folder, every_round=True, baseline=baseline)
    folder, spec = RunFolder.open(out, private=True)
    try:
        own = experiment.spec.init == str(out / "init.safetensors")
        if spec != (replace(experiment.spec, init=spec.init) if own else experiment.spec):
            raise UserError(
                f"{out} contains another run. Give another --out, or serve {out / 'spec.toml'} to continue it.",
                code="wrong-run",
            )
        checkpoint, records = folder.resume(experiment.key)
    except BaseException:
        folder.close()
        raise
    return OpenRun(folder, checkpoint, records, every_round=True, baseline=baseline)


def serve(
    experiment: Experiment,
    opened: OpenRun,
    config: ServerConfig,
    on_ready: Callable[[NetworkSwarm], None] | None = None,
    on_round: Callable[[RoundRecord], None] | None = None,
    make_link: MakeLink | None = None,
    on_event: Callable[[str, dict[str, Any]], None] | None = None,
) -> ServedRun:
    """Play the remaining rounds with the workers that connect, and close the folder.

    on_ready: called when the server is connected. on_round: called with each round's record. make_link: builds another
    link than the one to the config's broker. on_event: called with every event, on any thread.
    """
    assert opened.path is not None
    out = opened.path
    try:
        roster = Roster(out / "roster.json", experiment.spec.workers, config.names)
        meter, claims = Meter(out / "wire.json"), Events(out / "claims.jsonl")
        events = Events(out / "events.jsonl", lambda name: roster.number(name) is not None, out / "refused.json")
        events.listener = on_event
        state = opened.state_of(experiment)
        events.note("started", round=state.round, members=roster.places)
        if not experiment.split.workers:
            combine = replace(experiment.server.combine, size_of=roster.samples, stated=True)  # what workers state
            experiment = replace(experiment, server=replace(experiment.server, combine=combine))
        shared = pack_shared_sets(experiment)
        announcement = announce(experiment, load_run_id(out / "deployment.json", config.swarm), shared)
        network = NetworkSwarm(
            config, announcement, shared, roster, Journal(out / "journal.bin"), events,
            codecs=experiment.server.policy.codecs,
            starts=list(experiment.initial) if len(experiment.initial) > 1 else [], played=state.round,
        )  # fmt: skip
        if experiment.server.method.vectors == 1:
            network.retained.note_versions(state.version, state.references)
        network.retained.set_model(_message(experiment, state), state.version, state.updates, keyframe_of(state))
        try:
            network.start(make_link or link_maker(config.address, meter, events))
            if on_ready is not None:
                on_ready(network)
            if state.round < experiment.spec.rounds:
                network.gather()

            def annotate(completed: CompletedRound) -> RoundRecord:
                _note_claims(claims, completed, roster)
                _note_bans(events, completed, roster)
                return _add_names(completed, roster, network)

            unban = UnbanRequests(out, roster, events)

            def enter_round(before: ServerState) -> tuple[ServerState, Sequence[WorkerId]]:
                return unban.apply(before), network.members()

            for completed in play_rounds(
                experiment, state, network, enter_round=enter_round, opened=opened, annotate=annotate
            ):
                unban.clear()
                meter.save(NOW_AND_THEN)
                events.save(NOW_AND_THEN)
                if on_round is not None:
                    on_round(completed.record)
            state = opened.state_of(experiment)
            network.finish(state.round, _message(experiment, state), state.version, state.updates)
        finally:
            network.close()
            meter.save()
            events.save()
        (out / "journal.bin").unlink(missing_ok=True)
        events.note("finished", round=state.round, refused=dict(events.refusals), offences=events.offences()[:1000])
        result = finish_run(experiment, opened, network)
        _add_names_to_summary(out, result, roster)
        return ServedRun(result, meter.counts(), dict(events.refusals))
    finally:
        opened.close()


def link_maker(address: Address, meter: Meter, events: Events) -> MakeLink:
    """Return a function that makes the server's link, which notes when the broker is lost and when it is back."""
    lost: list[float] = []  # since when, while it is

    def note_lost() -> None:
        lost.append(time.monotonic())
        events.note("broker_lost")

    def make(handle: Callable[[str, bytes], None], on_up: Callable[[], None]) -> MqttLink:
        def note_up() -> None:
            if lost:
                events.note("broker_back", seconds=round(time.monotonic() - lost.pop(), 1))
            on_up()

        return MqttLink(address, handle, note_up, meter, on_lost=note_lost)

    return make


def _message(experiment: Experiment, state: ServerState) -> Floats:
    """Return w^g, and what else the method sends with it, (V D,)."""
    return experiment.server.method.broadcast(state.global_best, state.memory)


def _add_names_to_summary(out: Path, result: Result, roster: Roster) -> None:
    """Add the workers' names to the summary."""
    names = {str(number): name for number, name in enumerate(roster.names)}
    write_json(out / "summary.json", {**result.summary.to_json(), "names": names}, private=True)


def _add_names(played: CompletedRound, roster: Roster, network: NetworkSwarm) -> RoundRecord:
    """Add to a round's record the names of the workers that it mentions, and the seconds per phase."""
    line = played.record
    told = {verdict["worker"] for verdict in line.verdicts} | {int(worker) for worker in line.set_aside}
    told.update(line.refuted, line.declined, line.silent, line.banned)
    names = {str(worker): roster.name(worker) for worker in sorted(told)}
    return replace(line, names=names, phases=network.phases.split(line.seconds))


def _note_bans(events: Events, played: CompletedRound, roster: Roster) -> None:
    """Log the bans of a round with their reasons, and write them as events."""
    for verdict in played.log.verdicts:
        if verdict.outcome == "refuted":
            name, reason = roster.name(verdict.worker), verdict.reason
            _log.warning("worker %s is banned until the end of the run, or `cbdsl unban`: %s", name, reason)
            claimed, measured = finite(verdict.claimed), finite(verdict.measured)
            events.note(
                "banned", round=played.log.round, worker=name, reason=reason, claimed=claimed, measured=measured
            )


def _note_claims(claims: Events, played: CompletedRound, roster: Roster) -> None:
    """Write all claims of a round for `cbdsl watch`, to a file whose size is limited like that of events."""
    if played.log.claims:
        said = {roster.name(worker): finite(claim.score) for worker, claim in played.log.claims.items()}
        claims.note("claims", round=played.log.round, claims=said)


def announce(experiment: Experiment, run: bytes, shared: bytes) -> Announcement:
    """Build the announcement of a run to workers."""
    spec, dataset, parts = experiment.spec, experiment.dataset, experiment.split
    if spec.local.augment == register.CUSTOM:
        raise UserError(
            "The augmentation of this run was given in Python, and devices are sent no code. Register it in a plugin "
            "and give that to the server and to every worker: --plugin FILE.",
            code="not-supported",
        )
    architecture, card = "", ModelMetadata.of(experiment.network, dataset.scaling, dataset.class_names)
    names = dataset.target_names if dataset.task == "regression" else card.class_names
    own = any(register.split_plugin_name(name)[1] == spec.model for name in spec.plugins)
    if own and card.graph is None:
        raise UserError(
            f"The model {spec.model} cannot be sent to devices: {card.obstacle}. Devices get a network as data, never "
            "its code; docs/parts.md lists the layers that can be described.",
            code="not-supported",
        )
    # A network that cannot be described, or takes samples as rows, runs only where torch and its code are.
    if card.graph is not None and (spec.engine != "torch" or own) and card.graph.shape == dataset.shape:
        frozen = {"frozen": experiment.network.frozen.runs().tolist()} if experiment.network.frozen else {}
        architecture = json.dumps(card.graph.to_dict() | frozen)
    if experiment.network.frozen is not None and not architecture:
        why = card.obstacle or "the torch engine was asked for, or it takes samples as rows"
        raise UserError(
            "The model has frozen weights. Devices get them with a network as data, and this one cannot be sent so: "
            f"{why}. Train all weights, or give a network that the native engine can run.",
            code="not-supported",
        )
    tensors = list(card.tensors) if architecture and _sends_names(experiment.network, card) else []
    scaling = [
        number for one in (card.scaling, dataset.target_scaling) if one for number in (*one.mean, *one.deviation)
    ]
    announcement = Announcement(
        run=run,
        spec=spec_for_workers(spec, dataset.task).to_toml(),
        architecture=architecture,
        size=experiment.engine.size,
        vectors=experiment.server.method.vectors,
        shape=json.dumps(dataset.shape),
        classes=dataset.outputs,
        shared_training=len(parts.shared_training) if spec.shares_training else 0,
        shared_scoring=len(parts.shared_scoring) if spec.shares_scoring else 0,
        shared_digest=wire.digest_of(shared) if shared else wire.NO_DIGEST,
        shared_size=len(shared),
        scaling=np.array(scaling, "<f8").tobytes(),
        shades=card.scaling is not None and card.scaling.shades,
        class_names=json.dumps(names, ensure_ascii=False),
        tensors=json.dumps(tensors),
    )
    _check_size(announcement)
    return announcement


def check_upload_size(experiment: Experiment, address: Address) -> None:
    """Raise UserError if a provisioned broker would drop pieces of this run's uploads."""
    largest = read_largest_model(address.certificate) if address.certificate is not None else None
    if largest is None:
        return
    server = experiment.server
    _, most = upload_bytes(server.policy.codecs, experiment.engine.size * server.method.vectors)
    if wire.piece_count(most) > wire.piece_count(4 * largest):
        needed = -(-most // 4)
        raise UserError(
            f"The model has {experiment.engine.size:,} parameters, and an upload {format_bytes(most)}, as many as "
            f"{needed:,} numbers. The broker passes on up to {largest:,} and drops the rest. Where the certificates "
            f"were made: cbdsl provision DIR --largest-model {needed}. Then copy server/{LIMITS} from there to here "
            "and restart the broker; or use a smaller model, or a codec (--codec q4).",
            code="too-large",
        )


def _sends_names(network: Network, card: ModelMetadata) -> bool:
    """Return whether a user's module names its weights differently from its layers; very long lists are not sent."""
    layers = card.graph.tensors() if card.graph is not None else {}
    same_shapes = [shape for _, shape in network.tensor_shapes()] == list(layers.values())
    longest = max(map(len, card.tensors), default=0)
    return same_shapes and card.tensors != tuple(layers) and longest <= 100 and sum(map(len, card.tensors)) < 10_000


def _check_size(announcement: Announcement) -> None:
    """Raise UserError if an announcement does not fit in one message."""
    try:
        fits = len(wire.encode(announcement)) <= wire.MAX_MESSAGE
    except wire.WireError:
        fits = False
    if not fits:
        raise UserError(
            f"This run cannot be announced to devices in one message of {wire.MAX_MESSAGE // 1024} KiB: the spec has "
            f"{len(announcement.spec):,} characters, the network {len(announcement.architecture):,}, the scaling of "
            f"features {len(announcement.scaling):,} bytes, the names of classes {len(announcement.class_names):,} "
            "characters. Scale features beforehand, shorten the names of classes, or give a network of fewer layers.",
            code="too-large",
        )


def spec_for_workers(spec: Spec, task: Task = "classification") -> Spec:
    """Return the part of a spec that workers need: without the server's data, defence and GPU.

    task: the data's, which is written out unless it is classification.
    """
    if spec.loss == CUSTOM:
        raise UserError(
            "The loss was given in Python, and devices get no code. Use a loss by name, or run it here: cbdsl.run.",
            code="not-supported",
        )
    loss = make_loss(spec, task).name
    needed = (spec.method, spec.codec.up, spec.codec.down, spec.attack.name, spec.local.augment, loss)
    return replace(
        spec,
        preset="",
        init="",
        plugins=(),
        device="auto",
        data=DataSpec(target=spec.data.target) if task == "classification" else DataSpec(task=task),
        loss=spec.loss if task == "classification" else loss,
        verification=VerificationSpec(),
        defence=DefenceSpec(commitment=spec.defence.commitment),
        selection=SelectionSpec(),
        server=ServerSpec(),
        options=Options({name: spec.options.of(name) for name in needed}),
    )


def pack_shared_sets(experiment: Experiment) -> bytes:
    """Encode D_tr and D_sc for workers, as far as the spec shares them, and the frozen weights."""
    spec, parts = experiment.spec, experiment.split
    training = parts.shared_training if spec.shares_training else parts.shared_training[:0]
    scoring = parts.shared_scoring if spec.shares_scoring else parts.shared_scoring[:0]
    rows = np.concatenate([training, scoring])
    samples = pack_shared(experiment.dataset.train.taken(rows), experiment.dataset.task)
    frozen = experiment.network.frozen
    return samples if frozen is None else samples + wire.weights_to_bytes(frozen.constants)


_SECRET_BYTES = 16


def read_secret(out: Path) -> int:
    """Return the server's secret number of a run's folder, or a new one. It draws the hold-out: the seed is public."""
    path = out / ".secret"
    if not path.exists():
        return int.from_bytes(secrets.token_bytes(_SECRET_BYTES)) or 1
    try:
        return int(path.read_text(encoding="ascii"), 16)
    except (OSError, ValueError) as error:
        raise UserError(
            f"{path} is damaged ({error}). Remove it: the hold-out is drawn anew, and nothing else changes.",
            code="damaged-file",
        ) from error


def save_secret(out: Path, secret: int) -> None:
    """Write the secret, readable by the owner of the folder alone."""
    path = out / ".secret"
    if not path.exists():
        write_atomically(path, f"{secret:x}\n".encode(), private=True)


@dataclass(frozen=True)
class _StoredRun:
    """The file by which workers recognise a run."""

    run: Annotated[bytes, Bounds(wire.RUN_BYTES, wire.RUN_BYTES)]
    swarm: str = ""


def load_run_id(path: Path, swarm: str = "") -> bytes:
    """Return the number by which workers recognise a run, kept in this file so that they continue with their state.

    swarm: its name, if it has one.
    """
    if not path.exists():
        named = {"swarm": swarm} if swarm else {}
        write_json(path, {"run": os.urandom(wire.RUN_BYTES).hex(), **named}, private=True)
    try:
        stored = from_plain(_StoredRun, read_json(read_text(path)), defaults=True)
    except (OSError, ValueError) as error:
        message = f"{path} is damaged ({error}). Restore it: workers recognise the run by its content."
        raise UserError(message, code="damaged-file") from error
    if swarm and stored.swarm != swarm:
        raise UserError(
            f"{path.parent} is a run of the swarm '{stored.swarm}', not of '{swarm}'. Give --swarm {stored.swarm}.",
            code="wrong-run",
        )
    return stored.run
