"""Where a run's workers live when it is not in this process: `on="ray"` and its addresses, made into a swarm.

A place is no part of a spec: the numbers are the same wherever they are computed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import pairwise
from typing import Any

from cbdsl import plugins
from cbdsl.errors import UserError
from cbdsl.protocol.messages import Swarm
from cbdsl.runs.stage import Stage
from cbdsl.swarms.ray import RaySwarm
from cbdsl.swarms.ray_cluster import check_place, connected, machines
from cbdsl.swarms.shard import Plot, Recipe, build_of, part_of
from cbdsl.workers.storage import bytes_of_row

MakeSwarm = Callable[[Stage], Swarm]


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

        def make(stage: Stage) -> Swarm:
            _demand_engine(stage)
            ray = stack.enter_context(connected(place, threads))
            swarm = ray_swarm(stage, ray, shards)
            stack.callback(swarm.close)
            return swarm

        yield make


def ray_swarm(stage: Stage, ray: Any, shards: int | None = None) -> RaySwarm:  # noqa: ANN401 - Ray's module
    """The workers of a stage on a cluster that Ray is connected to."""
    spec, server = stage.spec, stage.server
    for name in spec.plugins:  # what is in a user's own file goes along; what it imports has to be there
        module = plugins.module_of(name)
        if module.startswith("cbdsl_plugin_"):
            ray.cloudpickle.register_pickle_by_value(sys.modules[module])
    number = min(spec.workers, shards or max(1, sum(int(one.cpus) for one in machines(ray))))
    codec = server.policy.codecs.up
    recipe = Recipe(
        server.method, codec, replace(stage.network), stage.engine.name, spec.local, spec.swarm, spec.seed,
        spec.defence.commitment,
    )  # fmt: skip
    held, adversary = stage.cast
    edges = [spec.workers * shard // number for shard in range(number + 1)]
    apart = len(stage.initial) > 1

    def plots() -> Iterator[Plot]:
        for first, last in pairwise(edges):
            initial = stage.initial[first:last] if apart else stage.initial
            yield Plot(range(first, last), initial, part_of(held, first, last))

    swarm = RaySwarm(ray, recipe, adversary, stage.initial[0], stage.remembers)
    swarm.start(plots(), number, bytes_of_shard(stage, -(-spec.workers // number)))
    swarm.compare(build_of(stage.engine.name))
    return swarm


def bytes_of_shard(stage: Stage, workers: int) -> int:
    """What so many workers take: three rows each, their packs, and samples; a round's blocks come with the process."""
    codec, size = stage.server.policy.codecs.up, stage.engine.size
    row = bytes_of_row(size, stage.spec.swarm, codec.longest(size) if codec.relative else 0)
    train, parts = stage.dataset.train, stage.split
    own = max(map(len, parts.workers)) * workers
    shared = len(parts.shared_training) + len(parts.shared_scoring)
    sample = train.features[:1].nbytes + 4
    return workers * row + min(own + shared, len(train)) * sample + 4 * own


def _demand_engine(stage: Stage) -> None:
    if stage.engine.name not in {"native", "torch"}:
        raise UserError(
            f"On a cluster workers compute on processors, and the engine of this run is {stage.engine.name}: on a GPU "
            "the last digits depend on which workers share it. Add --device cpu, or leave --on out."
        )
