"""Names of the folders that runs get if none is given: what was run, in a few words."""

from __future__ import annotations

import re
from pathlib import Path

from cbdsl.runs.defence import method_of
from cbdsl.runs.folder import free_folder
from cbdsl.runs.records import describe
from cbdsl.spec import Spec

_LONGEST = 24  # letters of one part of a name


def run_folder(spec: Spec, prefix: str = "") -> Path:
    """A folder below runs/ that is not there yet, named after a resolved spec."""
    return free_folder(prefix + folder_name(spec))


def folder_name(spec: Spec) -> str:
    """Data, partition, method, whatever is not the method's default, and the seed: safe in any file system."""
    words = [Path(spec.data.source).stem, spec.data.partition, spec.method]
    if spec.shared != method_of(spec).shared:
        words.append(f"shared-{spec.shared}")
    words += describe(spec).replace(" ", "").split(",")
    if spec.attack.byzantine:
        words.append(f"{_safe(spec.attack.name)}{spec.attack.byzantine}")
    words.append(f"seed{spec.seed}")
    return "-".join(filter(None, map(_safe, words)))


def _safe(word: str) -> str:
    """A word of letters, digits and a few signs, not too long."""
    return re.sub(r"[^A-Za-z0-9_+-]+", "-", word).strip("-")[:_LONGEST].strip("-")
