"""Values packed along the outputs of layers that vLLM fuses: right only in whole int32."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quark_onnx.torch.validate import validate
from quark_onnx.torch.validate.finding import Validation
from tests.quark_onnx.torch.validate import drafts
from tests.quark_onnx.torch.validate.drafts import LINEARS, Draft

INPUTS = 64
RULE = "packed-outputs"
#: Numbers of outputs of the parts of a fused layer; 32 values of any width fill int32.
PARTS = ((32, 32), (32, 16), (8, 24), (16, 20), (20, 16), (20, 12), (12, 12))


def compressed(bits: int, symmetric: bool = False) -> Draft:
    draft = drafts.compressed()
    # of other families no sizes are known
    draft.config["model_type"] = "gpt_neox"
    arguments = draft.quantization["config_groups"]["group_0"]["weights"]
    arguments |= {"num_bits": bits, "symmetric": symmetric}
    return draft


def sized(draft: Draft, rows: dict[str, int], bits: int, symmetric: bool) -> Draft:
    """A checkpoint of compressed-tensors whose layers have so many outputs by name, or 32."""
    for name in LINEARS:
        out = rows.get(name.rpartition(".")[2], 32)
        draft.tensors |= {
            f"{name}.weight_packed": ("I32", (out, INPUTS * bits // 32)),
            f"{name}.weight_scale": ("BF16", (out, INPUTS // 32)),
        }
        if not symmetric:
            words = math.ceil(out * bits / 32)
            draft.tensors[f"{name}.weight_zero_point"] = ("I32", (words, INPUTS // 32))
    return draft


def bits_of(values: np.ndarray[Any, Any], bits: int) -> np.ndarray[Any, Any]:
    """Whole words of the values' bits."""
    found = ((values[:, None] >> np.arange(bits)) & 1).ravel()
    return np.pad(found, (0, -len(found) % 32)).reshape(-1, 32)


