"""Export of a quantized model as a checkpoint for vLLM and transformers."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quark_onnx.common.errors import ConfigError
from quark_onnx.torch.checkpoints.layouts import Layout, check_config, layout_named
from quark_onnx.torch.checkpoints.meta_model import is_tied
from quark_onnx.torch.checkpoints.recast import dtype_key
from quark_onnx.torch.checkpoints.safetensors_io import SHARD, Writer, read_json
from quark_onnx.torch.config.spec import LayerSpec
from quark_onnx.torch.config.torch_config import (
    DEFAULT_TYPES,
    TorchConfig,
    matching,
    require_config,
)
from quark_onnx.torch.models.checkpoint_names import DiskNames, float_matrices
from quark_onnx.torch.models.experts import UNFUSED
from quark_onnx.torch.models.fused_groups import experts_of
from quark_onnx.torch.models.mixtures import routers_of
from quark_onnx.torch.models.names import (
    instances,
    joined,
    persistent_buffers,
    within_any,
)
from quark_onnx.torch.models.online_rotation import OnlineRotation
from quark_onnx.torch.models.quantized_layer import QuantizedLayer, Rounding, kind_of
from quark_onnx.torch.models.structure import embedding_of, head_of

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def write_checkpoint(  # noqa: PLR0913
    model: PreTrainedModel,
    config: TorchConfig,
    output: Path | str,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    layout: str = "quark",
    pack_method: str = "reorder",
    max_shard: int = SHARD,
    weight_format: str = "real_quantized",
) -> None:
    """Write a quantized model of transformers as a checkpoint, atomically.

    Args:
        model: result of ``quantize_model``.
        config: configuration by which the model was quantized.
        output: target folder; may exist if it is empty.
        tokenizer: tokenizer to write into the folder.
        layout: layout of the checkpoint, a key of ``quark_onnx.torch.checkpoints.layouts.LAYOUTS``.
        pack_method: order of nibbles in AMD Quark's layout, "reorder" or "order".
        max_shard: upper bound of a file's size in bytes.
        weight_format: "real_quantized" for codes; "fake_quantized" for dequantized floats, in AMD
            Quark's layout.

    Raises:
        ConfigError: the folder is not empty, or the layout does not support a format or an online
            rotation.
    """
    require_config(config)
    form = layout_named(layout, pack_method, weight_format)
    # A model of another package has no config.json, by which clients choose their code.
    if not hasattr(model, "config") or not hasattr(model.config, "save_pretrained"):
        raise ConfigError(
            f"the model is a {type(model).__name__}; only a model of transformers has a"
            " checkpoint",
        )
    check_config(form, config)
    # All checks run before the first file is written.
    for name in instances(model, OnlineRotation):
        raise ConfigError(
            f"each run rotates what {name} reads, which nothing does that loads a"
            " checkpoint; set r4 to false",
        )
    quantized = instances(model, QuantizedLayer)
    # before single layers are checked: the message is about all of them
    form.check_groups(
        {name: (layer.spec, layer.shape[-1]) for name, layer in quantized.items()}
    )
    for name, layer in quantized.items():
        form.check_layer(name, layer.origin, layer.spec, layer.shape)
    names = DiskNames(model)
    check_experts(form, model, {name: names.layer(name) for name in quantized})
    with Writer(Path(output), max_shard) as writer:
        _copy_code(model, writer.staging)
        model.config.save_pretrained(writer.staging)
        content = _as_now(read_json(writer.staging / "config.json"), model)
        specs = {name: layer.spec for name, layer in quantized.items()}
        for name, tensor in tensors_of(model, form):
            writer.add(form.key(names(name)), tensor)
        matrices = float_matrices(writer.written)
        content = described(content, model, config, form, specs, matrices)
        writer.write_json("config.json", content)
        # Like save_pretrained, which knows no generation of an encoder.
        if (
            getattr(model, "generation_config", None) is not None
            and model.can_generate()
        ):
            model.generation_config.save_pretrained(writer.staging)
        if tokenizer is not None:
            tokenizer.save_pretrained(writer.staging)


def _as_now(content: dict[str, Any], model: PreTrainedModel) -> dict[str, Any]:
    """Return config.json with the dtype of the model now, and with its class.

    The dtype may differ from that at loading. A model that was built from a configuration has no
    architectures.
    """
    return content | {
        dtype_key(content): str(model.dtype).removeprefix("torch."),
        "architectures": content.get("architectures") or [type(model).__name__],
    }


def _copy_code(model: Any, folder: Path) -> None:
    """Copy the Python files of a model with remote code.

    The configuration of the model copies its own files.
    """
    if getattr(model, "_auto_class", None) is not None:
        from transformers.dynamic_module_utils import custom_object_save

        custom_object_save(model, folder, config=model.config)


def check_experts(
    layout: Layout, model: PreTrainedModel, keys: Mapping[str, str]
) -> None:
    """Raise ConfigError if clients would not find unfused experts.

    Args:
        layout: layout of the checkpoint.
        model: model with unfused experts.
        keys: names of layers in files, by their names in the model.
    """
    stacks = instances(model, UNFUSED)
    taken = [name for name in keys if within_any(name, stacks)]
    # Nothing to find: no expert is quantized, or clients need no names of float checkpoints.
    if not taken or not layout.keeps_names:
        return
    from transformers.conversion_mapping import get_model_conversion_mapping

    patterns = list[str]()
    for conversion in get_model_conversion_mapping(model):
        for pattern in conversion.source_patterns:
            # A pattern has a star in place of the index of an expert.
            if "experts.*" in pattern:
                patterns.append(re.escape(pattern).replace(r"\*", r"\d+"))
    names_of_experts = re.compile(f"({'|'.join(patterns)})$")
    for name in taken:
        if not patterns or not names_of_experts.search(f"{keys[name]}.weight"):
            raise ConfigError(
                f"what reads the layout {layout.name!r} would not find {keys[name]}:"
                f" checkpoints of {model.config.model_type} have all experts in one"
                " tensor, or other names for them. Quantize a folder in which they are"
                " apart, exclude them, or choose the layout 'quark'",
            )


def described(  # noqa: PLR0913
    content: dict[str, Any],
    model: PreTrainedModel,
    config: TorchConfig,
    layout: Layout,
    quantized: Mapping[str, LayerSpec],
    matrices: Iterable[str],
) -> dict[str, Any]:
    """Return a model's config.json with its quantization_config.

    Args:
        content: config.json of the model.
        model: the quantized model.
        config: configuration by which the model was quantized.
        layout: layout of the checkpoint.
        quantized: specifications of the quantized layers, by name.
        matrices: names of the layers with a float matrix in the files.

    Raises:
        ConfigError: the layout cannot describe the configuration.
    """
    # A quantized embedding or head is stored apart from its twin.
    if is_tied(model.config) and any(name in quantized for name in _ends(model)):
        content = untied(content)
    names = DiskNames(model)
    # Clients match these names with the names in files.
    exclude = [names.layer(name) for name in floats_of(model) if name not in quantized]
    config = config.with_(layers=_layer_entries(model, config, names, quantized))
    quantized = {names.layer(name): spec for name, spec in quantized.items()}
    # Files may have more layers than the model, such as those for multi-token prediction.
    exclude = [
        name for name in dict.fromkeys((*exclude, *matrices)) if name not in quantized
    ]
    return content | {
        "quantization_config": layout.quantization_config(quantized, exclude, config),
    }


def _layer_entries(
    model: PreTrainedModel,
    config: TorchConfig,
    names: DiskNames,
    quantized: Mapping[str, LayerSpec],
) -> tuple[tuple[str, LayerSpec], ...]:
    """Return the entries of single layers for the configuration of a checkpoint."""
    modules = dict(model.named_modules())
    deviating = dict[str, LayerSpec]()
    own_specs = dict[str, LayerSpec]()
    for name, spec in quantized.items():
        # A quantized layer has its kind. From file to file, the model has float layers.
        kind = getattr(modules[name], "kind", None) or kind_of(modules[name]) or ""
        # layers not activated during calibration have no input scale; renamed layers are
        # not matched by globs
        name_in_globs = name if experts_of(name) else names.layer(name)
        if spec != config.spec_of(name_in_globs, kind):
            deviating[names.layer(name)] = spec
        configured = config.own_spec(name, kind)
        if configured is not None:
            own_specs[name] = configured
    # an overridden entry would come first in files, under its layer's name
    given = [
        (name, spec)
        for name, spec in config.layers
        if own_specs.get(name, spec) == spec
    ]
    return (
        *deviating.items(),
        *_of_rounded(own_specs, config, names),
        *_of_experts(quantized, config, names),
        *given,
    )


def _of_rounded(
    own_specs: Mapping[str, LayerSpec],
    config: TorchConfig,
    names: DiskNames,
) -> Iterator[tuple[str, LayerSpec]]:
    """Yield entries for layers whose outputs are rounded for attention.

    Entries for such outputs come first in AMD Quark's configuration, and readers take them for the
    whole layer. The entries therefore repeat the specification of the layer where it differs from
    the default: one entry for a glob with a uniform specification, else one entry per layer.

    Args:
        own_specs: specifications of layers without the rounding for attention.
    """
    given = dict(config.layers)
    for glob in config.rounded:
        matched = {name: own_specs[name] for name in matching(own_specs, glob)}
        # One entry for the glob replaces an entry for each layer.
        if len(set(matched.values())) == 1:
            yield glob, next(iter(matched.values()))
            continue
        usual = given.get(glob, config.default)
        for name, spec in matched.items():
            if spec != usual:
                yield names.layer(name), spec


def _of_experts(
    quantized: Mapping[str, LayerSpec],
    config: TorchConfig,
    names: DiskNames,
) -> Iterator[tuple[str, LayerSpec]]:
    """Yield globs for the experts of a block and their module, with a specification.

    vLLM looks the module up by its own name. An entry is needed where that name matches another
    specification.
    """
    specs_by_stack = dict[str, set[LayerSpec]]()
    for name, spec in quantized.items():
        if stack := experts_of(name):
            specs_by_stack.setdefault(stack, set()).add(spec)
    for stack, specs in specs_by_stack.items():
        module_name = names.experts(stack)
        # The first glob that matches has priority.
        matching_specs = (
            spec for glob, spec in config.layers if fnmatchcase(module_name, glob)
        )
        if len(specs) == 1 and specs != {next(matching_specs, config.default)}:
            yield f"{module_name}*", specs.pop()


def _ends(model: Any) -> list[str]:
    """Return the names of the token embedding and the head, possibly tied."""
    # By identity: a tied embedding and head are two modules.
    ends = (id(embedding_of(model)), id(head_of(model)))
    return [name for name, module in model.named_modules() if id(module) in ends]


def untied(content: dict[str, Any]) -> dict[str, Any]:
    """Return a config.json whose model has a separate head.

    A quantized weight does not belong to two layers.
    """
    separate = {"tie_word_embeddings": False}
    result = content | separate
    # Models of several modalities repeat the setting for their text model. Some that have no such
    # part write null.
    text_config = content.get("text_config")
    if text_config is not None:
        result["text_config"] = text_config | separate
    return result


def floats_of(model: nn.Module) -> list[str]:
    """Return the names of float layers that have a default, and of routers."""
    routers = set(routers_of(model))
    return [
        name
        for name, module in model.named_modules()
        if kind_of(module) in DEFAULT_TYPES or name in routers
    ]


def tensors_of(model: nn.Module, layout: Layout) -> Iterator[tuple[str, Any]]:
    """Yield the tensors of a checkpoint with their names; tied tensors appear once."""
    seen = set[int]()
    for prefix, module in model.named_modules():
        # The layer of a rounding writes the scale.
        if isinstance(module, Rounding):
            continue
        if isinstance(module, QuantizedLayer):
            for name, tensor in layout.tensors(module, prefix).items():
                yield joined(prefix, name), tensor
            continue
        tensors = dict(module.named_parameters(recurse=False))
        tensors |= persistent_buffers(module)
        # Tied parameters are one object under several names.
        for name, tensor in tensors.items():
            if id(tensor) not in seen:
                seen.add(id(tensor))
                yield joined(prefix, name), tensor
