"""Checkpoints of compressed-tensors: packed by the library itself, or with its configurations."""

from __future__ import annotations

import itertools
import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from quark_onnx.torch.checkpoints.float_checkpoint import FloatCheckpoint
from quark_onnx.torch.checkpoints.layouts import layout_named
from quark_onnx.torch.config.language import config_for
from quark_onnx.torch.pipelines.client_check import planned_checkpoint
from quark_onnx.torch.pipelines.file_to_file import Writing, quantize_checkpoint
from quark_onnx.torch.validate import validate
from quark_onnx.torch.validate.checkpoint import read
from quark_onnx.torch.validate.clients import findings_of
from quark_onnx.torch.validate.compressed import GroupsInTransformers
from tests.quark_onnx.torch.validate import drafts
from tests.torch_models import llama, made, saved, tokens

BOTH = ("vllm", "transformers")
#: Widths whose rows of 3 bits, and of most others, end within an int32.
HIDDEN, INNER = 36, 44


def padded(arguments: dict[str, Any], family: str, folder: Path) -> Path:
    """A checkpoint whose layers compressed-tensors has packed.

    Args:
        arguments: those of the weights.
        family: model_type; of most families no sizes are known.
        folder: where it is written.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip("compressed_tensors")
        from compressed_tensors.compressors import BaseCompressor
        from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    scheme = QuantizationScheme(
        targets=["Linear"], weights=QuantizationArgs(**arguments)
    )
    compressor = BaseCompressor.get_value_from_registry("pack-quantized")
    draft = drafts.compressed()
    draft.config |= {
        "model_type": family,
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
    }
    draft.quantization["config_groups"]["group_0"]["weights"] = arguments
    tensors = {"model.embed_tokens.weight": torch.ones(40, HIDDEN)}
    tensors |= {"lm_head.weight": torch.ones(40, HIDDEN)}
    norms = [name for name in drafts.plain().tensors if "norm" in name]
    tensors |= {name: torch.ones(HIDDEN) for name in norms}
    sizes = {32: HIDDEN, 64: INNER, 16: 16}
    for name, (out, into) in drafts.LINEARS.items():
        # the heads have a size of their own
        rows = out if name.endswith(("q_proj", "k_proj", "v_proj")) else sizes[out]
        columns = 32 if name.endswith("o_proj") else sizes[into]
        size = arguments.get("group_size", columns)
        state = {
            "weight": torch.zeros(rows, columns),
            "weight_scale": torch.ones(rows, columns // size),
        }
        if not arguments["symmetric"]:
            shape = state["weight_scale"].shape
            state["weight_zero_point"] = torch.zeros(shape, dtype=torch.int8)
        for end, tensor in compressor.compress(state, scheme).items():
            tensors[f"{name}.{end}"] = tensor
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(draft.config), encoding="utf-8")
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


#: Rules of zero points alone: of any size, and of layers that are fused.
ZERO_POINT_RULES = {"transformers": {"ct-zero-points"}, "vllm": {"packed-outputs"}}


@pytest.mark.parametrize("group_size", [None, 4])
@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 7, 8])
def test_rows_that_end_within_an_int32(
    bits: int, group_size: int | None, tmp_path: Path
) -> None:
    arguments: dict[str, Any] = {"num_bits": bits, "type": "int", "strategy": "channel"}
    if group_size is not None:
        arguments |= {"strategy": "group", "group_size": group_size}
    for symmetric, family in itertools.product((True, False), ("llama", "unknown")):
        packed = tmp_path / f"{family}-{symmetric}"
        folder = padded(arguments | {"symmetric": symmetric}, family, packed)
        for client in BOTH:
            verdict = validate(folder, client)
            rules = {finding.rule for finding in verdict.findings}
            assert rules <= ZERO_POINT_RULES[client], verdict.text()


@pytest.mark.parametrize("scheme", ["int4_wo_per_channel", "uint4_wo_per_channel"])
def test_plans_of_rows_that_end_within_an_int32(scheme: str, tmp_path: Path) -> None:
    """The values of weight_shape are not known before the checkpoint is written."""
    config = llama(hidden_size=HIDDEN, intermediate_size=INNER, head_dim=8)
    source = FloatCheckpoint(saved(made(config), tmp_path / "source"))
    plan = planned_checkpoint(
        source, config_for(scheme), layout_named("compressed-tensors")
    )
    for client in BOTH:
        rules = {finding.rule for finding in findings_of(plan, client)}
        assert rules <= ZERO_POINT_RULES[client]


def test_other_widths_than_those_of_the_model(tmp_path: Path) -> None:
    arguments = {"num_bits": 3, "type": "int", "symmetric": True, "strategy": "channel"}
    folder = padded(arguments, "llama", tmp_path / "packed")
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    # as many int32 as for 44 inputs
    config["intermediate_size"] = INNER + 1
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    verdict = validate(folder, "vllm")
    assert {finding.rule for finding in verdict.findings} == {"weight-shape"}


ATTENTION = {
    "targets": ["LlamaAttention"],
    "weights": None,
    "input_activations": drafts.compressed_kv().quantization["kv_cache_scheme"],
    "output_activations": None,
}


@pytest.mark.parametrize("kind", ["pack-quantized", "float-quantized"])
def test_groups_of_attention(kind: str, tmp_path: Path) -> None:
    """vLLM skips them, and transformers rounds keys, values and queries by them."""
    draft = drafts.compressed(kind)
    groups = draft.quantization["config_groups"]
    draft.quantization["config_groups"] = {"group_1": ATTENTION, **groups}
    for client in BOTH:
        verdict = validate(draft.write(tmp_path / "attention"), client)
        assert verdict.findings == (), verdict.text()
        assert sum(verdict.schemes.values()) == len(drafts.LINEARS)


def test_a_group_of_attention_alone(tmp_path: Path) -> None:
    draft = drafts.plain()
    draft.config["quantization_config"] = drafts.compressed().quantization
    draft.quantization["config_groups"] = {"group_0": ATTENTION}
    for client in BOTH:
        assert validate(draft.write(tmp_path / "attention"), client).findings == ()


def test_scales_of_heads_without_a_scheme_of_the_cache(tmp_path: Path) -> None:
    """vLLM makes a scale for each head by kv_cache_scheme, not by a group of attention."""
    draft = drafts.compressed_kv()
    heads = {**draft.quantization["kv_cache_scheme"], "strategy": "attn_head"}
    group = {**ATTENTION, "input_activations": heads}
    draft.quantization["config_groups"]["group_1"] = group
    for name in draft.scalars:
        draft.tensors[name] = ("F32", (2, 1, 1))
    draft.scalars = {}
    draft.quantization["kv_cache_scheme"] = heads
    assert validate(draft.write(tmp_path / "heads"), "vllm").loads
    draft.quantization["kv_cache_scheme"] = None
    verdict = validate(draft.write(tmp_path / "heads"), "vllm")
    assert {finding.rule for finding in verdict.findings} == {"tensor-shape"}


def test_activations_of_layers_without_weights(tmp_path: Path) -> None:
    """A group of k_proj without weights leaves its weights float in transformers."""
    draft = drafts.compressed()
    cache = draft.quantization["config_groups"]
    draft.quantization["config_groups"] = {
        "cache": {**ATTENTION, "targets": ["re:.*k_proj"]},
        **cache,
    }
    verdict = validate(draft.write(tmp_path / "keys"), "transformers")
    assert {finding.rule for finding in verdict.findings} == {"excluded-quantized"}
    verdict = validate(draft.write(tmp_path / "keys"), "vllm")
    assert {finding.rule for finding in verdict.findings} == {"ct-groups"}


def test_scales_of_outputs_that_vllm_reads(tmp_path: Path) -> None:
    """Integers with static inputs and outputs, of all layers (Gemma)."""
    draft = drafts.compressed()
    eight = {"num_bits": 8, "type": "int", "strategy": "tensor", "symmetric": True}
    group = draft.quantization["config_groups"]["group_0"]
    group |= {"input_activations": eight, "output_activations": eight}
    for name in drafts.LINEARS:
        draft.tensors[f"{name}.input_scale"] = ("F32", (1,))
        draft.tensors[f"{name}.output_scale"] = ("F32", (1,))
        draft.scalars[f"{name}.output_scale"] = 0.5 + len(draft.scalars)
    for client in BOTH:
        verdict = validate(draft.write(tmp_path / "around"), client)
        assert verdict.findings == (), verdict.text()
    group["input_activations"] = {**eight, "type": "float"}
    verdict = validate(draft.write(tmp_path / "floats"), "vllm")
    assert "kv-scales-loader" in {finding.rule for finding in verdict.findings}


def test_groups_in_transformers(tmp_path: Path) -> None:
    """The group of each layer is the one that compressed-tensors itself finds."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip("compressed_tensors")
        from compressed_tensors.utils.match import is_match, match_targets
    draft = drafts.compressed()
    weights = draft.quantization["config_groups"]["group_0"]["weights"]
    checkpoint = read(draft.write(tmp_path / "draft"))
    name = "model.layers.0.self_attn.k_proj"
    targets = [
        name,
        "Linear",
        "re:.*k_proj",
        "re:.*_proj",
        "re:model",
        "LlamaAttention",
    ]
    linear, layer = torch.nn.Linear(1, 1), checkpoint.modules[name]
    for given, ignored in itertools.product(
        itertools.permutations(targets, 3),
        [[], [name], ["re:.*[qk]_proj"], ["lm_head"]],
    ):
        checkpoint.quantization["ignore"] = ignored
        checkpoint.quantization["config_groups"] = {
            target: {"targets": [target], "weights": weights} for target in given
        }
        found = GroupsInTransformers(checkpoint).of(layer)
        ours = [] if found is None else found[1]["targets"]
        theirs = match_targets(name, linear, given)[:1]
        if not is_match(name, linear, given, ignored):
            theirs = []
        assert ours == theirs, (given, ignored)


