"""save_params and load_params: the codes of a quantized module in two files.

The signatures are those of AMD Quark.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from torch.fx import GraphModule

from calibrators.scratch import ScratchFolder
from quark_onnx.common.errors import ConfigError, ModelError
from quark_onnx.torch.checkpoints.export import tensors_of
from quark_onnx.torch.checkpoints.layouts import check_config, layout_named, read_layout
from quark_onnx.torch.checkpoints.load import put_layers
from quark_onnx.torch.checkpoints.parameter_sources import (
    Sources,
    empty,
    fill,
    missing_of,
)
from quark_onnx.torch.checkpoints.safetensors_io import CheckpointReader, read_json
from quark_onnx.torch.checkpoints.safetensors_writer import TensorFile
from quark_onnx.torch.config.torch_config import TorchConfig
from quark_onnx.torch.models.experts import unfuse_experts
from quark_onnx.torch.models.names import instances
from quark_onnx.torch.models.quantized_layer import QuantizedLayer
from quark_onnx.torch.quantization.config.type import QuantizationMode

if TYPE_CHECKING:
    from torch import nn


def save_params(  # noqa: PLR0913
    model: nn.Module,
    model_type: str,
    args: tuple[Any, ...] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    export_dir: Path | str = ".",
    quant_mode: QuantizationMode = QuantizationMode.eager_mode,
    compressed: bool = False,
    reorder: bool = True,
) -> None:
    """Write the quantization settings and the tensors of a model.

    The files are ``MODEL_TYPE.json`` and ``MODEL_TYPE.safetensors``.

    Args:
        model: any quantized module.
        model_type: the base name of the files.
        args: without effect, since the model is not traced.
        kwargs: without effect, since the model is not traced.
        export_dir: the folder.
        quant_mode: ``QuantizationMode.eager_mode``.
        compressed: without effect: integer codes are always stored.
        reorder: whether nibbles are reordered.

    Raises:
        ConfigError: the model is an exported graph, no layer is quantized, rotated keys or
            attention probabilities are quantized, or the layout does not support a format.
    """
    _check_mode(quant_mode)
    # A graph of torch.export has calls in place of modules.
    if isinstance(model, GraphModule):
        raise ConfigError(
            "the model is an exported graph, and these files hold layers alone; keep"
            " its state_dict(), or torch.export.save(torch.export.export(model, args),"
            " path)",
        )
    quantized = instances(model, QuantizedLayer)
    if not quantized:
        raise ConfigError(
            "no layer of the model is quantized; ModelQuantizer(config).quantize_model"
            " comes first",
        )
    # The attention module rounds these, and layers alone are stored.
    if rotated := [name for name, layer in quantized.items() if layer.spec.rotated]:
        raise ConfigError(
            f"{rotated[0]} has keys that are rounded after they are rotated; export a"
            " checkpoint instead",
        )
    if rounding := [
        name
        for name, layer in quantized.items()
        if layer.spec.probabilities is not None
    ]:
        raise ConfigError(
            f"{rounding[0]} has probabilities of attention that are rounded; export a"
            " checkpoint instead",
        )
    layout = layout_named("quark", "reorder" if reorder else "order")
    config = TorchConfig(
        # Exact names in place of globs, as the model need not be one of transformers.
        layers=tuple((name, layer.spec) for name, layer in quantized.items()),
    )
    check_config(layout, config)
    for name, layer in quantized.items():
        # All checks come before the first file.
        layout.check_layer(name, layer.origin, layer.spec, layer.shape)
    specs = {name: layer.spec for name, layer in quantized.items()}
    content = {
        "model_type": model_type,
        "quantization_config": layout.quantization_config(specs, (), config),
    }
    folder = Path(export_dir)
    folder.mkdir(parents=True, exist_ok=True)
    # Both files are renamed when both are complete; after an error none is left.
    with ScratchFolder(folder, model_type) as scratch:
        tensors = scratch / f"{model_type}.safetensors"
        settings = scratch / f"{model_type}.json"
        file = TensorFile(tensors)
        try:
            for name, tensor in tensors_of(model, layout):
                file.add(name, tensor)
            file.close()
        finally:
            # Windows cannot remove an open file; without effect after ``close``.
            file.abandon()
        settings.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        for path in (tensors, settings):
            path.replace(folder / path.name)


def load_params(  # noqa: PLR0913
    model: nn.Module | None = None,
    json_path: Path | str = "",
    safetensors_path: Path | str = "",
    pth_path: Path | str = "",
    quant_mode: QuantizationMode = QuantizationMode.eager_mode,
    compressed: bool = False,
    reorder: bool = True,
) -> nn.Module:
    """Load the layers and tensors of ``save_params`` into a float model.

    Args:
        model: a float model of the same class, changed in place.
        json_path: the file of settings.
        safetensors_path: the file of tensors.
        pth_path: not supported; traced graphs cannot be loaded.
        quant_mode: ``QuantizationMode.eager_mode``.
        compressed: without effect.
        reorder: without effect; the files store the order.

    Returns:
        The model.

    Raises:
        ConfigError: a file is not named, or the quantization is not supported.
        ModelError: a file is missing or damaged, or does not fit the model.
    """
    _check_mode(quant_mode)
    if (
        model is None
        or not str(json_path)
        or not str(safetensors_path)
        or str(pth_path)
    ):
        raise ConfigError(
            "give the float model, json_path and safetensors_path, and no pth_path",
        )
    entry = read_json(Path(json_path)).get("quantization_config")
    if not isinstance(entry, dict):
        raise ModelError(
            f"{json_path} has no quantization_config; it must be a file that"
            " save_params has written",
        )
    config, layout = read_layout(entry)
    # Names of the layers are those after experts have been split into linear layers.
    unfuse_experts(model)
    modules = dict(model.named_modules())
    if lost := [name for name, _ in config.layers if name not in modules]:
        raise ModelError(
            f"{json_path} has a layer {lost[0]!r}, which the {type(model).__name__}"
            " lacks",
        )
    sources = Sources(CheckpointReader(Path(safetensors_path)), model)
    # The type in which a layer dequantizes is that of the float weight, read before it is freed.
    types = {name: modules[name].weight.dtype for name, _ in config.layers}
    empty(model)
    put_layers(model, config, layout, sources, types)
    # Parameters of layers that stay float: norms, embeddings, biases.
    fill(model, "", sources)
    if missing := missing_of(model):
        raise ModelError(
            f"{safetensors_path} has no tensor {missing[0]!r} ({len(missing)} are"
            " missing)",
        )
    cast(Any, model).quantized_by = config
    return model.eval()


def _check_mode(mode: Any) -> None:
    if QuantizationMode(mode) is not QuantizationMode.eager_mode:
        raise ConfigError(
            f"quant_mode is {mode}; the files hold layers of modules (eager_mode),"
            " leave it out",
        )
