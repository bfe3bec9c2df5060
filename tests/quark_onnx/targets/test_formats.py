"""Formats of configurations, and what is said where a target does not take one."""

from __future__ import annotations

import logging
import re

import numpy as np
import pytest

from quark_onnx import QConfig, quantize
from quark_onnx.common.errors import ConfigError
from quark_onnx.common.registry import PRESETS, TARGETS
from quark_onnx.targets import format_of, refusal, unfit
from quark_onnx.targets.target import npu_names
from tests.models import parse, weight


@pytest.mark.parametrize(
    ("preset", "name"),
    [
        ("VINT8", "XINT8"),
        ("U8U8", "A8W8"),
        ("S16S8", "A16W8"),
        ("A8W4", "A8W4"),
        ("INT4", "W4"),
        ("BFP16", "BFP16"),
    ],
)
def test_formats_have_the_names_of_targets(preset: str, name: str) -> None:
    assert format_of(PRESETS[preset]) == name


def test_every_preset_is_taken_or_refused_in_words() -> None:
    for target in map(TARGETS.__getitem__, npu_names()):
        for name in PRESETS:
            why = refusal(target, PRESETS[name])
            assert bool(why) == (format_of(PRESETS[name]) not in target.presets) and (
                not why or target.name in why
            )


@pytest.mark.parametrize(
    ("preset", "target", "told"),
    [
        ("A8W8", "phx", "config is A8W8, but phx (Phoenix (XDNA1)) takes XINT8"),
        ("BF16", "stx", "stx refuses tensors of the type bfloat16"),
        ("XINT8", "stx", ""),
    ],
)
def test_what_a_target_does_not_take_is_refused(
    preset: str, target: str, told: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Unless sizes stay open: such a model is not final, and is written with a warning."""
    model = parse(
        "g (float[1,4] x) => (float[1,4] y) { y = MatMul (x, w) }", w=weight(4, 4)
    )
    data = [{"x": np.random.default_rng(0).normal(size=(1, 4)).astype(np.float32)}]
    config = QConfig.of(preset).with_(target=target)
    why = unfit(TARGETS[target], config)
    assert why.startswith(told) and bool(why) == bool(told)
    if why:
        with pytest.raises(ConfigError, match=re.escape(why)):
            quantize(model, data, config)
    with caplog.at_level(logging.WARNING):
        report = quantize(model, data, config.with_(fix_sizes=False)).report
    assert [record.getMessage() for record in caplog.records] == [why] * bool(why)
    assert (why in report.notes) == bool(why)


def test_a_tensor_with_a_type_that_a_target_does_not_take() -> None:
    config = QConfig.of(
        {"preset": "XINT8", "tensors": [{"tensors": ["a", "b"], "dtype": "int16"}]}
    )
    assert "not int16, which tensors a, b have" in unfit(TARGETS["phx"], config)


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("BFP16", "--preset BF16"),
        ("llm", "--layout oga"),
        ("X1", "phx and hpt"),
        ("x2", "stx and krk"),
    ],
)
def test_what_is_no_target_is_explained(name: str, told: str) -> None:
    with pytest.raises(ConfigError, match=f"unknown target '{name}'; .*{told}"):
        QConfig.of("XINT8").with_(target=name)
