"""ModelExporter and the export functions of AMD Quark 0.13."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quark_onnx.common.errors import ConfigError
from quark_onnx.config.checks import require, require_known, require_one_of
from quark_onnx.convert import convert
from quark_onnx.files.io import staged
from quark_onnx.torch.checkpoints import export
from quark_onnx.torch.checkpoints.layouts import read_layout
from quark_onnx.torch.checkpoints.load import in_memory, load_checkpoint
from quark_onnx.torch.checkpoints.safetensors_io import read_json
from quark_onnx.torch.config.spec import LayerSpec
from quark_onnx.torch.config.torch_config import KVCache, TorchConfig, matches
from quark_onnx.torch.export.config.config import ExporterConfig, JsonExporterConfig
from quark_onnx.torch.export.diffusion import save_diffusion_model
from quark_onnx.torch.models.attention import set_attention
from quark_onnx.torch.models.names import instances
from quark_onnx.torch.models.quantized_layer import QuantizedLayer
from quark_onnx.torch.quantization.config.config import QConfig
from quark_onnx.torch.quantization.params import save_params as save_params

if TYPE_CHECKING:
    import torch
    from torch import nn
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from quark_onnx.torch.calibration.block_stream import Sample

logger = logging.getLogger(__name__)

#: Arguments of export_onnx for AMD Quark's tracing.
_TRACING = ("verbose", "do_constant_folding", "operator_export_type", "dynamo")
#: Layouts of AMD Quark.
CUSTOM_MODES = ("quark", "awq", "fp8")


class ModelExporter:
    """Writer of quantized models.

    Args:
        config: the settings; or the folder, for default settings.
        export_dir: the folder.
    """

    def __init__(
        self,
        config: ExporterConfig | Path | str | None = None,
        export_dir: Path | str | None = None,
    ) -> None:
        # A folder alone is accepted in the place of the configuration.
        if isinstance(config, str | Path) and export_dir is None:
            config, export_dir = None, config
        if not isinstance(config, ExporterConfig | None):
            raise ConfigError(f"config is {config!r}; it must be an ExporterConfig")
        if export_dir is None:
            raise ConfigError(
                "export_dir is missing; name the folder that the model goes to",
            )
        self.config, self.export_dir = config or ExporterConfig(), Path(export_dir)

    def export_safetensors_model(
        self,
        model: PreTrainedModel,
        quant_config: QConfig | None = None,
        custom_mode: str = "quark",
        tokenizer: PreTrainedTokenizerBase | None = None,
    ) -> None:
        """Write a checkpoint for vLLM and transformers.

        Args:
            model: a quantized model. Smaller scales of keys and values are raised to
                ``min_kv_scale``.
            quant_config: the configuration of the quantization; None for the model's own.
            custom_mode: the layout: "quark", "awq" or "fp8".
            tokenizer: a tokenizer, written to the same folder.

        Raises:
            ConfigError: the folder is not empty, the model was quantized by a different
                configuration, or the layout does not support a format.
        """
        asked = self.config.json_export_config
        require_one_of("custom_mode", custom_mode, CUSTOM_MODES)
        # Fused layers share a scale only if the quantization has computed one.
        if asked.weight_merge_groups is not None:
            raise ConfigError(
                "weight_merge_groups is set; each layer has a scale of its own, leave"
                " it out",
            )
        # The configuration that the model carries; a given one is compared with it below.
        if quant_config is None:
            config = config_of(model)
        else:
            # AMD's earlier exporter names the group in settings of its own.
            group = asked.kv_cache_group or quant_config.kv_cache_group
            config = replace(quant_config, kv_cache_group=group).torch_config()
        # Before the check of the model, as the bound of scales is part of the written
        # configuration.
        config = _with_kv_cache(config, asked)
        _check_model(model, config)
        if config.kv_cache is not None:
            _raise_kv_scales(model, config.kv_cache)
        export.write_checkpoint(
            model,
            config,
            self.export_dir,
            tokenizer=tokenizer,
            layout=custom_mode,
            pack_method=asked.pack_method,
            weight_format=asked.weight_format,
        )

    def export_onnx_model(self, model: nn.Module, input_args: Sample) -> None:
        """Write ``model.onnx``.

        Args:
            model: a quantized model.
            input_args: example inputs.
        """
        export_onnx(model, self.export_dir, input_args)

    def export_gguf_model(
        self,
        model: PreTrainedModel,
        tokenizer_path: Path | str,
        model_type: str | None = None,
    ) -> None:
        """Write ``model.gguf``; see ``export_gguf``."""
        export_gguf(model, self.export_dir, model_type, tokenizer_path)


class ModelImporter:
    """Reader of checkpoints, as in AMD Quark up to release 0.10.

    Args:
        model_info_dir: the folder.
        saved_format: "safetensors" or "quark_format", which are equivalent here.
    """

    def __init__(
        self,
        model_info_dir: Path | str,
        saved_format: str = "safetensors",
    ) -> None:
        self.model_info_dir = Path(model_info_dir)
        self.saved_format = saved_format

    def import_model_info(self, model: nn.Module) -> nn.Module:
        """Return the model with the checkpoint's quantized layers."""
        return import_model_from_safetensors(model, self.model_info_dir)


