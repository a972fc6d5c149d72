"""What the kernels' host sides share."""

from __future__ import annotations

import functools

import torch
from torch import Tensor


@functools.cache
def multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


@functools.cache
def nothing(device: torch.device, dtype: torch.dtype, *shape: int) -> Tensor:
    """(0, *shape), for what a kernel takes and doesn't look at."""
    return torch.empty(0, *shape, dtype=dtype, device=device)


def aligned(x: Tensor) -> Tensor:
    """x as the kernels read it: contiguous, at a multiple of 16 bytes."""
    x = x.contiguous()
    return x if x.data_ptr() % 16 == 0 else x.clone()
