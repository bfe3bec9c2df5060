"""GGUF: headers against the package gguf, which also writes the files; what llama.cpp refuses."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quark_onnx.torch.validate import Validation, validate
from quark_onnx.torch.validate.llama_cpp import read_gguf
from tests.quark_onnx.torch.validate import drafts

gguf = pytest.importorskip("gguf")
NAMES = (
    "attn_norm",
    "attn_q",
    "attn_k",
    "attn_v",
    "attn_output",
    "ffn_norm",
    "ffn_gate",
    "ffn_up",
    "ffn_down",
)
TENSORS = (
    "token_embd",
    "output_norm",
    *(f"blk.{n}.{name}" for n in range(2) for name in NAMES),
)


def write(
    file: Path,
    tensors: tuple[str, ...] = TENSORS,
    architecture: str = "llama",
    leave_out: str = "",
    **extra: Any,
) -> Path:
    """A Llama of zeros in Q8_0 with vectors in F32, by gguf's own writer."""
    writer = gguf.GGUFWriter(file, architecture)
    metadata: dict[str, Callable[[], None]] = {
        "context_length": lambda: writer.add_context_length(64),
        "embedding_length": lambda: writer.add_embedding_length(32),
        "block_count": lambda: writer.add_block_count(2),
        "head_count": lambda: writer.add_head_count(4),
        "epsilon": lambda: writer.add_layer_norm_rms_eps(1e-5),
        "tokenizer": lambda: writer.add_tokenizer_model("llama"),
        "tokens": lambda: writer.add_token_list(["a", "b"]),
        "scores": lambda: writer.add_token_scores([0.0, 1.0]),
    }
    for name, add in metadata.items():
        if name != leave_out:
            add()
    for name in tensors:
        if name.endswith("norm"):
            writer.add_tensor(f"{name}.weight", np.zeros(32, np.float32))
        else:
            data = gguf.quants.quantize(
                np.zeros((8, 32), np.float32), gguf.GGMLQuantizationType.Q8_0
            )
            writer.add_tensor(
                f"{name}.weight", data, raw_dtype=gguf.GGMLQuantizationType.Q8_0
            )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def rules(verdict: Validation) -> list[str]:
    return sorted({finding.rule for finding in verdict.findings})


def test_whole(tmp_path: Path) -> None:
    file = write(tmp_path / "model.gguf")
    for place in (file, tmp_path):
        verdict = validate(place, "llama.cpp")
        assert verdict.findings == () and verdict.right
        assert verdict.schemes == {"Q8_0": 15}


