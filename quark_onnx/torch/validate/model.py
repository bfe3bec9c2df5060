"""Checks for every Hugging Face checkpoint: files, sizes, head, scales and KV cache."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial
from itertools import filterfalse
from typing import Any

import numpy as np

from quark_onnx.containers import present, subset, without
from quark_onnx.torch.validate.checkpoint import INDEX, Checkpoint
from quark_onnx.torch.validate.fields import NO_KEY_OR_NULL
from quark_onnx.torch.validate.finding import REFUSED, WARNING, WRONG, Finding
from quark_onnx.torch.validate.header import FLOATS, Tensor, single_value, values_of
from quark_onnx.torch.validate.modules import (
    EMBEDDING,
    HEAD,
    Module,
    is_known,
    size_of,
    today,
)
from quark_onnx.torch.validate.rules import broken
from quark_onnx.torch.validate.slots import size_findings

#: Upper bound of any model's number; a greater number is damage.
_MOST_LAYERS = 10_000
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
#: Keys of the sizes of a model, with the severity of a missing key.
_TOLD = {
    "hidden_size": REFUSED,
    "intermediate_size": REFUSED,
    "num_hidden_layers": WRONG,  # a layer missing in all files is not noticed
    "num_attention_heads": REFUSED,
    "vocab_size": REFUSED,
}
#: Families with uniform blocks, and the uniform parts of blocks in other families.
_ALIKE = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3", "mixtral"), ""),
    **dict.fromkeys(("qwen2_moe", "qwen3_moe"), r"self_attn\.|\w+_layernorm$"),
}
_BLOCK = re.compile(r"model\.layers\.(\d+)\.(.+)")
_NORM = re.compile(r"model\.(layers\.\d+\.(input|post_attention)_layernorm|norm)")
_LAYER_SCALES = ("weight_scale", "input_scale")
_NO_KEY_OR_EMPTY = "there is no such key, or it is empty"
_SCALE = re.compile(
    r"(weight|input|activation|output|prob_output|[kvq]|kv)(_global)?_scale(_2|_inv)?",
)
_KV_SCALE = re.compile(
    r"\.(?:[kv]_proj\.(?:output_scale|[kv]_scale)|[kv]_scale|kv_scale)$",
)


def file_findings(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Yield errors in the files and their index."""
    yield from checkpoint.damage
    if checkpoint.config:
        for key in ("model_type", "architectures"):
            if not checkpoint.config.get(key):
                yield broken("architecture", f"config.json, {key}", _NO_KEY_OR_EMPTY)
    found = dict[str, list[str]]()
    for file, header in checkpoint.headers.items():
        for name in header.tensors:
            found.setdefault(name, []).append(file)
    for name, files in found.items():
        if len(files) > 1:
            yield broken("tensor-twice", name, f"it is in {' and in '.join(files)}")
    if checkpoint.index is not None:
        yield from _index_findings(checkpoint, checkpoint.index, found)


def _index_findings(
    checkpoint: Checkpoint,
    index: dict[str, str],
    found: dict[str, list[str]],
) -> Iterator[Finding]:
    unread = {finding.place for finding in checkpoint.damage}
    for file in sorted({*index.values()} - {*checkpoint.headers} - unread):
        yield broken("file-missing", file, f"{INDEX} names it")
    for name, file in index.items():
        files = found.get(name, [])
        if file not in checkpoint.headers or file in files:
            continue
        if files:
            text = f"{INDEX} says {file}; it is in {files[0]}"
            yield broken("tensor-misplaced", name, text)
        else:
            text = f"{INDEX} says {file}, which does not have it"
            yield broken("tensor-missing", name, text)
    for name, files in without(found, index).items():
        text = f"{INDEX} does not have it; it is in {files[0]}"
        yield broken("tensor-misplaced", name, text)


