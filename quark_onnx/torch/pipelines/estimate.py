"""Estimate of memory use, disk use and runtime before a checkpoint is quantized."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from quark_onnx.torch.algorithms.cost import (
    BATCH_TOKENS,
    Cost,
    Shapes,
    cost_of,
    evaluation_cost,
)
from quark_onnx.torch.algorithms.gptq.solver import Solver
from quark_onnx.torch.algorithms.weight_rounding.levels import TensorLevels
from quark_onnx.torch.checkpoints.float_checkpoint import FloatCheckpoint
from quark_onnx.torch.checkpoints.meta_model import dtype_of
from quark_onnx.torch.checkpoints.quark_tensors import stored
from quark_onnx.torch.config.spec import TensorSpec
from quark_onnx.torch.formats.quantized_tensor import quantize
from quark_onnx.torch.models.quantized_layer import Layers, kind_of, outputs_first
from quark_onnx.torch.models.structure import blocks_of, embedding_of
from quark_onnx.torch.runtime.memory import resident

if TYPE_CHECKING:
    from transformers import PreTrainedModel

#: Bytes per weight of the largest matrix, as codes and packed; temporary bytes while a part of it
#: is rounded.
_WORKING, _ON_THE_WAY = 6, 48 << 20
#: Rows and columns of the matrix for the timing of products and rounding; rows for the size of
#: codes.
_ROWS, _COLUMNS, _SOME = 2048, 2048, 64
#: Tokens of the timed product, and bytes of the timed read.
_TOKENS, _READ = 256, 1 << 25
#: Tokens that a block runs at once; bytes per attention probability, in addition to three values
#: of the model's type.
AT_ONCE, _SOFTMAX = BATCH_TOKENS, 4
#: Columns of the timed sweep, and calls of the timed operator.
_SWEPT, _CALLS = 128, 16


@dataclass(frozen=True)
class Estimate:
    """Estimated resources of a run.

    Attributes:
        memory: bytes.
        disk: bytes.
        seconds: runtime with the evaluation; the part of algorithms is a rough guess.
        algorithms: algorithms without an estimate; their cost is not included.
        evaluated: number of tokens on which both models run after quantization.

    >>> print(Estimate(3 << 30, 1 << 29, 170.0))
    about 3.0 GiB of memory, 512 MiB of disk, 3 min
    """

    memory: int
    disk: int
    seconds: float
    algorithms: tuple[str, ...] = ()
    evaluated: int = 0

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
    evaluated: Sequence[int] = (),
) -> Estimate:
    """Estimate the resources of quantizing a checkpoint file to file.

    The speed of this machine is measured; memory includes that of the current process.

    Args:
        source: the checkpoint.
        chosen: the layers to quantize, of the checkpoint's empty model.
        tokens: number of calibration tokens; 0 if the blocks are not run.
        spilled: whether hidden states are kept in files.
        samples: number of calibration samples.
        algorithms: the algorithms of the configuration.
        evaluated: tokens of each window on which the written model and the float model are
            compared.

    Returns:
        The estimate.
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
    )  # tensors are written twice: singly, then into the file with its header
    if coded:
        seconds += count / _rounding_rate(coded[0][1], dtype)
    alone = max(parameter.numel() for parameter in model.parameters()) * dtype.itemsize
    memory = now + largest * _WORKING + _ON_THE_WAY
    shapes = shapes_of(model, chosen, tokens, samples)
    more, unknown = cost_of(algorithms, shapes)
    width = _whole(_text(model), "hidden_size") or 1
    if coded and algorithms:
        seconds += _algorithm_seconds(more, coded[0][1], dtype, width)
    passes = shapes.runs(1) if tokens else Cost()
    if evaluated:
        passes += evaluation_cost(shapes, evaluated)
        seconds += (read + disk) / _reading_rate(source)
    seconds += _work(passes, None, dtype, width)
    if not tokens:
        return Estimate(
            memory + alone + more.memory, disk, seconds, unknown, sum(evaluated)
        )
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
    return Estimate(memory + max(alone, held), disk, seconds, unknown, sum(evaluated))


def _text(model: PreTrainedModel) -> Any:
    """Return the configuration of the language model within a model."""
    return getattr(model.config, "text_config", None) or model.config


def _whole(config: Any, name: str) -> int:
    """Return a size in a configuration; 0 if it is missing, or differs between layers."""
    value = getattr(config, name, 0)
    return value if isinstance(value, int) else 0


def shapes_of(
    model: PreTrainedModel, chosen: Layers, tokens: int, samples: int
) -> Shapes:
    """Return the sizes on which the cost of algorithms and of running the model depends.

    Args:
        model: the empty model.
        chosen: the layers to quantize.
        tokens: number of calibration tokens.
        samples: number of calibration samples.
    """
    blocks = [list(block.parameters()) for block in blocks_of(model).values()]
    inside = {id(parameter) for block in blocks for parameter in block}
    layers: dict[str, Any] = {
        name: tuple(outputs_first(module.weight, kind_of(module)).flatten(1).shape)
        for name, (module, spec) in chosen.items()
        if spec.weight is not None
        and id(module.weight) in inside
        and module.weight.ndim > 1
    }
    block = max(map(_count, blocks), default=0) * dtype_of(model.config).itemsize
    config = _text(model)
    heads = _whole(config, "num_attention_heads")
    width = _whole(config, "head_dim") or _whole(config, "hidden_size") // max(1, heads)
    head = (
        model.get_output_embeddings()
        if hasattr(model, "get_output_embeddings")
        else None
    )
    weight = getattr(head, "weight", None)
    return Shapes(
        layers,
        sum(map(_count, blocks)),
        block,
        tokens,
        samples,
        attention=heads * width * len(blocks),
        head=0 if weight is None else weight.numel(),
        vocabulary=0 if weight is None else len(weight),
    )


