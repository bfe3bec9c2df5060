"""Runs that were interrupted go on, and end in the same bytes.

What is damaged or of another run is not believed.
"""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from quark_onnx.common.errors import ConfigError
from quark_onnx.common.resume_folder import ResumeFolder
from quark_onnx.torch.config.schemes import scheme
from quark_onnx.torch.config.torch_config import TorchConfig
from quark_onnx.torch.pipelines import file_run
from quark_onnx.torch.pipelines.file_to_file import Writing, quantize_checkpoint
from tests import torch_families
from tests.torch_models import llama, made, saved, tokens

FP8 = TorchConfig(scheme("fp8"), exclude=("lm_head",))


class Killed(BaseException):
    """Ends a run."""


def run(
    source: Path,
    output: Path,
    resume: Path | None,
    data: Any = None,
    config: TorchConfig = FP8,
) -> dict[str, bytes | str]:
    """The bytes of all files of a run, and its report."""
    report = quantize_checkpoint(
        source,
        data or tokens(1, 2),
        config,
        output,
        writing=Writing(resume=resume),
        progress=False,
    )
    files = {file.name: file.read_bytes() for file in output.iterdir()}
    return {**files, "report": json.dumps(report.to_dict())}


def killed_behind(
    block: int,
    source: Path,
    output: Path,
    resume: Path,
    monkeypatch: pytest.MonkeyPatch,
    config: TorchConfig = FP8,
) -> None:
    """Run until so many blocks are done."""
    done = list[None]()

    def counted() -> None:
        done.append(None)
        if len(done) > block:
            raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(file_run, "return_freed_memory", counted)
        with pytest.raises(Killed):
            run(source, output, resume, config=config)
    assert not output.exists()


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return saved(made(llama(num_hidden_layers=4)), tmp_path / "model")


@dataclass
class Runs:
    """Runs of one model that many tests compare with.

    Attributes:
        source: the model.
        wanted: what a whole run writes.
        killed: its journal behind two blocks.
        other: that of another run.
    """

    source: Path
    wanted: dict[str, bytes | str]
    killed: Path
    other: Path

    def resume(self, folder: Path) -> Path:
        """A copy of the journal."""
        return Path(shutil.copytree(self.killed, folder / "resume"))


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    folder = tmp_path_factory.mktemp("runs")
    source = saved(made(llama(num_hidden_layers=4)), folder / "model")
    wanted = run(source, folder / "whole", None)
    killed, other = folder / "killed", folder / "other"
    with pytest.MonkeyPatch.context() as patch:
        killed_behind(2, source, folder / "out", killed, patch)
        config = FP8.with_(exclude=("*q_proj",))
        killed_behind(2, source, folder / "out", other, patch, config)
    return Runs(source, wanted, killed, other)


