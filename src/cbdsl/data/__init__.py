"""Where samples come from, and which worker holds which."""

from cbdsl.data.partition import Split, split
from cbdsl.data.sources import Dataset, load

__all__ = ["Dataset", "Split", "load", "split"]
