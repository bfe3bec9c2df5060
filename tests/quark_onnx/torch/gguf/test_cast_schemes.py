"""Weights that are rounded to bfloat16 or float16 stand in a GGUF file as float16."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("gguf")
pytest.importorskip("transformers")

from quark_onnx.torch.config.language import config_for
from quark_onnx.torch.exports.gguf import write_quantized_gguf
from quark_onnx.torch.pipelines.in_memory import quantize_model
from tests.quark_onnx.torch.gguf.tiny import save, tensors


@pytest.mark.parametrize("scheme", ["bf16", "fp16"])
def test_cast_weights(scheme: str, tmp_path: Path) -> None:
    model = save(tmp_path)
    weight = model.model.layers[0].mlp.up_proj.weight.detach().clone()
    quantize_model(model, None, config_for(scheme), progress=False)
    result = write_quantized_gguf(model, tmp_path, tmp_path / "model.gguf")
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[scheme]
    wanted = weight.to(dtype).to(torch.float16).float().numpy()
    found = tensors(result.path)["blk.0.ffn_up.weight"]
    np.testing.assert_array_equal(found, wanted)
    assert result.types["blk.0.ffn_up.weight"] == "F16"
