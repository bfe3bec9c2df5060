"""Share calibration data among the processes of torch.distributed, and sum their statistics.

Each process runs the model on its part of the samples. Sums of products, ranges and histograms are
those of all samples then, so that each process chooses the same codes. Without torch.distributed,
all of this does nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from quark_onnx.errors import DataError


def count() -> int:
    """How many processes there are."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def own_part(samples: Sequence[Any]) -> list[Any]:
    """The samples of this process: each takes one in turn.

    Raises:
        DataError: there are fewer samples than processes.

    >>> own_part([1, 2, 3])
    [1, 2, 3]
    """
    if count() == 1:
        return list(samples)
    if len(samples) < count():
        raise DataError(
            f"{len(samples)} samples are too few for {count()} processes; each needs one",
        )
    return list(samples[dist.get_rank() :: count()])


def summed(tensor: Any) -> Any:
    """The sum over all processes, in place."""
    if count() > 1:
        dist.all_reduce(tensor)
    return tensor


def least(tensor: Any) -> Any:
    """The least over all processes, element by element, in place."""
    if count() > 1:
        dist.all_reduce(tensor, dist.ReduceOp.MIN)
    return tensor


def greatest(tensor: Any) -> Any:
    """The greatest over all processes, element by element, in place."""
    if count() > 1:
        dist.all_reduce(tensor, dist.ReduceOp.MAX)
    return tensor


def number(value: int) -> int:
    """The sum over all processes.

    >>> number(3)
    3
    """
    return value if count() == 1 else int(summed(torch.tensor(value, device=_device())))


def from_first(value: Any) -> Any:
    """What the first process has; it must be picklable."""
    if count() == 1:
        return value
    found = [value]
    dist.broadcast_object_list(found, 0)
    return found[0]


def gathered(value: Any) -> list[Any]:
    """What each process has, in their order; it must be picklable."""
    if count() == 1:
        return [value]
    found: list[Any] = [None] * count()
    dist.all_gather_object(found, value)
    return found


def _device() -> str:
    return "cuda" if dist.get_backend() == "nccl" else "cpu"
