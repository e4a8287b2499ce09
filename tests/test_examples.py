"""Every public class and function has a short example in its docstring, and the example runs."""

from __future__ import annotations

import doctest
import inspect
import sys

import pytest

import cbdsl

PUBLIC = [name for name in cbdsl.__all__ if inspect.isclass(found := getattr(cbdsl, name)) or inspect.isfunction(found)]


@pytest.mark.parametrize("name", PUBLIC)
def test_the_example_of_a_public_name_runs(name: str, tmp_path: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(str(tmp_path))
    part = getattr(cbdsl, name)
    names = {**vars(sys.modules[part.__module__]), "cbdsl": cbdsl}
    tests = doctest.DocTestFinder(recurse=False).find(part, name, globs=names)
    assert any(test.examples for test in tests), f"cbdsl.{name} has no example"
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE, verbose=False)
    for test in tests:
        said: list[str] = []
        runner.run(test, out=said.append)
        assert not runner.failures, "".join(said)
