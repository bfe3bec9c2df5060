"""The next block is read while the current one is quantized, and nothing depends on it."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from quark_onnx.common.errors import ModelError
from quark_onnx.torch.checkpoints import read_ahead
from quark_onnx.torch.checkpoints.read_ahead import ReadAhead
from quark_onnx.torch.checkpoints.safetensors_io import CheckpointReader
from quark_onnx.torch.config.language import config_for
from quark_onnx.torch.pipelines import file_to_file, flow
from quark_onnx.torch.pipelines.file_to_file import quantize_checkpoint
from quark_onnx.torch.runtime.safetensors_header import StoredTensor
from tests.torch_models import llama, made, saved, tokens

#: Bytes of a tensor.
SIZE = 4096 * 4


@pytest.fixture
def tensors(tmp_path: Path) -> list[StoredTensor]:
    """Two tensors in a file."""
    values = {name: torch.arange(4096.0) for name in ("a", "b")}
    save_file(values, tmp_path / "model.safetensors")
    return list(CheckpointReader(tmp_path).tensors.values())


def test_tensors_are_read_to_their_end(tensors: list[StoredTensor]) -> None:
    with ReadAhead() as ahead:
        for count in (1, 2, 3):
            ahead.start(tensors)
            ahead.wait()
            assert ahead.size == count * 2 * SIZE


def test_no_more_is_cached_than_memory_allows(
    tensors: list[StoredTensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of the available memory holds one of two tensors."""
    monkeypatch.setattr(read_ahead, "available", lambda: 2 * SIZE)
    with ReadAhead() as ahead:
        ahead.start(tensors)
        ahead.wait()
        assert ahead.size == SIZE


def test_a_read_stops_when_its_tensors_are_in_use(tensors: list[StoredTensor]) -> None:
    with ReadAhead() as ahead:
        for _ in range(10):
            ahead.start(tensors * 10_000)
        ahead.start(tensors)
        ahead.wait()
        assert ahead.size < 10 * 10_000 * 2 * SIZE


@pytest.mark.parametrize("damage", ["missing", "truncated"])
def test_an_error_is_left_to_the_reader(
    damage: str, tensors: list[StoredTensor]
) -> None:
    path = tensors[0].path
    if damage == "missing":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:-100])
    with ReadAhead() as ahead:
        ahead.start(tensors)
        ahead.wait()
        assert ahead.size == (0 if damage == "missing" else 2 * SIZE - 100)
    with pytest.raises(ModelError, match=r"the tensor 'a' cannot be read"):
        tensors[0].read()


def test_the_thread_ends_after_an_error(tensors: list[StoredTensor]) -> None:
    before = threading.active_count()
    with pytest.raises(KeyboardInterrupt), ReadAhead() as ahead:
        ahead.start(tensors * 1000)
        raise KeyboardInterrupt
    assert threading.active_count() == before


class Recording(ReadAhead):
    """ReadAhead that records the blocks it is asked for."""

    asked: list[set[str]]

    def start(self, tensors: Sequence[StoredTensor]) -> None:
        self.asked.append({tensor.name for tensor in tensors})
        super().start(tensors)
        self.wait()


@pytest.mark.parametrize(
    "algorithms", [(), ("gptq",), ("distill:steps=1,sequences=2",)]
)
def test_one_block_is_read_ahead_in_order(
    algorithms: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = saved(made(llama(num_hidden_layers=3)), tmp_path / "float")
    monkeypatch.setattr(file_to_file, "ReadAhead", Recording)
    Recording.asked = []
    config = config_for("int4_wo_32").with_(algorithms=algorithms)
    if not algorithms:
        config = config_for("fp8")
    quantize_checkpoint(source, tokens(), config, tmp_path / "out", progress=False)
    blocks = []
    for names in Recording.asked:
        (block,) = {name.split(".")[2] for name in names}
        assert len(names) == 9
        blocks.append(block)
    assert blocks == ["1", "2"]


def test_layers_are_read_ahead_without_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = saved(made(llama()), tmp_path / "float")
    monkeypatch.setattr(file_to_file, "ReadAhead", Recording)
    Recording.asked = []
    quantize_checkpoint(
        source, None, config_for("uint4_wo_32"), tmp_path / "out", progress=False
    )
    asked = [name for names in Recording.asked for name in names]
    assert sorted(asked) == sorted(CheckpointReader(source))


def test_a_file_that_disappears_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = saved(made(llama()), tmp_path / "float", max_shard_size="100KB")
    lost = CheckpointReader(source).file_of("model.layers.1.mlp.down_proj.weight")

    def run(*given: Any, **named: Any) -> Any:
        lost.unlink(missing_ok=True)
        return original(*given, **named)

    original = flow.quantize_block
    monkeypatch.setattr(flow, "quantize_block", run)
    with pytest.raises(ModelError, match=lost.name):
        quantize_checkpoint(
            source, tokens(), config_for("fp8"), tmp_path / "out", progress=False
        )
    assert not (tmp_path / "out").exists()
