"""The theory of Sec. IV and V beside the measurement: constants, both theorems, and the genie worker.

Nothing here changes a run. Runs are deterministic, so a trajectory is repeated from its spec and reduced to a few
numbers per round. docs/theory.md explains what is derived and what is measured.
"""

from __future__ import annotations
