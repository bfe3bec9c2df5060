"""What quantizing a checkpoint will take, said before it starts."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch

from quark_onnx.torch.algorithms.base import Layers
from quark_onnx.torch.block import measures
from quark_onnx.torch.quantized import quantize
from quark_onnx.torch.skeleton import dtype_of
from quark_onnx.torch.structure import blocks_of

#: Memory of the process itself, with torch and transformers in it.
_PROCESS = 450 << 20
#: Sides of the matrices whose product, and whose rounding, are timed.
_SIDE = 1024


@dataclass(frozen=True)
class Estimate:
    """Attributes are bytes of memory and disk, and seconds.

    >>> print(Estimate(3 << 30, 1 << 29, 170.0))
    about 3.0 GiB of memory, 0.5 GiB of disk, 3 min
    """

    memory: int
    disk: int
    seconds: float

    def __str__(self) -> str:
        minutes = self.seconds / 60
        span = (
            f"{self.seconds:.0f} s"
            if minutes < 1
            else f"{minutes:.0f} min"
            if minutes < 90
            else f"{minutes / 60:.1f} h"
        )
        return f"about {self.memory / 2**30:.1f} GiB of memory, {self.disk / 2**30:.1f} GiB of disk, {span}"


def estimate(model: Any, chosen: Layers, tokens: int, shard: int) -> Estimate:
    """What it takes to quantize the layers of a model file to file.

    Args:
        model: with empty parameters.
        chosen: its layers that are quantized.
        tokens: of the calibration data.
        shard: bytes of a file of tensors, at most.
    """
    dtype = dtype_of(model.config)
    width = torch.empty((), dtype=dtype).element_size()
    blocks = blocks_of(model)
    sizes = {name: sum(p.numel() for p in block.parameters()) for name, block in blocks.items()}
    total = sum(parameter.numel() for parameter in model.parameters())
    coded = sum(module.weight.numel() for module, spec in chosen.values() if spec.weight is not None)
    stored = sum(_stored(module, spec.weight) for module, spec in chosen.values() if spec.weight is not None)
    disk = int((total - coded) * width + stored)
    largest = max((module.weight.numel() for module, _ in chosen.values()), default=0)
    working = 16 * largest  # a matrix in float32, its rounded steps, and their codes
    memory = _PROCESS + min(disk, shard) + working
    seconds = coded / _rounding_rate(chosen, dtype)
    if measures(chosen):
        hidden = int(getattr(model.config, "hidden_size", 0) or 0)
        memory += max(sizes.values(), default=0) * width * 2 + 2 * tokens * hidden * width
        memory += (total - sum(sizes.values())) * width
        seconds += 2 * sum(sizes.values()) * tokens / _product_rate(dtype)
    return Estimate(memory, disk, seconds)


def _stored(module: Any, spec: Any) -> float:
    """Bytes of a weight's codes and scales."""
    count = module.weight.numel()
    return float(count * spec.dtype.bits / 8 + (count / spec.group * 2 if spec.group else 0))


def _product_rate(dtype: Any) -> float:
    """Operations a second of a product of matrices."""
    left = torch.ones(_SIDE, _SIDE, dtype=dtype)
    left @ left
    start = time.perf_counter()
    left @ left
    return float(2 * _SIDE**3 / (time.perf_counter() - start))


def _rounding_rate(chosen: Layers, dtype: Any) -> float:
    """Weights that are rounded a second."""
    spec = next((spec.weight for _, spec in chosen.values() if spec.weight is not None), None)
    if spec is None:
        return float("inf")
    weight = torch.linspace(-1, 1, _SIDE * _SIDE).reshape(_SIDE, _SIDE).to(dtype)
    quantize(weight, spec)
    start = time.perf_counter()
    quantize(weight, spec)
    return float(_SIDE * _SIDE / (time.perf_counter() - start))
