"""journal: a run that was killed goes on where it was, to the same bytes.

Whatever is damaged is left alone.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from re import escape
from typing import Any

import numpy as np
import onnx
import pytest

from quark_onnx import QConfig, quantize
from quark_onnx.common.errors import ConfigError
from quark_onnx.optimizers import GPTQ, AdaRound, BiasCorrection
from tests.models import normal, parse, weight
from tests.quark_onnx.optimizers.networks import attentive, texts

ROOT = Path(__file__).parents[3]
CONFIGS = {
    "gptq": QConfig.of("A8W8").with_(optimizers=(GPTQ(), BiasCorrection())),
    "adaround": (
        QConfig.of("XINT8").with_(optimizers=AdaRound(iterations=30, device="cpu"))
    ),
}


@pytest.fixture
def solved(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The names of the layers that are solved, not found."""
    names = list[str]()
    module = sys.modules["quark_onnx.refine.refine"]
    improved = module.best_solution

    def watched(problem: Any, optimizers: Any) -> Any:
        names.append(problem.name)
        return improved(problem, optimizers)

    monkeypatch.setattr(module, "best_solution", watched)
    yield names


def stored(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.npz"))


def result_bytes(folder: Path | None, config: QConfig) -> bytes:
    found: bytes = quantize(
        attentive(), texts(), config, resume=folder
    ).model.SerializeToString(deterministic=True)
    return found


@pytest.mark.parametrize("name", CONFIGS)
def test_what_is_done_is_not_done_again(
    name: str, tmp_path: Path, solved: list[str]
) -> None:
    plain = result_bytes(None, CONFIGS[name])
    assert len(solved) == 6
    solved.clear()
    assert result_bytes(tmp_path / "new" / "folder", CONFIGS[name]) == plain
    assert len(solved) == len(stored(tmp_path / "new" / "folder")) == 6
    solved.clear()
    first = quantize(
        attentive(), texts(), CONFIGS[name], resume=str(tmp_path / "new" / "folder")
    )
    assert not solved and first.model.SerializeToString(deterministic=True) == plain
    assert [layer.name for layer in first.report.layers] == [
        "q",
        "k",
        "v",
        "o",
        "up",
        "down",
    ]


def test_other_settings_and_other_data_find_nothing(
    tmp_path: Path, solved: list[str]
) -> None:
    config = CONFIGS["gptq"]
    result_bytes(tmp_path, config)
    for other, data in (
        (config.with_(optimizers=(GPTQ(damping=0.02), BiasCorrection())), texts()),
        (config, texts(seed=1)),
        (config.with_(per_channel=False), texts()),
    ):
        solved.clear()
        quantize(attentive(), data, other, resume=tmp_path)
        assert len(solved) == 6
    solved.clear()
    result_bytes(tmp_path, config)
    assert not solved


def test_data_that_differ_where_no_row_was_drawn_find_nothing(
    tmp_path: Path, solved: list[str]
) -> None:
    model = parse(
        "g (float[N,T,4] x) => (float[N,T,3] y) { [fc] y = MatMul (x, w) }",
        w=weight(4, 3),
    )
    config = QConfig.of("A8W8").with_(
        calibrator="minmax", optimizers=GPTQ()
    )  # which looks at all rows
    data = [{"x": normal(1, 20_000, 4, seed=seed)} for seed in range(8)]
    quantize(model, data, config, resume=tmp_path)
    data[0]["x"][0, 7] = 0
    solved.clear()
    quantize(model, data, config, resume=tmp_path)
    assert solved == ["fc"]


def test_damaged_files_are_left_alone(tmp_path: Path, solved: list[str]) -> None:
    plain = result_bytes(tmp_path, CONFIGS["gptq"])
    random = np.random.default_rng(0)
    files = stored(tmp_path)
    contents = [path.read_bytes() for path in files]
    for path, content in zip(files, contents, strict=True):  # something else for each
        kind = files.index(path)
        damaged = bytearray(content)
        if kind == 0:
            damaged = damaged[: len(damaged) // 2]
        elif kind == 1:
            damaged = bytearray()
        elif kind == 2:
            damaged = bytearray(b"not a zip at all")
        elif kind == 3:
            damaged[len(damaged) // 2] ^= 255
        elif kind == 4:
            path.unlink()
            np.savez(
                path,
                weight=np.zeros((1, 2, 3), np.float32),
                bias=np.zeros((1, 2), np.float32),
                result="{}",
            )
            continue
        else:
            path.unlink()
            path.mkdir()
            continue
        path.write_bytes(bytes(damaged))
    (tmp_path / "foreign.tmp").write_bytes(b"of somebody else")
    solved.clear()
    assert result_bytes(tmp_path, CONFIGS["gptq"]) == plain
    assert len(solved) == 6
    files[-1].rmdir()
    for path, content in zip(files[:2], contents[:2], strict=True):
        for _ in range(8):
            damaged = bytearray(content)
            damaged[random.integers(len(damaged))] ^= 1 << random.integers(8)
            path.write_bytes(bytes(damaged))
            assert result_bytes(tmp_path, CONFIGS["gptq"]) == plain


def test_a_place_that_is_no_folder_is_an_error_before_anything_is_done(
    tmp_path: Path,
) -> None:
    file = tmp_path / "file"
    file.write_text("here")
    for place in (file, file / "below"):
        with pytest.raises(
            ConfigError, match=r"resume folder .*file.* cannot be read and"
        ):
            quantize("no such model.onnx", None, resume=place)
    for odd in (3, "", "a\0b"):
        with pytest.raises(
            ConfigError, match=f"resume is {escape(repr(odd))}; it must be a folder"
        ):
            quantize(attentive(), texts(), resume=odd)  # type: ignore[arg-type]


def test_a_folder_that_takes_nothing_any_more_costs_the_journal_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    plain = result_bytes(None, CONFIGS["gptq"])

    def full(*arguments: Any, **keywords: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(sys.modules["quark_onnx.refine.resume"].np, "savez", full)
    assert result_bytes(tmp_path, CONFIGS["gptq"]) == plain
    assert "could not be kept" in caplog.text and not list(tmp_path.iterdir())


def test_without_an_optimizer_of_layers_the_report_says_that_nothing_is_kept(
    tmp_path: Path,
) -> None:
    result = quantize(attentive(), texts(), resume=tmp_path)
    assert any(note.startswith("resume: ") for note in result.report.notes)


SCRIPT = """
import sys
from pathlib import Path
import onnx
from quark_onnx import quantize
from tests.quark_onnx.optimizers.networks import attentive, texts
from tests.quark_onnx.refine.test_resume import CONFIGS
folder, name = sys.argv[1:]
print("ready", flush=True)
quantize(attentive(), texts(), CONFIGS[name], Path(folder) / "out.onnx", resume=Path(folder) / "journal")
"""  # noqa: E501


@pytest.mark.skipif(sys.platform == "win32", reason="there is no SIGKILL")
@pytest.mark.parametrize("name", CONFIGS)
def test_killed_at_any_moment_it_goes_on_to_the_same_bytes(
    name: str, tmp_path: Path, solved: list[str]
) -> None:
    whole = tmp_path / "whole.onnx"
    quantize(attentive(), texts(), CONFIGS[name], whole)
    journal = tmp_path / "journal"
    for kept in (1, 4):  # as soon as so many layers are done, and a little later
        command = [sys.executable, "-c", SCRIPT, str(tmp_path), name]
        run = subprocess.Popen(
            command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        deadline = time.monotonic() + 300
        while (
            len(stored(journal)) < kept
            and run.poll() is None
            and time.monotonic() < deadline
        ):
            time.sleep(0.0005)
        run.send_signal(signal.SIGKILL)
        run.communicate()
        assert len(stored(journal)) >= kept
    assert not (tmp_path / "out.onnx").exists() or len(stored(journal)) == 6
    left = 6 - len(stored(journal))
    solved.clear()
    quantize(attentive(), texts(), CONFIGS[name], tmp_path / "out.onnx", resume=journal)
    assert len(solved) == left
    assert (tmp_path / "out.onnx").read_bytes() == whole.read_bytes()
    onnx.checker.check_model(onnx.load(whole))