@pytest.mark.parametrize(
    "damage", ["", "block-00000", "block-00001", "hidden", "state"]
)
@pytest.mark.parametrize("how", ["cut", "gone", "flipped"])
def test_a_damaged_folder_changes_nothing(
    damage: str, how: str, runs: Runs, tmp_path: Path
) -> None:
    source, resume = runs.source, runs.resume(tmp_path)
    for file in resume.glob(f"{damage}*") if damage else ():
        content = bytearray(file.read_bytes())
        if how == "gone":
            file.unlink()
        elif how == "cut":
            file.write_bytes(content[:-40])
        else:
            content[-len(content) // 4] ^= 1  # among the values, not in a header
            file.write_bytes(content)
    if damage == "state" and how != "gone":
        with pytest.raises(ConfigError, match="remove"):
            run(source, tmp_path / "out", resume)
    else:
        assert run(source, tmp_path / "out", resume) == runs.wanted


@pytest.mark.parametrize("kind", ["block", "hidden"])
def test_a_full_disk_costs_the_journal_alone(
    kind: str,
    runs: Runs,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The run ends with its result, and the next one resumes from what was kept before."""
    source, wanted, resume = runs.source, runs.wanted, tmp_path / "resume"
    write = ResumeFolder.write

    def full(folder: ResumeFolder, name: str, writer: Any) -> None:
        # the disk has space again for later blocks, which alone would be of no use
        if name == f"{kind}-00002.safetensors":
            raise OSError(28, "No space left on device")
        write(folder, name, writer)

    with monkeypatch.context() as patch:
        patch.setattr(ResumeFolder, "write", full)
        assert run(source, tmp_path / "full", resume) == wanted
    assert f"{kind}-00002.safetensors could not be kept" in caplog.text
    assert [path.name for path in resume.glob("hidden-*.safetensors")] == [
        "hidden-00001.safetensors"
    ]
    caplog.clear()
    assert run(source, tmp_path / "again", resume) == wanted
    assert not caplog.text


def without_notes(file: Path, *_: Any) -> None:
    save_file(load_file(file), file)


def of_another_block(file: Path, resume: Path, _: Path) -> None:
    other = "1" if "00000" in file.name else "0"
    places = [each for each in resume.glob(f"block-0000{other}*") if each != file]
    file.write_bytes(places[0].read_bytes())


def of_another_run(file: Path, _: Path, other_resume: Path) -> None:
    file.write_bytes((other_resume / file.name).read_bytes())


def other_notes(text: str) -> Any:
    def change(file: Path, *_: Any) -> None:
        with safe_open(str(file), framework="pt") as opened:
            notes = dict(opened.metadata() or {})
        save_file(load_file(file), file, notes | {"kept": text})

    return change


@pytest.mark.parametrize("file", ["block-00000", "block-00001", "hidden-00002"])
@pytest.mark.parametrize(
    "change",
    [
        without_notes,
        of_another_block,
        of_another_run,
        other_notes("[" * 100_000),
        other_notes("[]"),
        other_notes('{"outcomes": [{"a": 1}]}'),
        other_notes('{"outcomes": [], "notes": 3}'),
        other_notes('{"outcomes": [], "unreached": [1]}'),
        other_notes('{"outcomes": [], "more": []}'),
    ],
)
def test_a_file_that_is_none_of_the_run_is_not_believed(
    file: str,
    change: Any,
    runs: Runs,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A file belongs to a journal by run and block, and has the entries that were written."""
    if file.startswith("hidden") and change.__name__ == "change":
        return  # hidden states have no entries of a report
    resume = runs.resume(tmp_path)
    change(resume / f"{file}.safetensors", resume, runs.other)
    assert run(runs.source, tmp_path / "out", resume) == runs.wanted
    assert f"{file}.safetensors is damaged" in caplog.text


@pytest.mark.parametrize("text", ["[]", "[" * 100_000, "{", "3"])
def test_a_damaged_state_is_named(text: str, source: Path, tmp_path: Path) -> None:
    resume = tmp_path / "resume"
    resume.mkdir()
    (resume / "state.json").write_text(text, encoding="utf-8")
    with pytest.raises(
        ConfigError, match=r"state\.json.*remove the folder to start anew"
    ):
        run(source, tmp_path / "out", resume)


def test_experts_that_no_token_reached_are_described_after_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = saved(made(torch_families.config_of("qwen3_moe")), tmp_path / "model")
    wanted = run(source, tmp_path / "whole", None)
    killed_behind(0, source, tmp_path / "out", tmp_path / "resume", monkeypatch)
    assert run(source, tmp_path / "out", tmp_path / "resume") == wanted


def test_notes_of_finished_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layers that GPTQ does not reach, and experts that take the scale of others."""
    source = saved(made(torch_families.config_of("qwen3_moe")), tmp_path / "model")
    for scheme_name in ("fp8", "nvfp4"):
        folder = tmp_path / scheme_name
        config = TorchConfig(
            scheme(scheme_name), exclude=("lm_head",), algorithms=("gptq",)
        )
        wanted = run(source, folder / "whole", None, config=config)
        assert "the greatest of the other experts" in str(wanted["report"])
        assert "not reached by the data: gptq" in str(wanted["report"])
        out, resume = folder / "out", folder / "resume"
        killed_behind(0, source, out, resume, monkeypatch, config)
        assert run(source, out, resume, config=config) == wanted


def test_kept_codes_of_finished_blocks(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model that has the format already, and is quantized once more."""
    writing = Writing(layout="compressed-tensors")
    quantize_checkpoint(
        source, tokens(), FP8, tmp_path / "fp8", writing=writing, progress=False
    )
    wanted = run(tmp_path / "fp8", tmp_path / "whole", None)
    assert '"kept_codes": []' not in str(wanted["report"])
    killed_behind(
        1, tmp_path / "fp8", tmp_path / "out", tmp_path / "resume", monkeypatch
    )
    assert run(tmp_path / "fp8", tmp_path / "out", tmp_path / "resume") == wanted


def test_another_model_of_the_same_shape_is_refused(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed_behind(1, source, tmp_path / "out", tmp_path / "resume", monkeypatch)
    weights = load_file(source / "model.safetensors")
    weights = {
        name: tensor * 2 if "mlp" in name else tensor
        for name, tensor in weights.items()
    }
    before = (source / "model.safetensors").stat()
    save_file(weights, source / "model.safetensors", {"format": "pt"})
    os.utime(
        source / "model.safetensors",
        ns=(before.st_atime_ns, before.st_mtime_ns + 1_000_000),
    )
    with pytest.raises(ConfigError, match="its model differs"):
        run(source, tmp_path / "out", tmp_path / "resume")


def test_another_mask_is_other_data(source: Path, tmp_path: Path) -> None:
    ids = tokens(1, 6)[0]
    for length in (0, 3):
        mask = torch.ones_like(ids)
        mask[:, :length] = 0
        data = [{"input_ids": ids, "attention_mask": mask}]
        if not length:
            run(source, tmp_path / "first", tmp_path / "resume", data)
        else:
            with pytest.raises(ConfigError, match="its data differs"):
                run(source, tmp_path / "second", tmp_path / "resume", data)


def test_a_folder_that_holds_something_else_is_left_alone(
    source: Path, tmp_path: Path
) -> None:
    before = sorted(source.iterdir())
    with pytest.raises(
        ConfigError, match=r"holds other files, as config.json; name an empty folder"
    ):
        run(source, tmp_path / "out", source)
    assert sorted(source.iterdir()) == before


def test_a_file_of_another_name_is_no_result(runs: Runs, tmp_path: Path) -> None:
    """As a copy that someone made of the hidden states."""
    resume = runs.resume(tmp_path)
    (resume / "hidden-00001 (copy).safetensors").write_bytes(b"")
    assert run(runs.source, tmp_path / "out", resume) == runs.wanted
