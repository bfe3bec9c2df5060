"""Blocks of fp8 over the ends of fused layers, in each layout."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from quark_onnx.torch.validate import validate
from tests.quark_onnx.torch.validate import drafts
from tests.quark_onnx.torch.validate.drafts import LINEARS, Draft, layer, spec

#: The only blocks of AMD Quark's layout.
BLOCK = 128


def native() -> Draft:
    return drafts.fp8((BLOCK, BLOCK))


def compressed() -> Draft:
    draft = drafts.compressed("float-quantized")
    group = draft.quantization["config_groups"]["group_0"]
    group["weights"] |= {"strategy": "block", "block_structure": f"{BLOCK}x{BLOCK}"}
    return draft


def quark() -> Draft:
    draft = drafts.quark("ptpc_fp8")
    weight = spec(
        "fp8_e4m3", "per_block", "PerBlockMinMaxObserver", block_size=[BLOCK, BLOCK]
    )
    inputs = {**drafts.TOKENS, "qscheme": "per_group", "group_size": BLOCK}
    draft.quantization["global_quant_config"] = layer(weight, inputs)
    return draft


def sized(make: Callable[[], Draft], **rows: int) -> Draft:
    """A checkpoint whose layers have so many outputs by name, and a block otherwise."""
    draft = make()
    # of other families no sizes are known
    draft.config["model_type"] = "gpt_neox"
    end = "weight_scale_inv" if make is native else "weight_scale"
    for name in LINEARS:
        out = rows.get(name.rpartition(".")[2], BLOCK)
        draft.tensors[f"{name}.weight"] = ("F8_E4M3", (out, BLOCK))
        draft.tensors[f"{name}.{end}"] = ("F32", (-(-out // BLOCK), 1))
    return draft


@pytest.mark.parametrize("make", [native, compressed, quark])
def test_parts_of_fused_layers(make: Callable[[], Draft], tmp_path: Path) -> None:
    """All but the last part end with a block."""
    draft = sized(make, v_proj=BLOCK + 16, up_proj=16, down_proj=40)
    verdict = validate(draft.write(tmp_path / "last"), "vllm")
    assert verdict.findings == (), verdict.text()
    draft = sized(make, k_proj=BLOCK + 16, gate_proj=16)
    verdict = validate(draft.write(tmp_path / "within"), "vllm")
    found = {(finding.rule, finding.place) for finding in verdict.findings}
    assert found == {
        ("group-divides", f"model.layers.{number}.{name}")
        for number in range(2)
        for name in ("self_attn.k_proj", "mlp.gate_proj")
    }


@pytest.mark.parametrize("make", [native, compressed, quark])
def test_layers_of_experts(make: Callable[[], Draft], tmp_path: Path) -> None:
    """Both layers that are fused end with a block."""
    for name, is_refused in (("up_proj", True), ("down_proj", False)):
        draft = sized(make, **{name: BLOCK + 16})
        draft.rename(".mlp.", ".mlp.experts.0.")
        verdict = validate(draft.write(tmp_path / name), "vllm")
        rules = {finding.rule for finding in verdict.findings}
        assert ("group-divides" in rules) is is_refused, verdict.text()


@pytest.mark.parametrize("make", [native, compressed, quark])
def test_layers_that_are_stored_fused(
    make: Callable[[], Draft], tmp_path: Path
) -> None:
    """Phi-3 stores gate and up as one tensor, which vLLM splits."""
    for name, rows, is_refused in (("whole", 2 * BLOCK, False), ("cut", BLOCK, True)):
        draft = sized(make, gate_proj=rows)
        for end in (
            "up_proj.weight",
            "up_proj.weight_scale",
            "up_proj.weight_scale_inv",
        ):
            draft.drop(end)
        draft.rename("gate_proj", "gate_up_proj")
        verdict = validate(draft.write(tmp_path / name), "vllm")
        found = {(finding.rule, finding.place) for finding in verdict.findings}
        places = [f"model.layers.{number}.mlp.gate_up_proj" for number in range(2)]
        wanted = {("group-divides", place) for place in places} if is_refused else set()
        assert found == wanted, verdict.text()
