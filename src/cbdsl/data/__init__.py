"""Where samples come from, and which worker holds which."""

from cbdsl.data.dataset import Dataset, load
from cbdsl.data.partition import Split, split

__all__ = ["Dataset", "Split", "load", "split"]
