"""Builds everything a resolved spec names: data, network, engine, server, attackers and the initial model."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from cbdsl import register
from cbdsl.algorithm.aggregators import (
    AggregationRule,
    TrialSet,
    TrustedReference,
    aggregate,
    check_majority,
    weighs_by_size,
)
from cbdsl.algorithm.alone import AloneMethod, AloneTraining, LocalOnly, ServerOnly
from cbdsl.algorithm.messages import ServerState, Swarm, WorkerId, commitment_of
from cbdsl.algorithm.methods import Method, kept_arrays
from cbdsl.algorithm.round import Combination, Server, ServerPolicy, rate_at
from cbdsl.algorithm.selection import Selection
from cbdsl.algorithm.verification import (
    HoldOutLosses,
    Verifier,
    add_guard,
    make_copy_check,
    make_verifier,
    trust_uploads,
)
from cbdsl.algorithm.worker_round import LocalWorkers, TrainingSet, WorkerData, draw_batches, make_scorer, pad_rows
from cbdsl.algorithm.worker_table import room_in_file
from cbdsl.arrays import Bools, Doubles, Floats, Indices, NamedArrays, Samples, copy_memory
from cbdsl.attacks.adversary import Adversary, PublicData, make_tools
from cbdsl.attacks.attack import Attack, make_attack
from cbdsl.codecs.envelope import make_codecs
from cbdsl.data.dataset import Dataset, load
from cbdsl.data.partition import Partition, Split, alter_features, split
from cbdsl.data.shared import add_shared
from cbdsl.engines.augmentations import Augmentation, build_augmentation
from cbdsl.engines.choose import choose_engine
from cbdsl.engines.engine import Engine, Sgd
from cbdsl.engines.loss import CROSS_ENTROPY, Loss, LossFunction, make_loss
from cbdsl.engines.native_engine import default_threads
from cbdsl.errors import UserError, shown
from cbdsl.models.architecture import Architecture
from cbdsl.models.layers import ArchitectureError
from cbdsl.models.network import Network, network_of, read_tensors
from cbdsl.models.saved_model import require_task
from cbdsl.presets import preset
from cbdsl.register import CUSTOM, Register
from cbdsl.rng import seed_of, stream
from cbdsl.runs.metrics import Evaluation, Metric, Spread, build_metrics, measure_all
from cbdsl.runs.records import FinalMeasurements, Vote
from cbdsl.runs.result import Result
from cbdsl.spec import INIT_SERVER, DropoutSpec, Options, Spec, Task, init_file, words
from cbdsl.swarms.local import LocalSwarm, bytes_of_state, workers_at_once
from cbdsl.util.computed import Computed
from cbdsl.util.memory import require_memory

if TYPE_CHECKING:
    from torch import nn

CALIBRATING = 1000  # samples of D_G for the statistics with which a model with BatchNorm is scored
ModelBuilder = Callable[[], "nn.Module"]
Client = Dataset | Samples | tuple[ArrayLike, ArrayLike]
Layers = tuple[tuple[int, int], ...]
Init = Result | Path | str | NDArray[Any]


@dataclass(frozen=True, eq=False)
class UserParts:
    """The parts that a user gives as Python objects; None: what the spec names."""

    model: ModelBuilder | None = None
    data: Dataset | None = None
    method: Method | None = None
    selection: Selection | None = None
    aggregator: AggregationRule | None = None
    attack: Attack | None = None
    partition: Partition | None = None
    augmentation: Augmentation | None = None
    init: Floats | Path | None = None  # (D,), or (P,) with frozen weights, or a model's file
    loss: LossFunction | None = None
    make_swarm: Callable[[Experiment], Swarm] | None = None


@dataclass(frozen=True, eq=False)
class Experiment:
    """Everything that a run is made of: data, network, engine, server, attackers and initial models."""

    spec: Spec
    dataset: Dataset
    split: Split
    network: Network
    engine: Engine
    initial: Floats  # (1, D), or (U, D) if workers start apart
    server: Server
    attack: Attack
    byzantine: tuple[WorkerId, ...]
    note: str  # why the fastest engine is not used; empty if it is
    spec_key: str  # the spec's, with plugins as they were imported
    make_swarm: Callable[[Experiment], Swarm] | None = None
    loss: Loss = CROSS_ENTROPY
    augmentation: Augmentation | None = None

    @staticmethod
    def prepare(
        spec: Spec, given: UserParts | None = None, threads: int | None = None, deal: bool = True, secret: int = 0
    ) -> Experiment:
        """Build what a resolved spec names, or raise a UserError that says what is wrong with it.

        deal: give workers their samples; not if they have their own, somewhere else. secret: a number that workers do
        not know, for what must not follow from the seed.
        """
        given = given or UserParts()
        if threads is not None and threads < 1:
            raise UserError(f"threads must be at least 1; given {threads}.", code="out-of-range")
        attack = given.attack or _attack(spec)
        dataset = _dataset(spec, given.data)
        attack.check_task(dataset.task, spec.attack.name)
        partition = given.partition or _partition(spec)
        parts = split(
            dataset.train.labels, spec.data, spec.workers if deal else 0, spec.seed, dataset.clients, partition, secret,
            task=dataset.task, features=dataset.train.features,
        )  # fmt: skip
        dataset = replace(dataset, train=alter_features(dataset.train, parts, partition, spec.seed))
        dataset, parts = add_shared(dataset, parts, spec.data)
        method = given.method or build_method(spec)
        averages = method.conversation != "swarm"
        network = network_of(spec, dataset.shape, dataset.outputs, given.model, dataset.task, statistics=averages)
        network, start = _start(spec, network, given.init, dataset.task)
        if network.keeps_statistics:
            public = np.concatenate([parts.shared_training, parts.shared_scoring])[:CALIBRATING]
            network = replace(network, calibration=dataset.train.features[public])
        loss = make_loss(spec, dataset.task, given.loss)
        augmentation = build_augmentation(spec, dataset.shape, given.augmentation)
        wanted = "torch" if method.adds_loss and spec.engine == "auto" else spec.engine
        choice = choose_engine(
            wanted, network, dataset.shape, threads or default_threads(), spec.device, loss, augmentation
        )
        engine = choice.engine
        server = build_server(spec, engine, dataset.train, parts, given, secret, _layers(network))
        if spec.local.batchnorm == "own":
            server = replace(server, own=_own_weights(spec, network))
        _check_memory(spec, parts, engine.size, server if deal and given.make_swarm is None else None)
        initial = draw_initial(spec, network, start)
        if given.init is None and spec.init == INIT_SERVER:
            own = ServerOnly("shared" if _trains_on_scoring(server) else "training")
            initial[0] = build_alone_training(spec, own, engine, dataset.train, parts).train(initial[0])[0]
        return Experiment(
            spec, dataset, parts, network, engine, initial, server, attack,
            byzantine_workers(spec), choice.note, spec.key(), given.make_swarm, loss, augmentation,
        )  # fmt: skip

    @cached_property
    def swarm(self) -> Swarm:
        """The workers: in this process, on a cluster, or where the user has them."""
        return self.make_swarm(self) if self.make_swarm is not None else self.memory_swarm

    @cached_property
    def memory_swarm(self) -> LocalSwarm:
        """The workers in memory, made when they are first needed."""
        spec, method = self.spec, self.server.worker_method
        held, adversary = self.worker_data_and_adversary()
        workers = LocalWorkers(
            self.engine, held, spec.local, spec.swarm, spec.seed, range(spec.workers), method.gradients,
            self.server.policy.codecs.up,
        )  # fmt: skip
        return LocalSwarm(method, workers, self.initial, adversary, spec.defence.commitment)

    def require_messages(self) -> None:
        """Raise UserError for settings that workers in other processes cannot carry out."""
        if self.byzantine and self.attack.omniscient:
            raise UserError(
                f"The attack '{self.spec.attack.name}' needs all workers' models; only the simulator has them. Use "
                "cbdsl run, or an attack that needs its own alone, such as poisoned-fl or sign-flip.",
                code="not-supported",
            )
        if self.spec.dropout != DropoutSpec():
            raise UserError(
                "dropout.* is for simulations, and these workers are separate processes. Stop some of them instead, or "
                "simulate with cbdsl run.",
                code="no-effect",
            )
        if self.spec.data.local_test and not self.split.tests:
            raise UserError(
                f"data.local_test={self.spec.data.local_test:g} measures models on samples that workers hold back. "
                "Here the workers' samples never leave their devices, so the server has none to measure on. Leave it "
                "out, or use cbdsl run or cbdsl swarm.",
                code="not-supported",
            )
        if self.server.own is not None:
            raise UserError(
                "local.batchnorm=own is for workers in this process or on a Ray cluster. Other workers receive the "
                "network as data, which cannot describe BatchNorm. Leave it out, or use cbdsl run.",
                code="not-supported",
            )
        if self.server.alone is not None:
            raise UserError(
                f"The method '{self.spec.method}' has no messages, so workers elsewhere would be idle. Run it here: "
                f"cbdsl run --method {self.spec.method}",
                code="conflict",
            )

    def worker_data_and_adversary(self) -> tuple[WorkerData, Adversary]:
        """Build each worker's data (poisoned where it attacks) and the adversary."""
        held = make_worker_data(self.split, self.dataset.train, self.spec)
        adversary, lessons = self._adversary(held), held.training
        if isinstance(lessons, Computed):
            poisoner = adversary.poisoner  # without the engine: it is sent to shards
            training: Sequence[TrainingSet] = Computed(
                lambda worker: poisoner.lesson(worker, lessons[worker]), len(lessons)
            )
            return replace(held, training=training if self.byzantine else lessons), adversary
        poisoned = adversary.poisoned()
        training = tuple(poisoned.get(worker, lesson) for worker, lesson in enumerate(lessons))
        return replace(held, training=training), adversary

    @property
    def remembers(self) -> bool:
        """Whether workers keep anything from one round to the next."""
        return bool(kept_arrays(self.server.worker_method, self.server.policy.codecs.up))

    @cached_property
    def key(self) -> str:
        """A hash of what decides the run's numbers: the spec, the engine that was chosen, a model it starts from.

        The run's folder keeps copies of plugins, and compares them itself. Computed once: files may go meanwhile.
        """
        start = f"-{commitment_of(self.initial[0]).hex()[:8]}" if self.spec.init else ""
        frozen = f"-{self.network.frozen.digest[:8]}" if self.network.frozen else ""
        return f"{replace(self.spec, plugins=()).key()}-{self.engine.name}{start}{frozen}"

    def first_state(self) -> ServerState:
        """Return the server's state before round 1."""
        return self.server.first_state(self.initial[0])

    def test_accuracy(self, state: ServerState) -> float:
        """Measure the share of the test set that w^g classifies correctly; of a baseline, the mean over its models."""
        return float(self.test_accuracies(state).mean()) if self.dataset.task == "classification" else math.nan

    @cached_property
    def metrics(self) -> dict[str, Metric]:
        """The metrics of the task by name, the main one first."""
        return build_metrics(self.spec, self.dataset.task)

    def evaluate(self, weights: Floats) -> Evaluation:
        """Return what metrics are measured on, for one model (D,)."""
        return Evaluation(self.engine, weights, self.dataset, self.dataset.train, self.unseen)

    @property
    def unseen(self) -> Indices:
        """The normal samples for choosing a threshold: the hold-out, or D_sc without one."""
        return self.split.holdout if len(self.split.holdout) else self.split.shared_scoring

    def test_metrics(self, state: ServerState) -> dict[str, float | None]:
        """Measure every metric of w^g; of a baseline, the means over its models."""
        return measure_all(self.metrics, [self.evaluate(weights) for weights in self.server.models(state)])

    def test_accuracies(self, state: ServerState) -> Doubles:
        """Measure the accuracy of w^g, or of each model of a baseline, (m,)."""
        everything = np.arange(len(self.dataset.test), dtype=np.int32)
        return self.engine.accuracies(self.server.models(state), self.dataset.test, everything)

    def class_accuracy(self, state: ServerState) -> tuple[float | None, ...]:
        """Measure the same by class, to four digits; None where the test set has no sample of a class."""
        labels, weights = self.dataset.test.labels, self.server.models(state)
        members = [np.flatnonzero(labels == one).astype(np.int32) for one in range(self.dataset.classes)]
        return tuple(
            round(float(self.engine.accuracies(weights, self.dataset.test, rows).mean()), 4) if len(rows) else None
            for rows in members
        )

    def measure_final(self, state: ServerState) -> FinalMeasurements:
        """Measure what is measured once, at the end."""
        aims = self.attack.aims if self.byzantine else ()
        return FinalMeasurements(
            self.class_accuracy(state), self.attack_success(state), aims, self.worst_tenth(state),
            self.count_votes(state), metrics=self.test_metrics(state), task=self.dataset.task, loss=self.loss.name,
        )  # fmt: skip

    def worst_tenth(self, state: ServerState) -> float | None:
        """Measure the mean of the main metric over the worst tenth of a baseline's models; None where there is one."""
        models = self.server.models(state)
        if len(models) == 1:
            return None
        metric = next(iter(self.metrics.values()))
        spread = Spread.of([metric.measure(self.evaluate(weights)) for weights in models], metric.better)
        return spread.worst_tenth if spread else None

    def count_votes(self, state: ServerState) -> Vote | None:
        """Count the votes of workers that learn alone on the test set; None for other methods and tasks."""
        method = self.server.method
        if not isinstance(method, LocalOnly) or self.dataset.task != "classification":
            return None
        choices = np.stack([self.evaluate(one).outputs.argmax(1) for one in self.server.models(state)])
        return Vote.count(choices, self.dataset.test.labels, self.dataset.classes, method.attackers)

    def attack_success(self, state: ServerState) -> float | None:
        """Measure the share of the attack's victims among the test samples that are classified as its target."""
        target, test = self.attack.target, self.dataset.test
        if target is None or not self.byzantine or self.dataset.task != "classification":
            return None
        scoring = self.dataset.train.taken(self.split.shared_scoring)
        others = np.flatnonzero(self.attack.victims(test, scoring)).astype(np.int32)
        if not len(others):
            return None
        tools = make_tools(self.engine, state.global_best, scoring, scoring, self.spec.local)
        features = self.attack.triggered_for(test.features[others], tools)
        marked = Samples(features, np.full(len(others), target, np.int32))
        return float(self.engine.accuracies(state.global_best[None], marked, np.arange(len(others), dtype=np.int32))[0])

    def _adversary(self, held: WorkerData) -> Adversary:
        spec, train, parts = self.spec, self.dataset.train, self.split
        private = np.concatenate([parts.shared_scoring, parts.holdout])
        others = np.setdiff1d(np.arange(len(train), dtype=np.int32), private)
        named = CUSTOM not in {spec.model, spec.loss}  # nothing here tells parts without a name apart
        known = named and self.network.frozen is None
        return Adversary(
            self.attack,
            self.byzantine,
            PublicData(train, parts.shared_scoring, others, self.dataset.classes),
            held=Computed(lambda worker: held.training[worker].indices, len(held.training)),
            engine=self.engine,
            initial=self.initial[0],
            seed=spec.seed,
            swarm_size=spec.workers,
            vectors=self.server.method.vectors,
            codec=self.server.policy.codecs.up,
            network=_described(self.network) if self.byzantine else None,
            local=spec.local,
            craft_key=(spec.model, spec.seed, spec.data, self.loss) if known else None,
        )


