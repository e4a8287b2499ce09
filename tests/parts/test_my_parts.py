"""A file outside the package: its parts by name in runs, in sweeps, after a crash and in the arena."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import cbdsl
from cbdsl import register, testing
from cbdsl.report import arena_page
from cbdsl.studies.arena import ArenaPlan, run_arena
from cbdsl.studies.sweep import grid, run_all
from support.helpers import read_rounds, run_until
from support.outside_parts import EXAMPLE, forget_guests, outside_file, outside_spec

PARTS = {
    "attacks": "shuffle",
    "aggregators": "winsorised",
    "pre-aggregations": "shortened",
    "selections": "patient",
    "methods": "elastic",
    "partitions": "unequal",
    "models": "tanh-net",
    "data": "spirals",
    "codecs": "half",
    "augmentations": "scaled",
    "metrics": "worst-error",
}
ATTACKED = {"attack__name": "shuffle", "attack__byzantine": 2}


@pytest.fixture(autouse=True)
def _alone() -> Iterator[None]:
    yield
    forget_guests()


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    outside_file(tmp_path)
    return "my_parts.py"


def test_there_is_a_part_of_every_kind_and_it_says_what_it_is() -> None:
    register.load([str(EXAMPLE)])
    assert PARTS.keys() == register.ALL.keys()
    for kind, name in PARTS.items():
        assert name in register.ALL[kind]
        assert register.ALL[kind].summary(name).endswith(".")


def test_all_parts_keep_the_laws() -> None:
    register.load([str(EXAMPLE)])
    testing.check_attack("shuffle")
    testing.check_aggregator("winsorised")
    testing.check_selection("patient")
    testing.check_method("elastic")
    testing.check_partition("unequal")
    testing.check_augmentation("scaled")
    testing.check_model("tanh-net")
    testing.check_dataset("spirals")
    testing.check_codec("half")


def test_parts_by_name_in_runs(plugin: str, tmp_path: Path) -> None:
    swarm = cbdsl.run(outside_spec(plugin, selection__name="patient", **ATTACKED), out="swarm", callbacks=[])
    averaging = outside_spec(plugin, method="elastic", defence__aggregator="shortened+winsorised")
    average = cbdsl.run(averaging, out="average")
    assert (swarm.summary.attack, swarm.summary.defence) == ("shuffle", "patient")
    assert (average.summary.method, average.summary.defence) == ("elastic", "shortened+winsorised")
    assert swarm.spec.plugins == (str(tmp_path / "my_parts.py"),)
    copies = list((tmp_path / "swarm" / "plugins").iterdir())
    assert [copy.read_bytes() for copy in copies] == [EXAMPLE.read_bytes()]
    again = cbdsl.run(averaging, callbacks=[])
    np.testing.assert_array_equal(average.weights, again.weights)


def test_settings_of_parts_go_through_options(plugin: str) -> None:
    settings = {
        "method": "elastic",
        "options__elastic__pull": 1.0,
        "options__unequal__skew": 0.0,
        "options__tanh-net__width": 5,
        "options__spirals__arms": 4,
    }
    result = cbdsl.run(outside_spec(plugin, **settings), callbacks=[])
    assert result.summary.parameters == (2 * 5 + 5) + (5 * 5 + 5) + (5 * 4 + 4)
    plain = cbdsl.run(outside_spec(plugin, **settings | {"options__elastic__pull": 0.25}), callbacks=[])
    assert not np.array_equal(result.weights, plain.weights)


def test_objects_are_the_same_as_names(plugin: str) -> None:
    register.load([plugin])
    named = cbdsl.run(outside_spec(plugin, selection__name="patient", **ATTACKED), callbacks=[])
    given = cbdsl.run(
        outside_spec(plugin, attack__byzantine=2),
        attack=register.attack.get("shuffle")(),
        selection=register.selection.get("patient")(),
        callbacks=[],
    )
    np.testing.assert_array_equal(named.weights, given.weights)
    assert given.spec.attack.name == "shuffle"


@pytest.mark.slow
def test_a_parallel_sweep(plugin: str, tmp_path: Path) -> None:
    points = grid(outside_spec(plugin, **ATTACKED), [("selection.name", ["best", "patient"]), ("seed", [0, 1])])
    points.append(outside_spec(plugin, method="elastic", defence__aggregator="winsorised"))
    results = run_all(points, tmp_path / "sweep", jobs=2)
    for point, result in zip(points, results, strict=True):
        alone = cbdsl.run(point, callbacks=[])
        assert alone.summary.final_accuracy == result.summary.final_accuracy
        assert alone.summary.uploads == result.summary.uploads
    assert len({result.folder for result in results}) == 5


@pytest.mark.parametrize(
    "settings",
    [{"method": "elastic", "defence__aggregator": "winsorised"}, {"selection__name": "patient", **ATTACKED}],
)
def test_a_run_that_was_stopped_goes_on(plugin: str, tmp_path: Path, settings: dict[str, object]) -> None:
    spec = outside_spec(plugin, rounds=8, **settings)
    run_until(5, spec, out=tmp_path / "stopped")
    forget_guests()  # as in a new process
    assert not (tmp_path / "stopped" / "summary.json").exists()
    cbdsl.resume(tmp_path / "stopped", callbacks=[])
    cbdsl.run(spec, out="whole", callbacks=[])
    assert read_rounds(tmp_path / "stopped") == read_rounds(tmp_path / "whole")


@pytest.mark.slow
def test_the_arena(plugin: str, tmp_path: Path) -> None:
    plan = ArenaPlan(
        attacks=("shuffle", "liar"),
        defences=("fedavg", "cb-dsl"),
        byzantine=(2,),
        presets=("strong-iid",),
        settings={
            "workers": 6,
            "rounds": 3,
            "model": "tanh-net",
            "codec.up": "half",
            "codec.down": "half",
            "data.source": "spirals",
            "data.partition": "unequal",
            "data.samples_per_worker": 30,
            "data.shared_scoring": 60,
            "data.holdout": 30,
        },
        plugins=(plugin,),
    )
    arena = run_arena(plan, tmp_path / "arena", jobs=2)
    assert {(match.defence, match.attack) for match in arena.matches} == {
        (defence, attack) for defence in ("fedavg", "cb-dsl") for attack in ("", "absent", "shuffle", "liar")
    }
    page = arena_page.write_arena_page(arena, tmp_path / "arena", "cbdsl arena")
    assert "coordinates shuffled" in page.read_text()
    with pytest.raises(cbdsl.errors.UserError, match=r"Unknown attack 'shufle'\. Did you mean 'shuffle'\?"):
        ArenaPlan(attacks=("shufle",), plugins=(plugin,))
