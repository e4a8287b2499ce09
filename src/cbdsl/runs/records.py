"""Records of a run: one per round, totals so far, and a summary at the end; all plain JSON."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, get_args

import numpy as np
from numpy.typing import NDArray

from cbdsl import __version__
from cbdsl.algorithm.ledger import NUMBER_BYTES, Kind, by_kind, payload
from cbdsl.algorithm.messages import RoundLog, ServerState
from cbdsl.algorithm.methods import Method
from cbdsl.arrays import Indices
from cbdsl.engines.engine import Engine
from cbdsl.errors import UserError
from cbdsl.runs.metrics import Metric, Spread, find_metric
from cbdsl.spec import Spec, Task
from cbdsl.util.formatting import format_bytes, format_duration
from cbdsl.util.serialize import from_plain, to_plain

Claims = NDArray[np.void]
"""The claims of rounds, with the fields round, worker and score; in a folder as claims.bin, 12 bytes each."""
_CLAIM = np.dtype([("round", "<i4"), ("worker", "<i4"), ("score", "<f4")])
NO_CLAIMS: Claims = np.zeros(0, _CLAIM)

_NOT_IF_EMPTY = ("names", "phases", "metrics", "local_test", "absent")


@dataclass(frozen=True)
class LocalTest:
    """Metrics on the samples that workers held back, over workers."""

    workers: int  # honest workers that were measured
    samples: int  # those that they held back
    metrics: dict[str, Spread]  # of the global model by name, the main one first; empty if there is no model
    personal: dict[str, Spread]  # of the workers' own models; empty if they have none, or if those are elsewhere
    models: int = 0  # how many models are in personal_models.safetensors
    bytes: int = 0  # size of these models, also if they are too large to be kept


@dataclass(frozen=True)
class RoundRecord:
    """One round, a line of rounds.jsonl. Workers are numbers; bytes are those of this round alone.

    >>> from cbdsl import Spec, run
    >>> result = run(Spec(workers=2, rounds=1, model="softmax").with_settings({"data.samples_per_worker": 20}))
    >>> record = result.rounds[0]
    >>> record.round, record.participants, RoundRecord.from_json(record.to_json()) == record
    (1, 2, True)
    """

    round: int
    test_accuracy: float  # of w^g, or of the average; NaN, in JSON null, if it is not a classifier
    global_score: float | None  # F^g; None for FedAvg, and while no upload was accepted
    participants: int  # workers that were ordered to take part
    accepted: list[int]
    refuted: list[int]
    declined: list[int]  # neither used nor refuted; in averaging rounds, left out
    silent: list[int]
    banned: list[int]  # all workers that are banned now
    set_aside: dict[str, str]  # impossible claims, and why
    uploads: int  # models sent up, accepted or not
    uplink_bytes: int
    downlink_bytes: int
    verdicts: list[dict[str, Any]]  # worker, outcome, claimed, measured, reason; of averages, only those left out
    traffic: dict[str, list[int]]  # kind -> [messages, payload bytes]
    wasted_bytes: int  # of uploads that were not used
    seconds: float
    names: dict[str, str] = field(default_factory=dict, compare=False)  # of the workers above, where they have names
    phases: dict[str, float] = field(default_factory=dict, compare=False)  # how the seconds were spent, in served runs
    metrics: dict[str, float | None] = field(default_factory=dict)  # by name, the main one first
    local_test: LocalTest | None = None  # in rounds in which `data.local_test_every` asks for it
    absent: int = 0  # participants that were not connected, in served runs; no message is counted for them

    @property
    def metric(self) -> str:
        """The name of the main metric."""
        return next(iter(self.metrics), "accuracy")

    @property
    def value(self) -> float:
        """The value of the main metric; NaN if there is none."""
        return _number(self.metrics[self.metric]) if self.metrics else self.test_accuracy

    def to_json(self) -> dict[str, Any]:
        """Return plain values for JSON; fields that only some runs have are left out of others."""
        values = {**asdict(self), "test_accuracy": finite(self.test_accuracy)}
        return {key: value for key, value in values.items() if value or key not in _NOT_IF_EMPTY}

    @staticmethod
    def from_json(values: dict[str, Any]) -> RoundRecord:
        """Invert `to_json`; UserError if a field is missing or of another type."""
        record = from_plain(RoundRecord, values, defaults=True, nan=True)
        if any(kind not in get_args(Kind) or len(counts) != 2 for kind, counts in record.traffic.items()):
            raise UserError("traffic must be pairs of messages and bytes, by kind.", code="wrong-type")
        return record


@dataclass(frozen=True)
class ServerAlone:
    """What the server reaches with D_tr and D_sc alone, with the run's model and optimiser."""

    accuracy: float  # on the test set; NaN, in JSON null, if it is not a classifier
    samples: int
    epochs: int  # chosen on the hold-out
    metrics: dict[str, float | None] = field(default_factory=dict)  # not of classifiers

    @property
    def value(self) -> float:
        """The value of the main metric; NaN if there is none."""
        return _number(next(iter(self.metrics.values()))) if self.metrics else self.accuracy


