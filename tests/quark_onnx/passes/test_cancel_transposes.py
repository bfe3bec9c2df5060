"""cancel_transposes: operators move before Transposes that cancel."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from onnx import ModelProto

from quark_onnx import QConfig, quantize
from quark_onnx.graph import Graph
from quark_onnx.passes import cancel_transposes
from tests.models import kinds, normal, parse, run, samples, weight
from tests.quark_onnx.passes.test_passes import applied

LAST = "Transpose <perm=[0,2,3,1]>"
FIRST = "Transpose <perm=[0,3,1,2]>"
CONSTANTS: dict[str, Any] = {
    "c": normal(3, seed=1),
    "k": normal(5, 1, seed=2),
    "s": np.array(0.3, np.float32),
    "axes": np.array([1, -2]),
    "channels": np.array([-1]),
    "pads": np.array([0, 1, 2, 0, 0, 3, 4, 0]),
    "slope": normal(1, 1, 3, seed=3),
}
#: Operators on t and u of (2, 4, 5, 3), with the sizes of the result and the opset.
BETWEEN = {
    "nothing": ("y = Identity (t)", "2,4,5,3", 17),
    "unary": ("a = Relu (t) b = Clip (a, , s) y = Sigmoid (b)", "2,4,5,3", 17),
    "vector": ("y = Mul (t, c)", "2,4,5,3", 17),
    "constant first": ("y = Sub (k, t)", "2,4,5,3", 17),
    "slopes": ("y = PRelu (t, slope)", "2,4,5,3", 17),
    "two": ("a = Add (t, u) y = Max (a, t, s)", "2,4,5,3", 17),
    "concat": ("y = Concat <axis=3> (t, u)", "2,4,5,6", 17),
    "concat of rows": ("y = Concat <axis=-3> (t, u, t)", "2,12,5,3", 17),
    "mean": ("y = ReduceMean <axes=[1,2]> (t)", "2,1,1,3", 17),
    "mean by input": ("y = ReduceMean (t, axes)", "2,1,1,3", 18),
    "softmax": ("a = Softmax <axis=2> (t) y = Add (u, a)", "2,4,5,3", 17),
    "pad": ('y = Pad <mode="constant"> (t, pads, s)', "2,8,11,3", 17),
    "pad by attribute": ("y = Pad <pads=[0,1,2,0,0,3,4,0]> (t)", "2,8,11,3", 10),
}


@pytest.mark.parametrize("name", BETWEEN)
def test_operators_between_transposes(name: str) -> None:
    lines, sizes, opset = BETWEEN[name]
    n, h, w, c = sizes.split(",")
    model = parse(
        f"g (float[2,3,4,5] x, float[2,3,4,5] v) => (float[{n},{c},{h},{w}] z)"
        f"{{ t = {LAST} (x) u = {LAST} (v) {lines} z = {FIRST} (y) }}",
        opset=opset,
        **{key: value for key, value in CONSTANTS.items() if key in _words(lines)},
    )
    count, after = applied(cancel_transposes, model)
    assert count >= 2 and "Transpose" not in kinds(after)


def _words(lines: str) -> set[str]:
    return set(lines.replace("(", " ").replace(")", " ").replace(",", " ").split())


def test_a_reduction_without_its_axes_ends_the_layout() -> None:
    """(N, H, W, C) without H and W is (N, C) without a Transpose."""
    model = parse(
        f"""g (float[2,3,4,5] x) => (float[2,3] y, float[2,4] z) {{
        t = {LAST} (x) r = Relu (t) y = ReduceMean <axes=[1,2], keepdims=0> (r)
        m = ReduceMax <axes=[2,3], keepdims=0> (r) z = Neg (m) }}"""
    )
    count, after = applied(cancel_transposes, model)
    assert count == 1
    assert kinds(after) == ["Relu", "ReduceMean", "ReduceMax", "Neg"]


def test_a_reduction_that_leaves_a_matrix_transposed() -> None:
    model = parse(
        f"""g (float[2,3,4,5] x) => (float[2,3,5] y) {{
        t = {LAST} (x) r = ReduceMean <axes=[1], keepdims=0> (t)
        y = Transpose <perm=[0,2,1]> (r) }}"""
    )
    count, after = applied(cancel_transposes, model)
    assert count == 2 and kinds(after) == ["ReduceMean"]


def test_transposes_one_after_the_other_become_one() -> None:
    model = parse(
        """g (float[2,3,4,5] x) => (float[4,2,3,5] y) {
        a = Transpose <perm=[0,2,3,1]> (x) b = Relu (a) c = Transpose (b)
        y = Transpose <perm=[2,3,0,1]> (c) }"""
    )
    count, after = applied(cancel_transposes, model)
    assert count == 2 and sorted(kinds(after)) == ["Relu", "Transpose"]


UNTOUCHED = {
    "no second one": f"t = {LAST} (x) y = Relu (t)",
    "other axes": f"t = {LAST} (x) r = Relu (t) u = Transpose <perm=[0,2,1,3]> (r)"
    " v = Neg (u) w = Neg (r) y = Concat <axis=0> (v, v)",
    "a softmax over the channels": f"t = {LAST} (x) s = Softmax <axis=-1> (t)"
    f" n = Neg (s) y = {FIRST} (n) v = Add (t, t) w = Mul (v, v)",
    "a computed operand": f"t = {LAST} (x) a = Add (t, q) y = {FIRST} (a)",
    "more readers than it saves": f"t = {LAST} (x) a = Relu (t) y = {FIRST} (a)"
    " b = Neg (a) c = Reshape (b, flat) d = Reshape (t, flat)"
    " e = Reshape (a, flat)",
}


@pytest.mark.parametrize("name", UNTOUCHED)
def test_what_saves_nothing_stays(name: str) -> None:
    outputs = {
        "other axes": ["w", "y"],
        "a softmax over the channels": ["w", "y"],
        "more readers than it saves": ["c", "d", "e", "y"],
    }.get(name, ["y"])
    model = parse(
        "g (float[2,3,4,4] x, float[2,4,4,3] q) =>"
        f" ({', '.join(f'float {output}' for output in outputs)}) {{ {UNTOUCHED[name]} }}",
        flat=np.array([-1]),
    )
    graph = Graph.of(model)
    assert cancel_transposes(graph) == 0
    assert [node.kind for node in graph.nodes] == kinds(model)


def test_outputs_and_readers_outside_keep_their_values() -> None:
    """Two Transposes go, one comes for the output between them."""
    model = parse(
        f"""g (float[2,3,4,5] x) => (float[2,3,4,5] y, float[2,4,5,3] a) {{
        t = {LAST} (x) a = Relu (t) b = Sigmoid (a) y = {FIRST} (b) }}"""
    )
    count, after = applied(cancel_transposes, model)
    assert count == 1 and kinds(after).count("Transpose") == 1


def channels_last() -> ModelProto:
    """A converted network: each convolution between Transposes, with a written-out norm."""
    lines, source, arrays = list[str](), "x", dict[str, Any]()
    for place in range(4):
        arrays[f"w{place}"] = weight(8, 8, 3, 3, seed=place)
        arrays[f"g{place}"] = np.exp2(normal(8, seed=20 + place))
        arrays[f"b{place}"] = normal(8, seed=40 + place)
        lines.append(
            f"i{place} = {FIRST} ({source}) h{place} = Conv <pads=[1,1,1,1]> (i{place}, w{place})"
            f" o{place} = {LAST} (h{place}) m{place} = Mul (o{place}, g{place})"
            f" a{place} = Add (m{place}, b{place}) r{place} = Relu (a{place})"
        )
        source = f"r{place}"
    return parse(
        "g (float[1,12,12,8] x) => (float[1,8] y)"
        f"{{ {' '.join(lines)} y = ReduceMean <axes=[1,2], keepdims=0> ({source}) }}",
        **arrays,
    )


def test_a_converted_network() -> None:
    """One Transpose is left, at the input, and each layer is a Conv with its activation."""
    model = channels_last()
    data = samples(model, 8)
    result = quantize(model, data, QConfig.of("A8W8"))
    plain = [kind for kind in kinds(result.model) if "quantize" not in kind.lower()]
    plain = [kind for kind in plain if "Linear" not in kind]
    assert plain.count("Transpose") == 1 and plain.count("Conv") == 4
    assert not {"Mul", "Add"} & set(plain)
    for feeds in samples(model, 4, seed=1):
        [expected], [found] = run(model, feeds), run(result.model, feeds)
        assert np.abs(expected - found).max() < 0.05 * np.abs(expected).max()
