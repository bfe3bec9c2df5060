"""Tensors and size of a quantized checkpoint before it is written, computed from shapes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from math import prod
from typing import Any

import torch

from quark_onnx.torch.checkpoints.float_checkpoint import FloatCheckpoint
from quark_onnx.torch.checkpoints.layouts import Layout
from quark_onnx.torch.checkpoints.parameter_sources import Sources
from quark_onnx.torch.checkpoints.safetensors_writer import TYPES
from quark_onnx.torch.config.number_formats import TwoLevel
from quark_onnx.torch.config.spec import LayerSpec, TensorSpec
from quark_onnx.torch.config.torch_config import TorchConfig
from quark_onnx.torch.formats.affine import Params
from quark_onnx.torch.formats.quantized_tensor import Quantized, quantize
from quark_onnx.torch.models.quantized_layer import (
    QuantizedLayer,
    inputs_of,
    kind_of,
    outputs_first,
)
from quark_onnx.torch.pipelines.in_memory import chosen_layers
from quark_onnx.torch.pipelines.written_names import mark_written, untouched_names

#: Rows after which the layouts of codes repeat: packed words and blocks divide this number.
_PERIOD = 128
#: Torch's dtypes by their names in safetensors files.
_DTYPES = {name: dtype for dtype, name in TYPES.items()}
#: Bytes of the length of a safetensors header.
_LENGTH = 8


def written_bytes(source: FloatCheckpoint, config: TorchConfig, layout: Layout) -> int:
    """Return the size of the tensor file of a checkpoint that ``quantize_checkpoint`` writes.

    Only the padding of the header, and the headers of further shards, are left out.

    Args:
        source: the float checkpoint.
        config: the quantization configuration, without rotations.
        layout: the layout of the checkpoint.

    Raises:
        QuarkError: the configuration or the layout does not fit the model.
    """
    header, end = dict[str, Any](__metadata__={"format": "pt"}), 0
    for name, tensor in written_tensors(source, config, layout).items():
        start, end = end, end + tensor.nbytes
        header[name] = {
            "dtype": TYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    return _LENGTH + len(json.dumps(header, separators=(",", ":"))) + end


def check_groups(source: FloatCheckpoint, config: TorchConfig, layout: Layout) -> None:
    """Raise ConfigError if groups do not divide the inputs of layers, and the layout needs that.

    Args:
        source: the float checkpoint.
        config: the quantization configuration.
        layout: the layout of the checkpoint.
    """
    chosen, _ = chosen_layers(source.model, config, source.reader)
    layout.check_groups(
        {name: (spec, inputs_of(module)) for name, (module, spec) in chosen.items()}
    )


def written_tensors(
    source: FloatCheckpoint, config: TorchConfig, layout: Layout
) -> dict[str, torch.Tensor]:
    """Return the tensors of a checkpoint that ``quantize_checkpoint`` writes, on the meta device.

    Args:
        source: the float checkpoint.
        config: the quantization configuration, without rotations.
        layout: the layout of the checkpoint.

    Raises:
        QuarkError: the configuration or the layout does not fit the model.
    """
    config = layout.adapted(config)
    model, reader = source.model, source.reader
    chosen, _ = chosen_layers(model, config, reader)
    # before single layers are checked: the message is about all of them
    check_groups(source, config, layout)
    sources = Sources(reader, model)
    tensors = dict[str, torch.Tensor]()
    #: Tensors of equal layers, by everything on which they depend.
    tensors_by_kind = dict[object, dict[str, torch.Tensor]]()
    for name, module in model.named_modules():
        if name in chosen:
            spec = chosen[name][1]
            weight, has_bias = module.weight, getattr(module, "bias", None) is not None
            key = (type(module), weight.shape, weight.dtype, spec, has_bias)
            if key not in tensors_by_kind:
                shape = tuple(outputs_first(module.weight, kind_of(module)).shape)
                layout.check_layer(name, kind_of(module) or "", spec, shape)
                tensors_by_kind[key] = _layer_tensors(name, module, spec, layout)
            stored = sources.key_of(f"{name}.weight").removesuffix(".weight")
            for end, tensor in tensors_by_kind[key].items():
                tensors[layout.key(f"{stored}.{end}")] = tensor
            mark_written(name, module, sources, chosen, config)
            continue
        values = {**module._parameters, **module._buffers}
        for full in untouched_names(name, module, sources, chosen, config):
            # float tensors are copied
            dtype = _DTYPES[sources.stored_dtype(full)]
            value = values[full.rpartition(".")[2]]
            tensors[layout.key(sources.key_of(full))] = value.to("meta", dtype)
            sources.mark(full)
    for name in sources.rest():
        copied = reader.tensors[name]
        tensors[name] = torch.empty(
            copied.shape, dtype=_DTYPES[copied.dtype], device="meta"
        )
    return tensors


def _layer_tensors(
    name: str, module: Any, spec: LayerSpec, layout: Layout
) -> dict[str, torch.Tensor]:
    """Return the tensors of a quantized layer on the meta device, by the end of their names.

    Few rows are quantized. Each axis of a tensor is an affine function of the number of rows, up to
    paddings that repeat after ``_PERIOD`` rows.
    """
    shape = outputs_first(module.weight, kind_of(module)).shape
    rows = shape[0]
    few = rows
    if rows > 2 * _PERIOD:
        few = rows % _PERIOD + _PERIOD
    fewer = _probe(name, module, spec, layout, few)
    if few == rows:
        return fewer
    more = _probe(name, module, spec, layout, few + _PERIOD)
    steps = (rows - few) // _PERIOD
    return {
        end: torch.empty(
            [
                length + steps * (longer - length)
                for length, longer in zip(tensor.shape, more[end].shape, strict=True)
            ],
            dtype=tensor.dtype,
            device="meta",
        )
        for end, tensor in fewer.items()
    }


def _probe(
    name: str, module: Any, spec: LayerSpec, layout: Layout, rows: int
) -> dict[str, torch.Tensor]:
    """Return the tensors of a layer with fewer rows, on the meta device."""
    weight = module.weight
    codes: Quantized | None = None
    if spec.weight is not None:
        shape = (rows, *outputs_first(weight, kind_of(module)).shape[1:])
        # not random: the probe must not advance the generator of the caller
        values = torch.linspace(-1, 1, prod(shape)).reshape(shape)
        codes = quantize(values.to(weight.dtype), spec.weight)

    def scale(side: TensorSpec | None) -> Params | None:
        if side is None or not side.measured:
            return None
        # the global scale of NVFP4 activations is float32 in every model
        is_global = isinstance(side.dtype, TwoLevel)
        return Params(
            torch.ones((), dtype=torch.float32 if is_global else weight.dtype)
        )

    layer = QuantizedLayer(
        module,
        codes,
        spec,
        scale(spec.input),
        scale(spec.output),
        scale(spec.probabilities),
    )
    tensors: Mapping[str, torch.Tensor] = layout.tensors(layer, name)
    return {end: tensor.to("meta") for end, tensor in tensors.items()}
