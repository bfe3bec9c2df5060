"""Checks for every Hugging Face checkpoint: files, sizes, head, scales and KV cache."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from importlib.util import find_spec
from typing import Any

import numpy as np

from quark_onnx.common.containers import grouped
from quark_onnx.torch.runtime.safetensors_header import (
    FLOATS,
    StoredTensor,
    raw_values_of,
    single_value,
    values_of,
)
from quark_onnx.torch.validate.checkpoint import CONFIG, INDEX, Checkpoint
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
from quark_onnx.torch.validate.finding import REFUSED, WARNING, WRONG, Finding
from quark_onnx.torch.validate.layer_checks import size_findings
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

# Files and configuration

_NO_KEY_OR_EMPTY = "there is no such key, or it is empty"
#: Settings of AutoAWQ and GPTQ, under the names of both tools.
_SETTINGS = (
    ("quant_method",),
    ("bits", "w_bit"),
    ("group_size", "q_group_size"),
    ("sym",),
    ("zero_point",),
    ("desc_act",),
    ("dynamic",),
    ("modules_to_not_convert",),
)


def file_findings(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Yield errors in the files and their index."""
    yield from checkpoint.damage
    # a configuration that cannot be read is a finding of its own
    if checkpoint.config:
        # keys by which clients choose the class of the model
        yield from field_findings(
            checkpoint.config,
            CONFIG,
            FieldCheck("architecture", "model_type", is_set, _NO_KEY_OR_EMPTY),
            FieldCheck("architecture", "architectures", is_set, _NO_KEY_OR_EMPTY),
            separator=", ",
        )
    files_of = grouped(
        (name, file)
        for file, header in checkpoint.headers.items()
        for name in header.tensors
    )
    for name, files in files_of.items():
        # which of the two a client reads depends on the order in which it opens the files
        if len(files) > 1:
            yield broken("tensor-twice", name, f"it is in {' and in '.join(files)}")
    if checkpoint.index is not None:
        yield from _index_findings(checkpoint, checkpoint.index, files_of)


def _index_findings(
    checkpoint: Checkpoint, index: dict[str, str], files_of: dict[str, list[str]]
) -> Iterator[Finding]:
    """Yield differences between the index and the files, which are given by tensor name."""
    # a damaged file has a finding of its own, and is not missing
    unread = {finding.place for finding in checkpoint.damage}
    for file in sorted({*index.values()} - {*checkpoint.headers} - unread):
        # an empty name is no place
        yield broken("file-missing", file or INDEX, f"{INDEX} names {file!r}")
    for name, file in index.items():
        # tensors of an unread file are not known
        if file not in checkpoint.headers:
            continue
        files = files_of.get(name, [])
        if not files:
            text = f"{INDEX} says {file}, which does not have it"
            yield broken("tensor-missing", name, text)
        elif file not in files:
            text = f"{INDEX} says {file}; it is in {files[0]}"
            yield broken("tensor-misplaced", name, text)
    for name, files in files_of.items():
        if name not in index:
            text = f"{INDEX} does not have it; it is in {files[0]}"
            yield broken("tensor-misplaced", name, text)


