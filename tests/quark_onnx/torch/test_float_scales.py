"""AMD's FP4 (scales in E5M3) and integers with two factors of scales, against tables of the values
and amd-quark.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from quark_onnx.common.errors import ConfigError
from quark_onnx.torch.checkpoints.export import write_checkpoint
from quark_onnx.torch.checkpoints.load import load_checkpoint
from quark_onnx.torch.config.schemes import scheme
from quark_onnx.torch.config.spec import TensorSpec
from quark_onnx.torch.config.torch_config import TorchConfig
from quark_onnx.torch.exports.onnx import write_onnx
from quark_onnx.torch.formats.quantized_tensor import fake_quantize, quantize
from quark_onnx.torch.pipelines.in_memory import quantize_model
from quark_onnx.torch.pipelines.ptq import config_for
from quark_onnx.torch.validate import validate
from tests import torch_families
from tests.quark_onnx.torch.test_clients import peer
from tests.torch_models import llama, logits, made, saved, tokens

#: The values of E5M3 by their codes: 5 bits of exponent with a bias of 15, and 3 of mantissa.
E5M3 = np.array(
    [
        *(m * 2.0**-17 for m in range(8)),
        *((1 + m / 8) * 2.0 ** (e - 15) for e in range(1, 32) for m in range(8)),
    ]
)
FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
SIZES = {"amdfp4": 16, "amdfp4g32": 32}
#: amd-quark quantizes and exports a model; the logits before the export.
PEER = """
import json, sys, torch
from quark.torch import LLMTemplate, ModelQuantizer, export_safetensors
from transformers import AutoModelForCausalLM
source, output, scheme, weight_format = sys.argv[1:]
data = [torch.tensor(each) for each in json.load(open(source + "/tokens.json"))]
model = AutoModelForCausalLM.from_pretrained(source).eval()
quantizer = ModelQuantizer(LLMTemplate.get("llama").get_config(scheme))
model = quantizer.freeze(quantizer.quantize_model(model, data))
with torch.no_grad():
    found = model(data[0]).logits.float().tolist()
export_safetensors(model, output, weight_format=weight_format)
print(json.dumps(found))
"""


def nearest(values: np.ndarray, table: np.ndarray) -> np.ndarray:
    """The codes of the nearest entries of an ascending table.

    That with the even code in the middle of two.
    """
    distances = np.abs(values[..., None] - table)
    best = distances.min(-1, keepdims=True)
    ties = distances == best
    even = ties & (np.arange(len(table)) % 2 == 0)
    return np.where(even.any(-1), even.argmax(-1), ties.argmax(-1))


def reference(x: np.ndarray, size: int) -> np.ndarray:
    """What is left of a matrix whose columns are a multiple of the block size."""
    blocks = x.reshape(len(x), -1, size)
    greatest = (np.abs(blocks).max(-1) / np.float32(6)).astype(np.float64)
    scale = np.maximum(
        E5M3[nearest(np.minimum(greatest, 114688.0), E5M3[:-1])], 2.0**-17
    )
    units = (blocks / scale[..., None].astype(np.float32)).astype(np.float64)
    left = (
        np.sign(units)
        * FP4[nearest(np.minimum(np.abs(units), 6.0), FP4)]
        * scale[..., None]
    )
    return left.reshape(x.shape).astype(np.float32)


def matrix(seed: int, columns: int) -> np.ndarray:
    """Reals of many magnitudes, zeros and ties among them."""
    generator = np.random.default_rng(seed)
    significands = generator.integers(-64, 65, (3, columns)) / 32
    return np.ldexp(
        significands,
        generator.integers(-22, 18, (3, 1)) + generator.integers(-4, 5, (3, columns)),
    ).astype(np.float32)


@pytest.mark.parametrize("name", SIZES)
@given(seed=st.integers(0, 2**32 - 1))
@settings(max_examples=60)
def test_amd_fp4_equals_the_tables(name: str, seed: int) -> None:
    x = matrix(seed, 2 * SIZES[name])
    expected = reference(x, SIZES[name])
    np.testing.assert_array_equal(
        quantize(torch.from_numpy(x), TensorSpec(name)).dequantize().numpy(), expected
    )
    np.testing.assert_array_equal(
        fake_quantize(torch.from_numpy(x), TensorSpec(name)).numpy(), expected
    )


@pytest.mark.parametrize("name", ["amdfp4", "amdfp4_g32", "int4_fp8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_checkpoint_is_read_as_it_was_written(
    name: str, dtype: Any, tmp_path: Path
) -> None:
    model = made(llama(), dtype)
    config = config_for(name)
    quantize_model(model, None, config, progress=False)
    write_checkpoint(model, config, tmp_path / "out")
    again = load_checkpoint(tmp_path / "out")
    assert torch.equal(logits(again, tokens()[0]), logits(model, tokens()[0]))
    write_checkpoint(again, config, tmp_path / "again")
    first, second = (
        load_file(tmp_path / folder / "model.safetensors")
        for folder in ("out", "again")
    )
    assert first.keys() == second.keys() and all(
        torch.equal(first[key], second[key]) for key in first
    )


def test_the_tensors_of_two_factors(tmp_path: Path) -> None:
    model = made(llama())
    weight = model.model.layers[0].mlp.up_proj.weight.detach().clone()
    config = config_for("int4_fp8")
    quantize_model(model, None, config, progress=False)
    write_checkpoint(model, config, tmp_path / "out")
    own = "model.layers.0.mlp.up_proj."
    found = {
        key.removeprefix(own): tensor
        for key, tensor in load_file(tmp_path / "out" / "model.safetensors").items()
        if key.startswith(own)
    }
    shapes = {key: (tensor.dtype, tuple(tensor.shape)) for key, tensor in found.items()}
    assert shapes == {
        "weight": (torch.int32, (96, 8)),
        "weight_scale": (torch.float32, ()),
        "weight_scale_2": (torch.float32, (96,)),
        "weight_zero_point_2": (torch.int32, (12,)),
    }
    scales = found["weight_scale"] * found["weight_scale_2"]
    assert torch.allclose(scales, weight.abs().amax(1) / 7.5)
    # FP8 codes, which the kernel makes of the integers, reach every value
    assert float((7.5 * found["weight_scale_2"]).max()) <= 448
    left = model.model.layers[0].mlp.up_proj.weight
    assert ((left - weight).abs() <= scales[:, None] * 0.5001).all()


def test_two_factors_belong_to_outputs() -> None:
    with pytest.raises(
        ConfigError, match="int4fp8 has one scale for each output, and no zero points"
    ):
        TensorSpec("int4fp8", block_size=32)


def test_schemes_that_are_not_offered() -> None:
    with pytest.raises(
        ConfigError, match=r"amdfp4_global16 is not offered: .* choose amdfp4"
    ):
        scheme("amdfp4_global16")


@pytest.mark.parametrize("algorithm", ["gptq", "autoround:steps=60"])
@pytest.mark.parametrize("name", ["amdfp4", "int4_fp8"])
def test_algorithms_choose_better_codes(name: str, algorithm: str) -> None:
    """The error of a block's output is less than that of the nearest codes, on the data."""
    ids = torch.cat(tokens())
    wanted = hidden(made(llama()), ids)
    errors = []
    for algorithms in ((), (algorithm,)):
        model = made(llama())
        config = TorchConfig(
            scheme(name).with_(input=None), exclude=("lm_head",), algorithms=algorithms
        )
        quantize_model(model, tokens(), config, progress=False)
        errors.append(float((hidden(model, ids) - wanted).norm()))
    assert errors[1] < errors[0]


