"""llama.cpp itself loads the files and computes what transformers computes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
gguf = pytest.importorskip("gguf")
transformers = pytest.importorskip("transformers")
pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")

from quark_onnx.torch.config.spec import TensorSpec
from quark_onnx.torch.exports.gguf import write_gguf
from quark_onnx.torch.exports.gguf.architectures import ARCHITECTURES
from quark_onnx.torch.formats.quantized_tensor import quantize
from tests.quark_onnx.torch.gguf.tiny import llama, logits, save, tensors

VARIABLE = "QUARK_ONNX_DATA"


def rope(**settings: Any) -> dict[str, Any]:
    return {
        "rope_parameters": {
            "rope_theta": 10000.0,
            "original_max_position_embeddings": 32,
            **settings,
        }
    }


EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "norm_topk_prob": True,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, {}) for name in ARCHITECTURES},
    "qwen3_moe": ("qwen3_moe", EXPERTS),
    "mixtral": ("mixtral", {"num_local_experts": 4}),
    "gemma": ("gemma", {"head_dim": 16}),
    "biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "wide heads": ("llama", {"head_dim": 32}),
    "tied": ("llama", {"tie_word_embeddings": True}),
    "part of a head": (
        "phi3",
        {"hidden_size": 128, **rope(rope_type="default", partial_rotary_factor=0.75)},
    ),
    "linear": ("llama", rope(rope_type="linear", factor=4.0)),
    "llama3": (
        "llama",
        rope(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0),
    ),
    "yarn": ("qwen2", rope(rope_type="yarn", factor=4.0)),
    "longrope": (
        "phi3",
        {
            "original_max_position_embeddings": 32,
            **rope(
                rope_type="longrope",
                short_factor=[1.0 + 0.1 * index for index in range(8)],
                long_factor=[1.0 + 0.5 * index for index in range(8)],
            ),
        },
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_architectures(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model_type, settings = MODELS[name]
    model = save(tmp_path, model_type, **settings)
    ids = np.random.default_rng(0).integers(3, 96, 100)
    with torch.no_grad():
        wanted = model(torch.tensor(ids[None])).logits[0].numpy()
    got = logits(
        llama(write_gguf(tmp_path, tmp_path / "model.gguf", "f32").path, monkeypatch),
        ids,
    )
    # float32 in another order; llama.cpp's GELU is a table of float16
    np.testing.assert_allclose(
        got, wanted, atol=(1e-2 if model_type == "gemma" else 5e-4) * wanted.std()
    )


@pytest.mark.parametrize("dtype", ["uint4", "int4", "int8", "mxfp4e2m1"])
def test_codes(dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """llama.cpp rounds activations to 8 bits: its results are nearer to those of the weights that
    are left by far than the float model's.
    """
    model = save(tmp_path)
    integers = {"symmetric": dtype != "uint4", "block_size": 32, "scale": "float16"}
    spec = TensorSpec(dtype, **({} if dtype.startswith("mx") else integers))
    names = [
        name
        for name, part in model.named_modules()
        if isinstance(part, torch.nn.Linear) and name != "lm_head"
    ]
    codes = {
        name: quantize(model.get_submodule(name).weight.detach(), spec)
        for name in names
    }
    ids = torch.arange(3, 96)
    with torch.no_grad():
        exact = model(ids[None]).logits[0].numpy()
        for name in names:
            model.get_submodule(name).weight.copy_(codes[name].dequantize())
        wanted = model(ids[None]).logits[0].numpy()
    result = write_gguf(tmp_path, tmp_path / "model.gguf", "f32", weights=codes)
    assert sum(kind != "F32" for kind in result.types.values()) == len(names) == 14
    got = logits(llama(result.path, monkeypatch), ids)
    left, lost = np.abs(got - wanted).mean(), np.abs(exact - wanted).mean()
    assert left < (0.2 * lost if spec.dtype.bits == 4 else 0.05 * exact.std())


def windows(count: int) -> tuple[Path, Any]:
    if VARIABLE not in os.environ:
        pytest.skip(f"set {VARIABLE} to the folder of real models and data")
    data = Path(os.environ[VARIABLE], "llm")
    tokenizer = transformers.AutoTokenizer.from_pretrained(data / "mixtext")
    text = (data / "mixtext_eval_wikitext.txt").read_text(encoding="utf-8")
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    return data, np.array(ids[: 256 * count]).reshape(count, 256)


def nll(values: Any, ids: Any) -> float:
    logs = torch.log_softmax(torch.tensor(values, dtype=torch.float64), -1)[:-1]
    return -logs.gather(-1, torch.tensor(ids)[1:, None]).mean().item()


@pytest.mark.realdata
@pytest.mark.parametrize(
    ("kind", "excess"), [("f16", 1e-4), ("q8_0", 2e-3), ("q4_0", 0.02), ("q4_1", 0.02)]
)
def test_perplexity_of_a_real_model(
    kind: str, excess: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, texts = windows(6)
    float_model = transformers.AutoModelForCausalLM.from_pretrained(
        data / "mixtext", dtype=torch.float32
    )
    result = write_gguf(data / "mixtext", tmp_path / "mixtext.gguf", kind)
    model = llama(result.path, monkeypatch, 256)
    with torch.no_grad():
        wanted = np.mean(
            [
                nll(float_model(torch.tensor(ids[None])).logits[0].numpy(), ids)
                for ids in texts
            ]
        )
    got = np.mean([nll(logits(model, ids), ids) for ids in texts])
    assert np.exp(got) == pytest.approx(np.exp(wanted), rel=excess)


@pytest.mark.realdata
def test_a_real_model_reads_and_writes_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Greedy, from the same weights, as transformers does."""
    data, _ = windows(1)
    result = write_gguf(data / "mixtext", tmp_path / "mixtext.gguf", "f32")
    assert result.notes == ()
    model = llama(result.path, monkeypatch, 256)
    prompt = "The history of the city began in 1843, when"
    tokenizer = transformers.AutoTokenizer.from_pretrained(data / "mixtext")
    ids = tokenizer(prompt, add_special_tokens=False, return_tensors="pt")["input_ids"]
    assert model.tokenize(prompt.encode(), add_bos=False) == ids[0].tolist()
    float_model = transformers.AutoModelForCausalLM.from_pretrained(
        data / "mixtext", dtype=torch.float32
    )
    wanted = float_model.generate(ids, max_new_tokens=24, do_sample=False)[
        0, ids.shape[1] :
    ]
    got = model.create_completion(prompt, max_tokens=24, temperature=0.0)["choices"][0][
        "text"
    ]
    assert got == tokenizer.decode(wanted)


@pytest.mark.realdata
def test_a_real_model_without_a_tokenizer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its feed-forward width is 172, which 32 does not divide."""
    data, _ = windows(1)
    result = write_gguf(data / "stories260K", tmp_path / "stories.gguf", "q8_0")
    assert [note.split(":")[0] for note in result.notes] == [
        "no tokenizer.json and no tokenizer.model",
        "F16, not Q8_0",
    ]
    rows = np.load(data / "eval_tokens_stories260K.npz")
    ids = rows["ids"][int(np.argmax(rows["len"] >= 256)), :256]
    float_model = transformers.AutoModelForCausalLM.from_pretrained(
        data / "stories260K", dtype=torch.float32
    )
    with torch.no_grad():
        wanted = nll(
            float_model(torch.tensor(ids[None].astype(np.int64))).logits[0].numpy(),
            ids.astype(np.int64),
        )
    got = nll(logits(llama(result.path, monkeypatch, 256), ids), ids.astype(np.int64))
    assert got == pytest.approx(wanted, abs=0.01)
    assert tensors(result.path)["blk.0.ffn_down.weight"].shape == (64, 172)
