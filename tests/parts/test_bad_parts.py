"""Parts that go wrong: the error names the part and the way out, and nothing that was played is lost."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import cbdsl
from cbdsl.errors import UserError
from cbdsl.runs import loop
from support.helpers import read_rounds
from support.outside_parts import forget_guests, outside_file, outside_spec

COUNTING = '''
import numpy as np
import cbdsl
from cbdsl.algorithm.selection import Best, SelectionResult

calls = 0


def late():
    """Whether two rounds were played."""
    global calls
    calls += 1
    return calls > 2


@cbdsl.register.aggregator("late-nan")
def late_nan(rows, attackers, trust):
    """NaN from the third round on."""
    return rows.mean(0) * (np.nan if late() else 1)


@cbdsl.register.aggregator("late-shape")
def late_shape(rows, attackers, trust):
    """All rows from the third round on."""
    return rows if late() else rows.mean(0)


@cbdsl.register.aggregator("late-error")
def late_error(rows, attackers, trust):
    """An error from the third round on."""
    if late():
        raise RuntimeError("no more")
    return rows.mean(0)


@cbdsl.register.selection("late-stranger")
class Stranger(Best):
    """Invites nobody's worker from the third round on."""

    def invite(self, waiting, believed, view):
        return 77 if view.round > 2 else super().invite(waiting, believed, view)


@cbdsl.register.selection("late-nan-model")
class NanModel(Best):
    """Makes NaN from the third round on."""

    def combine(self, believed, view):
        made = super().combine(believed, view)
        return SelectionResult(made.model * np.float32(np.nan), 0.1) if view.round > 2 else made


@cbdsl.register.partition("strangers")
def strangers(pool, spec, workers, rng):
    """Samples that are not in the pool."""
    return [np.arange(10)] * workers


@cbdsl.register.partition("empty")
def empty(pool, spec, workers, rng):
    """Nothing."""
    return [pool.indices[:0]] * workers
