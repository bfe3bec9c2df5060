"""Small float models, and data for them, for scripts that quantize."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import ModelProto, TensorProto, helper, numpy_helper

Feeds = dict[str, NDArray[Any]]


def _model(
    nodes: list[Any],
    x: tuple[Any, ...],
    y: tuple[Any, ...],
    weights: dict[str, Any],
    **settings: Any,
) -> ModelProto:
    kind = settings.get("kind", TensorProto.FLOAT)
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", kind, x)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, y)],
        [
            numpy_helper.from_array(np.asarray(value), name)
            for name, value in weights.items()
        ],
    )
    imports = [
        helper.make_opsetid("", settings.get("opset", 17)),
        helper.make_opsetid("com.microsoft", 1),
    ]
    return helper.make_model(graph, opset_imports=imports, ir_version=9)


def _normal(*shape: int, seed: int, scale: float = 1.0) -> NDArray[np.float32]:
    return (np.random.default_rng(seed).standard_normal(shape) * scale).astype(
        np.float32
    )


def convolutions(opset: int = 17) -> ModelProto:
    """Conv, Relu, MaxPool, Conv, Add, Relu, GlobalAveragePool, Flatten, Gemm: an image classifier."""  # noqa: E501
    node = helper.make_node
    nodes = [
        node("Conv", ["x", "w1", "b1"], ["c1"], "conv1", pads=[1, 1, 1, 1]),
        node("Relu", ["c1"], ["r1"], "relu1"),
        node("MaxPool", ["r1"], ["m"], "pool", kernel_shape=[2, 2], strides=[2, 2]),
        node("Conv", ["m", "w2", "b2"], ["c2"], "conv2", pads=[1, 1, 1, 1]),
        node("Add", ["c2", "m"], ["s"], "add"),
        node("Relu", ["s"], ["r2"], "relu2"),
        node("GlobalAveragePool", ["r2"], ["p"], "mean"),
        node("Flatten", ["p"], ["f"], "flatten"),
        node("Gemm", ["f", "w3", "b3"], ["y"], "fc"),
    ]
    weights = {
        "w1": _normal(8, 3, 3, 3, seed=1, scale=0.3),
        "b1": _normal(8, seed=2, scale=0.1),
        "w2": _normal(8, 8, 3, 3, seed=3, scale=0.2),
        "b2": _normal(8, seed=4, scale=0.1),
        "w3": _normal(8, 5, seed=5, scale=0.5),
        "b3": _normal(5, seed=6, scale=0.1),
    }
    return _model(nodes, ("N", 3, 12, 12), ("N", 5), weights, opset=opset)


def products(seed: int) -> ModelProto:
    """Two products with a Tanh between them, and weights that a seed draws."""
    node = helper.make_node
    nodes = [
        node("MatMul", ["x", "w1"], ["h"], "up"),
        node("Tanh", ["h"], ["t"], "tanh"),
        node("MatMul", ["t", "w2"], ["y"], "down"),
    ]
    weights = {
        "w1": _normal(16, 64, seed=2 * seed, scale=0.25),
        "w2": _normal(64, 16, seed=2 * seed + 1, scale=0.125),
    }
    return _model(nodes, ("N", 16), ("N", 16), weights, opset=19)


def attention() -> ModelProto:
    """Projections, scores, Softmax and a feed-forward part with Sigmoid and Mul: a decoder's layer
    in small.
    """
    node = helper.make_node
    nodes = [
        node("MatMul", ["x", "wq"], ["q"], "q_proj"),
        node("MatMul", ["x", "wk"], ["k"], "k_proj"),
        node("MatMul", ["x", "wv"], ["v"], "v_proj"),
        node("Transpose", ["k"], ["kt"], "turn", perm=[0, 2, 1]),
        node("MatMul", ["q", "kt"], ["scores"], "scores"),
        node("Softmax", ["scores"], ["p"], "softmax", axis=-1),
        node("MatMul", ["p", "v"], ["o"], "context"),
        node("MatMul", ["o", "wo"], ["h"], "o_proj"),
        node("Add", ["h", "x"], ["r"], "residual"),
        node("MatMul", ["r", "wu"], ["u"], "up"),
        node("Sigmoid", ["u"], ["g"], "gate"),
        node("Mul", ["u", "g"], ["a"], "silu"),
        node("MatMul", ["a", "wd"], ["y"], "down"),
    ]
    size = 32
    weights = {
        name: _normal(size, size, seed=at, scale=0.18)
        for at, name in enumerate(("wq", "wk", "wv", "wo"))
    }
    weights |= {
        "wu": _normal(size, 64, seed=7, scale=0.18),
        "wd": _normal(64, size, seed=8, scale=0.13),
    }
    return _model(nodes, ("N", 6, size), ("N", 6, size), weights)


def embedding() -> ModelProto:
    """Gather from a table, MatMul, Tanh, MatMul: words to features."""
    node = helper.make_node
    nodes = [
        node("Gather", ["table", "x"], ["e"], "look_up"),
        node("MatMul", ["e", "w1"], ["h"], "hidden"),
        node("Tanh", ["h"], ["t"], "tanh"),
        node("MatMul", ["t", "w2"], ["y"], "head"),
    ]
    weights = {
        "table": _normal(50, 32, seed=1),
        "w1": _normal(32, 64, seed=2, scale=0.18),
        "w2": _normal(64, 16, seed=3, scale=0.13),
    }
    return _model(nodes, ("N", 7), ("N", 7, 16), weights, kind=TensorProto.INT64)


def words() -> ModelProto:
    """EmbedLayerNormalization and a product: words to features, as BERT begins."""
    node = helper.make_node
    nodes = [
        node("Cast", ["x"], ["i"], "narrow", to=TensorProto.INT32),
        node(
            "EmbedLayerNormalization",
            ["i", "", "table", "positions", "", "gain", "shift"],
            ["e", "m"],
            "embed",
            domain="com.microsoft",
        ),
        node("MatMul", ["e", "w"], ["y"], "head"),
    ]
    weights = {
        "table": _normal(50, 32, seed=1),
        "positions": _normal(7, 32, seed=2),
        "gain": np.ones(32, "f"),
        "shift": np.zeros(32, "f"),
        "w": _normal(32, 16, seed=3, scale=0.18),
    }
    return _model(nodes, ("N", 7), ("N", 7, 16), weights, kind=TensorProto.INT64)


def fused_attention() -> ModelProto:
    """Attention of com.microsoft and a product, as onnxruntime's optimizer leaves a transformer."""
    node = helper.make_node
    nodes = [
        node(
            "Attention",
            ["x", "wqkv", "bqkv"],
            ["a"],
            "attention",
            domain="com.microsoft",
            num_heads=4,
        ),
        node("MatMul", ["a", "wo"], ["y"], "out"),
    ]
    weights = {
        "wqkv": _normal(32, 96, seed=1, scale=0.18),
        "bqkv": _normal(96, seed=2, scale=0.1),
        "wo": _normal(32, 16, seed=3, scale=0.18),
    }
    return _model(nodes, ("N", 6, 32), ("N", 6, 16), weights)


