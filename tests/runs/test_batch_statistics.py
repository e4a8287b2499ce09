"""BatchNorm: statistics stay where they are computed; methods that claim a score refuse it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from torch import nn

import cbdsl
from cbdsl.algorithm.methods import FedProx, OwnWeights
from cbdsl.algorithm.worker_round import draw_batches, stack_batches
from cbdsl.arrays import Floats, Indices, Samples
from cbdsl.engines.engine import Sgd
from cbdsl.engines.torch_engine import StackedTorchEngine, TorchEngine
from cbdsl.models.batch_statistics import calibrate, statistics_layers
from cbdsl.models.to_torch import to_flat
from cbdsl.network.session import open_run
from cbdsl.rng import stream
from cbdsl.runs import loop
from cbdsl.runs.build import Experiment, UserParts
from cbdsl.runs.resolve import refuse_idle, resolve
from cbdsl.testing import check_method
from cbdsl.testing.laws import small_data, small_spec as small_laws
from support.helpers import blobs, perceptron, run_until, small_spec
from support.refusals import refused_as


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 3))


@pytest.mark.parametrize("method", ["fedavg", "fedprox", "scaffold", "fedadam", "central", "local-only", "server-only"])
def test_methods_in_which_nobody_claims_train_batchnorm(method: str, tmp_path: Path) -> None:
    settings = {"options.fedadam.rate": 0.05} if method == "fedadam" else {}
    spec = small_spec(method=method, rounds=12, local__learning_rate=0.1).with_settings(settings)
    result = cbdsl.run(spec, model=normed, data=blobs(), out=tmp_path / "run")
    assert result.summary.engine == "torch"
    assert result.summary.final_accuracy > 0.7
    features = blobs().test.features
    predicted = result.predict(features)
    assert np.array_equal(result.model(torch.from_numpy(features)).argmax(1).numpy(), predicted)
    tensors = load_file(tmp_path / "run" / "model.safetensors")
    loaded = normed()
    loaded.load_state_dict({name: torch.from_numpy(each) for name, each in tensors.items()})
    assert np.array_equal(loaded.eval()(torch.from_numpy(features)).argmax(1).numpy(), predicted)
    assert tensors["1.running_mean"].any()
    run_until(3, spec, model=normed, data=blobs(), out=tmp_path / "stopped")
    assert np.array_equal(loop.resume(tmp_path / "stopped", model=normed, data=blobs()).weights, result.weights)


@pytest.mark.parametrize("method", ["cb-dsl", "restart", "fedpso", "pso"])
def test_methods_that_claim_refuse_it_with_the_reason(method: str) -> None:
    with refused_as("not-supported", "nn.BatchNorm1d(6)", "nn.GroupNorm(2, 6)", "fedavg", "could not reproduce"):
        cbdsl.run(small_spec(method=method), model=normed, data=blobs())


def test_statistics_are_not_sent() -> None:
    spec = small_spec(method="fedavg", rounds=2)
    plain, own = (cbdsl.run(spec, model=build, data=blobs()).summary for build in (perceptron, normed))
    assert own.parameters == plain.parameters + 12
    assert own.uplink_bytes - plain.uplink_bytes == 2 * 6 * 4 * 12


FEDBN = {
    "method": "fedavg", "rounds": 3, "local__batchnorm": "own", "local__learning_rate": 0.1, "data__local_test": 0.25,
    "data__partition": "feature",
}  # fmt: skip


def test_fedbn_averages_all_but_the_norms_which_stay_on_their_workers() -> None:
    spec = resolve(small_spec(**FEDBN))
    experiment = Experiment.prepare(spec, UserParts(normed, blobs()), threads=1)
    norms = np.zeros(experiment.engine.size, bool)
    norms[8 * 6 + 6 : 8 * 6 + 6 + 12] = True  # behind the first layer
    assert np.array_equal(experiment.network.norm_places(), norms)
    model, own, train = experiment.initial[0], np.repeat(experiment.initial, 6, 0), experiment.dataset.train
    for number in (1, 2, 3):
        batches = stack_batches([
            draw_batches(held, spec.local, stream(spec.seed, "batches", number, worker))
            for worker, held in enumerate(experiment.split.workers)
        ])  # fmt: skip
        starts = np.where(norms, own, model)
        own = experiment.engine.train(starts, train, batches, Sgd(0.1))
        model = np.where(norms, experiment.initial[0], own.mean(0, np.float64)).astype(np.float32)
    result = cbdsl.run(spec, model=normed, data=blobs(), threads=2)
    np.testing.assert_allclose(result.weights, model, atol=1e-6)
    assert np.array_equal(result.weights[norms], experiment.initial[0][norms])
    assert result.personal_models is not None
    for worker in range(6):
        kept = result.personal_models[worker]
        np.testing.assert_allclose(kept, np.where(norms, own[worker], result.weights), atol=1e-6)
        assert np.array_equal(kept[~norms], result.weights[~norms])
        module = result.personal_model(worker)
        features = torch.from_numpy(train.features[experiment.split.workers[worker]])
        hidden = module[0](features).detach()  # type: ignore[index]
        np.testing.assert_allclose(module[1].running_mean, hidden.mean(0), rtol=1e-4, atol=1e-6)  # type: ignore[index]
        seen = train.taken(experiment.split.tests[worker])
        found = module(torch.from_numpy(seen.features)).argmax(1).numpy()
        assert np.mean(found == seen.labels) == result.per_worker["personal_accuracy"][worker]


@pytest.mark.parametrize("method", ["fedavg", "fedprox", "fedavgm", "fedadam"])
@pytest.mark.parametrize("codec", ["none", "q8", "topk"])
def test_fedbn_resumes_exactly_and_keeps_models_by_worker(method: str, codec: str, tmp_path: Path) -> None:
    spec = small_spec(**{**FEDBN, "method": method, "rounds": 4, "codec__up": codec})
    whole = cbdsl.run(spec, model=normed, data=blobs(), out=tmp_path / "whole")
    run_until(2, spec, model=normed, data=blobs(), out=tmp_path / "run")
    resumed = loop.resume(tmp_path / "run", model=normed, data=blobs())
    assert np.array_equal(resumed.weights, whole.weights)
    for name in ("local_test.csv", "personal_models.safetensors"):
        assert (tmp_path / "run" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    assert whole.personal_models is not None
    assert len({row.tobytes() for row in whole.personal_models.values()}) == 6
    assert cbdsl.load(tmp_path / "run").personal_models.buffers_of(2)["1.running_mean"].shape == (6,)
    plain = cbdsl.run(spec.with_settings({"local.batchnorm": "shared"}), model=normed, data=blobs())
    assert not np.array_equal(plain.weights, whole.weights)
    assert plain.personal_models is None


def test_a_method_whose_workers_keep_some_weights_obeys_the_laws_of_methods() -> None:
    size = Experiment.prepare(resolve(small_laws()), UserParts(data=small_data()), threads=1).engine.size
    check_method(OwnWeights(FedProx(), np.arange(size) % 5 == 0))


@pytest.mark.parametrize(
    ("settings", "code", "facts"),
    [
        ({"method": "cb-dsl"}, "conflict", ["cb-dsl", "local.batchnorm=own", "could not reproduce"]),
        ({"method": "restart"}, "conflict", ["restart", "fedavg"]),
        ({"method": "scaffold"}, "conflict", ["scaffold", "fedprox"]),
    ],
)
def test_methods_that_cannot_keep_norms_say_why(settings: dict[str, str], code: str, facts: list[str]) -> None:
    with refused_as(code, *facts):
        resolve(small_spec(**{**FEDBN, **settings}))


def test_norms_that_are_not_there_and_workers_elsewhere_are_refused(tmp_path: Path) -> None:
    with refused_as("no-effect", "local.batchnorm=own", "nn.BatchNorm1d"):
        cbdsl.run(small_spec(**FEDBN), model=perceptron, data=blobs())
    alone = resolve(small_spec(method="local-only", local__batchnorm="own"))
    with refused_as("no-effect", "local.batchnorm", "no weights are averaged"):
        refuse_idle([alone], ["local.batchnorm"])
    experiment = Experiment.prepare(resolve(small_spec(**FEDBN)), UserParts(normed, blobs()), threads=1)
    with refused_as("not-supported", "local.batchnorm=own"):
        open_run(experiment, tmp_path / "run")


def problem(rows: int = 3) -> tuple[Samples, Floats, Indices]:
    rng = np.random.default_rng(0)
    samples = Samples(rng.normal(2, 3, (60, 8)).astype(np.float32), rng.integers(0, 3, 60).astype(np.int32))
    torch.manual_seed(0)
    weights = np.stack([to_flat(normed()) for _ in range(rows)])
    return samples, weights, rng.integers(0, 60, (rows, 5, 7)).astype(np.int32)


def test_training_takes_the_statistics_of_batches_as_torch_does() -> None:
    samples, weights, batches = problem()
    engine = TorchEngine(normed(), 2, calibration=samples.features)
    before = engine.losses(weights, samples, np.arange(60, dtype=np.int32))
    found = engine.train(weights, samples, batches, Sgd(0.1, 0.9))
    for worker in range(3):
        module = normed()
        nn.utils.vector_to_parameters(torch.from_numpy(weights[worker].copy()), module.parameters())
        optimizer = torch.optim.SGD(module.parameters(), 0.1, momentum=0.9)
        for batch in batches[worker]:
            optimizer.zero_grad()
            output = module(torch.from_numpy(samples.features[batch]))
            loss = nn.functional.cross_entropy(output, torch.from_numpy(samples.labels[batch]).long())
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        np.testing.assert_allclose(found[worker], to_flat(module), rtol=1e-4, atol=1e-5)
    again = engine.losses(weights, samples, np.arange(60, dtype=np.int32))
    assert np.array_equal(before, again)  # training left nothing behind
    stacked = StackedTorchEngine(normed(), torch.device("cpu"), calibration=samples.features)
    np.testing.assert_allclose(stacked.train(weights, samples, batches, Sgd(0.1, 0.9)), found, rtol=1e-4, atol=1e-5)
    assert np.array_equal(stacked.losses(weights, samples, np.arange(60, dtype=np.int32)), before)


def test_scores_are_those_of_statistics_of_the_given_samples() -> None:
    samples, weights, _ = problem()
    engine = TorchEngine(normed(), calibration=samples.features[:40])
    module = normed()
    nn.utils.vector_to_parameters(torch.from_numpy(weights[1]), module.parameters())
    hidden = module[0](torch.from_numpy(samples.features[:40])).detach()  # type: ignore[index]
    calibrate(module, statistics_layers(module), torch.from_numpy(samples.features[:40]))
    norm = module[1]  # type: ignore[index]
    np.testing.assert_allclose(norm.running_mean, hidden.mean(0), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(norm.running_var, hidden.var(0), rtol=1e-5)
    with torch.no_grad():
        logits = module(torch.from_numpy(samples.features))
    expected = nn.functional.cross_entropy(logits, torch.from_numpy(samples.labels).long()).item()
    found = engine.losses(weights, samples, np.arange(60, dtype=np.int32))
    assert found[1] == pytest.approx(expected, rel=1e-5)
    many = TorchEngine(normed(), 3, calibration=samples.features[:40])
    assert np.array_equal(many.losses(weights, samples, np.arange(60, dtype=np.int32)), found)
    with pytest.raises(ValueError, match="give the engine samples"):
        TorchEngine(normed()).losses(weights, samples, np.arange(60, dtype=np.int32))


def test_a_batch_of_one_sample_has_no_statistics_and_takes_no_step() -> None:
    samples, weights, batches = problem()
    batches[0, 2, 1:] = -1
    engine = TorchEngine(normed())
    found = engine.train(weights, samples, batches, Sgd(0.1))
    assert np.array_equal(found[0], engine.train(weights, samples, batches[:, [0, 1, 3, 4]], Sgd(0.1))[0])


def test_a_frozen_batchnorm_in_evaluation_mode_keeps_what_it_learned_elsewhere() -> None:
    class Kept(nn.BatchNorm1d):
        def train(self, mode: bool = True) -> Kept:
            del mode
            return super().train(False)

    def tuned() -> nn.Module:
        module = nn.Sequential(nn.Linear(8, 6), Kept(6), nn.Tanh(), nn.Linear(6, 3))
        module[:2].requires_grad_(False)
        module[1].running_mean.fill_(0.25)  # type: ignore[operator]
        return module

    result = cbdsl.run(small_spec(), model=tuned, data=blobs())
    assert result.weights.shape == (21,)
    assert result.model[1].running_mean.tolist() == [0.25] * 6  # type: ignore[index]
