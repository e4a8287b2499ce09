"""The swarm on a Ray cluster: a shard of the workers in each actor, on whichever machines there are; liars sit here.

A round sends w^g once to each machine through the object store, and gets one number a worker back. Never judges a
claim, and never has all rows in this process. Who is asked, and what happens when it dies, is `ray_crew`'s affair.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cbdsl.archives import InBlocks
from cbdsl.arrays import Doubles, Floats
from cbdsl.byzantine.adversary import Adversary
from cbdsl.protocol.messages import Claim, Order, Upload, WorkerId
from cbdsl.swarms.ray_crew import Actor, Crew, Past, spans
from cbdsl.swarms.shard import Facts, Plot, Recipe
from cbdsl.swarms.stacked import StackedSwarm
from cbdsl.workers.swarm import Particles


class RaySwarm(StackedSwarm):
    """U workers in actors of a cluster that Ray is connected to."""

    def __init__(
        self, ray: Any, recipe: Recipe, adversary: Adversary, received: Floats, remembers: bool  # noqa: ANN401
    ) -> None:  # fmt: skip
        """Ray: its module. received: the initial model, (V D,). remembers: whether workers keep anything."""
        super().__init__(adversary, recipe.codec, received, recipe.commits)
        self._ray, self._remembers, self._round = ray, remembers, 0
        self._crew = Crew(ray, recipe)
        self._known: dict[WorkerId, tuple[Floats, float]] = {}  # what attackers' places would send in this round
        self._crowd: tuple[list[WorkerId], Floats, Doubles] | None = None  # and what others would
        self.facts: list[Facts] = []
        self.note = ""

    def start(self, plots: Iterable[Plot], number: int, bytes_each: int) -> None:
        """Hire the shards; see `Crew.hire`."""
        try:
            self._crew.hire(plots, number, bytes_each)
            self.facts = list(self._crew.ask(dict.fromkeys(self._crew.actors, ("facts", 0))).values())
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End the shards."""
        self._crew.end()

    def compare(self, build: str) -> None:
        """Note which machines compute with another build or other instructions than the server's."""
        others = sorted({f"{one.host} ({one.build})" for one in self.facts if one.build != build})
        if others:
            self.note = (
                f"The last digits may differ from those of a run on one machine: the server computes with {build}, "
                f"but {', '.join(others[:5])}{' and others' * (len(others) > 5)} with something else."
            )

    def carry_out(self, order: Order) -> Mapping[WorkerId, Claim]:
        """See `StackedSwarm.carry_out`."""
        before, self._round = self._round, order.round
        if not self._remembers:
            self._crew.past = Past(before, None, self._received)
        self._crew.past.orders.append(order)
        self._known, self._crowd = {}, None
        model = None if order.global_best is None else self._ray.put(order.global_best)
        parts = {actor: actor.own(order) for actor in self._crew.actors}
        told = {actor: self._liars(part.participants) for actor, part in parts.items()}
        calls = {actor: ("report", before, part, model, told[actor]) for actor, part in parts.items()}
        claims: dict[WorkerId, Claim] = {}
        for actor, answer in self._crew.ask(calls).items():
            for worker, lied, score in zip(told[actor], answer.models, answer.own_scores, strict=True):
                self._known[worker] = np.array(lied), float(score)
            said = zip(answer.scores, answer.commitments, strict=True)
            claims |= {
                worker: Claim(float(score), promise)
                for worker, (score, promise) in zip(parts[actor].participants, said, strict=False)
            }
        return claims

    def models(self, workers: Sequence[WorkerId]) -> Floats:
        """See `StackedSwarm.models`: attackers' came with the claims, those of the others are fetched once a round."""
        return self._looked_at(workers)[0]

    def scores(self, workers: Sequence[WorkerId]) -> Doubles:
        """See `StackedSwarm.scores`."""
        return self._looked_at(workers)[1]

    def contents(self, workers: Sequence[WorkerId]) -> Sequence[Upload]:
        """See `StackedSwarm.contents`."""
        found: dict[WorkerId, Upload] = {}
        for chosen, sent in self._in_parts("contents", workers):
            for worker, one in zip(chosen, sent, strict=True):  # copied: what Ray gives stays in its store
                found[worker] = one.copy() if isinstance(one, np.ndarray) else one
        return [found[worker] for worker in workers]

    @property
    def kept(self) -> Mapping[str, Any]:
        """See `StackedSwarm.kept`: fetched block by block while they are written."""
        workers = self._crew.actors[-1].names.stop
        return {
            name: InBlocks((workers, *shape), np.dtype(kind), partial(self._blocks, name))
            for name, (shape, kind) in self.facts[0].layout.items()
        }

    def restore(self, particles: Particles | None, round_number: int, received: Floats) -> None:
        """See `StackedSwarm.restore`."""
        self._round, self._received = round_number, received
        self._crew.past = Past(round_number, particles, received)
        for actor in self._crew.actors:
            self._crew.bring_up(actor)

    def saved(self, read: Callable[[], Particles | None], round_number: int) -> None:
        """See `StackedSwarm.saved`: a shard that dies from now on begins there."""
        if (particles := read()) is not None:
            self._crew.past = Past(round_number, particles, self._received)

    def _liars(self, workers: Iterable[WorkerId]) -> tuple[WorkerId, ...]:
        return tuple(worker for worker in workers if worker in self._adversary.workers)

    def _looked_at(self, workers: Sequence[WorkerId]) -> tuple[Floats, Doubles]:
        """What workers would send and claim, (k, V D) and (k,)."""
        if workers and all(worker in self._known for worker in workers):
            known = [self._known[worker] for worker in workers]
            return np.stack([model for model, _ in known]), np.array([score for _, score in known])
        if self._crowd is None or self._crowd[0] != workers:
            models, scores = np.empty((len(workers), len(self._received)), np.float32), np.empty(len(workers))
            places = {worker: place for place, worker in enumerate(workers)}
            for chosen, (rows, own) in self._in_parts("models", workers):
                here = [places[worker] for worker in chosen]
                models[here], scores[here] = rows, own
            self._crowd = list(workers), models, scores
        return self._crowd[1], self._crowd[2]

    def _in_parts(self, method: str, workers: Sequence[WorkerId]) -> Iterator[tuple[Sequence[WorkerId], Any]]:
        """Ask for something of each worker, from all shards at once, a message's worth at a time."""
        row = 4 * len(self._received)
        parts: dict[Actor, list[Sequence[WorkerId]]] = {}
        for actor in self._crew.actors:
            own = [worker for worker in workers if worker in actor.names]
            if own:
                parts[actor] = [own[first:last] for first, last in spans(len(own), row)]
        while parts:
            chosen = {actor: left.pop(0) for actor, left in parts.items()}
            calls = {actor: (method, self._round, part) for actor, part in chosen.items()}
            for actor, answer in self._crew.ask(calls).items():
                yield chosen[actor], answer
            parts = {actor: left for actor, left in parts.items() if left}

    def _blocks(self, name: str) -> Iterator[NDArray[Any]]:
        """The rows of one array, of one shard after the other."""
        shape, kind = self.facts[0].layout[name]
        row = int(np.prod(shape)) * np.dtype(kind).itemsize
        for actor in self._crew.actors:
            for first, last in spans(len(actor.names), row):
                yield self._crew.ask({actor: ("block", self._round, name, first, last)})[actor]
