"""The number of BLAS threads changes no number: aggregators, the mixture and attacks in two processes."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

PROGRAM = """
import hashlib
import numpy as np
from cbdsl import register
from cbdsl.algorithm.aggregators import TrialSet, TrustedReference, aggregate
from cbdsl.algorithm.mixture import mix_steps
from cbdsl.arrays import norm
from cbdsl.attacks.weights import largest_gamma

draws = np.random.default_rng(0)
for workers, size in ((10, 7_850), (30, 21_840)):
    at = draws.standard_normal(size).astype(np.float32)
    rows = at + draws.standard_normal((workers, size)).astype(np.float32) / 10
    losses = lambda given: given.astype(np.float64).sum(1)
    for name in register.aggregator.names():
        for rule in (name, f"nnm+{name}", f"bucketing+{name}"):
            trial = TrialSet(40, losses, lambda model, samples: (float(losses(model[None])[0]), rows[0]))
            trust = TrustedReference(at, lambda: rows[:5].mean(0), losses, trial=trial)
            print(workers, rule, hashlib.sha256(aggregate(rule, list(rows), 3, trust)).hexdigest())
    doubles = rows.astype(np.float64)
    mixture = mix_steps(doubles - at, 5, lambda step: float(np.square(step - doubles[0] + at).sum()))
    print(hashlib.sha256(mixture.step).hexdigest(), mixture.weights)
    print(norm(doubles[0]), largest_gamma(doubles, doubles.mean(0), doubles.std(0)))
"""


@pytest.mark.slow
def test_numbers_do_not_depend_on_the_threads_of_blas() -> None:
    if (os.cpu_count() or 1) < 2:
        pytest.skip("needs two processors")
    started = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM],
            env={**os.environ, "OPENBLAS_NUM_THREADS": threads, "MKL_NUM_THREADS": threads, "OMP_NUM_THREADS": threads},
            stdout=subprocess.PIPE,
            text=True,
        )
        for threads in ("1", "2")
    ]
    one, two = (process.communicate()[0] for process in started)
    assert len(one.splitlines()) > 40
    assert one == two
