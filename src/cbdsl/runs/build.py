"""Builds everything a resolved spec names: data, network, engine, server, attackers and the initial model."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from cbdsl import register
from cbdsl.algorithm.aggregators import AggregationRule, TrustedReference, aggregate, demand, parse
from cbdsl.algorithm.messages import ServerState, Swarm, WorkerId, commitment_of
from cbdsl.algorithm.methods import Method
from cbdsl.algorithm.round import Combination, Server, ServerPolicy, averaging, rate_at
from cbdsl.algorithm.selection import Selection
from cbdsl.algorithm.verification import HoldOutLosses, Verifier, copying, guarded, measuring, trusting
from cbdsl.algorithm.worker import LocalWorkers, TrainingSet, WorkerData, batches_of, make_scorer, padded
from cbdsl.arrays import Doubles, Floats, Indices, Samples
from cbdsl.attacks.adversary import Adversary, PublicData
from cbdsl.attacks.base import Attack, make_attack
from cbdsl.codecs.envelope import codecs_of
from cbdsl.data.dataset import Dataset, load
from cbdsl.data.partition import Partition, Split, as_seen, split
from cbdsl.data.shared import with_shared
from cbdsl.engines.base import Engine, Sgd
from cbdsl.engines.choose import choose_engine
from cbdsl.engines.native_engine import default_threads
from cbdsl.errors import UserError
from cbdsl.models.architecture import Architecture
from cbdsl.models.layers import ArchitectureError
from cbdsl.models.network import Network, network_of, read_tensors
from cbdsl.presets import preset
from cbdsl.register import CUSTOM, Register, aggregator, attack, dataset, method, partition, selection
from cbdsl.rng import seed_of, stream
from cbdsl.runs.records import FinalMeasurements
from cbdsl.runs.result import Result
from cbdsl.spec import Options, Spec, init_file
from cbdsl.swarms.local import LocalSwarm, workers_at_once
from cbdsl.swarms.ray_swarm import RaySwarm, check_place, connected, machines
from cbdsl.swarms.shard import ShardData, ShardRecipe, build_of, part_of
from cbdsl.util.memory import require_memory

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True, eq=False)
class ServerParts:
    """What a user brings as objects instead of by name; none: what the spec names."""

    method: Method | None = None
    selection: Selection | None = None
    aggregator: AggregationRule | None = None


def build_server(
    spec: Spec, engine: Engine, samples: Samples, split: Split, given: ServerParts, secret: int = 0
) -> Server:
    """The server of a spec. secret: what workers do not know; 0: the seed decides."""
    method = given.method or build_method(spec)
    selection = given.selection or build_selection(spec)
    cap = spec.defence.invitations and max(spec.defence.invitations, max(spec.defence.declared, 0) + selection.most)
    return Server(
        spec,
        method,
        build_verifier(spec, method, engine, samples, split, secret),
        ServerPolicy(selection, cap, spec.defence.commitment, codecs_of(spec)),
        build_combination(spec, engine, samples, split, given.aggregator),
    )


def build_method(spec: Spec) -> Method:
    """The method that a spec names, with its settings."""
    made = register.method.make(spec.method, spec.options.of(spec.method))
    if not isinstance(made, Method):
        raise UserError(f"The method '{spec.method}' is a {type(made).__name__}; it must be a cbdsl.Method.")
    return made


def build_selection(spec: Spec) -> Selection:
    """The selection that a spec names, with its settings; `selection.k` is a short way to `options.NAME.k`."""
    name, options = spec.selection.name, dict(spec.options.of(spec.selection.name))
    if "momentum" in register.selection.settings(name):
        options["momentum"] = spec.server.momentum
    if spec.selection.k:
        if "k" not in register.selection.settings(name):
            raise UserError(f"The selection '{name}' has no k; given selection.k={spec.selection.k}. Leave it out.")
        options["k"] = spec.selection.k
    made = register.selection.make(name, options)
    if not isinstance(made, Selection):
        raise UserError(f"The selection '{name}' is a {type(made).__name__}; it must be a cbdsl.Selection.")
    return made


def build_verifier(
    spec: Spec, method: Method, engine: Engine, samples: Samples, split: Split, secret: int = 0
) -> Verifier:
    """How the server of a spec judges uploads: it can measure only where D_sc is shared."""
    if not (method.conversation == "swarm" and method.verifies and spec.shares_scoring):
        return trusting(engine.size)
    plain = measuring(make_scorer(engine, samples, split.shared_scoring), engine.size, spec.verification.tolerance)
    trains = spec.shares_training and method.gradients and len(split.shared_training)
    if trains:
        plain = replace(plain, copies=copying(trainer(spec, engine, samples, split.shared_training)))
    if not spec.defence.guard:
        return plain

    def private(weights: Floats, round_number: int) -> Doubles:
        """A random half of the hold-out, another one every round."""
        drawn = stream(secret or spec.seed, "hold-out", round_number).permutation(split.holdout)
        return batch_losses(engine, weights, samples, drawn[: -(-len(drawn) // 2)])

    holdout = HoldOutLosses(lambda weights: batch_losses(engine, weights, samples, split.shared_scoring), private)
    train = trainer(spec, engine, samples, split.shared_training, secret) if trains else None
    return guarded(plain, holdout, spec.defence.false_alarm, train)


def batch_losses(engine: Engine, weights: Floats, samples: Samples, indices: Indices) -> Doubles:
    """Mean losses of a model on batches of samples, as even as can be, at most a hundred, (B,)."""
    batches = np.array_split(engine.sample_losses(weights, samples, indices), min(100, len(indices)))
    # Added in their order, one by one, as the native engine does: np.sum's pairs show in the last digits.
    return np.array([np.cumsum(batch)[-1] / len(batch) for batch in batches])


def build_combination(
    spec: Spec, engine: Engine, samples: Samples, split: Split, given: AggregationRule | None = None
) -> Combination:
    """How a server combines models where everybody uploads one. given: a rule of the user's own."""
    name, declared = spec.defence.aggregator, spec.defence.declared
    if name == "mean" and given is None:
        return averaging({worker: len(own) for worker, own in enumerate(split.workers)})
    if given is None:
        demand(name, spec.workers, declared)
    plain = name.rpartition("+")[2]
    if plain == "fltrust" and not len(split.shared_training):
        raise UserError(f"The aggregator '{name}' trains on D_tr at the server; data.shared_training is 0.")
    rule: AggregationRule = given or register.aggregator.make(parse(name)[1], spec.options.of(plain))
    train = trainer(spec, engine, samples, split.shared_training)

    def combine(state: ServerState, workers: Sequence[WorkerId], models: Sequence[Floats]) -> Floats:  # noqa: ARG001
        def root() -> Floats:
            return train(state.global_best, state.round + 1)

        def losses(rows: Floats) -> Doubles:
            return engine.losses(rows, samples, split.shared_scoring)

        return aggregate(name, models, declared, TrustedReference(state.global_best, root, losses), rule)

    return combine


