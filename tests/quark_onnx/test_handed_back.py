"""A model of which nothing is quantized comes back byte for byte, and the report claims nothing
else.

More generally: a figure or sentence of a report is never truer-sounding than the numbers behind it.
A ratio, a percentage or a level in dB that rounding would turn into "smaller", "all", "none" or
"reached" is not written so.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import ModelProto

from quark_onnx import QConfig, convert, quantize
from quark_onnx.cli.dispatch import main
from quark_onnx.report import Report, decibels, percent, size_change
from tests.cases import loop_over
from tests.models import (
    branches,
    conv_relu,
    normal,
    old_ir,
    own_domain,
    parse,
    residual,
    run,
    samples,
    weight,
)

NOTE = "nothing was quantized: the result is the float model"


def half() -> ModelProto:
    return parse(
        "g (float16[N,4] x) => (float16[N,3] y) { h = MatMul (x, w) y = Relu (h) }",
        w=weight(4, 3).astype(np.float16),
    )


def with_batch_norm() -> ModelProto:
    """Preparing this model rewrites it, which the report must not claim of the result."""
    return parse(
        """g (float[N,3,8,8] x) => (float[N,4,8,8] y) {
            h = Conv <pads = [1,1,1,1]> (x, w) y = BatchNormalization (h, s, b, b, s) }""",
        w=weight(4, 3, 3, 3),
        s=np.ones(4, np.float32),
        b=np.zeros(4, np.float32),
    )


def unsorted_entries() -> ModelProto:
    """Fields in another order than protobuf writes them, so that only a copy of the file has the
    same bytes.
    """
    model = conv_relu()
    graph = ModelProto(graph=model.graph)
    model.ClearField("graph")
    reordered = ModelProto()
    reordered.ParseFromString(graph.SerializeToString() + model.SerializeToString())
    return reordered


NOTHING = QConfig(exclude="*")
CASES: dict[str, tuple[Callable[[], ModelProto], QConfig]] = {
    "excluded": (residual, NOTHING),
    "no formats": (residual, QConfig(activation=None, weight=None)),
    "no data needed": (residual, QConfig.of("W8").with_(exclude="*")),
    "IR version 3": (old_ir, NOTHING),
    "bodies": (branches, NOTHING),
    "another domain": (own_domain, NOTHING),
    "float16": (half, NOTHING),
    "rewritten before": (with_batch_norm, NOTHING),
    "order of fields": (unsorted_entries, NOTHING),
    "integers": (
        lambda: parse("g (int64[3] x) => (int64[3] y) { y = Add (x, x) }"),
        QConfig.of("A8W8"),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_the_same_bytes(name: str, tmp_path: Path) -> None:
    """From a file the file's own bytes, from a model its serialization.

    The model that is returned is equal to it.
    """
    make, config = CASES[name]
    model = make()
    data = samples(model) if config.measures else None
    source, target = tmp_path / "m.onnx", tmp_path / "out.onnx"
    for content in (
        model.SerializeToString(),
        model.SerializeToString() + b"\x32\x01!",
    ):  # a text twice, the last counts
        source.write_bytes(content)
        result = quantize(source, data, config, target)
        assert target.read_bytes() == content
        assert result.model == onnx.load(source)
    result = quantize(model, data, config, target)
    assert (
        target.read_bytes()
        == model.SerializeToString()
        == result.model.SerializeToString()
    )
    assert result.model is not model
    assert result.report.notes == [NOTE]
    assert result.report.bytes_before == result.report.bytes_after
    text = str(result.report)
    assert "nothing in this model could be quantized" in text
    assert "smaller" not in text and "returned as it was" not in text


@pytest.mark.parametrize(
    ("width", "where"),
    [(4, "in the file itself"), (256, "in 'out.onnx.data'")],
    ids=["small", "large"],
)
def test_weights_in_another_file_are_written_anew_and_the_report_says_so(
    width: int, where: str, tmp_path: Path
) -> None:
    model = parse(
        f"g (float[N,{width}] x) => (float[N,8] y) {{ y = MatMul (x, w) }}",
        w=weight(width, 8),
    )
    (tmp_path / "in").mkdir()
    source, target = tmp_path / "in" / "m.onnx", tmp_path / "out.onnx"
    stored = ModelProto()
    stored.CopyFrom(model)  # which saving takes the values out of
    onnx.save(
        stored, source, save_as_external_data=True, location="w.bin", size_threshold=0
    )
    result = quantize(source, samples(model), NOTHING, target)
    assert result.report.notes == [f"{NOTE}; its weights are {where}"]
    feeds = samples(model)[0]
    for written in (onnx.load(target), result.model):
        np.testing.assert_array_equal(run(written, feeds)[0], run(model, feeds)[0])


def test_a_model_that_was_prepared_for_a_target_is_said_to_be() -> None:
    model = parse(
        "g (float[N,3,9,9] x) => (float[N,3,4,4] y) { y = AveragePool"
        " <kernel_shape=[3,3], strides=[2,2]> (x) }"
    )
    result = quantize(
        model, [{"x": normal(1, 3, 9, 9)}], QConfig.of("XINT8").with_(target="stx")
    )
    assert result.report.notes[-1] == f"{NOTE}, prepared for stx"
    assert result.model != model


def test_a_conversion_that_finds_nothing_writes_the_same_bytes(tmp_path: Path) -> None:
    source, target = tmp_path / "m.onnx", tmp_path / "out.onnx"
    content = conv_relu().SerializeToString() + b"\x32\x01!"
    source.write_bytes(content)
    done = convert(source, "qoperator-to-qdq", target)
    assert not done.steps[0].notes
    assert target.read_bytes() == content


def test_the_command_line_says_no_more(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, target = tmp_path / "m.onnx", tmp_path / "out.onnx"
    source.write_bytes(residual().SerializeToString())
    assert (
        main(
            [
                "quantize",
                str(source),
                "-o",
                str(target),
                "--random-data",
                "4",
                "--exclude",
                "*",
                "--verbose",
            ]
        )
        == 0
    )
    said = capsys.readouterr().out
    assert NOTE in said and "smaller" not in said
    assert "0 tensors" not in said and "\n0 " not in said
    assert main(["compare", str(source), str(target), "--random-data", "2"]) == 0
    assert "smaller" not in capsys.readouterr().out
    assert (
        main(["analyze", str(source), str(target), "--random-data", "2"]) == 2
    )  # neither has a number format


@pytest.mark.parametrize(
    ("before", "after"),
    [(1000, 1000), (1001, 1000), (1004, 1000), (1000, 2000), (0, 0), (1, 0)],
)
def test_no_ratio_without_a_visible_difference(before: int, after: int) -> None:
    assert "smaller" not in size_change(before, after)
    text = str(Report("", 1, 0, before, after, {}, {}, {})).splitlines()[0]
    assert text == f"size      {before:,} -> {after:,} bytes"


@loop_over("digits", [0, 1, 2])
@loop_over("share", [0.0, -0.0, 1e-9, 0.004, 0.005, 0.5, 0.994, 0.99995, 1 - 1e-9, 1.0])
def test_a_percentage_is_all_or_nothing_only_if_the_share_is(
    share: float, digits: int
) -> None:
    text = percent(share, digits)
    assert (float(text.lstrip("<>")) == 100 and text[0] != "<") == (share == 1)
    assert (text.lstrip("<>") == text and float(text) == 0) == (share == 0)
    assert not text.startswith("-")
    assert abs(float(text.lstrip("<>")) / 100 - share) <= 10.0 ** -(digits + 2)


@pytest.mark.parametrize(
    ("value", "bound"),
    [(9.9999, 10.0), (10.0 - 1e-12, 10.0), (29.994, 29.995), (-0.001, 0.0)],
)
def test_a_level_below_a_bound_reads_as_below(value: float, bound: float) -> None:
    assert float(decibels(value, below=bound)) < bound


def test_no_negative_zero() -> None:
    assert decibels(-0.001) == decibels(0.0) == "0.00"
