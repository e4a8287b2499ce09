"""Libraries that only some commands need: whether they are there, and how to get them."""

from __future__ import annotations

import importlib.util
from importlib import metadata

from cbdsl.errors import missing

EXTRAS = {
    "torch": "torch",
    "matplotlib": "study",
    "cryptography": "deploy",
    "amqtt": "deploy",
    "onnx": "export",
    "ray": "ray",
}
"""Libraries and the extras that bring them: pip install 'cbdsl[study]'."""


def is_installed(library: str) -> bool:
    """Whether a library can be imported; does not import it."""
    try:
        return importlib.util.find_spec(library) is not None
    except (ImportError, ValueError):
        return False


def version_of(library: str) -> str:
    """A library's version, or how to install it."""
    if is_installed(library):
        try:
            return metadata.version(library)
        except metadata.PackageNotFoundError:
            return "installed, version unknown"
    return f"not installed ({how_to_install(library)})"


def how_to_install(library: str) -> str:
    """What to type to get a library."""
    return f"pip install 'cbdsl[{EXTRAS[library]}]'" if library in EXTRAS else f"pip install {library}"


def demand(library: str, why: str) -> None:
    """Fail before anything was run if a library is not there."""
    if not is_installed(library):
        raise missing(library, EXTRAS[library], why)