@dataclass(frozen=True)
class Vote:
    """What the workers' own models reach together: the class that most of them choose."""

    accuracy: float
    certified: float  # the share that is right whatever the attackers vote
    attackers: int

    @staticmethod
    def count(choices: Indices, labels: Indices, classes: int, attackers: int) -> Vote:
        """Count votes. choices: (m, N). Right for certain: more votes ahead than twice the attackers."""
        votes = np.stack([(choices == one).sum(0) for one in range(classes)], axis=1)  # (N, C)
        everyone = np.arange(len(labels))
        right = votes[everyone, labels]
        votes[everyone, labels] = -1
        lead = right - votes.max(1)
        first = np.argmax(votes, 1) > labels  # of equally many votes those for the lower class win
        won = (lead > 0) | ((lead == 0) & first)
        return Vote(float(won.mean()), float((lead > 2 * attackers).mean()), attackers)


@dataclass(frozen=True)
class Summary:
    """The summary of a run, as in summary.json.

    >>> from cbdsl import Spec, run
    >>> result = run(Spec(workers=2, rounds=1, model="softmax").with_settings({"data.samples_per_worker": 20}))
    >>> result.summary.method, result.summary.workers, result.summary.parameters
    ('cb-dsl', 2, 7850)
    """

    method: str
    conversation: str  # swarm: claims and invitations; average: everybody uploads
    preset: str
    shared: str
    model: str
    engine: str
    seed: int
    workers: int
    parameters: int
    rounds: int
    final_accuracy: float  # NaN, in JSON null, if the task is not classification
    best_accuracy: float
    final_score: float | None
    uploads: int
    uplink_bytes: int
    downlink_bytes: int
    model_uplink_bytes: int  # uploads alone, without scores
    wasted_uplink_bytes: int  # uploads that were not used
    fedavg_model_uplink_bytes: int  # what FedAvg would have uploaded in as many rounds with as many participants
    banned: list[int]
    honest_banned: int  # how many of them were not attackers
    byzantine: list[int]  # the attackers; the server is not told
    attack: str
    codec: str  # codecs up and down; empty: none
    defence: str  # the aggregator, or defences beyond the paper; empty: none
    attack_success: float | None  # share of triggered test samples classified as the attack's target
    class_accuracy: list[float | None]  # of the final model by class; None where the test set has no sample
    aimed_accuracy: float | None  # the lowest of the classes that the attack aims at; None without such
    traffic: dict[str, list[int]]
    seconds: float
    spec_key: str
    version: str
    worst_tenth: float | None = None  # mean of the main metric over the worst tenth of workers that learn alone
    server_alone: ServerAlone | None = None  # not in the paper; None where it was not measured
    honest_unused: int = 0  # uploads of workers that are not attackers, and that no global model contains
    task: Task = "classification"
    loss: str = "cross-entropy"
    metrics: dict[str, float | None] = field(default_factory=dict)  # of the final model by name, the main one first
    best: float | None = None  # of the main metric, by round
    vote: Vote | None = None  # of workers that learn alone
    local_test: LocalTest | None = None  # None if workers held back no samples
    epsilon: float | None = None  # of differential privacy, where the method has it

    def to_json(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        values: dict[str, Any] = to_plain(asdict(self))
        if self.server_alone is not None and not self.server_alone.metrics:
            del values["server_alone"]["metrics"]
        return values

    @property
    def metric(self) -> str:
        """The name of the main metric."""
        return next(iter(self.metrics), "accuracy")

    @property
    def final_value(self) -> float:
        """The main metric of the final model; NaN if there is none."""
        own = self.task != "classification" and bool(self.metrics)
        return _number(self.metrics[self.metric]) if own else self.final_accuracy

    @property
    def best_value(self) -> float:
        """The best of the main metric over the rounds; NaN if there is none."""
        return self.best_accuracy if self.task == "classification" else _number(self.best)


@dataclass(frozen=True)
class FinalMeasurements:
    """Measurements of the final model of a run."""

    class_accuracy: tuple[float | None, ...]
    attack_success: float | None = None
    aims: tuple[int, ...] = ()  # classes that the attackers aim at
    worst_tenth: float | None = None
    vote: Vote | None = None
    server_alone: ServerAlone | None = None
    metrics: dict[str, float | None] = field(default_factory=dict)
    task: Task = "classification"
    loss: str = "cross-entropy"
    local_test: LocalTest | None = None

    @property
    def aimed_accuracy(self) -> float | None:
        """The lowest accuracy among the classes aimed at."""
        return lowest_of(self.class_accuracy, self.aims)


@dataclass
class RunTotals:
    """Sums over the rounds that a run has played so far."""

    rounds: int = 0
    uploads: int = 0
    uplink_bytes: int = 0
    downlink_bytes: int = 0
    wasted_bytes: int = 0
    seconds: float = 0.0
    best: float = math.nan  # of the main metric
    traffic: dict[str, list[int]] = field(default_factory=dict)  # kind -> [messages, payload bytes]
    complete: int = 0  # rounds in which all participants were there
    present: int = 0  # participants that were there, in the other rounds

    def fedavg_uploads(self, participants: int) -> int:
        """Return how many models FedAvg would have uploaded with those who were there; participants: the spec's."""
        return self.complete * participants + self.present

    def add(self, line: RoundRecord) -> None:
        """Count one more round."""
        self.rounds += 1
        self.uploads += line.uploads
        self.uplink_bytes += line.uplink_bytes
        self.downlink_bytes += line.downlink_bytes
        self.wasted_bytes += line.wasted_bytes
        self.seconds += line.seconds
        self.complete += not line.absent
        self.present += line.participants - line.absent if line.absent else 0
        if find_metric(line.metric).is_better(line.value, self.best):
            self.best = line.value
        for kind, (messages, payload_bytes) in line.traffic.items():
            total = self.traffic.setdefault(kind, [0, 0])
            total[0] += messages
            total[1] += payload_bytes

    @staticmethod
    def of(records: Iterable[RoundRecord]) -> RunTotals:
        """Sum up these rounds."""
        totals = RunTotals()
        for line in records:
            totals.add(line)
        return totals


def lowest_of(accuracies: Sequence[float | None], classes: Iterable[int]) -> float | None:
    """Return the lowest accuracy among some classes; None if none of them is in the test set."""
    found = [accuracies[one] for one in classes if 0 <= one < len(accuracies)]
    return min((value for value in found if value is not None), default=None)


def claims_of(log: RoundLog) -> Claims:
    """Return the claims of all workers in a round as an array."""
    found = np.empty(len(log.claims), _CLAIM)
    found["round"], found["worker"] = log.round, list(log.claims)
    with np.errstate(over="ignore"):  # of an attacker
        found["score"] = [claim.score for claim in log.claims.values()]
    return found


def record(
    log: RoundLog,
    state: ServerState,
    participants: int,
    accuracy: float,
    seconds: float,
    metrics: dict[str, float | None] | None = None,
    local_test: LocalTest | None = None,
) -> RoundRecord:
    """Build the record of a round. metrics: all of them, by name."""
    invited = [asdict(verdict) for verdict in log.verdicts if verdict.claimed is not None or verdict.reason]
    for verdict in invited:
        del verdict["payload"]
    return RoundRecord(
        round=log.round,
        test_accuracy=accuracy,
        global_score=finite(state.global_score),
        participants=participants,
        accepted=log.outcome("accepted"),
        refuted=log.outcome("refuted"),
        declined=log.outcome("declined"),
        silent=log.outcome("silent"),
        banned=sorted(state.banned),
        set_aside={str(worker): reason for worker, reason in log.set_aside.items()},
        uploads=sum(item.messages for item in log.traffic if item.kind == "upload"),
        uplink_bytes=payload(log.traffic, "up"),
        downlink_bytes=payload(log.traffic, "down"),
        verdicts=[{**verdict, "measured": finite(verdict["measured"])} for verdict in invited],
        traffic={kind: [total.messages, total.payload] for kind, total in by_kind(log.traffic).items()},
        wasted_bytes=sum(verdict.payload for verdict in log.verdicts if verdict.outcome != "accepted"),
        seconds=seconds,
        metrics=metrics or {},
        local_test=local_test,
        absent=log.absent,
    )


def summarise(
    spec: Spec,
    key: str,
    records: Sequence[RoundRecord],
    method: Method,
    engine: Engine,
    byzantine: Sequence[int],
    finale: FinalMeasurements,
) -> Summary:
    """Build the summary of a run from its records and the measurements at its end."""
    last, totals = records[-1], RunTotals.of(records)
    return Summary(
        method=spec.method,
        conversation=method.conversation,
        preset=spec.preset,
        shared=spec.shared,
        model=spec.model,
        engine=engine.name,
        seed=spec.seed,
        workers=spec.workers,
        parameters=engine.size,
        rounds=totals.rounds,
        final_accuracy=last.test_accuracy,
        best_accuracy=totals.best if finale.task == "classification" else math.nan,
        final_score=last.global_score,
        uploads=totals.uploads,
        uplink_bytes=totals.uplink_bytes,
        downlink_bytes=totals.downlink_bytes,
        model_uplink_bytes=totals.traffic.get("upload", [0, 0])[1],
        wasted_uplink_bytes=totals.wasted_bytes,
        fedavg_model_uplink_bytes=totals.fedavg_uploads(spec.participants) * engine.size * NUMBER_BYTES,
        banned=last.banned,
        honest_banned=len(set(last.banned) - set(byzantine)),
        byzantine=sorted(byzantine),
        attack=spec.attack.name if byzantine else "",
        codec="" if {spec.codec.up, spec.codec.down} == {"none"} else f"{spec.codec.up} up, {spec.codec.down} down",
        defence=describe(spec),
        attack_success=finale.attack_success,
        class_accuracy=list(finale.class_accuracy),
        aimed_accuracy=finale.aimed_accuracy,
        traffic=totals.traffic,
        seconds=round(totals.seconds, 3),
        spec_key=key,
        version=__version__,
        worst_tenth=finale.worst_tenth,
        vote=finale.vote,
        server_alone=finale.server_alone,
        honest_unused=sum(len(set(one.declined) - set(byzantine)) for one in records),
        task=finale.task,
        loss=finale.loss,
        metrics=finale.metrics,
        best=finite(totals.best),
        epsilon=finite(method.epsilon(totals.rounds, spec.participants / spec.workers)),
        local_test=finale.local_test,
    )


def describe(spec: Spec) -> str:
    """Describe a server's defences beyond the paper in a few words."""
    words = [spec.defence.aggregator] * (spec.defence.aggregator != "mean") + ["guard"] * spec.defence.guard
    if spec.selection.name != "best":
        words.append(f"{spec.selection.name} {spec.selection.k}" if spec.selection.k else spec.selection.name)
    return ", ".join(words)


def _number(value: float | None) -> float:
    return math.nan if value is None else value


def finite(value: float | None) -> float | None:
    """Return the value, or None where JSON has no number for it."""
    return value if value is not None and math.isfinite(value) else None


def summary_rows(summary: Summary) -> list[tuple[str, str]]:
    """Return the summary as rows of a name and a text."""
    share = summary.model_uplink_bytes / summary.fedavg_model_uplink_bytes
    metric = find_metric(summary.metric)
    rows = [
        *_metric_rows(summary),
        (
            "uploads",
            f"{summary.uploads:,} models in {summary.rounds} rounds ({format_bytes(summary.model_uplink_bytes)})",
        ),
    ]
    if summary.worst_tenth is not None:
        rows.append(("worst tenth", f"{metric.text(summary.worst_tenth)}, the mean of the worst tenth of the workers"))
    if summary.local_test is not None:
        rows += _local_test_rows(summary.local_test)
    if summary.vote is not None:
        rows.append(
            (
                "vote",
                f"{summary.vote.accuracy:.2%} by the vote of all models; {summary.vote.certified:.2%} whatever any "
                f"{summary.vote.attackers} workers vote",
            )
        )
    rows += _privacy_rows(summary)
    if summary.server_alone is not None:
        rows.append(("server alone", describe_server_alone(summary.server_alone, metric)))
        if summary.task == "classification" and summary.server_alone.value > summary.final_value:
            rows.append(("", "a swarm pays where labels are scarce: cbdsl run small-iid, or small-noniid"))
    if summary.conversation == "swarm":
        fedavg_bytes = summary.fedavg_model_uplink_bytes
        fedavg = f"{fedavg_bytes // (NUMBER_BYTES * summary.parameters):,} models ({format_bytes(fedavg_bytes)})"
        saving = f", {1 / share:.1f} times as much" if share else ""
        plain = " without a codec" if summary.codec else ""
        rows.append(("compared with", f"FedAvg{plain}: {fedavg}{saving}"))
    if summary.codec:
        rows.append(("codec", summary.codec))
    rows.append(
        (
            "traffic",
            f"{format_bytes(summary.uplink_bytes)} up, {format_bytes(summary.downlink_bytes)} down, payload alone",
        )
    )
    if summary.byzantine:
        caught = sorted(set(summary.byzantine) & set(summary.banned))
        rows.append(("attackers", f"{_workers(summary.byzantine)}; banned: {_names(caught) or 'none'}"))
    honest = sorted(set(summary.banned) - set(summary.byzantine))
    if honest:
        rows.append(("honest but banned", _workers(honest)))
    if summary.attack_success is not None:
        rows.append(("attack success", f"{summary.attack_success:.1%} of the targeted test images"))
    if summary.aimed_accuracy is not None:
        rows.append(("aimed-at classes", f"{summary.aimed_accuracy:.1%} accuracy in the worst of them"))
    if summary.wasted_uplink_bytes:
        why = "left out" if summary.conversation == "average" else "refuted or declined"
        told = f"; {summary.honest_unused:,} of them by honest workers" if summary.honest_unused else ""
        told += "; whose and why: `verdicts` in rounds.jsonl" if summary.conversation == "average" else ""
        rows.append(("wasted", f"{format_bytes(summary.wasted_uplink_bytes)} of uploads that were {why}{told}"))
    rows.append(
        ("time", f"{format_duration(summary.seconds)} ({summary.seconds:.1f} s) on the {summary.engine} engine")
    )
    return rows


def _privacy_rows(summary: Summary) -> list[tuple[str, str]]:
    if summary.epsilon is None:
        return []
    about = f"for whether a worker took part in the {summary.rounds} rounds"
    return [("privacy", f"epsilon {summary.epsilon:.4g} {about}, at the method's delta; lower is more private")]


def _metric_rows(summary: Summary) -> list[tuple[str, str]]:
    """Return a row per metric; of a classifier its accuracy alone."""
    metric = find_metric(summary.metric)
    final, best = metric.text(summary.final_value), metric.text(summary.best_value)
    if summary.task == "classification":
        return [("accuracy", f"{final} on the test set (best round: {best})")]
    others = [(name, find_metric(name), each) for name, each in summary.metrics.items() if name != summary.metric]
    return [
        (metric.title, f"{final} on the test set, {metric.better} is better (best round: {best})"),
        *((kind.title or name, f"{kind.text(each)}, {kind.better} is better") for name, kind, each in others),
    ]


def _local_test_rows(found: LocalTest) -> list[tuple[str, str]]:
    """Return a row for the global model and one for the workers' own models, by the main metric."""
    rows = []
    for name, spreads in (("each worker", found.metrics), ("own models", found.personal)):
        for key, spread in list(spreads.items())[:1]:
            metric = find_metric(key)
            text = f"{metric.title or key} {metric.text(spread.mean)}, worst tenth {metric.text(spread.worst_tenth)}"
            text += f", best {metric.text(spread.best)}, deviation {metric.text(spread.deviation)}"
            where = f"on samples that {spread.workers:,} workers held back"
            rows.append((name, f"{text}, {where}; {spread.better} is better"))
    if found.bytes:
        size = format_bytes(found.bytes)
        kept = f"personal_models.safetensors has {found.models:,} of their models ({size})"
        rows.append(("", kept if found.models else f"their models are not kept: they take {size}"))
    return rows


def describe_server_alone(alone: ServerAlone, metric: Metric | None = None) -> str:
    """Describe what the server reaches without a swarm. metric: the main one; accuracy if None."""
    value = (metric or find_metric("accuracy")).text(alone.value)
    return (
        f"{value} on the test set, trained on D_tr and D_sc ({alone.samples:,} samples, {alone.epochs} "
        "epochs chosen on the hold-out); not in the paper"
    )


def _workers(numbers: list[int]) -> str:
    return f"worker{'' if len(numbers) == 1 else 's'} {_names(numbers)}"


def _names(workers: list[int]) -> str:
    shown = ", ".join(map(str, workers[:10]))
    return shown + (f" and {len(workers) - 10} more" if len(workers) > 10 else "")