def trainer(
    spec: Spec, engine: Engine, samples: Samples, indices: Indices, secret: int = 0
) -> Callable[[Floats, int], Floats]:
    """What the server makes of a model in a round, when it trains it as workers do, on samples of its own.

    secret: decides the order of samples, if it is not 0, so that nobody knows the server's step to the digit.
    """
    seed = secret or spec.seed

    def train(weights: Floats, round_number: int) -> Floats:
        rows = batches_of(indices, spec.local, stream(seed, "root", round_number))
        seeds = np.array([seed_of(seed, "root", round_number, worker=1)], dtype=np.uint64)
        sgd = Sgd(rate_at(spec, round_number), spec.local.momentum, spec.local.weight_decay)
        return np.asarray(engine.train(weights[None], samples, rows[None], sgd, seeds)[0])

    return train


ModelBuilder = Callable[[], "nn.Module"]


@dataclass(frozen=True, eq=False)
class UserParts:
    """What a user gives in Python instead of by name."""

    model: ModelBuilder | None = None
    data: Dataset | None = None
    attack: Attack | None = None
    partition: Partition | None = None
    init: Floats | Path | None = None  # (D,), or a model's file
    parts: ServerParts = field(default_factory=ServerParts)
    make_swarm: Callable[[Experiment], Swarm] | None = None


