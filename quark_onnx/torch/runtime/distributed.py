"""Distribution of calibration data over the processes of torch.distributed.

Every process runs the model on its part of the samples. Sums over tokens, such as Hessians, are
formed in the order of the samples, so that they equal those of a single process to the bit. Ranges
and histograms are merged. From file to file, the first process alone writes. Without
torch.distributed, the functions do nothing.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from quark_onnx.common.errors import DataError

T = TypeVar("T")
#: Tensors of one sample, by layer.
Tensors = Mapping[str, Sequence[torch.Tensor]]


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


def dealt(items: Sequence[T]) -> list[T]:
    """Return the items of this process, in a round-robin distribution.

    >>> dealt([1, 2, 3])
    [1, 2, 3]
    """
    if count() == 1:
        return list(items)
    return list(items[dist.get_rank() :: count()])


def own_part(batches: Sequence[Any]) -> list[Any]:
    """Return the calibration batches of this process, in a round-robin distribution.

    With fewer batches than processes, batches of several windows are split first.

    Args:
        batches: as for ``split_batches``.

    Raises:
        DataError: there are fewer windows than processes.
    """
    if count() == 1:
        return list(batches)
    if len(batches) < count():
        batches = split_batches(batches, count())
    # A process without samples would have no block to run, and no statistic to reduce.
    if len(batches) < count():
        raise DataError(
            f"each of {count()} processes needs a calibration window, and there are only"
            f" {len(batches)}; give more, or start fewer processes",
        )
    return dealt(batches)


def split_batches(batches: Sequence[Any], parts: int) -> list[Any]:
    """Split batches along their first axis into at least ``parts``, if they have as many windows.

    Args:
        batches: tensors of shape (windows, ...), or mappings of such tensors with equal numbers of
            windows. Other samples are one window each.
        parts: the number of parts.

    >>> [len(part) for part in split_batches([torch.zeros(8, 64)], 3)]
    [2, 2, 2, 2]
    """
    size = max(1, sum(map(_windows, batches)) // parts)
    result = list[Any]()
    for batch in batches:
        if _windows(batch) == 1:
            result.append(batch)
        elif isinstance(batch, Mapping):
            columns = [value.split(size) for value in batch.values()]
            rows = zip(*columns, strict=True)
            result += [dict(zip(batch, row, strict=True)) for row in rows]
        else:
            result += batch.split(size)
    return result


def _windows(batch: Any) -> int:
    """Return the number of windows in a batch; 1 for a batch that cannot be split."""
    values = [*batch.values()] if isinstance(batch, Mapping) else [batch]
    if not all(isinstance(value, torch.Tensor) and value.ndim > 1 for value in values):
        return 1
    counts = {len(value) for value in values}
    return counts.pop() if len(counts) == 1 else 1


def in_order(own: Iterable[Tensors], device: torch.device | str) -> Iterator[Tensors]:
    """Yield the tensors of all samples, in the order in which a single process meets them.

    Inputs of layers are sent, not sums of their products: a sum in another order has other last
    bits, with which algorithms choose other codes.

    Args:
        own: the tensors of the samples that ``own_part`` has given to this process.
        device: the device of the tensors.
    """
    if count() == 1:
        yield from own
        return
    samples = iter(own)
    while True:
        sample = next(samples, None)
        for rank, form in enumerate(
            gathered(None if sample is None else _form(sample))
        ):
            # Samples are dealt out in turn: the ranks behind have none left, either.
            if form is None:
                return
            yield _sent(sample or {}, form, rank, device)


def _form(sample: Tensors) -> dict[str, list[tuple[torch.Size, torch.dtype]]]:
    return {
        name: [(tensor.shape, tensor.dtype) for tensor in tensors]
        for name, tensors in sample.items()
    }


def _sent(
    sample: Tensors,
    form: Mapping[str, Sequence[tuple[torch.Size, torch.dtype]]],
    rank: int,
    device: torch.device | str,
) -> Tensors:
    """Send a sample of one rank to the others, or receive it from that rank."""
    sent = dict[str, list[torch.Tensor]]()
    for name, kinds in form.items():
        if rank == dist.get_rank():
            sent[name] = [tensor.contiguous() for tensor in sample[name]]
        else:
            sent[name] = [
                torch.empty(shape, dtype=dtype, device=device) for shape, dtype in kinds
            ]
        for tensor in sent[name]:
            dist.broadcast(tensor, rank)
    return sent


def summed(tensor: torch.Tensor) -> torch.Tensor:
    """Sum a tensor over the processes, in place."""
    if count() > 1:
        dist.all_reduce(tensor)
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
    values = [value]
    # The list of the first process is sent, and overwrites the lists of the other processes.
    dist.broadcast_object_list(values, 0)
    return values[0]


def gathered(value: Any) -> list[Any]:
    """Return the picklable values of the processes, in order of rank."""
    if count() == 1:
        return [value]
    values: list[Any] = [None] * count()
    dist.all_gather_object(values, value)
    return values


def _device() -> str:
    # NCCL reduces tensors on GPUs alone, gloo tensors on the CPU.
    return "cuda" if dist.get_backend() == "nccl" else "cpu"