def hidden(model: Any, ids: Any) -> Any:
    """What the first block computes."""
    with torch.no_grad():
        return model(ids, output_hidden_states=True).hidden_states[1]


@pytest.mark.parametrize("name", ["amdfp4", "amdfp4_g32", "int4_fp8"])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_an_onnx_model_computes_the_same(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(64, 48), torch.nn.Tanh(), torch.nn.Linear(48, 8)
    ).eval()
    quantize_model(model, None, TorchConfig(scheme(name)), progress=False)
    x = torch.randn(5, 64) * torch.logspace(-4, 3, 64)
    write_onnx(model, x, tmp_path / "model.onnx")
    session = ort.InferenceSession(str(tmp_path / "model.onnx"))
    [found] = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    np.testing.assert_allclose(found, model(x).detach().numpy(), rtol=1e-5, atol=1e-5)


def test_clients(tmp_path: Path) -> None:
    """vLLM has int4_fp8 for experts alone, and AMD's FP4 for no layer.

    Transformers has the latter.
    """
    model = made(torch_families.config_of("mixtral"))
    config = TorchConfig(
        layers=(("*experts*", scheme("int4_fp8")),), exclude=("lm_head",)
    )
    quantize_model(model, None, config, progress=False)
    write_checkpoint(model, config, tmp_path / "experts")
    assert validate(tmp_path / "experts", "vllm").word == "loads", validate(
        tmp_path / "experts", "vllm"
    ).text()
    for name, words in {
        "int4_fp8": ("refused", "loads but wrong"),
        "amdfp4": ("refused", "loads"),
    }.items():
        model = made(llama())
        quantize_model(model, None, config_for(name), progress=False)
        write_checkpoint(model, config_for(name), tmp_path / name)
        assert (
            tuple(
                validate(tmp_path / name, client).word
                for client in ("vllm", "transformers")
            )
            == words
        )


@pytest.mark.slow
@pytest.mark.parametrize("weight_format", ["real_quantized", "fake_quantized"])
@pytest.mark.parametrize(
    "name",
    [
        "amdfp4",
        "amdfp4_g32",
        "int4_fp8",
        "uint4_wo_32",
        "int8",
        "nvfp4",
        "mxfp4_weight_only",
    ],
)
def test_exports_of_amd_quark(name: str, weight_format: str, tmp_path: Path) -> None:
    """What amd-quark writes is read with the logits that its model has in memory."""
    source = saved(made(llama()), tmp_path / "model")
    (source / "tokens.json").write_text(
        json.dumps([batch.tolist() for batch in tokens()]), encoding="utf-8"
    )
    expected = torch.tensor(
        peer(PEER, str(source), str(tmp_path / "out"), name, weight_format)
    )
    found = logits(load_checkpoint(tmp_path / "out"), tokens()[0])
    # the product of both factors is rounded once, and amd-quark multiplies by one after the other
    torch.testing.assert_close(
        found, expected, rtol=1e-5, atol=1e-5 if name == "int4_fp8" else 1e-6
    )
