"""Per-worker results: what is held back, what is measured on it, and what is left in the folder."""

from __future__ import annotations

import csv
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import cbdsl
from cbdsl.data.partition import hold_back, split
from cbdsl.models.personal_models import PersonalModels
from cbdsl.network.session import open_run
from cbdsl.report.figures import save_local_test
from cbdsl.runs import loop, worker_results
from cbdsl.runs.build import Experiment, UserParts
from cbdsl.runs.folder import read_result
from cbdsl.runs.metrics import Spread
from cbdsl.runs.records import summary_rows
from cbdsl.runs.resolve import refuse_idle, resolve
from runs.test_tasks import DATA, SETTINGS, WAYS
from support.helpers import blobs, perceptron, run_until, small_spec
from support.refusals import refused_as

HELD = {"data__local_test": 0.25, "data__partition": "shards"}
FILES = ("local_test.csv", "personal_models.safetensors", "summary.json")


def played(**settings: Any) -> cbdsl.Result:  # noqa: ANN401 - of a spec
    return cbdsl.run(small_spec(**{**HELD, **settings}), model=perceptron, data=blobs(), threads=1)


def test_a_worker_holds_back_its_share_whatever_the_others_have() -> None:
    own = np.array([9, 4, 30, 2, 17, 8, 1, 5], np.int32)
    kept, held = hold_back(own, 0.25, seed=3, worker=5)
    assert sorted([*kept, *held]) == sorted(own)
    assert len(held) == 2
    assert list(held) == sorted(held)
    assert [one for one in own if one not in held] == list(kept)
    assert np.array_equal(hold_back(own, 0.25, 3, 5)[1], held)
    assert not np.array_equal(hold_back(own, 0.25, 3, 6)[1], held)
    assert [len(part) for part in hold_back(own[:2], 0.9, 0, 0)] == [1, 1]
    assert [len(part) for part in hold_back(own[:3], 0.01, 0, 0)] == [2, 1]
    with refused_as("out-of-range", "worker 7", "data.local_test=0.2"):
        hold_back(own[:1], 0.2, 0, 7)


@pytest.mark.parametrize("partition", ["iid", "shards", "dirichlet", "similarity", "quantity"])
def test_what_is_held_back_is_taken_from_the_share_that_a_worker_has_without_it(partition: str) -> None:
    spec, labels = small_spec(data__partition=partition), blobs().train.labels
    whole = split(labels, spec.data, spec.workers, spec.seed)
    parts = split(labels, spec.with_settings({"data.local_test": 0.25}).data, spec.workers, spec.seed)
    assert whole.tests == ()
    for before, kept, held in zip(whole.workers, parts.workers, parts.tests, strict=True):
        assert sorted(before) == sorted([*kept, *held])
        assert len(held) == max(1, round(len(before) / 4))
    assert np.array_equal(whole.shared_scoring, parts.shared_scoring)


def test_a_partition_that_alters_features_alters_what_is_held_back_too() -> None:
    spec = resolve(small_spec(**{**HELD, "data__partition": "feature"}))
    experiment, plain = Experiment.prepare(spec, UserParts(perceptron, blobs()), threads=1), blobs().train
    for rows in experiment.split.owned:
        assert (experiment.dataset.train.features[rows] != plain.features[rows]).all()


def test_the_global_model_and_personal_bests_are_measured_on_each_worker() -> None:
    result = played()
    spec = resolve(result.spec)
    experiment = Experiment.prepare(spec, UserParts(perceptron, blobs()), threads=1)
    list(loop.play_rounds(experiment, experiment.first_state()))
    best, train = experiment.memory_swarm.personal(range(6)), experiment.dataset.train
    assert result.personal_models is not None
    assert list(result.personal_models) == list(range(6))
    for worker, rows in enumerate(experiment.split.tests):
        seen = train.taken(rows)
        everything = np.arange(len(rows), dtype=np.int32)
        for column, weights in (("accuracy", result.weights), ("personal_accuracy", best[worker])):
            accuracy = experiment.engine.accuracies(weights[None], seen, everything)[0]
            assert result.per_worker[column][worker] == accuracy
        assert np.array_equal(result.personal_models[worker], best[worker])
        predicted = result.personal_model(worker)(torch.from_numpy(seen.features)).argmax(1).numpy()
        assert np.mean(predicted == seen.labels) == result.per_worker["personal_accuracy"][worker]
    found = result.summary.local_test
    assert found is not None
    assert (found.workers, found.samples) == (6, sum(map(len, experiment.split.tests)))
    assert found.metrics["accuracy"] == Spread.of(result.per_worker["accuracy"].tolist(), "higher")
    assert found.personal["loss"] == Spread.of(result.per_worker["personal_loss"].tolist(), "lower")
    with refused_as("not-supported", "worker 6", "data.local_test"):
        result.personal_model(6)


