"""The numbers of short runs are those recorded in numbers.json: methods, codecs, attacks, selections, a resumed run.

A failure lists every case and key that differs. `python tools/round_hashes.py record-short` records the file anew. That
is legitimate when a change of the numbers is intended, and the commit says why they change, or when a new version of
numpy, zlib or the C library changes them and the code is the same. It is not legitimate after a change that was meant
to leave the numbers as they are, such as renaming or moving code.

All cases run with portable kernels in one environment for every x86-64 processor; see tools/portable_kernels.py.
"""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path

import pytest

TOOLS = Path(__file__).parents[2] / "tools"
MISSING: str = runpy.run_path(str(TOOLS / "portable_kernels.py"))["missing"]()


@pytest.mark.skipif(bool(MISSING), reason=MISSING)
def test_numbers_are_those_recorded() -> None:
    command = [sys.executable, str(TOOLS / "round_hashes.py"), "compare-short"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1200, check=False)
    progress = "\n".join(done.stderr.splitlines()[-5:])
    assert done.returncode == 0, f"these numbers differ:\n{done.stdout}\n{progress}"
