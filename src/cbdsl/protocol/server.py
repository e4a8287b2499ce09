"""The parameter server that a spec describes: what it orders, and how it plays a round with any swarm."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from cbdsl.arrays import Floats
from cbdsl.methods.base import Method
from cbdsl.protocol.fedavg import Combination, play_average_round
from cbdsl.protocol.messages import Order, RoundLog, Swarm, WorkerId
from cbdsl.protocol.releases import adopted, bytes_to_catch_up, packed
from cbdsl.protocol.rounds import Policy, play_round
from cbdsl.protocol.state import ServerState
from cbdsl.protocol.verification import Verifier
from cbdsl.rng import stream
from cbdsl.spec import Spec
from cbdsl.workers.swarm import inertia_at


@dataclass(frozen=True, eq=False)
class Server:
    """Everything a server is, but for what it remembers between rounds: that is `ServerState`."""

    spec: Spec
    method: Method
    verifier: Verifier
    policy: Policy
    combine: Combination

    def first_state(self, initial: Floats) -> ServerState:
        """The server before round 1: it knows an initial model (D,), and its score where it can measure one."""
        nothing = ServerState(0, np.zeros_like(initial), math.inf, memory=self.method.memory(len(initial)))
        state = adopted(nothing, packed(initial, nothing, self.policy.codecs), self.policy.codecs)
        score = self.verifier.score(state.global_best) if self.verifier.score else math.inf
        return replace(state, global_score=float(np.float32(score)))

    def order(self, state: ServerState, members: Sequence[WorkerId] | None = None) -> Order:
        """The order that starts the next round: to those who take part, with w^g if one of them does not have it.

        members: who is in the swarm now, where workers join and leave; if none, as many as the spec says.
        """
        number, spec = state.round + 1, self.spec
        members = range(spec.workers) if members is None else members
        participants = self.participants(number, state.banned, members)
        codecs, message = self.policy.codecs, self.method.broadcast(state.global_best, state.memory)
        behind = [told for worker in participants if (told := state.told.get(worker, 0)) < state.version]
        return Order(
            round=number,
            task=self.method.conversation,
            participants=participants,
            inertia=inertia_at(number, spec.rounds, spec.swarm.inertia),
            learning_rate=rate_at(spec, number),
            global_best=message if behind else None,
            receivers=len(behind),
            payload=sum(bytes_to_catch_up(state, told, message, codecs) for told in behind),
            version=state.version,
            updates=state.updates,
            members=len(members),
        )

    def play(self, state: ServerState, order: Order, swarm: Swarm) -> tuple[ServerState, RoundLog]:
        """Carry an order out with a swarm: the conversation that the method holds."""
        if self.method.conversation == "average":
            return play_average_round(
                state, order, swarm, self.method, self.combine, order.members or self.spec.workers, self.policy.codecs
            )
        return play_round(state, order, swarm, self.verifier, self.policy)

    def participants(
        self, round_number: int, banned: frozenset[WorkerId], members: Sequence[WorkerId]
    ) -> tuple[WorkerId, ...]:
        """Who takes part in a round: every member that is not banned, or as many as the spec says, at random."""
        able = set(members) - banned
        count = self.spec.participants_of(len(members))
        if count >= len(members):
            return tuple(sorted(able))
        places = max(self.spec.workers, max(members) + 1)  # numbers, given or yet to be given
        drawn = stream(self.spec.seed, "participation", round_number).permutation(places)
        return tuple(sorted([int(worker) for worker in drawn if worker in able][:count]))


def rate_at(spec: Spec, round_number: int) -> float:
    """The learning rate of a round."""
    return spec.local.learning_rate * spec.local.decay ** (round_number - 1)
