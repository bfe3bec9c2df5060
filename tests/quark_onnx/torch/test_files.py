"""From files to files: what is copied, what is resumed, what is refused."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from quark_onnx.common.errors import ConfigError, DataError, ModelError
from quark_onnx.torch.calibration.text import read_windows
from quark_onnx.torch.checkpoints.load import load_checkpoint
from quark_onnx.torch.checkpoints.safetensors_io import CheckpointReader, Writer
from quark_onnx.torch.config.schemes import scheme
from quark_onnx.torch.config.spec import LayerSpec
from quark_onnx.torch.config.torch_config import TorchConfig
from quark_onnx.torch.pipelines.file_to_file import Writing, quantize_checkpoint
from quark_onnx.torch.pipelines.in_memory import quantize_model
from quark_onnx.torch.validate import validate
from tests.torch_models import llama, logits, made, saved, tokens

FP8 = TorchConfig(scheme("fp8"), exclude=("lm_head",))


def contents(folder: Path) -> dict[str, bytes]:
    return {
        str(file.relative_to(folder)): file.read_bytes()
        for file in folder.rglob("*")
        if file.is_file()
    }


def source_of(folder: Path, **settings: Any) -> Path:
    """A checkpoint in three files, with more beside it."""
    saved(made(llama(num_hidden_layers=3, **settings)), folder, max_shard_size="150KB")
    (folder / "tokenizer.json").write_text("{}", encoding="utf-8")
    (folder / "chat_template.jinja").write_text("{{ messages }}", encoding="utf-8")
    (folder / "code").mkdir()
    (folder / "code" / "own.py").write_text("x = 1", encoding="utf-8")
    return folder


def test_a_tied_head_of_a_model_whose_text_config_is_null(tmp_path: Path) -> None:
    source = source_of(tmp_path / "source", tie_word_embeddings=True)
    content = json.loads((source / "config.json").read_text(encoding="utf-8"))
    content["text_config"] = None
    (source / "config.json").write_text(json.dumps(content), encoding="utf-8")
    whole = TorchConfig(scheme("int8_per_channel"))
    quantize_checkpoint(source, tokens(), whole, tmp_path / "out", progress=False)
    written = (tmp_path / "out" / "config.json").read_text(encoding="utf-8")
    assert json.loads(written)["tie_word_embeddings"] is False
    assert json.loads(written)["text_config"] is None


def test_what_is_not_quantized_is_copied(tmp_path: Path) -> None:
    source = source_of(tmp_path / "source")
    before = contents(source)
    quantize_checkpoint(
        source,
        tokens(),
        FP8,
        tmp_path / "out",
        writing=Writing(max_shard=60_000),
        progress=False,
    )
    assert contents(source) == before
    out = contents(tmp_path / "out")
    for name in (
        "tokenizer.json",
        "chat_template.jinja",
        "code/own.py",
        "generation_config.json",
    ):
        assert out[name] == before[name]
    old, new = CheckpointReader(source), CheckpointReader(tmp_path / "out")
    assert len({new.file_of(name) for name in new}) == 3
    untouched = [name for name in old if "proj" not in name]
    assert len(untouched) == 9
    for name in untouched:
        assert (
            torch.equal(old.get(name), new.get(name))
            and old.get(name).dtype == new.get(name).dtype
        )
    index = json.loads(out["model.safetensors.index.json"])
    sizes = [new.get(name).numel() * new.get(name).element_size() for name in new]
    assert index["metadata"]["total_size"] == sum(sizes) and set(
        index["weight_map"]
    ) == set(new)


def test_tied_heads(tmp_path: Path) -> None:
    source = source_of(tmp_path / "source", tie_word_embeddings=True)
    quantize_checkpoint(source, tokens(), FP8, tmp_path / "float", progress=False)
    assert not any("lm_head" in name for name in CheckpointReader(tmp_path / "float"))
    assert (
        json.loads((tmp_path / "float" / "config.json").read_text("utf-8"))[
            "tie_word_embeddings"
        ]
        is True
    )
    config = TorchConfig(scheme("int4_wo_32"))
    quantize_checkpoint(source, None, config, tmp_path / "own", progress=False)
    assert (
        json.loads((tmp_path / "own" / "config.json").read_text("utf-8"))[
            "tie_word_embeddings"
        ]
        is False
    )
    reader = CheckpointReader(tmp_path / "own")
    assert "lm_head.weight_scale" in reader and "model.embed_tokens.weight" in reader
    model = load_checkpoint(tmp_path / "own")
    assert not torch.equal(model.lm_head.weight, model.model.embed_tokens.weight)
    assert torch.isfinite(logits(model, tokens()[0])).all()


@pytest.mark.parametrize("with_inputs", [True, False])
def test_layers_that_runtimes_fuse_share_the_second_scale_of_nvfp4(
    tmp_path: Path, with_inputs: bool
) -> None:
    spec = scheme("nvfp4") if with_inputs else LayerSpec(scheme("nvfp4").weight)
    config = TorchConfig(spec, exclude=("lm_head",))
    source = source_of(tmp_path / "source")
    quantize_checkpoint(
        source,
        tokens() if with_inputs else None,
        config,
        tmp_path / "out",
        progress=False,
    )
    floats, reader = CheckpointReader(source), CheckpointReader(tmp_path / "out")
    for shards in (
        ("self_attn", "q", "k", "v"),
        ("self_attn", "o"),
        ("mlp", "gate", "up"),
        ("mlp", "down"),
    ):
        names = [
            f"model.layers.1.{shards[0]}.{each}_proj.weight" for each in shards[1:]
        ]
        greatest = max(floats.get(name).abs().max() for name in names)
        for name in names:
            assert reader.get(f"{name}_scale_2") == (greatest / (6 * 448)).float()
    assert not [
        each
        for each in validate(tmp_path / "out", "vllm").findings
        if each.rule == "nvfp4-scales-differ"
    ]
    model = load_checkpoint(source)
    quantize_model(model, tokens() if with_inputs else None, config, progress=False)
    assert torch.equal(
        logits(model, tokens()[0]),
        logits(load_checkpoint(tmp_path / "out"), tokens()[0]),
    )


KILLED = """
import os, sys, torch
from pathlib import Path
from tests.torch_models import tokens
from quark_onnx.common.resume_folder import ResumeFolder
from quark_onnx.torch.pipelines.file_to_file import Writing, quantize_checkpoint
from quark_onnx.torch.config.torch_config import TorchConfig
from quark_onnx.torch.pipelines.in_memory import quantize_model
from quark_onnx.torch.config.schemes import scheme
from quark_onnx.torch.config.spec import LayerSpec
source, output, state, moment = sys.argv[1:]
write, count = ResumeFolder.write, [0]
def killed(path):
    path.write_bytes(b"half")
    os.kill(os.getpid(), 9)
