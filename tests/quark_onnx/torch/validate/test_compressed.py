"""Checkpoints of compressed-tensors: packed by the library itself, or with its configurations."""

from __future__ import annotations

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
from quark_onnx.torch.validate import validate
from quark_onnx.torch.validate.clients import findings_of
from tests.quark_onnx.torch.validate import drafts
from tests.torch_models import llama, made, saved

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


@pytest.mark.parametrize("family", ["llama", "unknown"])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("group_size", [None, 4])
@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 7, 8])
def test_rows_that_end_within_an_int32(
    bits: int, group_size: int | None, symmetric: bool, family: str, tmp_path: Path
) -> None:
    arguments: dict[str, Any] = {
        "num_bits": bits,
        "type": "int",
        "symmetric": symmetric,
        "strategy": "channel" if group_size is None else "group",
    }
    if group_size is not None:
        arguments["group_size"] = group_size
    folder = padded(arguments, family, tmp_path / "packed")
    for client in BOTH:
        verdict = validate(folder, client)
        rules = {finding.rule for finding in verdict.findings}
        # transformers has a rule for zero points of any size
        assert rules <= {"ct-zero-points"}, verdict.text()


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
        assert rules <= {"ct-zero-points"}


def test_other_widths_than_those_of_the_model(tmp_path: Path) -> None:
    arguments = {"num_bits": 3, "type": "int", "symmetric": True, "strategy": "channel"}
    folder = padded(arguments, "llama", tmp_path / "packed")
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    # as many int32 as for 44 inputs
    config["intermediate_size"] = INNER + 1
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    verdict = validate(folder, "vllm")
    assert {finding.rule for finding in verdict.findings} == {"weight-shape"}
