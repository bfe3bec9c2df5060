"""Merge a LoRA adapter (peft) into the weights of its base model, tensor by tensor.

W + s B A, where s is alpha / r, or alpha / sqrt(r) for rank-stabilized LoRA (Kalajdzievski 2023).
Sums are computed in float32 and rounded once to the type of W.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quark_onnx.common.errors import ConfigError, ModelError
from quark_onnx.torch.checkpoints.decoded import DecodedTensor
from quark_onnx.torch.checkpoints.parameter_sources import Sources
from quark_onnx.torch.checkpoints.pickled import pickled_heads
from quark_onnx.torch.checkpoints.safetensors_io import (
    ADAPTER_TENSORS,
    CheckpointReader,
    read_json,
)
from quark_onnx.torch.models.quantized_layer import kind_of, outputs_first
from quark_onnx.torch.runtime.checkpoint_folder import ADAPTER
from quark_onnx.torch.runtime.safetensors_header import StoredTensor

#: Tensors of an adapter that old releases of peft have written.
_PICKLED = "adapter_model.bin"
_FACTOR = re.compile(r"base_model\.model\.(?P<layer>.+)\.lora_(?P<side>[AB])\.weight")
#: Settings of ``LoraConfig`` (peft 0.21) that do not change what is added to a weight, or that
#: this module reads. Any other setting must be unset.
_READ = frozenset(
    (
        "peft_type",
        "r",
        "lora_alpha",
        "use_rslora",
        "rank_pattern",
        "alpha_pattern",
        "auto_mapping",
        "base_model_name_or_path",
        "revision",
        "task_type",
        "inference_mode",
        "lora_dropout",
        "megatron_core",
        "peft_version",
        "target_modules",
        "exclude_modules",
        "layers_pattern",
        "layers_to_transform",
        "init_lora_weights",
        "bias",
        "fan_in_fan_out",
        "qalora_group_size",
    )
)
#: Ways of initialization that leave the base model's weights unchanged.
_INITIAL = (True, False, None, "gaussian")
_LINEAR = ("Linear", "Conv1D")


@dataclass(frozen=True)
class _Pair:
    """Factors of what is added to a weight.

    Attributes:
        a: the factor of shape (r, inputs).
        b: the factor of shape (outputs, r).
        scale: what their product is multiplied by.
    """

    a: StoredTensor
    b: StoredTensor
    scale: float


def merge_adapter(reader: CheckpointReader, model: Any) -> None:
    """Replace the tensors of a reader by those with the adapter in its folder merged.

    Args:
        reader: reader of the base model; its ``tensors`` and ``notes`` are changed.
        model: the base model with empty parameters, whose names the adapter uses.

    Raises:
        ConfigError: the folder has no adapter.
        ModelError: the adapter is damaged, is no plain LoRA, or does not fit the model.
    """
    folder = reader.folder
    if not (folder / ADAPTER).is_file():
        raise ConfigError(f"{folder} has no adapter to merge: there is no {ADAPTER}")
    config = read_json(folder / ADAPTER)
    _check_config(folder / ADAPTER, config)
    pairs = _pairs(folder, config)
    sources = Sources(reader, model)
    # A tied weight is two parameters; only one of them would be changed.
    tied = {*sources.tied, *sources.tied.values()}
    merged = list[StoredTensor]()
    for layer, pair in pairs.items():
        key = sources.key_of(f"{layer}.weight")
        try:
            module = model.get_submodule(layer)
        except AttributeError:
            module = None
        if f"{layer}.weight" in tied:
            raise _refused(
                folder, f"the weight of {layer} is shared with another layer"
            )
        if kind_of(module) not in _LINEAR or key not in reader:
            raise _refused(folder, f"{layer} is no linear layer of the base model")
        merged.append(_merged(reader.tensors[key], pair, layer, module))
    reader.tensors |= {tensor.name: tensor for tensor in merged}
    reader.notes.append(
        f"the adapter in {folder} is merged into the weights of {len(merged)} layers"
    )


def _refused(folder: Path, reason: str) -> ModelError:
    return ModelError(
        f"the adapter in {folder} cannot be merged here: {reason}; merge it first with peft's"
        " merge_and_unload() before save_pretrained"
    )


def _check_config(path: Path, config: Mapping[str, Any]) -> None:
    """Raise ModelError unless an adapter is LoRA without variants."""
    if config.get("peft_type") != "LORA":
        raise _refused(path.parent, f"its peft_type is {config.get('peft_type')!r}")
    for name, value in config.items():
        is_usual = name in _READ or not value
        if name == "bias":
            is_usual = value == "none"
        if name == "init_lora_weights":
            is_usual = value in _INITIAL
        if not is_usual:
            raise _refused(path.parent, f"{name} is {str(value)[:80]}")
    for name in ("rank_pattern", "alpha_pattern"):
        if not isinstance(config.get(name) or {}, dict):
            raise ModelError(f"{path}: {name} is no object of numbers by pattern")


def _pairs(folder: Path, config: Mapping[str, Any]) -> dict[str, _Pair]:
    """Return the factors of an adapter by the layer of the base model."""
    if (folder / ADAPTER_TENSORS).is_file():
        tensors: Mapping[str, StoredTensor] = CheckpointReader(
            folder / ADAPTER_TENSORS
        ).tensors
    elif (folder / _PICKLED).is_file():
        tensors = pickled_heads(folder / _PICKLED)
    else:
        raise ModelError(f"{folder} has {ADAPTER}, and no {ADAPTER_TENSORS}")
    sides: dict[str, dict[str, StoredTensor]] = {}
    for name, tensor in tensors.items():
        match = _FACTOR.fullmatch(name)
        if match is None or len(tensor.shape) != 2:
            raise _refused(folder, f"it has the tensor {name} {list(tensor.shape)}")
        sides.setdefault(match["layer"], {})[match["side"]] = tensor
    if not sides:
        raise _refused(folder, "it has no tensors")
    pairs = dict[str, _Pair]()
    for layer, pair in sides.items():
        if pair.keys() != {"A", "B"} or pair["A"].shape[0] != pair["B"].shape[1]:
            raise _refused(
                folder, f"lora_A and lora_B of {layer} do not fit each other"
            )
        scale = _scale(config, layer, pair["A"].shape[0], folder / ADAPTER)
        pairs[layer] = _Pair(pair["A"], pair["B"], scale)
    return pairs


def _scale(config: Mapping[str, Any], layer: str, rank: int, path: Path) -> float:
    """Return alpha / r, or alpha / sqrt(r), of a layer.

    Raises:
        ModelError: the configuration has no such numbers, or another rank than the tensors.
    """
    alpha = _number(config, "alpha_pattern", "lora_alpha", layer, path)
    configured = _number(config, "rank_pattern", "r", layer, path)
    if configured != rank:
        raise ModelError(
            f"{path}: the rank of {layer} is {configured:g}, and {rank} in the tensors"
        )
    return alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)


def _number(
    config: Mapping[str, Any], patterns: str, usual: str, layer: str, path: Path
) -> float:
    """Return a number of a layer: by the first pattern that matches its end, else the usual one."""
    value: Any = config.get(usual)
    for pattern, override in (config.get(patterns) or {}).items():
        # As peft matches: the pattern is a regular expression for the last parts of the name.
        if re.fullmatch(rf"(.*\.)?({pattern})", layer):
            value = override
            break
    if type(value) not in (int, float) or not math.isfinite(value):
        raise ModelError(
            f"{path}: {usual} of {layer} is {value!r}; it must be a number"
        )
    return float(value)


def _merged(base: StoredTensor, pair: _Pair, layer: str, module: Any) -> DecodedTensor:
    """Return the weight of a layer with its factors merged; its values are read on demand."""
    kind = kind_of(module)
    weight_shape = tuple(outputs_first(module.weight, kind).shape)
    if weight_shape != (pair.b.shape[0], pair.a.shape[1]):
        raise ModelError(
            f"lora_B and lora_A of {layer} make [{pair.b.shape[0]}, {pair.a.shape[1]}], and"
            f" its weight is {list(weight_shape)}: the adapter belongs to another model"
        )

    def decode() -> Any:
        weight = base.read()
        added = pair.scale * (pair.b.read().float() @ pair.a.read().float())
        # (outputs, inputs); a Conv1D has inputs first.
        total = weight.float() + outputs_first(added, kind)
        return total.to(weight.dtype).contiguous()

    parts = (*base.parts, *pair.a.parts, *pair.b.parts)
    return DecodedTensor(
        base.name, base.shape, base.dtype, base.path, decode=decode, stored=parts
    )