@dataclass(frozen=True, eq=False)
class Experiment:
    """Data, engine and starting point of a run."""

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

    @staticmethod
    def prepare(
        spec: Spec, given: UserParts | None = None, threads: int | None = None, deal: bool = True, secret: int = 0
    ) -> Experiment:
        """Build what a resolved spec names; everything that can be wrong with it is found here.

        deal: give workers their samples; not if they have their own, somewhere else. secret: a number that workers do
        not know, for what must not follow from the seed.
        """
        given = given or UserParts()
        if threads is not None and threads < 1:
            raise UserError(f"threads must be at least 1; given {threads}.")
        attack = given.attack or _attack(spec)
        dataset = given.data or load(spec.data.source, spec.options.of(spec.data.source))
        partition = given.partition or _partition(spec)
        parts = split(
            dataset.train.labels, spec.data, spec.workers if deal else 0, spec.seed, dataset.clients, partition, secret
        )
        dataset = replace(dataset, train=as_seen(dataset.train, parts, partition, spec.seed))
        dataset, parts = with_shared(dataset, parts, spec.data)
        network = network_of(spec, dataset.shape, dataset.classes, given.model)
        choice = choose_engine(spec.engine, network.subject, dataset.shape, threads or default_threads(), spec.device)
        engine = choice.engine
        server = build_server(spec, engine, dataset.train, parts, given.parts, secret)
        _demand_room(spec, parts, engine.size, deal and given.make_swarm is None)
        return Experiment(
            spec, dataset, parts, network, engine, _initial(spec, network, given.init), server, attack,
            byzantine_workers(spec), choice.note, spec.key(), given.make_swarm,
        )  # fmt: skip

    @cached_property
    def swarm(self) -> Swarm:
        """The workers: in memory, or where the user has them."""
        return self.make_swarm(self) if self.make_swarm is not None else self.memory_swarm

    @cached_property
    def memory_swarm(self) -> LocalSwarm:
        """The workers in memory, made when they are first needed."""
        spec, method = self.spec, self.server.method
        held, adversary = self.cast
        workers = LocalWorkers(
            self.engine, held, spec.local, spec.swarm, spec.seed, range(spec.workers), method.gradients,
            self.server.policy.codecs.up,
        )  # fmt: skip
        return LocalSwarm(method, workers, self.initial, adversary, spec.defence.commitment)

    @property
    def cast(self) -> tuple[WorkerData, Adversary]:
        """Who works with what, poison included, and who lies."""
        held = holdings(self.split, self.dataset.train, self.spec)
        adversary = self._adversary(held)
        poisoned = adversary.poisoned()
        training = tuple(poisoned.get(worker, lesson) for worker, lesson in enumerate(held.training))
        return WorkerData(training, held.scored, held.scoring), adversary

    @property
    def remembers(self) -> bool:
        """Whether workers keep anything from one round to the next."""
        return self.server.method.remembers or self.server.policy.codecs.up.feedback

    @cached_property
    def key(self) -> str:
        """What the numbers of a run depend on: the spec, the engine that was chosen for it, a model it starts from.

        Of plugins the run's folder keeps copies, and compares them itself. Read once: files may go meanwhile.
        """
        start = f"-{commitment_of(self.initial[0]).hex()[:8]}" if self.spec.init else ""
        return f"{replace(self.spec, plugins=()).key()}-{self.engine.name}{start}"

    def first_state(self) -> ServerState:
        """The server before round 1."""
        return self.server.first_state(self.initial[0])

    def test_accuracy(self, state: ServerState) -> float:
        """Share of the test set that w^g classifies correctly."""
        everything = np.arange(len(self.dataset.test), dtype=np.int32)
        return float(self.engine.accuracies(state.global_best[None], self.dataset.test, everything)[0])

    def class_accuracy(self, state: ServerState) -> tuple[float | None, ...]:
        """The same by class, to four digits; none where the test set has no sample of it."""
        labels, weights = self.dataset.test.labels, state.global_best[None]
        members = [np.flatnonzero(labels == one).astype(np.int32) for one in range(self.dataset.classes)]
        return tuple(
            round(float(self.engine.accuracies(weights, self.dataset.test, rows)[0]), 4) if len(rows) else None
            for rows in members
        )

    def finale(self, state: ServerState) -> FinalMeasurements:
        """What is measured once, at the end."""
        aims = self.attack.aims if self.byzantine else ()
        return FinalMeasurements(self.class_accuracy(state), self.attack_success(state), aims)

    def attack_success(self, state: ServerState) -> float | None:
        """Share of test samples of other classes that a trigger turns into the attack's target, if it has one."""
        target, test = self.attack.target, self.dataset.test
        if target is None or not self.byzantine:
            return None
        others = np.flatnonzero(test.labels != target).astype(np.int32)
        marked = Samples(self.attack.triggered(test.features[others]), np.full(len(others), target, np.int32))
        return float(self.engine.accuracies(state.global_best[None], marked, np.arange(len(others), dtype=np.int32))[0])

    def _adversary(self, held: WorkerData) -> Adversary:
        spec, train, parts = self.spec, self.dataset.train, self.split
        private = np.concatenate([parts.shared_scoring, parts.holdout])
        others = np.setdiff1d(np.arange(len(train), dtype=np.int32), private)
        known = spec.model != CUSTOM  # nothing here tells one custom network from another
        return Adversary(
            self.attack,
            self.byzantine,
            PublicData(train, parts.shared_scoring, others, self.dataset.classes),
            held={worker: held.training[worker].indices for worker in self.byzantine},
            engine=self.engine,
            initial=self.initial[0],
            seed=spec.seed,
            swarm_size=spec.workers,
            vectors=self.server.method.vectors,
            codec=self.server.policy.codecs.up,
            network=_described(self.network) if self.byzantine else None,
            craft_key=(spec.model, spec.seed, spec.data) if known else None,
        )


