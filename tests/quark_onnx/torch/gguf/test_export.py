"""Folders become files: names, shapes and values as llama.cpp wants them, and clear errors for
damaged folders.
"""

from __future__ import annotations

import json
import logging
import shlex
import shutil
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
gguf = pytest.importorskip("gguf")
transformers = pytest.importorskip("transformers")

from quark_onnx.cli import main
from quark_onnx.common.errors import (
    ConfigError,
    MissingDependency,
    ModelError,
    QuarkError,
)
from quark_onnx.torch.config.spec import TensorSpec
from quark_onnx.torch.exports.gguf import container, write_gguf
from quark_onnx.torch.exports.gguf.architectures import ARCHITECTURES
from quark_onnx.torch.formats.quantized_tensor import quantize
from quark_onnx.torch.runtime.safetensors_header import StoredTensor
from tests.answers import check_described
from tests.quark_onnx.torch.gguf.tiny import metadata, save, tensors

LLAMA3 = {
    "rope_theta": 10000.0,
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("llama")
    save(place)
    return place


def stored(folder: Path) -> dict[str, Any]:
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32
    )
    return {name: value.numpy() for name, value in model.state_dict().items()}


def test_the_answer_of_the_command(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "model.gguf"
    output.write_text("an earlier file")
    command = ["llm", "gguf", str(folder), "-o", str(output), "--overwrite", "--json"]
    assert main(command) == 0
    document = json.loads(capsys.readouterr().out)
    check_described(document)
    assert set(document["tensors"]) == set(tensors(output))
    assert main(command[:-1]) == 0
    lines = capsys.readouterr().out.splitlines()
    titles = [line[:9].strip() for line in lines]
    assert titles == ["model", "tensors", "size", "notes", "next", ""]
    assert lines[-2] == "next      check it"
    assert main(shlex.split(lines[-1])[1:]) == 0


def test_names_types_and_values(folder: Path, tmp_path: Path) -> None:
    result = write_gguf(folder, tmp_path / "model.gguf")
    found, exact = tensors(result.path), stored(folder)
    assert set(result.types) == set(found)
    block = {
        "attn_q",
        "attn_k",
        "attn_v",
        "attn_output",
        "ffn_gate",
        "ffn_up",
        "ffn_down",
    }
    assert {name for name, kind in result.types.items() if kind == "Q4_1"} == {
        f"blk.{index}.{part}.weight" for index in (0, 1) for part in block
    }
    assert {name for name, kind in result.types.items() if kind == "F16"} == {
        "token_embd.weight",
        "output.weight",
    }
    np.testing.assert_array_equal(
        found["blk.1.ffn_norm.weight"],
        exact["model.layers.1.post_attention_layernorm.weight"],
    )
    np.testing.assert_array_equal(
        found["token_embd.weight"],
        exact["model.embed_tokens.weight"].astype(np.float16),
    )
    np.testing.assert_array_equal(
        found["output.weight"], exact["lm_head.weight"].astype(np.float16)
    )
    down, left = (
        exact["model.layers.0.mlp.down_proj.weight"],
        found["blk.0.ffn_down.weight"],
    )
    reference = gguf.quants.quantize(down, gguf.GGMLQuantizationType.Q4_1)
    reference = gguf.quants.dequantize(reference, gguf.GGMLQuantizationType.Q4_1)
    assert 0 < ((left - down) ** 2).sum() < ((reference - down) ** 2).sum()


@pytest.mark.parametrize("kind", ["q4_0", "q8_0", "mxfp4", "f16", "f32"])
def test_kinds(folder: Path, tmp_path: Path, kind: str) -> None:
    result = write_gguf(folder, tmp_path / "model.gguf", kind)
    down = stored(folder)["model.layers.0.mlp.down_proj.weight"]
    left = tensors(result.path)["blk.0.ffn_down.weight"]
    assert result.types["blk.0.ffn_down.weight"] == kind.upper()
    assert result.types["token_embd.weight"] == ("F32" if kind == "f32" else "F16")
    # half a step of the widest block, of 16 or 256 steps; half a unit in the last place; nothing
    most = np.abs(down).max()
    bound = {
        "q4_0": most / 8 * 1.01,
        "q8_0": most / 250,
        "mxfp4": most / 4,
        "f16": 2e-3,
        "f32": 0,
    }[kind]
    assert np.abs(left - down).max() <= bound


def test_rows_of_q_and_k_turn_as_neighbours(folder: Path, tmp_path: Path) -> None:
    """Scores of attention are the same by transformers' rotation of halves and by llama.cpp's of
    neighbours; k has fewer heads than q.
    """
    found, exact = (
        tensors(write_gguf(folder, tmp_path / "model.gguf", "f32").path),
        stored(folder),
    )
    x = np.random.default_rng(0).normal(size=(5, 64))
    angle = np.arange(5)[:, None, None] * 10000.0 ** (-np.arange(8) / 8)

    def turned(weight: Any, neighbours: bool) -> Any:
        heads = (x @ weight.T.astype(np.float64)).reshape(5, -1, 16)
        first, second = (
            (heads[..., ::2], heads[..., 1::2])
            if neighbours
            else (heads[..., :8], heads[..., 8:])
        )
        a, b = (
            first * np.cos(angle) - second * np.sin(angle),
            second * np.cos(angle) + first * np.sin(angle),
        )
        return np.concatenate(
            [a, b], -1
        )  # the order inside a head is that of neither, but the same for q and k

    def scores(q: Any, k: Any, neighbours: bool) -> Any:
        return np.einsum(
            "ihd,jhd->hij",
            turned(q, neighbours),
            np.repeat(turned(k, neighbours), 2, 1),
        )

    layer = "model.layers.1.self_attn"
    wanted = scores(
        exact[f"{layer}.q_proj.weight"], exact[f"{layer}.k_proj.weight"], False
    )
    got = scores(found["blk.1.attn_q.weight"], found["blk.1.attn_k.weight"], True)
    np.testing.assert_allclose(got, wanted, atol=1e-9)
    np.testing.assert_array_equal(
        found["blk.1.attn_v.weight"], exact[f"{layer}.v_proj.weight"]
    )


def test_codes_are_kept_and_turned_with_their_rows(
    folder: Path, tmp_path: Path
) -> None:
    exact = stored(folder)
    specs = {
        "model.layers.0.self_attn.q_proj": TensorSpec(
            "int4", block_size=32, scale="float16"
        ),
        "model.layers.0.self_attn.k_proj.weight": TensorSpec(
            "int8", block_size=32, scale="float16"
        ),
        "model.layers.1.mlp.up_proj": TensorSpec(
            "int4", block_size=64, scale="float16"
        ),
        "lm_head.weight": TensorSpec("int8", per_channel=True, scale="float16"),
    }
    codes = {
        name: quantize(
            torch.tensor(exact[name.removesuffix(".weight") + ".weight"]), specs[name]
        )
        for name in specs
    }
    norm = torch.full((64,), 1.5)
    result = write_gguf(
        folder, tmp_path / "model.gguf", weights=codes | {"model.norm": norm}
    )
    plain = tensors(write_gguf(folder, tmp_path / "plain.gguf", "f32").path)
    found = tensors(result.path)
    assert (
        result.types["blk.0.attn_k.weight"] == "Q8_0"
        and result.types["blk.1.attn_k.weight"] == "Q4_1"
    )
    np.testing.assert_array_equal(found["output_norm.weight"], norm.numpy())
    np.testing.assert_array_equal(
        found["output.weight"], codes["lm_head.weight"].dequantize().numpy()
    )
    np.testing.assert_array_equal(
        found["blk.1.ffn_up.weight"],
        codes["model.layers.1.mlp.up_proj"].dequantize().numpy(),
    )
    for name, part in (("attn_q", "q_proj"), ("attn_k", "k_proj.weight")):
        # where each row went is read off the float file: rows are random, no two are the same
        source = exact[
            f"model.layers.0.self_attn.{part.removesuffix('.weight')}.weight"
        ]
        moved = [
            int(np.flatnonzero((source == row).all(1))[0])
            for row in plain[f"blk.0.{name}.weight"]
        ]
        assert sorted(moved) == list(range(len(source))) != moved
        wanted = codes[f"model.layers.0.self_attn.{part}"].dequantize().numpy()[moved]
        np.testing.assert_array_equal(found[f"blk.0.{name}.weight"], wanted)


def test_a_width_without_blocks_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save(tmp_path, intermediate_size=88)
    given = {
        "model.layers.0.mlp.down_proj": quantize(
            torch.ones(64, 88) * 0.3, TensorSpec("int4", block_size=32)
        )
    }
    with caplog.at_level(logging.WARNING):
        result = write_gguf(tmp_path, tmp_path / "model.gguf", weights=given)
    assert (
        result.types["blk.0.ffn_down.weight"]
        == result.types["blk.1.ffn_down.weight"]
        == "F16"
    )
    assert result.types["blk.0.ffn_up.weight"] == "Q4_1"
    reason = "a width of 88 is no multiple of 32"
    assert f"F16, not Q4_1: {reason}: blk.1.ffn_down.weight" in result.notes
    assert f"F16, not Q4_0: {reason}: blk.0.ffn_down.weight" in result.notes
    assert any(reason in message for message in caplog.messages)
    left = given["model.layers.0.mlp.down_proj"].dequantize().half().numpy()
    np.testing.assert_array_equal(tensors(result.path)["blk.0.ffn_down.weight"], left)


def test_tied_embeddings_are_written_once(tmp_path: Path) -> None:
    save(
        tmp_path
    )  # so that lm_head lies in the folder, too; transformers then passes it over
    edit(tmp_path / "config.json", tie_word_embeddings=True)
    assert "output.weight" not in write_gguf(tmp_path, tmp_path / "model.gguf").types
    with pytest.raises(
        ConfigError, match="weights has 'lm_head', which is no tensor to write"
    ):
        write_gguf(
            tmp_path, tmp_path / "model.gguf", weights={"lm_head": torch.ones(96, 64)}
        )


def test_one_tensor_is_in_memory_at_a_time(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held: list[Any] = []
    read = StoredTensor.read

    def watched(stored: StoredTensor) -> Any:
        assert not any(earlier() is not None for earlier in held)
        tensor = read(stored)
        held.append(weakref.ref(tensor))
        return tensor

    monkeypatch.setattr(StoredTensor, "read", watched)
    write_gguf(folder, tmp_path / "model.gguf")
    assert len(held) == 21


def test_a_window_is_noted(tmp_path: Path) -> None:
    save(tmp_path, "mistral", sliding_window=32)
    assert (
        "beyond 32 tokens results differ"
        in write_gguf(tmp_path, tmp_path / "model.gguf").notes[1]
    )


def test_norms_of_gemma(tmp_path: Path) -> None:
    save(tmp_path, "gemma", head_dim=16)
    found, exact = (
        tensors(write_gguf(tmp_path, tmp_path / "model.gguf").path),
        stored(tmp_path),
    )
    np.testing.assert_array_equal(
        found["output_norm.weight"], exact["model.norm.weight"] + 1
    )


def test_experts_are_stacked(tmp_path: Path) -> None:
    save(
        tmp_path, "mixtral", num_local_experts=12
    )  # so that expert 10 would sort behind expert 1
    result = write_gguf(tmp_path, tmp_path / "model.gguf", "f32")
    found = tensors(result.path)["blk.1.ffn_down_exps.weight"]
    with transformers.modeling_utils.safe_open(
        tmp_path / "model.safetensors", "pt"
    ) as file:
        for index in range(12):
            name = f"model.layers.1.block_sparse_moe.experts.{index}.w2.weight"
            np.testing.assert_array_equal(found[index], file.get_tensor(name).numpy())
    mixed = {
        "model.layers.0.block_sparse_moe.experts.3.w2": quantize(
            torch.ones(64, 96), TensorSpec("int8", block_size=32)
        )
    }
    with pytest.raises(
        ConfigError,
        match=r"the experts of 'blk.0.ffn_down_exps.weight' would be Q4_1 and Q8_0",
    ):
        write_gguf(tmp_path, tmp_path / "model.gguf", weights=mixed)


@pytest.mark.parametrize("model_type", ARCHITECTURES)
def test_tensors_are_those_of_the_architecture(model_type: str, tmp_path: Path) -> None:
    experts = (
        {"num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True}
        if "moe" in model_type
        else {}
    )
    save(tmp_path, model_type, **experts)
    result = write_gguf(tmp_path, tmp_path / "model.gguf")
    name = metadata(result.path)["general.architecture"]
    arch = next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == name)
    known = {
        gguf.TENSOR_NAMES[part].format(bid=bid)
        for part in gguf.MODEL_TENSORS[arch]
        for bid in (0, 1)
    }
    assert {tensor.rsplit(".", 1)[0] for tensor in result.types} <= known


def test_metadata(tmp_path: Path) -> None:
    save(tmp_path, head_dim=32, rms_norm_eps=3e-6, rope_parameters=LLAMA3)
    edit(tmp_path / "generation_config.json", eos_token_id=[5, 7])
    edit(tmp_path / "config.json", eos_token_id=[5, 7])
    result = write_gguf(tmp_path, tmp_path / "model.gguf", "q8_0")
    assert result.notes == (
        (
            "no tokenizer.json and no tokenizer.model: the file holds no vocabulary;"
            " give llama.cpp token ids"
        ),
    )
    found = metadata(result.path)
    wanted = {
        "general.architecture": "llama",
        "general.file_type": gguf.LlamaFileType.MOSTLY_Q8_0,
        "general.quantization_version": gguf.GGML_QUANT_VERSION,
        "llama.vocab_size": 96,
        "llama.context_length": 128,
        "llama.embedding_length": 64,
        "llama.block_count": 2,
        "llama.feed_forward_length": 96,
        "llama.attention.head_count": 4,
        "llama.attention.head_count_kv": 2,
        "llama.attention.key_length": 32,
        "llama.attention.value_length": 32,
        "llama.rope.dimension_count": 32,
        "llama.rope.freq_base": 10000.0,
        "tokenizer.ggml.model": "no_vocab",
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 5,
    }
    assert {key: found.get(key) for key in wanted} == wanted
    assert found["llama.attention.layer_norm_rms_epsilon"] == pytest.approx(3e-6)
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    scaled, _ = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS["llama3"](
        config, "cpu"
    )
    factors = 10000.0 ** (-np.arange(16) / 16) / scaled.double().numpy()
    np.testing.assert_allclose(
        tensors(result.path)["rope_freqs.weight"], factors, rtol=1e-5
    )


def test_factors_of_long_texts(tmp_path: Path) -> None:
    short, long = (
        [1.0 + index / 10 for index in range(8)],
        [1.0 + index for index in range(8)],
    )
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": short,
        "long_factor": long,
    }
    rope["original_max_position_embeddings"] = 32
    save(tmp_path, "phi3", original_max_position_embeddings=32, rope_parameters=rope)
    result = write_gguf(tmp_path, tmp_path / "model.gguf")
    found, values = metadata(result.path), tensors(result.path)
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    _, factor = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS["longrope"](
        config, "cpu"
    )
    assert found["phi3.rope.scaling.attn_factor"] == pytest.approx(factor)
    assert found["phi3.rope.scaling.original_context_length"] == 32
    np.testing.assert_array_equal(values["rope_factors_long.weight"], np.float32(long))
    np.testing.assert_array_equal(
        values["rope_factors_short.weight"], np.float32(short)
    )


def test_shards_give_the_same_file(folder: Path, tmp_path: Path) -> None:
    """And so does a second run: nothing in the file depends on time or chance."""
    save(tmp_path / folder.name, shard="50KB")
    assert len(list((tmp_path / folder.name).glob("*.safetensors"))) > 2
    whole = write_gguf(folder, tmp_path / "whole.gguf").path.read_bytes()
    assert (
        write_gguf(tmp_path / folder.name, tmp_path / "sharded.gguf").path.read_bytes()
        == whole
    )
    assert write_gguf(folder, tmp_path / "again.gguf").path.read_bytes() == whole


def test_an_error_leaves_what_was_there(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_text("earlier")
    with pytest.raises(
        ModelError,
        match=r"'model.layers.1.mlp.up_proj.weight' holds numbers that are infinite",
    ):
        write_gguf(
            folder,
            tmp_path / "model.gguf",
            weights={"model.layers.1.mlp.up_proj": torch.full((96, 64), torch.inf)},
        )
    assert [path.name for path in tmp_path.iterdir()] == ["model.gguf"]
    assert (tmp_path / "model.gguf").read_text() == "earlier"


def edit(path: Path, **changes: Any) -> None:
    path.write_text(
        json.dumps(json.loads(path.read_text(encoding="utf-8")) | changes),
        encoding="utf-8",
    )


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1000])