'''


@pytest.fixture(autouse=True)
def _often(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(loop, "_CHECKPOINT_SECONDS", 0.0)
    monkeypatch.setattr(loop, "_CHECKPOINT_SHARE", 0.0)
    yield
    forget_guests()


def written(text: str, name: str = "bad_parts.py") -> str:
    Path(name).write_text(text)
    return name


def spec_of(plugin: str, **settings: Any) -> cbdsl.Spec:  # noqa: ANN401
    outside_file(Path())
    spec = outside_spec("my_parts.py", **settings)
    return spec.with_settings({"plugins": ["my_parts.py", plugin]})


@pytest.mark.parametrize(
    ("settings", "words", "harmless"),
    [
        (
            {"method": "fedavg", "defence__aggregator": "late-nan"},
            "aggregator late_nan returns numbers that are not",
            "mean",
        ),
        (
            {"method": "fedavg", "defence__aggregator": "late-shape"},
            r"aggregator late_shape returns shape \(6, 747\)",
            "mean",
        ),
        ({"selection__name": "late-stranger"}, r"Stranger invites worker 77, which is not waiting", "best"),
        ({"selection__name": "late-nan-model"}, r"NanModel returns a model of shape .* not finite", "best"),
    ],
)
def test_nothing_is_lost_when_a_part_goes_wrong(settings: dict[str, Any], words: str, harmless: str) -> None:
    """The rounds before are there; once the part is mended and its old copy taken away, the run goes on."""
    plugin = written(COUNTING)
    with pytest.raises(UserError, match=words) as caught:
        cbdsl.run(spec_of(plugin, rounds=5, **settings), out="run", callbacks=[])
    assert "cbdsl.testing.check_" in str(caught.value)
    before = read_rounds(Path("run"))
    assert [line["round"] for line in before] == [1, 2]

    written(COUNTING.replace("> 2", "> 1000"))
    with pytest.raises(UserError, match=r"bad_parts\.py was edited since the run") as caught:
        cbdsl.resume("run", callbacks=[])
    copy = next(Path("run/plugins").glob("*-bad_parts.py"))
    assert str(copy) in str(caught.value)
    assert read_rounds(Path("run")) == before

    copy.unlink()
    result = cbdsl.resume("run", callbacks=[])
    assert read_rounds(Path("run"))[:2] == before
    assert len(result.rounds) == 5
    key = "defence__aggregator" if harmless == "mean" else "selection__name"
    if harmless == "best":  # mended, it is the paper's rule
        same = cbdsl.run(spec_of(plugin, rounds=5, **settings | {key: harmless}), callbacks=[])
        assert [line.test_accuracy for line in same.rounds] == [line.test_accuracy for line in result.rounds]
    assert len(list(Path("run/plugins").glob("*-bad_parts.py"))) == 1


def test_an_object_that_went_wrong_can_be_mended_too() -> None:
    broken = True

    def rule(rows: Any, attackers: int, trust: Any) -> Any:  # noqa: ANN401, ARG001
        return rows.mean(0) * (float("nan") if broken else 1.0)

    outside_file(Path())
    spec = outside_spec("my_parts.py", method="fedavg")
    with pytest.raises(UserError, match=r"aggregator .*rule returns numbers that are not finite"):
        cbdsl.run(spec, aggregator=rule, out="run", callbacks=[])
    broken = False
    assert len(cbdsl.resume("run", aggregator=rule, callbacks=[]).rounds) == 4


def test_an_error_of_the_parts_own_is_not_hidden() -> None:
    plugin = written(COUNTING)
    with pytest.raises(RuntimeError, match="no more"):
        cbdsl.run(spec_of(plugin, method="fedavg", defence__aggregator="late-error"), out="run", callbacks=[])
    assert len(read_rounds(Path("run"))) == 2


@pytest.mark.parametrize(
    ("partition", "words"),
    [
        ("strangers", "The partition strangers gives worker 0 indices that are not in the pool.*check_partition"),
        ("empty", "The partition empty leaves worker 0 without samples"),
        ("unequall", "Unknown partition 'unequall'. Did you mean 'unequal'?"),
    ],
)
def test_a_bad_partition_is_found_before_anything_is_written(partition: str, words: str) -> None:
    with pytest.raises(UserError, match=words):
        cbdsl.run(spec_of(written(COUNTING), data__partition=partition), out="run")
    assert not Path("run").exists()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"attack__name": "shufle", "attack__byzantine": 1}, "Unknown attack 'shufle'. Did you mean 'shuffle'"),
        ({"method": "elastik"}, "Unknown method 'elastik'. Did you mean 'elastic'"),
        ({"selection__name": "pacient"}, "Unknown selection 'pacient'. Did you mean 'patient'"),
        ({"defence__aggregator": "winsorized", "method": "fedavg"}, "Did you mean 'winsorised'"),
        ({"model": "tanhnet"}, "Unknown model 'tanhnet'. Did you mean 'tanh-net'"),
        ({"data__source": "spiral"}, "Data 'spiral' is neither a data set by name .*spirals"),
        ({"method": "elastic", "options__elastic__pul": 1.0}, "'elastic' has no setting 'pul'. It has: pull, rate"),
        ({"method": "elastic", "options__elastic__pull": "far"}, "pull of the method 'elastic' takes a value like 0.5"),
        ({"options__elastic__pull": 0.5}, "options.elastic sets something of a part that this run does not use"),
    ],
)
def test_unknown_names_and_settings(settings: dict[str, Any], words: str) -> None:
    outside_file(Path())
    with pytest.raises(UserError, match=words):
        cbdsl.run(outside_spec("my_parts.py", **settings), out="run")
    assert not Path("run").exists()


def test_a_plugin_that_is_gone_when_the_run_is_resumed() -> None:
    plugin = outside_file(Path())
    cbdsl.run(outside_spec(plugin, rounds=2), out="run", callbacks=[])
    plugin.unlink()
    with pytest.raises(
        UserError, match=r"my_parts\.py of the run run is not there any more.*cp run/plugins/.*py"
    ) as caught:
        cbdsl.resume("run")
    copy, place = str(caught.value).rpartition("cp ")[2].split(" ")
    Path(copy).rename(place)
    (Path("run") / "checkpoint.npz").unlink()
    assert len(cbdsl.resume("run", callbacks=[]).rounds) == 2


def test_a_plugin_that_was_edited_before_the_first_checkpoint() -> None:
    plugin = outside_file(Path())
    cbdsl.run(outside_spec(plugin, rounds=2), out="run", callbacks=[])
    (Path("run") / "checkpoint.npz").unlink()
    before = read_rounds(Path("run"))
    plugin.write_text(plugin.read_text() + "\n# a remark\n")
    with pytest.raises(UserError, match="was edited since the run"):
        cbdsl.resume("run")
    assert read_rounds(Path("run")) == before
