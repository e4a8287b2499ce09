"""Models to export, and what runs the files: a C compiler, onnxruntime, torch."""

from __future__ import annotations

import ctypes
import importlib.util
import shutil
import subprocess
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cbdsl.arrays import Doubles, Floats
from cbdsl.data.dataset import Scaling
from cbdsl.models.architecture import Architecture
from cbdsl.models.saved_model import ModelMetadata, SavedModel
from cbdsl.models.zoo import usual
from support.networks import initial, reference, samples_for

CC = [name for name in ("gcc", "clang") if shutil.which(name)]
STRICT = ["-std=c99", "-Wall", "-Wextra", "-Werror", "-pedantic"]
needs_cc = pytest.mark.skipif(not CC, reason="NO C COMPILER: install gcc or clang")
needs_clang = pytest.mark.skipif("clang" not in CC, reason="NO CLANG: apt-get install clang")
needs_onnx = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("onnx", "onnxruntime")),
    reason="NO ONNX: pip install onnx onnxruntime",
)


def model_of(
    architecture: Architecture, seed: int = 0, scaling: Scaling | None = None, names: tuple[str, ...] = ()
) -> SavedModel:
    """A model with weights that were moved from where they start: no factor of a norm is 1, no offset 0."""
    weights = initial(architecture, 1, seed)[0]
    moved = weights + np.random.default_rng(seed).normal(0, 0.05, weights.shape).astype(np.float32)
    card = ModelMetadata(architecture.shape, architecture, tuple(architecture.tensors()), scaling, names)
    return SavedModel(card, moved, "made here")


def truth(model: SavedModel, features: Floats) -> Doubles:
    """Logits in double precision; features as the network is given them."""
    module = reference(model.graph, model.weights).eval()
    with torch.no_grad():
        logits: Doubles = module(torch.from_numpy(features).double()).numpy()
    return logits


@cache
def zoo(name: str) -> tuple[SavedModel, Floats, Doubles]:
    """A network of the zoo, samples for it, and what it makes of them."""
    model = model_of(usual(name))
    features = samples_for(model.graph, 2).features
    return model, features, truth(model, features)


def compiled(text: str, folder: Path, inputs: int, classes: int, compiler: str = "gcc") -> Callable[[Floats], Floats]:
    """The function of a C file, for many samples; it must compile without a warning."""
    source, library = folder / "model.c", folder / f"model-{len(list(folder.iterdir()))}.so"
    source.write_text(text)
    words = [compiler, *STRICT, "-O1", "-shared", "-fPIC", str(source), "-o", str(library), "-lm"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[:3000]
    function = ctypes.CDLL(str(library)).predict

    def run(features: Floats) -> Floats:
        out = np.full((len(features), classes), np.nan, np.float32)
        for row, result in zip(np.ascontiguousarray(features.reshape(-1, inputs)), out, strict=True):
            function(ctypes.c_void_p(row.ctypes.data), ctypes.c_void_p(result.ctypes.data))
        return out

    return run


def by_onnxruntime(content: bytes, features: Floats) -> Floats:
    import onnxruntime  # type: ignore[import-untyped]  # noqa: PLC0415

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
    (logits,) = session.run(["logits"], {"features": features})
    return np.asarray(logits, np.float32)


def difference(found: Any, expected: Any) -> float:  # noqa: ANN401
    """The largest difference of logits, as a part of the largest logit where that is above 1."""
    return float(np.abs(found - expected).max() / max(1.0, float(np.abs(expected).max())))
