"""Checks before a run whether clients refuse the checkpoint that it would write.

The rules of ``quark_onnx.torch.validate`` need the configuration, and names, types and shapes of
tensors. All are known before the weights are read.
"""

from __future__ import annotations

from collections.abc import Iterator
from copy import copy
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
from torch import nn

from quark_onnx.common.containers import grouped_by
from quark_onnx.common.errors import ConfigError
from quark_onnx.torch.calibration.observers import Observer
from quark_onnx.torch.checkpoints.export import described
from quark_onnx.torch.checkpoints.float_checkpoint import FloatCheckpoint
from quark_onnx.torch.checkpoints.layouts import LAYOUTS, Layout, check_config
from quark_onnx.torch.checkpoints.meta_model import dtype_of
from quark_onnx.torch.checkpoints.parameter_sources import Sources
from quark_onnx.torch.checkpoints.safetensors_io import read_json
from quark_onnx.torch.checkpoints.safetensors_writer import TYPES
from quark_onnx.torch.config.scheme_clients import SCHEME_CLIENTS
from quark_onnx.torch.config.spec import LayerSpec, TensorSpec
from quark_onnx.torch.config.torch_config import TorchConfig
from quark_onnx.torch.formats.affine import Params
from quark_onnx.torch.formats.quantized_tensor import quantize
from quark_onnx.torch.models.checkpoint_names import float_matrices
from quark_onnx.torch.models.quantized_layer import (
    Layers,
    QuantizedLayer,
    kind_of,
    outputs_first,
)
from quark_onnx.torch.pipelines.block import specs_of
from quark_onnx.torch.pipelines.in_memory import chosen_layers
from quark_onnx.torch.pipelines.written_names import is_copied, untouched_names
from quark_onnx.torch.validate.checkpoint import SINGLE, Checkpoint, read
from quark_onnx.torch.validate.clients import RELEASES, findings_of
from quark_onnx.torch.validate.finding import WARNING, Finding
from quark_onnx.torch.validate.header import Header, Tensor

#: Rows of the weights that are quantized to find the shapes of a layout's tensors. Blocks of
#: scales have up to 128 rows.
_ROWS = (128, 256)
#: Names of findings in a message.
_SHOWN = 3


@dataclass(frozen=True)
class Refusal:
    """A client that refuses the checkpoint of a run, or would load wrong values from it.

    Attributes:
        release: the client with its release.
        findings: broken rules of one kind, by layer.
        alternatives: layouts of which the client breaks no rule.
    """

    release: str
    findings: tuple[Finding, ...]
    alternatives: tuple[str, ...]

    def __str__(self) -> str:
        first = self.findings[0]
        names = ", ".join(map(attrgetter("place"), self.findings[:_SHOWN]))
        if len(self.findings) > _SHOWN:
            names = f"{names} and {len(self.findings) - _SHOWN} more"
        verb = "refuses" if first.severity != "wrong" else "loads wrong values of"
        text = (
            f"{self.release} {verb} the checkpoint that this writes: {names}:"
            f" {first.found} (rule {first.rule}: {first.broken.title});"
            f" {first.broken.mend}"
        )
        if self.alternatives:
            layouts = " or ".join(f"--layout {name}" for name in self.alternatives)
            return f"{text}, or use {layouts}"
        return f"{text}; 'quark-onnx list schemes' names the schemes of each client"


def refusals(
    source: FloatCheckpoint, config: TorchConfig, layout: Layout
) -> list[Refusal]:
    """Return why the clients of a layout would refuse a checkpoint that is not written yet.

    Rules that the float model breaks by itself are left out.

    Args:
        source: the float model.
        config: the configuration by which it will be quantized.
        layout: the layout of the checkpoint.

    Raises:
        ConfigError: the layout does not support the configuration.
    """
    found = list[Refusal]()
    for client in _clients(layout):
        findings = _findings(source, config, layout, client)
        # layouts are compared only where they could help: each plans the whole checkpoint
        if not findings:
            continue
        others = _alternatives(source, config, layout, client)
        # one message for a rule, whatever the number of layers
        for group in grouped_by(findings, attrgetter("rule")).values():
            found.append(Refusal(RELEASES[client], tuple(group), others))
    return found


