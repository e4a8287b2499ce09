"""The only source of randomness: one stream per purpose, round and worker.

Philox is counter-based, so a stream is cheap to create and depends on its name alone, not on what was drawn before or
on which thread.
"""

from __future__ import annotations

import hashlib
from typing import Literal

import numpy as np

Purpose = Literal[
    "shared-set",  # which samples become D_G and the hold-out
    "partition",  # which samples each worker holds
    "local-test",  # the samples that a worker holds back, and the workers that are measured on them
    "features",  # how a worker's samples differ from those of others
    "initial-weights",  # the model(s) the swarm starts from
    "participation",  # which workers take part in a round
    "batches",  # the order of a worker's samples in a round
    "coefficients",  # c1 and c2 of a worker in a round
    "layers",  # layers that draw while they train, such as dropout
    "byzantine",  # which workers are attackers
    "attack",  # what an attacker uploads
    "attackers",  # draws that all attackers share
    "aggregator",
    "dropout",  # what an aggregator draws in a round
    "server-step",  # what a method's server draws in a round
    "hold-out",  # which half of the private hold-out the guard uses in a round
    "root",  # the batches of a server that trains on D_tr itself
    "alone",  # the batches of a baseline that learns without a swarm
    "search",  # where a search for settings looks, see studies/tune.py
    "generator",  # what a generator makes, see studies/generate.py
    "audit",  # which half of the hold-out an audit searches on, and how it repairs, see studies/audit.py
    "friedman",  # the samples of Friedman's function, see data/generated.py
    "machines",  # the samples of the machines, see data/generated.py
    "genie",  # the batches of the genie worker, see theory/genie.py
]


def stream(seed: int, purpose: Purpose, round_number: int = 0, worker: int = 0) -> np.random.Generator:
    """Return the stream of random numbers with this name."""
    name = f"{seed}/{purpose}/{round_number}/{worker}".encode()
    key = int.from_bytes(hashlib.blake2b(name, digest_size=16).digest(), "little")
    return np.random.Generator(np.random.Philox(key=key))


def seed_of(seed: int, purpose: Purpose, round_number: int = 0, worker: int = 0) -> int:
    """Return a 63-bit seed with this name, for other generators than numpy's."""
    return int(stream(seed, purpose, round_number, worker).integers(2**63))