def export_safetensors(
    model: PreTrainedModel,
    output_dir: Path | str,
    custom_mode: str = "quark",
    weight_format: str | None = None,
    pack_method: str = "reorder",
) -> None:
    """Write a quantized model as a checkpoint for vLLM and transformers.

    Args:
        model: a model from a ModelQuantizer.
        output_dir: the folder; may exist only if it is empty.
        custom_mode: the layout: "quark", "awq" or "fp8".
        weight_format: "real_quantized" for codes, "fake_quantized" for dequantized floats; codes if
            None.
        pack_method: the order of nibbles, "reorder" or "order".

    Raises:
        ConfigError: the folder is not empty, or the layout does not support a format.
    """
    # The function of AMD Quark 0.13 has the settings of the earlier exporter as arguments.
    asked = JsonExporterConfig(
        weight_format=weight_format or "real_quantized",
        pack_method=pack_method,
    )
    ModelExporter(ExporterConfig(asked), output_dir).export_safetensors_model(
        model,
        custom_mode=custom_mode,
    )


def export_onnx(  # noqa: PLR0913
    model: nn.Module,
    output_dir: Path | str,
    input_args: Sample,
    opset_version: int | None = None,
    input_names: Sequence[str] = (),
    output_names: Sequence[str] = (),
    uint4_int4_flag: bool = False,
    **others: Any,
) -> None:
    """Write a quantized model as ``model.onnx``.

    Args:
        model: a quantized model.
        output_dir: the folder.
        input_args: example inputs.
        opset_version: the opset to which the model is converted; None for no conversion.
        input_names: new names of inputs in order; empty keeps the module's names.
        output_names: new names of outputs in order; empty keeps the module's names.
        uint4_int4_flag: without effect: 4-bit codes are always written as 4-bit tensors.
        others: ``verbose``, ``do_constant_folding``, ``operator_export_type`` and ``dynamo``,
            without effect.

    Raises:
        ConfigError: a format has no exact counterpart in ONNX, or there are more names than inputs
            or outputs.
    """
    # Imported here: checkpoints are written without the exporter of torch.
    from quark_onnx.torch.exports.onnx import write_onnx
    from quark_onnx.torch.exports.onnx.rename import rename

    # Known arguments of torch.onnx.export are accepted; a misspelt one is an error.
    for name in others:
        require_known(name, _TRACING, "export_onnx has no argument")
    Path(output_dir).mkdir(parents=True, exist_ok=True)
    path = Path(output_dir) / "model.onnx"
    write_onnx(model, input_args, path)
    if input_names or output_names:
        rename(path, input_names, output_names)
    if opset_version is not None:
        raised = convert(path, "opset", opset=opset_version).model
        # ``staged`` replaces the file at the end of the block, which has nothing to add.
        with staged(raised, path, external=False):
            pass


def export_gguf(
    model: PreTrainedModel,
    output_dir: Path | str,
    model_type: str | None,
    tokenizer_path: Path | str,
) -> None:
    """Write a quantized model as ``model.gguf`` for llama.cpp.

    Args:
        model: a quantized model.
        output_dir: the folder.
        model_type: the model type of the configuration; None reads the configuration.
        tokenizer_path: the Hugging Face folder of the float model, with its tokenizer.

    Raises:
        ConfigError: the model has a different type.
    """
    from quark_onnx.torch.exports.gguf import write_quantized_gguf

    # The type names the architecture in the file, which llama.cpp looks for.
    if model_type not in (None, model.config.model_type):
        raise ConfigError(
            f"model_type is {model_type!r}, but the model is a"
            f" {model.config.model_type!r}",
        )
    Path(output_dir).mkdir(parents=True, exist_ok=True)
    write_quantized_gguf(model, Path(tokenizer_path), Path(output_dir) / "model.gguf")