def _described(network: Network) -> Architecture | None:
    """Return the network as data; None if it cannot be described, or if flat weights are only a part of it."""
    try:
        return network.description() if network.frozen is None else None
    except ArchitectureError:
        return None


def make_worker_data(parts: Split, samples: Samples, spec: Spec) -> WorkerData:
    """Return each worker's data (Sec. VI.C): without D_sc a worker scores on its own data."""
    extra = parts.shared_training if spec.shares_training else parts.shared_training[:0]
    lessons = Computed(
        lambda worker: TrainingSet(samples, np.concatenate([parts.workers[worker], extra])), len(parts.workers)
    )
    if isinstance(parts.workers, Computed):
        return WorkerData(lessons, samples, parts.shared_scoring if spec.shares_scoring else parts.workers)
    scoring = parts.shared_scoring if spec.shares_scoring else pad_rows(parts.workers)
    return WorkerData(tuple(lessons), samples, scoring)


def byzantine_workers(spec: Spec) -> tuple[WorkerId, ...]:
    """Draw the attackers at random."""
    drawn = stream(spec.seed, "byzantine").permutation(spec.workers)[: spec.attack.byzantine]
    return tuple(sorted(int(worker) for worker in drawn))


def honest_workers(experiment: Experiment) -> Indices:
    """Return the workers that are not attackers."""
    everybody = np.arange(experiment.spec.workers, dtype=np.int32)
    return np.setdiff1d(everybody, np.asarray(experiment.byzantine, np.int32))


