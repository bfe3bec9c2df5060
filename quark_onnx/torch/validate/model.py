"""Checks for every Hugging Face checkpoint: files, sizes, head, scales and KV cache."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from functools import partial
from itertools import filterfalse
from typing import Any

from quark_onnx.common.containers import present, subset, without
from quark_onnx.torch.validate.checkpoint import INDEX, Checkpoint
from quark_onnx.torch.validate.fields import (
    NO_KEY_OR_NULL,
    QUANTIZATION,
    FieldCheck,
    field_findings,
    is_given,
    is_positive,
    is_set,
    shown,
)
from quark_onnx.torch.validate.finding import REFUSED, WRONG, Finding
from quark_onnx.torch.validate.header import FLOATS, Tensor, single_value
from quark_onnx.torch.validate.modules import (
    EMBEDDING,
    HEAD,
    Module,
    integers,
    is_known,
    size_of,
    today,
)
from quark_onnx.torch.validate.rules import broken
from quark_onnx.torch.validate.slots import size_findings

#: Upper bound of any model's number; a greater number is damage.
_MOST_LAYERS = 10_000
#: Blocks at any depth: "model.layers.3.", "language_model.model.layers.3.", "layers.3.".
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
_NO_KEY_OR_EMPTY = "there is no such key, or it is empty"
#: Keys by which clients choose the class of the model.
_ARCHITECTURE_CHECKS = (
    FieldCheck("architecture", "model_type", is_set, _NO_KEY_OR_EMPTY),
    FieldCheck("architecture", "architectures", is_set, _NO_KEY_OR_EMPTY),
)


def _is_count_or_null(value: object) -> bool:
    """Return whether a value is a positive integer, or missing."""
    return value is None or is_positive(value)


#: Keys of the sizes of a model.
_SIZE_CHECKS = (
    FieldCheck("size-missing", "hidden_size", is_positive, absent=NO_KEY_OR_NULL),
    FieldCheck("size-missing", "intermediate_size", is_positive, absent=NO_KEY_OR_NULL),
    # a layer missing in all files is not noticed
    FieldCheck(
        "size-missing",
        "num_hidden_layers",
        is_given,
        absent=NO_KEY_OR_NULL,
        severity=WRONG,
    ),
    FieldCheck("size-missing", "num_hidden_layers", _is_count_or_null),
    FieldCheck(
        "size-missing", "num_attention_heads", is_positive, absent=NO_KEY_OR_NULL
    ),
    FieldCheck("size-missing", "vocab_size", is_positive, absent=NO_KEY_OR_NULL),
)
#: Families with uniform blocks, and the uniform parts of blocks in other families.
_ALIKE = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3", "mixtral"), ""),
    **dict.fromkeys(("qwen2_moe", "qwen3_moe"), r"self_attn\.|\w+_layernorm$"),
}
_BLOCK = re.compile(r"model\.layers\.(\d+)\.(.+)")
#: Norms over the hidden state; those of heads (q_norm, k_norm) have another length.
_NORM = re.compile(r"model\.(layers\.\d+\.(input|post_attention)_layernorm|norm)")
_LAYER_SCALES = ("weight_scale", "input_scale")
#: Scales of a KV cache under all names that clients look for.
_KV_SCALE = re.compile(
    r"\.(?:[kv]_proj\.(?:output_scale|[kv]_scale)|[kv]_scale|kv_scale)$",
)


def file_findings(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Yield errors in the files and their index."""
    yield from checkpoint.damage
    # a configuration that cannot be read is a finding of its own
    if checkpoint.config:
        yield from _config_findings(checkpoint, _ARCHITECTURE_CHECKS)
    files_of = _files_by_tensor(checkpoint)
    for name, files in files_of.items():
        # which of the two a client reads depends on the order in which it opens the files
        if len(files) > 1:
            yield broken("tensor-twice", name, f"it is in {' and in '.join(files)}")
    if checkpoint.index is not None:
        yield from _index_findings(checkpoint, checkpoint.index, files_of)


