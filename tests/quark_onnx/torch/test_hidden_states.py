"""Hidden states in files: the same bytes, and nothing left behind."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch

from quark_onnx.common.errors import ConfigError
from quark_onnx.torch.calibration.hidden_states import HiddenStates
from quark_onnx.torch.config.schemes import scheme
from quark_onnx.torch.config.torch_config import TorchConfig
from quark_onnx.torch.pipelines import file_run, flow
from quark_onnx.torch.pipelines.file_to_file import Writing, quantize_checkpoint
from tests import torch_families
from tests.torch_models import llama, made, saved, tokens

FP8 = TorchConfig(scheme("fp8"), exclude=("lm_head",))
GPTQ = TorchConfig(scheme("int4_wo_32"), exclude=("lm_head",), algorithms=("gptq",))


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str
)
def test_a_list_in_files_is_a_list(dtype: Any, tmp_path: Path) -> None:
    torch.manual_seed(0)
    given = [torch.randn(2, length, 8).to(dtype) for length in (3, 5, 1, 0)]
    states = HiddenStates(tmp_path, given)
    assert len(states) == 4 and len(list(tmp_path.iterdir())) == 3  # none is empty
    assert all(
        torch.equal(one, other) and one.dtype == dtype
        for one, other in zip(states, given, strict=True)
    )
    assert torch.equal(states[1], given[1]) and len(states[1:]) == 3
    before, other = states[0], states.copy()
    states[0] = given[1].transpose(0, 1)
    states.append(given[2])
    assert torch.equal(states[0], given[1].transpose(0, 1)) and torch.equal(
        states[4], given[2]
    )
    assert torch.equal(other[0], given[0]) and len(other) == 4
    del other
    assert torch.equal(before, given[0])  # what was read stays
    before.zero_()  # and is one's own
    del states
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("config", [FP8, GPTQ], ids=["fp8", "gptq"])
@pytest.mark.parametrize("family", ["llama3", "gemma2", "mixtral"])
def test_the_same_bytes(config: TorchConfig, family: str, tmp_path: Path) -> None:
    source = saved(
        made(torch_families.config_of(family), torch.bfloat16), tmp_path / "source"
    )
    writings = {
        "memory": Writing(),
        "files": Writing(spill=tmp_path / "spill"),
        "resumed": Writing(spill=tmp_path / "spill", resume=tmp_path / "state"),
        "again": Writing(resume=tmp_path / "state"),
    }
    for name, writing in writings.items():
        quantize_checkpoint(
            source, tokens(9), config, tmp_path / name, writing=writing, progress=False
        )
    whole = (tmp_path / "memory" / "model.safetensors").read_bytes()
    for name in writings:
        assert (tmp_path / name / "model.safetensors").read_bytes() == whole
    assert list((tmp_path / "spill").iterdir()) == []


def test_an_interrupted_run_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = saved(made(llama()), tmp_path / "source")
    seen = list[int]()

    def failing(*_: Any) -> Any:
        seen.append(len(list((tmp_path / "spill").rglob("*.hidden"))))
        raise KeyboardInterrupt

    monkeypatch.setattr("quark_onnx.torch.pipelines.flow.quantize_block", failing)
    with pytest.raises(KeyboardInterrupt):
        quantize_checkpoint(
            source,
            tokens(3),
            FP8,
            tmp_path / "out",
            writing=Writing(spill=tmp_path / "spill"),
        )
    assert seen == [3] and list((tmp_path / "spill").iterdir()) == []


@pytest.mark.parametrize("exclude", [("lm_head",), ()])
def test_algorithms_at_the_end_run_without_hidden_states(
    exclude: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They run the whole model, after a head that is calibrated after the blocks has read them."""
    alive = list[int]()

    def probe(*_: Any) -> list[Any]:
        gc.collect()
        lists = [each for each in gc.get_objects() if type(each) is HiddenStates]
        alive.append(sum(map(len, lists)))
        return []

    for module in (file_run, flow):
        monkeypatch.setattr(module, "finalizers", lambda config: [probe])
    source = saved(made(llama()), tmp_path / "float")
    config = TorchConfig(scheme("fp8"), exclude=exclude)
    quantize_checkpoint(source, tokens(6), config, tmp_path / "out", progress=False)
    assert alive == [0]


def test_a_folder_that_is_none(tmp_path: Path) -> None:
    source = saved(made(llama()), tmp_path / "source")
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="file cannot hold hidden states"):
        quantize_checkpoint(
            source,
            tokens(),
            FP8,
            tmp_path / "out",
            writing=Writing(spill=tmp_path / "file"),
        )
    assert not (tmp_path / "out").exists()
