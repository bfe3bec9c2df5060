"""Sizes of a model and its calibration data, from which algorithms estimate their memory use."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any


@dataclass(frozen=True)
class Shapes:
    """Sizes of the model and the calibration data.

    Attributes:
        layers: (outputs, inputs) of the quantized matrices in blocks, by name.
        block: size of the largest block in bytes.
        itemsize: bytes of a float weight.
        tokens: number of calibration tokens.
        samples: number of calibration samples.
    """

    layers: Mapping[str, tuple[int, int]]
    block: int
    itemsize: int
    tokens: int
    samples: int

    @cached_property
    def groups(self) -> dict[tuple[str, int], int]:
        """Return the sum of output channels per distinct input.

        Layers with the same parent and input width are assumed to share an input.
        """
        # q, k and v of a layer share an input, and so do gate and up: one Hessian serves each
        # group.
        groups = dict[tuple[str, int], int]()
        for name, (outputs, inputs) in self.layers.items():
            key = (name.rpartition(".")[0], inputs)
            groups[key] = groups.get(key, 0) + outputs
        return groups

    @property
    def blocks(self) -> int:
        """Return the number of blocks, by the first number in layer names."""
        return len({first_number(name) for name in self.layers})

    @property
    def count(self) -> int:
        """Return the number of quantized weights."""
        return sum(prod(shape) for shape in self.layers.values())

    @property
    def block_hessians(self) -> int:
        """Return the bytes of all Hessians of a block, in float32."""
        # Blocks are quantized one after the other, and their Hessians take the same memory.
        elements = sum(inputs**2 for _, inputs in self.groups)
        return 4 * elements // max(1, self.blocks)


def first_number(name: str) -> str:
    """Return the first part of a layer name that is a number, of the block; empty if none."""
    return next((part for part in name.split(".") if part.isdigit()), "")


def memory_of(algorithms: Iterable[Any], shapes: Shapes) -> tuple[int, tuple[str, ...]]:
    """Return the bytes that algorithms need, and the names of those without ``memory``.

    Algorithms run one after the other, so that the greatest number counts.
    """
    # A plug-in need not state its memory use; the caller says that the estimate leaves it out.
    most, unknown = 0, list[str]()
    for algorithm in algorithms:
        if hasattr(algorithm, "memory"):
            most = max(most, algorithm.memory(shapes))
        else:
            unknown.append(algorithm.name)
    return most, tuple(unknown)
