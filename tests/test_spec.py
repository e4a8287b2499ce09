from __future__ import annotations

import contextlib
import hashlib
import json
import re
from collections.abc import Callable
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st

from cbdsl import register, spec as specs
from cbdsl.cli.spec_options import SpecWords
from cbdsl.cli.study_commands import resolve_grid
from cbdsl.errors import UserError
from cbdsl.presets import PRESETS, preset, preset_or_file
from cbdsl.runs.resolve import resolve
from cbdsl.spec import LocalSpec, Spec, SwarmSpec, from_mapping, from_toml, parse_setting
from support.refusals import refused_as


@pytest.mark.parametrize("name", PRESETS)
def test_a_spec_survives_toml(name: str) -> None:
    assert from_toml(PRESETS[name].to_toml()) == PRESETS[name]


@given(st.integers(0, 2**31), st.floats(1e-6, 10), st.floats(0, 1), st.floats(0, 1))
def test_numbers_survive_toml_exactly(seed: int, rate: float, first: float, last: float) -> None:
    spec = Spec().with_settings({"seed": seed, "local.learning_rate": rate, "swarm.inertia": [first, last]})
    assert from_toml(spec.to_toml()) == spec
    assert from_toml(spec.to_toml()).key() == spec.key()


def test_the_key_changes_with_every_setting() -> None:
    base = Spec()
    others: list[dict[str, object]] = [
        {"seed": 1},
        {"method": "fedavg"},
        {"local.decay": 0.5},
        {"swarm.inertia": 0.9},
        {"attack.scale": 2.0},
        {"data.holdout": 1},
        {"verification.tolerance": 0.0},
        {"device": "cpu"},
        {"device": "cuda"},
    ]
    keys = {base.key()} | {base.with_settings(change).key() for change in others}
    assert len(keys) == len(others) + 1


@pytest.mark.parametrize(
    ("settings", "code", "facts"),
    [
        ({"local.epoch": 3}, "unknown-setting", ["'local.epoch'", "'local.epochs'"]),
        ({"locl.epochs": 3}, "unknown-setting", ["'locl.epochs'", "'local.epochs'"]),
        ({"local.lr": 3}, "unknown-setting", ["'local.lr'", "'local.learning_rate'", "cbdsl list settings"]),
        ({"num_clients": 3}, "unknown-setting", ["'workers'"]),
        ({"seed.x": 3}, "unknown-setting", ["'seed.x'"]),
        ({"local.epochs.x": 3}, "unknown-setting", ["'local.epochs.x'"]),
        ({"local": 3}, "wrong-type", ["local ", "given 3"]),
        ({"local.epochs": "three"}, "wrong-type", ["local.epochs", "whole number", "'three'"]),
        ({"local.epochs": 1.5}, "wrong-type", ["local.epochs", "whole number", "1.5"]),
        ({"local.epochs": True}, "wrong-type", ["local.epochs", "whole number", "True"]),
        ({"local.batch_size": 0}, "out-of-range", ["local.batch_size", "at least 1", "given 0"]),
        ({"local.batch_size": 10**8}, "out-of-range", ["local.batch_size", "at most 10,000,000"]),
        ({"local.learning_rate": -1}, "out-of-range", ["local.learning_rate", "above 0", "-1"]),
        ({"local.learning_rate": 0.0}, "out-of-range", ["local.learning_rate", "above 0"]),
        ({"local.learning_rate": float("nan")}, "out-of-range", ["local.learning_rate", "nan"]),
        ({"local.learning_rate": float("inf")}, "out-of-range", ["local.learning_rate", "inf"]),
        ({"local.learning_rate": None}, "wrong-type", ["local.learning_rate", "None"]),
        ({"swarm.inertia": [1, 2, 3]}, "wrong-type", ["swarm.inertia", "2", "[1, 2, 3]"]),
        ({"swarm.inertia": 11}, "out-of-range", ["swarm.inertia", "at most 10"]),
        ({"swarm.sgd_from": "currant"}, "unknown-name", ["'current'", "current, moved"]),
        ({"shared": "all"}, "unknown-name", ["value of shared 'all'", "default, none, score, train, both"]),
        ({"rounds": 0}, "out-of-range", ["rounds", "at least 1"]),
        ({"workers": 3, "attack.byzantine": 4}, "out-of-range", ["4 Byzantine workers of 3"]),
        ({"model": 5}, "wrong-type", ["model", "text", "5"]),
        ({"model": "a\x1bb"}, "wrong-type", ["model", "control characters"]),
    ],
)
def test_a_wrong_setting_says_what_is_wrong(settings: dict[str, object], code: str, facts: list[str]) -> None:
    with refused_as(code, *facts):
        Spec().with_settings(settings)


