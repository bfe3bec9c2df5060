"""One run, several results: a checkpoint, a GGUF file, an ONNX model, with the same codes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from quark_onnx.cli import main
from quark_onnx.common.errors import ConfigError, MissingDependency, ModelError
from quark_onnx.torch.checkpoints.float_checkpoint import FloatCheckpoint
from quark_onnx.torch.checkpoints.load import load_checkpoint
from quark_onnx.torch.exports import kinds as exports
from quark_onnx.torch.exports.kinds import exported
from quark_onnx.torch.models.quantized_layer import QuantizedLayer
from quark_onnx.torch.pipelines.ptq import config_for
from tests import torch_families
from tests.torch_models import llama, logits, made, saved, tokens

gguf = pytest.importorskip("gguf")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(made(llama()), tmp_path_factory.mktemp("float") / "source")


def held(path: Path) -> dict[str, tuple[str, Any]]:
    """Type and values of the tensors of a GGUF file."""
    return {
        tensor.name: (
            tensor.tensor_type.name,
            torch.tensor(gguf.dequantize(tensor.data, tensor.tensor_type)),
        )
        for tensor in gguf.GGUFReader(path).tensors
    }


@pytest.mark.slow
def test_all_at_once(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import onnxruntime

    out = tmp_path / "out"
    command = [
        "llm",
        "ptq",
        str(source),
        "-o",
        str(out),
        "--scheme",
        "uint4_wo_32",
        "--export",
    ]
    command += ["hf_format", "gguf", "onnx", "--exclude", "lm_head", "*.down_proj"]
    assert main(command) == 2  # each --exclude takes one
    assert main([*command[:-1], "--exclude", "*.down_proj"]) == 0, (
        capsys.readouterr().err
    )
    assert (
        "onnxruntime's outputs of model.onnx differ from torch's by"
        in capsys.readouterr().out
    )
    model = load_checkpoint(out)
    tensors = held(out / "model.gguf")
    kinds = {
        "attn_v": "Q4_1",
        "attn_output": "Q4_1",
        "ffn_gate": "Q4_1",
        "ffn_down": "F16",
        "attn_norm": "F32",
    }
    for name, kind in kinds.items():
        assert tensors[f"blk.1.{name}.weight"][0] == kind
    block = model.model.layers[1]
    assert isinstance(block.mlp.gate_proj, QuantizedLayer)
    step = block.mlp.gate_proj.quantized.scale.max()
    left = tensors["blk.1.ffn_gate.weight"][1] - block.mlp.gate_proj.weight
    assert left.abs().max() < step / 50  # scales and offsets are float16
    torch.testing.assert_close(
        tensors["blk.1.ffn_down.weight"][1], block.mlp.down_proj.weight.half().float()
    )
    session = onnxruntime.InferenceSession(out / "model.onnx")
    ids = tokens()[0].numpy()
    past = {
        each.name: np.zeros((1, 2, 0, 16), np.float32)
        for each in session.get_inputs()[2:]
    }
    inputs = {"input_ids": ids, "attention_mask": np.ones_like(ids), **past}
    found = session.run(["logits"], inputs)[0]
    torch.testing.assert_close(
        torch.tensor(found), logits(model, tokens()[0]), atol=1e-3, rtol=1e-3
    )


def test_a_gguf_file_alone(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    np.save(tmp_path / "tokens.npy", torch.cat(tokens(6)).numpy())
    command = [
        "llm",
        "ptq",
        str(source),
        "-o",
        str(tmp_path / "out"),
        "--scheme",
        "int8",
        "--export",
        "gguf",
    ]
    command += ["--data", str(tmp_path / "tokens.npy"), "--length", "12"]
    assert main(command) == 0, capsys.readouterr().err
    out = capsys.readouterr().out
    assert "llama.cpp rounds activations its own way" in out
    assert f"{tmp_path / 'out' / 'model.gguf'}: 0." in out
    assert sorted(file.name for file in tmp_path.iterdir()) == ["out", "tokens.npy"]
    assert [file.name for file in (tmp_path / "out").iterdir()] == ["model.gguf"]
    assert held(tmp_path / "out" / "model.gguf")["blk.0.ffn_up.weight"][0] == "Q8_0"


def test_a_gguf_file_has_no_rounded_cache(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    np.save(tmp_path / "tokens.npy", torch.cat(tokens(6)).numpy())
    command = [
        "llm",
        "ptq",
        str(source),
        "-o",
        str(tmp_path / "out"),
        "--scheme",
        "uint4_wo_32",
        "--export",
        "gguf",
    ]
    command += [
        "--data",
        str(tmp_path / "tokens.npy"),
        "--length",
        "12",
        "--kv-cache",
        "fp8",
    ]
    assert main(command) == 0, capsys.readouterr().err
    assert "llama.cpp rounds activations its own way" in capsys.readouterr().out


def refused(
    source: Path,
    output: Path,
    kinds: list[str],
    scheme: str = "uint4_wo_32",
    **settings: Any,
) -> None:
    with exported(
        kinds, FloatCheckpoint(source), config_for(scheme, **settings), output, []
    ):
        pytest.fail("the work was started")


def test_what_cannot_be_is_refused_before_the_work(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    for scheme in ("fp8", "nvfp4", "mxfp6_e2m3"):
        with pytest.raises(
            ConfigError,
            match=r"no place in llama.cpp's blocks.*; export no GGUF file, or choose another",
        ):
            refused(source, out, ["hf_format", "gguf"], scheme)
    with pytest.raises(ConfigError, match=r"no place in llama.cpp's blocks"):
        refused(source, out, ["gguf"], layers=(("*.up_proj", "fp8"),))
    with pytest.raises(ConfigError, match=r"unknown export 'guf'; did you mean 'gguf'"):
        refused(source, out, ["guf"])
    with pytest.raises(ConfigError, match="nothing is to be written"):
        refused(source, out, [])
    with pytest.raises(ConfigError, match="exists already and is not empty"):
        refused(source, source, ["gguf"])
    tied = saved(made(llama(tie_word_embeddings=True)), tmp_path / "tied")
    with pytest.raises(ConfigError, match="no place for the weight of lm_head alone"):
        refused(tied, out, ["gguf"], exclude=())
    other = saved(made(torch_families.config_of("opt")), tmp_path / "opt")
    with pytest.raises(
        ModelError, match="models of type 'opt' cannot be written as GGUF"
    ):
        refused(other, out, ["gguf"])
    monkeypatch.setattr(exports, "find_spec", lambda name: None)
    with pytest.raises(
        MissingDependency,
        match=r"needs the package onnxscript: pip install '.*\[llm\]'",
    ):
        refused(source, out, ["onnx"])
    assert not out.exists()


def test_the_experts_of_mixtral(tmp_path: Path) -> None:
    """Whose names in the checkpoint are not those of the model."""
    source = saved(made(torch_families.config_of("mixtral")), tmp_path / "mixtral")
    command = [
        "llm",
        "ptq",
        str(source),
        "-o",
        str(tmp_path / "out"),
        "--scheme",
        "uint4_wo_32",
        "--quiet",
    ]
    assert main([*command, "--export", "gguf", "hf_format"]) == 0
    kind, stacked = held(tmp_path / "out" / "model.gguf")["blk.1.ffn_gate_exps.weight"]
    experts = load_checkpoint(tmp_path / "out").model.layers[1].mlp.experts
    expected = torch.stack(
        [experts.get_submodule(f"{index}.gate_proj").weight for index in range(4)]
    )
    assert kind == "Q4_1" and (stacked - expected).abs().max() < 1e-3
