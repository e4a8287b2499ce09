from __future__ import annotations

import pytest
from torch import nn

from cbdsl.engines.choose import choose_engine
from cbdsl.engines.native_engine import available
from cbdsl.errors import UserError
from cbdsl.models.modules import cnn

IMAGE = (1, 28, 28)
needs_native = pytest.mark.skipif(available() is not None, reason="NO NATIVE ENGINE: install a C++ compiler")


def unusual() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 10), nn.GELU())


@needs_native
def test_a_model_the_kernels_know_runs_natively_and_nothing_is_said() -> None:
    choice = choose_engine("auto", cnn(IMAGE, 10), IMAGE, 1)
    assert (choice.engine.name, choice.note) == ("native", "")


@needs_native
def test_a_model_with_another_layer_runs_on_torch_and_one_line_says_why() -> None:
    choice = choose_engine("auto", unusual(), IMAGE, 1)
    assert choice.engine.name == "torch"
    assert "GELU" in choice.note
    assert "\n" not in choice.note


def test_without_the_library_torch_takes_over_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cbdsl.engines.native_engine.available", lambda: "the native engine was not built")
    choice = choose_engine("auto", cnn(IMAGE, 10), IMAGE, 1)
    assert (choice.engine.name, choice.note) == ("torch", "torch engine: the native engine was not built")
    with pytest.raises(UserError, match="asked for, but the native engine was not built"):
        choose_engine("native", cnn(IMAGE, 10), IMAGE, 1)


@needs_native
def test_asking_for_native_where_it_cannot_is_an_error_that_names_the_layer() -> None:
    with pytest.raises(UserError, match="GELU"):
        choose_engine("native", unusual(), IMAGE, 1)


def test_torch_is_used_when_it_is_asked_for() -> None:
    assert choose_engine("torch", cnn(IMAGE, 10), IMAGE, 1).engine.name == "torch"
