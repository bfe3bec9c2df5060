"""Names of excluded layers: vLLM and transformers read the same list with rules of their own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from quark_onnx.torch.validate import validate
from tests.quark_onnx.torch.validate import drafts
from tests.quark_onnx.torch.validate.drafts import Draft

KEYS = {
    "quark": "exclude",
    "compressed": "ignore",
    "fp8": "ignored_layers",
    "awq": "modules_to_not_convert",
}
LAYOUTS: dict[str, Callable[[], Draft]] = {
    "quark": drafts.quark,
    "compressed": drafts.compressed,
    "fp8": lambda: drafts.fp8((16, 16)),
    "awq": drafts.awq,
}


def rules_of(
    layout: str, entries: list[str], floats: tuple[str, ...], folder: Path, client: str
) -> set[str]:
    """The rules that a client would find broken.

    Args:
        layout: one of ``LAYOUTS``.
        entries: the list of excluded layers, to which the head is added.
        floats: ends of the names of layers that are float in the file.
        folder: where the checkpoint is written.
        client: the client.
    """
    draft = LAYOUTS[layout]()
    draft.quantization[KEYS[layout]] = ["lm_head", *entries]
    for name, size in drafts.LINEARS.items():
        if name.endswith(floats):
            draft.tensors = {
                key: entry
                for key, entry in draft.tensors.items()
                if not key.startswith(f"{name}.")
            }
            draft.tensors[f"{name}.weight"] = ("BF16", size)
    verdict = validate(draft.write(folder), client)
    return {finding.rule for finding in verdict.findings}


QKV = ("q_proj", "k_proj", "v_proj")
FUSED = [f"model.layers.{number}.self_attn.qkv_proj" for number in range(2)]
GATES = [f"model.layers.{number}.mlp.gate_up_proj" for number in range(2)]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_name_of_a_fused_layer_excludes_its_parts(
    layout: str, tmp_path: Path
) -> None:
    """In vLLM alone: transformers has no such layers."""
    for entries, floats in ((FUSED, QKV), (GATES, ("gate_proj", "up_proj"))):
        folder = tmp_path / floats[0]
        assert rules_of(layout, entries, floats, folder, "vllm") == set()
        assert rules_of(layout, entries, (), folder, "vllm") == {"excluded-quantized"}
        if layout != "quark":
            found = rules_of(layout, entries, floats, folder, "transformers")
            assert found == {"float-included"}


@pytest.mark.parametrize("layout", ["quark", "compressed"])
def test_a_pattern_of_a_fused_layer_excludes_its_parts(
    layout: str, tmp_path: Path
) -> None:
    for pattern in ("re:.*qkv_proj", r"re:.*\.(qkv|q)_proj"):
        assert rules_of(layout, [pattern], QKV, tmp_path / "model", "vllm") == set()


def test_a_part_of_the_name_of_a_fused_layer(tmp_path: Path) -> None:
    """vLLM looks for the entries of AutoAWQ within names: v_proj is a part of qkv_proj."""
    found = rules_of("awq", ["v_proj"], (), tmp_path / "model", "vllm")
    assert found == {"excluded-quantized"}
    assert rules_of("awq", ["v_proj"], QKV, tmp_path / "model", "vllm") == set()
    found = rules_of("awq", ["v_proj"], ("v_proj",), tmp_path / "model", "transformers")
    assert found == set()


@pytest.mark.parametrize(
    ("pattern", "vllm"),
    [
        ("-:.*qkv_proj", {"excluded-quantized"}),
        ("-:.*o_proj", {"excluded-quantized"}),
        ("+:.*qkv_proj", {"group-divides"}),
        # groups of q_proj alone are not read by vLLM
        ("+:.*[qkv]_proj", {"group-divides"}),
        ("+:.*\\.[qkv]_proj", set()),
    ],
)
def test_rules_of_gptq(pattern: str, vllm: set[str], tmp_path: Path) -> None:
    """vLLM compares them with the names of fused layers; transformers does not read them."""
    draft = drafts.gptq()
    draft.quantization["dynamic"] = {pattern: {"group_size": 128}}
    folder = draft.write(tmp_path / "model")
    found = {finding.rule for finding in validate(folder, "vllm").findings}
    assert found == vllm
    assert not validate(folder, "transformers").findings


def test_transformers_drops_the_rules_of_gptq() -> None:
    """``GPTQConfig`` hands optimum nothing of them."""
    transformers = pytest.importorskip("transformers")
    entries = {**drafts.gptq().quantization, "dynamic": {"-:.*o_proj": {}}}
    config = transformers.GPTQConfig.from_dict(entries)
    assert "dynamic" not in config.to_dict_optimum()


def test_autoawq_has_no_rules(tmp_path: Path) -> None:
    draft = drafts.awq()
    draft.quantization["dynamic"] = {"-:.*": {}}
    folder = draft.write(tmp_path / "model")
    for client in ("vllm", "transformers"):
        assert not validate(folder, client).findings


def test_modules_around_float_layers(tmp_path: Path) -> None:
    """transformers takes a name for all layers below it, and vLLM for a layer."""
    entries = [f"model.layers.{number}.self_attn" for number in range(2)]
    floats = (*QKV, "o_proj")
    folder = tmp_path / "model"
    assert rules_of("fp8", entries, floats, folder, "transformers") == set()
    assert rules_of("fp8", entries, floats, folder, "vllm") == {"float-included"}


@pytest.mark.parametrize("entry", ["self_attn.o_proj", r"model\.layers\.\d+\..*o_proj"])
@pytest.mark.parametrize("layout", ["fp8", "awq"])
def test_ends_and_expressions_in_transformers(
    layout: str, entry: str, tmp_path: Path
) -> None:
    found = rules_of(layout, [entry], ("o_proj",), tmp_path / "model", "transformers")
    assert found == set()


def test_transformers_prefers_its_own_list(tmp_path: Path) -> None:
    draft = drafts.fp8((16, 16))
    draft.quantization["modules_to_not_convert"] = ["lm_head"]
    draft.quantization["ignored_layers"] = ["lm_head", "o_proj"]
    found = validate(draft.write(tmp_path / "model"), "transformers")
    assert found.findings == ()


def test_experts_that_vllm_excludes_as_one(tmp_path: Path) -> None:
    """Any entry below the experts excludes all of them from native fp8."""
    draft = drafts.mixture()
    names = {name.rpartition(".")[0] for name in draft.tensors if ".experts." in name}
    draft.tensors = {
        name: entry for name, entry in draft.tensors.items() if ".experts." not in name
    }
    for name in names:
        size = (32, 64) if name.endswith("down_proj") else (64, 32)
        draft.tensors[f"{name}.weight"] = ("BF16", size)
    draft.config["quantization_config"] = drafts.fp8().quantization | {
        "ignored_layers": [
            "lm_head",
            *(f"model.layers.{number}.mlp.experts.1.up_proj" for number in range(2)),
        ]
    }
    found = validate(draft.write(tmp_path / "model"), "vllm")
    assert found.findings == ()
