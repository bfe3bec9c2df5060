"""Stored activations: codes where these determine the tensor, the tensor itself otherwise."""

from __future__ import annotations

import numpy as np
import pytest

from quark_onnx.graph import Graph
from quark_onnx.refine.layer_stream import LayerStream
from quark_onnx.refine.stored_activation import StoredActivation, store_activation
from tests.models import normal, parse, run

TYPES = ["uint8", "int8", "uint16", "int16"]


def graph_of(
    dtype: str, zero: int, last: str = "Relu (d)", **constants: np.ndarray
) -> Graph:
    """x, its codes q and their values d."""
    parameters = {
        "s": np.asarray(np.float32(0.0371)),
        "z": np.asarray(zero, dtype),
    } | constants
    nodes = f"q = QuantizeLinear (x, s, z) d = DequantizeLinear (q, s, z) y = {last}"
    return Graph.of(
        parse(
            f"g (float[N,4] x) => (float[N,4] y) {{ {nodes} }}", opset=21, **parameters
        )
    )


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("share", [0, 0.25, 1])
def test_codes_become_the_values_that_onnxruntime_computes(
    dtype: str, share: float
) -> None:
    info = np.iinfo(dtype)
    graph = graph_of(
        dtype, int(info.min + share * (int(info.max) - info.min)), "Identity (d)"
    )
    data = [{"x": normal(50, 4, seed=seed, scale=100)} for seed in range(2)]
    walk = LayerStream(graph, data, memory=1 << 20)
    found = store_activation(walk, "d")
    assert found.name == "q"
    walk.reach("q")
    for sample, codes in zip(data, walk.values("q"), strict=True):
        assert codes.dtype == dtype
        assert (
            found.values(codes).tobytes() == run(graph.to_model(), sample)[0].tobytes()
        )
    walk.close()


def test_what_is_no_more_than_codes_and_a_scale_is_kept_as_itself() -> None:
    walk = LayerStream(graph_of("uint8", 3), [{"x": normal(2, 4)}], memory=1 << 20)
    assert (
        store_activation(walk, "x") == StoredActivation("x")
        and store_activation(walk, "y") == StoredActivation("y")
        and store_activation(walk, "d").name == "q"
    )
    walk.reach("d")
    assert store_activation(walk, "d") == StoredActivation("d")  # it is there already
    values = normal(2, 4)
    assert StoredActivation("x").values(values) is values
    channels = {"s": np.float32([1, 2, 3, 4]), "z": np.zeros(4, np.uint8)}
    for graph in (
        graph_of("uint8", 0, **channels),
        graph_of("int8", 0, s=np.asarray(np.float16(0.5))),
    ):
        assert store_activation(
            LayerStream(graph, [{"x": normal(2, 4)}], memory=0), "d"
        ) == StoredActivation("d")
