"""The exported C file on ARM: the same logits where there is an operating system, small enough where there is none."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings

from cbdsl import register
from cbdsl.export.c_source import c_file
from cbdsl.export.steps import program_of, rounded_flat
from cbdsl.models.architecture import Architecture
from cbdsl.models.saved_model import SavedModel
from cbdsl.models.zoo import usual
from support.c_programs import difference, model_of, truth, zoo
from support.emulated import MACHINES, STRICT, Machine, c_program, call, needs, predicted
from support.layer_kinds import NETWORKS
from support.networks import graphs, samples_for

pytestmark = pytest.mark.arm
NEAR = 1e-5
few = settings(max_examples=10, derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck))
ZOO = [name for name in register.model.names() if register.model.get(name).__module__ == "cbdsl.models.zoo"]
CORTEX_M4 = ["-mcpu=cortex-m4", "-mthumb", "-mfloat-abi=hard", "-mfpu=fpv4-sp-d16", "-ffreestanding"]
DOUBLES = "__aeabi_d"  # how functions begin that compute in double precision, which a Cortex-M4 has no unit for


def check(
    model: SavedModel, machine: Machine, folder: Path, int8: bool = False, flags: tuple[str, ...] = ("-O2",)
) -> None:
    """Logits there are those of the model in double precision, whatever its weights are rounded to."""
    features = samples_for(model.graph, 3).features
    program = program_of(model)
    meant = SavedModel(model.card, rounded_flat(program.steps), "rounded") if int8 else model
    made = c_program(c_file(program, int8).text, machine, folder, flags)
    assert difference(predicted(made, machine, features, model.graph.classes), truth(meant, features)) < NEAR


@pytest.mark.parametrize("name", ZOO)
@pytest.mark.parametrize("machine", MACHINES)
def test_every_network_of_the_zoo_has_the_same_logits(machine: Machine, name: str, tmp_path: Path) -> None:
    model, features, logits = zoo(name)
    made = c_program(c_file(program_of(model)).text, machine, tmp_path)
    assert difference(predicted(made, machine, features, model.graph.classes), logits) < NEAR


@pytest.mark.parametrize("machine", MACHINES)
def test_every_layer_and_any_graph_has_the_same_logits(machine: Machine, tmp_path: Path) -> None:
    for number, network in enumerate(NETWORKS.values()):
        check(model_of(network), machine, tmp_path, int8=number % 2 == 1)

    @few
    @given(architecture=graphs(dropout=True))
    def any_graph(architecture: Architecture) -> None:
        check(model_of(architecture), machine, tmp_path)

    any_graph()


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize(
    "flags", [("-O0",), ("-O3", "-fsanitize=undefined", "-fsanitize-undefined-trap-on-error")], ids=["O0", "undefined"]
)
def test_no_logit_hangs_on_the_optimiser(machine: Machine, flags: tuple[str, ...], tmp_path: Path) -> None:
    check(model_of(usual("cnn")), machine, tmp_path, flags=flags)
    check(model_of(NETWORKS["joined"]), machine, tmp_path, int8=True, flags=flags)


@needs("arm-none-eabi-gcc")
@pytest.mark.parametrize("name", ZOO)
def test_it_fits_a_microcontroller(name: str, tmp_path: Path) -> None:
    program = program_of(model_of(usual(name)))
    names = 8 * program.classes  # names of classes are constants, too
    for int8 in (False, True):
        made = c_file(program, int8)
        source, target = tmp_path / "model.c", tmp_path / "model.o"
        source.write_text(made.text)
        call("arm-none-eabi-gcc", *STRICT, *CORTEX_M4, "-Wdouble-promotion", "-Os", "-c", source, "-o", target)
        rows = call("arm-none-eabi-size", "-A", target, text=True).stdout
        found = Counter[str]()
        for part, size in re.findall(r"^\.(\w+)\S*\s+(\d+)", rows, re.MULTILINE):
            found[part] += int(size)
        kind = "int8" if int8 else "floats"
        print(f"{name}, {kind}: code {found['text']}, constants {found['rodata']}, memory {found['bss']} bytes")
        assert (found["bss"], found["data"]) == (made.memory, 0)
        assert made.constants <= found["rodata"] < made.constants + names + 500
        assert 0 < found["text"] < 8000
        assert DOUBLES not in call("arm-none-eabi-nm", "--undefined-only", target, text=True).stdout