def strict_findings(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Yield missing parts of a model, as errors for float models."""
    yield from missing_findings(
        checkpoint,
        WRONG if checkpoint.quantization else REFUSED,
    )


def missing_findings(
    checkpoint: Checkpoint,
    severity: str = WRONG,
) -> Iterator[Finding]:
    """Yield layers and heads that the configuration promises and the files lack."""
    if checkpoint.damage or not checkpoint.headers:
        return
    layers = _layer_numbers(checkpoint)
    count = checkpoint.text_config.get("num_hidden_layers")
    missing = []
    if layers and type(count) is int:
        missing = sorted({*range(min(count, _MOST_LAYERS))} - layers)
    if missing:
        text = (
            f"num_hidden_layers is {count}; layers {_ranges(missing)} have no tensors"
        )
        yield broken("layers-missing", "config.json", text, severity)
    lost = _lost(checkpoint, layers)
    if lost:
        text = "there is no such layer"
        if len(lost) > 1:
            text += f", nor {len(lost) - 1} others"
        yield broken("weights-missing", lost[0], text, severity)
    untied = checkpoint.text_config.get("tie_word_embeddings") is False
    if untied and EMBEDDING in checkpoint.modules and not _has_head(checkpoint):
        text = "tie_word_embeddings is false, and no file has it"
        yield broken("head-missing", f"{HEAD}.weight", text, severity)


def _has_head(checkpoint: Checkpoint) -> bool:
    return any(module.weight is not None for module in checkpoint.heads)


def _layer_numbers(checkpoint: Checkpoint) -> set[int]:
    matches = present(map(_LAYER.search, checkpoint.tensors))
    return {int(match[1]) for match in matches}


def _lost(checkpoint: Checkpoint, layers: set[int]) -> list[str]:
    """Return names that a block lacks compared with others, and outer layers."""
    alike = _ALIKE.get(str(checkpoint.text_config.get("model_type")))
    if alike is None:
        return []
    inside = _names_inside(checkpoint)
    if not inside:
        return []
    blocks = [f"model.layers.{layer}" for layer in sorted(layers)]
    uniform = list(filter(re.compile(alike).match, sorted(inside)))
    wanted = [EMBEDDING]
    for block in blocks:
        wanted += [f"{block}.{name}" for name in uniform]
    wanted.append("model.norm")
    lost = list(filterfalse(partial(_holds, checkpoint), wanted))
    if _has_attention_biases(checkpoint.text_config):
        lost += _lost_biases(checkpoint, blocks)
    return lost


def _holds(checkpoint: Checkpoint, name: str) -> bool:
    """Return whether a layer has tensors; an attention's own are scales of its cache."""
    module = checkpoint.modules.get(name)
    return module is not None and module.last != "attn"


def _names_inside(checkpoint: Checkpoint) -> set[str]:
    """Return the names of layers with weights, without that of their block."""
    names = set()
    for name, module in checkpoint.modules.items():
        found = _BLOCK.fullmatch(name)
        if found and module.weight is not None and _holds(checkpoint, name):
            names.add(found[2])
    return names


def _has_attention_biases(config: dict[str, Any]) -> bool:
    if config.get("attention_bias") is True:
        return True
    own = config.get("model_type") in ("qwen2", "qwen2_moe")
    return own and config.get("qkv_bias") is not False


def _lost_biases(checkpoint: Checkpoint, blocks: list[str]) -> list[str]:
    lost = []
    for block in blocks:
        names = [f"{block}.self_attn.{side}_proj" for side in "qkv"]
        for name, module in subset(checkpoint.modules, names).items():
            if "bias" not in module.tensors:
                lost.append(f"{name}.bias")
    return lost


def value_findings(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Yield scales of layers or outputs that are 0, infinite or NaN.

    Scales of blocks are not read.
    """
    for module in checkpoint.modules.values():
        for name, tensor in module.tensors.items():
            if not _is_small_scale(name, tensor):
                continue
            values = values_of(tensor)
            allowed = np.isfinite(values)
            if tensor.count == 1:
                allowed &= values > 0
            if allowed.all():
                continue
            wrong = values[~allowed][0]
            # clients take the greatest scale of the experts
            unseen = module.experts and name.startswith("input") and wrong == 0
            yield broken(
                "scale-value",
                tensor.name,
                f"it is {wrong:g}",
                WARNING if unseen else WRONG,
            )


def _is_small_scale(name: str, tensor: Tensor) -> bool:
    if not _SCALE.fullmatch(name) or tensor.dtype not in FLOATS:
        return False
    return len(tensor.shape) <= 1 and tensor.count > 0


def told_findings(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Yield sizes that a configuration lacks, where clients use another model's."""
    # the configuration of a part may omit defaults of its family
    config = checkpoint.config
    if not is_known(config):
        return
    for key, severity in _TOLD.items():
        if config.get(key) is None:
            place = f"config.json, {key}"
            yield broken("size-missing", place, NO_KEY_OR_NULL, severity)


def layer_findings(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Yield float layers of a wrong size, and layers that should be matrices."""
    config = checkpoint.text_config
    rows, hidden = config.get("vocab_size"), config.get("hidden_size")
    for module in checkpoint.modules.values():
        weight = module.weight
        if weight is None:
            continue
        demanded = size_of(module.name, config)
        if type(hidden) is int:
            yield from _norm_findings(config, module, weight, hidden)
            if type(rows) is int and module.name in (EMBEDDING, HEAD):
                demanded = rows, hidden
        if len(weight.shape) != 2:
            if demanded is not None:
                text = f"it has {weight}; config.json says (out, in) = {demanded}"
                yield broken("weight-shape", module.name, text)
        elif weight.dtype in FLOATS and not module.is_quantized:
            yield from size_findings(module, weight.shape, demanded)


def _norm_findings(
    config: dict[str, Any],
    module: Module,
    weight: Tensor,
    hidden: int,
) -> Iterator[Finding]:
    is_norm = config.get("model_type") in _ALIKE and _NORM.fullmatch(module.name)
    if is_norm and weight.shape != (hidden,):
        text = f"it has {weight}; config.json says [{hidden}]"
        yield broken("weight-shape", module.name, text)


def head_findings(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Yield a stored head that is tied to the embedding."""
    if checkpoint.text_config.get("tie_word_embeddings") is not True:
        return
    for module in checkpoint.heads:
        if module.weight is not None:
            text = "tie_word_embeddings is true, and the file has it"
            yield broken("head-tied", f"{module.name}.weight", text)


def scale_findings(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Yield scales without a weight, and KV cache scales without calibration."""
    for module in checkpoint.modules.values():
        scales = [name for name in module.tensors if name.startswith(_LAYER_SCALES)]
        if scales and module.weight is None:
            yield broken(
                "scale-alone",
                module.name,
                f"{', '.join(sorted(module.tensors))} without a weight",
                REFUSED if module.is_head else WRONG,
            )
    yield from _cache_scale_findings(checkpoint)


def _cache_scale_findings(checkpoint: Checkpoint) -> Iterator[Finding]:
    names = [name for name in checkpoint.tensors if _KV_SCALE.search(today(name))]
    scales = [single_value(checkpoint.tensors[name]) for name in names]
    if not scales or None in scales:
        return
    if set(scales) == {1.0}:
        text = f"all {len(names)} scales of the KV cache are 1.0"
        yield broken("kv-scales-one", names[0], text)
    # two layers may have equal scales by chance
    elif len(names) > 2 and len(set(scales)) == 1:
        text = f"all {len(names)} scales of the KV cache are {scales[0]:.6g}"
        yield broken("kv-scales-equal", names[0], text)


def name_findings(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Yield scales with the names of an earlier generation."""
    for name in checkpoint.tensors:
        if today(name) != name:
            yield broken(
                "scale-names",
                name,
                f"it is {today(name).rpartition('.')[2]} today",
            )


def float_findings(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Yield quantized tensors that no configuration declares."""
    for module in checkpoint.modules.values():
        if module.is_quantized and not module.name.endswith("rotary_emb"):
            text = f"its weight is {module.weight}, and there is no quantization_config"
            yield broken("undeclared", module.name, text)


def quantized_head_findings(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Yield a quantized head, where the client expects a float head."""
    for module in checkpoint.heads:
        if module.is_quantized:
            yield broken(
                "head-quantized", module.name, f"its weight is {module.weight}"
            )


def _ranges(numbers: list[int]) -> str:
    shown = ", ".join(map(str, numbers[:5]))
    if len(numbers) <= 5:
        return shown
    return f"{shown}, ... ({len(numbers)} in all)"