def _alternatives(
    source: FloatCheckpoint, config: TorchConfig, layout: Layout, client: str
) -> tuple[str, ...]:
    """Return the names of the other layouts of which a client breaks no rule."""
    found = list[str]()
    for name in [value for value in LAYOUTS if value not in [layout.name]]:
        other = LAYOUTS[name]()
        if client in _clients(other) and _is_accepted(source, config, other, client):
            found.append(name)
    return tuple(found)


def _clients(layout: Layout) -> list[str]:
    """Return the clients for which a layout is written.

    vLLM comes first. transformers counts only where vLLM does not read the layout, because the
    schemes of the two differ; onnxruntime-genai's layout is written for that alone.
    """
    if layout.name == "oga":
        return []
    for client in ("vllm", "transformers"):
        # layouts of which vLLM reads no scheme are checked for transformers
        if any(layout.name in row.get(client, ()) for row in SCHEME_CLIENTS.values()):
            return [client]
    return []


def _is_accepted(
    source: FloatCheckpoint, config: TorchConfig, layout: Layout, client: str
) -> bool:
    """Return whether a layout supports a configuration, and a client loads it."""
    try:
        return not _findings(source, config, layout, client)
    except ConfigError:
        return False


def _findings(
    source: FloatCheckpoint, config: TorchConfig, layout: Layout, client: str
) -> list[Finding]:
    """Return the rules of a client that the checkpoint breaks, and the float model does not."""
    # a float model with an odd head, for example, is the user's own
    before = {finding.rule for finding in findings_of(read(source.folder), client)}
    planned = planned_checkpoint(source, config, layout)
    return [
        finding
        for finding in findings_of(planned, client)
        # warnings do not keep a client from loading
        if finding.severity != WARNING and finding.rule not in before
    ]


def planned_checkpoint(
    source: FloatCheckpoint, config: TorchConfig, layout: Layout
) -> Checkpoint:
    """Return configuration and headers of a checkpoint that is not written yet.

    Args:
        source: the float model.
        config: the configuration by which it will be quantized.
        layout: the layout of the checkpoint.

    Raises:
        ConfigError: the layout does not support the configuration.
    """
    check_config(layout, config)
    config = layout.adapted(config)
    model, dtype = source.model, dtype_of(source.model.config)
    chosen, _ = chosen_layers(model, config, source.reader)
    sources = Sources(source.reader, model)
    tensors = dict[str, Tensor]()
    # the shapes of a layer depend on these alone, and a model has thousands of equal layers
    known = dict[tuple[object, ...], dict[str, tuple[str, tuple[int, ...]]]]()
    for name, (module, spec) in chosen.items():
        kind = kind_of(module) or ""
        # raises the same error as the run would
        layout.check_layer(name, kind, spec, tuple(module.weight.shape))
        prefix = sources.key_of(f"{name}.weight").removesuffix(".weight")
        biased = getattr(module, "bias", None) is not None
        key = (spec, kind, tuple(module.weight.shape), biased)
        if key not in known:
            known[key] = _shapes(module, name, spec, dtype, layout)
        for end, (type_name, shape) in known[key].items():
            stored = layout.key(f"{prefix}.{end}")
            tensors[stored] = _planned(stored, type_name, shape)
    for tensor in _float_tensors(model, sources, chosen, config):
        tensors[tensor.name] = tensor
    content = described(
        read_json(source.folder / "config.json"),
        model,
        config,
        layout,
        specs_of(chosen),
        float_matrices(tensors),
    )
    # all in one file: no rule depends on how tensors are divided among files
    headers = {SINGLE: Header(tensors, {}, 0)}
    return Checkpoint(source.folder, content, None, headers, ())


def _float_tensors(
    model: Any, sources: Sources, chosen: Layers, config: TorchConfig
) -> Iterator[Tensor]:
    """Yield the tensors that stay float, with the names of the written files.

    Args:
        model: the model with empty parameters.
        sources: tensors of the checkpoint; those of quantized layers are marked as used.
        chosen: the layers to quantize.
        config: the quantization configuration.
    """
    for name, module in model.named_modules():
        if name in chosen:
            continue
        for key in untouched_names(name, module, sources, chosen, config):
            dtype = sources.stored_dtype(key)
            shape = tuple(getattr(module, key.rpartition(".")[2]).shape)
            yield _planned(sources.key_of(key), dtype, shape)
            sources.mark(key)
    for name, (module, _) in chosen.items():
        for end, _ in module.named_parameters(recurse=False):
            if not is_copied(f"{name}.{end}", sources, chosen, config):
                sources.mark(f"{name}.{end}")
    for stored in sources.rest():
        tensor = sources.reader.tensors[stored]
        yield _planned(stored, tensor.dtype, tensor.shape)


