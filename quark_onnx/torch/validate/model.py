"""Checks for every Hugging Face checkpoint: files, sizes, head, scales and KV cache."""

from __future__ import annotations

import re
from collections.abc import Iterator

import numpy as np

from quark_onnx.torch.validate.checkpoint import INDEX, Checkpoint
from quark_onnx.torch.validate.finding import REFUSED, WARNING, WRONG, Finding
from quark_onnx.torch.validate.header import FLOATS, values_of
from quark_onnx.torch.validate.modules import EMBEDDING, HEAD, is_known, size_of, today
from quark_onnx.torch.validate.rules import broken
from quark_onnx.torch.validate.slots import size_findings

#: Upper bound of any model's number; a greater number is damage.
_MOST_LAYERS = 10_000
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
#: Keys of the sizes of a model.
_TOLD = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "vocab_size",
)
#: Families with uniform blocks, and the uniform parts of blocks in other families.
_ALIKE = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3", "mixtral"), ""),
    **dict.fromkeys(("qwen2_moe", "qwen3_moe"), r"self_attn\.|\w+_layernorm$"),
}
_BLOCK = re.compile(r"model\.layers\.(\d+)\.(.+)")
_NORM = re.compile(r"model\.(layers\.\d+\.(input|post_attention)_layernorm|norm)")
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
                yield broken(
                    "architecture",
                    f"config.json, {key}",
                    "there is no such key, or it is empty",
                )
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
        if file in checkpoint.headers and file not in found.get(name, ()):
            elsewhere = found.get(name)
            if elsewhere:
                yield broken(
                    "tensor-misplaced",
                    name,
                    f"{INDEX} says {file}; it is in {elsewhere[0]}",
                )
            else:
                yield broken(
                    "tensor-missing",
                    name,
                    f"{INDEX} says {file}, which does not have it",
                )
    for name in found:
        if name not in index:
            yield broken(
                "tensor-misplaced",
                name,
                f"{INDEX} does not have it; it is in {found[name][0]}",
            )


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
    config, modules = checkpoint.text_config, checkpoint.modules
    layers = {
        int(found[1]) for name in checkpoint.tensors if (found := _LAYER.search(name))
    }
    count = config.get("num_hidden_layers")
    if (
        type(count) is int
        and layers
        and (missing := sorted({*range(min(count, _MOST_LAYERS))} - layers))
    ):
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
    heads = any(
        module.is_head and module.weight is not None for module in modules.values()
    )
    if (
        config.get("tie_word_embeddings") is False
        and not heads
        and EMBEDDING in modules
    ):
        yield broken(
            "head-missing",
            f"{HEAD}.weight",
            "tie_word_embeddings is false, and no file has it",
            severity,
        )


def _lost(checkpoint: Checkpoint, layers: set[int]) -> list[str]:
    """Return names that a block lacks compared with others, and outer layers."""
    alike = _ALIKE.get(str(checkpoint.text_config.get("model_type")))
    held = {
        name
        for name, module in checkpoint.modules.items()
        if module.tensors and not module.name.endswith(".attn")
    }
    found = [
        match
        for name in held
        if (match := _BLOCK.fullmatch(name))
        and checkpoint.modules[name].weight is not None
    ]
    if alike is None or not found:
        return []
    inside = sorted({match[2] for match in found if re.match(alike, match[2])})
    blocks = [f"model.layers.{layer}" for layer in sorted(layers)]
    wanted = [
        EMBEDDING,
        *(f"{block}.{name}" for block in blocks for name in inside),
        "model.norm",
    ]
    lost = [name for name in wanted if name not in held]
    config = checkpoint.text_config
    own = (
        config.get("model_type") in ("qwen2", "qwen2_moe")
        and config.get("qkv_bias") is not False
    )
    if own or config.get("attention_bias") is True:
        names = [f"{block}.self_attn.{side}_proj" for block in blocks for side in "qkv"]
        layered = [checkpoint.modules[name] for name in names if name in held]
        lost += [
            f"{module.name}.bias" for module in layered if "bias" not in module.tensors
        ]
    return lost


