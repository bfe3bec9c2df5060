"""Report: what a run says of itself, as text and as plain values."""

from __future__ import annotations

import json
import math
from dataclasses import replace

from quark_onnx import quantize
from quark_onnx.graph import Graph
from quark_onnx.planning.make_plan import make_plan
from quark_onnx.report import OutputError, Report, summarize
from tests.models import (
    detector_head,
    integer_concat,
    residual,
    samples,
    tiny_weight_big_bias,
)
from tests.settings import CHANNEL, TENSOR

REPORT = Report(
    config="activation: uint8",
    samples=96,
    held_out=4,
    bytes_before=4000,
    bytes_after=1000,
    operators={"Conv": (2, 3), "TopK": (0, 1)},
    kept_nodes={"top": "it selects", "head": "excluded", "tail": "excluded"},
    kept_tensors={"x": "it was zero throughout"},
    kept_types={"top": "TopK", "head": "Gemm", "tail": "Conv"},
    notes=["fold_batch_norm: 2"],
    outputs=[
        OutputError("y", 31.256, 0.9995, 0.125, None),
        OutputError("i", None, None, None, 0.75),
        OutputError("same", math.inf, 1.0, 0.0, None),
        OutputError("r", None, None, None, 0.0, random=True),
    ],
)

TEXT = """\
size      4,000 -> 1,000 bytes (4.00x smaller)
quantized 2 of 4 nodes, calibrated on 96 samples
error     on 4 held-out samples:
  output  SQNR, dB  cosine    largest error
  y       31.26     0.999500  0.125
  i                                          75 % of the values agree
  same    inf       1.000000  0
  r                                          random: another value each time the float model runs
float     2 nodes (1 Gemm, 1 Conv): excluded
          1 node (TopK): it selects
kept      x: it was zero throughout
notes     fold_batch_norm: 2
verdict   unknown: left out"""


def test_text() -> None:
    assert str(REPORT) == TEXT


def test_tensors_of_one_reason_share_a_line() -> None:
    kept = dict.fromkeys("abcde", "decoding of coordinates") | {"f": "zero"}
    text = str(replace(REPORT, kept_tensors=kept))
    assert "kept      a, b, c and 2 more: decoding of coordinates\n" in text
    assert "          f: zero\n" in text


def test_long_lists_are_cut() -> None:
    text = str(Report("", 1, 0, 10, 20, {}, {}, {}, [f"note {i}" for i in range(20)]))
    assert text.splitlines()[0] == "size      10 -> 20 bytes"
    assert text.splitlines()[-1] == "verdict   unknown: no sample was run"
    assert text.splitlines()[-2].strip().startswith("and 8 more; the page")
    assert "nothing in this model could be quantized" in text


def test_dictionary() -> None:
    found = REPORT.to_dict()
    assert json.loads(json.dumps(found, allow_nan=False)) == found, (
        "plain values that JSON knows"
    )
    assert {key: type(value).__name__ for key, value in found.items()} == {
        "schema": "int",
        "quantized_nodes": "int",
        "config": "str",
        "samples": "int",
        "held_out": "int",
        "bytes_before": "int",
        "bytes_after": "int",
        "operators": "dict",
        "kept_nodes": "dict",
        "kept_tensors": "dict",
        "notes": "list",
        "outputs": "list",
        "layers": "list",
        "verdict": "NoneType",
        "kept_types": "dict",
        "warnings": "list",
        "clipping": "NoneType",
        "scores": "list",
        "labelled": "int",
    }
    assert found["outputs"][2]["sqnr"] == "inf" and found["operators"]["Conv"] == [2, 3]


def test_the_worst_output_counts() -> None:
    assert REPORT.worst_sqnr == 31.256
    assert Report("", 1, 0, 1, 1, {}, {}, {}).worst_sqnr == math.inf


def test_a_real_run() -> None:
    report = quantize(residual(), samples(residual(), 40), TENSOR).report
    assert (report.samples, report.held_out, report.quantized) == (36, 4, 9)
    assert report.operators == {
        "Add": (1, 1), "Conv": (2, 2), "Flatten": (1, 1), "Gemm": (1, 1),
        "GlobalAveragePool": (1, 1), "MaxPool": (1, 1), "Relu": (2, 2),
    }  # fmt: skip
    assert (
        [o.name for o in report.outputs] == ["y"]
        and not report.kept_nodes
        and not report.kept_tensors
    )


def test_whatever_stays_float_has_a_reason() -> None:
    model = detector_head()
    report = quantize(model, samples(model), TENSOR).report
    assert set(report.kept_nodes) == {"split", "decode", "sigmoid", "join", "reshape"}
    assert all(report.kept_nodes.values()) and all(report.kept_tensors.values())
    kept = summarize(make_plan(Graph.of(integer_concat()), TENSOR))
    assert kept[0] == {"Concat": (0, 1), "MatMul": (1, 1)}


def test_raised_scales_are_counted() -> None:
    model = tiny_weight_big_bias()
    for config, scales in ((TENSOR, "1 channel"), (CHANNEL, "2 channels")):
        report = quantize(model, samples(model), config).report
        assert f"scale of {scales} of 'w' raised to hold its bias" in report.notes
        assert report.worst_sqnr > 50


def test_without_data() -> None:
    """One random sample stands for the data, and the report says so."""
    text = str(
        Report(
            "",
            0,
            0,
            100,
            50,
            {"MatMul": (1, 1)},
            {},
            {},
            outputs=[OutputError("y", 30.0, 0.99, 0.1, None)],
        )
    )
    assert "quantized 1 of 1 node\n" in text and "calibrated" not in text
    assert "error     on one random sample, as there is no data" in text
