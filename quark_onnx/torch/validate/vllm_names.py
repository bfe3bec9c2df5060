"""Tensor names that vLLM's loaders expect, for the families whose loaders were read.

The module also checks layers that loaders reorder.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial

from quark_onnx.common.containers import grouped_by
from quark_onnx.torch.validate.checkpoint import Checkpoint
from quark_onnx.torch.validate.fields import is_positive
from quark_onnx.torch.validate.finding import REFUSED, WRONG, Finding
from quark_onnx.torch.validate.modules import Module
from quark_onnx.torch.validate.rules import broken

#: Without a suffix: tensors of the attention itself, such as self_attn.k_scale.
_ATTENTION = r"self_attn(\.([qkvo]_proj|qkv_proj|attn))?"
#: Qwen3 has norms over the queries and keys of each head.
_NORMED = rf"({_ATTENTION}|self_attn\.[qk]_norm)"
_NORMS = r"(input|post_attention)_layernorm"
_PARTS = r"(gate|up|down|gate_up)_proj"
_MIXTURE = rf"mlp\.({_PARTS}|gate|experts(\.\d+\.{_PARTS})?|shared_expert(\.{_PARTS})?|shared_expert_gate)"  # noqa: E501
#: Mistral's own names are accepted, too.
_MISTRAL = (
    r"(self_attn|attention)(\.([qkvo]_proj|qkv_proj|attn|w[qkvo]))?"
    rf"|{_NORMS}|(attention|ffn)_norm|(mlp|feed_forward)\.({_PARTS}|w[123])"
)
#: Names inside of a block, by family: the modules of the classes in vllm/model_executor/models of
#: vLLM 0.33, and the names that their ``load_weights`` takes for parts of fused modules.
_BLOCKS = {
    **dict.fromkeys(("llama", "qwen2"), rf"({_ATTENTION}|{_NORMS}|mlp\.{_PARTS})"),
    "qwen3": rf"({_NORMED}|{_NORMS}|mlp\.{_PARTS})",
    "mixtral": (
        rf"({_ATTENTION}|{_NORMS}|block_sparse_moe\.(gate|experts(\.\d+\.({_PARTS}|w[123]))?))"
    ),
    "qwen2_moe": rf"({_ATTENTION}|{_NORMS}|{_MIXTURE})",
    "qwen3_moe": rf"({_NORMED}|{_NORMS}|{_MIXTURE})",
}
_KNOWN = {
    **{
        family: rf"lm_head|model\.(embed_tokens|norm|layers\.\d+\.{inside})"
        for family, inside in _BLOCKS.items()
    },
    "mistral": (
        rf"lm_head|output|model\.embed_tokens|tok_embeddings|(model\.)?(norm|layers\.\d+\.({_MISTRAL}))"
    ),
}


#: Tensors of attention in addition to its layers, by the last part of its name: KV cache scales.
_OF_ATTENTION = {
    "attn": re.compile("([qkv]|prob)_scale"),
    **dict.fromkeys(
        ("self_attn", "attention"), re.compile("([qkv]|kv)_scale|[qkv]_zero_point")
    ),
}
#: Layouts in which vLLM finds the scale of probabilities; other tensors of that name have their
#: own rule.
_PROBABILITIES = ("quark", "fp8")
#: Keys of the number of heads of the layers that Llama 4's loader reorders.
_HEADS = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}
_LANGUAGE_MODEL = ("model.", "language_model.")
_LAYER = re.compile(r"(?:model\.)?layers\.(\d+)\.")


def name_findings(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Yield layers and attention tensors that a known family's loader lacks."""
    pattern = _KNOWN.get(str(checkpoint.config.get("model_type")))
    # other heads, such as ...ForSequenceClassification, have other outer layers
    if pattern is None or not checkpoint.architecture.endswith("ForCausalLM"):
        return
    # loaders skip the tensors of rotary embeddings, which old files hold
    expected = re.compile(rf"{pattern}|.*rotary_emb")
    unknown = list[str]()
    for module in checkpoint.modules.values():
        # loaders skip a bias without a parameter, as GPTQ files have for every layer
        is_bias = set(module.tensors) == {"bias"}
        is_known = expected.fullmatch(module.name) and not _is_beyond(
            checkpoint, module
        )
        if not is_bias and not is_known:
            unknown.append(module.name)
        elif module.last in _OF_ATTENTION:
            yield from _attention_findings(checkpoint, module)
    # a wrong name occurs in every block and expert, and is reported once; look-around keeps the
    # dots for the next match, as numbers may follow each other
    same_names = grouped_by(unknown, partial(re.sub, r"(?<=\.)\d+(?=\.)", "N"))
    for names in same_names.values():
        text = "it has no such layer"
        if len(names) > 1:
            text += f" ({len(names)} are called so)"
        if checkpoint.config.get("model_type") == "mixtral":
            text += "; experts are block_sparse_moe.experts.N.w1, w2 and w3"
        yield broken("vllm-names", names[0], text)