def _config_findings(
    checkpoint: Checkpoint,
    checks: Iterable[FieldCheck],
) -> Iterator[Finding]:
    """Yield a finding for every field of config.json that does not meet its check."""
    return field_findings(checkpoint.config, "config.json", checks, separator=", ")


def _files_by_tensor(checkpoint: Checkpoint) -> dict[str, list[str]]:
    """Return the names of the files of a tensor, by the tensor's name."""
    files_of = dict[str, list[str]]()
    for file, header in checkpoint.headers.items():
        for name in header.tensors:
            files_of.setdefault(name, []).append(file)
    return files_of


def _index_findings(
    checkpoint: Checkpoint,
    index: dict[str, str],
    files_of: dict[str, list[str]],
) -> Iterator[Finding]:
    """Yield differences between the index and the files.

    Args:
        checkpoint: the checkpoint.
        index: file name by tensor name, from the index.
        files_of: names of the files that hold a tensor, by the tensor's name.
    """
    # a damaged file has a finding of its own, and is not missing
    unread = {finding.place for finding in checkpoint.damage}
    for file in sorted({*index.values()} - {*checkpoint.headers} - unread):
        # an empty name is no place
        yield broken("file-missing", file or INDEX, f"{INDEX} names {file!r}")
    for name, file in index.items():
        # tensors of an unread file are not known
        if file in checkpoint.headers:
            yield from _entry_findings(name, file, files_of.get(name, []))
    for name, files in without(files_of, index).items():
        text = f"{INDEX} does not have it; it is in {files[0]}"
        yield broken("tensor-misplaced", name, text)


def _entry_findings(name: str, file: str, files: list[str]) -> Iterator[Finding]:
    """Yield an index entry with a wrong file.

    Args:
        name: name of the tensor.
        file: name of the file in the index.
        files: names of the files that hold the tensor; empty if none does.
    """
    if not files:
        text = f"{INDEX} says {file}, which does not have it"
        yield broken("tensor-missing", name, text)
    elif file not in files:
        text = f"{INDEX} says {file}; it is in {files[0]}"
        yield broken("tensor-misplaced", name, text)


