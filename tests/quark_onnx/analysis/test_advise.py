"""Advice is tried before it is given, and what is tried is what the command does."""

from __future__ import annotations

import shlex
from argparse import Namespace
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from onnx import ModelProto
from onnx.numpy_helper import to_array

from quark_onnx import QConfig, TensorOverride, advise, analyze, quantize
from quark_onnx.analysis.advise import Performance
from quark_onnx.cli import quantize as command
from quark_onnx.cli.parsing import Parser
from quark_onnx.cli.settings import config_of
from quark_onnx.common.errors import ConfigError
from quark_onnx.common.registry import RECIPES
from quark_onnx.config import to_dict
from quark_onnx.measuring.held_out import is_held_out
from quark_onnx.report.verdict import (
    Gain,
    MeasuredValue,
    NextStep,
    Verdict,
    changed,
    is_possible,
    next_steps,
)
from quark_onnx.trials.judge import judge_models
from quark_onnx.writing.provenance import described
from quark_onnx.writing.run_settings import config_of_model, settings_of_config
from tests.models import normal, parse, weight

Sample = dict[str, np.ndarray]

MODEL = parse(
    """g (float[N, 6] x) => (float[N, 4] y) {
        h = MatMul (x, a)
        r = Relu (h)
        y = MatMul (r, b)
    }""",
    a=weight(6, 8),
    b=weight(8, 4, seed=1),
)


def samples(count: int = 64, outlier: float = 40.0) -> list[Sample]:
    """Samples of which a few values are far from the others."""
    rows = [{"x": normal(1, 6, seed=seed)} for seed in range(count)]
    rows[3]["x"][0, 0] = outlier
    return rows


@pytest.mark.parametrize(
    "options",
    [
        "--preset A16W8",
        "--preset W8",
        "--calibrator entropy",
        "--per-channel",
        "--optimize cle bias_correction",
        "--auto-exclude 20",
        "--exclude one 'another node'",
        "--tensor-calibrator x=minmax 'a=b=percentile:percentile=99.9'",
        *(f"--recipe {name}" for name in RECIPES),
    ],
)
def test_a_trial_has_the_configuration_of_the_command(options: str) -> None:
    base = "S8S8"
    parser = Parser("quark-onnx quantize", "")
    command.add_arguments(parser)
    words = ["model.onnx", "-o", "out.onnx", *shlex.split(options)]
    if not options.startswith(("--preset", "--recipe")):
        words += ["--preset", base]
    found: Namespace = parser.parse_args(words)
    recipe = RECIPES[found.recipe].config if found.recipe else None
    assert changed(QConfig.of(base), options) == config_of(found, recipe)


def test_a_change_that_is_none_or_that_the_target_refuses_is_no_advice() -> None:
    config = QConfig.of("XINT8").with_(target="phx")
    for options in ("--preset A16W8", "--per-channel", "--auto-exclude 20"):
        possible = is_possible(config, options)
        assert possible == (options == "--auto-exclude 20"), options
    assert not is_possible(config, "--calibrator minmse")
    assert not is_possible(config, "--color swapped")
    for step in next_steps(MODEL, settings_of_config(config, 100), "signal", most=99):
        assert is_possible(config, step.options), step.options
    with pytest.raises(ConfigError, match="--color changes no configuration"):
        changed(config, "--color swapped")


def test_the_gain_is_that_of_the_run_that_the_advice_names() -> None:
    data = samples()
    config = QConfig.of("A8W8").with_(calibrator="minmax")
    result = quantize(MODEL, data, config)
    steps = advise(MODEL, data, result, config, budget=60, timed=False)
    assert steps and steps[0].gain is not None
    gains = [step.gain for step in steps if step.gain is not None]
    for step in steps:
        if step.gain is None:
            continue
        again = quantize(MODEL, data, changed(config, step.options)).report
        assert step.gain.sqnr == (result.report.worst_sqnr, again.worst_sqnr)
        assert step.gain.decibels > 0
    assert [gain.decibels for gain in gains] == sorted(
        (gain.decibels for gain in gains), reverse=True
    )
    assert "dB" in steps[0].text and "not tried" not in steps[0].text


def test_what_was_not_tried_says_so() -> None:
    data = samples()
    config = QConfig.of("A8W8").with_(calibrator="minmax")
    result = quantize(MODEL, data, config)
    steps = advise(MODEL, data, result, config, budget=1e-6, timed=False)
    assert len(steps) == 3
    assert all("not tried" in step.text and step.gain is None for step in steps)


def test_data_that_tells_nothing_gives_no_trial() -> None:
    result = quantize(MODEL, samples(4), "A8W8")
    doubtful = NextStep("--color swapped", "corrects the inputs", "swap the channels")
    assert result.report.verdict is not None
    doubted = replace(
        result.report,
        warnings=["preprocessing looks wrong"],
        verdict=result.report.verdict.doubted("the data look wrong", doubtful),
    )
    steps = advise(
        MODEL, samples(4), replace(result, report=doubted), QConfig.of("A8W8")
    )
    assert steps == (doubtful,)


def _performance(band: str, sqnr: float, share: float) -> Performance:
    figures = (MeasuredValue("agreement", share, ""), MeasuredValue("sqnr", sqnr, ""))
    return Performance(sqnr, Verdict("classifier", band, "", figures, 100, 100, ""))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("after", "helps"),
    [
        (_performance("good", 12.0, 0.96), True),  # another band
        (_performance("poor", 30.0, 0.80), False),
        (_performance("risky", 20.5, 0.90), True),
        (_performance("risky", 20.1, 0.90), False),  # chance
        (_performance("risky", 25.0, 0.87), False),  # decisions are lost
        (_performance("risky", 20.0, 0.93), True),
        (_performance("risky", 19.0, 0.93), False),
    ],
)
def test_help_is_more_than_chance_and_harms_nothing(
    after: Performance, helps: bool
) -> None:
    assert _performance("risky", 20.0, 0.90).is_worse_than(after) == helps