def test_a_spread_is_that_of_the_values_by_hand() -> None:
    found = Spread.of([float(value) for value in range(1, 21)], "lower")
    assert found == Spread(10.5, 19.5, 1.0, pytest.approx(math.sqrt(33.25)), 20, "lower")  # type: ignore[arg-type]
    assert Spread.of([0.5, None], "higher") == Spread(0.5, 0.5, 0.5, 0.0, 1, "higher")
    assert Spread.of([None], "higher") is None
    assert Spread.of([2.0, math.nan], "lower") == Spread(None, None, 2.0, None, 2, "lower")


@pytest.mark.parametrize("task", DATA)
@pytest.mark.parametrize("way", WAYS)
def test_every_task_and_method_has_the_metrics_of_its_models(task: str, way: str, tmp_path: Path) -> None:
    spec = cbdsl.Spec().with_settings({**SETTINGS, **WAYS[way], "data.local_test": 0.2, "data.local_test_every": 2})
    result = cbdsl.run(spec, data=DATA[task], threads=1, callbacks=[])
    found = result.summary.local_test
    assert found is not None
    main = {"regression": "rmse", "reconstruction": "loss"}[task]
    assert bool(found.metrics) == (way != "local-only")
    assert bool(found.personal) == (way in {"cb-dsl", "local-only"}) == (result.personal_models is not None)
    for spreads, prefix in ((found.metrics, ""), (found.personal, "personal_")):
        assert next(iter(spreads), main) == main
        for name, spread in spreads.items():
            assert spread.workers == 6
            values = result.per_worker[prefix + name]
            assert spread.mean == pytest.approx(values.mean())
            assert spread.best == (values.max() if spread.better == "higher" else values.min())
    assert [line.round for line in result.rounds if line.local_test] == [2, 4]
    assert any("deviation" in text for _, text in summary_rows(result.summary))
    prefix, spreads = ("local", found.metrics) if found.metrics else ("personal", found.personal)
    frame = result.to_frame()[f"{prefix}_{main}_mean"]
    assert frame.isna().tolist() == [True, False, True, False, True]
    assert (
        frame[4] == getattr(result.rounds[3].local_test, "personal" if prefix == "personal" else "metrics")[main].mean
    )
    result.to_csv(tmp_path / "rounds.csv")
    assert f"{prefix}_{main}_worst_tenth" in (tmp_path / "rounds.csv").read_text().splitlines()[0]