def import_model_from_safetensors(  # noqa: PLR0913
    model: Any | None,
    model_dir: Path | str,
    multi_device: bool = False,
    trust_remote_code: bool = False,
    attn_implementation: str | None = None,
    device: torch.device | str | None = None,
    multi_gpu: bool = False,
) -> nn.Module:
    """Load a checkpoint of AMD Quark or of this package.

    Args:
        model: a model of the same class, whose modules are replaced by those of the checkpoint;
            None for a new model.
        model_dir: the folder.
        multi_device: without effect; the model goes to one device.
        trust_remote_code: run Python files of the checkpoint.
        attn_implementation: transformers' name of the attention implementation; None for the
            default.
        device: the device; the CPU if None.
        multi_gpu: without effect; the model goes to one device.

    Returns:
        The quantized model.

    Raises:
        ConfigError: the quantization is not supported, or the model has a different class.
        ModelError: a file or a tensor is missing or damaged.
    """
    if multi_device or multi_gpu:
        logger.warning(
            "multi_device and multi_gpu have no effect: the model goes to one device",
        )
    loaded: Any = load_checkpoint(model_dir, trust_code=trust_remote_code)
    if model is not None:
        if type(model) is not type(loaded):
            raise ConfigError(
                f"the model is a {type(model).__name__}, but {model_dir} has a"
                f" {type(loaded).__name__}",
            )
        # The caller's object stays, with its own attributes; its modules are exchanged.
        for name, child in loaded.named_children():
            setattr(model, name, child)
        loaded = model.eval()
    # Lets the model be exported again, as after a quantization in memory.
    entry = read_json(Path(model_dir) / "config.json").get("quantization_config")
    if entry is not None:
        loaded.quantized_by = in_memory(read_layout(entry)[0], loaded)
    if attn_implementation is not None:
        set_attention(loaded, attn_implementation)
    moved: nn.Module = loaded if device is None else loaded.to(device)
    return moved


class BaseExporter:
    """Base of the exporters, whose ``_export`` writes the model, as in AMD Quark."""

    def _validate(self) -> None:
        """Raise an error if the model cannot be written; the export functions check it, too."""

    def _export_impl(self) -> None:
        """Write the model."""
        raise NotImplementedError

    def _export(self) -> None:
        """Check the model, and write it."""
        self._validate()
        self._export_impl()


@dataclass
class SafetensorsExporter(BaseExporter):
    """``export_safetensors`` as a class."""

    model: Any
    output_dir: Path | str
    custom_mode: str = "quark"
    weight_format: str = "real_quantized"
    pack_method: str = "reorder"

    def _export_impl(self) -> None:
        export_safetensors(
            self.model,
            self.output_dir,
            self.custom_mode,
            self.weight_format,
            self.pack_method,
        )


class QuarkSafetensorsExporter(SafetensorsExporter):
    """Exporter in AMD Quark's layout."""

    def _validate(self) -> None:
        require(self.custom_mode == "quark", "custom_mode", self.custom_mode, "'quark'")


class CustomSafetensorsExporter(SafetensorsExporter):
    """Exporter in the layout of AutoAWQ or of native FP8."""

    def _validate(self) -> None:
        fits = self.custom_mode in ("awq", "fp8")
        require(fits, "custom_mode", self.custom_mode, "'awq' or 'fp8'")


class DiffusersSafetensorsExporter(SafetensorsExporter):
    """Exporter of models of diffusers, with codes, for ``load_diffusion_model``."""

    def _validate(self) -> None:
        default = ("quark", "real_quantized", "reorder")
        given = (self.custom_mode, self.weight_format, self.pack_method)
        require(
            given == default,
            "(custom_mode, weight_format, pack_method)",
            given,
            f"{default}, the layout of save_diffusion_model",
        )

    def _export_impl(self) -> None:
        save_diffusion_model(self.model, self.output_dir)


