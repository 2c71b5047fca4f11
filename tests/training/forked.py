"""Data for a loader whose workers are forked."""

from __future__ import annotations

import os

import torch
from torch import Tensor
from torch.utils.data import Dataset

from tests.worker_agent.training import WIDTH


class Forked(Dataset[tuple[Tensor, int]]):
    """Rows of noise, each with the process that made it."""

    def __init__(self, rows: int) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return self._rows

    def __getitem__(self, row: int) -> tuple[Tensor, int]:
        return torch.randn(WIDTH, generator=torch.Generator().manual_seed(row)), os.getpid()
