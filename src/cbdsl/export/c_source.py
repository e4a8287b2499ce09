"""A network as one C99 file: no allocation, nothing but a few functions of math.h, memory planned beforehand."""

from __future__ import annotations

import string
import textwrap
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cbdsl.engines.architecture import NAMES, SAMPLES, Flatten
from cbdsl.export.buffers import OUTPUT, Plan, plan
from cbdsl.export.c_helpers import functions
from cbdsl.export.c_layers import Code, number
from cbdsl.export.int8 import rounded
from cbdsl.export.steps import Program

_HEAD = """\
/* A classifier trained with cbdsl.

   void predict(const float *in, float *out);

   in   PREDICT_INPUTS floats: one sample, {shape}, the last axis side by side;
        {units}
   out  PREDICT_CLASSES floats: logits; the class is the place of the largest, its name in predict_names

   constants {constants} bytes (weights as {kind}), working memory {memory} bytes, static; so one call at a time.
   Compile with: cc -std=c99 -O2 -c FILE.c, and link with -lm. */
"""

_CHECK = """\
#if INT_MAX < 2147483647
#error "int must have 32 bits"
#endif

enum {{ PREDICT_INPUTS = {inputs}, PREDICT_CLASSES = {classes} }};

const char *const predict_names[PREDICT_CLASSES] = {{
{names}
}};

void predict(const float *in, float *out);

"""

_PLAIN = set(string.ascii_letters + string.digits + " _-.,+")


@dataclass(frozen=True)
class CFile:
    """The text, and what it takes on a device."""

    text: str
    constants: int  # bytes of weights and other numbers
    memory: int  # bytes of working memory


def c_file(program: Program, int8: bool = False) -> CFile:
    """The whole file."""
    steps = program.steps
    code = Code(rounded(steps) if int8 else {})
    places = plan(steps)
    for step in steps:
        code.calls.append(f"    /* {step.number}: {NAMES[type(step.layer)]} -> {' x '.join(map(str, step.shape))} */")
        sources = [_where(program, places, other) for other in step.reads]
        code.step(step, sources, _where(program, places, step.number))
    constants, memory = sum(values.nbytes for values in code.arrays.values()), 4 * places.size
    head = _HEAD.format(
        shape=" x ".join(map(str, program.card.shape)), units=textwrap.fill(program.units(), 100), constants=constants,
        kind="8-bit whole numbers" if int8 else "floats", memory=memory,
    )  # fmt: skip
    names = [_quoted(_name(program, label)) for label in range(program.classes)]
    check = _CHECK.format(inputs=program.inputs, classes=program.classes, names=_lines(names))
    includes, _, body = functions(code.called, int8).partition("\n\n")
    arrays = "\n".join(_array(name, values) for name, values in code.arrays.items())
    room = f"static float memory[{places.size}];\n\n" if places.size else ""
    calls = "\n".join(["void predict(const float *in, float *out)", "{", *code.calls, "}\n"])
    return CFile(f"{head}{includes}\n\n{check}{body}\n{arrays}\n{room}{calls}", constants, memory)


def _where(program: Program, places: Plan, number_of_step: int) -> str:
    """What C calls the place of a result."""
    if number_of_step == SAMPLES:
        return "in"
    if number_of_step in places.offsets:
        offset = places.offsets[number_of_step]
        return "out" if offset == OUTPUT else f"memory + {offset}"
    step = program.steps[number_of_step]  # the samples under another shape
    assert isinstance(step.layer, Flatten)
    return _where(program, places, step.reads[0])


def _name(program: Program, label: int) -> str:
    names = program.card.class_names
    return names[label] if label < len(names) else str(label)


def _quoted(name: str) -> str:
    """A string of C. Whatever could end it, or mean something to C, is written as a number."""
    signs = (chr(byte) if chr(byte) in _PLAIN else f"\\{byte:03o}" for byte in name.encode())
    return f'"{"".join(signs)}"'


def _array(name: str, values: NDArray[np.float32] | NDArray[np.int8]) -> str:
    kind = "signed char" if values.dtype == np.int8 else "float"
    texts = map(str, values.tolist()) if values.dtype == np.int8 else map(number, values.tolist())
    return f"static const {kind} {name}[{len(values)}] = {{\n{_lines(texts)}\n}};\n"


def _lines(words: Iterable[str]) -> str:
    """Words with commas between them, as many to a line as fit."""
    lines, line = [], "   "
    for word in words:
        if len(line) + len(word) > 116:
            lines.append(line)
            line = "   "
        line += f" {word},"
    return "\n".join([*lines, line])
