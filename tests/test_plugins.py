"""Plugin files are imported once, again after an edit, and named in errors."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from cbdsl import register, resume, run
from support.helpers import blobs, perceptron, small_spec
from support.refusals import refused_as

PART = '''"""Mine."""
import numpy as np
import cbdsl


@cbdsl.register.aggregator("{name}")
def rule(rows, attackers, trust, *, factor={factor}):
    """{words}"""
    return rows.mean(0)
'''


def written(folder: Path, text: str, name: str = "parts.py") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def test_a_file_is_imported_once(tmp_path: Path) -> None:
    path = written(tmp_path, PART.format(name="once", factor=1, words="One."))
    assert register.load([str(path)]) == (str(path.resolve()),)
    first = register.aggregator.get("once")
    register.load([str(path)])
    assert register.aggregator.get("once") is first


def test_an_edited_file_is_imported_again(tmp_path: Path) -> None:
    path = written(tmp_path, PART.format(name="edited", factor=1, words="One."))
    register.load([str(path)])
    written(tmp_path, PART.format(name="edited", factor=2.5, words="Two."))
    register.load([str(path)])
    assert register.aggregator.settings("edited") == {"factor": 2.5}
    written(tmp_path, PART.format(name="renamed", factor=2.5, words="Two."))
    register.load([str(path)])
    assert "renamed" in register.aggregator
    assert "edited" not in register.aggregator


HELPED = """
import numpy as np
import cbdsl
from helper import scale


@cbdsl.register.aggregator("helped")
def rule(rows, attackers, trust):
    from later.deep import SHIFT
    return scale(rows.mean(0)) + SHIFT
