"""Settings of this package from the arguments of ``quantize_quark.py``."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from quark_onnx.common.errors import ConfigError, DataError
from quark_onnx.torch.checkpoints.float_checkpoint import FloatCheckpoint
from quark_onnx.torch.checkpoints.layouts import check_config
from quark_onnx.torch.checkpoints.safetensors_io import read_json
from quark_onnx.torch.config.schemes import scheme
from quark_onnx.torch.config.spec import LayerSpec, TensorSpec
from quark_onnx.torch.config.torch_config import TorchConfig
from quark_onnx.torch.quantization.config.algorithms import (
    ALGORITHMS,
    AlgoConfig,
    algorithm_named,
    load_quant_algo_config_from_file,
)
from quark_onnx.torch.quantization.config.template import LLMTemplate

if TYPE_CHECKING:
    from quark_onnx.torch.checkpoints.layouts.base import Layout

#: Earlier names of the format hf_format.
_CHECKPOINTS = ("quark_format", "quark_safetensors", "vllm_adopted_safetensors")
#: Placeholder for no layers in Ryzen AI's documentation.
_NOTHING = "[]"
#: The one format of keys, values, queries and probabilities that checkpoints support.
_FORMAT = "fp8"


def model_folder(args: Namespace) -> Path:
    """Return the folder of the model; a model of the Hub is downloaded.

    Raises:
        ConfigError: there is no model of this name.
    """
    if args.model_dir is None:
        raise ConfigError("--model_dir is missing; name the folder of the float model")
    folder = Path(args.model_dir)
    if folder.is_dir():
        return folder
    # Imported here: folders need no package for the Hub.
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
    )

    try:
        return Path(snapshot_download(args.model_dir, revision=args.revision))
    except (
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        OSError,
    ) as error:
        raise ConfigError(
            f"--model_dir {args.model_dir} is no folder, and not found on the Hub:"
            f" {error}",
        ) from error


def torch_config(args: Namespace, source: FloatCheckpoint) -> TorchConfig:
    """Return the configuration that the arguments describe.

    Raises:
        ConfigError: a name is unknown, or a format is not supported.
    """
    if args.quant_scheme is None:
        schemes = ", ".join(LLMTemplate.get_supported_schemes())
        raise ConfigError(
            f"--quant_scheme is missing; it must be one of: {schemes}. Or give"
            " --skip_quantization",
        )
    for name in ("kv_cache_dtype", "attention_dtype"):
        if getattr(args, name) not in (None, _FORMAT):
            raise ConfigError(
                f"--{name} is {getattr(args, name)!r}; checkpoints support {_FORMAT!r}"
                " alone",
            )
    names, settings = _algorithms(args)
    config = _template(source).get_config(
        args.quant_scheme,
        algorithm=names or None,
        kv_cache_scheme=args.kv_cache_dtype,
        min_kv_scale=args.min_kv_scale,
        attention_scheme=args.attention_dtype,
        layer_config=dict(args.layer_quant_scheme),
        exclude_layers=_excluded(args),
        algo_configs=settings,
        group_size=args.group_size,
    )
    # No parameter of AMD's ``get_config``.
    config.kv_cache_post_rope = args.kv_cache_post_rope
    result = config.torch_config()
    sizes = tuple(
        (glob, _of_size(args, int(size))) for glob, size in args.group_size_per_layer
    )
    # The first matching glob counts: sizes of single layers come before schemes of layers.
    result = result.with_(layers=(*sizes, *result.layers))
    if args.scale_calculation_mode is not None:
        result = _with_exponents(result, args.scale_calculation_mode)
    return result


def exports_of(args: Namespace, notes: list[str]) -> list[str] | None:
    """Return the current names of the requested formats; None if none is requested.

    Args:
        args: the arguments of the script.
        notes: list to which notes for the user are appended.
    """
    if args.model_export is None:
        return None
    kinds = list[str]()
    for kind in args.model_export:
        if kind in _CHECKPOINTS:
            notes.append(f"--model_export {kind}: a checkpoint is written as hf_format")
            kinds.append("hf_format")
        else:
            kinds.append(kind)
    # Two earlier names may have become one.
    return list(dict.fromkeys(kinds))


def can_be_stored(layout: Layout, config: TorchConfig) -> bool:
    """Return whether a layout supports a configuration."""
    try:
        # The check of the layout raises with a reason; here only the answer counts.
        check_config(layout, config)
    except ConfigError:
        return False
    return True


def batch_of(args: Namespace) -> int | str:
    """Return the evaluation batch size.

    Raises:
        DataError: the size is not positive.
    """
    size: int | str = args.eval_batch_size
    if isinstance(size, int) and size < 1:
        raise DataError(f"--eval_batch_size is {size}; it must be at least 1, or auto")
    return size


def _template(source: FloatCheckpoint) -> LLMTemplate:
    """Return AMD Quark's template of the model, or build one from its structure."""
    kind = str(read_json(source.folder / "config.json").get("model_type", ""))
    # A family that AMD Quark does not know: float layers follow from the structure of the model.
    if kind not in LLMTemplate.list_available():
        floats = list(source.usually_float())
        LLMTemplate.register_template(
            LLMTemplate(kind, ["*k_proj", "*v_proj"], exclude_layers_name=floats),
        )
    return LLMTemplate.get(kind)


