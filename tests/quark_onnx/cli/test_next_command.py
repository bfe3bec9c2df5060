"""Commands that a verdict or an error proposes can be pasted, and run."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from quark_onnx import AutoMixedPrecision, QConfig, changed, quantize
from quark_onnx.cli.dispatch import build_parser
from quark_onnx.cli.next_command import next_command, shell_line
from quark_onnx.common.registry import RECIPES
from quark_onnx.npu import deploy
from quark_onnx.preprocessing.pixels import SCALINGS
from quark_onnx.report.verdict import NextStep
from tests.models import normal
from tests.pictures import pictures, trained


@pytest.mark.parametrize(
    ("words", "changes", "without", "expected"),
    [
        # appended after everything else
        ("m.onnx -o q.onnx --data d", "--per-channel", (), None),
        # the earlier value, however it was written
        ("m.onnx -o q --preset XINT8", "--preset A16W8", (), "m.onnx -o q"),
        ("m.onnx --preset=XINT8 -oq", "--preset A16W8", (), "m.onnx -oq"),
        # options that exclude each other
        ("m.onnx -o q --preset XINT8", "--recipe detector", (), "m.onnx -o q"),
        ("m.onnx -o q --config c.yaml", "--preset W8", (), "m.onnx -o q"),
        ("m.onnx -o q --per-tensor", "--per-channel", (), "m.onnx -o q"),
        ("m.onnx -o q --auto-mixed 30", "--auto-exclude 20", (), "m.onnx -o q"),
        # values that are collected stay
        (
            "m.onnx -o q --optimize cle --exclude a b",
            "--optimize adaround",
            (),
            "m.onnx -o q --optimize cle --exclude a b",
        ),
        # numbers below zero are values, and a model after an option is no value
        (
            "--image-size 8 --mean -1 -.5 0 m.onnx -o q --exclude a",
            "--scale 1",
            ("--mean",),
            "m.onnx --image-size 8 -o q --exclude a",
        ),
        ("m.onnx -o q --json", "--unsafe", (), None),
        ("m.onnx --random-data -o q", "--unsafe", (), None),
        ("--exclude a --preset XINT8 m.onnx", "--preset W8", (), "m.onnx --exclude a"),
        ("-o q --data d -- m.onnx", "--preset W8", (), "-o q --data d"),
    ],
)
def test_options_are_replaced(
    words: str, changes: str, without: tuple[str, ...], expected: str | None
) -> None:
    parser = build_parser()[1]["quantize"]
    expected = words if expected is None else expected
    ending = " -- m.onnx" if "--" in words.split() else ""
    command = next_command(words.split(), parser, changes.split(), without)
    assert command == f"quark-onnx {expected} {changes}{ending}"


def test_words_are_quoted() -> None:
    parser = build_parser()[1]["quantize"]
    words = ["quantize", "my model.onnx", "-o", "it's.onnx", "--exclude", "/head/*"]
    command = next_command(words, parser, ["--per-channel"])
    assert shlex.split(command) == ["quark-onnx", *words, "--per-channel"]


@pytest.mark.skipif(os.name == "nt", reason="cmd.exe has no such quotes")
@pytest.mark.parametrize("word", ["ж\nж", "it's\ttwo", "\\n \x1b[31m", "\u202e$HOME"])
def test_a_shell_reads_control_characters(word: str) -> None:
    """The line shows none, and pasted, it gives the same words."""
    line = shell_line(["printf", "%s", word])
    assert line.isprintable()
    read = subprocess.run(["bash", "-c", line], capture_output=True, check=True)
    assert read.stdout.decode() == word


@pytest.fixture
def outlier(folder: Path) -> Path:
    """The folder, with data of which a sample takes the whole range."""
    np.savez(folder / "data" / "1.npz", image=3000 * normal(2, 3, 8, 8, seed=3))
    (folder / "model.onnx").rename(folder / "my model.onnx")
    return folder


POOR = (
    *("quantize", "my model.onnx", "-o", "out put.onnx", "--data", "data"),
    *("--calibrator", "minmax", "--per-tensor", "--no-time"),
)


def test_the_commands_of_a_poor_verdict_run(cli: Any, outlier: Path) -> None:
    """Each has the options of the run and the changed one, and writes a model."""
    finished = cli(*POOR, "--json", "r.json", "--advice", "list")
    assert finished.code == 0, finished.err
    steps = json.loads(Path("r.json").read_text("utf-8"))["verdict"]["next_steps"]
    printed = [
        line.strip() for line in finished.out.splitlines() if "quark-onnx " in line
    ]
    assert printed == [step["command"] for step in steps] and len(printed) == 3
    for step in steps:
        assert step["gain"] is None
        text = NextStep(**step).text
        assert f"try       {text}\n          {step['command']}" in finished.out
        program, *words = shlex.split(step["command"])
        assert program == "quark-onnx" and step["options"] in step["command"]
        assert words[:2] == ["quantize", "my model.onnx"]
        Path("out put.onnx").unlink()
        again = cli(*words)
        assert again.code == 0, again.err
        assert onnx.load("out put.onnx").graph.node
    assert steps[0]["command"].endswith("--calibrator best")
    assert "--per-channel" in steps[1]["command"]
    assert "--per-tensor" not in steps[1]["command"]
    assert not any("minmax" in step["command"] for step in steps)


def test_an_interrupt_of_the_trials_leaves_the_report(
    cli: Any, outlier: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model is written by then."""

    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    listed = cli(*POOR, "--advice", "list").out.splitlines()
    monkeypatch.setattr("quark_onnx.cli.quantize.advise_report", interrupted)
    finished = cli(*POOR, "--advice", "try")
    assert finished.code == 0
    assert "not tried to the end" in finished.err
    # But for the first line, which tells the seconds.
    lines = finished.out.replace(" --advice try", "").splitlines()
    assert lines[1:] == [line.replace(" --advice list", "") for line in listed[1:]]