@dataclass
class OnnxExporter(BaseExporter):
    """``export_onnx`` as a class; the last arguments have no effect."""

    model: Any
    output_dir: Path | str
    input_args: Any
    opset_version: int | None = None
    input_names: Sequence[str] = ()
    output_names: Sequence[str] = ()
    verbose: bool = False
    do_constant_folding: bool = True
    operator_export_type: Any = None
    uint4_int4_flag: bool = False
    dynamo: bool = False

    def _export_impl(self) -> None:
        export_onnx(
            self.model,
            self.output_dir,
            self.input_args,
            self.opset_version,
            self.input_names,
            self.output_names,
        )


@dataclass
class GgufExporter(BaseExporter):
    """``export_gguf`` as a class."""

    model: Any
    output_dir: Path | str
    model_type: str | None
    tokenizer_path: Path | str

    def _export_impl(self) -> None:
        export_gguf(self.model, self.output_dir, self.model_type, self.tokenizer_path)


class BaseImporter:
    """Base of the importers, whose ``_import`` returns the model, as in AMD Quark."""

    def _validate(self) -> None:
        """Raise an error if nothing can be read; the import functions check it, too."""

    def _import_impl(self) -> nn.Module:
        """Return the model."""
        raise NotImplementedError

    def _import(self, **settings: Any) -> nn.Module:
        """Set attributes, and return the model."""
        for name, value in settings.items():
            require_known(name, vars(self), "the importer has no setting")
            setattr(self, name, value)
        self._validate()
        return self._import_impl()


class SafetensorsImporter(BaseImporter):
    """``import_model_from_safetensors`` as a class: ``_import(model=..., model_dir=...)``."""

    def __init__(self) -> None:
        self.model: Any = None
        self.model_dir: Path | str = ""
        self.multi_device = False

    def _import_impl(self) -> nn.Module:
        return import_model_from_safetensors(
            self.model, self.model_dir, self.multi_device
        )


def config_of(model: nn.Module) -> TorchConfig:
    """Return the configuration by which a model was quantized.

    Raises:
        ConfigError: the model was not quantized by a ModelQuantizer.
    """
    config = getattr(model, "quantized_by", None)
    if not isinstance(config, TorchConfig):
        raise ConfigError(
            "the model does not know what it was quantized by;"
            " ModelQuantizer(config).quantize_model does",
        )
    return config


def _with_kv_cache(config: TorchConfig, asked: JsonExporterConfig) -> TorchConfig:
    cache = config.kv_cache
    # Sets, as the order of globs has no meaning here.
    if asked.kv_cache_group and set(asked.kv_cache_group) != set(config.cached):
        raise ConfigError(
            f"kv_cache_group is {asked.kv_cache_group}, but the model was quantized"
            f" with {list(config.cached) or 'float keys and values'}",
        )
    if cache is None:
        if asked.min_kv_scale:
            raise ConfigError(
                f"min_kv_scale is {asked.min_kv_scale}, but keys and values are float",
            )
        return config
    return config.with_(
        # A bound of the quantization stays where the export asks for a smaller one.
        kv_cache=replace(cache, least=max(cache.least, asked.min_kv_scale)),
    )


def _check_model(model: nn.Module, config: TorchConfig) -> None:
    """Raise ConfigError if a model was quantized by a different configuration."""
    layers = list(instances(model, QuantizedLayer).items())
    if not layers:
        raise ConfigError(
            "no layer of the model is quantized; ModelQuantizer(config).quantize_model"
            " comes first",
        )
    for name, layer in layers:
        # None for a layer that the configuration leaves float.
        wanted = config.spec_of(name, layer.kind) or LayerSpec()
        # inactive experts have a quantized weight only
        if layer.spec not in (wanted, LayerSpec(wanted.weight)):
            raise ConfigError(
                f"{name} is quantized by {layer.spec}, but quant_config says {wanted}; "
                "give what the model was quantized by",
            )


def _raise_kv_scales(model: nn.Module, cache: KVCache) -> None:
    for name, layer in instances(model, QuantizedLayer).items():
        if (
            matches(name, cache.layers)
            and layer.output is not None
            and layer.output.scale is not None
        ):
            # A larger scale clips no value that the smaller one keeps.
            layer.output.scale = layer.output.scale.clamp(min=cache.least)