@pytest.mark.parametrize("scheme", ["int4_wo_32", "fp8"])
def test_quantized_heads(scheme: str, tmp_path: Path) -> None:
    """vLLM finds a head by its name, and does not take it for a Linear layer."""
    source = saved(made(llama()), tmp_path / "source")
    config = config_for(scheme).with_(exclude=())
    writing = Writing(layout="compressed-tensors")
    out = tmp_path / "out"
    quantize_checkpoint(source, tokens(), config, out, writing=writing, progress=False)
    for client in BOTH:
        assert validate(out, client).findings == ()
    path = out / "config.json"
    content = json.loads(path.read_text(encoding="utf-8"))
    group = content["quantization_config"]["config_groups"]["group_0"]
    group["targets"].remove("lm_head")
    path.write_text(json.dumps(content), encoding="utf-8")
    verdict = validate(out, "vllm")
    assert {finding.rule for finding in verdict.findings} == {"excluded-quantized"}
    assert validate(out, "transformers").findings == ()


def test_layers_of_experts_with_schemes_of_their_own(tmp_path: Path) -> None:
    """vLLM has one scheme for the layers of all experts, which it asks the first expert for."""
    draft = drafts.compressed()
    draft.config |= {
        "model_type": "qwen3_moe",
        "architectures": ["Qwen3MoeForCausalLM"],
        "moe_intermediate_size": 64,
    }
    draft.rename(".mlp.", ".mlp.experts.0.")
    groups = draft.quantization["config_groups"]
    assert validate(draft.write(tmp_path / "one"), "vllm").findings == ()
    weights = groups["group_0"]["weights"]
    target = "re:.*down_proj"
    groups["group_1"] = {"targets": [target], "weights": dict(weights)}
    assert validate(draft.write(tmp_path / "equal"), "vllm").findings == ()
    groups["group_1"]["weights"]["observer"] = "mse"
    verdict = validate(draft.write(tmp_path / "other"), "vllm")
    assert {finding.rule for finding in verdict.findings} == {"ct-scheme"}
    assert validate(draft.write(tmp_path / "other"), "transformers").findings == ()
    del groups["group_1"]
    draft.quantization["ignore"].append(target)
    verdict = validate(draft.write(tmp_path / "ignored"), "vllm")
    assert "ct-scheme" in {finding.rule for finding in verdict.findings}
