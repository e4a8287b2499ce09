"""What a user gives in Python: objects instead of names. A registered part is recorded by name, others as "custom"."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from cbdsl import plugins
from cbdsl.arrays import Samples
from cbdsl.byzantine.attack import Attack
from cbdsl.data import Dataset, load
from cbdsl.data.partition import Partition
from cbdsl.errors import UserError
from cbdsl.methods.base import Method
from cbdsl.presets import preset
from cbdsl.protocol.aggregators import Rule
from cbdsl.protocol.messages import Swarm
from cbdsl.protocol.selection import Selection
from cbdsl.register import CUSTOM, Register, aggregator, attack, dataset, method, partition, selection
from cbdsl.runs.defence import Parts
from cbdsl.runs.result import Result
from cbdsl.runs.stage import Given, ModelBuilder, Stage
from cbdsl.spec import Options, Spec

Client = Dataset | Samples | tuple[ArrayLike, ArrayLike]
Init = Result | Path | str | NDArray[Any]


def gather(  # noqa: PLR0913, PLR0917 - everything that `run` takes
    spec: Spec,
    own_model: ModelBuilder | str | None,
    own_data: Dataset | None,
    clients: Sequence[Client] | None,
    own_method: Method | str | None,
    own_attack: Attack | str | None,
    own_aggregator: Rule | str | None,
    own_selection: Selection | str | None,
    own_partition: Partition | str | None,
    participation: float | None,
    init: Init | None,
    make_swarm: Callable[[Stage], Swarm] | None,
) -> tuple[Spec, Given]:
    """The spec with names for what was given, and what has no name."""
    plugins.load(spec.plugins)
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
    given = Given(
        model=None if isinstance(own_model, str) else own_model,
        data=data,
        attack=attack_part,
        partition=partition_part,
        init=_weights(init),
        parts=Parts(method_part, selection_part, rule_part),
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
