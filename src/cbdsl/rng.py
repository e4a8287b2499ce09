"""The only source of randomness: a stream of its own for every purpose, round and worker.

Philox is counter-based, so a stream costs nothing to create and depends on its name alone: not on what was
drawn before, by whom, in which order or on which thread.
"""

from __future__ import annotations

import hashlib
from typing import Literal

import numpy as np

Purpose = Literal[
    "shared-set",  # which samples become D_G and the hold-out
    "partition",  # which samples each worker holds
    "features",  # how a worker's samples differ from everybody else's
    "initial-weights",  # the model(s) the swarm starts from
    "participation",  # who takes part in a round
    "batches",  # the order of a worker's samples in a round
    "coefficients",  # c1 and c2 of a worker in a round
    "layers",  # layers that draw while they train, such as dropout
    "byzantine",  # which workers are attackers
    "attack",  # what an attacker sends
    "hold-out",  # which half of the private hold-out the guard uses in a round
    "root",  # the batches of a server that trains on D_tr itself
    "search",  # where a search for settings looks, see study/searches.py
    "generator",  # what a generator makes, see study/generator.py
    "genie",  # the batches of the genie worker, see theory/genie.py
]


def stream(seed: int, purpose: Purpose, round_number: int = 0, worker: int = 0) -> np.random.Generator:
    """The stream of random numbers with this name."""
    name = f"{seed}/{purpose}/{round_number}/{worker}".encode()
    key = int.from_bytes(hashlib.blake2b(name, digest_size=16).digest(), "little")
    return np.random.Generator(np.random.Philox(key=key))


def seed_of(seed: int, purpose: Purpose, round_number: int = 0, worker: int = 0) -> int:
    """A 63-bit seed with this name, for generators that are not numpy's."""
    return int(stream(seed, purpose, round_number, worker).integers(2**63))
