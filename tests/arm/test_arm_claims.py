"""No honest device is banned for its instructions: claims made on ARM, measured by a server on this machine."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import cbdsl
from cbdsl.algorithm.messages import Swarm
from cbdsl.algorithm.verification import make_verifier
from cbdsl.algorithm.worker_round import make_scorer
from cbdsl.data.dataset import Dataset
from cbdsl.engines.engine import Sgd
from cbdsl.engines.native_engine import NativeEngine
from cbdsl.models.architecture import Architecture
from cbdsl.models.zoo import usual
from cbdsl.runs.build import Experiment
from cbdsl.spec import Spec
from support.emulated import MACHINES, EmulatedEngine, Machine, emulated
from support.layer_kinds import batches_for, moved
from support.networks import needs_native, samples_for

pytestmark = [pytest.mark.arm, needs_native]
TOLERANCE = Spec().verification.tolerance
SCALES = (0.1, 1.0, 3.0, 10.0, 30.0)
RUNS: dict[str, tuple[dict[str, object], str]] = {
    "paper": ({"model": "cnn"}, "paper-iid"),
    "guard": ({"model": "cnn", "defence.guard": True, "defence.commitment": True}, "strong-iid"),
    "codec": ({"model": "mlp", "codec.up": "q4"}, "paper-noniid"),
}


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("name", ["cnn", "mlp", "softmax", "har-cnn", "ds-cnn"])
def test_claims_of_models_of_every_scale_are_believed(machine: Machine, name: str) -> None:
    network = usual(name)
    samples, everything = samples_for(network, 12), np.arange(12, dtype=np.int32)
    verifier = make_verifier(make_scorer(NativeEngine(network, 2), samples, everything), network.size, TOLERANCE)
    with emulated(network, machine) as there:
        starts = np.concatenate([np.float32(scale) * moved(network, 1) for scale in SCALES])  # (5, D)
        trained = there.train(starts, samples, batches_for(5, 12, 3), Sgd(0.01))
        models = np.concatenate([starts, trained])  # (10, D)
        claims = there.losses(models, samples, everything).astype(np.float32)
    gaps = []
    for model, claim in zip(models, claims, strict=True):
        if np.isfinite(claim) and np.isfinite(model).all():
            found = verifier.check(float(claim), model, 0)
            assert found.believed, (name, claim, found)
            assert found.measured is not None
            gaps.append(abs(found.measured - float(claim)) / max(1.0, float(claim)))
    assert len(gaps) >= 6
    print(f"{machine.name} {name}: a claim is off by {max(gaps):.1e} at most; {TOLERANCE:g} is allowed")
    assert max(gaps) < TOLERANCE / 10


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("machine", MACHINES)
def test_a_server_here_bans_nobody_of_a_swarm_there(machine: Machine, run: str, mnist: Dataset) -> None:
    engines = []

    def swarm_there(stage: Experiment) -> Swarm:
        network = stage.network.subject
        assert isinstance(network, Architecture)
        engines.append(EmulatedEngine(network, machine))
        return replace(stage, engine=engines[0], make_swarm=None).memory_swarm

    settings, name = RUNS[run]
    small: dict[str, object] = {
        "workers": 3, "rounds": 3, "data.samples_per_worker": 40, "data.shared_scoring": 60,
        "data.shared_training": 20, "data.holdout": 60, "data.shard_size": 20, "local.epochs": 1,
    }  # fmt: skip
    spec = cbdsl.preset(name).with_settings(small | settings)
    try:
        result = cbdsl.run(spec, data=mnist, swarm=swarm_there, callbacks=[])
    finally:
        for engine in engines:
            engine.close()
    verdicts = [verdict for record in result.rounds for verdict in record.verdicts]
    gaps = [abs(verdict["measured"] - verdict["claimed"]) for verdict in verdicts]
    assert gaps
    print(f"{machine.name} {run}: {len(gaps)} uploads measured, off by {max(gaps):.1e} at most")
    assert max(gaps) < TOLERANCE / 10
    assert result.rounds[-1].banned == []
    assert not any(record.refuted or record.set_aside for record in result.rounds)
    assert any(record.accepted for record in result.rounds)