def drop(folder: Path, name: str) -> None:
    from safetensors.torch import load_file, save_file

    held = load_file(folder / "model.safetensors")
    save_file(
        {key: value for key, value in held.items() if key != name},
        folder / "model.safetensors",
    )


def code(folder: Path, name: str) -> None:
    from safetensors.torch import load_file, save_file

    held = load_file(folder / "model.safetensors")
    save_file(held | {name: held[name].to(torch.int8)}, folder / "model.safetensors")


def point_outside(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder.parent / "model.safetensors")
    index = {"weight_map": {"model.norm.weight": "../model.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(
        json.dumps(index), encoding="utf-8"
    )


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "no config": (lambda f: (f / "config.json").unlink(), r"model has no config.json$"),
    "config cut": (
        lambda f: (f / "config.json").write_text('{"model_type": "lla'),
        r"config.json is no JSON: line 1",
    ),
    "config a list": (
        lambda f: (f / "config.json").write_text("[]"),
        r"config.json: the document is an array, and must be an object",
    ),
    "config wrong": (
        lambda f: edit(f / "config.json", hidden_size="many"),
        r"transformers cannot read .*config.json",
    ),
    "unknown type": (
        lambda f: edit(f / "config.json", model_type="lama"),
        r"type 'lama' .*'llama'.*llama, mistral.*gemma",
    ),
    "no type": (
        lambda f: (f / "config.json").write_text("{}"),
        r"models of type None cannot be written",
    ),
    "quantized": (
        lambda f: edit(f / "config.json", quantization_config={"quant_method": "awq"}),
        r"already \(awq\)",
    ),
    "activation": (
        lambda f: edit(f / "config.json", hidden_act="gelu"),
        r"hidden_act is 'gelu'; .* computes silu",
    ),
    "rope": (
        lambda f: edit(
            f / "config.json",
            rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0},
        ),
        r"rope_type is 'dynamic'",
    ),
    "heads": (
        lambda f: edit(f / "config.json", num_attention_heads=8),
        r"has 64 rows; the 8 heads of 16",
    ),
    "blocks": (
        lambda f: edit(f / "config.json", num_hidden_layers=1),
        r"with 1 blocks has no place for the tensor",
    ),
    "more blocks": (
        lambda f: edit(f / "config.json", num_hidden_layers=3),
        r"lacks what becomes 'blk.2",
    ),
    "no tensors": (
        lambda f: (f / "model.safetensors").unlink(),
        r"holds no \*.safetensors",
    ),
    "tensors cut": (
        lambda f: cut(f / "model.safetensors"),
        r"model.safetensors is damaged",
    ),
    "tensors empty": (
        lambda f: (f / "model.safetensors").write_bytes(b""),
        r"model.safetensors is damaged",
    ),
    "no embedding": (
        lambda f: drop(f, "model.embed_tokens.weight"),
        r"lacks what becomes 'token_embd.weight'",
    ),
    "no matrix": (
        lambda f: drop(f, "model.layers.1.mlp.up_proj.weight"),
        r"lacks what becomes 'blk.1.ffn_up.weight'",
    ),
    "index": (
        lambda f: (f / "model.safetensors.index.json").write_text("{}"),
        r"index.json has no weight_map",
    ),
    "no shard": (
        lambda f: (f / "model.safetensors.index.json").write_text(
            '{"weight_map": {"a": "model-2.safetensors"}}'
        ),
        r"model-2.safetensors is missing; model.safetensors.index.json lists it",
    ),
    "outside": (
        lambda f: point_outside(f),
        r"index.json lists '../model.safetensors', which is no name of a file",
    ),
    "short shard": (
        lambda f: (f / "model.safetensors.index.json").write_text(
            '{"weight_map": {"a": "model.safetensors"}}'
        ),
        r"lacks the tensor 'a'",
    ),
    "codes": (
        lambda f: code(f, "model.norm.weight"),
        r"'model.norm.weight' is of type I8; the floats",
    ),
    "tokenizer cut": (
        lambda f: (f / "tokenizer.json").write_text("{"),
        r"tokenizer.json is no JSON: line 1",
    ),
    "tokenizer wrong": (
        lambda f: (f / "tokenizer.json").write_text("{}"),
        r"tokenizer.json is not understood",
    ),
    "sentencepiece": (
        lambda f: (f / "tokenizer.model").write_bytes(b"\xff" * 9),
        r"tokenizer.model is damaged",
    ),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damaged_folders(name: str, folder: Path, tmp_path: Path) -> None:
    damage, message = DAMAGE[name]
    shutil.copytree(folder, tmp_path / "model")
    damage(tmp_path / "model")
    with pytest.raises(QuarkError, match=message):
        write_gguf(tmp_path / "model", tmp_path / "model.gguf")
    assert not (tmp_path / "model.gguf").exists()


