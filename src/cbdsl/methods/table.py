"""The methods by name: which conversation each holds, what it shares, and what it fixes of the swarm's move."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from cbdsl.errors import unknown
from cbdsl.spec import Shared, Spec


@dataclass(frozen=True)
class Method:
    """One way of learning together."""

    title: str
    task: Literal["swarm", "average"]  # claims and one upload, or everybody's model
    shared: Shared  # what it uses of D_G unless told otherwise
    gradients: bool = True
    verifies: bool = True  # whether uploads are measured on D_sc, where D_sc is shared
    swarm: Mapping[str, Any] = field(default_factory=dict)  # settings of the move that define the method


METHODS: dict[str, Method] = {
    "cb-dsl": Method("CB-DSL (Fan et al. 2022)", "swarm", "both"),
    "fedavg": Method("FedAvg (McMahan et al. 2017)", "average", "none"),
    # Park et al. 2021: move, then train; the lowest local loss is trusted and its model fetched.
    "fedpso": Method(
        "FedPSO (Park et al. 2021)", "swarm", "none", verifies=False, swarm={"sgd_from": "moved", "velocity": "swarm"}
    ),
    # Kennedy and Eberhart 1995: no gradients, so particles must start apart or they never part.
    "pso": Method("PSO (Kennedy and Eberhart 1995)", "swarm", "score", gradients=False, swarm={"start": "apart"}),
}


def method_of(spec: Spec) -> Method:
    """The method that a spec names."""
    if spec.method not in METHODS:
        raise unknown("method", spec.method, METHODS)
    return METHODS[spec.method]


def resolve(spec: Spec) -> Spec:
    """Write out what the method decides, so that the spec says all there is to say about a run."""
    method = method_of(spec)
    shared = method.shared if spec.shared == "default" else spec.shared
    declared = spec.attack.byzantine if spec.defence.declared < 0 else spec.defence.declared
    defence = replace(spec.defence, declared=declared)
    return replace(spec, shared=shared, swarm=replace(spec.swarm, **method.swarm), defence=defence)