def _is_beyond(checkpoint: Checkpoint, module: Module) -> bool:
    """Return whether a layer's block has a number that the model does not have."""
    layer = _LAYER.match(module.name)
    count = checkpoint.config.get("num_hidden_layers")
    # numbers of blocks begin with 0
    return layer is not None and type(count) is int and int(layer[1]) >= count


def _attention_findings(checkpoint: Checkpoint, module: Module) -> Iterator[Finding]:
    """Yield tensors of an attention module, except KV cache scales."""
    # other layouts have no rule of their own for scales of probabilities
    has_rule = checkpoint.method in _PROBABILITIES
    for end, tensor in module.tensors.items():
        is_probability = has_rule and end.startswith("prob_output_")
        if not is_probability and not _OF_ATTENTION[module.last].fullmatch(end):
            place = f"{module.name}.{end}"
            yield broken("tensor-unknown", place, f"{tensor}, which attention lacks")


def order_findings(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Yield layers whose outputs Llama 4's loader reorders wrongly or in part."""
    # ``permute_qk_weight_for_rotary`` in llama4.py interleaves the rows of queries and keys for the
    # rotary embedding: rows of weight, weight_packed and weight_scale, but of no other tensor
    if checkpoint.config.get("model_type") not in ("llama4", "llama4_text"):
        return
    for module in checkpoint.linears:
        # the vision tower is loaded without it
        if module.last not in _HEADS or not module.name.startswith(_LANGUAGE_MODEL):
            continue
        # eight outputs share an int32, which the loader takes for one row
        packed = checkpoint.method == "quark" and module.matrix.dtype == "I32"
        # a single zero point holds for all rows, in any order
        zeros = any(
            "zero" in name and tensor.count > 1
            for name, tensor in module.tensors.items()
        )
        if packed or zeros or "qweight" in module.tensors:
            text = f"its weight is {module.weight}"
            if zeros:
                text += ", with zero points"
            severity = REFUSED if packed else WRONG
            yield broken("vllm-order", module.name, text, severity)
        else:
            yield from _reordered_scale_findings(checkpoint, module)


def _reordered_scale_findings(
    checkpoint: Checkpoint, module: Module
) -> Iterator[Finding]:
    """Yield a layer whose scales are for blocks of rows that the loader tears apart."""
    heads = checkpoint.text_config.get(_HEADS[module.last])
    if not is_positive(heads):
        return
    rows = module.matrix.shape[0]
    # reordered as if each row of it were one of the weight; the reshape fails if it does not fill
    # pairs of rows in each head
    scale = module.tensors.get("weight_scale")
    if scale is not None and scale.count > 1 and scale.shape[0] != rows:
        severity = REFUSED if scale.shape[0] % (2 * heads) else WRONG
        text = f"its weight_scale is {scale}"
        yield broken("vllm-order", module.name, text, severity)
    # kept as it is; rows stay within their head, so that blocks of whole heads stay right
    scale = module.tensors.get("weight_scale_inv")
    block = checkpoint.quantization.get("weight_block_size")
    head = max(1, rows // heads)
    # a single row of blocks is for all outputs
    several = scale is not None and len(scale.shape) == 2 and scale.shape[0] > 1
    if several and block and block[0] % head:
        text = f"its scales are for blocks of {block[0]} rows, and a head has {head}"
        yield broken("vllm-order", module.name, text, WRONG)