def _own_weights(spec: Spec, network: Network) -> Bools:
    """Return the weights of BatchNorm layers, (D,), which stay on each worker."""
    places = network.norm_places()
    if not places.any():
        raise UserError(
            f"local.batchnorm=own keeps the weights of BatchNorm layers on their worker, but the model '{spec.model}' "
            "has no trainable ones. Leave it out, or give a model with nn.BatchNorm1d or nn.BatchNorm2d.",
            code="no-effect",
        )
    return places


def _check_memory(spec: Spec, parts: Split, size: int, server: Server | None) -> None:
    """Raise UserError if a run's arrays do not fit into memory. server: None if the workers are elsewhere."""
    starts = spec.workers if spec.swarm.start == "apart" else 1
    needed = 4 * starts * size
    if server is not None:
        kept, moved = bytes_of_state(server.worker_method, spec, size, server.policy.codecs.up, spec.workers)
        uploads = 4 * spec.participants * server.method.vectors * size * (server.method.conversation == "average")
        longest = parts.most_samples + len(parts.shared_training)
        batch = spec.local.batch_size
        per_epoch = -(-longest // batch) * batch
        epochs = -(-spec.local.steps * batch // per_epoch) if spec.local.steps else spec.local.epochs
        at_once = min(spec.participants, workers_at_once(size))
        needed += max(0, kept - room_in_file()) + moved + uploads + 8 * at_once * epochs * per_epoch
    require_memory(
        needed,
        f"{spec.workers:,} workers with a model of {size:,} numbers, local.epochs={spec.local.epochs:,}, local.steps="
        f"{spec.local.steps:,} and local.batch_size={spec.local.batch_size:,} take",
        "Set some of them lower.",
    )


def build_server(
    spec: Spec, engine: Engine, samples: Samples, split: Split, given: UserParts, secret: int = 0, layers: Layers = ()
) -> Server:
    """Build the server of a spec. secret: a number unknown to workers; 0: use the seed.

    layers: see `TrustedReference`.
    """
    method = given.method or build_method(spec)
    method.epsilon(1, 1.0)  # raises before the run if the accountant is not installed
    selection = given.selection or build_selection(spec)
    cap = spec.defence.invitations and max(spec.defence.invitations, max(spec.defence.declared, 0) + selection.most)
    return Server(
        spec,
        method,
        build_verifier(spec, method, engine, samples, split, secret),
        ServerPolicy(selection, cap, spec.defence.commitment, make_codecs(spec), secret or spec.seed),
        build_combination(spec, engine, samples, split, given.aggregator, secret, layers),
        build_alone_training(spec, method, engine, samples, split) if isinstance(method, AloneMethod) else None,
    )


def build_alone_training(
    spec: Spec, method: AloneMethod, engine: Engine, samples: Samples, split: Split
) -> AloneTraining:
    """Build the training of a baseline."""
    assigned = method.assign(split, spec.shares_training)
    empty = [number for number, own in enumerate(assigned.samples) if not len(own)]
    if empty:
        raise UserError(
            f"The method '{spec.method}' has no samples to learn from: D_tr has {len(split.shared_training):,}, D_sc "
            f"{len(split.shared_scoring):,}. Set data.shared_training higher, or options.server-only.use=shared.",
            code="out-of-range",
        )
    return AloneTraining(assigned, engine, samples, split.holdout, spec.local, spec.seed)


def build_method(spec: Spec) -> Method:
    """Build the method that a spec names, with its settings."""
    made = register.method.make(spec.method, spec.options.of(spec.method))
    if not isinstance(made, Method):
        raise UserError(
            f"The method '{spec.method}' is a {type(made).__name__}; it must be a cbdsl.Method.", code="wrong-type"
        )
    return made


def build_selection(spec: Spec) -> Selection:
    """Build the selection that a spec names, with its settings; `selection.k` is short for `options.NAME.k`."""
    name, options = spec.selection.name, dict(spec.options.of(spec.selection.name))
    if "momentum" in register.selection.settings(name):
        options["momentum"] = spec.server.momentum
    if spec.selection.k:
        if "k" not in register.selection.settings(name):
            raise UserError(
                f"The selection '{name}' has no k; given selection.k={spec.selection.k}. Leave it out.",
                code="unknown-setting",
            )
        options["k"] = spec.selection.k
    made = register.selection.make(name, options)
    if not isinstance(made, Selection):
        raise UserError(
            f"The selection '{name}' is a {type(made).__name__}; it must be a cbdsl.Selection.", code="wrong-type"
        )
    return made


def verifies_uploads(spec: Spec, method: Method) -> bool:
    """Return whether the server measures uploads on D_sc."""
    return method.conversation == "swarm" and method.verifies and spec.shares_scoring


def build_verifier(
    spec: Spec, method: Method, engine: Engine, samples: Samples, split: Split, secret: int = 0
) -> Verifier:
    """Build what the server judges uploads with: it can measure only where D_sc is shared."""
    if not verifies_uploads(spec, method):
        return trust_uploads(engine.size)
    plain = make_verifier(make_scorer(engine, samples, split.shared_scoring), engine.size, spec.verification.tolerance)
    trains = spec.shares_training and method.gradients and len(split.shared_training)
    if trains:
        plain = replace(plain, copies=make_copy_check(make_trainer(spec, engine, samples, split.shared_training)))
    if not spec.defence.guard:
        return plain

    def private(weights: Floats, round_number: int) -> Doubles:
        """Measure on a random half of the hold-out, another half every round."""
        drawn = stream(secret or spec.seed, "hold-out", round_number).permutation(split.holdout)
        return batch_losses(engine, weights, samples, drawn[: -(-len(drawn) // 2)])

    holdout = HoldOutLosses(
        lambda weights: batch_losses(engine, weights, samples, split.shared_scoring),
        private,
        make_scorer(engine, samples, split.holdout),
    )
    if not trains:
        return add_guard(plain, holdout, spec.defence.false_alarm)
    public = np.concatenate([split.shared_training, split.shared_scoring])
    plain = replace(plain, train=make_trainer(spec, engine, samples, public, secret))
    train = make_trainer(spec, engine, samples, split.shared_training, secret)
    return add_guard(plain, holdout, spec.defence.false_alarm, train)


def batch_losses(engine: Engine, weights: Floats, samples: Samples, indices: Indices) -> Doubles:
    """Return mean losses of a model on at most 100 batches of nearly equal size, (B,)."""
    batches = np.array_split(engine.sample_losses(weights, samples, indices), min(100, len(indices)))
    # Added in their order, one by one, as the native engine does: np.sum's pairs show in the last digits.
    return np.array([np.cumsum(batch)[-1] / len(batch) for batch in batches])


def _layers(network: Network) -> Layers:
    """Return the columns of each tensor of weights, (start, end); empty if some weights are frozen."""
    ends = np.cumsum([0, *(int(np.prod(shape)) for _, shape in network.tensor_shapes())]).tolist()
    return tuple(pairwise(ends)) if network.frozen is None else ()


def build_combination(
    spec: Spec,
    engine: Engine,
    samples: Samples,
    split: Split,
    given: AggregationRule | None = None,
    secret: int = 0,
    layers: Layers = (),
) -> Combination:
    """Build how a server combines models where everybody uploads one. given: a rule of the user's own."""
    name, declared = spec.defence.aggregator, spec.defence.declared

    def size_of(worker: WorkerId) -> int:
        return len(split.workers[worker]) if split.workers else 1  # 1: workers have samples of their own

    if name == "mean" and given is None and weighs_by_size(spec.options.of(name).get("weights", "size")):
        return Combination(size_of)
    if given is None:
        check_majority(name, spec.workers, declared, spec.options.of)
    train = make_trainer(spec, engine, samples, split.shared_training)
    own = split.shared_training if len(split.shared_training) else split.shared_scoring

    def losses(rows: Floats) -> Doubles:
        if not len(split.shared_scoring):
            raise UserError(
                f"The aggregator '{name}' measures losses on D_sc, and data.shared_scoring is 0. Set it higher.",
                code="conflict",
            )
        return engine.losses(rows, samples, split.shared_scoring)

    def gradient(weights: Floats, rows: Indices | None = None) -> Floats:
        return np.asarray(engine.gradients(weights[None], samples, own if rows is None else own[rows])[0])

    tried = split.holdout if len(split.holdout) else split.shared_scoring

    def differentiate(weights: Floats, rows: Indices) -> tuple[float, Floats]:
        found = weights[None], samples, tried[rows]
        return float(engine.losses(*found)[0]), np.asarray(engine.gradients(*found)[0])

    trial = TrialSet(len(tried), lambda rows: engine.losses(rows, samples, tried), differentiate)

    def combine(
        state: ServerState, workers: Sequence[WorkerId], models: Sequence[Floats], sizes: Doubles
    ) -> tuple[Floats, NamedArrays]:
        number = state.round + 1
        trust = TrustedReference(
            state.global_best, lambda: train(state.global_best, number), losses, sizes, np.array(workers, np.int32),
            number, stream(secret or spec.seed, "aggregator", number), gradient, dict(state.rule_memory), trial,
            layers,
        )  # fmt: skip
        combined = aggregate(name, models, declared, trust, given, spec.options.of)
        return combined, copy_memory(trust.memory, f"The aggregator {name}")

    return Combination(size_of, rule=combine)


def make_trainer(
    spec: Spec, engine: Engine, samples: Samples, indices: Indices, secret: int = 0
) -> Callable[[Floats, int], Floats]:
    """Return a function that trains a model at the server as workers do, given the model and the round.

    secret: decides the order of samples, if it is not 0, so that no worker can compute the server's step exactly.
    """
    seed = secret or spec.seed

    def train(weights: Floats, round_number: int) -> Floats:
        rows = draw_batches(indices, spec.local, stream(seed, "root", round_number))
        seeds = np.array([seed_of(seed, "root", round_number, worker=1)], dtype=np.uint64)
        sgd = Sgd.of(spec.local, rate_at(spec, round_number))
        return np.asarray(engine.train(weights[None], samples, rows[None], sgd, seeds)[0])

    return train


def _dataset(spec: Spec, given: Dataset | None) -> Dataset:
    """Return the data of a run, for the task that the spec names."""
    if given is not None:
        return given.as_task(spec.data.task)
    return load(spec.data.source, spec.options.of(spec.data.source), spec.data.task, words(spec.data.target))


def _attack(spec: Spec) -> Attack:
    if not spec.attack.byzantine:
        return Attack()
    if spec.attack.name == CUSTOM:
        raise part_not_given("attack")
    return make_attack(spec)


def part_not_given(argument: str, part: str = "") -> UserError:
    """Build the error for a part that a folder cannot contain."""
    return UserError(
        f"The {part or argument} of this run was given in Python; give it again with {argument}=...",
        code="missing-part",
    )


def _partition(spec: Spec) -> Any:  # noqa: ANN401 - a Partition
    if spec.data.partition == CUSTOM:
        raise part_not_given("partition")
    return register.partition.make(spec.data.partition, spec.options.of(spec.data.partition))


def _trains_on_scoring(server: Server) -> bool:
    """Return whether the server trains on D_sc. Where claims compete with F^g, no claim would beat such a model's."""
    return server.policy.selection.trains and server.verifier.train is not None


def _start(spec: Spec, network: Network, given: Floats | Path | None, task: Task) -> tuple[Network, Floats | None]:
    """Return the network with the frozen weights of a model to start from, and what trains of that model, (D,)."""
    if given is None and spec.init == CUSTOM:
        raise part_not_given("init", "initial model")
    if given is None and spec.init not in {"", INIT_SERVER}:
        given = init_file(spec.init)
    if given is None:
        return network, None
    if isinstance(given, Path):
        tensors = read_tensors(given)
        require_task(given, task)
        given = network.flat(tensors, str(given))
    weights = given
    if weights.shape not in {(network.size,), (network.whole_size,)}:
        raise UserError(
            f"init has {len(weights):,} numbers; the model '{spec.model}' has {network.whole_size:,}. Start from a "
            "model of the same network.",
            code="wrong-shape",
        )
    if not np.isfinite(weights).all():
        raise UserError(f"The model to start from ({spec.init}) has weights that are not finite.", code="out-of-range")
    if len(weights) != network.size:
        network, weights = network.frozen_at(weights), network.trained(weights)
    return network, np.asarray(weights, np.float32)


def draw_initial(spec: Spec, network: Network, given: Floats | None = None) -> Floats:
    """Return the initial models, given or drawn: (1, D), or (U, D) if workers start apart.

    Where workers start apart, only the first one starts from given weights: without gradients equal rows stay equal.
    """
    starts = spec.workers if spec.swarm.start == "apart" else 1
    seeds = [seed_of(spec.seed, "initial-weights", worker=number) for number in range(starts)]
    drawn = [network.initial_weights(seed) for seed in seeds[given is not None :]]
    return np.stack(drawn if given is None else [given, *drawn])


def collect_parts(  # noqa: PLR0913 - all but the first by name
    spec: Spec,
    *,
    model: ModelBuilder | str | None = None,
    data: Dataset | None = None,
    clients: Sequence[Client] | None = None,
    participation: float | None = None,
    init: Init | None = None,
    loss: LossFunction | str | None = None,
    make_swarm: Callable[[Experiment], Swarm] | None = None,
    **parts: object,
) -> tuple[Spec, UserParts]:
    """Return the spec with names for what was given to `run`, and the parts that have no name.

    parts: method, attack, aggregator, selection, partition and augmentation, as objects or by name; None: as the spec
    says.
    """
    if not isinstance(spec, Spec):
        raise UserError(
            f"A run takes a cbdsl.Spec or a preset's name; given {shown(spec)}. Write "
            "cbdsl.Spec().with_settings({...}).",
            code="wrong-type",
        )
    register.load(spec.plugins)
    options: dict[str, dict[str, Any]] = {name: dict(values) for name, values in spec.options.items()}
    current = {
        "method": spec.method,
        "attack": spec.attack.name,
        "aggregator": spec.defence.aggregator,
        "selection": spec.selection.name,
        "partition": spec.data.partition,
        "augmentation": spec.local.augment,
    }
    given = {kind: part for kind, part in parts.items() if part is not None}
    objects = {kind: part for kind, part in given.items() if not isinstance(part, str)}
    names: dict[str, Any] = {**current, **given}
    unnamed: dict[str, Any] = {}
    for kind, part in objects.items():
        names[kind] = _name_of(getattr(register, kind), part, options)
        if names[kind] == CUSTOM:
            unnamed[kind] = part
    workers = spec.workers
    if clients is not None:
        data = _with_clients(spec, data, clients, given.get("partition", "by-client"))
        workers, names["partition"] = len(clients), "by-client"
        options.pop(spec.data.source, None)  # used already
    if "attack" in given and not spec.attack.byzantine:
        raise UserError(
            "attack is given, but no worker is an attacker. Set attack.byzantine in the spec.", code="no-effect"
        )
    source = data.name if data is not None else spec.data.source
    if source in register.dataset and not _is_registered(data, source):
        source = CUSTOM
    chosen = replace(
        spec,
        model=model if isinstance(model, str) else CUSTOM if model is not None else spec.model,
        method=names["method"],
        workers=workers,
        participation=spec.participation if participation is None else participation,
        init=spec.init if init is None else str(init) if isinstance(init, (str, Path)) else CUSTOM,
        data=replace(spec.data, source=source, partition=names["partition"]),
        local=replace(spec.local, augment=names["augmentation"]),
        attack=replace(spec.attack, name=names["attack"], scale=0.0 if "attack" in objects else spec.attack.scale),
        defence=replace(spec.defence, aggregator=names["aggregator"]),
        selection=replace(spec.selection, name=names["selection"], k=0 if "selection" in objects else spec.selection.k),
        options=Options(options),
        loss=loss if isinstance(loss, str) else CUSTOM if loss is not None else spec.loss,
    )
    own_loss = None if isinstance(loss, str) else loss
    own_model = None if isinstance(model, str) else model
    return chosen, UserParts(
        model=own_model, data=data, init=_weights(init), loss=own_loss, make_swarm=make_swarm, **unnamed
    )


def _name_of(kind: Register, part: object, options: dict[str, dict[str, Any]]) -> str:
    """Return a part's registered name, with its settings put into the options; "custom" if it has none."""
    for name in kind.names():
        known = kind.get(name)
        if known is part:
            return name
        if type(part) is known and (is_dataclass(part) or not kind.settings(name)):
            values = {each.name: getattr(part, each.name) for each in fields(part)} if is_dataclass(part) else {}
            if all(isinstance(value, (str, int, float, bool)) for value in values.values()):
                options[name] = values
                return name
    if isinstance(part, type):
        raise UserError(f"{kind.kind} is a class; give an object: {kind.kind}={part.__name__}().", code="wrong-type")
    return CUSTOM


def _with_clients(spec: Spec, data: Dataset | None, clients: Sequence[Client], partition: object) -> Dataset:
    """Return the data with a set of samples per worker."""
    if partition != "by-client":
        raise UserError(
            "clients and a partition are given; each says who holds which samples. Leave one out.", code="conflict"
        )
    if spec.workers not in {len(clients), preset(spec.preset).workers if spec.preset else Spec().workers}:
        raise UserError(
            f"workers is {spec.workers}, but {len(clients)} clients are given, and each is a worker. Leave workers "
            "out, or give as many clients.",
            code="conflict",
        )
    base = _dataset(spec, data)
    return base.with_clients(clients)


def _is_registered(data: Dataset | None, name: str) -> bool:
    """Return whether data is the registered data set of its name, and not something made from it."""
    if data is None:
        return True
    known = load(name)
    return data.train is known.train and data.test is known.test


def _weights(init: Init | None) -> Any:  # noqa: ANN401 - Floats or None
    if init is None or isinstance(init, (str, Path)):
        return None
    values = init.network.whole(init.weights) if isinstance(init, Result) else init
    flat = np.asarray(values, np.float32)
    if flat.ndim != 1 or not np.isfinite(flat).all():
        raise UserError(
            f"init must be flat weights (D,) of finite numbers; given shape {flat.shape}.", code="wrong-shape"
        )
    return flat