def test_options(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output = tmp_path / "model.gguf"
    with pytest.raises(
        ConfigError, match=r"kind is 'q4_2'.*one of: q4_0, q4_1, q8_0, mxfp4, f16, f32"
    ):
        write_gguf(folder, output, "q4_2")
    with pytest.raises(ConfigError, match="embeddings is 'f8'"):
        write_gguf(folder, output, embeddings="f8")
    with pytest.raises(ConfigError, match=r"the name of a GGUF file ends in .gguf"):
        write_gguf(folder, folder / "config.json")
    with pytest.raises(
        ConfigError, match=r"weights has 'layers.0.q', which is no tensor to write"
    ):
        write_gguf(folder, output, weights={"layers.0.q": torch.ones(2)})
    with pytest.raises(
        ConfigError,
        match=r"weights\['model.norm'\] is of shape \(2,\), stored is \(64,\)",
    ):
        write_gguf(folder, output, weights={"model.norm": torch.ones(2)})
    with pytest.raises(ModelError, match=r"beyond those of F16; ask for f32"):
        write_gguf(folder, output, weights={"lm_head": torch.full((96, 64), 1e6)})
    monkeypatch.setattr(
        "quark_onnx.torch.exports.gguf.export.find_spec", lambda name: None
    )
    with pytest.raises(
        MissingDependency,
        match=r"the package gguf: pip install '.*\[llm\]'",
    ):
        write_gguf(folder, output)
    assert not output.exists()


def test_experts_that_are_not_normalized_are_an_error(tmp_path: Path) -> None:
    save(
        tmp_path,
        "qwen3_moe",
        num_experts=4,
        num_experts_per_tok=2,
        norm_topk_prob=False,
    )
    with pytest.raises(ModelError, match="norm_topk_prob is false"):
        write_gguf(tmp_path, tmp_path / "model.gguf")


def test_a_place_that_cannot_be_written(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ModelError, match=r"model.gguf cannot be written"):
        write_gguf(folder, tmp_path / "file" / "model.gguf")


@pytest.mark.parametrize("removed", [1, 20_000])
def test_a_truncated_file_is_an_error(
    removed: int, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk may cut a file without an error on writing."""
    written = container.write

    def truncated(writer: Any, entries: Any) -> None:
        path = writer.path
        written(writer, entries)
        path.write_bytes(path.read_bytes().rstrip(b"\0")[:-removed])

    monkeypatch.setattr(container, "write", truncated)
    with pytest.raises(
        ModelError, match=r"model.gguf reads back damaged: .* is the disk full"
    ):
        write_gguf(folder, tmp_path / "model.gguf", "f32")
    assert list(tmp_path.iterdir()) == []