def strict_findings(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Yield missing parts of a model, as errors for float models.

    Args:
        checkpoint: the checkpoint; its quantization is empty for a float model.
    """
    yield from missing_findings(
        checkpoint,
        # vLLM checks for weights that were not initialized only in models without quantization
        WRONG if checkpoint.quantization else REFUSED,
    )


def missing_findings(
    checkpoint: Checkpoint,
    severity: str = WRONG,
) -> Iterator[Finding]:
    """Yield layers and heads that the configuration promises and the files lack.

    Args:
        checkpoint: the checkpoint; nothing is yielded if a file is missing or damaged, since the
            tensors of the file are unknown.
        severity: consequence of a missing part for the client.

    Yields:
        At most three findings: missing blocks, missing layers together, and a missing head.
    """
    if not checkpoint.is_whole or not checkpoint.headers:
        return
    layers = _layer_numbers(checkpoint)
    yield from _missing_block_findings(checkpoint, layers, severity)
    lost = _lost(checkpoint, layers)
    if lost:
        text = "there is no such layer"
        if len(lost) > 1:
            text += f", nor {len(lost) - 1} others"
        yield broken("weights-missing", lost[0], text, severity)
    if _lacks_head(checkpoint):
        text = "tie_word_embeddings is false, and no file has it"
        yield broken("head-missing", f"{HEAD}.weight", text, severity)


def _lacks_head(checkpoint: Checkpoint) -> bool:
    """Return whether a language model without a tied head has no head."""
    # a classifier has a head of another name, and a bare model none
    if not checkpoint.generates:
        return False
    # families differ in the default, so that only an explicit false demands a head
    if checkpoint.text_config.get("tie_word_embeddings") is not False:
        return False
    return EMBEDDING in checkpoint.modules and not _has_head(checkpoint)


def _missing_block_findings(
    checkpoint: Checkpoint,
    layers: set[int],
    severity: str,
) -> Iterator[Finding]:
    """Yield blocks within num_hidden_layers that have no tensors.

    Args:
        checkpoint: the checkpoint.
        layers: numbers of the blocks that have tensors.
        severity: severity of the finding.
    """
    count = checkpoint.text_config.get("num_hidden_layers")
    # a model without blocks, or of a family with other names for them
    if not layers or type(count) is not int:
        return
    # the bound keeps a number such as 10**12 from filling the memory
    missing = sorted({*range(min(count, _MOST_LAYERS))} - layers)
    if missing:
        text = (
            f"num_hidden_layers is {count}; layers {_ranges(missing)} have no tensors"
        )
        yield broken("layers-missing", "config.json", text, severity)


def _has_head(checkpoint: Checkpoint) -> bool:
    """Return whether a module that computes logits has a weight."""
    return any(module.weight is not None for module in checkpoint.heads)


def _layer_numbers(checkpoint: Checkpoint) -> set[int]:
    """Return the numbers of the stored blocks."""
    matches = present(map(_LAYER.search, checkpoint.tensors))
    return {int(match[1]) for match in matches}


def _lost(checkpoint: Checkpoint, layers: set[int]) -> list[str]:
    """Return names that a block lacks compared with others, and outer layers.

    Args:
        checkpoint: the checkpoint.
        layers: numbers of the blocks that have tensors.

    Returns:
        Full names in the order of the model, then the names of missing biases; empty for families
        whose blocks differ from each other.
    """
    # None for families whose blocks differ among each other: nothing can be compared there
    alike = _ALIKE.get(str(checkpoint.text_config.get("model_type")))
    inside = _names_inside(checkpoint)
    if alike is None or not inside:
        return []
    blocks = [f"model.layers.{layer}" for layer in sorted(layers)]
    # the empty expression of uniform families matches every name
    uniform = list(filter(re.compile(alike).match, sorted(inside)))
    wanted = [EMBEDDING]
    for block in blocks:
        wanted += [f"{block}.{name}" for name in uniform]
    # the order of the model, so that the first missing layer is the one that is named
    wanted.append("model.norm")
    lost = list(filterfalse(partial(_holds, checkpoint), wanted))
    if _has_attention_biases(checkpoint.text_config):
        lost += _lost_biases(checkpoint, blocks)
    return lost


def _holds(checkpoint: Checkpoint, name: str) -> bool:
    """Return whether a layer has tensors; an attention's own are scales of its cache."""
    module = checkpoint.modules.get(name)
    # scales of the KV cache may be called self_attn.attn.k_scale, though no layer is called so
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
    """Return whether queries, keys and values have biases.

    Qwen2's have biases unless the configuration says otherwise, those of other families only if it
    says so.
    """
    if config.get("attention_bias") is True:
        return True
    is_qwen2 = config.get("model_type") in ("qwen2", "qwen2_moe")
    return is_qwen2 and config.get("qkv_bias") is not False


def _lost_biases(checkpoint: Checkpoint, blocks: list[str]) -> list[str]:
    """Return the names of missing biases of queries, keys and values.

    Args:
        checkpoint: the checkpoint.
        blocks: names of the blocks that have tensors.

    Returns:
        Full names of the tensors; biases of layers that are missing themselves are left out.
    """
    lost = []
    for block in blocks:
        # a layer that is missing altogether is in ``lost`` already
        names = [f"{block}.self_attn.{side}_proj" for side in "qkv"]
        for name, module in subset(checkpoint.modules, names).items():
            if "bias" not in module.tensors:
                lost.append(f"{name}.bias")
    return lost


def told_findings(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Yield sizes that a configuration lacks, where clients use another model's."""
    # the configuration of a part may omit defaults of its family
    if is_known(checkpoint.config):
        yield from _config_findings(checkpoint, _SIZE_CHECKS)


def layer_findings(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Yield float layers of a wrong size, and layers that should be matrices."""
    config = checkpoint.text_config
    for module in checkpoint.modules.values():
        weight = module.weight
        if weight is not None:
            if module.has_bare_integers:
                text = f"the type is {weight.dtype}; it must be a float"
                yield broken("tensor-type", weight.name, text)
            yield from _norm_findings(config, module, weight)
            yield from _matrix_findings(config, module, weight)


def _norm_findings(
    config: dict[str, Any],
    module: Module,
    weight: Tensor,
) -> Iterator[Finding]:
    """Yield a norm of a known family with a length unlike hidden_size.

    Args:
        config: configuration of the language model.
        module: the layer, which need not be a norm.
        weight: its weight.
    """
    hidden = config.get("hidden_size")
    is_norm = config.get("model_type") in _ALIKE and _NORM.fullmatch(module.name)
    if is_norm and type(hidden) is int and weight.shape != (hidden,):
        text = f"it has {weight}; config.json says [{hidden}]"
        yield broken("weight-shape", module.name, text)


def _matrix_findings(
    config: dict[str, Any],
    module: Module,
    weight: Tensor,
) -> Iterator[Finding]:
    """Yield a misshapen layer, or a float matrix of a wrong size.

    Args:
        config: configuration of the language model.
        module: the layer.
        weight: its weight.
    """
    if module.name in (EMBEDDING, HEAD):
        demanded = integers(config.get("vocab_size"), config.get("hidden_size"))
    else:
        # None for layers whose size the configuration does not give; then only the axes can be
        # checked
        demanded = size_of(module.name, config)
    if len(weight.shape) == 2:
        # the size of a quantized matrix follows from its scheme, which the layout's checks know
        if weight.dtype in FLOATS and not module.is_quantized:
            yield from size_findings(module, weight.shape, demanded)
    # a known Linear with one axis or three: no client loads such a weight
    elif demanded is not None:
        text = f"it has {weight}; config.json says (out, in) = {demanded}"
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
        # the weight may be in a file that was not read
        if scales and module.weight is None and checkpoint.is_whole:
            yield broken(
                "scale-alone",
                module.name,
                f"{', '.join(sorted(module.tensors))} without a weight",
                # the weight of a Linear stays uninitialized; a float head has no parameter for a
                # scale
                REFUSED if module.is_head else WRONG,
            )
    yield from _cache_scale_findings(checkpoint)


def _cache_scale_findings(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Yield equal KV cache scales in all layers, a sign of missing calibration.

    Args:
        checkpoint: the checkpoint. Nothing is yielded if a scale has several values.
    """
    scales = dict[str, float | None]()
    for name, tensor in checkpoint.tensors.items():
        if _KV_SCALE.search(today(name)):
            scales[name] = single_value(tensor)
    values = set(scales.values())
    # None stands for scales of heads, which are several values; no names at all give an empty set
    if None in values or len(values) != 1:
        return
    (value,) = values
    first, count = next(iter(scales)), len(scales)
    if value == 1.0:
        text = f"all {count} scales of the KV cache are 1.0"
        yield broken("kv-scales-one", first, text)
    # two layers may have equal scales by chance
    elif count > 2:
        text = f"all {count} scales of the KV cache are {value:.6g}"
        yield broken("kv-scales-equal", first, text)


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
    # what an unreadable configuration declares is not known
    if not checkpoint.config:
        return
    given = checkpoint.config.get("quantization_config")
    if given:
        text = f"{shown(given)}, and not an object"
        yield broken("malformed", QUANTIZATION, text)
        return
    for module in checkpoint.modules.values():
        # inv_freq of rotary embeddings is a buffer that old files store
        is_buffer = module.name.endswith("rotary_emb")
        # integers without a scale have a finding of their own
        is_asked = not is_buffer and not module.has_bare_integers
        if module.is_quantized and is_asked:
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
    """Return the first five numbers as text, and how many there are if there are more."""
    shown = ", ".join(map(str, numbers[:5]))
    if len(numbers) <= 5:
        return shown
    return f"{shown}, ... ({len(numbers)} in all)"