def _probabilities(
    source: FloatCheckpoint,
    chosen: Layers,
    length: int,
    dtype: torch.dtype,
) -> int:
    """Return the bytes of attention probabilities in a block, if they are quantized.

    Args:
        source: the checkpoint.
        chosen: the layers to quantize.
        length: tokens of a sample.
        dtype: the model's dtype.
    """
    if all(spec.probabilities is None for _, spec in chosen.values()):
        return 0
    config = source.model.config
    heads = int(
        getattr(getattr(config, "text_config", config), "num_attention_heads", 0) or 0,
    )
    rows = max(1, AT_ONCE // max(length, 1))
    return int(heads * rows * length**2 * (3 * dtype.itemsize + _SOFTMAX))


def _work(cost: Cost, spec: TensorSpec | None, dtype: torch.dtype, width: int) -> float:
    """Return the runtime of work in seconds.

    Args:
        cost: the work.
        spec: format of the weights that are rounded; None if none are.
        dtype: type of products.
        width: values of a hidden state.
    """
    seconds = 0.0
    if cost.products:
        seconds += cost.products / _product_rate(dtype)
    if cost.roundings and spec is not None:
        seconds += cost.roundings / _rounding_rate(spec, dtype)
    if cost.columns:
        seconds += cost.columns / _column_rate()
    if cost.operators:
        seconds += cost.operators * _operator_seconds(width, dtype)
    if cost.elements:
        seconds += cost.elements / _element_rate()
    return seconds


def _algorithm_seconds(
    cost: Cost, spec: TensorSpec, dtype: torch.dtype, width: int
) -> float:
    """Return the runtime of algorithms, which compute products in float32."""
    products = Cost(products=cost.products)
    return _work(products, None, torch.float32, width) + _work(
        replace(cost, products=0.0), spec, dtype, width
    )


def _count(parameters: Iterable[Any]) -> int:
    return sum(parameter.numel() for parameter in parameters)


def _in_front(source: FloatCheckpoint, blocks: list[list[Any]]) -> list[Any]:
    """Return the parameters outside of the blocks, without those of heads.

    Heads are not run.
    """
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


def _laid_out(spec: TensorSpec, dtype: torch.dtype, rows: int) -> int:
    """Return the bytes of the codes and scales of a weight with a number of rows."""
    weight = torch.linspace(-1, 1, rows * _COLUMNS).reshape(rows, _COLUMNS).to(dtype)
    return sum(tensor.nbytes for tensor in stored(quantize(weight, spec)).values())


def _seconds(work: Callable[[], object]) -> float:
    """Return the runtime of the faster of two runs, after a warm-up.

    The warm-up may wait for memory.
    """
    found = []
    for _ in range(3):
        start = time.perf_counter()
        work()
        found.append(time.perf_counter() - start)
    return min(found[1:])


def _product_rate(dtype: torch.dtype) -> float:
    """Return the measured multiply-accumulates per second."""
    weight, x = (torch.ones(rows, _COLUMNS, dtype=dtype) for rows in (_ROWS, _TOKENS))
    return float(_TOKENS * weight.numel()) / _seconds(
        lambda: torch.aminmax(torch.nn.functional.linear(x, weight)),
    )


def _operator_seconds(width: int, dtype: torch.dtype) -> float:
    """Return the runtime of an elementwise operator on the hidden states of a batch."""
    states = torch.ones(BATCH_TOKENS, width, dtype=dtype)

    def several() -> None:
        for _ in range(_CALLS):
            torch.nn.functional.silu(states)

    return _seconds(several) / _CALLS


def _element_rate() -> float:
    """Return the values per second that an operator computes in float64."""
    values = torch.ones(_SOME, _COLUMNS, dtype=torch.float64)
    return float(values.numel()) / _seconds(values.exp)


def _rounding_rate(spec: TensorSpec, dtype: torch.dtype) -> float:
    """Return the number of weights per second that are rounded and packed."""
    return float(_ROWS * _COLUMNS) / _seconds(lambda: _laid_out(spec, dtype, _ROWS))


def _column_rate() -> float:
    """Return the number of columns per second of a sweep over short columns."""
    weight = torch.linspace(-1, 1, _SOME * _SWEPT).reshape(_SOME, _SWEPT)
    steps, solver = (
        TensorLevels.of(quantize(weight, TensorSpec("int8"))),
        Solver.of(torch.eye(_SWEPT)),
    )
    assert steps is not None
    return _SWEPT / _seconds(lambda: solver.quantize(weight, [steps]))


def _reading_rate(source: FloatCheckpoint) -> float:
    """Return the bytes per second read from the largest file of a checkpoint.

    Writing is assumed to be as fast.
    """
    file: Path = max(
        {tensor.path for tensor in source.reader.tensors.values()},
        key=lambda each: each.stat().st_size,
    )
    start = time.perf_counter()
    with file.open("rb") as opened:
        count = len(opened.read(_READ))
    return count / (time.perf_counter() - start)
