"""Reproducible numbers: the settings of torch that `trainer.deterministic` makes in every process of a run."""

import os
import random


def make_deterministic(seed: int) -> None:
    """Seed Python, NumPy and torch, and have torch take only operations that give the same bits each time.

    An operation that has no such form raises a RuntimeError. On a GPU it must come before the first matrix product of
    the process, since cuBLAS reads its workspace's size once.
    """
    import numpy
    import torch

    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
