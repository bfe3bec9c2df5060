"""save_params and load_params: any module, in two files and back."""

from __future__ import annotations

import copy
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from quark_onnx.common.errors import ConfigError, ModelError
from quark_onnx.torch import LLMTemplate, ModelQuantizer, load_params, save_params
from quark_onnx.torch.config.spec import LayerSpec, TensorSpec
from quark_onnx.torch.config.torch_config import TorchConfig
from quark_onnx.torch.pipelines.in_memory import quantize_model
from quark_onnx.torch.quantization.config.type import QuantizationMode
from tests import torch_families
from tests.torch_models import logits, made, tokens


def images() -> Any:
    torch.manual_seed(0)
    parts = [
        nn.Conv2d(3, 8, 3),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(8 * 36, 4),
    ]
    model = nn.Sequential(*parts).eval()
    model[1].running_mean.normal_()
    return model


def again(model: Any, other: Any, folder: Path, **settings: Any) -> Any:
    save_params(model, "mine", export_dir=folder, **settings)
    assert sorted(file.name for file in folder.iterdir()) == [
        "mine.json",
        "mine.safetensors",
    ]
    return load_params(
        other,
        json_path=folder / "mine.json",
        safetensors_path=str(folder / "mine.safetensors"),
    )


def test_a_module_of_images(tmp_path: Path) -> None:
    model, x = images(), torch.randn(2, 3, 8, 8)
    config = TorchConfig(
        LayerSpec(
            TensorSpec("int8", per_channel=True), TensorSpec("uint8", symmetric=False)
        )
    )
    quantize_model(model, [x], config, progress=False)
    other = images()
    for parameter in (*other.parameters(), *other.buffers()):
        parameter.data.zero_()
    assert torch.equal(again(model, other, tmp_path / "out")(x), model(x))


@pytest.mark.parametrize("reorder", [True, False])
@pytest.mark.parametrize(
    ("family", "scheme"),
    [("llama3.2", "fp8"), ("mixtral", "uint4_wo_32"), ("gpt2", "mxfp4")],
)
def test_a_language_model(
    family: str, scheme: str, reorder: bool, tmp_path: Path
) -> None:
    model = made(torch_families.config_of(family), torch.bfloat16)
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    LLMTemplate.register_template(
        LLMTemplate(family, ["*k_proj"], exclude_layers_name=["lm_head"])
    )
    ModelQuantizer(LLMTemplate.get(family).get_config(scheme)).quantize_model(
        model, tokens()
    )
    found = again(model, other, tmp_path / "out", reorder=reorder)
    assert found is other and torch.equal(
        logits(found, tokens()[0]), logits(model, tokens()[0])
    )
    assert (
        again(
            found,
            made(torch_families.config_of(family), torch.bfloat16),
            tmp_path / "out",
        )
        is not None
    )


def test_what_does_not_fit(tmp_path: Path) -> None:
    model = images()
    with pytest.raises(ConfigError, match="no layer of the model is quantized"):
        save_params(model, "mine", export_dir=tmp_path)
    quantize_model(
        model, None, TorchConfig(LayerSpec(TensorSpec("int8"))), progress=False
    )
    with pytest.raises(ConfigError, match="the files hold layers of modules"):
        save_params(
            model,
            "mine",
            export_dir=tmp_path,
            quant_mode=QuantizationMode.fx_graph_mode,
        )
    save_params(model, "mine", export_dir=tmp_path)
    files = {
        "json_path": tmp_path / "mine.json",
        "safetensors_path": tmp_path / "mine.safetensors",
    }
    with pytest.raises(ConfigError, match="give the float model"):
        load_params(**files)
    with pytest.raises(ConfigError, match="and no pth_path"):
        load_params(images(), **files, pth_path="x.pth")
    with pytest.raises(ModelError, match="has a layer '4', which the Sequential lacks"):
        load_params(nn.Sequential(nn.Conv2d(3, 8, 3)), **files)
    with pytest.raises(
        ModelError,
        match=r"tensors of 4 do not fit a weight of .*: 288 codes are stored for each output",
    ):
        load_params(nn.Sequential(*images()[:4], nn.Linear(7, 4)), **files)
    with pytest.raises(ModelError, match=r"has no tensor 'more.weight'"):
        load_params(
            nn.Sequential(OrderedDict([*images().named_children(), ("more", _More())])),
            **files,
        )
    (tmp_path / "mine.json").write_text("{}", encoding="utf-8")
    with pytest.raises(ModelError, match="has no quantization_config"):
        load_params(images(), **files)


def test_an_error_leaves_no_file(tmp_path: Path) -> None:
    model = images()
    quantize_model(
        model, None, TorchConfig(LayerSpec(TensorSpec("int8"))), progress=False
    )
    model.register_buffer("phases", torch.zeros(2, dtype=torch.complex128))
    with pytest.raises(ModelError, match=r"'phases' is torch\.complex128"):
        save_params(model, "mine", export_dir=tmp_path)
    assert list(tmp_path.iterdir()) == []


class _More(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