def _excluded(args: Namespace) -> list[str] | None:
    """Return the patterns of excluded layers, or None for the default."""
    if args.exclude_layers is None:
        return None
    # An empty list excludes nothing, where None means the template's patterns.
    return [layer for layer in args.exclude_layers if layer != _NOTHING]


def _of_size(args: Namespace, size: int) -> LayerSpec:
    """Return the scheme with a different group size.

    Raises:
        ConfigError: the scheme has no groups, or groups of a fixed size.
    """
    spec = scheme(args.quant_scheme, args.group_size)
    if spec.weight is None or not spec.weight.block_size:
        raise ConfigError(
            f"--group_size_per_layer: the scheme {args.quant_scheme} has no groups"
            " whose size is open",
        )
    return spec.with_(weight=spec.weight.with_(block_size=size))


def _algorithms(args: Namespace) -> tuple[list[str], dict[str, AlgoConfig]]:
    """Return names of algorithms in order, and settings by name.

    Raises:
        ConfigError: a file is for an algorithm that is not named.
    """
    given = [*(args.pre_quantization_optimization or ()), *(args.quant_algo or ())]
    names = [name.lower() for name in given]
    settings = dict[str, AlgoConfig]()
    for path, config in _files(args):
        # By class: "smooth" and "smoothquant", "rotation" and "quarot" are the same settings.
        matching = [name for name in names if isinstance(config, algorithm_named(name))]
        if not matching:
            raise ConfigError(
                f"{path} is for {config.name!r}, which --quant_algo does not name; add"
                " it there",
            )
        settings[matching[0]] = config
    return names, settings


def _files(args: Namespace) -> Iterator[tuple[str, AlgoConfig]]:
    """Yield files of algorithm settings with their content.

    Names of algorithms between the files are skipped.
    """
    words = args.quant_algo_config_file or ()
    pre_words = args.pre_optimization_config_file_path or ()
    for word in (*words, *pre_words):
        # The file says which algorithm it is for, so that a name before it adds nothing.
        if word.lower() not in ALGORITHMS:
            yield word, load_quant_algo_config_from_file(word)


def _with_exponents(config: TorchConfig, rule: str) -> TorchConfig:
    """Return a configuration with a different rule for shared exponents."""

    def of_tensor(spec: TensorSpec | None) -> TensorSpec | None:
        if spec is None:
            return None
        return spec.with_(exponent=rule)

    def of_layer(spec: LayerSpec) -> LayerSpec:
        return replace(spec, weight=of_tensor(spec.weight), input=of_tensor(spec.input))

    # Formats without shared exponents keep the setting unused.
    return config.each(of_layer)
