"""Distribution of calibration data over the processes of torch.distributed.

Every process runs the model on its part of the samples. Hessians, ranges and histograms are then
reduced over all samples, so that all processes choose equal codes. From file to file, the first
process alone writes. Without torch.distributed, the functions do nothing.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from quark_onnx.common.errors import DataError


def count() -> int:
    """Return the number of processes."""
    # A build of torch without the distributed package has no ``is_initialized``.
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size()
    return 1


def is_first() -> bool:
    """Return whether this is the first process, which writes the results."""
    return count() == 1 or dist.get_rank() == 0


def wait_for_all() -> None:
    """Wait until every process has called this function."""
    if count() > 1:
        dist.barrier()


@contextlib.contextmanager
def process_group(device: torch.device) -> Iterator[None]:
    """Join the processes that torchrun has started, inside the context.

    Without torchrun, or if the caller has initialized torch.distributed, nothing is done.

    Args:
        device: the device of this process. GPUs are joined by NCCL, processors by gloo.
    """
    # torchrun gives the number of its processes in WORLD_SIZE.
    started = int(os.environ.get("WORLD_SIZE", "1")) > 1
    if not started or not dist.is_available() or dist.is_initialized():
        yield
        return
    backend = "gloo"
    if device.type == "cuda":
        backend = "nccl"
        # Collectives on objects use the current GPU of the process.
        torch.cuda.set_device(device)
    dist.init_process_group(backend)
    try:
        yield
    finally:
        dist.destroy_process_group()


def own_part(samples: Sequence[Any]) -> list[Any]:
    """Return the calibration samples of this process, in a round-robin distribution.

    Raises:
        DataError: there are fewer samples than processes.

    >>> own_part([1, 2, 3])
    [1, 2, 3]
    """
    if count() == 1:
        return list(samples)
    # A process without samples would have no block to run, and no statistic to reduce.
    if len(samples) < count():
        raise DataError(
            f"{len(samples)} samples are too few for {count()} processes; each needs one",
        )
    return list(samples[dist.get_rank() :: count()])


def summed(tensor: torch.Tensor) -> torch.Tensor:
    """Sum a tensor over the processes, in place."""
    if count() > 1:
        dist.all_reduce(tensor)
    return tensor


def least(tensor: torch.Tensor) -> torch.Tensor:
    """Reduce a tensor to its elementwise minimum over the processes, in place."""
    if count() > 1:
        dist.all_reduce(tensor, dist.ReduceOp.MIN)
    return tensor


def greatest(tensor: torch.Tensor) -> torch.Tensor:
    """Reduce a tensor to its elementwise maximum over the processes, in place."""
    if count() > 1:
        dist.all_reduce(tensor, dist.ReduceOp.MAX)
    return tensor


def number(value: int) -> int:
    """Return the sum of an integer over the processes.

    >>> number(3)
    3
    """
    if count() == 1:
        return value
    return int(summed(torch.tensor(value, device=_device())))


def from_first(value: Any) -> Any:
    """Return the value of the first process; the value must be picklable."""
    if count() == 1:
        return value
    found = [value]
    # The list of the first process is sent, and overwrites the lists of the other processes.
    dist.broadcast_object_list(found, 0)
    return found[0]


def gathered(value: Any) -> list[Any]:
    """Return the picklable values of the processes, in order of rank."""
    if count() == 1:
        return [value]
    found: list[Any] = [None] * count()
    dist.all_gather_object(found, value)
    return found


def _device() -> str:
    # NCCL reduces tensors on GPUs alone, gloo tensors on the CPU.
    return "cuda" if dist.get_backend() == "nccl" else "cpu"
