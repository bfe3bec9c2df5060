"""Estimate of memory use and disk use before a checkpoint is quantized."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from quark_onnx.common.errors import ConfigError
from quark_onnx.torch.algorithms.memory import Shapes, memory_of
from quark_onnx.torch.checkpoints.float_checkpoint import FloatCheckpoint
from quark_onnx.torch.checkpoints.meta_model import dtype_of
from quark_onnx.torch.config.algorithm_order import at_stage
from quark_onnx.torch.models.quantized_layer import Layers, kind_of, outputs_first
from quark_onnx.torch.models.structure import blocks_of, embedding_of
from quark_onnx.torch.runtime.memory import resident

if TYPE_CHECKING:
    from transformers import PreTrainedModel

#: Bytes per weight of the largest matrix, as codes and packed; temporary bytes while a part of it
#: is rounded.
_WORKING, _ON_THE_WAY = 6, 48 << 20
#: Tokens that a block runs at once.
BATCH_TOKENS = 512
#: Bytes per attention probability, in addition to three values of the model's type.
_SOFTMAX = 4


@dataclass(frozen=True)
class Estimate:
    """Estimated memory and disk space of a run.

    Attributes:
        memory: bytes.
        disk: bytes.
        algorithms: algorithms without an estimate; their memory is not included.

    >>> print(Estimate(3 << 30, 1 << 29))
    about 3.0 GiB of memory, 512 MiB of disk
    """

    memory: int
    disk: int
    algorithms: tuple[str, ...] = ()

    def __str__(self) -> str:
        text = f"about {size(self.memory)} of memory, {size(self.disk)} of disk"
        if not self.algorithms:
            return text
        return f"{text}, and the memory of {' and '.join(self.algorithms)}"


def check_room(output: Path, needed: int) -> None:
    """Raise ConfigError if the disk of an output has too little free space.

    Args:
        output: file or folder, which may be missing.
        needed: number of bytes that are written.
    """
    folder = output.absolute()
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise ConfigError(
            f"{output} takes about {size(needed)} of disk while it is written, and"
            f" {size(free)} are free there; free some, or name a folder on another disk",
        )


def size(count: int) -> str:
    """Format a number of bytes: in GiB with one decimal from 1 GiB on, otherwise in whole MiB."""
    if count >= 1 << 30:
        return f"{count / 2**30:.1f} GiB"
    return f"{count / 2**20:.0f} MiB"


def estimate(  # noqa: PLR0913
    source: FloatCheckpoint,
    chosen: Layers,
    tokens: int,
    *,
    disk: int,
    spilled: bool = False,
    samples: int = 1,
    algorithms: tuple[Any, ...] = (),
) -> Estimate:
    """Estimate the memory of quantizing a checkpoint file to file.

    Memory includes that of the current process.

    Args:
        source: the checkpoint.
        chosen: the layers to quantize, of the checkpoint's empty model.
        tokens: number of calibration tokens; 0 if the blocks are not run.
        disk: bytes of the result, as ``written_bytes`` returns.
        spilled: whether hidden states are kept in files.
        samples: number of calibration samples.
        algorithms: the algorithms of the configuration.

    Returns:
        The estimate.
    """
    model = source.model
    itemsize = dtype_of(model.config).itemsize
    shapes = shapes_of(model, chosen, tokens, samples)
    # algorithms without an estimate are named in the result
    algorithm_memory, unknown = memory_of(algorithms, shapes)
    quantized = [
        module.weight.numel()
        for module, spec in chosen.values()
        if spec.weight is not None
    ]
    weights = [parameter.numel() for parameter in model.parameters()]
    # the largest tensor is in memory alone while it is copied, mostly the embedding
    largest = max(weights) * itemsize
    # torch and transformers are loaded by now
    memory = resident() + max(quantized, default=0) * _WORKING + _ON_THE_WAY
    if not tokens:
        return Estimate(memory + largest + algorithm_memory, disk, unknown)
    # bytes of the quantized weights on disk, with scales and zero points
    codes = max(0, disk - (sum(weights) - sum(quantized)) * itemsize)
    # in memory a code takes a byte at least, also where files pack two into one
    code_bytes = max(1.0, codes / max(sum(quantized), 1))
    running = (
        _count(_before_blocks(source)) * itemsize
        + int(shapes.block + shapes.block / itemsize * code_bytes)
        + algorithm_memory
        + _probabilities(model, chosen, shapes)
    )
    if not spilled:
        hidden_states = tokens * _whole(_text(model), "hidden_size") * itemsize
        # a second set for the quantized model (``BlockStream.split``)
        running += hidden_states * (2 if at_stage(algorithms, "weights") else 1)
    # not the sum: the largest tensor is mostly the embedding, which is outside of the blocks
    return Estimate(memory + max(largest, running), disk, unknown)


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
    """Return the sizes on which the memory of algorithms depends.

    Args:
        model: the empty model.
        chosen: the layers to quantize.
        tokens: number of calibration tokens.
        samples: number of calibration samples.
    """
    blocks = _block_parameters(model)
    # by identity, as parameters may be shared, and comparing tensors compares values
    inside = set(map(id, list(chain.from_iterable(blocks))))
    layers = dict[str, Any]()
    for name, (module, spec) in chosen.items():
        weight = module.weight
        is_matrix = id(weight) in inside and weight.ndim > 1
        if spec.weight is not None and is_matrix:
            layers[name] = tuple(
                outputs_first(weight, kind_of(module)).flatten(1).shape
            )
    itemsize = dtype_of(model.config).itemsize
    block = max(map(_count, blocks), default=0) * itemsize
    return Shapes(layers, block, itemsize, tokens, samples)


def _probabilities(model: PreTrainedModel, chosen: Layers, shapes: Shapes) -> int:
    """Return the bytes of attention probabilities in a block, if they are quantized."""
    if all(spec.probabilities is None for _, spec in chosen.values()):
        return 0
    heads = _whole(_text(model), "num_attention_heads")
    length = shapes.tokens // max(shapes.samples, 1)
    # samples that a block runs at once
    rows = max(1, BATCH_TOKENS // max(length, 1))
    # probabilities are (rows, heads, length, length); softmax computes them in float32
    return heads * rows * length**2 * (3 * shapes.itemsize + _SOFTMAX)


def _block_parameters(model: PreTrainedModel) -> list[list[torch.nn.Parameter]]:
    """Return the parameters of each block."""
    return [list(block.parameters()) for block in blocks_of(model).values()]


def _count(parameters: Iterable[torch.nn.Parameter]) -> int:
    return sum(parameter.numel() for parameter in parameters)


def _before_blocks(source: FloatCheckpoint) -> list[torch.nn.Parameter]:
    """Return the parameters outside of the blocks, without those of heads, which are not run.

    The weight of the embedding is among them also where a head is tied to the embedding.
    """
    model = source.model
    not_run = set[int]()
    for name in source.heads:
        not_run |= set(map(id, model.get_submodule(name).parameters()))
    embedding = embedding_of(model)
    if embedding is not None:
        # a tied head has the weight of the embedding, which is run
        not_run -= set(map(id, embedding.parameters()))
    not_run |= set(map(id, chain.from_iterable(_block_parameters(model))))
    return [
        parameter for parameter in model.parameters() if id(parameter) not in not_run
    ]