def value_findings(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Yield scales of layers or outputs that are 0, infinite or NaN.

    Scales of blocks are not read.
    """
    for module in checkpoint.modules.values():
        for name, tensor in module.tensors.items():
            if (
                not _SCALE.fullmatch(name)
                or tensor.dtype not in FLOATS
                or len(tensor.shape) > 1
                or not tensor.count
            ):
                continue
            values = values_of(tensor)
            wrong = values[
                ~np.isfinite(values) | (values <= 0 if tensor.count == 1 else False)
            ]
            if len(wrong):
                # clients take the greatest scale of the experts
                unseen = module.experts and name.startswith("input") and wrong[0] == 0
                yield broken(
                    "scale-value",
                    tensor.name,
                    f"it is {wrong[0]:g}",
                    WARNING if unseen else WRONG,
                )


def told_findings(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Yield sizes that a configuration lacks, where clients use another model's."""
    config = (
        checkpoint.config
    )  # the configuration of a part may omit defaults of its family
    if is_known(config):
        for key in (key for key in _TOLD if config.get(key) is None):
            severity = (
                WRONG if key == "num_hidden_layers" else REFUSED
            )  # a layer missing in all files is not noticed
            yield broken(
                "size-missing",
                f"config.json, {key}",
                "there is no such key, or it is null",
                severity,
            )


def layer_findings(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Yield float layers of a wrong size, and layers that should be matrices."""
    config = checkpoint.text_config
    rows, hidden = config.get("vocab_size"), config.get("hidden_size")
    for module in checkpoint.modules.values():
        weight = module.weight
        norm = (
            config.get("model_type") in _ALIKE
            and weight is not None
            and _NORM.fullmatch(module.name)
        )
        if (
            norm
            and type(hidden) is int
            and weight is not None
            and weight.shape != (hidden,)
        ):
            yield broken(
                "weight-shape",
                module.name,
                f"it has {weight}; config.json says [{hidden}]",
            )
        if weight is None:
            continue
        demanded = size_of(module.name, config)
        if (
            module.name in (EMBEDDING, HEAD)
            and type(rows) is int
            and type(hidden) is int
        ):
            demanded = rows, hidden
        matrix = len(weight.shape) == 2
        if not matrix and demanded is not None:
            yield broken(
                "weight-shape",
                module.name,
                f"it has {weight}; config.json says (out, in) = {demanded}",
            )
        elif matrix and weight.dtype in FLOATS and not module.is_quantized:
            yield from size_findings(module, weight.shape, demanded)


def head_findings(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Yield a stored head that is tied to the embedding."""
    for module in checkpoint.modules.values():
        if (
            module.is_head
            and module.weight is not None
            and checkpoint.text_config.get("tie_word_embeddings") is True
        ):
            yield broken(
                "head-tied",
                f"{module.name}.weight",
                "tie_word_embeddings is true, and the file has it",
            )


def scale_findings(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Yield scales without a weight, and KV cache scales without calibration."""
    for module in checkpoint.modules.values():
        if module.weight is None and any(
            name.startswith(("weight_scale", "input_scale")) for name in module.tensors
        ):
            text = f"{', '.join(sorted(module.tensors))} without a weight"
            yield broken(
                "scale-alone",
                module.name,
                text,
                REFUSED if module.is_head else WRONG,
            )
    names = [name for name in checkpoint.tensors if _KV_SCALE.search(today(name))]
    tensors = [checkpoint.tensors[name] for name in names]
    if not tensors or any(
        tensor.count != 1 or tensor.dtype not in FLOATS for tensor in tensors
    ):
        return
    values = np.concatenate([values_of(tensor) for tensor in tensors])
    if (values == 1).all():
        yield broken(
            "kv-scales-one",
            names[0],
            f"all {len(names)} scales of the KV cache are 1.0",
        )
    elif len(names) > 2 and (values == values[0]).all():
        yield broken(
            "kv-scales-equal",
            names[0],
            f"all {len(names)} scales of the KV cache are {values[0]:.6g}",
        )


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
        if (
            module.is_quantized
            and module.weight is not None
            and not module.name.endswith("rotary_emb")
        ):
            yield broken(
                "undeclared",
                module.name,
                f"its weight is {module.weight}, and there is no quantization_config",
            )


def quantized_head_findings(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Yield a quantized head, where the client expects a float head."""
    for module in checkpoint.modules.values():
        if module.is_head and module.is_quantized:
            yield broken(
                "head-quantized",
                module.name,
                f"its weight is {module.weight}",
            )


def _ranges(numbers: list[int]) -> str:
    shown = ", ".join(str(number) for number in numbers[:5])
    if len(numbers) <= 5:
        return shown
    return f"{shown}, ... ({len(numbers)} in all)"
