"""Pairs of every family are found by probing alone, and rescaling them leaves what a block
computes.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from quark_onnx.torch.algorithms.rescaling.channel_pairs import (
    Pair,
    find_norms,
    find_pairs,
    inputs_last,
    pattern_of,
)
from quark_onnx.torch.algorithms.rescaling.probe import BlockProbe, short
from quark_onnx.torch.calibration.block_stream import BlockArguments
from quark_onnx.torch.config.spec import LayerSpec
from tests import torch_families
from tests.quark_onnx.torch.algorithms.blocks import change, job_of, model_of

_ATTENTION = (
    "input_layernorm -> self_attn.q_proj self_attn.k_proj self_attn.v_proj",
    "self_attn.v_proj -> self_attn.o_proj",
)
_MLP = (
    "post_attention_layernorm -> mlp.gate_proj mlp.up_proj",
    "mlp.up_proj -> mlp.down_proj",
)
_LLAMA = (*_ATTENTION, *_MLP)
_EXPERTS = "mlp.experts.*.up_proj -> mlp.experts.*.down_proj"
_TO_EXPERTS = (
    "post_attention_layernorm -> mlp.gate mlp.experts.*.gate_proj mlp.experts.*.up_proj"
)
_GEMMA = (
    "input_layernorm+1 -> self_attn.q_proj self_attn.k_proj self_attn.v_proj",
    "self_attn.v_proj -> self_attn.o_proj",
    "pre_feedforward_layernorm+1 -> mlp.gate_proj mlp.up_proj",
    "mlp.up_proj -> mlp.down_proj",
)

#: What an expert on each family writes down; "+1" marks norms that multiply by 1 + their weight.
EXPECTED: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(
        ("llama2", "llama3", "llama3.2", "qwen2", "qwen3", "mistral", "granite"), _LLAMA
    ),
    "opt": (
        "self_attn_layer_norm -> self_attn.k_proj self_attn.v_proj self_attn.q_proj",
        "self_attn.v_proj -> self_attn.out_proj",
        "final_layer_norm -> fc1",
        "fc1 -> fc2",  # a ReLU in between
    ),
    "gptj": (
        "ln_1 -> attn.k_proj attn.v_proj attn.q_proj mlp.fc_in",
        "attn.v_proj -> attn.out_proj",
    ),
    "gpt2": ("ln_1 -> attn.c_attn", "attn.c_attn -> attn.c_proj", "ln_2 -> mlp.c_fc"),
    "phi": (
        "input_layernorm -> self_attn.q_proj self_attn.k_proj self_attn.v_proj mlp.fc1",
        "self_attn.v_proj -> self_attn.dense",
    ),
    "phi3": (
        "input_layernorm -> self_attn.qkv_proj",
        "self_attn.qkv_proj -> self_attn.o_proj",
        "post_attention_layernorm -> mlp.gate_up_proj",
        "mlp.gate_up_proj -> mlp.down_proj",
    ),
    "cohere": (
        (
            "input_layernorm -> self_attn.q_proj self_attn.k_proj self_attn.v_proj"
            " mlp.gate_proj mlp.up_proj"
        ),
        "self_attn.v_proj -> self_attn.o_proj",
        "mlp.up_proj -> mlp.down_proj",
    ),
    "mixtral": (*_ATTENTION, _TO_EXPERTS, _EXPERTS),
    "qwen3_moe": (*_ATTENTION, _TO_EXPERTS, _EXPERTS),
    "qwen2_moe": (
        *_ATTENTION,
        (
            f"{_TO_EXPERTS} mlp.shared_expert.gate_proj mlp.shared_expert.up_proj"
            " mlp.shared_expert_gate"
        ),
        "mlp.shared_expert.up_proj -> mlp.shared_expert.down_proj",
        _EXPERTS,
    ),
    "deepseek_v2": (
        "input_layernorm -> self_attn.q_proj self_attn.kv_a_proj_with_mqa",
        "self_attn.kv_a_layernorm -> self_attn.kv_b_proj",
        "self_attn.kv_b_proj -> self_attn.o_proj",
        f"{_TO_EXPERTS} mlp.shared_experts.gate_proj mlp.shared_experts.up_proj",
        _EXPERTS,
        "mlp.shared_experts.up_proj -> mlp.shared_experts.down_proj",
    ),
    "llama4": (
        *_ATTENTION,
        (
            "post_attention_layernorm -> feed_forward.router"
            " feed_forward.experts.*.gate_proj feed_forward.experts.*.up_proj"
            " feed_forward.shared_expert.gate_proj feed_forward.shared_expert.up_proj"
        ),
        "feed_forward.experts.*.up_proj -> feed_forward.experts.*.down_proj",
        "feed_forward.shared_expert.up_proj -> feed_forward.shared_expert.down_proj",
    ),
    # experts clamp what they let through
    "gpt_oss": (*_ATTENTION, _TO_EXPERTS.replace("mlp.gate ", "mlp.router ")),
    # queries, keys and values are clamped, and the experts are no layers
    "dbrx": ("norm_attn_norm.norm_1 -> norm_attn_norm.attn.Wqkv",),
    "olmo": (_ATTENTION[1], _MLP[1]),  # norms without weights
    "gemma2": _GEMMA,
    "gemma3": _GEMMA,
    "chatglm3": (
        "input_layernorm -> self_attention.query_key_value",
        "self_attention.query_key_value -> self_attention.dense",
        "post_attention_layernorm -> mlp.dense_h_to_4h",
        "mlp.dense_h_to_4h -> mlp.dense_4h_to_h",
    ),
    "qwen": (
        "ln_1 -> attn.c_attn",
        "attn.c_attn -> attn.c_proj",
        "ln_2 -> mlp.w1 mlp.w2",
        "mlp.w1 -> mlp.c_proj",
    ),
    "grok1": (
        "pre_attn_norm -> attn.q_proj attn.k_proj attn.v_proj",
        "attn.v_proj -> attn.o_proj",
        (
            "pre_moe_norm -> moe_block.gate moe_block.experts.*.linear"
            " moe_block.experts.*.linear_v"
        ),
        "moe_block.experts.*.linear_v -> moe_block.experts.*.linear_1",
    ),
}


def described(pair: Pair) -> tuple[str, frozenset[str]]:
    return pattern_of(pair.source) + "+1" * (pair.unit == 1), frozenset(
        map(pattern_of, pair.readers)
    )


def rescale(job: Any, pairs: list[Pair]) -> None:
    for index, pair in enumerate(pairs):
        scale = 0.5 + 1.5 * torch.rand(
            len(pair.rows), generator=torch.Generator().manual_seed(index)
        )
        pair.apply(job.block, scale)


@pytest.mark.parametrize("family", torch_families.FAMILIES)
def test_pairs_of_a_family(family: str) -> None:
    job = job_of(model_of(family), LayerSpec())
    weights = {
        name: inputs_last(module).clone() for name, (module, _) in job.layers.items()
    }
    pairs = find_pairs(job.block, job.floats[0])
    expected = {
        (a, frozenset(b.split()))
        for a, b in (line.split(" -> ") for line in EXPECTED[family])
    }
    assert {described(pair) for pair in pairs} == expected
    assert all(
        torch.equal(inputs_last(job.layers[name][0]), weight)
        for name, weight in weights.items()
    )
    for pair in pairs:
        kind = [
            name
            for name in job.layers
            if pattern_of(job.local(name)) in set(map(pattern_of, pair.readers))
        ]
        if "experts.*" in pattern_of(pair.readers[-1]) and "experts" not in pair.source:
            assert {job.local(name) for name in kind} <= set(
                pair.readers
            )  # of every expert, reached or not
    assert change(job, lambda: rescale(job, pairs)) < 1e-4


@pytest.mark.parametrize("family", ["llama3", "gemma2", "mixtral", "phi3", "gpt2"])
def test_rewriting_weights_that_matter_and_back(family: str) -> None:
    job = job_of(model_of(family), LayerSpec())
    for pair in find_pairs(job.block, job.floats[0]):
        before = [tensor.detach().clone() for tensor in pair.tensors(job.block)]
        scale = torch.linspace(0.5, 2.0, len(pair.rows))
        pair.apply(job.block, scale)
        after = pair.tensors(job.block)
        assert not any(
            torch.allclose(one, two)
            for one, two in zip(before, after, strict=True)
            if one.ndim > 1
        )
        pair.apply(job.block, 1 / scale)
        for one, two in zip(before, pair.tensors(job.block), strict=True):
            torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "family", ["llama3", "gemma3", "mixtral", "gpt2", "phi3", "deepseek_v2"]
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_models_of_16_bits_have_the_same_pairs(family: str, dtype: Any) -> None:
    job = job_of(model_of(family, dtype), LayerSpec())
    found = {described(pair) for pair in find_pairs(job.block, job.floats[0])}
    assert found == {
        (a, frozenset(b.split()))
        for a, b in (line.split(" -> ") for line in EXPECTED[family])
    }


def test_values_that_share_a_head() -> None:
    job = job_of(model_of("llama3"), LayerSpec())
    pair = next(
        each
        for each in find_pairs(job.block, job.floats[0])
        if each.source.endswith("v_proj")
    )
    assert pair.rows.tolist() == list(range(32))
    assert pair.columns.tolist() == [
        16 * (head // 2) + place for head in range(4) for place in range(16)
    ]


def test_values_within_queries_and_keys_head_by_head() -> None:
    torch_families.FAMILIES["gpt_neox"] = (
        "gpt_neox",
        torch_families.FAMILIES["llama2"][1],
    )
    try:
        job = job_of(model_of("gpt_neox"), LayerSpec())
    finally:
        del torch_families.FAMILIES["gpt_neox"]
    pair = next(
        each
        for each in find_pairs(job.block, job.floats[0])
        if each.source.endswith("query_key_value")
    )
    assert pair.rows.tolist() == [
        48 * head + 32 + place for head in range(4) for place in range(16)
    ]
    assert pair.columns.tolist() == list(range(64))


class Block(nn.Module):
    """A norm and two layers."""

    def __init__(self, activation: Any, residual: bool = False) -> None:
        super().__init__()
        self.norm, self.up, self.down = (
            nn.LayerNorm(16),
            nn.Linear(16, 24),
            nn.Linear(24, 16),
        )
        self.activation, self.residual = activation, residual

    def forward(self, hidden: Any) -> Any:
        x = self.norm(hidden)
        return (x if self.residual else hidden) + self.down(self.activation(self.up(x)))


def pairs_of(block: Any) -> set[tuple[str, frozenset[str]]]:
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return set(
        map(
            described,
            find_pairs(
                block, BlockArguments(torch.randn(1, 20, 16, generator=generator))
            ),
        )
    )


UP, DOWN = ("norm", frozenset(["up"])), ("up", frozenset(["down"]))


def test_what_lies_between_decides() -> None:
    assert pairs_of(Block(torch.relu)) == {UP, DOWN}
    assert pairs_of(Block(nn.LeakyReLU())) == {UP, DOWN}
    assert pairs_of(Block(nn.GELU())) == {UP}
    assert pairs_of(Block(lambda x: x.clamp(-1, 1))) == {UP}
    assert pairs_of(Block(lambda x: x.cumsum(-1))) == {
        UP
    }  # each input is of several channels
    assert pairs_of(Block(torch.relu, residual=True)) == {DOWN}


def test_channels_in_another_order() -> None:
    block = Block(lambda x: x.flip(-1))
    assert pairs_of(block) == {UP, DOWN}
    pair = find_pairs(block, BlockArguments(torch.randn(1, 20, 16)))[1]
    assert pair.rows[pair.columns].tolist() == list(range(24))[::-1]


def test_shared_weights_belong_to_no_pair() -> None:
    block = Block(torch.relu)
    block.other = nn.Linear(16, 24)
    block.other.weight = block.up.weight
    assert pairs_of(block) == set()


def test_norms_alone() -> None:
    job = job_of(model_of("cohere"), LayerSpec())
    pairs = find_norms(BlockProbe(job.block, job.floats[0]))
    assert [pair.source for pair in pairs] == ["input_layernorm"]


def test_a_short_call_is_the_beginning_of_a_long_one() -> None:
    job = job_of(model_of("mistral"), LayerSpec())
    cut = short(job.block, job.floats[0], 5)
    assert cut.hidden.shape[1] == 5
    with torch.no_grad():
        torch.testing.assert_close(
            cut.run(job.block), job.floats[0].run(job.block)[:, :5]
        )
    backwards = nn.Module()
    backwards.forward = lambda hidden: hidden.flip(1)  # type: ignore[method-assign]
    call = BlockArguments(torch.randn(1, 12, 4))
    assert short(backwards, call, 5) is call
