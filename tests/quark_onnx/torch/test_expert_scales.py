"""Input scales of experts: clients keep the greatest of a block, and 1.0 stands where a file has
none.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from quark_onnx.torch.checkpoints.load import load_checkpoint
from quark_onnx.torch.export.api import (
    export_safetensors,
    import_model_from_safetensors,
)
from quark_onnx.torch.models.experts import unfuse_experts
from quark_onnx.torch.models.quantized_layer import QuantizedLayer
from quark_onnx.torch.pipelines.file_to_file import Writing, quantize_checkpoint
from quark_onnx.torch.pipelines.in_memory import quantize_model
from quark_onnx.torch.pipelines.ptq import config_for
from tests.torch_families import config_of
from tests.torch_models import logits, made, saved, tokens

#: What few tokens reach, and most experts see nothing of.
_FEW = [torch.tensor([[5, 7]])]


def greatest(family: str, data: list[Any]) -> dict[str, float]:
    """The greatest number that each layer of an expert reads.

    Layers that read nothing are missing.
    """
    model, found = made(config_of(family)), dict[str, float]()
    unfuse_experts(model)

    def note(name: str) -> Any:
        def hook(_: Any, read: Any) -> None:
            found[name] = max(found.get(name, 0.0), float(read[0].abs().max()))

        return hook

    for name, module in model.named_modules():
        if ".experts." in name and isinstance(module, torch.nn.Linear):
            module.register_forward_pre_hook(note(name))
    for batch in data:
        logits(model, batch)
    return found


def group_of(name: str, names: Any) -> list[str]:
    """The layers of all experts of the same block that read what this one does, or its like."""
    stack, down = name.rsplit(".", 2)[0], name.endswith("down_proj")
    return [
        each
        for each in names
        if each.startswith(stack) and each.endswith("down_proj") is down
    ]


def scales(model: Any) -> dict[str, float]:
    """Input scales of experts."""
    layers = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, QuantizedLayer)
    }
    return {
        name: float(layer.input.scale)
        for name, layer in layers.items()
        if ".experts." in name
    }


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
@pytest.mark.parametrize("few", [True, False])
def test_experts_share_the_scale_of_nvfp4(family: str, few: bool) -> None:
    data = _FEW if few else tokens(6)
    read, model = greatest(family, data), made(config_of(family))
    quantize_model(model, data, config_for("nvfp4"), progress=False)
    found = scales(model)
    assert len(found) == 2 * 4 * 3
    for name, scale in found.items():
        assert scale == pytest.approx(
            max(read[each] for each in group_of(name, read)) / (448 * 6), rel=1e-5
        ), name


@pytest.mark.parametrize(
    ("name", "reach"), [("fp8", 448), ("int8", 127), ("mxfp4_fp8", 448)]
)
def test_an_expert_without_data_takes_the_greatest(name: str, reach: int) -> None:
    read, model = greatest("qwen3_moe", _FEW), made(config_of("qwen3_moe"))
    report = quantize_model(model, _FEW, config_for(name), progress=False)
    found = scales(model)
    borrowing = [
        note.split()[0]
        for note in report.notes
        if "input scale is the greatest of the other experts" in note
    ]
    assert sorted(borrowing) == sorted(found.keys() - read.keys()) and borrowing
    assert all(spec.input is not None for spec in report.quantized.values())
    for each, scale in found.items():
        wanted = (
            read[each]
            if each in read
            else max(read[other] for other in group_of(each, read))
        )
        tolerance = (
            0.02 if name == "int8" else 1e-5
        )  # an integer more lies below 0 than above
        assert scale == pytest.approx(wanted / reach, rel=tolerance), each


def written(folder: Path) -> Any:
    return json.loads((folder / "config.json").read_text(encoding="utf-8"))[
        "quantization_config"
    ]


@pytest.mark.parametrize("layout", ["quark", "compressed-tensors"])
def test_config_json_has_the_names_of_files(layout: str, tmp_path: Path) -> None:
    """vLLM asks for block_sparse_moe, and for all experts of a block at once.

    What it excludes is float in the file.
    """
    source = saved(made(config_of("mixtral")), tmp_path / "source")
    config = config_for(
        "fp8",
        layers=(("*.experts.*_proj", "ptpc_fp8"),),
        exclude=("lm_head", "model.layers.0.*"),
    )
    quantize_checkpoint(
        source,
        tokens(9),
        config,
        tmp_path / "out",
        writing=Writing(layout=layout),
        progress=False,
    )
    model = load_checkpoint(source)
    quantize_model(model, tokens(9), config, progress=False)
    loaded = load_checkpoint(tmp_path / "out")
    kinds = {name: type(module) for name, module in model.named_modules()}
    assert {name: type(module) for name, module in loaded.named_modules()} == kinds
    assert torch.equal(logits(loaded, tokens()[0]), logits(model, tokens()[0]))
    found = written(tmp_path / "out")
    excluded = found["exclude" if layout == "quark" else "ignore"]
    assert "model.layers.0.block_sparse_moe.experts.3.w2" in excluded and not any(
        ".mlp." in each for each in excluded
    )
    if layout == "quark":
        entry = found["layer_quant_config"]["model.layers.1.block_sparse_moe.experts*"]
        assert entry["weight"]["qscheme"] == "per_channel"
    else:
        targets = {
            group["weights"]["strategy"]: group["targets"]
            for group in found["config_groups"].values()
        }
        assert targets["channel"] == ["Linear"] and len(targets["tensor"]) == 4


def test_what_is_read_can_be_written_again(tmp_path: Path) -> None:
    source = saved(made(config_of("mixtral")), tmp_path / "source")
    config = config_for(
        "mxfp4_weight_only", layers=(("*.experts.*_proj", "int4_wo_32"),)
    )
    quantize_checkpoint(source, None, config, tmp_path / "out", progress=False)
    export_safetensors(
        import_model_from_safetensors(None, tmp_path / "out"), tmp_path / "again"
    )
    first, second = (
        logits(load_checkpoint(tmp_path / name), tokens()[0])
        for name in ("out", "again")
    )
    assert torch.equal(first, second)
