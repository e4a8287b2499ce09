"""Registered parts are found by name, made with their settings, and described."""

from __future__ import annotations

import importlib
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from cbdsl import register
from cbdsl.register import Register
from support.refusals import refused_as


@pytest.mark.parametrize("kind", register.ALL)
def test_every_part_of_the_package_is_described_and_can_be_made(kind: str) -> None:
    parts = register.ALL[kind]
    assert len(parts.names()) == len(set(parts.names())) >= 1
    for name in parts.names():
        assert parts.summary(name)
        assert parts.make(name, {}) is not None
        defaults = {key: value for key, value in parts.settings(name).items() if isinstance(value, (int, float, str))}
        assert parts.make(name, defaults) is not None


def test_a_class_and_a_function_have_settings() -> None:
    parts = Register("thing", ())

    @parts("classy")
    @dataclass(frozen=True)
    class Classy:
        """First line
        goes on. And on.

        Not this.
        """

        size: int = 3
        rate: float = 0.5

    @parts("plain")
    def plain(value: int, *, factor: float = 2.0) -> float:
        """A function."""
        return value * factor

    assert parts.names() == ["classy", "plain"]
    assert parts.summary("classy") == "First line goes on. And on."
    assert parts.settings("classy") == {"size": 3, "rate": 0.5}
    assert parts.settings("plain") == {"factor": 2.0}
    assert parts.make("classy", {"rate": 2}) == Classy(3, 2.0)
    assert isinstance(parts.make("classy", {"rate": 2}).rate, float)
    assert parts.make("plain", {"factor": 3})(4) == 12.0
    assert parts.make("plain", {}) is plain
    assert "plain" in parts
    assert "other" not in parts


@pytest.mark.parametrize(
    ("options", "code", "facts"),
    [
        ({"sise": 1}, "unknown-setting", ["thing 'classy'", "'sise'", "It has: size"]),
        ({"size": "big"}, "wrong-type", ["size of the thing 'classy'", "like 3", "given 'big'"]),
        ({"size": 1.5}, "wrong-type", ["like 3", "given 1.5"]),
        ({"size": True}, "wrong-type", ["like 3", "given True"]),
    ],
)
def test_settings_that_do_not_fit_are_refused(options: dict[str, object], code: str, facts: list[str]) -> None:
    parts = Register("thing", ())

    @parts("classy")
    @dataclass
    class Classy:
        """One."""

        size: int = 3

    assert parts.get("classy") is Classy
    with refused_as(code, *facts):
        parts.make("classy", options)


def test_a_setting_without_a_default_must_be_given() -> None:
    parts = Register("thing", ())

    @parts("needy")
    def needy(value: int, *, factor: float) -> float:
        """A function."""
        return value * factor

    with refused_as("missing-setting", "thing 'needy'", "options.needy.factor="):
        parts.make("needy", {})


@pytest.mark.parametrize("name", ["", "two words", "a.b", "a,b", "nnm+x", "a=b", "tab\t", "custom"])
def test_names_that_a_setting_could_not_hold_are_refused(name: str) -> None:
    with refused_as("not-allowed", f"No thing can be called '{name}'"):
        Register("thing", ())(name)


def test_a_name_is_given_once() -> None:
    parts = Register("thing", ())

    @parts("one")
    def first() -> None:
        """One."""

    parts("one")(first)  # the same again, as when a notebook's cell is run twice
    with refused_as("exists-already", "thing 'one'", "test_register"):

        @parts("one")
        def second() -> None:
            """Two."""

    assert parts.get("one") is first
    parts.forget(__name__)
    assert parts.names() == []


def test_a_plugin_cannot_take_the_name_of_a_built_in_part_that_is_not_imported_yet() -> None:
    parts = Register("aggregator", ("cbdsl.algorithm.aggregators",))
    parts._parts = {"mean": register.aggregator.get("mean")}  # the home is imported already: as it was left
    with refused_as("exists-already", "cbdsl.algorithm.aggregators"):

        @parts("mean")
        def mean() -> None:
            """Mine."""


def test_unknown_names_get_a_hint() -> None:
    with refused_as("unknown-name", "method 'fedprx'", "Did you mean 'fedprox'?"):
        register.method.get("fedprx")


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of a module with parts, not imported yet."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.delitem(sys.modules, "home_of_things", raising=False)
    return tmp_path / "home_of_things.py"


def test_an_import_that_fails_is_reported_at_each_lookup_until_it_succeeds(home: Path) -> None:
    home.write_text("import nothing_of_that_name\n")
    parts = Register("thing", ("home_of_things",))
    for _ in range(2):
        with pytest.raises(ModuleNotFoundError, match="nothing_of_that_name"):
            parts.get("anything")
    home.write_text("")
    importlib.invalidate_caches()
    assert parts.names() == []


def test_a_second_thread_waits_for_the_import_of_the_parts(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home.write_text("import sys\nsys.slow_import()\n")
    parts, begun = Register("thing", ("home_of_things",)), threading.Event()

    def register_slowly() -> None:
        begun.set()
        second_thread_ended.wait(0.3)
        parts._parts["late"] = print

    second_thread_ended = threading.Event()
    monkeypatch.setattr(sys, "slow_import", register_slowly, raising=False)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(parts.names)
        assert begun.wait(10)
        second = pool.submit(parts.names)
        second.add_done_callback(lambda _: second_thread_ended.set())
        assert (first.result(), second.result()) == (["late"], ["late"])


@pytest.mark.parametrize(
    ("kind", "part", "setting", "value"),
    [
        (register.attack, "edge-case", "tail", 2.0),
        (register.attack, "neurotoxin", "kept", float("nan")),
        (register.attack, "a3fl", "share", -0.1),
        (register.attack, "fang-trim", "scale", 0.0),
        (register.attack, "poisoned-fl", "every", 0),
        (register.attack, "gaussian", "scale", float("inf")),
        (register.aggregator, "dnc", "times", 1_000_000_000),
        (register.aggregator, "auto-bant", "batch", 0),
        (register.method, "feddyn", "alpha", 1e300),
        (register.method, "dp-fedavg", "noise", 1e300),
    ],
)
def test_numbers_that_would_end_a_run_in_the_middle_are_refused(
    kind: Register, part: str, setting: str, value: float
) -> None:
    with refused_as("out-of-range", part, setting, f"{value}"):
        kind.make(part, {setting: value})


def test_a_range_is_of_one_setting() -> None:
    parts = Register("thing", homes=())

    @parts("short", ranges={"length": (1, 2)})
    def short(*, length: float = 1.0, width: float = 1.0) -> tuple[float, float]:
        return length, width

    assert parts.make("short", {"length": 2, "width": 99})() == (2.0, 99.0)
    with refused_as("out-of-range", "length", "from 1 to 2", "2.5"):
        parts.make("short", {"length": 2.5})
