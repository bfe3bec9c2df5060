"""Quantized torch models as ONNX: onnxruntime computes what torch's own forward computes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import numpy_helper

torch = pytest.importorskip("torch")
pytest.importorskip("onnxscript")

from quark_onnx.common.errors import ConfigError, DataError, ModelError
from quark_onnx.common.version import __version__
from quark_onnx.kernels.nbits import NBitsWeight
from quark_onnx.torch.config.schemes import scheme
from quark_onnx.torch.config.spec import LayerSpec, TensorSpec
from quark_onnx.torch.config.torch_config import KVCache, TorchConfig
from quark_onnx.torch.exports.onnx import (
    Exported,
    export,
    write,
    write_onnx,
)
from quark_onnx.torch.exports.onnx.weights import nbits_weight
from quark_onnx.torch.formats.quantized_tensor import quantize
from quark_onnx.torch.pipelines.in_memory import quantize_model
from tests.cases import loop_over
from tests.nbits import dequantized

# torch and transformers use what they say is deprecated
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]
nn = torch.nn


def mlp() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(70, 40), nn.ReLU(), nn.Linear(40, 9, bias=False)
    ).eval()


def cnn() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, padding_mode="reflect"),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, groups=2, stride=2),
        nn.ReLU(),
        nn.ConvTranspose2d(8, 6, 2, stride=2, bias=False),
        nn.Flatten(),
        nn.Linear(216, 5),
    ).eval()


def quantized(model: Any, spec: LayerSpec | str, *data: Any, **settings: Any) -> Any:
    config = TorchConfig(scheme(spec) if isinstance(spec, str) else spec, **settings)
    quantize_model(model, data, config, progress=False)
    return model


def run(path: Path, *inputs: Any) -> list[Any]:
    session = ort.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    names = [value.name for value in session.get_inputs()]
    return session.run(
        None, {name: value.numpy() for name, value in zip(names, inputs, strict=True)}
    )  # type: ignore[no-any-return]


def forward(model: Any, *inputs: Any) -> Any:
    with torch.no_grad():
        return model(*inputs)


def error(found: Any, expected: Any) -> float:
    found, expected = np.asarray(found, np.float64), np.asarray(expected, np.float64)
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


def initializers(path: Path) -> dict[str, Any]:
    return {
        tensor.name: numpy_helper.to_array(tensor)
        for tensor in onnx.load(path).graph.initializer
    }


def operators(path: Path) -> list[str]:
    return [node.op_type for node in onnx.load(path).graph.node]


WEIGHTS = [
    *("int4_wo_32", "uint4_wo_32", "uint4_wo_per_channel", "int3_wo_32", "uint2_wo_32"),
    *("mxfp4_weight_only", "bf16", "fp16"),
]


@pytest.mark.parametrize("name", WEIGHTS)
def test_weights_alone(name: str, tmp_path: Path) -> None:
    model, x = quantized(mlp(), name), torch.randn(3, 70)
    result = write_onnx(model, x, tmp_path / "m.onnx")
    assert error(run(result.path, x)[0], forward(model, x)) < 2e-6
    assert (operators(result.path).count("MatMulNBits") == 2) == ("int" in name)


def test_the_metadata_name_producer_and_formats(tmp_path: Path) -> None:
    x = torch.randn(3, 70)
    int8 = LayerSpec(TensorSpec("int8"), TensorSpec("int8"))
    model = quantized(mlp(), "int4_wo_32", x, layers=(("2", int8),))
    path = write_onnx(model, x, tmp_path / "m.onnx").path
    found = onnx.load(path)
    assert (found.producer_name, found.producer_version) == ("quark_onnx", __version__)
    texts = {entry.key: entry.value for entry in found.metadata_props}
    assert texts.pop("quark_onnx.float_producer").startswith("pytorch ")
    assert texts == {
        "quark_onnx.version": __version__,
        "quark_onnx.weight": f"1 x {scheme('int4_wo_32').weight}; 1 x {int8.weight}",
        "quark_onnx.activation": f"1 x float; 1 x {int8.input}",
    }


@pytest.mark.parametrize("name", ["uint4_wo_32", "uint4_wo_per_channel", "int3_wo_32"])
def test_weights_alone_as_standard_operators(name: str, tmp_path: Path) -> None:
    model, x = quantized(mlp(), name), torch.randn(3, 70)
    result = write_onnx(model, x, tmp_path / "m.onnx", form="qdq")
    options = ort.SessionOptions()
    options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", "1")
    session = ort.InferenceSession(
        str(result.path), options, providers=["CPUExecutionProvider"]
    )
    assert error(session.run(None, {"input": x.numpy()})[0], forward(model, x)) < 2e-6
    assert {entry.domain for entry in onnx.load(result.path).opset_import} == {""}
    assert "accuracy_level" in str(result)


@loop_over("bits", [2, 3, 4, 8])
@loop_over("sign", ["", "u"])
@loop_over("shape", [{"block_size": 16}, {"per_channel": True}, {}])
def test_codes_and_scales_are_those_of_the_layer(
    bits: int, sign: str, shape: Any
) -> None:
    spec = TensorSpec(f"{sign}int{bits}", symmetric=not sign, **shape)
    layer = quantize(torch.randn(6, 40), spec)
    weight = nbits_weight(layer)
    assert weight is not None
    np.testing.assert_array_equal(
        dequantized(weight).astype(np.float32), layer.dequantize().T
    )


def test_the_constants_of_an_operator(tmp_path: Path) -> None:
    model, x = (
        quantized(nn.Sequential(nn.Linear(40, 6)), "uint4_wo_32"),
        torch.randn(2, 40),
    )
    parts = initializers(
        write_onnx(model, x, tmp_path / "m.onnx", form="operators").path
    )
    weight = nbits_weight(model[0].quantized)
    assert weight is not None
    for name, array in zip(
        ("packed", "scales", "zero_points"), weight.inputs, strict=True
    ):
        np.testing.assert_array_equal(parts[f"0.weight_{name}"], array)


@pytest.mark.parametrize("name", ["int8", "fp8", "mxfp4", "nvfp4", "mx6", "int4_wo_32"])
def test_a_convolutional_model(name: str, tmp_path: Path) -> None:
    data = torch.randn(2, 3, 8, 8)
    model = quantized(cnn(), name, data)
    path = write_onnx(model, data, tmp_path / "m.onnx").path
    x = torch.randn(5, 3, 8, 8)  # another batch than was exported
    # a value halfway between two codes may become either: no more than one code of the 40 values
    # that last are read
    assert error(run(path, x)[0], forward(model, x)) < (2e-6 if "wo" in name else 3e-3)


def test_static_activations_keep_their_scale_and_zero_point(tmp_path: Path) -> None:
    spec = LayerSpec(
        TensorSpec("int8", per_channel=True), TensorSpec("uint8", symmetric=False)
    )
    model = quantized(nn.Sequential(nn.Linear(8, 4)), spec, torch.randn(9, 8))
    path = write_onnx(model, torch.randn(2, 8), tmp_path / "m.onnx").path
    parts = initializers(path)
    assert parts["0.input_scale"] == model[0].input.scale.numpy()
    assert parts["0.input_zero_point"] == model[0].input.zero.numpy()
    assert parts["0.input_zero_point"].dtype == np.uint8
    np.testing.assert_array_equal(parts["0.weight"], model[0].quantized.matrix.T)
    np.testing.assert_array_equal(parts["0.weight_scale"], model[0].quantized.scale)
    assert operators(path)[:2] == ["QuantizeLinear", "DequantizeLinear"]


def test_layers_that_read_one_tensor_share_its_rounding(tmp_path: Path) -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 4), nn.Linear(8, 4)

        def forward(self, x: Any) -> Any:
            return {"sum": self.a(x) + self.b(x), "first": self.a(x)}

    x = torch.randn(6, 8)
    model = quantized(Both().eval(), "int8", x)
    path = write_onnx(model, x, tmp_path / "m.onnx").path
    assert operators(path).count("QuantizeLinear") == 1
    expected = forward(model, x)
    for found, name in zip(run(path, x), ("sum", "first"), strict=True):
        assert error(found, expected[name]) < 2e-6


@pytest.mark.parametrize(
    "spec",
    [
        TensorSpec("int8", per_channel=True),
        TensorSpec("uint4", symmetric=False, block_size=16),
        "mxfp4e2m1",
    ],
)
def test_embeddings(spec: Any, tmp_path: Path) -> None:
    spec = TensorSpec(spec) if isinstance(spec, str) else spec
    model = nn.Sequential(nn.Embedding(30, 32), nn.Linear(32, 4)).eval()
    quantized(model, LayerSpec(), types={"Embedding": LayerSpec(spec)})
    ids = torch.randint(0, 30, (2, 7))
    for form in ("auto", "qdq"):
        path = write_onnx(model, ids, tmp_path / f"{form}.onnx", form=form).path
        assert error(run(path, ids)[0], forward(model, ids)) < 1e-6


# -- decoders
# --------------------------------------------------------------------------------------


def decoder(kind: str) -> Any:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    if kind == "gpt2":
        config = transformers.GPT2Config(
            vocab_size=97,
            n_embd=64,
            n_layer=1,
            n_head=4,
            n_positions=64,
            bos_token_id=0,
            eos_token_id=0,
        )
        return transformers.GPT2LMHeadModel(config).eval()
    common = {
        "vocab_size": 97,
        "hidden_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
    }
    if kind == "opt":
        config = transformers.OPTConfig(
            **common, ffn_dim=96, word_embed_proj_dim=64, max_position_embeddings=64
        )
        return transformers.OPTForCausalLM(config).eval()
    name = {"llama": "Llama", "qwen2": "Qwen2"}[kind]
    config = getattr(transformers, f"{name}Config")(
        **common, intermediate_size=96, num_key_value_heads=2
    )
    return getattr(transformers, f"{name}ForCausalLM")(config).eval()


def tokens(batch: int, length: int) -> dict[str, Any]:
    mask = torch.ones(batch, length, dtype=torch.long)
    mask[0, :3] = 0
    return {"input_ids": torch.randint(0, 97, (batch, length)), "attention_mask": mask}


@pytest.mark.parametrize("kind", ["llama", "qwen2", "opt", "gpt2"])
def test_decoders_at_other_lengths(kind: str, tmp_path: Path) -> None:
    model = quantized(decoder(kind), "uint4_wo_32")
    result = write_onnx(model, tokens(2, 11), tmp_path / "m.onnx")
    for batch, length in ((1, 5), (3, 20)):
        inputs = tokens(batch, length)
        with torch.no_grad():
            expected = model(**inputs).logits
        [found] = run(result.path, *inputs.values())
        shown = inputs["attention_mask"] > 0
        assert error(found[shown.numpy()], expected[shown]) < 2e-6
        assert (found.argmax(-1) == expected.argmax(-1).numpy())[shown.numpy()].all()
    assert "MatMulNBits of 4 bits in blocks of 32" in str(result)


@pytest.mark.parametrize("name", ["int8", "ptpc_fp8"])
def test_decoders_with_rounded_activations(name: str, tmp_path: Path) -> None:
    inputs = tokens(2, 11)
    cache = KVCache(TensorSpec("fp8e4m3"))
    model = quantized(
        decoder("llama"), name, inputs, kv_cache=cache, exclude=("lm_head",)
    )
    result = write_onnx(model, inputs, tmp_path / "m.onnx")
    with torch.no_grad():
        expected = model(**inputs).logits
    shown = inputs["attention_mask"].numpy() > 0
    assert (
        error(run(result.path, *inputs.values())[0][shown], expected.numpy()[shown])
        < 5e-3
    )
    assert (
        "output QuantizeLinear to fp8e4m3"
        in result.layers["model.layers.0.self_attn.k_proj"]
    )


def test_rotated_keys_have_no_node(tmp_path: Path) -> None:
    cache = KVCache(TensorSpec("fp8e4m3"), where="rope")
    model = quantized(
        decoder("llama"), "int8", tokens(2, 11), kv_cache=cache, exclude=("lm_head",)
    )
    with pytest.raises(
        ConfigError,
        match="k_proj: an ONNX model has no node for keys that are rounded after",
    ):
        write_onnx(model, tokens(2, 11), tmp_path / "m.onnx")


def test_a_model_in_bfloat16_computes_in_float32(tmp_path: Path) -> None:
    model, inputs = quantized(decoder("llama").bfloat16(), "uint4_wo_32"), tokens(2, 11)
    path = write_onnx(model, inputs, tmp_path / "m.onnx").path
    [found] = run(path, *inputs.values())
    with torch.no_grad():
        expected = model(**inputs).logits.float()
    shown = inputs["attention_mask"].numpy() > 0
    assert found.dtype == np.float32
    assert (
        error(found[shown], expected.numpy()[shown]) < 2e-2
    )  # what bfloat16 loses as it computes


def test_float16(tmp_path: Path) -> None:
    model, x = quantized(mlp().half(), "uint4_wo_32"), torch.randn(3, 70)
    path = write_onnx(model, x, tmp_path / "m.onnx", dtype="float16").path
    [found] = run(path, x.half())
    assert found.dtype == np.float16
    assert error(found, forward(model, x.half())) < 2e-3
    with pytest.raises(
        ConfigError, match=r"layer '0'.*float16; export it with dtype='float32'"
    ):
        write_onnx(
            quantized(mlp(), "int8_per_channel"),
            torch.randn(2, 70),
            tmp_path / "n.onnx",
            dtype="float16",
        )


# -- files
# --------------------------------------------------------------------------------------


def test_the_model_is_left_as_it_was(tmp_path: Path) -> None:
    x = torch.randn(2, 3, 8, 8)
    model = quantized(cnn(), "int8", x)
    before, parts, expected = (
        list(model.modules()),
        list(model.parameters()),
        forward(model, x),
    )
    write_onnx(model, x, tmp_path / "m.onnx")
    assert all(old is new for old, new in zip(before, model.modules(), strict=True))
    assert all(old is new for old, new in zip(parts, model.parameters(), strict=True))
    assert torch.equal(forward(model, x), expected)


def test_weights_beside_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x = quantized(mlp(), "int4_wo_32"), torch.randn(3, 70)
    plain = initializers(write_onnx(model, x, tmp_path / "plain.onnx").path)
    monkeypatch.setattr(
        export, "LARGE_MODEL", 0
    )  # as if it were one: constants go through a file
    path = write_onnx(model, x, tmp_path / "m.onnx", external=True).path
    assert sorted(file.name for file in tmp_path.iterdir()) == [
        "m.onnx",
        "m.onnx.data",
        "plain.onnx",
    ]
    assert error(run(path, x)[0], forward(model, x)) < 2e-6
    for name, array in initializers(path).items():
        np.testing.assert_array_equal(array, plain[name])


def test_the_same_model_becomes_the_same_bytes(tmp_path: Path) -> None:
    model, x = (
        quantized(cnn(), "mxfp4", torch.randn(2, 3, 8, 8)),
        torch.randn(2, 3, 8, 8),
    )
    first, second = (
        write_onnx(model, x, tmp_path / name).path.read_bytes()
        for name in ("a.onnx", "b.onnx")
    )
    assert first == second


def test_fixed_and_chosen_axes(tmp_path: Path) -> None:
    model, x = quantized(mlp(), "int4_wo_32"), torch.randn(1, 4, 70)

    def shape(result: Exported) -> list[Any]:
        [value] = ort.InferenceSession(str(result.path)).get_inputs()
        return value.shape  # type: ignore[no-any-return]

    assert shape(write_onnx(model, x, tmp_path / "a.onnx", dynamic=False)) == [
        1,
        4,
        70,
    ]
    assert shape(write_onnx(model, x, tmp_path / "b.onnx")) == ["batch", 4, 70]
    assert shape(
        write_onnx(model, x, tmp_path / "c.onnx", dynamic={"input": {1: "rows"}})
    ) == [1, "rows", 70]


# -- what goes wrong
# -------------------------------------------------------------------------------------------------


def test_a_wrong_result_is_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x, path = (
        quantized(mlp(), "int4_wo_32"),
        torch.randn(3, 70),
        tmp_path / "m.onnx",
    )
    path.write_bytes(b"an earlier file")

    def wrong(quantized: Any) -> NBitsWeight:
        right = nbits_weight(quantized)
        assert right is not None
        return NBitsWeight(
            right.packed,
            right.scales * np.float32(1.001),
            None,
            right.bits,
            32,
            right.rows,
        )

    monkeypatch.setattr(write, "nbits_weight", wrong)
    with pytest.raises(
        ModelError,
        match=r"'output' .* differs from torch's on input \[3, 70\]: 0.00\d+ relative",
    ):
        write_onnx(model, x, path)
    assert [file.name for file in tmp_path.iterdir()] == ["m.onnx"]
    assert path.read_bytes() == b"an earlier file"


def test_requests_that_cannot_be_met(tmp_path: Path) -> None:
    model, x, path = (
        quantized(mlp(), LayerSpec(TensorSpec("int4", block_size=8))),
        torch.randn(3, 70),
        tmp_path / "m",
    )
    with pytest.raises(
        ConfigError, match="layer '0': onnxruntime has no operator for weights of int4"
    ):
        write_onnx(model, x, path, form="operators")
    with pytest.raises(
        ConfigError, match="form is 'nbits'; it must be one of: auto, operators, qdq"
    ):
        write_onnx(model, x, path, form="nbits")
    with pytest.raises(
        ConfigError, match="onnxruntime does not compute in bfloat16 on a CPU"
    ):
        write_onnx(model, x, path, dtype="bfloat16")
    with pytest.raises(
        ConfigError, match="dynamic names the input 'x'; inputs are input"
    ):
        write_onnx(model, x, path, dynamic={"x": {0: "batch"}})
    with pytest.raises(
        ConfigError, match="dynamic names axis 2 of 'input', which has 2"
    ):
        write_onnx(model, x, path, dynamic={"input": {2: "batch"}})
    with pytest.raises(DataError, match="inputs hold no tensor"):
        write_onnx(model, {"input": 3}, path)
    with pytest.raises(DataError, match="inputs are a int"):
        write_onnx(model, 3, path)
    assert not list(tmp_path.iterdir())


def test_what_torch_cannot_export(tmp_path: Path) -> None:
    class Branching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(32, 32)

        def forward(self, x: Any) -> Any:
            return self.layer(x) if x.sum() > 0 else x

    model = quantized(Branching().eval(), "int4_wo_32")
    with pytest.raises(ModelError, match="torch cannot export the model"):
        write_onnx(model, torch.randn(2, 32), tmp_path / "m.onnx")
    assert not list(tmp_path.iterdir())


# -- a real model
# --------------------------------------------------------------------------------------


@pytest.mark.realdata
@pytest.mark.slow
@pytest.mark.parametrize(("name", "within"), [("uint4_wo_128", 1e-5), ("int8", 1e-3)])
def test_perplexity_is_that_of_torch(name: str, within: float, tmp_path: Path) -> None:
    folder = Path(os.environ.get("QUARK_ONNX_DATA", "")) / "llm"
    if "QUARK_ONNX_DATA" not in os.environ or not folder.is_dir():
        pytest.skip("QUARK_ONNX_DATA names no folder with language models")
    transformers = pytest.importorskip("transformers")
    from quark_onnx.torch.calibration.perplexity import perplexity, windows_of

    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "mixtext")

    def windows(file: str) -> list[Any]:
        text = (folder / file).read_text(encoding="utf-8")
        return windows_of(
            tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids[0],
            256,
        )[:8]

    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder / "mixtext", dtype=torch.float32
    ).eval()
    quantized(
        model,
        name,
        *(window[None] for window in windows("mixtext_calib.txt")),
        exclude=("lm_head",),
    )
    scored = windows("mixtext_eval_wikitext.txt")
    inputs = {
        "input_ids": scored[0][None],
        "attention_mask": torch.ones(1, 256, dtype=torch.long),
    }
    path = write_onnx(model, inputs, tmp_path / "m.onnx").path
    losses = [
        torch.nn.functional.cross_entropy(
            torch.from_numpy(
                run(path, window[None], inputs["attention_mask"])[0][0, :-1]
            ),
            window[1:],
        )
        for window in scored
    ]
    assert float(torch.stack(losses).mean().exp()) == pytest.approx(
        perplexity(model, scored), rel=within
    )