def test_a_gain_as_text() -> None:
    gain = Gain((20.0, 21.1), "agreement 82.0 -> 83.0 %", 1.02, 0.5)
    assert str(gain) == (
        "+1.1 dB (20.0 -> 21.1), agreement 82.0 -> 83.0 %, 1.02 times the runtime"
    )
    assert "slower than the float model (1.84 times)" in str(
        replace(gain, float_runtime=1.84)
    )


def test_analyze_tries_on_samples_that_are_held_out(tmp_path: Path) -> None:
    """The figures before and after are of the same samples, the trial's held-out ones."""
    data = samples(outlier=400.0)
    config = QConfig.of("A8W8").with_(calibrator="minmax")
    model = quantize(MODEL, data, config).model
    assert config_of_model(model) == config
    # The outlier alone would decide the error of all samples.
    del data[3]
    found = analyze(MODEL, model, data, budget=60)
    assert found.verdict is not None and found.verdict.band in ("risky", "poor")
    steps = found.verdict.next_steps
    assert steps and steps[0].gain is not None
    # Those that a run on this data holds out judge, so that the figure is that of the command.
    judges = [sample for index, sample in enumerate(data) if is_held_out(index)]
    before = judge_models(MODEL, model, judges, preprocessing=False).outputs[0]
    assert steps[0].gain.sqnr[0] == before.sqnr
    assert steps[0].gain.samples == len(judges) and "held-out samples" in steps[0].text
    again = quantize(MODEL, data, changed(config, steps[0].options)).report
    assert steps[0].gain.sqnr[1] == again.worst_sqnr
    listed = analyze(MODEL, model, data)
    assert listed.verdict is not None
    assert all(step.gain is None for step in listed.verdict.next_steps)
    _of_another_tool(model)
    untried = analyze(MODEL, model, data, budget=60).verdict
    assert untried is not None and untried.next_steps
    assert all("not tried" in step.text for step in untried.next_steps)


@pytest.mark.parametrize(
    "config",
    [
        QConfig.of("A8W8").with_(per_channel=False, exclude=["h", "a b"]),
        QConfig.of("S8S8").with_(optimizers=["cle"], calibrator="entropy"),
        QConfig.of("XINT8").with_(op_types=["MatMul"], equalize=True),
        QConfig.of("INT4"),
        QConfig.of("DYNAMIC").with_(per_channel=False),
    ],
)
def test_a_model_has_its_configuration_in_its_metadata(config: QConfig) -> None:
    plain = config.with_(exclude=[])
    model = quantize(MODEL, samples(12), plain).model
    assert config_of_model(model) == plain
    known = described(config)
    for key in ("exclude", "op_types"):
        assert shlex.split(known.get(key, "")) == list(getattr(config, key))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("exclude", "'open"),
        ("optimizers", "nosuch:a=1"),
        ("target", "nosuch"),
        ("calibrator", "nosuch"),
        ("preset", "NOSUCH"),
    ],
)
def test_damaged_metadata_is_no_configuration(key: str, value: str) -> None:
    model = quantize(MODEL, samples(12), "A8W8").model
    entry = next(
        (each for each in model.metadata_props if each.key == f"quark_onnx.{key}"),
        None,
    )
    entry = entry or model.metadata_props.add(key=f"quark_onnx.{key}")
    entry.value = value
    assert config_of_model(model) is None


def test_many_names_are_counted_in_the_metadata() -> None:
    names = [f"node {index}" for index in range(1000)]
    known = described(QConfig.of("A8W8").with_(exclude=names))
    assert "exclude" not in known and known["overrides"] == "1000"


def test_overrides_are_not_in_the_metadata() -> None:
    config = changed(QConfig.of("A8W8"), "--tensor-calibrator x=minmax")
    assert config_of_model(quantize(MODEL, samples(12), config).model) is None


def _of_another_tool(model: ModelProto) -> None:
    del model.metadata_props[:]


def test_a_tensor_has_a_calibrator_of_its_own() -> None:
    """The range of one tensor is that of its calibrator, the others keep theirs."""
    data = samples(outlier=400.0)
    config = QConfig.of("A8W8").with_(equalize=False)
    other = changed(config, "--tensor-calibrator x=minmax")
    assert (
        other.tensors[0].calibrator
        == QConfig().with_(calibrator="minmax").activation.calibrator
    )  # type: ignore[union-attr]

    def scales(config: QConfig) -> dict[str, float]:
        model = quantize(MODEL, data, config).model
        constants = {each.name: to_array(each) for each in model.graph.initializer}
        return {
            node.input[0]: float(constants[node.input[1]])
            for node in model.graph.node
            if node.op_type == "QuantizeLinear"
        }

    plain, single = scales(config), scales(other)
    wide = scales(config.with_(calibrator="minmax"))
    assert single["x"] == wide["x"] != plain["x"]
    assert {**single, "x": 0.0} == {**plain, "x": 0.0}
    assert QConfig.of(to_dict(other)) == other


@pytest.mark.parametrize("text", ["x", "x=", "=minmax", "x=nosuch"])
def test_a_calibrator_of_a_tensor_that_is_none(text: str) -> None:
    with pytest.raises(ConfigError, match="leaves nothing to measure"):
        TensorOverride("x", calibrator="minmax", low=0.0, high=1.0)
    with pytest.raises(ConfigError, match="is not of the form TENSOR=CALIBRATOR"):
        changed(QConfig.of("A8W8"), f"--tensor-calibrator {text}")
