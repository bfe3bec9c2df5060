"""Walk: a graph run piece by piece gives what it gives in one run, with what may still change left
for later.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path

import numpy as np
import pytest

from quark_onnx.common.errors import ModelError
from quark_onnx.graph import Graph
from quark_onnx.kernels.parallel import side_by_side
from quark_onnx.refine.layer_stream import LayerStream
from tests.models import normal, parse, run, samples, weight
from tests.quark_onnx.optimizers.networks import NETWORKS


@pytest.mark.parametrize("memory", [0, 1 << 20])
@pytest.mark.parametrize("network", NETWORKS)
def test_pieces_give_what_the_whole_gives(network: str, memory: int) -> None:
    make, data = NETWORKS[network]
    graph, values = Graph.of(make()), data(5)
    model = make()
    names = [name for node in graph.nodes for name in node.outputs]
    known = {value.name for value in model.graph.output}
    from onnx import helper

    model.graph.output.extend(
        helper.make_tensor_value_info(n, 1, None) for n in names if n not in known
    )
    order = [value.name for value in model.graph.output]
    whole = [dict(zip(order, run(model, sample), strict=True)) for sample in values]
    walk = LayerStream(graph, values, memory=memory)
    for node in graph.nodes[::2]:
        walk.reach(node.outputs[0])
        for found, expected in zip(walk.values(node.outputs[0]), whole, strict=True):
            np.testing.assert_allclose(
                found, expected[node.outputs[0]], rtol=1e-4, atol=1e-5
            )
        [third] = walk.values(node.outputs[0], [3])
        np.testing.assert_allclose(
            third, whole[3][node.outputs[0]], rtol=1e-4, atol=1e-5
        )
    walk.close()
    assert len(values[0]) == 1, "the caller's samples stay"


def test_what_is_behind_may_still_change() -> None:
    graph = Graph.of(
        parse(
            "g (float[N,4] x) => (float[N,4] y) { a = MatMul (x, v) y = MatMul (a,"
            " w) }",
            v=weight(4, 4),
            w=weight(4, 4),
        )
    )
    data = samples(graph.to_model(), 3)
    walk = LayerStream(graph, data, memory=1 << 20)
    walk.reach("a")
    graph.set_constant("w", np.eye(4, dtype=np.float32))
    graph.set_constant("v", np.zeros((4, 4), np.float32))  # too late
    walk.reach("y")
    for sample, found in zip(data, walk.values("y"), strict=True):
        np.testing.assert_allclose(found, sample["x"] @ weight(4, 4), rtol=1e-5)


def test_only_what_is_read_later_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    graph = Graph.of(
        parse(
            "g (float[N,4] x) => (float[N,4] y) { a = Relu (x) b = Neg (a) c = Exp (b)"
            " y = Add (c, a) }"
        )
    )
    walk = LayerStream(graph, samples(graph.to_model(), 3), memory=0)
    walk.reach("b")
    assert {name for name in "abcy" if walk.known(name)} == {"a", "b"}
    walk.reach("c")
    assert {name for name in "abcy" if walk.known(name)} == {"a", "c"}
    assert len(list(tmp_path.iterdir())) == 1, "the files of the piece before are gone"
    walk.reach("c")
    walk.reach("y")
    assert {name for name in "abcy" if walk.known(name)} == {"y"}
    walk.close()
    assert not list(tmp_path.iterdir())


def test_inputs_and_constants_are_at_hand_and_bodies_get_what_they_read() -> None:
    graph = Graph.of(
        parse(
            """g (float[N,4] x, bool c) => (float[N,4] y) {
            a = Add (x, v)
            y = If (c) <then_branch = t () => (float[N,4] p) { p = Mul (a, v) },
                else_branch = e () => (float[N,4] p) { p = Sub (a, x) }>
            }""",
            v=normal(4),
        )
    )
    data = [
        {**sample, "c": np.array(place % 2 == 0)}
        for place, sample in enumerate(samples(graph.to_model(), 4))
    ]
    walk = LayerStream(graph, data, memory=1 << 20)
    walk.reach("x")
    walk.reach("a")
    walk.reach("y")
    for sample, found in zip(data, walk.values("y"), strict=True):
        np.testing.assert_allclose(found, run(graph.to_model(), sample)[0], rtol=1e-6)


def test_a_piece_that_does_not_run_is_an_error_that_says_where() -> None:
    graph = Graph.of(
        parse(
            "g (float[N] x) => (float[N] y) { y = Reshape (x, s) }", s=np.int64([2, -1])
        )
    )
    walk = LayerStream(graph, [{"x": np.ones(3, np.float32)}], memory=1 << 20)
    with pytest.raises(ModelError, match="piece by piece, up to y"):
        walk.reach("y")


def test_side_by_side_keeps_the_order_and_few_results() -> None:
    alive, most, lock = 0, 0, threading.Lock()

    def work(item: int) -> int:
        nonlocal alive, most
        with lock:
            alive += 1
            most = max(most, alive)
        time.sleep(0.0005 * (item % 3))
        return item * item

    found = []
    for value in side_by_side(work, range(200)):
        with lock:
            alive -= 1
        found.append(value)
    assert found == [item * item for item in range(200)]
    import os

    assert most <= 2 * (os.cpu_count() or 1) + 2


def test_an_error_in_one_of_many_is_raised() -> None:
    def work(item: int) -> float:
        return 1 / (item - 7)

    with pytest.raises(ZeroDivisionError):
        list(side_by_side(work, range(50)))


def test_float_weights_between_pairs_stay_what_they_are() -> None:
    """onnxruntime would round them to 8 bits by scales of its own, and layers be judged by a model
    that nobody gets.
    """
    w = np.float32(0.25) * np.rint(weight(4, 4, 3, 3) * 8)
    w[0, 0, 0, 0] = 7.1
    text = """g (float[N,4,6,6] x) => (float[N,4,6,6] y) {
        q = QuantizeLinear (x, s, z) d = DequantizeLinear (q, s, z) c = Conv <pads = [1,1,1,1]> (d, w)
        r = Relu (c) p = QuantizeLinear (r, s, z) y = DequantizeLinear (p, s, z) }"""  # noqa: E501
    step, zero = np.asarray(np.float32(0.125)), np.asarray(np.uint8(100))
    graph = Graph.of(parse(text, w=w, s=step, z=zero))
    sample = {"x": normal(2, 4, 6, 6)}
    walk = LayerStream(graph, [sample], memory=1 << 20)
    walk.reach("q")
    walk.reach("p")
    [found] = walk.values("p")
    rounded = (np.clip(np.rint(sample["x"] / step) + 100, 0, 255) - 100) * step
    padded = np.pad(rounded, ((0, 0), (0, 0), (1, 1), (1, 1)))
    windows = np.lib.stride_tricks.sliding_window_view(
        padded, (3, 3), axis=(2, 3)
    ).astype(np.float64)
    exact = (
        np.maximum(np.einsum("nihwkl,oikl->nohw", windows, w.astype(np.float64)), 0)
        / step
    )
    assert (
        np.abs(found.astype(np.float64) - 100 - np.minimum(exact, 155)).max()
        <= 0.5 + 1e-3
    )
    walk.close()
