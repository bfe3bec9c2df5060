"""The flow of a quantization is one for modules in memory and for checkpoint files."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from quark_onnx.common.errors import ModelError
from quark_onnx.torch.checkpoints.load import load_checkpoint
from quark_onnx.torch.config.schemes import scheme
from quark_onnx.torch.config.torch_config import TorchConfig
from quark_onnx.torch.models.quantized_layer import QuantizedLayer
from quark_onnx.torch.pipelines import flow
from quark_onnx.torch.pipelines.file_to_file import quantize_checkpoint
from quark_onnx.torch.pipelines.in_memory import quantize_model
from tests.torch_models import llama, made, saved, tokens


@pytest.mark.parametrize(
    "algorithms", [(), ("smoothquant",), ("awq", "gptq")], ids=" ".join
)
def test_a_head_with_measured_activations_is_the_same(
    algorithms: tuple[str, ...], tmp_path: Path
) -> None:
    """It runs after the blocks: its scale is that of the float model, to the bit, also where
    algorithms have rewritten the blocks before.
    """
    model = made(llama())
    source = saved(model, tmp_path / "source")
    config = TorchConfig(scheme("int8"), algorithms=algorithms)
    from_files = quantize_checkpoint(
        source, tokens(), config, tmp_path / "out", progress=False
    )
    in_memory = quantize_model(model, tokens(), config, progress=False)
    assert "lm_head" in in_memory.quantized
    assert in_memory.quantized == from_files.quantized
    assert in_memory.notes == from_files.notes
    assert in_memory.outcomes == from_files.outcomes
    stored = load_checkpoint(tmp_path / "out").state_dict()
    states = model.state_dict()
    assert set(states) == set(stored) and "lm_head.input.scale" in stored
    assert all(torch.equal(states[name], stored[name]) for name in states)


def test_algorithms_refuse_a_model_without_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In memory, the model stays float; from files, nothing is written."""
    model = made(llama())
    source = saved(model, tmp_path / "source")
    config = TorchConfig(scheme("int8"), exclude=("lm_head",), algorithms=("gptq",))
    monkeypatch.setattr(flow, "blocks_of", lambda model: {})
    error = "the model has no list of blocks"
    with pytest.raises(ModelError, match=error):
        quantize_checkpoint(source, tokens(), config, tmp_path / "out", progress=False)
    assert not (tmp_path / "out").exists()
    with pytest.raises(ModelError, match=f"gptq works block by block: {error}"):
        quantize_model(model, tokens(), config, progress=False)
    assert not any(isinstance(each, QuantizedLayer) for each in model.modules())
