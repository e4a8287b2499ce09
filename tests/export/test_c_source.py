"""The C file: small memory, no warnings, nothing in it that a model's file could smuggle in."""

from __future__ import annotations

import ctypes
import re
import subprocess
from collections import Counter
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given

from cbdsl.data.dataset import Scaling
from cbdsl.export.c_source import c_file
from cbdsl.export.steps import OUTPUT, Step, plan_buffers, program_of, round_weights
from cbdsl.models.architecture import SAMPLES, Architecture, Draft
from cbdsl.models.layers import Add, Concat, Flatten, Linear, Relu, Tanh
from cbdsl.models.zoo import usual
from support.c_programs import CC, STRICT, compiled, difference, model_of, needs_cc, truth
from support.networks import graphs, samples_for

MEMORY = {
    "cnn": 17_280, "mlp": 256, "softmax": 0, "har-cnn": 24_576, "ds-cnn": 76_800, "resnet8": 196_608,
    "mobilenet-025": 221_184, "har-gru": 9_728,
}  # fmt: skip
"""Bytes; what docs/export.md says."""


def dead_after(steps: Sequence[Step]) -> dict[int, int]:
    """When each result is read for the last time, as long as results that share its place count as others."""
    return {step.number: max(other.number for other in steps if step.number in other.reads) for step in steps[:-1]}


@given(architecture=graphs(most=14))
def test_no_result_is_overwritten_before_it_was_read_for_the_last_time(architecture: Architecture) -> None:
    steps = program_of(model_of(architecture)).steps
    places, last = plan_buffers(steps), dead_after(steps)
    kept = [step for step in steps[:-1] if step.number in places.offsets]
    for first, second in combinations(kept, 2):
        starts = [places.offsets[step.number] for step in (first, second)]
        apart = starts[0] + first.count <= starts[1] or starts[1] + second.count <= starts[0]
        # The later one may take the place of the earlier one in the very step that reads that last.
        took_over = last[first.number] <= second.number
        same = isinstance(second.layer, Flatten) and starts[0] == starts[1]
        assert apart or took_over or same, (first, second)
    assert all(0 <= places.offsets[step.number] <= places.size - step.count for step in kept)
    assert places.offsets[steps[-1].number] == OUTPUT


@pytest.mark.parametrize("name", MEMORY)
def test_the_memory_of_every_network_is_what_the_page_says(name: str) -> None:
    program = program_of(model_of(usual(name)))
    made, small = c_file(program), c_file(program, int8=True)
    assert made.memory == small.memory == MEMORY[name]
    assert made.constants == 4 * program.graph.size
    assert small.constants < 0.33 * made.constants
    page = (Path(__file__).parents[2] / "docs" / "export.md").read_text()
    row = next(line for line in page.splitlines() if line.startswith(f"| `{name}` |"))
    numbers = [made.constants, small.constants, made.memory]
    assert [f"{number:,}" in row for number in numbers] == [True] * 3, numbers


@needs_cc
@pytest.mark.parametrize("compiler", CC)
def test_what_is_announced_is_what_the_compiled_file_holds(compiler: str, tmp_path: Path) -> None:
    made = c_file(program_of(model_of(usual("har-cnn"))), int8=True)
    (tmp_path / "model.c").write_text(made.text)
    subprocess.run([compiler, *STRICT, "-Os", "-c", "model.c"], cwd=tmp_path, check=True)
    rows = subprocess.run(["size", "-A", "model.o"], cwd=tmp_path, check=True, capture_output=True, text=True).stdout
    found = Counter[str]()
    for name, size in re.findall(r"^\.(\w+)\S*\s+(\d+)", rows, re.MULTILINE):
        found[name] += int(size)
    assert found["bss"] == made.memory
    assert made.constants <= found["rodata"] < made.constants + 500
    assert found["text"] < 4000


@needs_cc
def test_a_sum_that_reads_a_tensor_twice_does_not_lose_it(tmp_path: Path) -> None:
    net = Draft((5,))
    first, second = net.add(Linear(5, 4), SAMPLES), net.add(Linear(5, 4), SAMPLES)
    net.add(Add(), first, second, first)
    joined = net.add(Concat(), net.last, net.last, second)
    net.add(Add(), joined, net.add(Tanh()))
    model = model_of(net.architecture())
    features = samples_for(model.graph, 3).features
    found = compiled(c_file(program_of(model)).text, tmp_path, 5, 12)(features)
    assert difference(found, truth(model, features)) < 1e-5


@needs_cc
def test_features_are_scaled_inside_unless_they_come_scaled(tmp_path: Path) -> None:
    scaling = Scaling((3.0, -1.0), (0.5, 8.0))
    model = model_of(Architecture((2, 7), (Flatten(), Linear(14, 5), Relu(), Linear(5, 3))), scaling=scaling)
    raw = samples_for(model.graph, 4).features * 5
    expected = truth(model, scaling.apply(raw))
    made = c_file(program_of(model)).text, c_file(program_of(model, raw=True)).text
    inside, outside = (compiled(text, tmp_path, 14, 3) for text in made)
    assert difference(inside(raw), expected) < 1e-5
    assert difference(outside(scaling.apply(raw)), expected) < 1e-5
    assert "scaled to mean 0" in made[0]
    assert "scaled already" in made[1]


@needs_cc
def test_names_of_classes_are_text_and_nothing_else(tmp_path: Path) -> None:
    names = ('a"; int evil(void) { return 1; } //', "*/ x /*", "??/", "back\\slash %s\\", "Füße", "123\\0")
    model = model_of(Architecture((3,), (Linear(3, 7),)), names=names)
    compiled(c_file(program_of(model)).text, tmp_path, 3, 7)
    library = ctypes.CDLL(str(next(tmp_path.glob("*.so"))))
    found = (ctypes.c_char_p * 7).in_dll(library, "predict_names")
    assert [text.decode() for text in found if text] == [*names, "6"]
    assert not hasattr(library, "evil")


def test_rounded_weights_are_as_near_as_eight_bits_allow() -> None:
    model = model_of(usual("cnn"))
    model.weights[:25] = 0  # the whole first kernel
    steps = program_of(model).steps
    made = round_weights(steps)
    assert sorted(made) == [(step.number, "weight") for step in steps if "weight" in step.tensors]
    for (number, name), one in made.items():
        weights = steps[number].tensors[name]
        rows = np.abs(weights).reshape(len(weights), -1).max(axis=1)
        step = (rows / 127).reshape(-1, *(1,) * (weights.ndim - 1))
        assert (np.abs(one.floats() - weights) <= 0.5001 * step + 1e-12).all()
    assert not made[0, "weight"].numbers[0].any()