@pytest.mark.parametrize(
    ("build", "code", "fact"),
    [
        (lambda: Spec(rounds="3"), "wrong-type", "rounds"),  # type: ignore[arg-type]
        (lambda: LocalSpec(epochs=-1), "out-of-range", "local.epochs"),
        (lambda: SwarmSpec(inertia=(20.0, 0.0)), "out-of-range", "swarm.inertia"),
    ],
)
def test_a_spec_made_in_python_is_checked_like_one_from_a_file(build: Callable[[], Any], code: str, fact: str) -> None:
    with refused_as(code, fact):
        build()


def test_an_unknown_key_in_toml_is_an_error_with_a_suggestion() -> None:
    with refused_as("unknown-setting", "'swarm.inerta'", "'swarm.inertia'"):
        from_toml("[swarm]\ninerta = 0.5")
    with refused_as("unreadable-file", "TOML"):
        from_toml("[swarm")


def test_one_number_of_inertia_means_constant() -> None:
    assert from_mapping({"swarm": {"inertia": 0.9}}).swarm.inertia == (0.9, 0.9)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("local.epochs=3", ("local.epochs", 3)),
        ("local.decay=0.5", ("local.decay", 0.5)),
        ("swarm.inertia=[1, 0.2]", ("swarm.inertia", [1, 0.2])),
        ("method=cb-dsl", ("method", "cb-dsl")),
        ('data.source="a b"', ("data.source", "a b")),
    ],
)
def test_settings_of_the_command_line_are_parsed(text: str, expected: tuple[str, object]) -> None:
    assert parse_setting(text) == expected


@pytest.mark.parametrize("text", ["epochs", "=3", ""])
def test_a_setting_without_key_or_value_is_an_error(text: str) -> None:
    with refused_as("unknown-setting", repr(text)):
        parse_setting(text)


def test_a_spec_file_that_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    with refused_as("unreadable-file", "missing.toml"):
        specs.read(tmp_path / "missing.toml")


def test_presets_say_what_the_paper_says() -> None:
    text = preset("paper-noniid")
    assert (text.workers, text.rounds, text.local.epochs, text.local.learning_rate) == (50, 30, 1, 0.005)
    assert (text.local.batch_size, text.swarm.inertia, text.swarm.cognitive, text.swarm.social) == (10, (1, 0), 1, 1)
    assert (text.data.shared_scoring, text.data.shared_training, text.data.partition) == (2000, 600, "shards")
    script = preset("script-iid")
    assert (script.local.epochs, script.local.momentum, script.local.decay, script.rounds) == (3, 0.9, 0.5, 10)
    with refused_as("unknown-name", "preset", "'paper'"):
        preset("paper")


def test_a_file_that_names_a_preset_starts_there(tmp_path: Path) -> None:
    path = tmp_path / "short.toml"
    path.write_text('preset = "paper-noniid"\nrounds = 4\n\n[data]\nshared_scoring = 500\n')
    expected = preset("paper-noniid").with_settings({"rounds": 4, "data.shared_scoring": 500})
    assert preset_or_file(str(path)) == expected
    path.write_text(expected.to_toml())
    assert preset_or_file(str(path)) == expected
    path.write_text('preset = "paper-foo"\n')
    with refused_as("unknown-name", "paper-foo"):
        preset_or_file(str(path))


def test_a_preset_is_no_setting() -> None:
    start = preset("paper-iid")
    assert start.with_settings({"preset": "paper-iid"}) == start
    with refused_as("not-allowed", "preset", "paper-noniid"):
        start.with_settings({"preset": "paper-noniid"})
    with refused_as("unknown-name", "paper-foo"):
        resolve(Spec(preset="paper-foo"))


def test_each_method_brings_its_own_shared_data_unless_told_otherwise() -> None:
    shared = {name: resolve(replace(Spec(), method=name)).shared for name in register.method.names()}
    names = ["fedavg", "fedprox", "scaffold", "fedavgm", "fedadam", "feddyn", "ditto", "dp-fedavg"]
    averaging = dict.fromkeys(names, "none")
    alone = dict.fromkeys(["server-only", "local-only", "central"], "none")
    swarms = {"cb-dsl": "both", "lb-dsl": "both", "restart": "both", "fedpso": "none", "pso": "score"}
    assert shared == {**swarms, **averaging, **alone}
    assert resolve(Spec(method="fedavg", shared="train")).shared == "train"
    with refused_as("unknown-name", "'fedpros'", "'fedprox'"):
        resolve(Spec(method="fedpros"))


def test_resolving_writes_out_what_defines_the_method() -> None:
    assert resolve(Spec(method="fedpso")).swarm.sgd_from == "moved"
    assert resolve(Spec(method="pso")).swarm.start == "apart"
    assert resolve(resolve(Spec(method="pso"))) == resolve(Spec(method="pso"))


