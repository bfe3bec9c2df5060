"""Loading of quantized checkpoints for evaluation, in AMD Quark's layout and others."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quark_onnx.common.errors import ModelError
from quark_onnx.torch.checkpoints.layouts import Layout, read_layout
from quark_onnx.torch.checkpoints.meta_model import config_of, dtype_of, skeleton_of
from quark_onnx.torch.checkpoints.parameter_sources import (
    Sources,
    compute_unsaved,
    fill,
    fill_whole,
)
from quark_onnx.torch.checkpoints.safetensors_io import CheckpointReader, read_json
from quark_onnx.torch.config.spec import LayerSpec, TensorSpec
from quark_onnx.torch.config.torch_config import TorchConfig
from quark_onnx.torch.formats.affine import Params
from quark_onnx.torch.formats.quantized_tensor import Quantized
from quark_onnx.torch.models.attention import reinstall_attention_hooks
from quark_onnx.torch.models.checkpoint_names import DiskNames
from quark_onnx.torch.models.fused_groups import experts_of
from quark_onnx.torch.models.names import configs_of
from quark_onnx.torch.models.quantized_layer import (
    QuantizedLayer,
    kind_of,
    outputs_first,
)
from quark_onnx.torch.models.structure import layers_of, set_module
from quark_onnx.torch.runtime.checkpoint_folder import check_links

if TYPE_CHECKING:
    import torch
    from torch import nn
    from transformers import PreTrainedModel


def load_checkpoint(
    folder: Path | str,
    *,
    dtype: torch.dtype | None = None,
    trust_code: bool = False,
) -> PreTrainedModel:
    """Load the model of a checkpoint, with quantized layers and their codes.

    Float checkpoints load, too.

    Args:
        folder: Hugging Face folder with safetensors.
        dtype: compute dtype; None for the dtype of the checkpoint.
        trust_code: whether to run Python files of the checkpoint.

    Returns:
        The model of transformers, in evaluation mode.

    Raises:
        ModelError: a file or a tensor is missing or damaged, or has a wrong shape.
        ConfigError: the quantization method is not supported.
    """
    folder = Path(folder)
    check_links(folder)
    settings = read_json(folder / "config.json").get("quantization_config")
    quantized, layout = (None, None) if settings is None else read_layout(settings)
    config, reader = config_of(folder, trust_code=trust_code), CheckpointReader(folder)
    kept = dtype_of(config) if dtype is None else dtype
    model = skeleton_of(config, trust_code=trust_code)
    sources = Sources(reader, model)
    compute_unsaved(model, sources)
    if quantized is not None and layout is not None:
        # All layers compute in one dtype.
        put_layers(model, quantized, layout, sources, defaultdict(lambda: kept))
        # transformers marks quantized models, and Jamba and FalconMamba then compute their time
        # steps as x W^T + b - b, with other last bits. Rounding of activations enlarges them.
        for part_config in configs_of(model):
            part_config._is_quantized = True
        # Attention calls the layers that round keys and probabilities, which are in place now.
        reinstall_attention_hooks(model)
    fill_whole(model, sources, dtype)
    return model


def in_memory(config: TorchConfig, model: nn.Module) -> TorchConfig:
    """Return a configuration with layer names in memory instead of names in files.

    Globs stay unchanged. A base model without its head (``AutoModel``) has no prefix in its names,
    and files have a prefix.
    """
    names = DiskNames(model)
    memory_names = {names.layer(name): name for name, _ in model.named_modules()}
    for stack in {experts_of(name) for name in memory_names.values()}:
        # ``_of_experts`` of the export writes globs of this form.
        if stack:
            memory_names[f"{names.experts(stack)}*"] = f"{stack}*"
    prefix = str(getattr(model, "base_model_prefix", "") or "")
    # Files of a whole model have the prefix, and names of its base model do not.
    if prefix and prefix not in dict(model.named_children()):
        memory_names |= {
            f"{prefix}.{disk_name}": name for disk_name, name in memory_names.items()
        }
    return config.with_(
        layers=tuple(
            (memory_names.get(name, name), spec) for name, spec in config.layers
        ),
        exclude=tuple(memory_names.get(name, name) for name in config.exclude),
    )


def put_layers(
    model: nn.Module,
    config: TorchConfig,
    layout: Layout,
    sources: Sources,
    types: Mapping[str, Any],
) -> None:
    """Replace float layers by quantized layers, in place.

    Args:
        model: model with empty parameters.
        config: which layers are quantized, and how.
        layout: layout of the tensors.
        sources: tensors of the checkpoint.
        types: compute dtypes by layer name.

    Raises:
        ModelError: a tensor is missing or damaged, or has a wrong shape.
    """
    for name, spec in quantized_layers(model, config, layout, sources).items():
        module = model.get_submodule(name)
        layer = read_layer(module, name, spec, sources, types[name], layout)
        set_module(model, name, layer)


def quantized_layers(
    model: nn.Module,
    config: TorchConfig,
    layout: Layout,
    sources: Sources,
) -> dict[str, LayerSpec]:
    """Return the specifications of the quantized layers of a checkpoint, by layer name.

    Args:
        model: model with float layers.
        config: which layers are quantized, and how.
        layout: layout of the tensors.
        sources: tensors of the checkpoint.
    """
    config = in_memory(config, model)
    specs = dict[str, LayerSpec]()
    for name, (_, kind) in layers_of(model).items():
        spec = config.spec_of(name, kind)
        # AMD Quark's configuration counts the probabilities of an excluded layer apart
        if spec is None and layout.key(f"{name}.prob_output_scale") in sources:
            spec = LayerSpec(probabilities=config.probabilities_of(name))
        if spec is not None and _is_stored(name, spec, layout, sources):
            specs[name] = spec
    return specs


def _is_stored(name: str, spec: LayerSpec, layout: Layout, sources: Sources) -> bool:
    """Return whether a checkpoint has a layer as specified, and not as floats."""
    if spec.weight is None or spec.weight.is_cast:
        return True
    # A float layer has the first part, weight, too.
    return any(f"{name}.{part}" in sources for part in layout.parts[1:])


def read_layer(  # noqa: PLR0913
    module: nn.Module,
    name: str,
    spec: LayerSpec,
    sources: Sources,
    dtype: torch.dtype,
    layout: Layout,
) -> QuantizedLayer:
    """Return a quantized layer with the codes and scales of a checkpoint.

    Args:
        module: float layer with empty parameters.
        name: name of the layer in the model.
        spec: how the layer is quantized.
        sources: tensors of the checkpoint.
        dtype: compute dtype.
        layout: layout of the tensors.

    Raises:
        ModelError: a tensor is missing or damaged, or has a wrong shape.
    """
    weight = None
    if spec.weight is None:
        fill(module, name, sources)
    else:
        matrix: Any = module.weight
        shape = tuple(outputs_first(matrix, kind_of(module)).shape)
        keys = {part: f"{name}.{part}" for part in layout.parts}
        parts = {part: sources.get(key) for part, key in keys.items() if key in sources}
        weight, _ = restored_weight(name, parts, layout, spec, shape, dtype)
    sides = (
        ("input", spec.input),
        ("output", spec.output),
        ("prob_output", spec.probabilities),
    )
    scales = (
        _scale(name, side, side_spec, sources, layout) for side, side_spec in sides
    )
    return QuantizedLayer(module, weight, spec, *scales)


def restored_weight(  # noqa: PLR0913
    name: str,
    parts: Mapping[str, Any],
    layout: Layout,
    spec: LayerSpec,
    shape: tuple[int, ...],
    dtype: torch.dtype,
) -> tuple[Quantized, torch.Tensor]:
    """Return the codes of a weight, and the dequantized weight.

    Args:
        name: name of the layer, for errors.
        parts: stored tensors of the weight, by the layout's parts.
        layout: layout of the tensors.
        spec: how the layer is quantized.
        shape: shape of the weight, outputs first.
        dtype: compute dtype.

    Raises:
        ModelError: a tensor is missing, or has a wrong shape.
    """
    try:
        weight = layout.restored(parts, spec, shape, dtype)
        # Tensors of wrong shapes fail here.
        values = weight.dequantize()
        columns, group = prod(weight.shape[1:]), weight.spec.group or 1
        # Codes per output, with the padding of the last block.
        count = weight.codes.numel() // max(weight.shape[0], 1)
        if count != -(-columns // group) * group:
            raise ModelError(
                f"{count} codes are stored for each output, and {columns} are needed",
            )
    except (RuntimeError, IndexError, ModelError) as error:
        raise ModelError(
            f"the tensors of {name} do not fit a weight of {spec.weight}: {error}",
        ) from error
    return weight, values


def _scale(
    name: str,
    side: str,
    spec: TensorSpec | None,
    sources: Sources,
    layout: Layout,
) -> Params | None:
    """Return the calibrated scale of an activation; None for a dynamic scale."""
    if spec is None or not spec.measured:
        return None

    def get(end: str) -> Any:
        key = layout.key(f"{name}.{end}")
        return sources.get(key) if key in sources else None

    try:
        return layout.restored_scale(side, spec, get)
    except (RuntimeError, ModelError) as error:
        raise ModelError(
            f"the scale of the {side} of {name} is not dynamic, and cannot be read: {error}",
        ) from error
