"""Each rule has a checkpoint that breaks this rule alone; the complete checkpoint breaks none."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from quark_onnx.torch.pipelines.file_to_file import Writing, quantize_checkpoint
from quark_onnx.torch.pipelines.ptq import config_for
from quark_onnx.torch.validate import RULES, validate
from tests.cases import loop_over
from tests.quark_onnx.torch.validate import drafts
from tests.quark_onnx.torch.validate.drafts import FP8, INT8, Draft, layer
from tests.torch_families import config_of
from tests.torch_models import made, saved, tokens

Change = Callable[[Draft], object]
Q0 = "model.layers.0.self_attn.q_proj"
O0 = "model.layers.0.self_attn.o_proj"
PROB0 = "model.layers.0.self_attn.prob_output_scale"
DOWN0 = "model.layers.0.mlp.down_proj"


@dataclass(frozen=True)
class Case:
    """A rule, and how a whole checkpoint comes to break it.

    Attributes:
        rule: its name.
        severity: what follows.
        whole: makes the checkpoint.
        change: breaks it.
        clients: for which it is broken.
        place: a part of where it is found.
    """

    rule: str
    severity: str
    whole: Callable[[], Draft]
    change: Change
    clients: tuple[str, ...] = ("vllm",)
    place: str = ""


BOTH = ("vllm", "transformers")
HF = ("transformers",)


def quantization(**changes: object) -> Change:
    return lambda draft: draft.quantization.update(changes)


def without(*path: str) -> Change:
    def change(draft: Draft) -> None:
        entries = draft.config
        for key in path[:-1]:
            entries = entries[key]
        del entries[path[-1]]

    return change


def override(pattern: str, **changes: object) -> Change:
    def change(draft: Draft) -> None:
        draft.quantization["layer_quant_config"][pattern] = {
            **layer(FP8, FP8),
            **changes,
        }

    return change


def weight_spec(**changes: object) -> Change:
    def change(draft: Draft) -> None:
        draft.quantization["global_quant_config"]["weight"].update(changes)

    return change


def weight_input(spec: object) -> Change:
    def change(draft: Draft) -> None:
        draft.quantization["global_quant_config"]["input_tensors"] = spec

    return change


def exports(**changes: object) -> Change:
    return lambda draft: draft.quantization["export"].update(changes)


def config(**changes: object) -> Change:
    return lambda draft: draft.config.update(changes)


def add(name: str, dtype: str, *shape: int) -> Change:
    return lambda draft: draft.tensors.update({name: (dtype, shape)})


def shape(end: str, dtype: str, *sizes: int) -> Change:
    return lambda draft: draft.change(end, (dtype, sizes))


def drop(end: str) -> Change:
    return lambda draft: draft.drop(end)


def renamed(old: str, new: str) -> Change:
    return lambda draft: draft.rename(old, new)


def awq_experts() -> Draft:
    """AutoAWQ's layout, with one expert in place of the dense layers."""
    return in_one_expert(drafts.awq())


def in_one_expert(draft: Draft) -> Draft:
    """A checkpoint with one expert in place of the dense layers."""
    draft.config |= {
        "model_type": "qwen3_moe",
        "architectures": ["Qwen3MoeForCausalLM"],
        "moe_intermediate_size": 64,
    }
    draft.rename(".mlp.", ".mlp.experts.0.")
    return draft


def whole_rows(draft: Draft) -> None:
    """One group for each output."""
    draft.quantization["group_size"] = -1
    for name, (dtype, sizes) in draft.tensors.items():
        if name.endswith((".qzeros", ".scales")):
            draft.tensors[name] = (dtype, (1, sizes[1]))


def floated(name: str) -> Change:
    """A layer that is float in the file."""

    def change(draft: Draft) -> None:
        size = drafts.LINEARS[name]
        draft.tensors = {
            key: entry
            for key, entry in draft.tensors.items()
            if not key.startswith(f"{name}.")
        }
        draft.tensors[f"{name}.weight"] = ("BF16", size)

    return change


