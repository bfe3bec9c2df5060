"""Where onnxruntime would insert a Q/DQ pair after a data movement and fail, the model has that
pair already.

A tensor that a body captures and that holds moved values of a quantized tensor has a Q/DQ pair of
its own.

Between the last data movement and the body stands a DequantizeLinear, whatever moved the values,
through how many operators, and however many bodies deep they are read. Otherwise onnxruntime 1.32
ends the process while it loads the model. So every model is quantized, loaded and run in a child
process.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import ModelProto
from onnx.reference import ReferenceEvaluator

from quark_onnx import QConfig, convert, quantize
from quark_onnx.common.registry import PRESETS
from quark_onnx.graph import Graph
from quark_onnx.graph.moved import PROPAGATED, pair_moved
from quark_onnx.graph.node import DEQUANTIZE
from tests.models import MODELS, Feeds, parse, run, samples, weight
from tests.settings import ONE_NETWORK, portable

#: Formats of so few bits that a result of one number may be any distance from the float one.
COARSE = frozenset(
    {
        "A8W4",
        "A16W4",
        "INT4",
        "UINT4",
        "FP4E2M1",
        "MX4",
        "MXFP4E2M1",
        "MXFP6E2M3",
        "MXFP6E3M2",
    }
)

CONV = "h = Conv <pads = [1,1,1,1]> (x, w)"
MOVE = "[move] t = Transpose <perm = [0,1,3,2]> (h)"


def choice(first: str, second: str) -> str:
    """An If whose branches capture these tensors."""
    return f"""y = If (c) <
        then_branch = a () => (float p) {{ s = Sigmoid ({first}) p = ReduceSum <keepdims = 0> (s) }},
        else_branch = b () => (float q) {{ u = Tanh ({second}) q = ReduceSum <keepdims = 0> (u) }}>"""  # noqa: E501


NESTED = """y = If (c) <
    then_branch = a () => (float p) { p = If (c) <
        then_branch = aa () => (float pp) { s = Sigmoid (t) pp = ReduceSum <keepdims = 0> (s) },
        else_branch = ab () => (float pq) { v = Cos (t) pq = ReduceSum <keepdims = 0> (v) }> },
    else_branch = b () => (float q) { u = Tanh (x) q = ReduceSum <keepdims = 0> (u) }>"""
INSIDE = f"""y = If (c) <
    then_branch = a () => (float p) {{ {CONV} {MOVE} p = If (c) <
        then_branch = aa () => (float pp) {{ s = Sigmoid (t) pp = ReduceSum <keepdims = 0> (s) }},
        else_branch = ab () => (float pq) {{ v = Cos (t) pq = ReduceSum <keepdims = 0> (v) }}> }},
    else_branch = b () => (float q) {{ u = Tanh (x) q = ReduceSum <keepdims = 0> (u) }}>"""
LOOP = """y = Loop (two, , zero) <body = b (int64 i, bool go, float s) => (bool on, float r) {
    on = Identity (go) k = Conv (t, w2) a = Sigmoid (k) p = ReduceSum <keepdims = 0> (a) r = Add (s, p) }>"""  # noqa: E501
SCAN = """ys = Scan <num_scan_inputs = 1, body = b (float e) => (float o) {
    a = Sigmoid (t) p = ReduceSum <keepdims = 0> (a) o = Add (e, p) }> (ones) y = ReduceSum <keepdims = 0> (ys)"""  # noqa: E501

#: Further outputs of the graph, and its text.
CASES: dict[str, tuple[str, str]] = {
    "captured by a Loop": ("", f"{CONV} {MOVE} {LOOP}"),
    "captured by a Scan": ("", f"{CONV} {MOVE} {SCAN}"),
    "captured two bodies deep": ("", f"{CONV} {MOVE} {NESTED}"),
    "all in a body": ("", INSIDE),
    "moved twice": ("", f"{CONV} {MOVE} t2 = Reshape (t, shape) {choice('t2', 't2')}"),
    "moved twice, captured twice": (
        "",
        f"{CONV} {MOVE} t2 = Reshape (t, shape) {choice('t', 't2')}",
    ),
    "two movements, one source": (
        "",
        f"{CONV} {MOVE} t2 = Reshape (h, shape) {choice('t', 't2')}",
    ),
    "source captured, too": ("", f"{CONV} {MOVE} {choice('t', 'h')}"),
    "an output, too": (", float[1,8,6,6] t", f"{CONV} {MOVE} {choice('t', 't')}"),
    "source an output, too": (
        ", float[1,8,6,6] h",
        f"{CONV} {MOVE} {choice('t', 't')}",
    ),
    "read by a layer, too": (
        ", float[1,8,6,6] o",
        f"{CONV} {MOVE} o = Conv (t, w2) {choice('t', 't')}",
    ),
    "source read by a layer, too": (
        ", float[1,8,6,6] o",
        f"{CONV} {MOVE} o = Conv (h, w2) {choice('t', 't')}",
    ),
    "an input": (
        ", float[1,8,6,6] h",
        f"{CONV} t = Transpose <perm = [0,1,3,2]> (x) {choice('t', 't')}",
    ),
    "after what onnxruntime removes": (
        "",
        f"{CONV} {MOVE} k = Identity (t) d = Dropout (k) {choice('d', 'd')}",
    ),
    "after a sum with zero": (
        "",
        f"{CONV} {MOVE} d = Add (t, zero) {choice('d', 'd')}",
    ),
    "after Relu": ("", f"{CONV} {MOVE} r = Relu (t) {choice('r', 'r')}"),
    "after Softmax": (
        "",
        f"{CONV} s0 = Softmax (h) t = Slice (s0, low, high) {choice('t', 't')}",
    ),
    "after Flatten": (
        "",
        f"{CONV} f = Flatten (h) t = Unsqueeze (f, low) {choice('t', 't')}",
    ),
    "indices of MaxPool": (
        "",
        (
            f"{CONV} t, n = MaxPool <kernel_shape = [2,2]> (h) m = Cast <to = 1> (n)"
            f" {choice('t', 'm')}"
        ),
    ),
}
CONSTANTS: dict[str, Any] = {
    "w": weight(8, 4, 3, 3),
    "w2": weight(8, 8, 1, 1),
    "shape": np.int64([8, -1]),
    "low": np.int64([0]),
    "high": np.int64([1]),
    "two": np.int64(2),
    "zero": np.float32(0),
    "ones": np.float32([1, 1]),
}


def six_operators() -> ModelProto:
    """All operators that onnxruntime propagates through, captured by both branches."""
    lines = {
        "t1": "Transpose <perm = [0,2,3,1]> (h)",
        "t2": "Reshape (h, shape)",
        "t3": "Squeeze (h, low)",
        "t4": "Unsqueeze (h, low)",
        "t5": "Slice (h, low, high)",
        "t6": "MaxPool <kernel_shape = [2,2]> (h)",
    }
    moved = " ".join(f"{name} = {line}" for name, line in lines.items())
    first = " ".join(
        f"s{t} = Sigmoid ({t}) r{t} = ReduceSum <keepdims = 0> (s{t})" for t in lines
    )
    second = " ".join(
        f"u{t} = Tanh ({t}) v{t} = ReduceSum <keepdims = 0> (u{t})" for t in lines
    )
    text = f"""g (float[1,4,6,6] x, bool c) => (float y) {{ {CONV} {moved} y = If (c) <
        then_branch = a () => (float p) {{ {first} p = Sum ({", ".join(f"r{t}" for t in lines)}) }},
        else_branch = b () => (float q) {{ {second} q = Sum ({", ".join(f"v{t}" for t in lines)}) }}> }}"""  # noqa: E501
    constants = {name: CONSTANTS[name] for name in ("w", "shape", "low", "high")}
    return parse(text, opset=16, **constants)


def model_of(name: str) -> ModelProto:
    outputs, text = CASES[name]
    read = text.replace(",", " ").replace("(", " ").replace(")", " ").split()
    constants = {name: value for name, value in CONSTANTS.items() if name in read}
    return parse(
        f"g (float[1,4,6,6] x, bool c) => (float y{outputs}) {{ {text} }}",
        opset=16,
        **constants,
    )


def levels(model: ModelProto, result: ModelProto, data: list[Feeds]) -> list[float]:
    """The SQNR of each output over all samples, in dB, for a session that optimizes as users'
    sessions do.
    """
    noise, signal = 0.0, 0.0
    for feeds in data:
        expected, found = run(model, feeds), run(result, feeds, optimize=True)
        noise = noise + np.array(
            [
                np.square(f - e.astype(np.float64)).sum()
                for e, f in zip(expected, found, strict=True)
            ]
        )
        signal = signal + np.array(
            [np.square(e.astype(np.float64)).sum() for e in expected]
        )
    return list(10 * np.log10(signal / np.maximum(noise, 1e-20)))


def quantized(model: ModelProto, config: QConfig) -> tuple[ModelProto, list[float]]:
    """What the child process computes: the result, and the level of each output."""
    data = [
        {**feeds, "c": np.array(place % 2 == 1)}
        for place, feeds in enumerate(samples(model, 6))
    ]
    result = quantize(model, data if config.measures else None, config).model
    return result, levels(model, result, data)


class Child:
    """A worker process, started again after it has died."""

    def __init__(self) -> None:
        self._pool = self._start()

    @staticmethod
    def _start() -> ProcessPoolExecutor:
        return ProcessPoolExecutor(1, get_context("spawn"))

    def __call__(
        self, model: ModelProto, config: QConfig
    ) -> tuple[ModelProto, list[float]]:
        try:
            return self._pool.submit(quantized, model, config).result(timeout=300)
        except BrokenProcessPool:
            self._pool = self._start()
            pytest.fail("the process died")

    def close(self) -> None:
        self._pool.shutdown()


@pytest.fixture(scope="module")
def child() -> Iterator[Child]:
    made = Child()
    yield made
    made.close()


def moved_into_bodies(graph: onnx.GraphProto) -> list[str]:
    """Captured tensors, at any depth, that a DequantizeLinear reaches through nothing but data
    movements.
    """
    producers = {name: node for node in graph.node for name in node.output}
    found = list[str]()
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.type != onnx.AttributeProto.GRAPH:
                continue
            found += moved_into_bodies(attribute.g)
            for tensor in names_read(attribute.g):
                source, steps = tensor, 0
                while source in producers and producers[source].op_type in PROPAGATED:
                    source, steps = producers[source].input[0], steps + 1
                if (
                    steps
                    and source in producers
                    and producers[source].op_type in DEQUANTIZE
                ):
                    found.append(tensor)
    return found


def names_read(graph: onnx.GraphProto) -> set[str]:
    """Every name that a body reads, at any depth."""
    names = {value.name for value in graph.output}
    for node in graph.node:
        names.update(node.input)
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.GRAPH:
                names |= names_read(attribute.g)
    return names


@pytest.mark.parametrize(
    "preset",
    [
        pytest.param(name, marks=pytest.mark.slow) if name in ONE_NETWORK else name
        for name in PRESETS
    ],
)
def test_the_six_operators_at_every_preset(preset: str, child: Child) -> None:
    """Each of the operators that onnxruntime propagates through.

    See also the models of this name in tests.models.
    """
    result, reached = child(six_operators(), QConfig.of(preset))
    assert not moved_into_bodies(result.graph)
    assert min(reached) > (10 if preset in COARSE else 30)


@pytest.mark.parametrize("name", CASES)
def test_wherever_it_is_moved_and_captured(name: str, child: Child) -> None:
    """Also where the data movement is excluded, where pairs are a vendor's, and where operators
    compute on codes.
    """
    model = model_of(name)
    config = portable(QConfig.of("A8W8"))
    for changed in (
        config,
        config.with_(exclude="move") if MOVE in CASES[name][1] else config,
    ):
        for form in ("qdq", "vendor", "operators"):
            result, reached = child(model, changed.with_(form=form))
            assert not moved_into_bodies(result.graph)
            assert min(reached) > 25


def test_pairs_that_become_standard_ones_in_the_end() -> None:
    """Without functions the pairs of 4-bit floats are ONNX's, which onnxruntime propagates before
    it refuses them.
    """
    model = six_operators()
    config = QConfig.of("FP4E2M1")
    data = samples(model, 4)
    standard = quantize(model, data, config.with_(functions=False)).model
    assert "QuantizeLinear" in {node.op_type for node in standard.graph.node}
    assert not moved_into_bodies(standard.graph)
    [expected] = run(quantize(model, data, config).model, data[0])
    [found] = ReferenceEvaluator(standard).run(None, data[0])
    np.testing.assert_allclose(found, expected, rtol=1e-4)


@pytest.mark.parametrize("opset", [13, 18, 21, 23])
def test_in_every_opset(opset: int, child: Child) -> None:
    model = MODELS["captured_transpose"]()
    if opset > 16:
        model = convert(model, "opset", opset=opset).model
    model.opset_import[0].version = opset
    result, reached = child(model, QConfig.of("A8W8").with_(max_opset=opset))
    assert result.opset_import[0].version == opset and min(reached) > 30


MOVES = [
    "Transpose (c)",
    "Reshape (c, flat)",
    "Slice (c, low, high)",
    "MaxPool <kernel_shape = [2,2]> (c)",
]


@pytest.mark.parametrize("opset", [17, 21, 24])
@pytest.mark.parametrize("tail", ["", "y = Sin (m)"])
@pytest.mark.parametrize("move", MOVES)
@pytest.mark.parametrize("preset", ["S8S8", "XINT8", "A8W8"])
def test_int8_values_that_are_moved_and_read_as_floats(
    preset: str, move: str, tail: str, opset: int
) -> None:
    """onnxruntime 1.32 fails to insert an int8 pair after a data movement from opset 21 on, so the
    model has one.

    The movement is excluded, so that no rule asks for a pair after it.
    """
    body = f"c = Conv (x, w) [move] {'m' if tail else 'y'} = {move} {tail}"
    constants = {
        "w": weight(4, 4, 1, 1),
        "flat": np.int64([1, -1]),
        "low": np.int64([0]),
        "high": np.int64([1]),
    }
    used = {name: value for name, value in constants.items() if name in body}
    model = parse(
        f"g (float[1,4,8,8] x) => (float y) {{ {body} }}", opset=opset, **used
    )
    model.graph.output[0].type.tensor_type.ClearField("shape")
    data = samples(model, 4)
    result = quantize(model, data, QConfig.of(preset).with_(exclude="move")).model
    assert min(levels(model, result, data)) > 25


def test_an_int8_result_without_elements() -> None:
    """An empty tensor stays float, although onnxruntime 1.32 inserts a pair after it."""
    model = parse(
        """g (float[1,4,8] x) => (float[1,4,8] z, float[1,0,8] y) {
            r = Relu (x) y = Slice (r, one, one, one) z = Conv (r, w) }""",
        opset=21,
        one=np.int64([1]),
        w=weight(4, 4, 1),
    )
    data = samples(model, 4)
    result = quantize(model, data, "S8S8").model
    assert run(result, data[0], optimize=True)[1].shape == (1, 0, 8)


@pytest.mark.parametrize("zero_points", [True, False])
def test_the_pair_changes_no_value(zero_points: bool) -> None:
    """Codes that are dequantized, moved and quantized under the same scale are the same codes."""
    text = """g (uint8[1,4,6,6] x, bool c) => (float y) {
        d = DequantizeLinear (x, scale, zero) t = MaxPool <kernel_shape = [2,2]> (d) CHOICE }"""
    constants = {
        "scale": np.float32(0.037),
        "zero": np.uint8(131 if zero_points else 0),
    }
    model = parse(text.replace("CHOICE", choice("t", "t")), opset=16, **constants)
    if not zero_points:
        del model.graph.node[0].input[2]
    graph = Graph.of(model)
    assert pair_moved(graph) == 1
    paired = graph.to_model()
    assert not moved_into_bodies(paired.graph) and moved_into_bodies(model.graph) == [
        "t",
        "t",
    ]
    for c in (True, False):
        codes = (
            np.random.default_rng(int(c))
            .integers(0, 256, (1, 4, 6, 6))
            .astype(np.uint8)
        )
        feeds = {"x": codes, "c": np.array(c)}
        np.testing.assert_array_equal(run(paired, feeds)[0], run(model, feeds)[0])


def test_a_pair_that_is_there_is_used() -> None:
    """Readers share one pair: no tensor is rounded twice."""
    text = f"""g (uint8[1,4,6,6] x, bool c) => (float y, float[1,4,6,6] o) {{
        d = DequantizeLinear (x, scale, zero) t = Transpose (d)
        q = QuantizeLinear (t, scale, zero) e = DequantizeLinear (q, scale, zero) o = Sin (e) {choice("t", "t")} }}"""  # noqa: E501
    graph = Graph.of(parse(text, opset=16, scale=np.float32(0.037), zero=np.uint8(131)))
    assert pair_moved(graph) == 1
    graph.drop_unused()
    assert [node.op_type for node in graph.nodes].count("QuantizeLinear") == 1
    assert [node.op_type for node in graph.nodes].count("DequantizeLinear") == 2


def test_scales_that_are_not_propagated_are_left_alone() -> None:
    """Per channel, or computed as the model runs."""
    for source in (
        "q = Cast <to = 2> (x) d = DequantizeLinear <axis = 1> (q, scales, zeros)",
        "q, s, z = DynamicQuantizeLinear (x) d = DequantizeLinear (q, s, z)",
    ):
        constants = {
            "scales": np.full(4, 0.1, np.float32),
            "zeros": np.zeros(4, np.uint8),
        }
        text = (
            f"g (float[1,4,6,6] x, bool c) => (float y) {{ {source} t = Transpose (d)"
            f" {choice('t', 't')} }}"
        )
        model = parse(text, opset=16, **(constants if "scales" in source else {}))
        assert pair_moved(Graph.of(model)) == 0
