"""Models of transformers without weights: parameters on device "meta", real buffers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from quark_onnx.common.errors import ConfigError, MissingDependency, ModelError
from quark_onnx.common.extras import pip_install
from quark_onnx.torch.checkpoints.safetensors_io import read_json
from quark_onnx.torch.models.experts import unfuse_experts

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel


@contextlib.contextmanager
def empty_parameters() -> Iterator[None]:
    """Create module parameters on device "meta" within the context.

    Buffers are created as usual.
    """
    # A context of device "meta" would create buffers there as well, and lose their values.
    register = nn.Module.register_parameter

    def emptied(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        # A tied parameter is on device "meta" already, and stays shared.
        if param is not None and param.device.type != "meta":
            param = nn.Parameter(param.to("meta"), requires_grad=False)
            # transformers would initialize it, which takes milliseconds even without values.
            param._is_hf_initialized = True  # type: ignore[attr-defined]
        register(self, name, param)

    nn.Module.register_parameter = emptied  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def config_of(folder: Path, *, trust_code: bool = False) -> PreTrainedConfig:
    """Return transformers' configuration of a checkpoint, without quantization_config.

    Raises:
        ModelError: config.json is missing, or transformers does not know the model.
        MissingDependency: transformers is not installed.
    """
    transformers = _transformers()
    if not (folder / "config.json").is_file():
        raise ModelError(
            f"{folder} has no config.json; it must be a folder of a Hugging Face model",
        )
    try:
        config: PreTrainedConfig = transformers.AutoConfig.from_pretrained(
            str(folder),
            trust_remote_code=trust_code,
        )
    # The checkpoint's own Python files may raise any exception.
    except Exception as error:
        if not trust_code and "auto_map" in read_json(folder / "config.json"):
            raise ModelError(
                f"{folder} brings Python files along, which are run only if you trust"
                " them: give --trust-code (trust_code=True)",
            ) from error
        raise ModelError(
            f"transformers cannot read {folder / 'config.json'}: {error}",
        ) from error
    # With the entry, transformers would build the quantized layers of its own integrations.
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    return config


def float_config_of(folder: Path) -> PreTrainedConfig:
    """Return transformers' configuration of a float checkpoint.

    Raises:
        ModelError: config.json is missing, transformers does not know the model, or the model is
            quantized already.
        MissingDependency: transformers is not installed.
    """
    settings = read_json(folder / "config.json").get("quantization_config")
    if settings is not None:
        method = settings.get("quant_method") if isinstance(settings, dict) else None
        raise ModelError(
            f"{folder} is quantized already ({method}); give the folder of the float"
            " model",
        )
    return config_of(folder)


def skeleton_of(
    config: PreTrainedConfig, *, trust_code: bool = False
) -> PreTrainedModel:
    """Return the model of a configuration, with empty parameters and unfused experts.

    Raises:
        ModelError: transformers cannot create the model.
    """
    transformers = _transformers()
    try:
        with empty_parameters():
            classes = [
                getattr(transformers, str(name), None)
                for name in getattr(config, "architectures", None) or ()
            ]
            # AutoModelForCausalLM would choose a class by the type of the configuration alone.
            if (
                classes
                and classes[0] is not None
                and _suits(classes[0], config, transformers)
            ):
                model = classes[0]._from_config(config, dtype=dtype_of(config))
            else:
                model = transformers.AutoModelForCausalLM.from_config(
                    config,
                    trust_remote_code=trust_code,
                    dtype=dtype_of(config),
                )
    except Exception as error:
        raise ModelError(
            f"transformers cannot make a model of {getattr(config, 'model_type', '?')}:"
            f" {error}",
        ) from error
    unfuse_experts(model)
    model.eval()
    return cast("PreTrainedModel", model)


def _suits(architecture: Any, config: PreTrainedConfig, transformers: Any) -> bool:
    """Return whether to create a model by the class that its configuration names.

    Some families have their own configuration and the class of another family (GLM-GA has the class
    of GLM-4.6V). A configuration may also name a class of another configuration. The class of the
    configuration's family is used then.
    """
    if architecture.config_class is type(config):
        return True
    is_mapped = type(config) in transformers.AutoModelForCausalLM._model_mapping
    return not is_mapped and "AutoModelForCausalLM" not in (
        getattr(config, "auto_map", None) or {}
    )


def dtype_of(config: PreTrainedConfig) -> torch.dtype:
    """Return the dtype of a model's weights; float32 if not configured, and for float64."""
    # A torch.dtype, or its name in configurations of remote code.
    dtype = getattr(config, "dtype", None) or torch.float32
    if isinstance(dtype, str):
        dtype = getattr(torch, dtype, None)
    # No number format is finer than float32, and no client computes in float64.
    if dtype == torch.float64:
        return torch.float32
    if dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise ConfigError(
            f"the dtype of the model is {dtype}; it must be float32, float16 or"
            " bfloat16",
        )
    return dtype


def is_tied(config: PreTrainedConfig) -> bool:
    """Return whether the token embedding and the head share a weight."""
    # Models of several modalities have the setting in the configuration of their text model.
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    return bool(getattr(text, "tie_word_embeddings", False))


def _transformers() -> Any:
    """Import transformers.

    Raises:
        MissingDependency: transformers is not installed.
    """
    try:
        import transformers
    except ImportError as error:
        raise MissingDependency(
            f"language models need transformers: {pip_install('llm')}",
        ) from error
    return transformers