def with_key_norm(draft: Draft) -> None:
    draft.config |= {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
    for number in range(2):
        draft.tensors[f"model.layers.{number}.self_attn.k_norm.weight"] = ("F32", (8,))


def cached(**values: float) -> Change:
    return lambda draft: draft.scalars.update(
        dict.fromkeys(draft.scalars, *values.values())
    )


def scalar(name: str, value: float) -> Change:
    return lambda draft: draft.scalars.update({name: value})


def group(**changes: object) -> Change:
    return lambda draft: draft.quantization["config_groups"]["group_0"].update(changes)


#: Arguments of keys and values.
CACHE = drafts.compressed_kv().quantization["kv_cache_scheme"]


def more_groups(**entries: object) -> Change:
    """A further group, before the others."""

    def change(draft: Draft) -> None:
        groups = draft.quantization["config_groups"]
        draft.quantization["config_groups"] = {"more": entries, **groups}

    return change


def cache_scheme(**changes: object) -> Change:
    return lambda draft: draft.quantization["kv_cache_scheme"].update(changes)


def arguments(**changes: object) -> Change:
    return lambda draft: draft.quantization["config_groups"]["group_0"][
        "weights"
    ].update(changes)


def zero_points(draft: Draft) -> None:
    sizes = {
        f"{name}.weight_zero_point": (out // 8, into // 32)
        for name, (out, into) in drafts.LINEARS.items()
    }
    draft.tensors.update({name: ("I32", size) for name, size in sizes.items()})


def three_bits(draft: Draft) -> None:
    """Zero points of 16 outputs, which end within an int32."""
    arguments(num_bits=3, symmetric=False)(draft)
    for name, (out, into) in drafts.LINEARS.items():
        draft.tensors |= {
            f"{name}.weight_packed": ("I32", (out, into * 3 // 32)),
            f"{name}.weight_zero_point": ("I32", (-(-out * 3 // 32), into // 32)),
        }


def all_of(*changes: Change) -> Change:
    def change(draft: Draft) -> None:
        for each in changes:
            each(draft)

    return change


def untied_outputs(draft: Draft) -> None:
    draft.quantization["layer_quant_config"]["*v_proj"]["output_tensors"][
        "symmetric"
    ] = False


CASES = (
    Case("architecture", "refused", drafts.plain, without("architectures"), BOTH),
    Case("architecture", "refused", drafts.plain, without("model_type"), BOTH),
    Case(
        "own-code",
        "refused",
        drafts.plain,
        config(model_type="evil", auto_map={"AutoConfig": "evil.Config"}),
        BOTH,
    ),
    Case(
        "own-code",
        "refused",
        drafts.plain,
        config(model_type="chatglm", auto_map={"AutoConfig": "c.Config"}),
        HF,
    ),
    Case("layers-missing", "refused", drafts.plain, config(num_hidden_layers=3)),
    Case("layers-missing", "wrong", drafts.plain, config(num_hidden_layers=3), HF),
    Case("layers-missing", "wrong", drafts.quark, config(num_hidden_layers=3), BOTH),
    Case(
        "weight-shape",
        "refused",
        drafts.plain,
        config(intermediate_size=128),
        BOTH,
        "mlp",
    ),
    Case(
        "weight-shape",
        "refused",
        drafts.plain,
        config(vocab_size=48),
        BOTH,
        "model.embed_tokens",
    ),
    Case(
        "weight-shape",
        "refused",
        drafts.quark,
        config(intermediate_size=128),
        BOTH,
        "mlp",
    ),
    Case(
        "weight-shape",
        "refused",
        lambda: drafts.quark("uint4_wo_32"),
        config(intermediate_size=128),
        BOTH,
        "mlp",
    ),
    Case(
        "weight-shape",
        "refused",
        drafts.awq,
        config(intermediate_size=128),
        BOTH,
        "mlp",
    ),
    Case(
        "weight-shape",
        "refused",
        drafts.compressed,
        config(num_key_value_heads=4),
        BOTH,
        "k_proj",
    ),
    Case("head-missing", "refused", drafts.plain, drop("lm_head.weight")),
    Case("head-missing", "wrong", drafts.plain, drop("lm_head.weight"), HF),
    Case("head-missing", "wrong", drafts.quark, drop("lm_head.weight"), BOTH),
    Case("head-tied", "warning", drafts.quark, config(tie_word_embeddings=True), BOTH),
    Case("scale-alone", "wrong", drafts.quark, drop(f"{DOWN0}.weight"), BOTH, DOWN0),
    Case(
        "scale-alone",
        "refused",
        drafts.quark,
        all_of(
            config(tie_word_embeddings=True),
            drop("lm_head.weight"),
            add("lm_head.weight_scale", "F32"),
        ),
        BOTH,
        "lm_head",
    ),
    Case(
        "scale-names",
        "refused",
        drafts.quark,
        renamed(".weight_scale", ".weight_quantizer.scale"),
    ),
    Case(
        "scale-names",
        "refused",
        drafts.quark,
        renamed(".input_scale", ".input_quantizer.scale"),
    ),
    Case("scale-missing", "wrong", drafts.quark, drop(f"{Q0}.weight_scale"), BOTH, Q0),
    Case("scale-missing", "wrong", drafts.quark, drop(f"{Q0}.input_scale"), BOTH, Q0),
    Case(
        "scale-missing",
        "wrong",
        lambda: drafts.quark("uint4_wo_32"),
        drop(f"{Q0}.weight_zero_point"),
        BOTH,
    ),
    Case(
        "scale-missing",
        "wrong",
        lambda: drafts.quark("nvfp4"),
        drop(f"{Q0}.weight_scale_2"),
    ),
    Case("scale-missing", "wrong", drafts.awq, drop(f"{Q0}.qzeros"), BOTH),
    Case("scale-missing", "wrong", drafts.gptq, drop(f"{Q0}.scales"), BOTH),
    Case("scale-missing", "wrong", drafts.compressed, drop(f"{Q0}.weight_shape"), BOTH),
    Case("scale-missing", "wrong", drafts.fp8, drop(f"{Q0}.input_scale")),
    Case(
        "tensor-shape",
        "refused",
        drafts.quark,
        shape(f"{Q0}.weight_scale", "F32", 32),
        BOTH,
    ),
    Case(
        "tensor-shape",
        "refused",
        lambda: drafts.quark("ptpc_fp8"),
        shape(f"{Q0}.weight_scale", "F32", 32, 1),
        BOTH,
    ),
    Case(
        "tensor-shape",
        "refused",
        lambda: drafts.quark("mxfp4"),
        shape(f"{Q0}.weight_scale", "U8", 32, 2),
        BOTH,
    ),
    Case(
        "tensor-shape",
        "refused",
        drafts.gptq,
        shape(f"{Q0}.scales", "F16", 2, 32),
        BOTH,
    ),
    Case(
        "tensor-shape",
        "refused",
        drafts.compressed,
        shape(f"{Q0}.weight_scale", "BF16", 32),
        BOTH,
    ),
    Case(
        "tensor-shape",
        "refused",
        lambda: drafts.fp8((16, 16)),
        shape(f"{Q0}.weight_scale_inv", "F32", 2, 1),
        BOTH,
    ),
    Case(
        "tensor-type",
        "wrong",
        lambda: drafts.quark("mxfp4"),
        shape(f"{Q0}.weight_scale", "F32", 32, 1),
        BOTH,
    ),
    Case(
        "tensor-type", "wrong", drafts.quark, shape(f"{Q0}.weight", "I8", 32, 32), BOTH
    ),
    Case(
        "tensor-unknown", "refused", drafts.quark, add(f"{Q0}.output_scale", "F32"), HF
    ),
    Case(
        "tensor-unknown",
        "refused",
        drafts.quark,
        add(f"{O0}.output_scale", "F32"),
        BOTH,
    ),
    Case("tensor-unknown", "refused", drafts.fp8_kv, add(f"{O0}.output_scale", "F32")),
    *(
        Case(
            "tensor-unknown",
            "refused",
            whole,
            add(f"model.layers.0.self_attn.{end}", "F32"),
            place=end,
        )
        for whole, end in (
            (drafts.quark_attention, "prob_scale"),
            (drafts.plain, "prob_output_scale"),
            (drafts.compressed_kv, "prob_output_scale"),
            (drafts.fp8_kv, "attn.kv_scale"),
        )
    ),
    Case(
        "tensor-unknown",
        "refused",
        drafts.awq,
        renamed("input_layernorm.weight", "input_layernorm.qweight"),
        BOTH,
    ),
    Case(
        "excluded-quantized",
        "refused",
        drafts.quark,
        quantization(exclude=["lm_head", DOWN0]),
        BOTH,
        DOWN0,
    ),
    Case(
        "excluded-quantized",
        "refused",
        drafts.awq,
        quantization(modules_to_not_convert=["down_proj"]),
        BOTH,
    ),
    Case(
        "excluded-quantized",
        "refused",
        drafts.fp8,
        quantization(ignored_layers=[DOWN0]),
    ),
    Case(
        "excluded-quantized",
        "refused",
        drafts.compressed,
        quantization(ignore=["lm_head", "re:.*down_proj"]),
        BOTH,
    ),
    Case("float-included", "wrong", drafts.quark, floated(DOWN0), BOTH, DOWN0),
    Case(
        "float-included", "refused", lambda: drafts.quark("int4_wo_32"), floated(DOWN0)
    ),
    Case(
        "float-included",
        "wrong",
        drafts.mixture,
        quantization(exclude=["lm_head"]),
        place="mlp.gate",
    ),
    Case("float-included", "refused", drafts.compressed, floated(DOWN0), BOTH),
    Case("float-included", "refused", drafts.awq, floated(DOWN0), BOTH),
    Case("float-included", "wrong", drafts.fp8, floated(DOWN0)),
    Case(
        "group-divides",
        "refused",
        lambda: drafts.quark("uint4_wo_32"),
        weight_spec(group_size=24),
        BOTH,
    ),
    Case("group-divides", "refused", drafts.awq, quantization(group_size=24), BOTH),
    Case("group-divides", "refused", drafts.compressed, arguments(group_size=24), BOTH),
    Case(
        "group-divides",
        "refused",
        lambda: drafts.fp8((16, 16)),
        lambda draft: vars(draft).update(vars(drafts.fp8((24, 16)))),
    ),
    Case(
        "undeclared",
        "refused",
        lambda: drafts.fp8((16, 16)),
        without("quantization_config"),
        BOTH,
    ),
    Case(
        "method",
        "refused",
        drafts.plain,
        config(quantization_config={"quant_method": "unheard"}),
    ),
    Case(
        "method",
        "warning",
        drafts.plain,
        config(quantization_config={"quant_method": "unheard"}),
        HF,
    ),
    Case(
        "packed-outputs",
        "wrong",
        drafts.compressed,
        three_bits,
        place="model.layers.0.self_attn.k_proj",
    ),
    Case("method", "wrong", drafts.quark, quantization(quant_method="unheard"), HF),
    Case(
        "method", "refused", drafts.plain, config(quantization_config={"bits": 4}), BOTH
    ),
    Case(
        "method-unchecked",
        "warning",
        drafts.plain,
        config(quantization_config={"quant_method": "torchao"}),
        BOTH,
    ),
    Case(
        "malformed",
        "refused",
        drafts.quark,
        weight_spec(block_size=7, qscheme="per_block"),
    ),
    Case(
        "kv-scales-missing",
        "warning",
        drafts.quark_kv,
        drop("1.self_attn.v_proj.output_scale"),
        HF,
    ),
    Case(
        "kv-scales-missing",
        "wrong",
        drafts.quark_kv,
        drop("1.self_attn.v_proj.output_scale"),
        place="v_proj",
    ),
    Case(
        "kv-scales-missing",
        "refused",
        drafts.quark_kv,
        drop("1.self_attn.k_proj.output_scale"),
        place="k_proj",
    ),
    *(
        Case(
            "kv-scales-missing",
            "warning",
            whole,
            all_of(*(drop(f"1.self_attn.{each}") for each in names)),
        )
        for whole, names in (
            (drafts.quark_kv, ("k_proj.output_scale", "v_proj.output_scale")),
            (drafts.compressed_kv, ("k_scale", "v_scale")),
        )
    ),
    Case(
        "kv-scales-missing",
        "refused",
        drafts.fp8_kv,
        drop("1.self_attn.k_scale"),
        place="k_proj",
    ),
    Case(
        "kv-scales-missing",
        "wrong",
        drafts.fp8_kv,
        drop("1.self_attn.v_scale"),
        place="v_proj",
    ),
    Case(
        "kv-scales-missing",
        "wrong",
        drafts.compressed_kv,
        drop("1.self_attn.k_scale"),
        place="k_proj",
    ),
    Case(
        "tensor-shape",
        "refused",
        drafts.fp8_kv,
        shape("1.self_attn.k_scale", "BF16", 2),
    ),
    Case(
        "tensor-shape",
        "refused",
        drafts.compressed_kv,
        shape("1.self_attn.v_scale", "BF16", 2),
    ),
    Case(
        "kv-scales-loader",
        "refused",
        drafts.compressed_kv,
        renamed(".self_attn.k_scale", ".self_attn.k_proj.output_scale"),
    ),
    *(
        Case("ct-cache", "refused", drafts.compressed_kv, cache_scheme(**{key: value}))
        for key, value in (
            ("num_bits", 4),
            ("type", "int"),
            ("strategy", "channel"),
            ("symmetric", False),
        )
    ),
    Case(
        "ct-cache", "refused", drafts.compressed_kv, quantization(kv_cache_scheme="fp8")
    ),
    Case(
        "kv-scales-loader",
        "refused",
        drafts.quark_kv,
        config(architectures=["Qwen2MoeForCausalLM"]),
    ),
    Case(
        "kv-scales-loader",
        "refused",
        drafts.quark_attention,
        config(architectures=["Gemma2ForCausalLM"]),
    ),
    *(
        Case("scale-value", "wrong", whole, scalar(name, value), BOTH, name)
        for whole, name in (
            (drafts.quark, f"{Q0}.weight_scale"),
            (drafts.quark, f"{Q0}.input_scale"),
            (drafts.quark_kv, "model.layers.0.self_attn.v_proj.output_scale"),
        )
        for value in (math.nan, math.inf, 0.0, -1.0)
    ),
    Case(
        "scale-value",
        "wrong",
        drafts.quark_attention,
        scalar(PROB0, math.nan),
        place=PROB0,
    ),
    Case(
        "scale-value",
        "wrong",
        drafts.fp8,
        scalar(f"{DOWN0}.input_scale", 0.0),
        place=DOWN0,
    ),
    Case(
        "scale-value",
        "warning",
        drafts.mixture,
        scalar("model.layers.0.mlp.experts.1.up_proj.input_scale", 0.0),
    ),
    Case(
        "scale-value",
        "wrong",
        drafts.mixture,
        scalar("model.layers.0.mlp.experts.1.up_proj.input_scale", math.nan),
    ),
    Case(
        "tensor-unknown",
        "refused",
        drafts.quark_attention,
        add(PROB0.replace("scale", "zero_point"), "I8"),
    ),
    Case("weights-missing", "refused", drafts.plain, drop(f"{Q0}.weight"), place=Q0),
    Case("weights-missing", "wrong", drafts.plain, drop(f"{Q0}.weight"), HF, Q0),
    Case(
        "weights-missing",
        "wrong",
        drafts.quark,
        drop("model.norm.weight"),
        BOTH,
        "model.norm",
    ),
    Case(
        "weights-missing",
        "wrong",
        drafts.quark,
        drop("1.input_layernorm.weight"),
        BOTH,
        "layers.1.input_layernorm",
    ),
    Case(
        "weights-missing",
        "wrong",
        drafts.quark,
        drop("embed_tokens.weight"),
        BOTH,
        "model.embed_tokens",
    ),
    Case(
        "weights-missing",
        "wrong",
        drafts.quark,
        config(attention_bias=True),
        BOTH,
        "q_proj.bias",
    ),
    Case(
        "weights-missing",
        "wrong",
        drafts.quark,
        config(model_type="qwen2"),
        BOTH,
        "q_proj.bias",
    ),
    Case(
        "vllm-names",
        "refused",
        drafts.quark,
        config(num_hidden_layers=1),
        place="layers.1.",
    ),
    Case(
        "weight-shape",
        "refused",
        drafts.quark,
        shape("model.norm.weight", "BF16", 16),
        BOTH,
        "model.norm",
    ),
    *(
        Case("size-missing", "refused", drafts.quark, without(key), BOTH, key)
        for key in (
            "hidden_size",
            "intermediate_size",
            "num_attention_heads",
            "vocab_size",
        )
    ),
    Case(
        "size-missing",
        "wrong",
        drafts.quark,
        without("num_hidden_layers"),
        BOTH,
        "num_hidden_layers",
    ),
    *(
        Case(
            "weight-shape",
            "refused",
            whole,
            shape(f"{name}.weight", dtype, *sizes),
            clients,
            name,
        )
        for sizes in ((2,), (1, 32, 32))
        for whole, name, dtype, clients in (
            (drafts.plain, Q0, "BF16", BOTH),
            (drafts.quark, Q0, "F8_E4M3", BOTH),
            (drafts.fp8, Q0, "F8_E4M3", ("vllm",)),
            (drafts.quark, "lm_head", "BF16", BOTH),
        )
    ),
    Case(
        "weight-shape",
        "refused",
        drafts.mixture,
        config(num_experts=8),
        place="mlp.gate",
    ),
    Case("malformed", "refused", drafts.quark, weight_input(7), place="input_tensors"),
    Case("malformed", "refused", drafts.quark, quantization(layer_quant_config=[7])),
    Case(
        "malformed",
        "refused",
        drafts.quark,
        quantization(layer_quant_config={"*q_proj": True}),
        place="*q_proj",
    ),
    Case(
        "malformed",
        "refused",
        drafts.compressed,
        quantization(ignore="lm_head"),
        BOTH,
        "ignore",
    ),
    Case(
        "malformed",
        "refused",
        drafts.compressed,
        quantization(ignore=["lm_head", None]),
        BOTH,
        "ignore",
    ),
    Case(
        "malformed",
        "refused",
        drafts.compressed,
        quantization(ignore=None),
        place="ignore",
    ),
    Case(
        "ct-format",
        "refused",
        drafts.compressed,
        all_of(
            group(format="pack-quantized"), without("quantization_config", "format")
        ),
    ),
    Case(
        "malformed",
        "refused",
        drafts.fp8,
        quantization(ignored_layers=[True]),
        place="ignored_layers",
    ),
    Case(
        "ct-format",
        "refused",
        drafts.compressed,
        quantization(format=["pack-quantized"]),
        BOTH,
    ),
    Case("ct-format", "refused", drafts.compressed, group(format=False), BOTH),
    Case("tensor-type", "wrong", drafts.fp8_kv, shape("1.self_attn.k_scale", "I32")),
    Case("kv-scales-one", "warning", drafts.quark_kv, cached(value=1.0), BOTH),
    Case("kv-scales-norm", "warning", drafts.quark_kv, with_key_norm),
    Case("kv-scales-equal", "warning", drafts.quark_kv, cached(value=0.5), BOTH),
    Case(
        "attention-scales-missing",
        "warning",
        drafts.quark_attention,
        drop("1.self_attn.prob_output_scale"),
    ),
    Case(
        "attention-scales-missing",
        "warning",
        drafts.quark_attention,
        drop("1.self_attn.q_proj.output_scale"),
    ),
    Case("tensor-shape", "refused", drafts.quark_attention, shape(PROB0, "F32", 4)),
    Case(
        "tensor-shape",
        "refused",
        drafts.quark_attention,
        shape(f"{Q0}.output_scale", "F32", 64),
    ),
    Case(
        "quark-softmax",
        "warning",
        drafts.quark,
        all_of(
            quantization(softmax_quant_spec=FP8),
            add(PROB0, "F32"),
            add(PROB0.replace("0", "1"), "F32"),
        ),
        HF,
    ),
    Case(
        "head-quantized",
        "refused",
        drafts.quark,
        all_of(
            shape("lm_head.weight", "F8_E4M3", 40, 32),
            add("lm_head.weight_scale", "F32"),
        ),
    ),
    Case(
        "quark-export",
        "refused",
        drafts.quark,
        without("quantization_config", "export"),
    ),
    Case(
        "quark-export",
        "refused",
        drafts.quark,
        without("quantization_config", "export", "kv_cache_group"),
    ),
    Case("quark-export", "refused", drafts.quark, exports(kv_cache_group=None)),
    Case("quark-exclude", "refused", drafts.quark, quantization(exclude=None)),
    Case(
        "quark-exclude",
        "refused",
        drafts.quark,
        quantization(exclude=["lm_head", "re:(["]),
    ),
    Case(
        "quark-exclude-glob",
        "wrong",
        drafts.quark,
        all_of(
            quantization(exclude=["*down_proj", "lm_head"]),
            *map(floated, (DOWN0, DOWN0.replace("0", "1"))),
        ),
    ),
    Case(
        "quark-exclude-glob",
        "warning",
        drafts.quark,
        quantization(exclude=["*lm_head"]),
    ),
    Case(
        "quark-layer-types",
        "refused",
        drafts.quark,
        quantization(layer_type_quant_config=None),
    ),
    Case(
        "quark-layer-types-ignored",
        "wrong",
        drafts.quark,
        quantization(layer_type_quant_config={"Linear": layer(FP8, FP8)}),
    ),
    Case("quark-pattern", "warning", drafts.quark, override("*k_porj")),
    Case(
        "quark-shards-differ",
        "refused",
        drafts.quark,
        override("*k_proj", target_device="cpu"),
        place="q_proj,k_proj",
    ),
    Case(
        "quark-shards-differ",
        "refused",
        drafts.quark,
        override("model.layers.1.mlp.up_proj", extra=1),
        place="up_proj",
    ),
    Case(
        "nvfp4-scales-differ",
        "wrong",
        lambda: drafts.quark("nvfp4"),
        lambda draft: draft.scalars.update({f"{Q0}.weight_scale_2": 0.5}),
        place="q_proj,k_proj",
    ),
    Case(
        "nvfp4-scales-differ",
        "wrong",
        lambda: in_one_expert(drafts.quark("nvfp4")),
        scalar("model.layers.0.mlp.experts.0.up_proj.weight_scale_2", 0.5),
        place="experts.0.{gate_proj,up_proj}",
    ),
    *(
        Case("nvfp4-scales-differ", "wrong", whole, scalar(name, 0.5), place=place)
        for whole, name, place in (
            (drafts.nvfp4, f"{Q0}.weight_global_scale", "q_proj,k_proj"),
            (drafts.nvfp4, f"{Q0}.input_global_scale", "q_proj,k_proj"),
            (
                lambda: in_one_expert(drafts.nvfp4()),
                "model.layers.0.mlp.experts.0.gate_proj.weight_global_scale",
                "experts.0.{gate_proj,up_proj}",
            ),
        )
    ),
    Case(
        "quark-experts-differ",
        "wrong",
        drafts.mixture,
        override("*experts.0.*_proj", target_device="cpu"),
    ),
    Case(
        "shards-excluded",
        "refused",
        drafts.quark,
        all_of(floated(Q0), quantization(exclude=["lm_head", Q0])),
        place="q_proj,k_proj",
    ),
    Case("shards-excluded", "refused", drafts.gptq, floated(Q0)),
    Case(
        "shards-excluded",
        "refused",
        drafts.fp8,
        all_of(floated(Q0), quantization(ignored_layers=[Q0])),
    ),
    Case(
        "shards-excluded",
        "refused",
        drafts.compressed,
        all_of(floated(Q0), quantization(ignore=["lm_head", Q0])),
    ),
    Case(
        "quark-outputs",
        "refused",
        drafts.quark,
        override("*down_proj", output_tensors=FP8, input_tensors=FP8),
    ),
    Case("quark-outputs", "refused", drafts.quark, override("*down_proj", bias=FP8)),
    Case("quark-kv", "refused", drafts.quark, exports(kv_cache_group=["*k_proj"])),
    Case("quark-kv", "refused", drafts.quark_kv, untied_outputs),
    Case(
        "quark-kv",
        "refused",
        drafts.quark_kv,
        lambda draft: [
            each["output_tensors"].update(
                dtype="int8", observer_cls="PerTensorMinMaxObserver"
            )
            for each in draft.quantization["layer_quant_config"].values()
        ],
    ),
    Case(
        "quark-scheme",
        "refused",
        drafts.quark,
        override("*down_proj", input_tensors=INT8),
    ),
    Case(
        "quark-fake",
        "wrong",
        drafts.quark,
        exports(weight_format="fake_quantized"),
        BOTH,
    ),
    Case(
        "quark-fake",
        "refused",
        lambda: drafts.quark("uint4_wo_32"),
        exports(weight_format="fake_quantized"),
        HF,
    ),
    Case(
        "quark-key",
        "refused",
        drafts.quark,
        without("quantization_config", "global_quant_config"),
        BOTH,
    ),
    Case(
        "quark-key",
        "refused",
        drafts.quark,
        without("quantization_config", "layer_quant_config"),
        HF,
    ),
    Case(
        "quark-key",
        "refused",
        drafts.quark,
        without("quantization_config", "global_quant_config", "bias"),
        HF,
    ),
    Case(
        "quark-key",
        "refused",
        drafts.quark,
        without("quantization_config", "global_quant_config", "weight", "ch_axis"),
        HF,
    ),
    Case("quark-export-keys", "refused", drafts.quark, exports(own=1), HF),
    Case(
        "quark-layer-class",
        "refused",
        drafts.quark,
        quantization(layer_type_quant_config={"Embedding": layer(FP8, FP8)}),
        HF,
    ),
    Case(
        "quark-observer",
        "refused",
        drafts.quark,
        weight_spec(observer_cls="MyObserver"),
        HF,
    ),
    Case(
        "quark-observer",
        "refused",
        drafts.quark,
        weight_spec(observer_cls="PerChannelMinMaxObserver"),
        HF,
    ),
    Case(
        "quark-integer",
        "refused",
        lambda: drafts.quark("int8"),
        weight_spec(round_method=None),
        HF,
    ),
    Case(
        "quark-type",
        "refused",
        lambda: drafts.quark("uint4_wo_32"),
        weight_spec(ch_axis=None),
        HF,
    ),
    Case(
        "quark-algorithm",
        "refused",
        drafts.quark,
        quantization(algo_config=[{"name": "hqq"}]),
        HF,
    ),
    Case(
        "ct-groups", "refused", drafts.compressed, quantization(config_groups={}), BOTH
    ),
    Case("ct-groups", "refused", drafts.compressed, group(targets=None), BOTH),
    # transformers quantizes activations alone
    Case(
        "ct-groups",
        "refused",
        drafts.compressed,
        more_groups(targets=["re:.*k_proj"], output_activations=CACHE),
    ),
    Case(
        "ct-attention",
        "refused",
        drafts.compressed,
        more_groups(targets=["LlamaAttention"], output_activations=CACHE),
        HF,
    ),
    Case(
        "ct-attention",
        "refused",
        drafts.compressed,
        more_groups(targets=["LlamaAttention"], weights=CACHE, input_activations=CACHE),
        HF,
    ),
    Case(
        "ct-format", "refused", drafts.compressed, quantization(format="packed"), BOTH
    ),
    Case(
        "ct-zero-points",
        "warning",
        drafts.compressed,
        all_of(arguments(symmetric=False), zero_points),
        HF,
    ),
    Case(
        "ct-arguments", "refused", drafts.compressed, arguments(group_size=None), BOTH
    ),
    Case(
        "ct-arguments", "refused", drafts.compressed, arguments(actorder="group"), BOTH
    ),
    Case("ct-scheme", "refused", drafts.compressed, arguments(dynamic=True)),
    Case(
        "ct-sparsity",
        "refused",
        drafts.compressed,
        quantization(sparsity_config={"targets": ["Linear"]}),
        BOTH,
    ),
    Case("awq-experts", "refused", awq_experts, whole_rows),
    Case(
        "vllm-names",
        "refused",
        drafts.quark,
        renamed(".input_layernorm.", ".norm1."),
        place="layers.0.norm1",
    ),
    Case(
        "vllm-names",
        "refused",
        drafts.mixture,
        renamed(".experts.", ".specialists."),
        place="specialists",
    ),
    Case(
        "vllm-order",
        "refused",
        lambda: drafts.quark("int4_wo_32"),
        config(model_type="llama4_text"),
        place=".q_proj",
    ),
    Case(
        "vllm-order",
        "wrong",
        drafts.awq,
        config(model_type="llama4_text"),
        place=".q_proj",
    ),
    Case(
        "awq-config",
        "refused",
        drafts.awq,
        without("quantization_config", "zero_point"),
    ),
    Case("awq-config", "refused", drafts.awq, quantization(bits=8)),
    Case("awq-version", "wrong", drafts.awq, quantization(version="gemv")),
    Case("gptq-config", "refused", drafts.gptq, quantization(desc_act=True)),
    Case("gptq-config", "refused", drafts.gptq, quantization(sym=False)),
    # kernels for Linear layers have no such groups
    Case("gptq-config", "refused", drafts.gptq, quantization(group_size=16)),
    *(
        Case(rule, "refused", whole, quantization(group_size=size), (client,), "size")
        for size in (0, -5, "32", None, True, [32])
        for rule, whole, client in (
            ("gptq-config", drafts.gptq, "vllm"),
            ("awq-config", drafts.awq, "vllm"),
            ("gptqmodel-config", drafts.gptq, "transformers"),
            ("gptqmodel-config", drafts.awq, "transformers"),
        )
    ),
    *(
        Case("tensor-type", "wrong", whole, shape(name, "I32", *sizes), BOTH, name)
        for whole in (drafts.plain, lambda: drafts.fp8((16, 16)), drafts.awq)
        for name, sizes in (
            ("model.norm.weight", (32,)),
            ("model.embed_tokens.weight", (40, 32)),
        )
    ),
    *(
        Case("size-missing", "refused", drafts.plain, config(**{key: value}), BOTH, key)
        for key, value in (
            ("num_hidden_layers", "2"),
            ("num_attention_heads", 0),
            ("vocab_size", 40.5),
        )
    ),
    *(
        Case(
            "malformed",
            "refused",
            drafts.awq,
            quantization(modules_to_not_convert=names),
            BOTH,
            "modules_to_not_convert",
        )
        for names in (7, "lm_head", [7])
    ),
    *(
        Case(
            rule,
            "refused",
            drafts.gptq,
            quantization(modules_in_block_to_quantize=names),
            (client,),
            "modules_in_block_to_quantize",
        )
        for rule, client, lists in (
            ("gptq-config", "vllm", (7, "mlp", [7], {"mlp": 1}, ["mlp", ["mlp"]])),
            ("gptqmodel-config", "transformers", (7, ["mlp"], [[7]])),
        )
        for names in lists
    ),
    # transformers replaces no layer
    Case(
        "excluded-quantized",
        "refused",
        drafts.gptq,
        quantization(modules_in_block_to_quantize=[]),
        HF,
    ),
    *(
        Case("method", "refused", drafts.awq, quantization(quant_method=name), BOTH)
        for name in (None, "", ["awq"], {}, 7)
    ),
    Case(
        "method",
        "refused",
        drafts.awq,
        without("quantization_config", "quant_method"),
        BOTH,
    ),
    *(
        Case(
            "malformed",
            "refused",
            drafts.plain,
            config(quantization_config=value),
            BOTH,
        )
        for value in (7, "awq", [1])
    ),
    Case(
        "gptq-config",
        "refused",
        drafts.gptq,
        without("quantization_config", "group_size"),
    ),
    Case("gptqmodel-config", "refused", drafts.gptq, quantization(bits=5), HF),
    Case("fp8-config", "refused", drafts.fp8, quantization(activation_scheme="token")),
    Case(
        "fp8-config",
        "refused",
        lambda: drafts.fp8((16, 16)),
        quantization(activation_scheme="static"),
        BOTH,
    ),
    Case(
        "exclude-pattern", "wrong", drafts.fp8, quantization(ignored_layers=["*head"])
    ),
    Case("exclude-pattern", "wrong", drafts.compressed, quantization(ignore=["*head"])),
    Case(
        "exclude-pattern",
        "refused",
        lambda: drafts.fp8((16, 16)),
        quantization(ignored_layers=["*head", "lm_head"]),
        HF,
    ),
    Case(
        "exclude-pattern",
        "refused",
        drafts.awq,
        quantization(modules_to_not_convert=["*head"]),
        HF,
    ),
    *(
        Case(
            "gptq-config",
            "refused",
            drafts.gptq,
            quantization(dynamic=rules),
            place=place,
        )
        for rules, place in (
            ({"+:*": {"group_size": 32}}, "dynamic"),
            ({"-:*": {}}, "dynamic"),
            ({"-:+:x": {}}, "dynamic"),
            ([], "dynamic"),
            ({"x": 4}, "dynamic"),
            ({"x": {"desc_act": True}}, "dynamic"),
            ({r".*\.o_proj": {"bits": 3}}, "o_proj"),
            ({r".*\.o_proj": {"sym": False}}, "o_proj"),
            ({r".*\.o_proj": {"group_size": 16}}, "o_proj"),
        )
    ),
    Case(
        "float-included",
        "wrong",
        drafts.gptq,
        all_of(quantization(dynamic={rf"-:.*{O0}": {}}), floated(O0)),
        HF,
        place=O0,
    ),
    Case(
        "excluded-quantized",
        "refused",
        drafts.gptq,
        quantization(modules_in_block_to_quantize=[["self_attn.", "gate_up_proj"]]),
        HF,
    ),
    Case(
        "excluded-quantized",
        "refused",
        drafts.gptq,
        quantization(modules_in_block_to_quantize=[["self_attn", "up_proj", "gate"]]),
        place="down_proj",
    ),
    Case(
        "shards-excluded",
        "refused",
        drafts.gptq,
        quantization(modules_in_block_to_quantize=["self_attn", "mlp.gate", "down"]),
        place="gate_proj,up_proj",
    ),
    Case(
        "float-included",
        "wrong",
        drafts.gptq,
        all_of(
            quantization(modules_in_block_to_quantize=["self_attn", "mlp"]), floated(O0)
        ),
        place=O0,
    ),
    Case(
        "float-included",
        "wrong",
        lambda: drafts.fp8((16, 16)),
        quantization(ignored_layers=[]),
        HF,
        place="lm_head",
    ),
)
#: Broken by checkpoints of other tests: those of files, and what no change of a whole one brings
#: about.
ELSEWHERE = {
    *(
        "config-json",
        "generation-config",
        "no-weights",
        "index-json",
        "file-missing",
        "file-damaged",
        "settings-differ",
    ),
    *("tensor-missing", "tensor-misplaced", "tensor-twice"),
    *("quark-two-stages", "quark-mixture", "fp8-names"),
    *("quark-weight", "ct-bfloat16"),
    *(rule for rule in RULES if rule.startswith(("gguf-", "genai-"))),
}
WORDS = {"refused": "refused", "wrong": "loads but wrong", "warning": "loads"}


@loop_over("case", {f"{case.rule} {n}": case for n, case in enumerate(CASES)})
def test_rule(case: Case, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp(case.rule)
    draft = case.whole()
    draft.write(folder / "whole")
    case.change(draft)
    draft.write(folder / "broken")
    for client in case.clients:
        whole = validate(folder / "whole", client)
        assert [str(finding) for finding in whole.findings] == [], client
        broken = validate(folder / "broken", client)
        found = [client, *(str(finding) for finding in broken.findings)]
        assert {finding.rule for finding in broken.findings} == {case.rule}, found
        severities = {finding.severity for finding in broken.findings}
        assert severities == {case.severity}, found
        assert any(case.place in finding.place for finding in broken.findings), found
        assert broken.word == WORDS[case.severity]


def test_every_rule_is_broken_by_a_test() -> None:
    assert {case.rule for case in CASES} | ELSEWHERE == RULES.keys()


@pytest.mark.parametrize("scheme", drafts.SCHEMES)
def test_schemes(scheme: str, tmp_path: Path) -> None:
    folder = drafts.quark(scheme).write(tmp_path / scheme)
    expected: dict[str, set[str]] = {"vllm": set(), "transformers": set()}
    if scheme in drafts.REJECTED:
        expected["vllm"] = {"quark-scheme"}
    if scheme in ("nvfp4", "int4_fp8"):
        expected["transformers"] = {"quark-two-stages"}
    for client, rules in expected.items():
        verdict = validate(folder, client)
        assert {finding.rule for finding in verdict.findings} == rules, verdict.text()
    assert "amd-quark" in verdict.needs[0]


@pytest.mark.parametrize(
    "whole",
    [
        drafts.mixture,
        drafts.quark_kv,
        drafts.quark_attention,
        drafts.plain,
        lambda: drafts.compressed("float-quantized"),
    ],
)
def test_whole_in_vllm(whole: Callable[[], Draft], tmp_path: Path) -> None:
    assert validate(whole().write(tmp_path / "whole"), "vllm").findings == ()


@pytest.mark.parametrize("value", [math.nan, 0.0, -1.0])
def test_scales_of_keys_that_no_cache_takes(value: float, tmp_path: Path) -> None:
    draft = drafts.quark_kv()
    draft.scalars["model.layers.1.self_attn.k_proj.output_scale"] = value
    verdict = validate(draft.write(tmp_path / "kv"), "vllm")
    assert {(each.rule, each.severity) for each in verdict.findings} == {
        ("scale-value", "refused"),
        ("scale-value", "wrong"),
    }


@pytest.mark.parametrize("name", ["{}_scale", "attn.{}_scale", "{0}_proj.{0}_scale"])
def test_scales_of_the_cache_under_the_names_of_vllm(name: str, tmp_path: Path) -> None:
    draft = drafts.quark_kv()
    for side in "kv":
        draft.scalars = {
            key.replace(f"{side}_proj.output_scale", name.format(side)): x
            for key, x in draft.scalars.items()
        }
        draft.rename(f"{side}_proj.output_scale", name.format(side))
    assert validate(draft.write(tmp_path / "kv"), "vllm").findings == ()


def test_the_text_model_of_another_may_be_as_large_as_is_usual(tmp_path: Path) -> None:
    draft = drafts.plain()
    own = {"model_type": "llama", "vocab_size": draft.config["vocab_size"]}
    draft.config = {
        "model_type": "llava",
        "architectures": ["LlavaForConditionalGeneration"],
        "text_config": own,
    }
    draft.rename("model.layers.", "language_model.model.layers.")
    assert validate(draft.write(tmp_path / "llava"), "vllm").findings == ()


def test_experts_in_transformers(tmp_path: Path) -> None:
    verdict = validate(drafts.mixture().write(tmp_path / "mixture"), "transformers")
    assert [finding.rule for finding in verdict.findings] == ["quark-mixture"]
    assert verdict.word == "loads but wrong"


def test_scales_of_vllm_are_not_found_by_transformers(tmp_path: Path) -> None:
    verdict = validate(drafts.fp8().write(tmp_path / "fp8"), "transformers")
    assert [finding.rule for finding in verdict.findings] == ["fp8-names"]


def test_names_of_another_generation_are_those_that_transformers_reads(
    tmp_path: Path,
) -> None:
    draft = drafts.quark()
    draft.rename(".weight_scale", ".weight_quantizer.scale")
    assert validate(draft.write(tmp_path / "old"), "transformers").findings == ()


def test_weights_that_are_cast_alone_have_no_scale(tmp_path: Path) -> None:
    draft = drafts.plain()
    draft.config["quantization_config"] = drafts.quark().quantization
    half = drafts.spec("bfloat16", "per_tensor", "PlaceholderObserver", symmetric=None)
    draft.quantization["global_quant_config"] = layer(half, None)
    verdict = validate(draft.write(tmp_path / "cast"), "transformers")
    assert {finding.rule for finding in verdict.findings} == {
        "quark-weight"
    }  # amd-quark 0.13 asks for a qscheme


def test_groups_of_single_layers_in_gptq(tmp_path: Path) -> None:
    """A rule of ``dynamic`` changes the groups of the layers whose whole name it matches."""
    draft = drafts.gptq()
    draft.quantization["dynamic"] = {r"+:.*\.down_proj$": {"group_size": 64}}
    for name, (out, into) in drafts.LINEARS.items():
        if name.endswith("down_proj"):
            draft.tensors[f"{name}.qzeros"] = ("I32", (into // 64, out // 8))
            draft.tensors[f"{name}.scales"] = ("F16", (into // 64, out))
    verdict = validate(draft.write(tmp_path / "groups"), "vllm")
    assert verdict.findings == ()
    del draft.quantization["dynamic"]
    verdict = validate(draft.write(tmp_path / "equal"), "vllm")
    assert {finding.rule for finding in verdict.findings} == {"tensor-shape"}


def test_nvfp4_whose_inputs_are_static_in_the_first_stage(tmp_path: Path) -> None:
    draft = drafts.quark("nvfp4")
    draft.quantization["global_quant_config"]["input_tensors"][0]["is_dynamic"] = False
    verdict = validate(draft.write(tmp_path / "static"), "vllm")
    assert {finding.rule for finding in verdict.findings} == {"quark-scheme"}
    assert "inputs dynamic in the first stage" in verdict.findings[0].found


def test_experts_with_static_integers_in_compressed_tensors(tmp_path: Path) -> None:
    source = saved(made(config_of("qwen3_moe")), tmp_path / "source")
    for family, folder in (
        ("qwen3_moe", source),
        ("llama3", saved(made(config_of("llama3")), tmp_path / "llama")),
    ):
        out = tmp_path / f"{family}-out"
        config, writing = config_for("int8"), Writing(layout="compressed-tensors")
        quantize_checkpoint(
            folder, tokens(9), config, out, writing=writing, progress=False
        )
        verdict = validate(out, "vllm")
        assert {finding.rule for finding in verdict.findings} == (
            {"ct-scheme"} if family == "qwen3_moe" else set()
        )


def test_names_of_mixtral(tmp_path: Path) -> None:
    """transformers calls experts and routers otherwise in memory, and so do files of AMD Quark."""
    out = tmp_path / "out"
    source = saved(made(config_of("mixtral")), tmp_path / "source")
    quantize_checkpoint(source, None, config_for("ptpc_fp8"), out, progress=False)
    assert validate(out, "vllm").findings == ()
    held = load_file(out / "model.safetensors")
    held = {
        name.replace(".block_sparse_moe.", ".mlp."): tensor
        for name, tensor in held.items()
    }
    save_file(held, out / "model.safetensors", {"format": "pt"})
    verdict = validate(out, "vllm")
    assert verdict.word == "refused" and {
        finding.rule for finding in verdict.findings
    } == {"vllm-names"}
    assert "(8 are called so)" in verdict.text()
