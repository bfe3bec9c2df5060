"""Advice is tried before it is printed, and a pasted command gives the printed figure."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from quark_onnx.analysis.advise import TrialSettings
from tests.models import normal, parse, weight

#: Enough time for every trial.
TRIED = ("--advice", "try", "--budget", "300s")


@pytest.fixture(autouse=True)
def outliers(folder: Path) -> None:
    """A model with two convolutions, and 40 samples of which one takes the whole range."""
    model = parse(
        """g (float[N, 3, 8, 8] image) => (float[N, 4, 8, 8] y) {
            [first] a = Conv <pads = [1, 1, 1, 1]> (image, w, bias)
            [clip] b = Relu (a)
            [second] y = Conv <pads = [1, 1, 1, 1]> (b, v)
        }""",
        w=weight(6, 3, 3, 3),
        bias=normal(6),
        v=weight(4, 6, 3, 3),
    )
    onnx.save(model, "conv.onnx")
    save_images(8)


def save_images(factor: float) -> None:
    """Save 40 samples, of which one is greater than the others by a factor."""
    images = normal(40, 3, 8, 8, seed=5)
    images[3] *= factor
    np.savez("images.npz", image=images)


def steps_of(path: str, error: bool = False) -> list[dict[str, Any]]:
    """Return the tried changes in a document, and assert that there is one."""
    document = json.loads(Path(path).read_text("utf-8"))
    place = document["error" if error else "verdict"]
    steps = [step for step in place["next_steps"] if step["gain"]]
    assert steps, place
    for step in steps:  # an SQNR may be "inf"
        step["gain"]["sqnr"] = [float(ratio) for ratio in step["gain"]["sqnr"]]
    return steps


def reached(cli: Any, step: dict[str, Any], code: int = 0) -> float:
    """Paste the command of a change, and return the SQNR of its worst output in dB."""
    words = shlex.split(step["command"])[1:]
    if "--budget" in words:  # of the command that gave the advice
        place = words.index("--budget")
        del words[place : place + 2]
    finished = cli(*words, "--overwrite", "--advice", "none", "--json", "again.json")
    assert finished.code == code, finished.err
    return float(json.loads(Path("again.json").read_text("utf-8"))["worst_sqnr"])


@pytest.mark.parametrize("command", ["compare", "analyze"])
@pytest.mark.parametrize(
    "options", ["--calibrator minmax --per-tensor", "--preset S8S8 --exclude first"]
)
def test_after_a_comparison(cli: Any, command: str, options: str) -> None:
    save_images(60)
    made = ("quantize", "conv.onnx", "-o", "q.onnx", "--data", "images.npz")
    assert cli(*made, *options.split(), "--no-time").code == 0
    words = (command, "conv.onnx", "q.onnx", "--data", "images.npz")
    finished = cli(*words, *TRIED, "--json", "r.json")
    assert finished.code == 0, finished.err
    for step in steps_of("r.json"):
        assert f"-> {step['gain']['sqnr'][1]:.1f})" in finished.out
        assert reached(cli, step) == step["gain"]["sqnr"][1], step["command"]


@pytest.mark.parametrize("target", ["stx", "phx"])
def test_after_a_deployment(cli: Any, target: str) -> None:
    words = ("npu", "deploy", "conv.onnx", "-o", "out", "--data", "images.npz")
    others = ("--target", target, "--calibrator", "minmax", "--min-sqnr", "-99")
    finished = cli(*words, *others, *TRIED, "--json", "r.json")
    assert finished.code == 0, finished.err
    for step in steps_of("r.json"):
        assert step["options"] != "--preset A16W8" or target == "stx"
        assert reached(cli, step) == step["gain"]["sqnr"][1], step["command"]


@pytest.mark.parametrize(
    ("command", "gate"),
    [
        ("quantize conv.onnx -o out.onnx", 26),
        ("npu deploy conv.onnx -o out --target stx", 22),
        ("npu deploy conv.onnx -o out --target phx", 22),
    ],
)
def test_after_a_missed_gate(cli: Any, command: str, gate: float) -> None:
    """The error tells which change meets the gate, and its command writes the model."""
    words = [*command.split(), "--data", "images.npz", "--calibrator", "minmax"]
    words += ["--min-sqnr", str(gate)]
    finished = cli(*words, *TRIED[2:], "--json", "r.json")
    assert finished.code == 1 and "Nothing was written." in finished.err
    assert not finished.out
    assert not Path("out").exists() and not Path("out.onnx").exists()
    steps = steps_of("r.json", error=True)
    for step in steps:
        meets = step["gain"]["sqnr"][1] >= gate
        shown = "meets the gate" if meets else "below the gate"
        assert shown in finished.err
        if meets:
            assert reached(cli, step) == step["gain"]["sqnr"][1], step["command"]
    assert steps[0]["gain"]["sqnr"][1] >= gate
    listed = cli(*words, "--advice", "list")
    assert listed.code == 1 and "meets the gate" not in listed.err
    assert "not tried" in listed.err
    assert "try:" not in cli(*words, "--advice", "none").err


def test_after_a_missed_accuracy(cli: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The nearest model was written: the changes are those of that model.

    The time for them is that of the run, in which a busy machine may end no trial.
    """

    def patient(**settings: Any) -> TrialSettings:
        return TrialSettings(**settings | {"budget": 300.0})

    monkeypatch.setattr("quark_onnx.cli.advice.TrialSettings", patient)
    words = ["quantize", "conv.onnx", "-o", "q.onnx", "--data", "images.npz"]
    gate = ("--accuracy", "38dB", "--budget", "1/1000000")
    finished = cli(*words, *gate, "--no-time", "--json", "r.json")
    assert finished.code == 1 and "the nearest, A8W8" in finished.err
    for step in steps_of("r.json", error=True):
        reached_gate = step["gain"]["sqnr"][1] >= 38
        assert ("meets the gate" in finished.err) >= reached_gate
        assert reached(cli, step) == step["gain"]["sqnr"][1], step["command"]


def test_an_interrupt_of_the_trials_keeps_the_result(
    cli: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    module = sys.modules["quark_onnx.analysis.advise"]
    monkeypatch.setattr(module, "try_changes", interrupted)
    made = ("quantize", "conv.onnx", "-o", "q.onnx", "--data", "images.npz")
    missed = cli(*made, "--calibrator", "minmax", "--min-sqnr", "26")
    assert missed.code == 1 and "not tried to the end" in missed.err
    assert "reaches" in missed.err and "(not tried; " in missed.err
    assert cli(*made, "--calibrator", "minmax", "--advice", "none").code == 0
    compared = cli("compare", "conv.onnx", "q.onnx", *made[4:], "--advice", "try")
    assert compared.code == 0 and "verdict " in compared.out
    assert "not tried to the end" in compared.err
    deploy = ("npu", "deploy", "conv.onnx", "-o", "b", "--min-sqnr", "-99")
    deployed = cli(*deploy, *made[4:], *TRIED)
    assert deployed.code == 0 and Path("b/model.onnx").is_file()


@pytest.mark.parametrize("command", ["compare", "analyze"])
def test_no_advice_and_contradictions(cli: Any, command: str) -> None:
    made = ("quantize", "conv.onnx", "-o", "q.onnx", "--data", "images.npz")
    assert cli(*made, "--calibrator", "minmax").code == 0
    words = (command, "conv.onnx", "q.onnx", "--data", "images.npz")
    assert "quark-onnx " not in cli(*words, "--advice", "none").out
    wrong = cli(*words, "--advice", "list", "--budget", "5s")
    assert wrong.code == 2 and "--budget is for trying advice" in wrong.error