def test_a_run_without_what_came_later_has_the_key_it_had_before() -> None:
    tree = {key: value for key, value in resolve(Spec()).to_tree().items() if key not in {"device", "loss", "dropout"}}
    for name in ("shared_source", "target", "task", "local_test", "local_test_every", "overlap"):
        del tree["data"][name]
    del tree["swarm"]["storage"]
    for name in ("optimiser", "schedule", "schedule_over", "batchnorm", "clip", "augment"):
        del tree["local"][name]
    assert Spec().key() == hashlib.sha256(json.dumps(tree, sort_keys=True).encode()).hexdigest()[:16]


def test_settings_that_came_later_survive_toml_and_are_not_written_at_their_defaults() -> None:
    later = {
        "local.optimiser": "adam", "local.schedule": "cosine", "local.clip": 0.5, "local.augment": "noise",
        "loss": "huber", "options.huber.delta": 0.5, "data.task": "regression", "data.target": "load",
    }  # fmt: skip
    spec = Spec().with_settings(later)
    assert from_toml(spec.to_toml()) == spec
    assert from_toml(spec.to_toml()).key() == spec.key() != Spec().key()
    names = {name.rpartition(".")[2] for name in later}
    assert names.isdisjoint(line.partition(" = ")[0] for line in Spec().to_toml().splitlines())


def test_a_removed_setting_reads_with_the_value_that_is_left_and_is_refused_with_another() -> None:
    kept = from_toml('[swarm]\nstorage = "float32"\n')
    assert kept == Spec() == Spec().with_settings({"swarm.storage": "float32"})
    assert kept.key() == Spec().key()
    with refused_as("not-supported", "swarm.storage", "bfloat16", "removed"):
        from_toml('[swarm]\nstorage = "bfloat16"\n')
    with refused_as("not-supported", "swarm.storage", "bfloat16", "removed"):
        Spec().with_settings({"swarm.storage": "bfloat16"})


@pytest.mark.parametrize("name", PRESETS)
def test_a_specs_key_is_its_runs_key(name: str) -> None:
    for spec in (preset(name), preset(name).with_settings({"attack.byzantine": 2}), Spec(method="fedpso")):
        assert spec.key() == resolve(spec).key()
    assert Spec(method="not-known-here").key() != Spec().key()


def test_equal_runs_have_equal_keys_whatever_the_preset_is_called() -> None:
    assert Spec(preset="mine").key() == Spec(preset="yours").key()
    assert Spec(seed=1).key() != Spec(seed=2).key()
    changed = Spec().with_settings({"options.fedprox.mu": 0.1})
    assert changed.key() != Spec().key()
    assert from_toml(changed.to_toml()) == changed
    assert hash(from_toml(changed.to_toml())) == hash(changed)


def test_settings_of_parts_are_tables_of_tables() -> None:
    with refused_as("unknown-setting", "options.PART.SETTING"):
        Spec().with_settings({"options.mu": 0.1})
    with refused_as("wrong-type", "options", "3"):
        from_toml("[options]\nfedprox = 3")


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ({"workers": 10**9}, r"workers must be at most 1,000,000; given 1000000000"),
        ({"workers": 16**9000}, r"workers must be at most 1,000,000; given a whole number of thousands of digits"),
        ({"local.epochs": 10**9}, r"local.epochs must be at most 100,000"),
        ({"local.steps": 10**12}, r"local.steps must be at most"),
        ({"local.batch_size": 10**14}, r"local.batch_size must be at most"),
        ({"local.learning_rate": 10**4000}, r"local.learning_rate must be a number; given 1000"),
        ({"swarm.draw": 16**9000}, r"Unknown value of swarm.draw"),
        ({"data.source": "a\udce9b"}, r"data.source must be text without control characters, in UTF-8"),
        ({"data.source": "a\x1b[31mb"}, r"data.source must be text without control characters"),
        ({"plugins": ["a\x00.py"]}, r"plugins must be text without control characters"),
        ({"options.fedprox.mu": date(2020, 1, 1)}, r"options.fedprox.mu must be a number"),
        ({"options.fedprox.mu": {"a": 1}}, r"options.fedprox.mu must be a number"),
        ({"options.fedprox.mu": 16**9000}, r"options.fedprox.mu must be a number"),
        ({"model": "x" * 100_000}, r""),
    ],
)
def test_what_no_run_can_ask_for_is_said_in_a_sentence(wanted: dict[str, object], message: str) -> None:
    try:
        Spec().with_settings(wanted)
    except UserError as error:
        assert re.search(message, str(error))
        assert len(str(error)) < 1000
    else:
        assert not message