def in_vllm(parts: tuple[int, ...], bits: int) -> bool:
    """Return whether vLLM's loader puts all values of all parts in their places.

    ``load_merged_column_weight`` and ``_adjust_shard_indexes_for_packing`` in
    vllm/model_executor/parameter.py of vLLM 0.33, with words of bits in place of int32.
    """
    factor = Fraction(32, bits)
    random = np.random.default_rng(1)
    values = [random.integers(1, 2**bits, count) for count in parts]
    wanted = bits_of(np.concatenate(values), bits)
    made, offset = np.zeros_like(wanted), 0
    for part in values:
        size, place = round(len(part) // factor), round(offset // factor)
        made[place : place + size] = bits_of(part, bits)[:size]
        offset += len(part)
    return bool((made == wanted).all())


def in_vllm_from_disk(parts: tuple[int, ...], bits: int, processes: int) -> bool:
    """Return whether vLLM's loader puts all values of a layer that is stored fused in place.

    ``_load_fused_module_from_checkpoint`` in vllm/model_executor/layers/linear.py of vLLM 0.33
    cuts the layer, and gives each part to ``load_merged_column_weight``.
    """
    factor = Fraction(32, bits)
    random = np.random.default_rng(1)
    values = [random.integers(1, 2**bits, count) for count in parts]
    stored = bits_of(np.concatenate(values), bits)
    for rank in range(processes):
        shares = [np.split(part, processes)[rank] for part in values]
        wanted = bits_of(np.concatenate(shares), bits)
        made, offset = np.zeros_like(wanted), 0
        for part in values:
            size, place = round(len(part) // factor), round(offset // factor)
            cut = stored[place : place + size]
            size = round(len(part) // processes // factor)
            place = round(offset // processes // factor)
            made[place : place + size] = cut[rank * size : (rank + 1) * size]
            offset += len(part)
        if not (made == wanted).all():
            return False
    return True


def test_tensor_parallelism() -> None:
    """The values of each process must fill int32."""
    assert in_vllm_from_disk((24, 24), 4, 1) and not in_vllm_from_disk((24, 24), 4, 2)
    assert in_vllm_from_disk((48, 48), 4, 2)


def stored_fused(draft: Draft, width: int, heads: tuple[int, int]) -> Draft:
    """A checkpoint of compressed-tensors or AutoAWQ whose layers are those of Phi-3.

    Args:
        draft: the checkpoint.
        width: number of outputs of gate, and of up.
        heads: numbers of outputs of queries, and of keys or values.
    """
    draft.config |= {
        "model_type": "phi3",
        "architectures": ["Phi3ForCausalLM"],
        "intermediate_size": width,
        "head_dim": 4,
        "num_attention_heads": heads[0] // 4,
        "num_key_value_heads": heads[1] // 4,
    }
    for part in ("k_proj", "v_proj", "up_proj"):
        for end in ("weight_packed", "weight_scale", "weight_zero_point"):
            draft.drop(f"{part}.{end}")
        for end in ("qweight", "qzeros", "scales"):
            draft.drop(f"{part}.{end}")
    draft.rename("q_proj", "qkv_proj")
    draft.rename("gate_proj", "gate_up_proj")
    return draft


QUERIES = ((16, 8), (8, 4), (24, 20), (20, 12), (64, 32))


@pytest.mark.parametrize("heads", QUERIES, ids=str)
def test_zero_points_of_layers_that_are_stored_fused(
    heads: tuple[int, int], tmp_path: Path
) -> None:
    """There is a finding where vLLM splits the layer within an int32."""
    for bits, width in product((4, 8), (32, 20, 12, 8)):
        rows = {"q_proj": heads[0] + 2 * heads[1], "gate_proj": 2 * width}
        draft = sized(compressed(bits), rows, bits, symmetric=False)
        draft = stored_fused(draft, width, heads)
        verdict = validate(draft.write(tmp_path / f"{bits}-{width}"), "vllm")
        for name, parts in (
            ("self_attn.qkv_proj", (heads[0], heads[1], heads[1])),
            ("mlp.gate_up_proj", (width, width)),
        ):
            found = f"model.layers.0.{name}" in places(verdict)
            assert found is not in_vllm_from_disk(parts, bits, 1), verdict.text()
        assert {found.rule for found in verdict.findings} <= {RULE}, verdict.text()


def test_autoawq_that_is_stored_fused(tmp_path: Path) -> None:
    """Queries, keys and values fill int32 together, and not one by one."""
    for number, (heads, is_right) in enumerate((((32, 16), True), ((40, 12), False))):
        draft = stored_fused(drafts.awq(), 64, heads)
        for end, entry in {
            "qkv_proj.qweight": ("I32", (32, 8)),
            "qkv_proj.qzeros": ("I32", (1, 8)),
            "qkv_proj.scales": ("F16", (1, 64)),
            "gate_up_proj.qweight": ("I32", (32, 16)),
            "gate_up_proj.qzeros": ("I32", (1, 16)),
            "gate_up_proj.scales": ("F16", (1, 128)),
        }.items():
            draft.change(end, entry)
        verdict = validate(draft.write(tmp_path / str(number)), "vllm")
        wanted = set() if is_right else {"model.layers.0.self_attn.qkv_proj"}
        assert places(verdict) == wanted | {
            place.replace(".0.", ".1.") for place in wanted
        }
        assert len(verdict.findings) == 2 * len(wanted), verdict.text()


def places(verdict: Validation) -> set[str]:
    return {found.place for found in verdict.findings if found.rule == RULE}


@pytest.mark.parametrize("bits", [3, 4, 8])
@pytest.mark.parametrize("parts", PARTS, ids=str)
def test_zero_points_in_the_loader(
    parts: tuple[int, int], bits: int, tmp_path: Path
) -> None:
    """There is a finding where vLLM's arithmetic puts a zero point in a wrong place."""
    rows = dict(zip(("gate_proj", "up_proj"), parts, strict=True))
    draft = sized(compressed(bits), rows, bits, symmetric=False)
    verdict = validate(draft.write(tmp_path / "draft"), "vllm")
    assert (not places(verdict)) is in_vllm(parts, bits), verdict.text()
    assert {found.rule for found in verdict.findings} <= {RULE}, verdict.text()


def test_the_parts_that_end_within_a_word_are_named(tmp_path: Path) -> None:
    """And no other layers: those that are not fused, and those without zero points."""
    rows = dict.fromkeys(("k_proj", "o_proj", "down_proj"), 20)
    draft = sized(compressed(4), rows, 4, symmetric=False)
    verdict = validate(draft.write(tmp_path / "draft"), "vllm")
    assert places(verdict) == {f"model.layers.{n}.self_attn.k_proj" for n in range(2)}
    assert verdict.word == "loads but wrong"
    draft = sized(compressed(4, symmetric=True), rows, 4, symmetric=True)
    assert not validate(draft.write(tmp_path / "symmetric"), "vllm").findings


def test_transformers_fuses_no_layers(tmp_path: Path) -> None:
    draft = sized(compressed(4), {"k_proj": 20}, 4, symmetric=False)
    assert not places(validate(draft.write(tmp_path / "draft"), "transformers"))


def test_experts_are_refused(tmp_path: Path) -> None:
    """Half of the int32 of gate and up have no room for a part that is rounded up."""
    rows = {"gate_proj": 20, "up_proj": 20}
    draft = sized(compressed(4), rows, 4, symmetric=False)
    draft.rename(".mlp.", ".mlp.experts.0.")
    verdict = validate(draft.write(tmp_path / "draft"), "vllm")
    assert verdict.word == "refused"
    assert places(verdict) == {
        f"model.layers.{n}.mlp.experts.0.{name}" for n in range(2) for name in rows
    }


@pytest.mark.parametrize("scheme", ["int4_wo_32", "uint4_wo_32"])
def test_codes_of_quark(scheme: str, tmp_path: Path) -> None:
    """Integers in groups are packed along the outputs themselves."""
    draft = drafts.quark(scheme)
    draft.config["model_type"] = "gpt_neox"
    assert not validate(draft.write(tmp_path / "whole"), "vllm").findings
    for name, (_, into) in LINEARS.items():
        if name.endswith(("up_proj", "down_proj")):
            draft.tensors |= {
                f"{name}.weight": ("I32", (into, 3)),
                f"{name}.weight_scale": ("BF16", (into // 32, 20)),
                f"{name}.weight_zero_point": ("I32", (into // 32, 3)),
            }
    verdict = validate(draft.write(tmp_path / "draft"), "vllm")
    assert places(verdict) == {f"model.layers.{n}.mlp.up_proj" for n in range(2)}
    assert verdict.word == "loads but wrong", verdict.text()


@pytest.mark.parametrize("make", [drafts.awq, drafts.gptq])
def test_layouts_of_whole_words(make: Callable[[], Draft], tmp_path: Path) -> None:
    """AutoAWQ has no other sizes, and zero points of symmetric GPTQ are not read."""
    assert not validate(make().write(tmp_path / "draft"), "vllm").findings
