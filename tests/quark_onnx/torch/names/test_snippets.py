"""Snippets of AMD Quark's documentation that name what this package does in its own way: they run,
and say so.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from torch import nn

from quark_onnx.common.errors import ConfigError
from quark_onnx.torch import (
    ModelExporter,
    ModelImporter,
    ModelQuantizer,
    QuantFlow,
    RuntimeOptions,
    export_onnx,
    import_model_from_safetensors,
)
from quark_onnx.torch.algorithms.rescaling.smoothquant import SmoothQuant
from quark_onnx.torch.algorithms.rotation.settings import Rotation
from quark_onnx.torch.quantization.config.algorithms import (
    GPTQConfig,
    SmoothQuantConfig,
    algorithm_named,
    load_quant_algo_config_from_file,
)
from quark_onnx.torch.quantization.config.config import QConfig, QLayerConfig
from quark_onnx.torch.quantization.config.specs import (
    Int4PerChannelSpec,
    Int8PerTensorSpec,
)
from quark_onnx.torch.quantization.config.tensor import QTensorConfig
from quark_onnx.torch.utils import llm

INT8 = Int8PerTensorSpec(
    observer_method="min_max", symmetric=True
).to_quantization_spec()
INT4 = Int4PerChannelSpec(symmetric=True, ch_axis=0).to_quantization_spec()


def quantized(
    layer: QLayerConfig, module: nn.Module | None = None, **settings: Any
) -> Any:
    torch.manual_seed(0)
    model = module or nn.Sequential(
        nn.Linear(16, 24), nn.LayerNorm(24), nn.Linear(24, 8)
    )
    return ModelQuantizer(QConfig(layer, **settings)).quantize_model(model.eval())


def test_quantizing_ends_with_the_line_that_scripts_wait_for(
    capsys: pytest.CaptureFixture[str],
) -> None:
    quantized(QLayerConfig(weight=INT4))
    assert (
        capsys.readouterr().out
        == "[QUARK-INFO]: Model quantization has been completed.\n"
    )


def test_a_weight_with_a_dynamic_scale_is_one_with_a_static_scale() -> None:
    """The scale of a constant is the same in each run."""
    x = torch.randn(4, 16)
    dynamic = Int4PerChannelSpec(symmetric=True, ch_axis=0).to_quantization_spec()
    dynamic.is_dynamic = True
    static, same = (quantized(QLayerConfig(weight=spec)) for spec in (INT4, dynamic))
    assert torch.equal(static(x), same(x))


def test_a_bias_stays_float_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        model = quantized(QLayerConfig(weight=INT4, bias=INT8))
    assert "bias is to be quantized; it stays float here" in caplog.text
    x = torch.randn(4, 16)
    assert torch.equal(model(x), quantized(QLayerConfig(weight=INT4))(x))


def test_several_devices_are_named_in_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING):
        ModelQuantizer(QConfig(QLayerConfig(weight=INT4)), multi_device=True)
    assert "multi_device has no effect" in caplog.text


def test_groups_have_extremes_under_the_name_of_channels() -> None:
    settings = {
        "dtype": "uint4",
        "symmetric": False,
        "qscheme": "per_group",
        "ch_axis": -1,
        "group_size": 8,
    }
    named = [
        QTensorConfig(observer_cls=name, is_dynamic=False, **settings)
        for name in OBSERVERS
    ]  # type: ignore[arg-type]
    assert named[0].spec() == named[1].spec()


OBSERVERS = ("PerChannelMinMaxObserver", "PerGroupMinMaxObserver")


def test_algorithms(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    sequential = GPTQConfig(true_sequential=True)
    assert sequential.algorithm() == GPTQConfig().algorithm()
    with caplog.at_level(logging.WARNING):
        GPTQConfig(true_sequential=False).algorithm()
    assert "true_sequential is False" in caplog.text
    assert SmoothQuantConfig(scale_clamp_min=1e-12).algorithm() == SmoothQuant(1, 1e-12)
    for online in (True, False):
        path = tmp_path / f"{online}.json"
        path.write_text(
            json.dumps({"name": "rotation", "r2": True, "online-had": online}),
            encoding="utf-8",
        )
        assert load_quant_algo_config_from_file(path).algorithm() == Rotation(
            True, True, False, online
        )


def test_types_without_weights_may_be_named(caplog: pytest.LogCaptureFixture) -> None:
    """Those have nothing that is quantized: they stay float."""
    with caplog.at_level(logging.WARNING):
        model = quantized(
            QLayerConfig(weight=INT4),
            layer_type_quant_config={nn.LayerNorm: QLayerConfig(weight=INT8)},
        )
    assert type(model[1]) is nn.LayerNorm
    assert "names LayerNorm, which is never quantized" in caplog.text


def test_options_of_native_kernels_are_taken() -> None:
    model = quantized(QLayerConfig(weight=INT4))
    assert (
        ModelQuantizer.freeze(model, True, RuntimeOptions(native_linear_mode="auto"))
        is model
    )
    assert QuantFlow.file2file.name == "file2file"


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_an_onnx_model_with_names_and_an_opset(tmp_path: Path) -> None:
    model = quantized(QLayerConfig(weight=INT4))
    x = torch.randn(3, 16)
    names = {"input_names": ["features"], "output_names": ["scores"]}
    export_onnx(
        model,
        tmp_path,
        x,
        opset_version=22,
        uint4_int4_flag=True,
        verbose=False,
        **names,
    )
    written = onnx.load(tmp_path / "model.onnx")
    assert (
        next(entry.version for entry in written.opset_import if not entry.domain) == 22
    )
    session = ort.InferenceSession(str(tmp_path / "model.onnx"))
    [scores] = session.run(["scores"], {"features": x.numpy()})
    np.testing.assert_allclose(scores, model(x).detach().numpy(), atol=1e-5)
    with pytest.raises(
        ConfigError, match="input_names has 2 names, but the model has 1 inputs"
    ):
        export_onnx(model, tmp_path, x, input_names=["a", "b"])
    with pytest.raises(ConfigError, match="export_onnx has no argument 'opset'"):
        export_onnx(model, tmp_path, x, opset=17)


def test_names_of_older_releases(
    model: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = QConfig(QLayerConfig(weight=INT4), exclude=["lm_head"])
    ModelQuantizer(config).quantize_model(model)
    ids = torch.arange(12)[None]
    before = model(ids).logits
    ModelExporter(tmp_path / "out").export_safetensors_model(model)
    with caplog.at_level(logging.WARNING):
        read = import_model_from_safetensors(None, tmp_path / "out", multi_gpu=True)
    assert "multi_gpu have no effect" in caplog.text
    assert torch.equal(read(ids).logits, before)
    again = ModelImporter(tmp_path / "out").import_model_info(read)
    assert torch.equal(again(ids).logits, before)


def test_helpers_of_scripts(hub: str, tmp_path: Path) -> None:
    model, kind = llm.get_model(
        hub, data_type="float32", device="cuda", attn_implementation="sdpa"
    )
    assert kind is torch.float32 and next(model.parameters()).device.type in (
        "cpu",
        "cuda",
    )
    tokenizer = llm.get_tokenizer(hub, max_seq_len=64)
    text = tmp_path / "text.txt"
    text.write_text("hello how are you ? my name is france " * 60, encoding="utf-8")
    loader = llm.get_calib_dataloader(
        str(text), tokenizer=tokenizer, batch_size=2, num_calib_data=4, seqlen=8
    )
    assert [tuple(batch.shape) for batch in loader] == [(2, 8), (2, 8)]
    llm.set_seed(7)
    first = torch.rand(3)
    llm.set_seed(7)
    assert torch.equal(first, torch.rand(3))
    llm.save_model(model, tokenizer, tmp_path / "saved")
    assert (
        llm.create_model_skeleton(tmp_path / "saved").lm_head.weight.device.type
        == "meta"
    )
    with pytest.raises(ConfigError, match="data_type is 'fp16'"):
        llm.get_model(hub, data_type="fp16")


@pytest.mark.parametrize(
    ("name", "why"),
    [("svdquant", "low-rank branch"), ("twobitscalar", "uint2_wo_32 with gptaq")],
)
def test_algorithms_that_are_not_offered_say_why(
    name: str, why: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=f"'{name}' is not offered: .*{why}"):
        algorithm_named(name)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"name": name, "bits": 2}), encoding="utf-8")
    with pytest.raises(
        ConfigError, match=f"config.json: the algorithm '{name}' is not offered"
    ):
        load_quant_algo_config_from_file(path)