def settings_findings(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Yield settings in which other files contradict config.json.

    vLLM and transformers read config.json alone. ``QuantizeConfig.from_pretrained`` of GPTQModel
    reads the first file that is there: ``QUANT_CONFIG_FILENAME_COMPAT`` has config.json last.
    """
    entries = checkpoint.quantization
    for file, settings in checkpoint.settings.items():
        for names in _SETTINGS:
            here = [name for name in names if name in settings]
            there = [name for name in names if name in entries]
            if here and not entries:
                yield broken("settings-differ", file, f"{CONFIG} has no {QUANTIZATION}")
                break
            if here and there:
                value, other = settings[here[0]], entries[there[0]]
                # null, false and an empty list are equal to all readers
                if (value or None) != (other or None):
                    text = f"{shown(value)}; {CONFIG} says {shown(other)}"
                    yield broken("settings-differ", f"{file}, {here[0]}", text)


def _is_count_or_null(value: object) -> bool:
    """Return whether a value is a positive integer, or missing."""
    return value is None or is_positive(value)


def told_findings(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Yield sizes that a configuration lacks, where clients use another model's."""
    # the configuration of a part may omit defaults of its family
    if not is_known(checkpoint.config):
        return
    rule, absent = "size-missing", NO_KEY_OR_NULL
    layers = "num_hidden_layers"
    yield from field_findings(
        checkpoint.config,
        CONFIG,
        FieldCheck(rule, "hidden_size", is_positive, absent=absent),
        FieldCheck(rule, "intermediate_size", is_positive, absent=absent),
        # a layer missing in all files is not noticed
        FieldCheck(rule, layers, is_given, absent=absent, severity=WRONG),
        FieldCheck(rule, layers, _is_count_or_null),
        FieldCheck(rule, "num_attention_heads", is_positive, absent=absent),
        FieldCheck(rule, "vocab_size", is_positive, absent=absent),
        separator=", ",
    )


#: Types that vLLM has, and transformers lacks: ``_CONFIG_REGISTRY`` of
#: vllm/transformers_utils/config.py.
IN_VLLM = frozenset(
    {
        "bagel",
        "bailing_moe_v3_vl",
        "chatglm",
        "modernvbert",
        "colpali",
        "colqwen3",
        "ops_colqwen3",
        "qwen3_vl_nemotron_embed",
        "cosmos3_edge",
        "deepseek_vl_v2",
        "deepseek_v32",
        "deepseek_v4",
        "deepseek_v41",
        "dots3_note",
        "k3_dspark",
        "funaudiochat",
        "hy_v4",
        "hyperclovax",
        "isaac",
        "kimi_k2",
        "kimi_linear",
        "kimi_vl",
        "kimi_k25",
        "kimi_k3",
        "muse_glimmer",
        "muse_glimmer_text",
        "muse_glimmer_vision",
        "muse_glimmer_assistant",
        "RefinedWeb",
        "RefinedWebModel",
        "mlp_speculator",
        "medusa",
        "midashenglm",
        "minimax_m3_vl",
        "minimax_m3_mtp",
        "moondream3",
        "moss_transcribe_diarize",
        "eagle",
        "speculators",
        "openvla",
        "ovis",
        "ultravox",
        "step3_vl",
        "step3_text",
        "step3p5",
        "qianfan_ocr",
        "qwen3_asr",
        "unlimited-ocr",
        "unlimited_ocr",
        "inkling_mm_model",
        "inkling_model",
    }
)


def code_findings(
    client_types: Collection[str], checkpoint: Checkpoint
) -> Iterator[Finding]:
    """Yield a finding for a model type that is known to the files of the checkpoint alone.

    Args:
        client_types: types that the client knows in addition to those of transformers.
        checkpoint: configuration and headers.
    """
    kind = checkpoint.config.get("model_type")
    # with a class of its own, a client leaves the files of the checkpoint alone
    if not checkpoint.config.get("auto_map") or kind in client_types:
        return
    place = f"{CONFIG}, auto_map"
    if find_spec("transformers") is None:
        text = f"transformers, which tells whether {kind!r} is known, is not installed"
        yield broken("own-code", place, text, WARNING)
        return
    from transformers import CONFIG_MAPPING

    if kind not in CONFIG_MAPPING:
        text = f"{kind!r} is a model whose code is in the checkpoint"
        yield broken("own-code", place, text)


# Missing parts

#: Upper bound of any model's number; a greater number is damage.
_MOST_LAYERS = 10_000
#: Blocks at any depth: "model.layers.3.", "language_model.model.layers.3.", "layers.3.".
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
#: Families with uniform blocks, and the uniform parts of blocks in other families.
_ALIKE = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3", "mixtral"), ""),
    **dict.fromkeys(("qwen2_moe", "qwen3_moe"), r"self_attn\.|\w+_layernorm$"),
}
_BLOCK = re.compile(r"model\.layers\.(\d+)\.(.+)")