def _described(network: Network) -> Architecture | None:
    """The network as data; none if it cannot be described."""
    try:
        return network.description()
    except ArchitectureError:
        return None


def holdings(parts: Split, samples: Samples, spec: Spec) -> WorkerData:
    """Who works with what (Sec. VI.C): without D_sc a worker scores on its own data."""
    extra = parts.shared_training if spec.shares_training else parts.shared_training[:0]
    training = tuple(TrainingSet(samples, np.concatenate([own, extra])) for own in parts.workers)
    return WorkerData(training, samples, parts.shared_scoring if spec.shares_scoring else padded(parts.workers))


def byzantine_workers(spec: Spec) -> tuple[WorkerId, ...]:
    """Who the attackers are, drawn at random."""
    drawn = stream(spec.seed, "byzantine").permutation(spec.workers)[: spec.attack.byzantine]
    return tuple(sorted(int(worker) for worker in drawn))


def honest_workers(stage: Experiment) -> Indices:
    """Everybody else."""
    return np.setdiff1d(np.arange(stage.spec.workers, dtype=np.int32), np.asarray(stage.byzantine, np.int32))


def _demand_room(spec: Spec, parts: Split, size: int, in_memory: bool) -> None:
    """Refuse a run whose arrays do not fit, before they are made."""
    starts = spec.workers if spec.swarm.start == "apart" else 1
    needed = 4 * starts * size
    if in_memory:
        longest = max(map(len, parts.workers)) + len(parts.shared_training)
        batch = spec.local.batch_size
        per_epoch = -(-longest // batch) * batch
        epochs = -(-spec.local.steps * batch // per_epoch) if spec.local.steps else spec.local.epochs
        at_once = min(spec.participants, workers_at_once(size))
        needed += 4 * (3 * spec.workers * size + 2 * at_once * epochs * per_epoch)
    require_memory(
        needed,
        f"{spec.workers:,} workers with a model of {size:,} numbers, local.epochs={spec.local.epochs:,}, local.steps="
        f"{spec.local.steps:,} and local.batch_size={spec.local.batch_size:,} take",
        "Set some of them lower.",
    )


def _attack(spec: Spec) -> Attack:
    if not spec.attack.byzantine:
        return Attack()
    if spec.attack.name == CUSTOM:
        raise UserError("The attack of this run was given in Python; give it again with attack=...")
    return make_attack(spec)


def _partition(spec: Spec) -> Any:  # noqa: ANN401 - a Partition
    if spec.data.partition == CUSTOM:
        raise UserError("The partition of this run was given in Python; give it again with partition=...")
    return register.partition.make(spec.data.partition, spec.options.of(spec.data.partition))


def _initial(spec: Spec, network: Network, given: Floats | Path | None) -> Floats:
    """Where learning starts: given weights, or drawn ones; (1, D), or (U, D) if workers start apart.

    Apart from given weights only the first worker starts there: without gradients equal rows would never part.
    """
    starts = spec.workers if spec.swarm.start == "apart" else 1
    if given is None and spec.init == CUSTOM:
        raise UserError("The initial model of this run was given in Python; give it again with init=...")
    if given is None and spec.init:
        given = init_file(spec.init)
    seeds = [seed_of(spec.seed, "initial-weights", worker=number) for number in range(starts)]
    if given is None:
        return np.stack([network.initial_weights(seed) for seed in seeds])
    weights = network.flat(read_tensors(given), str(given)) if isinstance(given, Path) else given
    if weights.shape != (network.size,):
        raise UserError(
            f"init has {len(weights):,} numbers; the model '{spec.model}' has {network.size:,}. Start from a model of "
            "the same network."
        )
    if not np.isfinite(weights).all():
        raise UserError(f"The model to start from ({spec.init}) has weights that are not finite.")
    return np.stack([np.asarray(weights, np.float32), *(network.initial_weights(seed) for seed in seeds[1:])])


Client = Dataset | Samples | tuple[ArrayLike, ArrayLike]
Init = Result | Path | str | NDArray[Any]


def gather(  # noqa: PLR0913, PLR0917 - everything that `run` takes
    spec: Spec,
    own_model: ModelBuilder | str | None,
    own_data: Dataset | None,
    clients: Sequence[Client] | None,
    own_method: Method | str | None,
    own_attack: Attack | str | None,
    own_aggregator: AggregationRule | str | None,
    own_selection: Selection | str | None,
    own_partition: Partition | str | None,
    participation: float | None,
    init: Init | None,
    make_swarm: Callable[[Experiment], Swarm] | None,
) -> tuple[Spec, UserParts]:
    """The spec with names for what was given, and what has no name."""
    register.load(spec.plugins)
    options: dict[str, dict[str, Any]] = {name: dict(values) for name, values in spec.options.items()}

    def named(kind: Register, part: object, now: str) -> tuple[str, Any]:
        """A part's name and, if it is not known by name, the part itself."""
        if part is None or isinstance(part, str):
            return (now if part is None else part), None
        for name in kind.names():
            known = kind.get(name)
            if known is part:
                return name, None
            if type(part) is known and (is_dataclass(part) or not kind.settings(name)):
                values = {each.name: getattr(part, each.name) for each in fields(part)} if is_dataclass(part) else {}
                if all(isinstance(value, (str, int, float, bool)) for value in values.values()):
                    options[name] = values
                    return name, None
        if isinstance(part, type):
            raise UserError(f"{kind.kind} is a class; give an object: {kind.kind}={part.__name__}().")
        return CUSTOM, part

    method_name, method_part = named(method, own_method, spec.method)
    attack_name, attack_part = named(attack, own_attack, spec.attack.name)
    rule_name, rule_part = named(aggregator, own_aggregator, spec.defence.aggregator)
    selection_name, selection_part = named(selection, own_selection, spec.selection.name)
    partition_name, partition_part = named(partition, own_partition, spec.data.partition)
    data, workers = own_data, spec.workers
    if clients is not None:
        if own_partition not in (None, "by-client"):
            raise UserError("clients and a partition are given; each says who holds which samples. Leave one out.")
        base = own_data or load(spec.data.source, spec.options.of(spec.data.source))
        if spec.workers not in {len(clients), preset(spec.preset).workers if spec.preset else Spec().workers}:
            raise UserError(
                f"workers is {spec.workers}, but {len(clients)} clients are given, and each is a worker. Leave workers "
                "out, or give as many clients."
            )
        data, workers, partition_name = base.with_clients(clients), len(clients), "by-client"
        options.pop(spec.data.source, None)  # used already
    if own_attack is not None and not spec.attack.byzantine:
        raise UserError("attack is given, but no worker is an attacker. Set attack.byzantine in the spec.")
    model_name = own_model if isinstance(own_model, str) else CUSTOM if own_model is not None else spec.model
    source = data.name if data is not None else spec.data.source
    if source in dataset and not _is_the_named(data, source):
        source = CUSTOM
    chosen = replace(
        spec,
        model=model_name,
        method=method_name,
        workers=workers,
        participation=spec.participation if participation is None else participation,
        init=spec.init if init is None else str(init) if isinstance(init, (str, Path)) else CUSTOM,
        data=replace(spec.data, source=source, partition=partition_name),
        attack=replace(spec.attack, name=attack_name, scale=spec.attack.scale * _by_name(own_attack)),
        defence=replace(spec.defence, aggregator=rule_name),
        selection=replace(spec.selection, name=selection_name, k=spec.selection.k * _by_name(own_selection)),
        options=Options(options),
    )
    given = UserParts(
        model=None if isinstance(own_model, str) else own_model,
        data=data,
        attack=attack_part,
        partition=partition_part,
        init=_weights(init),
        parts=ServerParts(method_part, selection_part, rule_part),
        make_swarm=make_swarm,
    )
    return chosen, given


def _by_name(part: object) -> bool:
    """Whether a part's settings are the spec's; those of an object are its own."""
    return part is None or isinstance(part, str)


def _is_the_named(data: Dataset | None, name: str) -> bool:
    """Whether data is the registered data set of its name, and not something made from it."""
    if data is None:
        return True
    known = load(name)
    return data.train is known.train and data.test is known.test


def _weights(init: Init | None) -> Any:  # noqa: ANN401 - Floats or none
    if init is None or isinstance(init, (str, Path)):
        return None
    values = init.weights if isinstance(init, Result) else init
    flat = np.asarray(values, np.float32)
    if flat.ndim != 1 or not np.isfinite(flat).all():
        raise UserError(f"init must be flat weights (D,) of finite numbers; given shape {flat.shape}.")
    return flat


MakeSwarm = Callable[[Experiment], Swarm]


@contextmanager
def workers_on(
    place: str | None, shards: int | None, threads: int | None, own: MakeSwarm | None = None
) -> Iterator[MakeSwarm | None]:
    """What makes the swarm of a run: on a cluster, if a place is given; afterwards nothing of it is left running.

    shards: into how many the workers are divided; one a processor if not given. own: what a user gave instead.
    """
    if place is None:
        if shards is not None:
            raise UserError(f"shards is {shards}, but the workers are in this process. Say where they should be: --on.")
        yield own
        return
    if own is not None:
        raise UserError(f"on={place!r} and swarm are given; each says where the workers live. Leave one out.")
    if shards is not None and shards < 1:
        raise UserError(f"shards must be at least 1; given {shards}.")
    check_place(place)
    with ExitStack() as stack:

        def make(stage: Experiment) -> Swarm:
            _demand_engine(stage)
            ray = stack.enter_context(connected(place, threads))
            swarm = ray_swarm(stage, ray, shards)
            stack.callback(swarm.close)
            return swarm

        yield make


def ray_swarm(stage: Experiment, ray: Any, shards: int | None = None) -> RaySwarm:  # noqa: ANN401 - Ray's module
    """The workers of a stage on a cluster that Ray is connected to."""
    spec, server = stage.spec, stage.server
    for name in spec.plugins:  # what is in a user's own file goes along; what it imports has to be there
        module = register.plugin_module(name)
        if module.startswith("cbdsl_plugin_"):
            ray.cloudpickle.register_pickle_by_value(sys.modules[module])
    number = min(spec.workers, shards or max(1, sum(int(one.cpus) for one in machines(ray))))
    codec = server.policy.codecs.up
    recipe = ShardRecipe(
        server.method, codec, replace(stage.network), stage.engine.name, spec.local, spec.swarm, spec.seed,
        spec.defence.commitment,
    )  # fmt: skip
    held, adversary = stage.cast
    edges = [spec.workers * shard // number for shard in range(number + 1)]
    apart = len(stage.initial) > 1

    def plots() -> Iterator[ShardData]:
        for first, last in pairwise(edges):
            initial = stage.initial[first:last] if apart else stage.initial
            yield ShardData(range(first, last), initial, part_of(held, first, last))

    swarm = RaySwarm(ray, recipe, adversary, stage.initial[0], stage.remembers)
    swarm.start(plots(), number, bytes_of_shard(stage, -(-spec.workers // number)))
    swarm.compare(build_of(stage.engine.name))
    return swarm


def bytes_of_shard(stage: Experiment, workers: int) -> int:
    """What so many workers take: three rows each, their packs, and samples; a round's blocks come with the process."""
    codec, size = stage.server.policy.codecs.up, stage.engine.size
    row = 12 * size + 12 + (codec.longest(size) if codec.relative else 0)
    train, parts = stage.dataset.train, stage.split
    own = max(map(len, parts.workers)) * workers
    shared = len(parts.shared_training) + len(parts.shared_scoring)
    sample = train.features[:1].nbytes + 4
    return workers * row + min(own + shared, len(train)) * sample + 4 * own


def _demand_engine(stage: Experiment) -> None:
    if stage.engine.name not in {"native", "torch"}:
        raise UserError(
            f"On a cluster workers compute on processors, and the engine of this run is {stage.engine.name}: on a GPU "
            "the last digits depend on which workers share it. Add --device cpu, or leave --on out."
        )
