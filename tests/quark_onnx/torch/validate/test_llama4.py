"""Rows of queries and keys that vLLM's loader of Llama 4 reorders, with their scales."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from quark_onnx.torch.validate import validate
from tests.quark_onnx.torch.validate import drafts
from tests.quark_onnx.torch.validate.drafts import Draft

Array = npt.NDArray[np.float64]
HEADS = {"q_proj": 4, "k_proj": 2}
ROWS = {"q_proj": 32, "k_proj": 16}
COLUMNS = 32


def reordered(tensor: Array, heads: int) -> Array:
    """``permute_qk_weight_for_rotary`` of vLLM 0.33, llama4.py.

    Raises ValueError where the rows do not fill the view.
    """
    out, into = tensor.shape
    view = tensor.reshape(heads, out // heads // 2, 2, into)
    return view.swapaxes(1, 2).reshape(out, into)


def outcome(layer: str, block: tuple[int, int], name: str) -> str:
    """What follows for the weights of a layer: "", "wrong" or "refused"."""
    generator = np.random.default_rng(0)
    codes = generator.normal(size=(ROWS[layer], COLUMNS))
    rows, columns = -(-ROWS[layer] // block[0]), -(-COLUMNS // block[1])
    scales = generator.uniform(1, 2, size=(rows, columns))
    whole = dequantized(codes, scales, block)
    wanted = reordered(whole, HEADS[layer])
    if name == "weight_scale" and scales.size > 1:
        try:
            scales = reordered(scales, HEADS[layer])
        except ValueError:
            return "refused"
    found = dequantized(reordered(codes, HEADS[layer]), scales, block)
    return "" if np.array_equal(found, wanted) else "wrong"


def dequantized(codes: Array, scales: Array, block: tuple[int, int]) -> Array:
    each = scales.repeat(block[0], 0).repeat(block[1], 1)
    return codes * each[: codes.shape[0], : codes.shape[1]]


def native(block: tuple[int, int]) -> Draft:
    return drafts.fp8(block)


def compressed(block: tuple[int, int]) -> Draft:
    """FP8 of llm-compressor in blocks."""
    draft = drafts.compressed("float-quantized")
    group = draft.quantization["config_groups"]["group_0"]
    group["weights"] |= {"strategy": "block", "block_structure": list(block)}
    for name, (out, into) in drafts.LINEARS.items():
        shape = (-(-out // block[0]), -(-into // block[1]))
        draft.tensors[f"{name}.weight_scale"] = ("F32", shape)
    return draft


@pytest.mark.parametrize("name", ["weight_scale_inv", "weight_scale"])
@pytest.mark.parametrize("high", [1, 2, 4, 8, 16, 32, 64])
@pytest.mark.parametrize("wide", [16, 64])
def test_blocks_of_rows(high: int, wide: int, name: str, tmp_path: Path) -> None:
    block = (high, wide)
    draft = (native if name == "weight_scale_inv" else compressed)(block)
    draft.config |= {
        "model_type": "llama4_text",
        "architectures": ["Llama4ForCausalLM"],
    }
    verdict = validate(draft.write(tmp_path / "llama4"), "vllm")
    found = {
        (finding.place, finding.severity)
        for finding in verdict.findings
        if finding.rule == "vllm-order"
    }
    wanted = {
        (f"model.layers.{number}.self_attn.{layer}", outcome(layer, block, name))
        for number in range(2)
        for layer in HEADS
    }
    assert found == {each for each in wanted if each[1]}, verdict.text()


def test_the_vision_tower_is_not_reordered(tmp_path: Path) -> None:
    draft = native((4, 16))
    draft.config = {
        "architectures": ["Llama4ForConditionalGeneration"],
        "model_type": "llama4",
        "text_config": draft.config,
        "quantization_config": draft.quantization,
    }
    draft.rename("model.layers.0.", "vision_model.model.layers.0.")
    draft.rename("model.layers.1.", "language_model.model.layers.1.")
    verdict = validate(draft.write(tmp_path / "llama4"), "vllm")
    places = {each.place for each in verdict.findings if each.rule == "vllm-order"}
    attention = "language_model.model.layers.1.self_attn"
    assert places == {f"{attention}.q_proj", f"{attention}.k_proj"}