@pytest.mark.parametrize("settings", [{}, {"method": "local-only"}, {"method": "fedavg"}])
def test_a_run_that_was_stopped_leaves_the_same_files_and_so_does_resuming_a_finished_one(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    spec = small_spec(**HELD, data__local_test_every=2, **settings)
    given: dict[str, Any] = {"model": perceptron, "data": blobs()}
    whole = cbdsl.run(spec, out=tmp_path / "whole", **given)
    run_until(3, spec, out=tmp_path / "run", **given)
    for _ in range(2):  # the second time it is finished
        resumed = loop.resume(tmp_path / "run", **given)
        assert resumed.summary.local_test == whole.summary.local_test
        assert [line.local_test for line in resumed.rounds] == [line.local_test for line in whole.rounds]
        for name in FILES[:2]:
            one, other = (tmp_path / folder / name for folder in ("whole", "run"))
            assert one.exists() == other.exists() == (name == FILES[0] or settings.get("method") != "fedavg")
            assert not one.exists() or one.read_bytes() == other.read_bytes()
    _, summary, records = read_result(tmp_path / "run")
    assert summary.local_test == whole.summary.local_test
    assert records[1].local_test is not None
    with (tmp_path / "run" / "local_test.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [int(row["worker"]) for row in rows] == list(range(6))
    column = "personal_accuracy" if settings.get("method") == "local-only" else "accuracy"
    assert [float(row[column]) for row in rows] == whole.per_worker[column].tolist()
    again = cbdsl.load(tmp_path / "run")
    kept = again.personal_models
    assert {name: list(column) for name, column in again.per_worker.items()} == {
        name: list(column) for name, column in whole.per_worker.items()
    }
    assert (kept is None) == (whole.personal_models is None)
    if kept is not None and whole.personal_models is not None:
        assert np.array_equal(kept[3], whole.personal_models[3])
        features = torch.from_numpy(blobs().test.features)
        np.testing.assert_allclose(
            again.personal_model(3)(features).detach(), whole.personal_model(3)(features).detach(), rtol=1e-6
        )
    save_local_test(tmp_path / "figure.png", whole.summary, whole.per_worker, whole.rounds)
    assert (tmp_path / "figure.png").stat().st_size > 10_000


def test_without_the_setting_nothing_is_measured_and_no_key_changes(tmp_path: Path) -> None:
    result = cbdsl.run(small_spec(), model=perceptron, data=blobs(), out=tmp_path / "run")
    assert (result.summary.local_test, dict(result.per_worker), result.personal_models) == (None, {}, None)
    assert not {path.name for path in (tmp_path / "run").iterdir()} & set(FILES[:2])
    assert "local_test" not in (tmp_path / "run" / "spec.toml").read_text()
    assert "local_test" not in (tmp_path / "run" / "rounds.jsonl").read_text()


def test_attackers_are_left_out_and_of_many_workers_a_fixed_sample_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    attacked = played(attack__byzantine=2)
    assert set(attacked.per_worker["worker"]).isdisjoint(attacked.summary.byzantine)
    assert len(attacked.per_worker["worker"]) == 4
    everybody = played()
    monkeypatch.setattr(worker_results, "MOST_WORKERS", 3)
    some, again = played(), played()
    chosen = some.per_worker["worker"]
    assert (len(chosen), list(chosen)) == (3, list(again.per_worker["worker"]))
    assert list(some.per_worker["personal_loss"]) == list(everybody.per_worker["personal_loss"][chosen])
    monkeypatch.setattr(worker_results, "MOST_BYTES", 100)
    none = played()
    assert none.personal_models is None
    assert list(none.per_worker["personal_loss"]) == list(some.per_worker["personal_loss"])
    assert any("not kept" in text for _, text in summary_rows(none.summary))


def test_shards_and_blocks_of_workers_give_the_same_models() -> None:
    experiment = Experiment.prepare(resolve(small_spec(**HELD)), UserParts(perceptron, blobs()), threads=1)
    list(loop.play_rounds(experiment, experiment.first_state()))
    swarm = experiment.memory_swarm
    whole, some = swarm.personal(range(6)), swarm.personal([4, 1])
    assert list(some) == [4, 1]
    assert all(np.array_equal(row, whole[worker]) for worker, row in some.items())


def test_workers_that_never_took_part_have_no_model_of_their_own() -> None:
    result = played(participation=2, rounds=2, data__partition="iid", workers=8)
    assert result.personal_models is not None
    there = list(result.personal_models)
    assert 2 <= len(there) <= 4
    known = np.isfinite(result.per_worker["personal_loss"])
    assert result.per_worker["worker"][known].tolist() == there
    assert np.isfinite(result.per_worker["loss"]).all()
    assert result.summary.local_test is not None
    assert result.summary.local_test.personal["loss"].workers == len(there)


def test_what_cannot_be_measured_is_refused_with_the_reason(tmp_path: Path) -> None:
    with refused_as("out-of-range", "worker 0", "has 1"):
        played(data__partition="iid", data__samples_per_worker=1)
    with refused_as("out-of-range", "data.local_test", "0.9"):
        small_spec(data__local_test=1.0)
    with refused_as("no-effect", "data.local_test_every", "data.local_test=0.2"):
        refuse_idle([resolve(small_spec(data__local_test_every=2))], ["data.local_test_every"])
    served = Experiment.prepare(resolve(small_spec(**HELD)), UserParts(perceptron, blobs()), threads=1, deal=False)
    with refused_as("not-supported", "data.local_test=0.25", "never leave their devices"):
        open_run(served, tmp_path / "served")
    assert not (tmp_path / "served").exists()


def test_models_that_do_not_fit_their_workers_are_refused(tmp_path: Path) -> None:
    good = PersonalModels(np.array([1, 4], np.int32), np.zeros((2, 3), np.float32), {"mean": np.ones((2, 5))})
    assert PersonalModels.of(good.tensors()).buffers_of(4)["mean"].tolist() == [1.0] * 5
    for name, array in {"workers": [4, 1], "weights": np.zeros((1, 3), np.float32), "buffers/mean": [1.0]}.items():
        with pytest.raises(ValueError, match="do not fit"):
            PersonalModels.of({**good.tensors(), name: np.asarray(array)})
    with pytest.raises(KeyError):
        good[2]
    (tmp_path / "personal_models.safetensors").write_bytes(b"no")
    with refused_as("unreadable-file"):
        PersonalModels.read(tmp_path)
    (tmp_path / "local_test.csv").write_text("worker,samples,accuracy\n0,12,0.5\n1,12\n")
    with refused_as("damaged-file", "local_test.csv"):
        worker_results.read_columns(tmp_path / "local_test.csv")