def test_a_header_is_what_the_package_reads(tmp_path: Path) -> None:
    file = write(tmp_path / "model.gguf")
    header, reader = read_gguf(file), gguf.GGUFReader(file)
    assert [tensor.name for tensor in header.tensors] == [
        tensor.name for tensor in reader.tensors
    ]
    for mine, theirs in zip(header.tensors, reader.tensors, strict=True):
        assert mine.shape == tuple(theirs.shape) and mine.kind == theirs.tensor_type
        start = -(-header.start // header.alignment) * header.alignment
        assert start + mine.offset == theirs.data_offset
    for key, value in header.metadata.items():
        found = reader.fields[key]
        assert value == (
            len(found.data)
            if found.types[0] == gguf.GGUFValueType.ARRAY
            else found.contents()
        )


def test_none(tmp_path: Path) -> None:
    drafts.quark().write(tmp_path / "folder")
    verdict = validate(tmp_path / "folder", "llama.cpp")
    assert rules(verdict) == ["gguf-none"]
    assert "quark-onnx llm gguf" in verdict.text()


@pytest.mark.parametrize("name", ["blk.1.ffn_up", "token_embd", "output_norm"])
def test_tensor_is_missing(name: str, tmp_path: Path) -> None:
    file = write(
        tmp_path / "model.gguf", tuple(each for each in TENSORS if each != name)
    )
    verdict = validate(file, "llama.cpp")
    assert rules(verdict) == ["gguf-tensor-missing"]
    assert verdict.findings[0].place == f"{name}.weight"


def test_tensor_is_unknown(tmp_path: Path) -> None:
    file = write(tmp_path / "model.gguf", (*TENSORS, "blk.0.attn_scale"))
    assert rules(validate(file, "llama.cpp")) == ["gguf-tensor-unknown"]


@pytest.mark.parametrize(
    "key",
    [
        "context_length",
        "embedding_length",
        "block_count",
        "head_count",
        "epsilon",
        "tokenizer",
    ],
)
def test_key_is_missing(key: str, tmp_path: Path) -> None:
    file = write(tmp_path / "model.gguf", leave_out=key)
    assert rules(validate(file, "llama.cpp")) == ["gguf-key"]


def test_architecture_is_unknown(tmp_path: Path) -> None:
    file = write(tmp_path / "model.gguf", architecture="lama")
    assert rules(validate(file, "llama.cpp")) == ["gguf-architecture"]


def patched(file: Path, before: bytes, after: bytes) -> None:
    content = file.read_bytes()
    assert content.count(before) == 1 and len(before) == len(after)
    file.write_bytes(content.replace(before, after))


def entry(name: str, kind: int, offset: int, *shape: int) -> bytes:
    text = f"{name}.weight".encode()
    sizes = struct.pack(f"<{len(shape)}Q", *shape)
    return (
        struct.pack("<Q", len(text))
        + text
        + struct.pack("<I", len(shape))
        + sizes
        + struct.pack("<IQ", kind, offset)
    )


@pytest.mark.parametrize(
    ("rule", "kind", "offset", "width"),
    [
        ("gguf-type", 99, 288, 32),
        ("gguf-type", 8, 288, 33),
        ("gguf-place", 0, 290, 32),
        ("gguf-place", 0, 320, 32),
    ],
)
def test_type_and_place(
    rule: str, kind: int, offset: int, width: int, tmp_path: Path
) -> None:
    file = write(tmp_path / "model.gguf")
    assert 8 * 34 < 288  # eight rows of a block of 34 bytes, aligned
    patched(
        file,
        entry("output_norm", 0, 288, 32),
        entry("output_norm", kind, offset, width),
    )
    assert rules(validate(file, "llama.cpp")) == [rule]


def test_alignment(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    writer.add_custom_alignment(64)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    key = b"general.alignment" + struct.pack("<I", 4)
    patched(
        tmp_path / "model.gguf",
        key + struct.pack("<I", 64),
        key + struct.pack("<I", 48),
    )
    assert "gguf-place" in rules(validate(tmp_path / "model.gguf", "llama.cpp"))


def test_truncated_everywhere(tmp_path: Path) -> None:
    file = write(tmp_path / "model.gguf")
    whole = file.read_bytes()
    end = len(whole) - 16  # what follows fills the last tensor up to the alignment
    for length in {0, 1, 4, 8, 23, 24, 25, *range(0, end, len(whole) // 50), end - 1}:
        file.write_bytes(whole[:length])
        assert rules(validate(file, "llama.cpp")) == ["gguf-damaged"], length


@pytest.mark.parametrize(
    ("place", "value", "text"),
    [
        (0, b"GGML", "letters GGUF"),
        (4, struct.pack("<I", 1), "version 1"),
        (4, struct.pack(">I", 3), "big-endian"),
        (8, struct.pack("<Q", 1 << 60), "ends within|two tensors"),
        (16, struct.pack("<Q", 1 << 60), "ends within|unknown type|twice|two tensors"),
    ],
)
def test_beginning(place: int, value: bytes, text: str, tmp_path: Path) -> None:
    file = write(tmp_path / "model.gguf")
    content = bytearray(file.read_bytes())
    content[place : place + len(value)] = value
    file.write_bytes(content)
    (finding,) = validate(file, "llama.cpp").findings
    assert finding.rule == "gguf-damaged"
    assert any(part in finding.found for part in text.split("|")), finding.found


@given(data=st.data())
def test_bits_that_flip(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    file = write(tmp_path_factory.mktemp("flip") / "model.gguf")
    content = bytearray(file.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, 1600))] = data.draw(st.integers(0, 255))
    file.write_bytes(content)
    assert validate(file, "llama.cpp").word in ("loads", "refused")


def test_parts(tmp_path: Path) -> None:
    write(tmp_path / "model-00001-of-00002.gguf", TENSORS[:10])
    assert rules(validate(tmp_path, "llama.cpp")) == ["gguf-parts"]
    write(tmp_path / "model-00002-of-00002.gguf", TENSORS[10:])
    assert validate(tmp_path, "llama.cpp").findings == ()


def test_no_file_but_a_folder_or_a_pointer(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").mkdir()
    (tmp_path / "other.gguf").write_text("version https://git-lfs.github.com/spec/v1")
    first, second = validate(tmp_path, "llama.cpp").findings
    assert (first.rule, first.place) == ("gguf-damaged", "model.gguf")
    assert second.place == "other.gguf" and "git lfs pull" in second.found


def test_truncated_without_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "quark_onnx.torch.validate.llama_cpp.gguf_package", lambda: None
    )
    file = write(tmp_path / "model.gguf")
    whole = file.read_bytes()
    file.write_bytes(whole[: read_gguf(file).start + 100])
    (finding,) = [
        found
        for found in validate(file, "llama.cpp").findings
        if found.severity == "refused"
    ]
    assert (finding.rule, finding.place) == ("gguf-damaged", "model.gguf")
    assert "ends within" in finding.found


def test_without_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write(tmp_path / "model.gguf")
    monkeypatch.setattr(
        "quark_onnx.torch.validate.llama_cpp.gguf_package", lambda: None
    )
    verdict = validate(file, "llama.cpp")
    assert rules(verdict) == ["gguf-unchecked"] and verdict.right