def styled() -> ModelProto:
    """Conv, InstanceNormalization, Relu, Conv: part of a network that transfers styles."""
    node = helper.make_node
    nodes = [
        node("Conv", ["x", "w1"], ["c"], "conv1", pads=[1, 1, 1, 1]),
        node("InstanceNormalization", ["c", "gain", "shift"], ["n"], "norm"),
        node("Relu", ["n"], ["r"], "relu"),
        node("Conv", ["r", "w2"], ["y"], "conv2", pads=[1, 1, 1, 1]),
    ]
    weights = {
        "w1": _normal(8, 3, 3, 3, seed=1, scale=0.3),
        "gain": np.abs(_normal(8, seed=2)) + np.float32(0.5),
        "shift": _normal(8, seed=3, scale=0.3),
        "w2": _normal(4, 8, 3, 3, seed=4, scale=0.2),
    }
    return _model(nodes, ("N", 3, 12, 12), ("N", 4, 12, 12), weights)


def bounded() -> ModelProto:
    """MatMul, Clip from -1 to 1, MatMul."""
    node = helper.make_node
    nodes = [
        node("MatMul", ["x", "w1"], ["h"], "up"),
        node("Clip", ["h", "low", "high"], ["c"], "clip"),
        node("MatMul", ["c", "w2"], ["y"], "down"),
    ]
    weights = {
        "w1": _normal(16, 64, seed=1, scale=0.3),
        "low": np.float32(-1),
        "high": np.float32(1),
        "w2": _normal(64, 16, seed=2, scale=0.13),
    }
    return _model(nodes, ("N", 16), ("N", 16), weights)


