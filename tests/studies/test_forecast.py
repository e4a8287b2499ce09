from __future__ import annotations

from pathlib import Path

import pytest

from cbdsl.runs.resolve import resolve
from cbdsl.spec import Spec
from cbdsl.studies import sweep as job
from cbdsl.studies.sweep import Forecast, Task, forecast


def tasks(*rounds: int, method: str = "cb-dsl") -> list[Task]:
    return [Task(resolve(Spec(method=method, rounds=count))) for count in rounds]


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> list[Spec]:
    """Pretended runs: two seconds before the first round, three per round."""
    asked: list[Spec] = []

    def pretend(spec: Spec, threads: int) -> tuple[float, float]:
        assert threads >= 1
        asked.append(spec)
        return 2.0, 3.0

    monkeypatch.setattr(job, "_time_run", pretend)
    return asked


def test_a_forecast_scales_a_short_run_by_the_work_that_is_missing(timed: list[Spec], tmp_path: Path) -> None:
    found = forecast(tasks(10, 100, 100), tmp_path, jobs=1)
    assert (found.runs, found.missing, found.processes) == (2, 2, 1)
    assert found.seconds == pytest.approx(2 + 10 * 3 + 2 + 100 * 3)
    assert [spec.rounds for spec in timed] == [1, 2]  # the first one reads the data


def test_every_method_is_timed_once_and_processes_share_the_work(timed: list[Spec], tmp_path: Path) -> None:
    found = forecast([*tasks(4, 8), *tasks(6, method="fedavg")], tmp_path, jobs=3)
    assert [(spec.method, spec.rounds) for spec in timed] == [("cb-dsl", 1), ("cb-dsl", 2), ("fedavg", 2)]
    assert found.seconds == pytest.approx((3 * 2 + (4 + 8 + 6) * 3) / 3)


def test_what_is_done_is_not_counted(timed: list[Spec], tmp_path: Path) -> None:
    both = tasks(10, 20)
    for task in both:
        task.folder(tmp_path).mkdir(parents=True)
        (task.folder(tmp_path) / "summary.json").touch()
    done = forecast(both, tmp_path)
    assert done.describe() == "2 runs, 2 of them done."
    assert not timed
    left = forecast([*both, *tasks(30)], tmp_path, jobs=1)
    assert left.missing == 1
    assert left.seconds == pytest.approx(2 + 30 * 3)


@pytest.mark.parametrize(
    ("seconds", "words"), [(20.0, "about a minute"), (1800.0, "about 30 min"), (9000.0, "about 2.5 hours")]
)
def test_a_forecast_in_words(seconds: float, words: str) -> None:
    text = Forecast(12, 9, 2, seconds, ("fedavg", "cb-dsl")).describe()
    assert text.startswith(
        f"12 runs, 3 of them done: {words} with 2 processes, estimated from 2 rounds of fedavg and cb-dsl"
    )


def work(**settings: object) -> float:
    usual = {"data.samples_per_worker": 300, "local.batch_size": 10, "local.epochs": 2}
    return Task(resolve(Spec().with_settings({**usual, **settings}))).round_work


def test_the_work_of_a_round_follows_its_steps_and_not_the_epochs_that_they_replace() -> None:
    epochs = work(method="fedavg", shared="none")
    assert work(**{"method": "fedavg", "shared": "none", "local.steps": 60}) == epochs
    assert work(**{"method": "fedavg", "shared": "none", "local.steps": 120}) == 2 * epochs
    assert work(**{"method": "fedavg", "shared": "none", "local.steps": 60, "local.epochs": 1}) == epochs


def test_a_method_without_gradients_only_scores() -> None:
    assert work(method="pso", shared="none") == 50 * 300
    assert work(method="cb-dsl", shared="none") == 50 * (300 + 3 * 2 * 300)


def test_a_short_run_is_really_timed(tmp_path: Path) -> None:
    settings = {"workers": 3, "model": "softmax", "data.samples_per_worker": 20, "data.shared_scoring": 50}
    found = forecast([Task(resolve(Spec().with_settings({**settings, "rounds": 1000})))], tmp_path, jobs=1)
    assert 0.1 < found.seconds < 1000
    assert not any(tmp_path.iterdir())