def strict_findings(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Yield missing parts of a model, as errors for float models."""
    # vLLM checks for weights that were not initialized only in models without quantization
    severity = WRONG if checkpoint.quantization else REFUSED
    return missing_findings(checkpoint, severity)


def missing_findings(
    checkpoint: Checkpoint, severity: str = WRONG
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
    matches = map(_LAYER.search, checkpoint.tensors)
    layers = {int(match[1]) for match in matches if match}
    count = checkpoint.text_config.get("num_hidden_layers")
    # a model without blocks, or of a family with other names for them
    if layers and type(count) is int:
        # the bound keeps a number such as 10**12 from filling the memory
        missing = sorted({*range(min(count, _MOST_LAYERS))} - layers)
        if missing:
            numbers = ", ".join(map(str, missing[:5]))
            if len(missing) > 5:
                numbers += f", ... ({len(missing)} in all)"
            text = f"num_hidden_layers is {count}; layers {numbers} have no tensors"
            yield broken("layers-missing", CONFIG, text, severity)
    lost = _lost(checkpoint, layers)
    if lost:
        text = "there is no such layer"
        if len(lost) > 1:
            text += f", nor {len(lost) - 1} others"
        yield broken("weights-missing", lost[0], text, severity)
    # families differ in the default, so that only an explicit false demands a head; a classifier
    # has a head of another name, and a bare model none
    is_untied = checkpoint.text_config.get("tie_word_embeddings") is False
    has_head = any(module.weight is not None for module in checkpoint.heads)
    if (
        checkpoint.generates
        and is_untied
        and EMBEDDING in checkpoint.modules
        and not has_head
    ):
        text = "tie_word_embeddings is false, and no file has it"
        yield broken("head-missing", f"{HEAD}.weight", text, severity)


def _lost(checkpoint: Checkpoint, layers: set[int]) -> list[str]:
    """Return names that a block with tensors lacks compared with others, and outer layers.

    Returns:
        Full names in the order of the model, then the names of missing biases; empty for families
        whose blocks differ from each other.
    """
    # None for families whose blocks differ among each other: nothing can be compared there
    alike = _ALIKE.get(str(checkpoint.text_config.get("model_type")))
    # names of layers with weights, without that of their block
    inside = set[str]()
    for name, module in checkpoint.modules.items():
        match = _BLOCK.fullmatch(name)
        if match and module.weight is not None and _holds(checkpoint, name):
            inside.add(match[2])
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
    lost = [name for name in wanted if not _holds(checkpoint, name)]
    if not _has_attention_biases(checkpoint.text_config):
        return lost
    for block in blocks:
        # a layer that is missing altogether is in ``lost`` already
        for side in "qkv":
            layer = checkpoint.modules.get(f"{block}.self_attn.{side}_proj")
            if layer is not None and "bias" not in layer.tensors:
                lost.append(f"{layer.name}.bias")
    return lost


def _holds(checkpoint: Checkpoint, name: str) -> bool:
    """Return whether a layer has tensors; an attention's own are scales of its cache."""
    module = checkpoint.modules.get(name)
    # scales of the KV cache may be called self_attn.attn.k_scale, though no layer is called so
    return module is not None and module.last != "attn"


def _has_attention_biases(config: dict[str, Any]) -> bool:
    """Return whether queries, keys and values have biases; those of Qwen2 have by default."""
    if config.get("attention_bias") is True:
        return True
    is_qwen2 = config.get("model_type") in ("qwen2", "qwen2_moe")
    return is_qwen2 and config.get("qkv_bias") is not False


# Layers

#: Norms over the hidden state; those of heads (q_norm, k_norm) have another length.
_NORM = re.compile(r"model\.(layers\.\d+\.(input|post_attention)_layernorm|norm)")


def layer_findings(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Yield float layers of a wrong size, and layers that should be matrices."""
    config = checkpoint.text_config
    hidden = config.get("hidden_size")
    has_norms = config.get("model_type") in _ALIKE and type(hidden) is int
    for module in checkpoint.modules.values():
        weight = module.weight
        if weight is None:
            continue
        if module.has_bare_integers:
            text = f"the type is {weight.dtype}; it must be a float"
            yield broken("tensor-type", weight.name, text)
        is_norm = has_norms and _NORM.fullmatch(module.name)
        if is_norm and weight.shape != (hidden,):
            text = f"it has {weight}; config.json says [{hidden}]"
            yield broken("weight-shape", module.name, text)
        yield from _matrix_findings(config, module, weight)


def _matrix_findings(
    config: dict[str, Any], module: Module, weight: StoredTensor
) -> Iterator[Finding]:
    """Yield a misshapen layer, or a float matrix of a wrong size."""
    if module.name in (EMBEDDING, HEAD):
        demanded = integers(config.get("vocab_size"), config.get("hidden_size"))
    else:
        # None for layers whose size the configuration does not give
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


def quantized_head_findings(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Yield a quantized head, where the client expects a float head."""
    for module in checkpoint.heads:
        if module.is_quantized:
            text = f"its weight is {module.weight}"
            yield broken("head-quantized", module.name, text)


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


# Scales

_LAYER_SCALES = ("weight_scale", "input_scale")
#: Scales of a KV cache under all names that clients look for.
_KV_SCALE = re.compile(
    r"\.(?:[kv]_proj\.(?:output_scale|[kv]_scale)|[kv]_scale|kv_scale)$"
)
#: Scales of weights, activations, outputs and the KV cache, in any layout; ``_2`` is the second
#: stage, ``_inv`` DeepSeek's name, ``_global`` the name of compressed-tensors, and "scales" that of
#: AutoAWQ and GPTQ.
_SCALE = re.compile(
    r"(weight|input|activation|output|prob_output|[kvq]|kv)(_global)?_scale(_2|_inv)?|scales"
)
#: Bits that are all set in NaN and infinities, and in no number, by type. U8 holds the exponents
#: of MX formats.
_NOT_FINITE = {
    "F32": 0x7F800000,
    "F16": 0x7C00,
    "BF16": 0x7F80,
    "F8_E4M3": 0x7F,
    "F8_E5M2": 0x7C,
    "F8_E8M0": 0xFF,
    "U8": 0xFF,
}
#: Most bytes of scales of groups and blocks that are read: those of a model with 70B parameters in
#: 4 bits. Of more scales, every second tensor is read, or every third and so on.
_MOST_BYTES = 2**30


def scale_findings(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Yield scales without a weight, and KV cache scales without calibration."""
    for module in checkpoint.modules.values():
        scales = [name for name in module.tensors if name.startswith(_LAYER_SCALES)]
        # the weight may be in a file that was not read
        if scales and module.weight is None and checkpoint.is_whole:
            text = f"{', '.join(sorted(module.tensors))} without a weight"
            # the weight of a Linear stays uninitialized; a float head has no parameter for a scale
            severity = REFUSED if module.is_head else WRONG
            yield broken("scale-alone", module.name, text, severity)
    cache = dict[str, float | None]()
    for name, tensor in checkpoint.tensors.items():
        if _KV_SCALE.search(today(name)):
            cache[name] = single_value(tensor)
    values = set(cache.values())
    # None stands for scales of heads, which are several values; no names at all give an empty set
    if None in values or len(values) != 1:
        return
    (value,) = values
    first, count = next(iter(cache)), len(cache)
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
            text = f"it is {today(name).rpartition('.')[2]} today"
            yield broken("scale-names", name, text)


def value_findings(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Yield scales that are NaN or infinite, and single scales of 0 or less."""
    matrices = list[StoredTensor]()
    for module in checkpoint.modules.values():
        for name, tensor in module.tensors.items():
            # the values of a tensor without a place in a file are not written yet
            if not _SCALE.fullmatch(name) or not tensor.start:
                continue
            is_vector = len(tensor.shape) <= 1 and tensor.count > 0
            if tensor.dtype in FLOATS and is_vector:
                yield from _vector_findings(module, name, tensor)
            elif tensor.dtype in _NOT_FINITE:
                matrices.append(tensor)
    bytes_in_all = sum(tensor.size for tensor in matrices)
    step = -(-bytes_in_all // _MOST_BYTES)
    for tensor in matrices[:: max(step, 1)]:
        count = 0
        for part in raw_values_of(tensor):
            mask = part.dtype.type(_NOT_FINITE[tensor.dtype])
            count += np.count_nonzero((part & mask) == mask)
        if count:
            text = (
                f"{count} of {tensor.count} are NaN or infinite, in {tensor.path.name}"
            )
            yield broken("scale-value", tensor.name, text)


def _vector_findings(
    module: Module, name: str, tensor: StoredTensor
) -> Iterator[Finding]:
    """Yield a scale of a layer or of its outputs with the first of its unusable values.

    Infinities and NaN are unusable anywhere, values of 0 or less only in a tensor of one value.
    """
    values = values_of(tensor)
    # of several scales some may be 0, as for outputs whose weights are all 0
    usable = np.isfinite(values)
    if tensor.count == 1:
        usable &= values > 0
    if usable.all():
        return
    wrong = values[~usable][0]
    severity = WRONG
    if wrong == 0 and module.experts and name.startswith("input"):
        # clients take the greatest scale of the experts, so that a zero has no effect
        severity = WARNING
    text = f"it is {wrong:g}, in {tensor.path.name}"
    yield broken("scale-value", tensor.name, text, severity)
