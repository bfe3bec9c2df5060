"""What quantizing a checkpoint will take, said before it starts."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from quark_onnx.torch.algorithms.gptq.solver import Solver
from quark_onnx.torch.algorithms.weight_rounding.levels import TensorLevels
from quark_onnx.torch.checkpoints.float_checkpoint import FloatCheckpoint
from quark_onnx.torch.checkpoints.meta_model import dtype_of
from quark_onnx.torch.checkpoints.quark_tensors import stored
from quark_onnx.torch.config.spec import TensorSpec
from quark_onnx.torch.formats.quantized_tensor import quantize
from quark_onnx.torch.models.quantized_layer import Layers, kind_of, outputs_first
from quark_onnx.torch.models.structure import blocks_of, embedding_of
from quark_onnx.torch.pipelines.algorithm_cost import Cost, Shapes, cost_of
from quark_onnx.torch.runtime.memory import resident

#: Bytes for each weight of the greatest matrix, in codes and packed; and what rounding a part of it
#: takes on the way.
_WORKING, _ON_THE_WAY = 6, 48 << 20
#: Rows and columns of the matrix whose product, and whose rounding, are timed; rows that show how
#: large codes are.
_ROWS, _COLUMNS, _SOME = 2048, 2048, 64
#: Rows that it is multiplied with, and bytes that are read, to see how fast that is.
_TOKENS, _READ = 256, 1 << 25
#: Tokens that a block runs at once; and bytes for each probability of attention, beside three of
#: the model's type.
AT_ONCE, _SOFTMAX = 512, 4
#: Columns of a weight that is swept, to see how fast that is.
_SWEPT = 128


@dataclass(frozen=True)
class Estimate:
    """What a run takes.

    Attributes:
        memory, disk: bytes.
        seconds: those of algorithms are a rough guess.
        algorithms: those that nothing is known of; their work comes on top.

    >>> print(Estimate(3 << 30, 1 << 29, 170.0))
    about 3.0 GiB of memory, 512 MiB of disk, 3 min
    """

    memory: int
    disk: int
    seconds: float
    algorithms: tuple[str, ...] = ()

    def __str__(self) -> str:
        minutes = self.seconds / 60
        span = (
            f"{self.seconds:.0f} s"
            if minutes < 1
            else f"{minutes:.0f} min"
            if minutes < 90
            else f"{minutes / 60:.1f} h"
        )
        more = (
            f", and what {' and '.join(self.algorithms)} takes"
            if self.algorithms
            else ""
        )
        return f"about {size(self.memory)} of memory, {size(self.disk)} of disk, {span}{more}"


def size(count: int) -> str:
    return (
        f"{count / 2**30:.1f} GiB" if count >= 1 << 30 else f"{count / 2**20:.0f} MiB"
    )


def estimate(  # noqa: PLR0913
    source: FloatCheckpoint,
    chosen: Layers,
    tokens: int,
    *,
    spilled: bool = False,
    samples: int = 1,
    algorithms: tuple[Any, ...] = (),
) -> Estimate:
    """What it takes to quantize layers of a checkpoint file to file, in this process and at the
    speed of this machine.

    Args:
        source: the checkpoint.
        chosen: the layers that are quantized, of its empty model.
        tokens: of the data that the blocks are run on; 0 where they are not run.
        spilled: whether their hidden states are kept in files.
        samples: that the tokens are in.
        algorithms: those of the configuration.
    """
    model, dtype, now = source.model, dtype_of(source.model.config), resident()
    blocks = [list(block.parameters()) for block in blocks_of(model).values()]
    coded = [
        (module.weight, spec.weight)
        for module, spec in chosen.values()
        if spec.weight is not None
    ]
    count, largest = (
        _count(weight for weight, _ in coded),
        max((weight.numel() for weight, _ in coded), default=0),
    )
    shares = {
        spec: _laid_out(spec, dtype, _SOME) / (_SOME * _COLUMNS) for _, spec in coded
    }
    codes = sum(weight.numel() * shares[spec] for weight, spec in coded)
    disk = (_count(model.parameters()) - count) * dtype.itemsize + int(codes)
    read = sum(
        file.stat().st_size
        for file in {tensor.path for tensor in source.reader.tensors.values()}
    )
    seconds = (read + 2 * disk) / _reading_rate(
        source,
    )  # values are written twice: alone, and behind their header
    if coded:
        seconds += count / _rounding_rate(coded[0][1], dtype)
    alone = max(parameter.numel() for parameter in model.parameters()) * dtype.itemsize
    memory = now + largest * _WORKING + _ON_THE_WAY
    shapes = _shapes(chosen, blocks, dtype, tokens, samples)
    more, unknown = cost_of(algorithms, shapes)
    seconds += _work(more, coded[0][1], dtype) if coded and algorithms else 0.0
    if not tokens:
        return Estimate(memory + alone + more.memory, disk, seconds, unknown)
    block = shapes.block + max(map(_count, blocks), default=0) * max(
        1.0,
        codes / max(count, 1),
    )
    states = (
        0
        if spilled
        else tokens * int(getattr(model.config, "hidden_size", 0) or 0) * dtype.itemsize
    )
    states *= 2 if any(each.stage == "weights" for each in algorithms) else 1
    held = (
        _count(_in_front(source, blocks)) * dtype.itemsize
        + int(block)
        + states
        + more.memory
    )
    held += _probabilities(source, chosen, tokens // max(samples, 1), dtype)
    return Estimate(
        memory + max(alone, held),
        disk,
        seconds + shapes.weights * tokens / _product_rate(dtype),
        unknown,
    )


def _shapes(
    chosen: Layers,
    blocks: list[list[Any]],
    dtype: Any,
    tokens: int,
    samples: int,
) -> Shapes:
    """What algorithms work on."""
    inside = {id(parameter) for block in blocks for parameter in block}
    layers = {
        name: tuple(outputs_first(module.weight, kind_of(module)).flatten(1).shape)
        for name, (module, spec) in chosen.items()
        if spec.weight is not None
        and id(module.weight) in inside
        and module.weight.ndim > 1
    }
    block = max(map(_count, blocks), default=0) * dtype.itemsize
    return Shapes(layers, sum(map(_count, blocks)), block, tokens, samples)


def _probabilities(
    source: FloatCheckpoint,
    chosen: Layers,
    length: int,
    dtype: Any,
) -> int:
    """Bytes of the probabilities of attention while a block runs, where they are there to be
    rounded.

    Args:
        length: tokens of a sample.
    """
    if all(spec.probabilities is None for _, spec in chosen.values()):
        return 0
    config = source.model.config
    heads = int(
        getattr(getattr(config, "text_config", config), "num_attention_heads", 0) or 0,
    )
    rows = max(1, AT_ONCE // max(length, 1))
    return int(heads * rows * length**2 * (3 * dtype.itemsize + _SOFTMAX))


def _work(cost: Cost, spec: TensorSpec, dtype: Any) -> float:
    """Seconds that algorithms take."""
    seconds = cost.products / _product_rate(
        torch.float32,
    ) + cost.roundings / _rounding_rate(spec, dtype)
    return seconds + (cost.columns / _column_rate() if cost.columns else 0.0)


def _count(parameters: Iterable[Any]) -> int:
    return sum(parameter.numel() for parameter in parameters)


def _in_front(source: FloatCheckpoint, blocks: list[list[Any]]) -> list[Any]:
    """Parameters outside of the blocks without those of heads, which are not run."""
    model = source.model
    heads = {
        id(each)
        for name in source.heads
        for each in model.get_submodule(name).parameters()
    }
    embedding = embedding_of(model)
    heads -= (
        set() if embedding is None else {id(each) for each in embedding.parameters()}
    )
    others = heads | {id(each) for block in blocks for each in block}
    return [
        parameter for parameter in model.parameters() if id(parameter) not in others
    ]


def _laid_out(spec: TensorSpec, dtype: Any, rows: int) -> int:
    """Bytes of the codes and scales of a weight with so many rows."""
    weight = torch.linspace(-1, 1, rows * _COLUMNS).reshape(rows, _COLUMNS).to(dtype)
    return sum(tensor.nbytes for tensor in stored(quantize(weight, spec)).values())


def _seconds(work: Callable[[], object]) -> float:
    """Of the faster of two runs, behind one that may wait for memory."""
    found = []
    for _ in range(3):
        start = time.perf_counter()
        work()
        found.append(time.perf_counter() - start)
    return min(found[1:])


def _product_rate(dtype: Any) -> float:
    """Weights a second that tokens are multiplied with, one token each."""
    weight, x = (torch.ones(rows, _COLUMNS, dtype=dtype) for rows in (_ROWS, _TOKENS))
    return float(_TOKENS * weight.numel()) / _seconds(
        lambda: torch.aminmax(torch.nn.functional.linear(x, weight)),
    )


def _rounding_rate(spec: TensorSpec, dtype: Any) -> float:
    """Weights a second that are rounded and laid out as they are stored."""
    return float(_ROWS * _COLUMNS) / _seconds(lambda: _laid_out(spec, dtype, _ROWS))


def _column_rate() -> float:
    """Columns a second that are swept, where they are so short that their length does not matter."""  # noqa: E501
    weight = torch.linspace(-1, 1, _SOME * _SWEPT).reshape(_SOME, _SWEPT)
    steps, solver = (
        TensorLevels.of(quantize(weight, TensorSpec("int8"))),
        Solver.of(torch.eye(_SWEPT)),
    )
    assert steps is not None
    return _SWEPT / _seconds(lambda: solver.quantize(weight, [steps]))


def _reading_rate(source: FloatCheckpoint) -> float:
    """Bytes a second that are read from the greatest file of a checkpoint.

    Writing is taken to be as fast.
    """
    file: Path = max(
        {tensor.path for tensor in source.reader.tensors.values()},
        key=lambda each: each.stat().st_size,
    )
    start = time.perf_counter()
    with file.open("rb") as opened:
        count = len(opened.read(_READ))
    return count / (time.perf_counter() - start)