def branches() -> ModelProto:
    """Two Add and a Softmax, and an If one of whose branches multiplies."""
    node, w = helper.make_node, _normal(16, 16, seed=9, scale=0.25)
    result = helper.make_tensor_value_info("z", TensorProto.FLOAT, None)
    then = helper.make_graph(
        [node("MatMul", ["b", "w"], ["z"], "inner")], "then", [], [result]
    )
    other = helper.make_graph(
        [node("Identity", ["b"], ["z"], "same")], "other", [], [result]
    )
    nodes = [
        node("Add", ["x", "k"], ["a"], "add1"),
        node("Softmax", ["a"], ["s"], "softmax1", axis=-1),
        node("Add", ["s", "x"], ["b"], "add2"),
        node("If", ["yes"], ["c"], "if", then_branch=then, else_branch=other),
        node("MatMul", ["c", "w"], ["y"], "matmul"),
    ]
    weights = {"k": _normal(16, seed=1), "w": w, "yes": np.array(True)}
    return _model(nodes, ("N", 16), ("N", 16), weights)


def detector() -> ModelProto:
    """Two convolutions, and a decoding of boxes: corners from a grid and sizes, in pixels."""
    node = helper.make_node
    nodes = [
        node("Conv", ["x", "w1", "b1"], ["c1"], "conv1", pads=[1, 1, 1, 1]),
        node("Relu", ["c1"], ["r1"], "relu1"),
        node("Conv", ["r1", "w2", "b2"], ["c2"], "conv2", pads=[1, 1, 1, 1]),
        node("Reshape", ["c2", "flat"], ["f"], "flatten"),
        node("Sigmoid", ["f"], ["s"], "sigmoid"),
        node("Mul", ["s", "two"], ["m"], "double"),
        node("Sub", ["m", "half"], ["o"], "offset"),
        node("Add", ["o", "grid"], ["g"], "place"),
        node("Mul", ["g", "stride"], ["y"], "pixels"),
    ]
    weights = {
        "w1": _normal(8, 3, 3, 3, seed=1, scale=0.3),
        "b1": _normal(8, seed=2, scale=0.1),
        "w2": _normal(4, 8, 3, 3, seed=3, scale=0.2),
        "b2": _normal(4, seed=4, scale=0.1),
        "flat": np.array([0, 4, 64]),
        "two": np.float32(2),
        "half": np.float32(0.5),
        "grid": np.tile(np.arange(8, dtype=np.float32), 8)[None, None],
        "stride": np.float32(8),
    }
    return _model(nodes, ("N", 3, 8, 8), ("N", 4, 64), weights)


def stream() -> ModelProto:
    """A residual stream into a LayerNormalization, which few bits are known to ruin."""
    node = helper.make_node
    nodes = [
        node("MatMul", ["x", "w"], ["h"], "matmul"),
        node("Add", ["h", "x"], ["r"], "add"),
        node("LayerNormalization", ["r", "gain", "bias"], ["y"], "norm"),
    ]
    weights = {
        "w": _normal(16, 16, seed=1, scale=0.25),
        "gain": np.ones(16, "f"),
        "bias": np.zeros(16, "f"),
    }
    return _model(nodes, ("N", 16), ("N", 16), weights)


def layers() -> ModelProto:
    """Three Gemm, one of them transposed: the joiner of a speech recognizer."""
    node = helper.make_node
    nodes = [
        node("Gemm", ["x", "w1", "b1"], ["g"], "first"),
        node("Relu", ["g"], ["r"], "relu"),
        node("Gemm", ["r", "w2", "b2"], ["h"], "second", transB=1),
        node("Gemm", ["h", "w3", "b3"], ["y"], "third"),
    ]
    weights = {
        "w1": _normal(16, 24, seed=1, scale=0.25),
        "b1": _normal(24, seed=2, scale=0.1),
        "w2": _normal(20, 24, seed=3, scale=0.2),
        "b2": _normal(20, seed=4, scale=0.1),
        "w3": _normal(20, 8, seed=5, scale=0.2),
        "b3": _normal(8, seed=6, scale=0.1),
    }
    return _model(nodes, ("N", 16), ("N", 8), weights)


