"""Where torch computes: devices by name, samples moved there, and all settings restored."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from cbdsl.arrays import PADDING, Samples
from cbdsl.engines.torch_engine import (
    CPU,
    bring_samples,
    deterministic,
    keep_generators,
    select_device,
)
from cbdsl.errors import UserError
from support.refusals import refused_as

SAMPLES = Samples(np.arange(20, dtype=np.float32).reshape(10, 2), np.arange(10, dtype=np.int32))


@pytest.mark.parametrize(
    ("name", "mps", "there"), [("cuda", True, "cpu, mps"), ("cuda", False, "cpu"), ("mps", False, "cpu")]
)
def test_a_gpu_that_is_not_there_is_an_error_that_says_what_is(
    name: str, mps: bool, there: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("torch.backends.mps.is_available", lambda: mps)
    with refused_as("not-supported", name, f"it sees: {there}", "--device auto"):
        select_device(name)


@pytest.mark.parametrize(
    "indices", [[[3, 7, PADDING], [7, 7, 0]], [[PADDING, PADDING]], [9, 0, 9], [], [[[5]], [[PADDING]]]], ids=str
)
def test_samples_that_are_brought_are_those_that_are_named(indices: list[Any]) -> None:
    rows = np.array(indices, np.int32)
    features, labels, places = bring_samples(SAMPLES, rows, CPU)
    assert places.shape == rows.shape
    np.testing.assert_array_equal(places == PADDING, rows == PADDING)
    real = rows != PADDING
    np.testing.assert_array_equal(features.numpy()[places[real]], SAMPLES.features[rows[real]])
    np.testing.assert_array_equal(labels.numpy()[places[real]], SAMPLES.labels[rows[real]])
    assert len(features) == len(labels) == len(set(rows[real].tolist()))


def precision() -> list[Any]:
    """Everything that torch says about float32; a setting may be unreadable, or unknown to this torch."""
    reads: list[Callable[[], Any]] = [
        lambda: torch.backends.cuda.matmul.allow_tf32,
        lambda: torch.backends.cudnn.allow_tf32,
        torch.get_float32_matmul_precision,
        lambda: torch.backends.cuda.matmul.fp32_precision,
        lambda: torch.backends.cudnn.conv.fp32_precision,  # type: ignore[attr-defined]
    ]
    found = []
    for read in reads:
        try:
            found.append(read())
        except (RuntimeError, AttributeError):
            found.append(None)
    return found


def lower_by_word() -> None:
    torch.set_float32_matmul_precision("medium")


def lower_by_old_names() -> None:
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True


def lower_by_new_names() -> None:
    if not hasattr(torch.backends.cudnn, "conv"):
        pytest.skip("this torch has no new names")
    torch.backends.cuda.matmul.fp32_precision = torch.backends.cudnn.conv.fp32_precision = "tf32"


@pytest.mark.parametrize("lower", [lambda: None, lower_by_word, lower_by_old_names, lower_by_new_names])
def test_float32_is_whole_inside_and_what_it_was_afterwards(lower: Callable[[], None]) -> None:
    with deterministic(CPU):  # the test's own changes are put back, too
        lower()
        before = precision()
        with deterministic(CPU):
            assert precision()[:3] == [False, False, "highest"]
        assert precision() == before


@pytest.mark.parametrize("warns", [True, False])
@pytest.mark.parametrize("fails", [True, False])
def test_determinism_is_switched_on_inside_and_put_back_even_after_an_error(
    warns: bool, fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    with deterministic(CPU):
        torch.use_deterministic_algorithms(warns, warn_only=warns)
        torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = False, True
        torch.set_num_threads(2)
        os.environ.pop("CUBLAS_WORKSPACE_CONFIG")
        try:
            with deterministic(CPU):
                assert torch.are_deterministic_algorithms_enabled()
                assert not torch.is_deterministic_algorithms_warn_only_enabled()
                assert (torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark) == (True, False)
                assert torch.get_num_threads() == 1
                assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
                if fails:
                    raise KeyError("mine")
        except KeyError:
            assert fails
        assert torch.are_deterministic_algorithms_enabled() == warns
        assert torch.is_deterministic_algorithms_warn_only_enabled() == warns
        assert (torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark) == (False, True)
        assert torch.get_num_threads() == 2
        assert "CUBLAS_WORKSPACE_CONFIG" not in os.environ


@pytest.mark.parametrize(
    ("device", "error", "message"),
    [
        ("cuda", RuntimeError("x does not have a deterministic implementation, but"), "not repeat its numbers on cuda"),
        ("mps", RuntimeError("MPS backend out of memory (2 GiB)"), "The device mps has not enough free memory"),
    ],
)
def test_what_a_gpu_cannot_do_is_said_with_a_way_out(device: str, error: Exception, message: str) -> None:
    with pytest.raises(UserError, match=f"{message} .*Use --device cpu"), deterministic(torch.device(device)):
        raise error


def test_other_errors_stay_what_they_are() -> None:
    with pytest.raises(RuntimeError, match="shapes do not fit"), deterministic(torch.device("cuda")):
        raise RuntimeError("shapes do not fit")


def test_generators_are_put_back_on_the_device_too(monkeypatch: pytest.MonkeyPatch) -> None:
    state = {"own": torch.tensor([1])}
    monkeypatch.setattr("torch.cuda.get_rng_state", lambda: state["own"])
    monkeypatch.setattr("torch.cuda.set_rng_state", lambda value: state.update(own=value))
    before = torch.get_rng_state()
    with keep_generators(torch.device("cuda")):
        torch.rand(3)
        state["own"] = torch.tensor([2])
    assert torch.equal(torch.get_rng_state(), before)
    assert state["own"].item() == 1