@pytest.mark.parametrize(
    "options",
    [
        "--calibrator minmax --per-tensor",
        "--preset S8S8 --optimize cle bias_correction --per-tensor",
        "--recipe classifier --calibrator entropy --per-tensor",
        "--tensor-calibrator image=minmax --per-tensor --exclude head",
        "--config mine.yaml",
        "--ranges ranges.json --per-tensor",
    ],
)
def test_a_command_gives_the_gain_that_is_printed_with_it(
    cli: Any, outlier: Path, options: str
) -> None:
    Path("mine.yaml").write_text(
        "preset: S8S8\nexclude: [head]\ncalibrator: minmax\n", encoding="utf-8"
    )
    if "--ranges" in options:
        assert cli("calibrate", "my model.onnx", "-o", "ranges.json", "--data", "data")
    words = [*POOR[:6], *options.split(), "--no-time", "--json", "r.json"]
    finished = cli(*words, "--advice", "try", "--budget", "60s")
    assert finished.code == 0, finished.err
    steps = json.loads(Path("r.json").read_text("utf-8"))["verdict"]["next_steps"]
    # The advice to give more data has no command.
    tried = [step for step in steps if step["command"]]
    assert tried
    for step in tried:
        assert step["gain"], finished.out
        command = shlex.split(step["command"].replace("--advice try --budget 60s", ""))
        assert cli(*command[1:]).code == 0
        document = json.loads(Path("r.json").read_text("utf-8"))
        assert document["worst_sqnr"] == step["gain"]["sqnr"][1], step["command"]


def test_the_calls_of_a_poor_verdict_run(outlier: Path) -> None:
    """In Python, with the model, the data and the configuration of the run."""
    config = QConfig.of("A8W8").with_(calibrator="minmax", per_channel=False)
    known = {
        "quantize": quantize,
        "QConfig": QConfig,
        "RECIPES": RECIPES,
        "changed": changed,
        "AutoMixedPrecision": AutoMixedPrecision,
        "model": str(outlier / "my model.onnx"),
        "data": str(outlier / "data"),
        "config": config,
    }
    result = quantize(known["model"], known["data"], config)
    assert result.report.verdict is not None
    steps = result.report.verdict.next_steps
    assert len(steps) == 3
    for step in steps:
        assert f"try       {step.call}: {step.effect}" in str(result.report)
        again = eval(step.call, dict(known))
        assert again.report.config != result.report.config


@pytest.mark.parametrize("command", ["quantize", "npu deploy"])
def test_the_commands_of_a_missed_gate_run(cli: Any, command: str) -> None:
    words = [*command.split(), "model.onnx", "-o", "out.onnx", "--data", "data"]
    finished = cli(*words, "--min-sqnr", "70", "--json", "r.json")
    assert finished.code == 1 and "the minimum is 70 dB" in finished.error
    error = json.loads(Path("r.json").read_text("utf-8"))["error"]
    assert "try" not in error["message"].lower()
    commands = [step["command"] for step in error["next_steps"] if step["command"]]
    lines = [
        line.strip() for line in finished.err.splitlines() if "  quark-onnx " in line
    ]
    assert lines == commands and commands
    for line in lines:
        _, *again = shlex.split(line)
        assert cli(*again).code in (0, 1)


def test_after_a_missed_gate_of_compare_the_analysis_runs(cli: Any) -> None:
    assert cli("quantize", "model.onnx", "-o", "q.onnx", "--data", "data").code == 0
    finished = cli(
        *("compare", "model.onnx", "q.onnx", "--data", "data", "--limit", "3"),
        *("--min-sqnr", "200"),
    )
    (line,) = [line for line in finished.err.splitlines() if "  quark-onnx " in line]
    assert line.strip() == "quark-onnx analyze model.onnx q.onnx --data data --limit 3"
    assert cli(*shlex.split(line)[1:]).code == 0