def _planned(name: str, dtype: str, shape: tuple[int, ...]) -> Tensor:
    # offsets and sizes are unknown, and not read for planned tensors
    return Tensor(name, dtype, shape, Path(SINGLE), 0, 0, planned=True)


def _shapes(
    module: Any, name: str, spec: LayerSpec, dtype: torch.dtype, layout: Layout
) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return type names and shapes of a layer's tensors, by the end of their names.

    The tensors of two layers with few outputs are computed. Sizes that differ between them grow
    in proportion to the outputs.

    Args:
        module: the layer with empty parameters.
        name: name of the layer, for errors.
        spec: how it is quantized.
        dtype: the model's dtype.
    """
    shape = tuple(module.weight.shape)
    # kernels of convolutions are small, and may be in groups
    if kind_of(module) != "Linear" or shape[0] <= _ROWS[-1]:
        tensors = _tensors(module, shape, name, spec, dtype, layout)
        return {
            end: (TYPES[tensor.dtype], tuple(tensor.shape))
            for end, tensor in tensors.items()
        }
    # quantizing all rows of a large layer takes seconds; shapes are the same or proportional
    few, more = (
        _tensors(module, (rows, *shape[1:]), name, spec, dtype, layout)
        for rows in _ROWS
    )
    found = dict[str, tuple[str, tuple[int, ...]]]()
    for end, tensor in more.items():
        sizes = zip(few[end].shape, tensor.shape, strict=True)
        full = tuple(_full_size(less, size, shape[0]) for less, size in sizes)
        found[end] = (TYPES[tensor.dtype], full)
    return found


def _full_size(less: int, size: int, outputs: int) -> int:
    """Return the size of an axis of a stored tensor of a layer.

    Args:
        less: size for the smaller number of ``_ROWS`` outputs.
        size: size for the greater number of ``_ROWS`` outputs.
        outputs: number of outputs of the layer.
    """
    if size == less:
        return size
    # rounded up, as packed words and blocks of scales are
    return -(-size * outputs // _ROWS[-1])


def _tensors(  # noqa: PLR0913
    module: Any,
    shape: tuple[int, ...],
    name: str,
    spec: LayerSpec,
    dtype: torch.dtype,
    layout: Layout,
) -> dict[str, torch.Tensor]:
    """Return the tensors of a layer with another shape of its weight.

    Args:
        module: the layer with empty parameters; it is not changed.
        shape: shape of the weight to compute with.
        name: name of the layer, for errors.
        spec: how it is quantized.
        dtype: the model's dtype.

    Returns:
        Tensors by the end of their names. Their shapes and dtypes are those of a run, their values
        are arbitrary.
    """
    # any values will do, except equal ones, whose range is 0
    values = torch.linspace(-1, 1, torch.Size(shape).numel()).reshape(shape).to(dtype)
    # a shallow copy: the module itself keeps its empty parameters
    layer = copy(module)
    layer._parameters = dict(module._parameters)
    layer.weight = nn.Parameter(values, requires_grad=False)
    if getattr(module, "bias", None) is not None:
        # biases of other layers are not shortened
        outputs = shape[0] if kind_of(module) == "Linear" else len(module.bias)
        bias = torch.zeros(outputs, dtype=dtype)
        layer.bias = nn.Parameter(bias, requires_grad=False)
    weight = None
    if spec.weight is not None:
        weight = quantize(outputs_first(values, kind_of(module)), spec.weight)
    scales = {
        "input": _scale(spec.input, dtype),
        "output": _scale(spec.output, dtype),
        "probabilities": _scale(spec.probabilities, dtype),
    }
    found: dict[str, torch.Tensor] = layout.tensors(
        QuantizedLayer(layer, weight, spec, **scales), name
    )
    return found


def _scale(spec: TensorSpec | None, dtype: torch.dtype) -> Params | None:
    """Return the scale of an activation between -1 and 1; None if it has no measured scale."""
    if spec is None or not spec.measured:
        return None
    # the shape and dtype of a scale do not depend on the values
    observer = Observer(spec, "", "cpu")
    observer.observe(torch.linspace(-1, 1, 256).to(dtype))
    return observer.params()
