"""write_quantized_gguf: write a quantized model as a GGUF file with the same codes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from quark_onnx.common.errors import ConfigError, ModelError
from quark_onnx.torch.checkpoints.float_checkpoint import FloatCheckpoint
from quark_onnx.torch.checkpoints.parameter_sources import Sources
from quark_onnx.torch.checkpoints.safetensors_io import CheckpointReader
from quark_onnx.torch.exports.gguf.blocks import SIZE, form_of
from quark_onnx.torch.exports.gguf.export import GgufFile, planned, write_gguf
from quark_onnx.torch.formats.quantized_tensor import quantize
from quark_onnx.torch.models.names import instances
from quark_onnx.torch.models.quantized_layer import Layers, QuantizedLayer

_NO_ATTENTION = (
    "a GGUF file has no place for attention that is rounded; quantize without attention"
)


def write_quantized_gguf(model: nn.Module, source: Path, output: Path) -> GgufFile:
    """Write a quantized model as a GGUF file.

    Float weights of the model become float16, norms float32.

    Args:
        model: a model from ``quantize_model`` or ``load_checkpoint``.
        source: the folder of its float model, with the tokenizer.
        output: the file.

    Returns:
        The path, the types and the notes.

    Raises:
        ConfigError: as for ``write_gguf``.
        ModelError: as for ``write_gguf``.
        MissingDependency: as for ``write_gguf``.
    """
    sources = Sources(CheckpointReader(source), model)
    weights = dict[str, Any]()
    # A layer whose activations alone are rounded has its weight under another name.
    for name, parameter in model.named_parameters():
        key = sources.key_of(name.replace(".float_weight", ".weight"))
        weights[key] = parameter.detach()
    for name, layer in instances(model, QuantizedLayer).items():
        if layer.spec.probabilities is not None:
            raise ConfigError(f"{name}: {_NO_ATTENTION}")
        if layer.quantized is not None:
            quantized = layer.quantized
            # bfloat16 and float16 weights have no codes; the file has them as float16
            stored = quantized.dequantize() if quantized.spec.is_cast else quantized
            weights[sources.key_of(f"{name}.weight")] = stored
    # Layers that stay float become float16.
    return write_gguf(source, output, "f16", weights)


def check_gguf(source: FloatCheckpoint, chosen: Layers) -> None:
    """Raise the errors of ``write_quantized_gguf`` before a model is quantized.

    Args:
        source: the float model.
        chosen: the layers to quantize.

    Raises:
        ConfigError: llama.cpp has no blocks for the codes, or does not support a layer's weight.
        ModelError: as for ``write_gguf``.
        MissingDependency: as for ``write_gguf``.
    """
    for name, (_, spec) in chosen.items():
        if spec.probabilities is not None:
            raise ConfigError(f"{name}: {_NO_ATTENTION}")
    targets = planned(source.folder)[2]
    stored = {tensor.name for target in targets for tensor in target.sources}
    sources = Sources(source.reader, source.model)
    # The kind of codes decides, so that a weight of one block stands for all layers of the spec.
    for weight in dict.fromkeys(spec.weight for _, spec in chosen.values()):
        if weight is None or weight.is_cast:
            continue
        block = torch.ones(1, max(SIZE, weight.group))
        try:
            form_of(quantize(block, weight), str(weight))
        except ModelError as error:
            raise ConfigError(
                f"{error}; export no GGUF file, or choose another scheme",
            ) from error
    # A fused weight in the file has no place for one of its layers alone.
    for name in chosen:
        if sources.key_of(f"{name}.weight") not in stored:
            raise ConfigError(
                f"a GGUF file of this model has no place for the weight of {name}"
                " alone; exclude it",
            )
