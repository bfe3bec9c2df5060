"""Operators that one shared scale would degrade stay float.

The inputs of layers are quantized all the same.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from quark_onnx import QConfig
from quark_onnx.graph import Graph
from quark_onnx.measuring.calibrate import calibrate
from quark_onnx.plan import Plan, Use
from quark_onnx.planning.make_plan import make_plan
from quark_onnx.scales.keep_sensitive_float import keep_sensitive_ops_float
from tests.models import (
    Array,
    Feeds,
    detector_head,
    kinds,
    parse,
    samples,
    unlike_concat,
    weight,
)
from tests.settings import TENSOR, WIDE


def guarded(
    model: Any, config: QConfig = TENSOR, data: list[Feeds] | None = None
) -> tuple[Plan, list[str]]:
    graph = Graph.of(model)
    plan, ranges, _ = calibrate(graph, make_plan(graph, config), data or samples(model))
    return keep_sensitive_ops_float(graph, plan, ranges)


def test_the_decoding_of_a_detector_stays_float() -> None:
    plan, notes = guarded(detector_head())
    assert notes == [
        "join (Concat): it joins 'p', scores between 0 and 1, with other values; "
        "it and the decoding around it stay float"
    ]
    why = "part of the decoding around join (Concat)"
    assert {
        name: plan.kept[name]
        for name in ("split", "decode", "sigmoid", "join", "reshape")
    } == dict.fromkeys(("split", "decode", "sigmoid", "join", "reshape"), why)
    assert "conv" not in plan.kept and plan.quantized("x") and plan.quantized("w")
    assert not plan.quantized("c") and not plan.quantized("y")


def test_a_join_that_a_layer_reads_is_quantized_with_a_note() -> None:
    plan, notes = guarded(unlike_concat())
    assert notes == [
        "join (Concat): it joins 's', scores between 0 and 1, with other values; "
        "quantized all the same, a weighted operator reads it"
    ]
    assert plan.quantized("c") and not plan.kept


JOIN = (
    "g (float[N,4] x, float[N,4] z) => (float[N,8] y) { [join] y = Concat <axis = 1>"
    " (x, z) }"
)


def joined(factor: float) -> list[str]:
    base: Array = np.linspace(-1, 1, 4, dtype=np.float32)[None]
    return guarded(parse(JOIN), data=[{"x": base, "z": factor * base}])[1]


def test_ranges_may_differ_by_eight() -> None:
    assert joined(7.9) == []
    assert joined(8.1) == [
        "join (Concat): it joins 'z' (up to 8.1) with 'x' (up to 1); it and the"
        " decoding around it stay float"
    ]
    assert joined(1 / 8.1) != []


def test_whatever_selects_detections_stays_float() -> None:
    plan, notes = guarded(
        parse(
            """g (float[N,4] x) => (float[N,2] v, int64[N,2] i, float[N,4] z) {
                [fc] h = MatMul (x, w)
                [scale] s = Mul (h, h)
                [top] v, i = TopK (s, two)
                [other] z = Add (x, x)
            }""",
            w=weight(4, 4),
            two=np.int64([2]),
        )
    )
    assert notes == [
        "top (TopK): it selects detections; it and the decoding around it stay float"
    ]
    assert (
        plan.kept["scale"]
        == plan.kept["top"]
        == "part of the decoding around top (TopK)"
    )
    assert "other" not in plan.kept and "fc" not in plan.kept


SCORES = (
    "g (float[N,4] x, float[N,4] m) => (float[N,4] y) { [masked] s = Add (x, m)"
    " [softmax] y = Softmax (s) }"
)


def test_inputs_that_only_the_decoding_reads_stay_float() -> None:
    """The scale of an image multiplies boxes: rounded to 8 bits, it moves them by pixels."""
    head = parse(
        """g (float[1,8,4] x, float[1,8,1] size) => (float[1,8,4] y, int64[1,8,1] best) {
            [boxes] b = MatMul (x, w)
            [scaled] y = Mul (b, size)
            [choice] best = ArgMax <axis = 2> (y)
        }""",
        w=weight(4, 4),
    )
    plan, _ = guarded(head)
    assert plan.quantized("x") and plan.quantized("w")
    readers = [None, *plan.graph.nodes]
    assert not any(plan.quantized("size", reader) for reader in readers)


def test_attention_scores_beside_a_mask_stay_float() -> None:
    mask = np.float32([[0, 0, 0, -10000]])
    model, data = parse(SCORES), [{"x": np.float32([[1, 2, 3, 4]]), "m": mask}]
    plan, notes = guarded(model, data=data)
    assert (
        not plan.quantized("s")
        and not plan.quantized("m")
        and plan.quantized("x")
        and plan.quantized("y")
    )
    assert notes[0] == "softmax (Softmax): 's' reaches from -1e+04 to 3; it stays float"
    plan, notes = guarded(model, WIDE, data)
    assert notes == [] and plan.quantized("s"), "16 bits tell them apart"
    plan, notes = guarded(model, data=[{**data[0], "m": mask / 1000}])
    assert notes == [] and plan.quantized("s")


def test_all_of_it_only_when_asked() -> None:
    from quark_onnx import quantize

    model = detector_head()
    safe, unsafe = (
        quantize(model, samples(model), TENSOR.with_(safe=value))
        for value in (True, False)
    )
    assert safe.report.quantized == 1 and unsafe.report.quantized == 6
    assert kinds(unsafe.model).count("QuantizeLinear") > kinds(safe.model).count(
        "QuantizeLinear"
    )
    assert not any("decoding" in note for note in unsafe.report.notes)
    assert Use("y") in unsafe.plan.entries