@pytest.mark.parametrize("metadata", [True, False])
def test_the_commands_after_compare_run(
    cli: Any, outlier: Path, metadata: bool
) -> None:
    """They quantize in the preset of the model, also without the metadata of this package."""
    assert cli(*POOR).code == 0
    if not metadata:
        model = onnx.load("out put.onnx")
        del model.metadata_props[:]
        onnx.save(model, "out put.onnx")
    finished = cli("compare", "my model.onnx", "out put.onnx", "--data", "data")
    assert finished.code == 0 and "verdict   good" not in finished.out
    lines = [
        line.strip() for line in finished.out.splitlines() if "  quark-onnx " in line
    ]
    *quantize, analyze = [shlex.split(line)[1:] for line in lines]
    assert analyze[0] == "analyze" and 1 <= len(quantize) <= 3
    start = ["quantize", "my model.onnx", "-o", "out put_next.onnx", "--data", "data"]
    for words in quantize:
        assert words[:6] == start
        assert cli(*words, "--no-time").code == 0
    assert ("--calibrator" in quantize[0]) is metadata
    assert cli(*analyze).code == 0


def test_compare_of_a_good_model_proposes_nothing(cli: Any) -> None:
    assert cli("quantize", "model.onnx", "-o", "q.onnx", "--data", "data").code == 0
    finished = cli("compare", "model.onnx", "q.onnx", "--data", "data")
    assert "verdict   good" in finished.out and "quark-onnx " not in finished.out


def test_after_a_missed_accuracy_there_is_more_time(cli: Any) -> None:
    words = ("quantize", "model.onnx", "-o", "q.onnx", "--data", "data")
    finished = cli(*words, "--accuracy", "500dB", "--budget", "1/1000000")
    lines = [
        line.strip() for line in finished.err.splitlines() if "  quark-onnx " in line
    ]
    first, *others, last = [shlex.split(line)[1:] for line in lines]
    assert first == [*words, "--accuracy", "500dB", "--budget", "1s"]
    assert last == ["analyze", "model.onnx", "q.onnx", "--data", "data"]
    # Between them are changes of the model that was written.
    start = ["quantize", "model.onnx", "-o", "q_next.onnx", "--data", "data"]
    assert others and all(other[:6] == start for other in others)
    assert cli(*last).code == 0
    assert "--recipe" not in finished.out


def test_a_deployment_that_misses_its_gate_names_wrong_preprocessing(
    tmp_path: Path,
) -> None:
    """Also where the gate runs one sample, and the check needs more."""
    data = [{"x": (each / 255).astype(np.float32)} for each in pictures(24)]
    model = trained(SCALINGS[1])
    with pytest.raises(Exception, match="the minimum is 200 dB") as caught:
        deploy(model, data, tmp_path / "b", shapes={"x": (1, 3, 24, 24)}, min_sqnr=200)
    assert "Likely cause: preprocessing looks wrong (scaling): the first" in str(
        caught.value
    )
    assert "Try --mean 0.485 0.456 0.406 --std 0.229 0.224 0.225 or quantize(" in str(
        caught.value
    )
    assert not (tmp_path / "b").exists()


@pytest.mark.images
@pytest.mark.parametrize("command", ["quantize", "compare", "npu deploy"])
def test_the_command_with_the_right_preprocessing_runs(cli: Any, command: str) -> None:
    pillow = pytest.importorskip("PIL.Image")
    onnx.save(trained(SCALINGS[3]), "net.onnx")
    Path("jpegs").mkdir()
    for place, image in enumerate(pictures(24)):
        pixels = image[0].transpose(1, 2, 0).round().astype(np.uint8)
        pillow.fromarray(pixels).save(f"jpegs/{place:02}.png")
    data = ("--data", "jpegs", "--image-size", "24", "--std", "2", "2", "2")
    words = [*command.split(), "net.onnx"]
    if command == "compare":
        assert cli("quantize", "net.onnx", "-o", "q.onnx", *data).code == 0
        words += ["q.onnx", *data]
    else:
        words += ["-o", "out.onnx", *data]
    if command == "npu deploy":
        words += ["--min-sqnr", "70", "--shape", "x=1,3,24,24"]
    finished = cli(*words)
    text = finished.out + finished.err
    assert "preprocessing looks wrong (scaling)" in text
    lines = [each.strip() for each in text.splitlines()]
    line = next(each for each in lines if each.startswith(f"quark-onnx {command} "))
    assert "--std" not in line and line.endswith(" --scale 1")
    again = cli(*shlex.split(line)[1:])
    assert "preprocessing looks wrong" not in again.out + again.err
    assert again.code in (0, 1)
