"""--device: what is computed elsewhere is what is computed on the CPU.

Where there is no GPU, the path of another device is run with "cpu:0", which is the CPU under a
second name: parameters are moved, hidden states are hosted, and results come back. That no
tensor is left behind on the wrong device only the tests with a GPU can tell.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from quark_onnx.cli.dispatch import main
from quark_onnx.common.errors import ConfigError
from quark_onnx.torch.calibration.hidden_states import HiddenStates
from quark_onnx.torch.checkpoints.load import load_checkpoint
from quark_onnx.torch.config.language import config_for
from quark_onnx.torch.pipelines import file_run
from quark_onnx.torch.pipelines.file_to_file import Writing, quantize_checkpoint
from quark_onnx.torch.runtime.devices import device_named
from tests.torch_models import llama, logits, made, saved, tokens

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
CASES = [
    ("fp8", ()),
    ("uint4_wo_32", ()),
    ("mxfp4", ("gptq",)),
    ("uint4_wo_32", ("awq", "gptaq", "autoround:steps=3")),
    ("int4_wo_32", ("distill:steps=2,sequences=4",)),
    ("int8", ("rotation", "autosmoothquant")),
]


def bytes_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def quantized(source: Path, output: Path, case: Any, device: str) -> Path:
    scheme, algorithms = case
    config = config_for(scheme).with_(algorithms=algorithms)
    writing = Writing(device=device)
    quantize_checkpoint(
        source, tokens(), config, output, writing=writing, progress=False
    )
    return output


@pytest.mark.parametrize("case", CASES, ids=str)
def test_another_device_writes_the_same(
    case: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = saved(made(llama()), tmp_path / "float")
    expected = bytes_of(quantized(source, tmp_path / "cpu", case, "cpu"))
    # room for the hidden states of two samples, so that the third is in host memory
    room = 2 * tokens()[0].numel() * 64 * 4
    monkeypatch.setattr(file_run, "room_for_states", lambda device: room)
    found = bytes_of(quantized(source, tmp_path / "other", case, "cpu:0"))
    assert found == expected


@needs_gpu
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_gpu_computes_nearly_the_same(case: Any, tmp_path: Path) -> None:
    source = saved(made(llama()), tmp_path / "float")
    folders = [
        quantized(source, tmp_path / name, case, name) for name in ("cpu", "cuda")
    ]
    found = [logits(load_checkpoint(each), tokens()[0]) for each in folders]
    wanted = logits(load_checkpoint(source), tokens()[0])
    errors = [float((each - wanted).square().mean()) for each in found]
    # sums have another order, so that single codes differ; the error does not
    assert errors[1] == pytest.approx(errors[0], rel=0.2)


def test_hosted_states() -> None:
    states = [torch.full((2, 4), float(place)) for place in range(4)]
    kept = HiddenStates(None, states, room=2 * states[0].nbytes)
    assert all(map(torch.equal, kept, states))
    other = kept.copy()
    other[0] = states[3]
    other[3] = states[0]
    assert [float(each[0, 0]) for each in other] == [3, 1, 2, 0]
    assert [float(each[0, 0]) for each in kept] == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("gpu", "must be auto, cpu, cuda, or cuda:N"),
        ("meta", "computes nothing"),
        ("cuda:99", "is not there"),
        ("hpu", "is not there"),
    ],
)
def test_wrong_devices(name: str, message: str, tmp_path: Path, capsys: Any) -> None:
    with pytest.raises(ConfigError, match=message):
        device_named(name)
    source = saved(made(llama()), tmp_path / "float")
    command = ["llm", "ptq", str(source), "-o", str(tmp_path / "out")]
    assert main([*command, "--scheme", "mxfp4", "--device", name]) == 2
    assert message in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_auto_is_the_first_gpu_or_the_cpu() -> None:
    expected = "cuda" if torch.cuda.is_available() else "cpu"
    assert device_named("auto").type == expected
