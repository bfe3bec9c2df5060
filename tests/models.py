"""Tiny float models, mostly in ONNX text, that many tests share; each function makes a new one.

``MODELS`` lists by name those that onnxruntime runs in float and that every run of the quantizer
must survive.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from numpy.typing import NDArray
from onnx import ModelProto, helper, numpy_helper

from quark_onnx.graph import Graph
from quark_onnx.graph.node import all_graphs, rename_entries

Array = NDArray[Any]
Feeds = dict[str, Array]
Factory = Callable[[], ModelProto]

MODELS: dict[str, Factory] = {}


def parse(
    text: str, *, opset: int = 17, ir_version: int = 8, **constants: Array
) -> ModelProto:
    """The model that ONNX text describes, with ``constants`` as initializers.

    A text may bring its own header.
    """
    header = (
        ""
        if text.lstrip().startswith("<")
        else f'<ir_version: {ir_version}, opset_import: ["" : {opset}]>'
    )
    model = onnx.parser.parse_model(header + text)
    model.graph.initializer.extend(
        numpy_helper.from_array(array, name) for name, array in constants.items()
    )
    return model


def normal(*shape: int, seed: int = 0, scale: float = 1.0) -> NDArray[np.float32]:
    """Gaussian numbers that are the same in every run."""
    return (np.random.default_rng([seed, *shape]).normal(0, scale, shape)).astype(
        np.float32
    )


def weight(*shape: int, seed: int = 0) -> NDArray[np.float32]:
    """Weights that keep the size of what they are applied to."""
    return normal(*shape, seed=seed, scale=float(np.prod(shape[1:])) ** -0.5)


def samples(model: ModelProto, count: int = 8, seed: int = 0) -> list[Feeds]:
    """Random samples for the inputs of a model; dynamic dimensions are 1."""
    random = np.random.default_rng(seed)
    constants = {tensor.name for tensor in model.graph.initializer}
    return [
        {
            value.name: _draw(random, value)
            for value in model.graph.input
            if value.name not in constants
        }
        for _ in range(count)
    ]


def _draw(random: np.random.Generator, value: onnx.ValueInfoProto) -> Array:
    kind = value.type.tensor_type
    shape = [dim.dim_value or 1 for dim in kind.shape.dim]
    dtype = helper.tensor_dtype_to_np_dtype(kind.elem_type)
    return np.asarray(
        random.normal(size=shape) if dtype.kind == "f" else random.integers(0, 2, shape)
    ).astype(dtype)


def run(model: ModelProto, feeds: Feeds, *, optimize: bool = False) -> list[Array]:
    """Outputs of a model by onnxruntime, as written or optimized.

    Activations of 16 bits are not rounded to 8.
    """
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", "1")
    if not optimize:
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    return list(session.run(None, feeds))


def interface(model: ModelProto) -> tuple[list[bytes], list[bytes]]:
    """Inputs, without the initializers that IR version 3 lists among them, and outputs: names,
    types and shapes.
    """
    constants = (
        {tensor.name for tensor in model.graph.initializer}
        if model.ir_version < 4
        else set()
    )
    return (
        [
            value.SerializeToString(deterministic=True)
            for value in model.graph.input
            if value.name not in constants
        ],
        [value.SerializeToString(deterministic=True) for value in model.graph.output],
    )


def kinds(model: ModelProto) -> list[str]:
    """Operator types in order."""
    return [node.op_type for node in model.graph.node]


def listed(factory: Factory) -> Factory:
    MODELS[factory.__name__] = factory
    return factory


# Layers


@listed
def conv_relu() -> ModelProto:
    return parse(
        """g (float[N,3,8,8] x) => (float[N,4,8,8] y) {
            [conv] h = Conv <pads = [1,1,1,1]> (x, w, b)
            [relu] y = Relu (h)
        }""",
        w=weight(4, 3, 3, 3),
        b=normal(4),
    )


@listed
def residual() -> ModelProto:
    return parse(
        """g (float[N,4,8,8] x) => (float[N,10] y) {
            [conv1] a = Conv <pads = [1,1,1,1]> (x, w1, b1)
            [relu1] r = Relu (a)
            [conv2] c = Conv <pads = [1,1,1,1]> (r, w2, b2)
            [add] s = Add (c, x)
            [relu2] t = Relu (s)
            [max] m = MaxPool <kernel_shape = [2,2], strides = [2,2]> (t)
            [pool] p = GlobalAveragePool (m)
            [flatten] f = Flatten (p)
            [fc] y = Gemm <transB = 1> (f, w3, b3)
        }""",
        w1=weight(4, 4, 3, 3, seed=1),
        b1=normal(4, seed=1),
        w2=weight(4, 4, 3, 3, seed=2),
        b2=normal(4, seed=2),
        w3=weight(10, 4),
        b3=normal(10),
    )


@listed
def depthwise() -> ModelProto:
    return parse(
        """g (float[N,4,8,8] x) => (float[N,4,8,8] y) {
            [conv] y = Conv <group = 4, pads = [1,1,1,1]> (x, w)
        }""",
        w=weight(4, 1, 3, 3),
    )


def convtranspose(group: int = 1) -> ModelProto:
    return parse(
        f"""g (float[N,4,5,5] x) => (float[N,6,11,11] y) {{
            [conv] y = ConvTranspose <group = {group}, strides = [2,2]> (x, w, b)
        }}""",
        w=weight(4, 6 // group, 3, 3),
        b=normal(6),
    )


@listed
def convtranspose_groups() -> ModelProto:
    return convtranspose(2)


def gemm(trans_b: int = 0) -> ModelProto:
    return parse(
        f"""g (float[N,6] x) => (float[N,3] y) {{
            [fc] y = Gemm <transB = {trans_b}> (x, w, b)
        }}""",
        w=weight(3, 6) if trans_b else weight(3, 6).T.copy(),
        b=normal(3),
    )


@listed
def gemm_scaled() -> ModelProto:
    """alpha and beta are not 1, and the bias is a scalar."""
    return parse(
        """g (float[N,6] x) => (float[N,3] y) {
            [fc] y = Gemm <alpha = 0.5, beta = 2.0> (x, w, b)
        }""",
        w=weight(6, 3),
        b=np.float32(0.25),
    )


@listed
def matmul_right() -> ModelProto:
    return parse(
        "g (float[N,5,6] x) => (float[N,5,3] y) { [fc] y = MatMul (x, w) }",
        w=weight(6, 3),
    )


@listed
def matmul_left() -> ModelProto:
    return parse(
        "g (float[N,6,5] x) => (float[N,3,5] y) { [fc] y = MatMul (w, x) }",
        w=weight(3, 6),
    )


@listed
def matmul_3d() -> ModelProto:
    return parse(
        "g (float[2,5,6] x) => (float[2,5,3] y) { [fc] y = MatMul (x, w) }",
        w=weight(2, 6, 3),
    )


@listed
def conv_1d() -> ModelProto:
    return parse(
        "g (float[N,3,9] x) => (float[N,4,7] y) { [conv] y = Conv (x, w, b) }",
        w=weight(4, 3, 3),
        b=normal(4),
    )


# Networks


@listed
def unlike_concat() -> ModelProto:
    """Concat of a 0..1 score and boxes of several hundred, which a weighted operator reads."""
    return parse(
        """g (float[N,2,4,4] x) => (float[N,3,4,4] y) {
            [score] s = Sigmoid (x)
            [box] b = Mul (x, hundreds)
            [join] c = Concat <axis = 1> (s, b)
            [conv] y = Conv (c, w)
        }""",
        hundreds=np.float32([300.0]),
        w=weight(3, 4, 1, 1),
    )


@listed
def shared_by_unlike_ranks() -> ModelProto:
    """Broadcasts of tensors of several ranks, joined after they were brought to one."""
    return parse(
        """g (float[N,3] x, float[3] z) => (float[N,6] y) {
            [sum] s = Add (x, z)
            [up] u = Unsqueeze (z, zero)
            [same] v = Expand (u, size)
            [join] y = Concat <axis = 1> (s, v)
        }""",
        zero=np.int64([0]),
        size=np.int64([1, 3]),
    )


@listed
def detector_head() -> ModelProto:
    """Boxes of several hundred and scores below one in one output."""
    return parse(
        """g (float[N,3,4,4] x) => (float[N,6,16] y) {
            [conv] h = Conv (x, w, b)
            [split] box, score = Split <axis = 1> (h, sizes)
            [decode] scaled = Mul (box, stride)
            [sigmoid] p = Sigmoid (score)
            [join] c = Concat <axis = 1> (scaled, p)
            [reshape] y = Reshape (c, shape)
        }""",
        w=weight(6, 3, 1, 1),
        b=normal(6),
        sizes=np.int64([4, 2]),
        stride=np.float32([320.0]),
        shape=np.int64([0, 6, 16]),
    )


@listed
def transformer_block() -> ModelProto:
    """One attention head and a residual, with the usual mask made from an integer input."""
    width = 8
    return parse(
        """g (float[N,5,8] x, int64[N,5] mask) => (float[N,5,8] y) {
            [q] q = MatMul (x, wq)
            [k] k = MatMul (x, wk)
            [v] v = MatMul (x, wv)
            [k_t] kt = Transpose <perm = [0,2,1]> (k)
            [qk] qk = MatMul (q, kt)
            [scale] scaled = Div (qk, root)
            [up] up = Unsqueeze (mask, one)
            [cast] seen = Cast <to = 1> (up)
            [invert] unseen = Sub (unity, seen)
            [never] bias = Mul (unseen, lowest)
            [masked] masked = Add (scaled, bias)
            [softmax] p = Softmax <axis = -1> (masked)
            [pv] pv = MatMul (p, v)
            [out] o = MatMul (pv, wo)
            [out_bias] ob = Add (o, bo)
            [residual] r = Add (ob, x)
            [norm] y = LayerNormalization <axis = -1> (r, gamma, beta)
        }""",
        **{
            name: weight(width, width, seed=i)
            for i, name in enumerate(("wq", "wk", "wv", "wo"))
        },
        root=np.float32(width**0.5),
        one=np.int64([1]),
        unity=np.float32(1.0),
        lowest=np.float32(-3.4e38),
        bo=normal(width),
        gamma=np.ones(width, np.float32),
        beta=np.zeros(width, np.float32),
    )


# Shared and hidden weights


@listed
def shared_weight() -> ModelProto:
    return parse(
        """g (float[N,4] x) => (float[N,4] y) {
            [first] h = MatMul (x, w)
            [second] y = MatMul (h, w)
        }""",
        w=weight(4, 4),
    )


@listed
def shared_bias() -> ModelProto:
    """One bias for two layers whose activations have very different scales."""
    return parse(
        """g (float[N,3,4,4] x) => (float[N,3,4,4] y, float[N,3,4,4] z) {
            [first] y = Conv (x, w, b)
            [large] l = Mul (x, hundred)
            [second] z = Conv (l, w, b)
        }""",
        w=weight(3, 3, 1, 1),
        b=normal(3),
        hundred=np.float32([100.0]),
    )


@listed
def tied() -> ModelProto:
    """An embedding table that is also the weight of the last layer."""
    return parse(
        """g (int64[N,3] ids) => (float[N,3,7] y) {
            [embed] e = Gather (table, ids)
            [turn] t = Transpose <perm = [1,0]> (table)
            [head] y = MatMul (e, t)
        }""",
        table=weight(7, 4),
    )


@listed
def hidden_weight() -> ModelProto:
    """Weights behind Constant, Identity, Cast and Transpose."""
    return parse(
        """g (float[N,2] x) => (float[N,2] y) {
            [constant] c = Constant <value = float[2,2] {0.5, -1.0, 2.0, 0.25}> ()
            [identity] i = Identity (c)
            [first] h = MatMul (x, i)
            [cast] d = Cast <to = 1> (half)
            [transpose] t = Transpose <perm = [1,0]> (d)
            [second] y = MatMul (h, t)
        }""",
        half=weight(2, 2).astype(np.float16),
    )


@listed
def old_ir() -> ModelProto:
    """IR version 3 lists every initializer among the inputs."""
    return parse(
        """g (float[1,3,4,4] x, float[2,3,1,1] w, float[2] b) => (float[1,2,4,4] y) { [conv] y = Conv (x, w, b) }""",  # noqa: E501
        ir_version=3,
        opset=9,
        w=weight(2, 3, 1, 1),
        b=normal(2),
    )


# Odd graphs


@listed
def branches() -> ModelProto:
    """Both branches capture a tensor and a weight; the weight is also read outside."""
    return parse(
        """g (float[N,4] x, bool c) => (float[N,4] y) {
            [fc] h = MatMul (x, w)
            [if] y = If (c) <
                then_branch = a () => (float[N,4] t) { t = MatMul (h, w) },
                else_branch = b () => (float[N,4] e) { e = Relu (h) }
            >
        }""",
        w=weight(4, 4),
    )


@listed
def loop() -> ModelProto:
    """A body that captures a tensor of the graph around it."""
    return parse(
        """g (float[N,4] x) => (float[N,4] y) {
            [fc] h = MatMul (x, w)
            [loop] y = Loop (times, always, x) <
                body = b (int64 i, bool c, float[N,4] s) => (bool d, float[N,4] r) {
                    d = Identity (c)
                    r = Add (s, h)
                }
            >
        }""",
        w=weight(4, 4),
        times=np.int64(3),
        always=np.bool_(True),
    )


def captured(line: str, **constants: Array) -> ModelProto:
    """Both branches capture ``t``, which ``line`` computes by moving values of ``h``."""
    return parse(
        f"""g (float[1,4,6,6] x, bool c) => (float y) {{
            [conv] h = Conv <pads = [1,1,1,1]> (x, w)
            [move] {line}
            [if] y = If (c) <
                then_branch = a () => (float p) {{ s = Sigmoid (t) p = ReduceSum <keepdims = 0> (s) }},
                else_branch = b () => (float q) {{ u = Tanh (t) q = ReduceSum <keepdims = 0> (u) }}
            >
        }}""",  # noqa: E501
        opset=16,
        w=weight(8, 4, 3, 3),
        **constants,
    )


@listed
def captured_transpose() -> ModelProto:
    return captured("t = Transpose <perm = [0,2,3,1]> (h)")


@listed
def captured_reshape() -> ModelProto:
    return captured("t = Reshape (h, shape)", shape=np.int64([8, -1]))


@listed
def captured_squeeze() -> ModelProto:
    return captured("t = Squeeze (h, axes)", axes=np.int64([0]))


@listed
def captured_unsqueeze() -> ModelProto:
    return captured("t = Unsqueeze (h, axes)", axes=np.int64([1]))


@listed
def captured_slice() -> ModelProto:
    return captured(
        "t = Slice (h, starts, ends)", starts=np.int64([0, 2]), ends=np.int64([1, 7])
    )


@listed
def captured_maxpool() -> ModelProto:
    return captured("t = MaxPool <kernel_shape = [2,2]> (h)")


@listed
def inner_output() -> ModelProto:
    """A tensor inside the graph is also one of its outputs."""
    return parse(
        """g (float[N,3,4,4] x) => (float[N,2,4,4] y, float[N,2,4,4] h) {
            [conv] h = Conv (x, w)
            [relu] y = Relu (h)
        }""",
        w=weight(2, 3, 1, 1),
    )


@listed
def nameless() -> ModelProto:
    model = residual()
    for node in model.graph.node:
        node.name = ""
    return model


@listed
def name_collisions() -> ModelProto:
    """The names that a quantizer would like to use are taken, one by a value_info and one inside a
    subgraph.
    """
    return parse(
        """g (float[N,4] x, bool c) => (float[N,4] y) <float[N,4] x_DequantizeLinear_Output> {
            [x_QuantizeLinear] x_QuantizeLinear_Output = Relu (x)
            [w_scale] h = MatMul (x, w)
            [sum] x_DequantizeLinear_Output = Add (h, x_QuantizeLinear_Output)
            [if] y = If (c) <
                then_branch = a () => (float[N,4] w_quantized) { w_quantized = Add (x_DequantizeLinear_Output, x) },
                else_branch = b () => (float[N,4] x_scale) { x_scale = Relu (x_DequantizeLinear_Output) }
            >
        }""",  # noqa: E501
        w=weight(4, 4),
    )


@listed
def own_domain() -> ModelProto:
    """An operator that no rule knows; the model brings its definition as a function."""
    return parse(
        """<ir_version: 8, opset_import: ["" : 17, "my.own" : 1]>
        g (float[N,4] x) => (float[N,4] y) {
            [first] h = MatMul (x, w)
            [own] o = my.own.Twice (h)
            [second] y = MatMul (o, w)
        }
        <domain: "my.own", opset_import: ["" : 17]>
        Twice (a) => (b) { b = Add (a, a) }""",
        w=weight(4, 4),
    )


@listed
def integer_concat() -> ModelProto:
    return parse(
        """g (float[N,2] x, int64[2] a, int64[2] b) => (float[N,2] y, int64[4] c) {
            [fc] y = MatMul (x, w)
            [join] c = Concat <axis = 0> (a, b)
        }""",
        w=weight(2, 2),
    )


@listed
def zero_size() -> ModelProto:
    return parse(
        """g (float[N,2] x) => (float[N,2] y) {
            [join] c = Concat <axis = 1> (x, nothing)
            [fc] y = MatMul (c, w)
        }""",
        w=weight(2, 2),
        nothing=np.zeros((1, 0), np.float32),
    )


@listed
def dead_channel() -> ModelProto:
    """One output channel has no weights at all, another only denormal ones."""
    w = weight(3, 2, 1, 1)
    w[1], w[2] = 0, 1e-41
    return parse(
        "g (float[N,2,4,4] x) => (float[N,3,4,4] y) { [conv] y = Conv (x, w, b) }",
        w=w,
        b=np.float32([1, 2, 3]),
    )


@listed
def tiny_weight_big_bias() -> ModelProto:
    """Weights whose scale times that of the activation is too fine for the bias in 32 bits."""
    w = weight(2, 3, 1, 1)
    w *= np.float32(7.8e-10 * 127) / np.abs(w).max()
    return parse(
        "g (float[N,3,4,4] x) => (float[N,2,4,4] y) { [conv] y = Conv (x, w, b) }",
        w=w,
        b=np.float32([5.0, -4.5]),
    )


@listed
def constants_in_branches() -> ModelProto:
    """The weights are Constant nodes inside the branches of an If."""
    return parse(f"""g (float[N,8] x, bool c) => (float[N,8] y) {{
            [choice] y = If (c) <
                then_branch = t () => (float[N,8] r) {{
                    w0 = Constant <value = {literal(weight(8, 8))}> ()
                    [inner1] a = MatMul (x, w0)
                    [inner2] r = Relu (a) }},
                else_branch = e () => (float[N,8] s) {{
                    w1 = Constant <value = {literal(weight(8, 8, seed=1))}> ()
                    [inner3] t1 = Transpose <perm = [1,0]> (w1)
                    [inner4] s = MatMul (x, t1) }}>
        }}""")


@listed
def constants_in_loop() -> ModelProto:
    """The weight is a Constant node inside the body of a Loop."""
    return parse(f"""g (float[N,8] x) => (float[N,8] y) {{
            three = Constant <value = int64 {{3}}> ()
            [steps] y = Loop (three, , x) <body = b (int64 i, bool go, float[N,8] v) => (bool on, float[N,8] z) {{
                on = Identity (go)
                w = Constant <value = {literal(weight(8, 8))}> ()
                [inner1] m = MatMul (v, w)
                [inner2] z = Tanh (m) }}>
        }}""")  # noqa: E501


def in_a_branch(model: ModelProto) -> ModelProto:
    """Return a copy whose nodes and constants stand in a branch of an If."""
    copy = ModelProto()
    copy.CopyFrom(model)
    graph = copy.graph
    outputs = [value.name for value in graph.output]
    # Names are unique in a graph and its bodies, of which there may be some already.
    graphs = sum(1 for _ in all_graphs(graph))
    condition = f"condition_{graphs}"
    inner = {name: f"{name}_in_{graphs}" for name in outputs}
    for node in graph.node:
        rename_entries(node.input, inner)
        rename_entries(node.output, inner)
    results = [helper.make_empty_tensor_value_info(name) for name in inner.values()]
    zeros = [
        helper.make_node("Constant", [], [name], value_float=0.0)
        for name in inner.values()
    ]
    branch = helper.make_node(
        "If",
        [condition],
        outputs,
        then_branch=helper.make_graph(
            graph.node, "then", [], results, graph.initializer
        ),
        else_branch=helper.make_graph(zeros, "else", [], results),
    )
    del graph.initializer[:], graph.node[:], graph.value_info[:]
    graph.initializer.append(numpy_helper.from_array(np.bool_(True), condition))
    graph.node.append(branch)
    return copy


def in_constant_nodes(model: ModelProto) -> ModelProto:
    """Return a copy whose initializers are Constant nodes, as some exporters write them."""
    copy = ModelProto()
    copy.CopyFrom(model)
    nodes = [
        helper.make_node("Constant", [], [tensor.name], value=tensor)
        for tensor in model.graph.initializer
    ]
    del copy.graph.initializer[:], copy.graph.node[:]
    copy.graph.node.extend([*nodes, *model.graph.node])
    return copy


def literal(array: Array) -> str:
    """A float array as ONNX text writes it."""
    sizes = ",".join(map(str, array.shape))
    return (
        f"float[{sizes}]"
        f" {{{', '.join(repr(float(value)) for value in array.reshape(-1))}}}"
    )


@listed
def half_precision() -> ModelProto:
    return parse(
        "g (float16[N,4] x) => (float16[N,3] y) { [fc] h = MatMul (x, w) [relu] y ="
        " Relu (h) }",
        w=weight(4, 3).astype(np.float16),
    )


@listed
def only_integers() -> ModelProto:
    return parse("g (int64[4] a, int64[4] b) => (int64[4] y) { [sum] y = Add (a, b) }")


@listed
def batch_norm_net() -> ModelProto:
    """Conv, BatchNormalization, Relu and a Dropout, as a training framework writes them."""
    return parse(
        """g (float[N,3,8,8] x) => (float[N,4,8,8] y) {
            [conv] c = Conv <pads = [1,1,1,1]> (x, w)
            [norm] n = BatchNormalization (c, gamma, beta, mean, variance)
            [relu] r = Relu (n)
            [drop] y = Dropout (r)
        }""",
        w=weight(4, 3, 3, 3),
        **norm_parameters(4),
    )


def norm_parameters(channels: int) -> Feeds:
    """gamma, beta, mean and variance of a BatchNormalization.

    One variance is so small that epsilon matters.
    """
    variance = np.random.default_rng(1).uniform(0.5, 2, channels).astype(np.float32)
    variance[0] = 1e-5
    gamma, beta, mean = (normal(channels, seed=i) for i in (1, 2, 3))
    return {"gamma": gamma, "beta": beta, "mean": mean, "variance": variance}


def conv_net(depth: int = 4) -> ModelProto:
    """Convolutions with random weights, each followed by Relu."""
    layers = "\n".join(
        f"c{i} = Conv <pads = [1,1,1,1]> (r{i}, w{i}, b{i}) r{i + 1} = Relu (c{i})"
        for i in range(depth)
    )
    shapes = [(8, 3 if i == 0 else 8, 3, 3) for i in range(depth)]
    return parse(
        f"""g (float[N,3,12,12] x) => (float[N,8,12,12] y) {{
            r0 = Identity (x)
            {layers}
            y = Conv <pads = [1,1,1,1]> (r{depth}, last, bias)
        }}""",
        **{f"w{i}": 1.6 * weight(*shape, seed=i) for i, shape in enumerate(shapes)},
        **{f"b{i}": normal(8, seed=i, scale=0.1) for i in range(depth)},
        last=weight(8, 8, 3, 3, seed=99),
        bias=normal(8, seed=99, scale=0.1),
    )


def depthwise_layers() -> ModelProto:
    """Five depthwise 3x3 convolutions with Relu, which 8 bits are forecast to refuse on stx."""
    layers = "".join(
        f"""a{place} = Conv (r{place}, u)
        b{place} = Conv <group = 8, pads = [1, 1, 1, 1]> (a{place}, d)
        r{place + 1} = Relu (b{place})
        """
        for place in range(5)
    )
    return parse(
        f"""g (float[1,3,8,8] x) => (float[1,4] y) {{ r0 = Conv (x, w)
        {layers} p = GlobalAveragePool (r5) f = Flatten (p) y = Gemm (f, k) }}""",
        w=weight(8, 3, 1, 1),
        u=weight(8, 8, 1, 1),
        d=weight(8, 1, 3, 3),
        k=weight(8, 4),
    )


def canonical(model: ModelProto) -> bytes:
    """The bytes of a model, equal for equal models."""
    return model.SerializeToString(deterministic=True)


def inferred(model: ModelProto) -> Graph:
    """The graph of a model with known shapes, as passes get it."""
    graph = Graph.of(model)
    graph.infer()
    return graph