"""


def helped(folder: Path, factor: float) -> Path:
    """A plugin beside a module that it imports at once, and a package that it imports later."""
    (folder / "later").mkdir(parents=True, exist_ok=True)
    written(folder, f"def scale(row):\n    return {factor} * row\n", "helper.py")
    written(folder, "", "later/__init__.py")
    written(folder, "SHIFT = 1.0\n", "later/deep.py")
    return written(folder, HELPED, "helped.py")


def test_a_plugin_imports_the_files_beside_it_and_is_known_by_their_content(tmp_path: Path) -> None:
    sys_path = list(sys.path)
    first, second = helped(tmp_path / "a", 2.0), helped(tmp_path / "b", 30.5)
    assert list(register.plugin_neighbours(str(first))) == ["helper.py", "later/__init__.py", "later/deep.py"]
    assert register.plugin_digest(str(first)) != register.plugin_digest(str(second))
    for path, factor in ((first, 2.0), (second, 30.5)):
        register.load([str(path)])
        assert sys.path == sys_path
        rule = register.aggregator.get("helped")
        assert rule.__globals__["scale"](1.0) == factor
        register._forget(register._loaded.pop(str(path))[1])
    before = register.plugin_digest(str(first))
    helped(tmp_path / "a", 4.25)
    register.load([str(first)])
    assert register.aggregator.get("helped").__globals__["scale"](1.0) == 4.25
    written(tmp_path, "SHIFT = 2.0\n", "a/later/deep.py")
    assert len({before, register.plugin_digest(str(first))}) == 2
    register._forget(register._loaded.pop(str(first))[1])


def test_the_folder_of_a_run_has_copies_of_what_a_plugin_imports(tmp_path: Path) -> None:
    path = helped(tmp_path, 1.0)
    spec = small_spec(method="fedavg", rounds=1, plugins=[str(path)], defence__aggregator="mean")
    run(spec, model=perceptron, data=blobs(), out=tmp_path / "run")
    digest = register.plugin_digest(str(path))
    kept = sorted(str(each.relative_to(tmp_path / "run" / "plugins")) for each in tmp_path.glob("run/plugins/**/*.py"))
    assert kept == [f"{digest}-helped.py", *(f"{digest}/{name}" for name in register.plugin_neighbours(str(path)))]
    written(tmp_path, "SHIFT = 3.0\n", "later/deep.py")
    with refused_as("wrong-run", "beside it"):
        resume(tmp_path / "run", model=perceptron, data=blobs())
    register._forget(register._loaded.pop(str(path))[1])


def test_equal_files_in_two_places_are_one(tmp_path: Path) -> None:
    text = PART.format(name="twins", factor=1, words="One.")
    one, two = written(tmp_path, text, "parts.py"), tmp_path / "other" / "parts.py"
    two.parent.mkdir()
    two.write_text(text)
    register.load([str(one), str(two)])
    one.unlink()
    written(tmp_path, PART.format(name="twins-no-more", factor=1, words="One."))
    register.load([str(one)])
    assert "twins" in register.aggregator  # the other file still has it


def test_relative_paths_become_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    written(tmp_path, PART.format(name="relative", factor=1, words="One."))
    assert register.load(["parts.py"]) == (str(tmp_path / "parts.py"),)


def test_a_module_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    written(tmp_path, PART.format(name="moduled", factor=1, words="One."), "plugin_module.py")
    assert register.load(["plugin_module"]) == ("plugin_module",)
    assert register.aggregator.get("moduled").__module__ == "plugin_module"
    assert register.plugin_source("plugin_module") == tmp_path / "plugin_module.py"
    written(tmp_path, PART.format(name="moduled", factor=1234567, words="Again."), "plugin_module.py")
    register.load(["plugin_module"])
    assert register.aggregator.settings("moduled") == {"factor": 1234567}


@pytest.mark.parametrize(
    ("name", "fact"),
    [
        ("nowhere.py", "file nowhere.py"),
        ("nowhere.py:Net", "model Net"),
        *((name, f"plugin '{name}'") for name in ("no_such_module", "no.such.module", "")),
    ],
)
def test_a_plugin_that_does_not_exist_is_named(name: str, fact: str) -> None:
    with refused_as("missing-file", fact):
        register.load([name])


@pytest.mark.parametrize(
    ("text", "code", "facts"),
    [
        ("import cbdsl\n\n1 / 0\n", "invalid-part", ["ZeroDivisionError: division by zero", "parts.py, line 3)"]),
        ("import json\n\njson.loads('{')\n", "invalid-part", ["JSONDecodeError", "parts.py, line 3)"]),
        ("def broken(:\n    pass\n", "invalid-part", ["SyntaxError", "parts.py, line 1)"]),
        ("import nothing_of_that_name\n", "invalid-part", ["ModuleNotFoundError", "parts.py, line 1)"]),
        (PART.format(name="median", factor=1, words="Mine."), "exists-already", ["cbdsl.algorithm.aggregators"]),
        (PART.format(name="two words", factor=1, words="Mine."), "not-allowed", ["'two words'"]),
        (PART.format(name="custom", factor=1, words="Mine."), "not-allowed", ["'custom'"]),
    ],
)
def test_a_plugin_that_raises_is_named_with_its_line(tmp_path: Path, text: str, code: str, facts: list[str]) -> None:
    path = written(tmp_path, text)
    with refused_as(code, f"The plugin {path} cannot be", *facts):
        register.load([str(path)])


def test_a_plugin_that_was_corrected_is_imported_without_a_trace_of_the_first_attempt(tmp_path: Path) -> None:
    good = PART.format(name="corrected", factor=1, words="Mine.")
    path = written(tmp_path, good + "\nraise RuntimeError\n")
    for _ in range(2):
        with refused_as("invalid-part", "RuntimeError"):
            register.load([str(path)])
        assert "corrected" not in register.aggregator
    written(tmp_path, good)
    register.load([str(path)])
    assert "corrected" in register.aggregator
    assert not [name for name in sys.modules if name.startswith("cbdsl_plugin_parts") and "corrected" in name]


def test_two_files_cannot_have_one_name(tmp_path: Path) -> None:
    one = written(tmp_path, PART.format(name="clash", factor=1, words="Mine."), "one.py")
    two = written(tmp_path, PART.format(name="clash", factor=2, words="Mine."), "two.py")
    register.load([str(one)])
    with refused_as("exists-already", "two.py", "aggregator 'clash'", "cbdsl_plugin_one"):
        register.load([str(two)])
    assert register.aggregator.settings("clash") == {"factor": 1}


NETS = '''"""Networks that know nothing of registers."""
from torch import nn


class Net(nn.Sequential):
    """Two layers."""

    def __init__(self, width=8):
        super().__init__(nn.Flatten(), nn.Linear(784, width), nn.ReLU(), nn.Linear(width, 10))


def sized(shape, classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(int(__import__("math").prod(shape)), classes))


class Needy(nn.Module):
    def __init__(self, depth):
        super().__init__()


class softmax(nn.Module):
    pass


NUMBER = 3
'''


def test_a_class_in_a_file_is_a_model_under_its_name(tmp_path: Path) -> None:
    path = written(tmp_path, NETS, "nets.py")
    assert register.load([f"{path}:Net", f"{path}:sized"]) == (
        f"{path.resolve()}:Net",
        f"{path.resolve()}:sized",
    )
    assert register.model.summary("Net") == "Two layers."
    assert register.model.get("Net")((1, 28, 28), 10)[1].out_features == 8
    assert register.model.get("sized")((3, 4), 5)[1].weight.shape == (5, 12)
    register.load([f"{path}:Net"])
    written(tmp_path, NETS.replace("width=8", "width=9"), "nets.py")
    register.load([f"{path}:Net"])
    assert register.model.get("Net")((1, 28, 28), 10)[1].out_features == 9
    assert register.plugin_digest(f"{path}:Net") == register.plugin_digest(str(path))
    other = written(tmp_path, NETS.replace("width=8", "width=3"), "other.py")
    register.load([f"{other}:Net"])
    assert register.model.get("Net")((1, 28, 28), 10)[1].out_features == 3
    register.load([f"{path}:Net"])  # the file that was named last counts
    assert register.model.get("Net")((1, 28, 28), 10)[1].out_features == 9


@pytest.mark.parametrize(
    ("wanted", "code", "facts"),
    [
        ("Nat", "unknown-name", ["class or function Nat", "It has: Net, Needy, softmax."]),
        ("NUMBER", "unknown-name", ["class or function NUMBER"]),
        ("Needy", "not-supported", ["Needy in", "nets.py needs depth"]),
        ("softmax", "exists-already", ["model 'softmax'"]),
    ],
)
def test_what_cannot_be_a_model_is_refused(tmp_path: Path, wanted: str, code: str, facts: list[str]) -> None:
    path = written(tmp_path, NETS, "nets.py")
    with refused_as(code, *facts):
        register.load([f"{path}:{wanted}"])
