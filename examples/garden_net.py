"""A network of one's own for windows of six sensors: `cbdsl serve ... --model garden_net.py:Net`."""

from __future__ import annotations

import torch
from torch import nn


class Net(nn.Module):
    """Two convolutions along time, then a mean over it; (N, 6, 64) -> (N, 4)."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv1d(6, 8, 5, stride=2, padding=2)
        self.second = nn.Conv1d(8, 12, 5, stride=2, padding=2)
        self.last = nn.Linear(12, 4)

    def forward(self, windows: torch.Tensor) -> torch.Tensor:
        """Logits of windows."""
        found = torch.relu(self.second(torch.relu(self.first(windows))))
        logits: torch.Tensor = self.last(found.mean(2))
        return logits