@pytest.mark.parametrize(
    "text", ["workers = " + "9" * 5000, "x = " + "[" * 5000, "a." * 5000 + "b = 1", "x = 9999-99-99", "\udce9"]
)
def test_toml_that_breaks_its_reader_is_an_error_in_words(text: str) -> None:
    with pytest.raises(UserError):
        from_toml(text)


@pytest.mark.parametrize("value", ["9" * 5000, "[" * 5000, "{a=" * 3000])
def test_a_setting_that_breaks_its_reader_is_an_error_in_words(value: str) -> None:
    with pytest.raises(UserError) as caught:
        Spec().with_settings(dict([parse_setting(f"workers={value}")]))
    assert len(str(caught.value)) < 1000


_PIECES = ["workers", "options", "a", "=", ".", "[", "]", "{", "}", '"', "'", "1", "9" * 20, "inf", "nan", "-", "1e999",
           "2020-01-01", "\n", ",", "true", "#", "\\u0000", "\t"]  # fmt: skip


@given(st.lists(st.sampled_from(_PIECES), max_size=25).map("".join) | st.text(max_size=40))
def test_whatever_the_text_it_is_a_spec_or_an_error_in_words(text: str) -> None:
    try:
        spec = from_toml(text)
    except UserError:
        return
    assert from_toml(spec.to_toml()) == spec or "nan" in text
    assert hash(spec) is not None
    assert spec.key()


@given(st.text(max_size=30))
def test_whatever_is_set_it_is_a_spec_or_an_error_in_words(text: str) -> None:
    for key in ("workers", "local.decay", "data.source", "options.q4.bits", "swarm.inertia", "plugins"):
        with contextlib.suppress(UserError):
            Spec().with_settings(dict([parse_setting(f"{key}={text}")])).to_toml()


def test_another_method_or_number_of_attackers_means_the_same_in_python_and_on_the_command_line(tmp_path: Path) -> None:
    start = preset("rotation-noniid")
    words = SpecWords("rotation-noniid", options={"method": "fedavg"})
    assert resolve(start.with_settings({"method": "fedavg"})) == words.resolved()
    assert resolve(start.with_settings({"method": "fedavg", "codec.up": "q4"})).codec.up == "q4"
    old = tmp_path / "spec.toml"
    old.write_text(resolve(Spec(method="pso", shared="score")).to_toml())
    changes = {"method": "cb-dsl", "attack.byzantine": 5}
    found = resolve(specs.read(old).with_settings(changes))
    assert found == SpecWords(str(old), options=changes).resolved()
    assert (found.shared, found.swarm.start, found.defence.declared) == ("both", "together", 5)


def test_a_sweep_declares_as_many_attackers_as_a_run_does(tmp_path: Path) -> None:
    file = tmp_path / "spec.toml"
    file.write_text(resolve(Spec()).to_toml())  # as in a run's folder: defence.declared=0
    points = resolve_grid(SpecWords(str(file)), [("attack.byzantine", [1, 5])]).specs
    runs = [SpecWords(str(file), options={"attack.byzantine": number}).resolved() for number in (1, 5)]
    assert list(points) == runs
    assert [point.defence.declared for point in points] == [1, 5]


def test_no_axis_of_a_sweep_resets_what_an_option_sets(tmp_path: Path) -> None:
    file = tmp_path / "spec.toml"
    file.write_text(resolve(Spec()).to_toml())
    words = SpecWords(str(file), options={"shared": "train", "defence.declared": 3, "defence.aggregator": "krum"})
    points = resolve_grid(words, [("method", ["fedavg", "fedprox"]), ("attack.byzantine", [1, 5])]).specs
    assert {(point.shared, point.defence.declared) for point in points} == {("train", 3)}


def test_the_key_reads_a_file_of_shared_samples_once_and_again_when_it_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, reads = tmp_path / "shared.npz", 0
    file.write_bytes(b"one")
    inner = Path.read_bytes

    def counted(path: Path) -> bytes:
        nonlocal reads
        reads += path == file
        return inner(path)

    monkeypatch.setattr(Path, "read_bytes", counted)
    spec = Spec().with_settings({"data.shared_source": str(file)})
    first = spec.key()
    assert (replace(spec).key(), reads) == (first, 1)
    file.write_bytes(b"another")
    assert spec.key() != first
    assert reads == 2


def test_a_key_of_thousands_of_parts_is_refused_at_once() -> None:
    with refused_as("unreadable-file", "more than 100 dots"):
        from_toml(".".join("a" * 20_000) + " = 1")


def test_a_setting_has_the_name_of_its_option() -> None:
    attacked = {"attack.name": "alie", "attack.byzantine": 2, "defence.aggregator": "krum"}
    assert Spec().with_settings({"attack": "alie", "byzantine": 2, "aggregator": "krum"}) == Spec().with_settings(
        attacked
    )
    assert parse_setting("attack=alie") == ("attack.name", "alie")