def vocoder() -> ModelProto:
    """Conv, LeakyRelu, ConvTranspose: an upsampling step of a vocoder."""
    node = helper.make_node
    nodes = [
        node("Conv", ["x", "w1", "b1"], ["c"], "conv", pads=[1, 1]),
        node("LeakyRelu", ["c"], ["r"], "leaky", alpha=0.1),
        node("ConvTranspose", ["r", "w2", "b2"], ["y"], "up", strides=[2]),
    ]
    weights = {
        "w1": _normal(8, 8, 3, seed=1, scale=0.2),
        "b1": _normal(8, seed=2, scale=0.1),
        "w2": _normal(8, 4, 2, seed=3, scale=0.2),
        "b2": _normal(4, seed=4, scale=0.1),
    }
    return _model(nodes, ("N", 8, 16), ("N", 4, 32), weights)


def stored_weights(axis: int | None = None) -> ModelProto:
    """A Conv whose weight is stored as codes before a DequantizeLinear, and a float Conv.

    Args:
        axis: axis of the scales; None for one scale.
    """
    node = helper.make_node
    attributes = {} if axis is None else {"axis": axis}
    nodes = [
        node("DequantizeLinear", ["codes", "step", "zero"], ["w1"], "dq", **attributes),
        node("Conv", ["x", "w1", "b1"], ["c"], "conv1", pads=[1, 1, 1, 1]),
        node("Relu", ["c"], ["r"], "relu"),
        node("Conv", ["r", "w2"], ["y"], "conv2", pads=[1, 1, 1, 1]),
    ]
    channels = () if axis is None else (8,)
    weights = {
        "codes": np.random.default_rng(1).integers(-128, 128, (8, 3, 3, 3), np.int8),
        "step": np.full(channels, 0.01, "f"),
        "zero": np.zeros(channels, np.int8),
        "b1": _normal(8, seed=2, scale=0.1),
        "w2": _normal(4, 8, 3, 3, seed=3, scale=0.2),
    }
    return _model(nodes, ("N", 3, 8, 8), ("N", 4, 8, 8), weights)


def stack() -> ModelProto:
    """A product with a stack of one matrix, as torch exports some linear layers."""
    nodes = [helper.make_node("MatMul", ["x", "w"], ["y"], "product")]
    weights = {"w": _normal(1, 64, 16, seed=1, scale=0.12)}
    return _model(nodes, ("N", 5, 64), ("N", 5, 16), weights, opset=21)


def table() -> ModelProto:
    """Rows of a table, and a product: the ends of a language model."""
    nodes = [
        helper.make_node("Gather", ["table", "x"], ["e"], "look_up"),
        helper.make_node("MatMul", ["e", "w"], ["y"], "lm_head"),
    ]
    weights = {
        "table": _normal(50, 64, seed=1),
        "w": _normal(64, 16, seed=2, scale=0.12),
    }
    return _model(
        nodes, ("N", 7), ("N", 7, 16), weights, kind=TensorProto.INT64, opset=21
    )


def cancelling() -> ModelProto:
    """The difference of two products that are nearly equal."""
    weight = _normal(16, 16, seed=1, scale=0.25)
    nodes = [
        helper.make_node("MatMul", ["x", "w1"], ["a"], "first"),
        helper.make_node("MatMul", ["x", "w2"], ["b"], "second"),
        helper.make_node("Sub", ["a", "b"], ["y"], "difference"),
    ]
    weights = {"w1": weight, "w2": weight + _normal(16, 16, seed=2, scale=1e-5)}
    return _model(nodes, ("N", 16), ("N", 16), weights)


def samples(model: ModelProto, count: int = 24, seed: int = 0) -> list[Feeds]:
    """Random data for a model's input ``x``; each sample is a batch of four."""
    random, [value] = np.random.default_rng(seed), model.graph.input
    shape = [dim.dim_value or 4 for dim in value.type.tensor_type.shape.dim]
    if value.type.tensor_type.elem_type == TensorProto.INT64:
        return [{"x": random.integers(0, 50, shape)} for _ in range(count)]
    return [
        {"x": random.standard_normal(shape).astype(np.float32)} for _ in range(count)
    ]


def save(model: ModelProto, folder: Path) -> Path:
    """Write a model as ``float.onnx``."""
    path = folder / "float.onnx"
    onnx.save_model(model, str(path))
    return path