def counted(folder, name, writer):
    count[0] += 1
    write(folder, name, killed if count[0] == int(moment) else writer)
ResumeFolder.write = counted
config = TorchConfig(scheme("fp8"), exclude=("lm_head",))
quantize_checkpoint(source, tokens(), config, output, writing=Writing(resume=Path(state)), progress=False)
"""  # noqa: E501


@pytest.mark.slow
def test_a_killed_run_is_resumed_to_the_same_bytes(tmp_path: Path) -> None:
    source = source_of(tmp_path / "source")
    quantize_checkpoint(source, tokens(), FP8, tmp_path / "whole", progress=False)
    script = [
        sys.executable,
        "-c",
        KILLED,
        str(source),
        str(tmp_path / "out"),
        str(tmp_path / "state"),
    ]
    for moment in (1, 2, 3, 4):
        done = subprocess.run([*script, str(moment)], capture_output=True, text=True)
        assert done.returncode == -9 and not (tmp_path / "out").exists(), done.stderr
    done = subprocess.run([*script, "0"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")
    assert sorted(file.name for file in tmp_path.iterdir()) == [
        "out",
        "source",
        "state",
        "whole",
    ]
    assert not [file for file in (tmp_path / "state").iterdir() if file.is_dir()]


def test_the_work_of_another_run_is_refused(tmp_path: Path) -> None:
    source, state = source_of(tmp_path / "source"), Writing(resume=tmp_path / "state")
    quantize_checkpoint(
        source, tokens(), FP8, tmp_path / "a", writing=state, progress=False
    )
    other = TorchConfig(scheme("int8"), exclude=("lm_head",))
    with pytest.raises(ConfigError, match="another run: its configuration differs"):
        quantize_checkpoint(
            source, tokens(), other, tmp_path / "b", writing=state, progress=False
        )
    with pytest.raises(ConfigError, match="another run: its data differs"):
        quantize_checkpoint(
            source, tokens(2), FP8, tmp_path / "b", writing=state, progress=False
        )
    assert not (tmp_path / "b").exists()


def test_bad_checkpoints_are_named_and_nothing_is_written(tmp_path: Path) -> None:
    source = source_of(tmp_path / "source")
    out = tmp_path / "out"
    with pytest.raises(DataError, match="no calibration data was given"):
        quantize_checkpoint(source, None, FP8, out, progress=False)
    with pytest.raises(ConfigError, match="exists already and is not empty"):
        quantize_checkpoint(source, tokens(), FP8, source, progress=False)
    file = CheckpointReader(source).file_of("model.layers.1.mlp.up_proj.weight")
    whole, tensors = file.read_bytes(), load_file(file)
    file.write_bytes(whole[:-100])
    with pytest.raises(ModelError, match=f"{file.name} is damaged"):
        quantize_checkpoint(source, tokens(), FP8, out, progress=False)
    broken = dict(tensors)
    broken["model.layers.1.mlp.up_proj.weight"] = tensors[
        "model.layers.1.mlp.up_proj.weight"
    ] * float("nan")
    save_file(broken, file)
    with pytest.raises((ModelError, DataError), match=r"model.layers.1.mlp"):
        quantize_checkpoint(source, tokens(), FP8, out, progress=False)
    del broken["model.layers.1.mlp.up_proj.weight"]
    save_file(broken, file)
    with pytest.raises(ModelError, match=r"model.layers.1.mlp.up_proj.weight"):
        quantize_checkpoint(source, tokens(), FP8, out, progress=False)
    file.unlink()
    with pytest.raises(
        ModelError,
        match=f"{file.name} is missing; model.safetensors.index.json lists it",
    ):
        quantize_checkpoint(source, tokens(), FP8, out, progress=False)
    with pytest.raises(ModelError, match=r"has no config.json"):
        quantize_checkpoint(tmp_path / "nothing", tokens(), FP8, out, progress=False)
    assert [entry.name for entry in tmp_path.iterdir()] == ["source"]


def test_a_checkpoint_in_the_format_asked_for_stays_as_it_is(tmp_path: Path) -> None:
    source = source_of(tmp_path / "source")
    config = TorchConfig(scheme("int4_wo_32"), exclude=("lm_head",))
    quantize_checkpoint(source, None, config, tmp_path / "once", progress=False)
    quantize_checkpoint(
        tmp_path / "once", None, config, tmp_path / "twice", progress=False
    )
    assert contents(tmp_path / "once") == contents(tmp_path / "twice")


def test_a_written_file_is_read_by_the_library_that_defines_it(tmp_path: Path) -> None:
    given = {
        "scalar": torch.tensor(1.5, dtype=torch.bfloat16),
        "odd": torch.arange(3, dtype=torch.int8),
        "even": torch.randn(4, 6),
        "half": torch.randn(3, 3).half(),
        "eight": torch.randn(2, 8).to(torch.float8_e4m3fn),
        "none": torch.zeros(0, 4),
        "view": torch.randn(8, 8)[::2, 1:3],
        "long": torch.arange(2),
    }
    with Writer(tmp_path / "out") as writer:
        for name, tensor in given.items():
            writer.add(name, tensor)
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert found.keys() == given.keys()
    for name, tensor in given.items():
        assert found[name].dtype == tensor.dtype and found[name].shape == tensor.shape
        assert torch.equal(found[name].float(), tensor.float())


def test_two_writers_of_a_folder_share_no_files(tmp_path: Path) -> None:
    """The first to end has its whole result; the other one says that it came late."""
    earlier, later = Writer(tmp_path / "out"), Writer(tmp_path / "out")
    with pytest.raises(ConfigError, match="out cannot be written"), earlier:
        earlier.add("a", torch.ones(4))
        with later:
            later.add("b", torch.zeros(8))
    assert load_file(tmp_path / "out" / "model.safetensors").keys() == {"b"}
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_what_files_hold_counts_and_the_index_settles_what_is_in_two(
    tmp_path: Path,
) -> None:
    for number in (1.0, 2.0):
        parts = {
            "a": torch.full((1,), number),
            f"only{number:.0f}": torch.full((1,), number),
        }
        save_file(parts, tmp_path / f"part{number:.0f}.safetensors")
    whole = CheckpointReader(tmp_path)
    assert set(whole) == {"a", "only1", "only2"}
    for file, number in (("part1.safetensors", 1.0), ("part2.safetensors", 2.0)):
        index = {
            "weight_map": {
                "only1": "part1.safetensors",
                "only2": "part2.safetensors",
                "a": file,
            }
        }
        (tmp_path / "model.safetensors.index.json").write_text(
            json.dumps(index), encoding="utf-8"
        )
        found = CheckpointReader(tmp_path)
        assert (found.get("a").item(), found.shape("a"), found.tensors["a"].dtype) == (
            number,
            (1,),
            "F32",
        )
        assert found.file_of("a").name == file
    (tmp_path / "model.safetensors.index.json").write_text(
        '{"weight_map": {"a": "part1.safetensors"}}', "utf-8"
    )
    assert set(CheckpointReader(tmp_path)) == {"a", "only1"}


def test_text_becomes_windows(tmp_path: Path) -> None:
    class Letters:
        def __call__(self, text: str, add_special_tokens: bool) -> dict[str, list[int]]:
            return {"input_ids": [ord(letter) % 96 for letter in text]}

    (tmp_path / "a.txt").write_text("abcdefghij", encoding="utf-8")
    (tmp_path / "b.jsonl").write_text('{"text": "klm"}\n"nop"\n', encoding="utf-8")
    found = read_windows(tmp_path, Letters(), 4)
    assert [chr(int(token) + 96) for window in found for token in window] == list(
        "abcdefghijklmnop"
    )
    assert len(read_windows(tmp_path, Letters(), 4, 2)) == 2
    with pytest.raises(DataError, match="not enough for one window of 99 tokens"):
        read_windows(tmp_path, Letters(), 99)
    with pytest.raises(DataError, match="no tokenizer"):
        read_windows(tmp_path / "a.txt", None, 4)
    (tmp_path / "lines.jsonl").write_text('{"text": "a\u2028b\x85c"}\r\n', "utf-8")
    (window,) = read_windows(tmp_path / "lines.jsonl", Letters(), 5)
    assert window.tolist() == [ord(letter) % 96 for letter in "a\u2028b\x85c"]
    (tmp_path / "c.json").write_text('[{"body": "x"}]', encoding="utf-8")
    with pytest.raises(DataError, match="row without a text"):
        read_windows(tmp_path / "c.json", Letters(), 4)
    (tmp_path / "d.npz").write_bytes(b"nothing")
    with pytest.raises(DataError, match="cannot be read as token ids"):
        read_windows(tmp_path / "d.npz", None, 4)
    (tmp_path / "e.npy").write_bytes(b"")
    with pytest.raises(DataError, match=r"e\.npy is empty"):
        read_windows(tmp_path / "e.npy", None, 4)
