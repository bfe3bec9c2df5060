"""Structural mutations of ONNX models: a seed makes a malformed or hostile file of a sound one."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from onnx import (
    AttributeProto,
    GraphProto,
    ModelProto,
    NodeProto,
    TensorProto,
    ValueInfoProto,
    helper,
    numpy_helper,
)

Mutation = Callable[[ModelProto, random.Random], None]

MUTATIONS: list[Mutation] = []

#: Numbers at the edges of the types that fields of a model have. None makes a tensor of 50 MB to 1
#: GB, as real models have: a run on two of these takes more than a gigabyte in honest work.
NUMBERS = (
    -(2**63),
    -(2**31),
    -2,
    -1,
    0,
    1,
    2,
    3,
    7,
    255,
    65536,
    2**30,
    2**31,
    2**40,
    2**63 - 1,
)
NAMES = (
    "",
    "x",
    "y",
    "w",
    "no such name",
    "a\nb",
    "\x1b[31mred\x1b[0m",
    "\x1b]0;title\x07",
    "\u202egnp.exe",
    "é" * 40,
)
OPERATORS = [
    "Add",
    "Cast",
    "Clip",
    "Concat",
    "ConstantOfShape",
    "Conv",
    "ConvTranspose",
    "Div",
    "Einsum",
    "Expand",
    "Flatten",
    "Gather",
    "GatherND",
    "Gemm",
    "Identity",
    "If",
    "LSTM",
    "LayerNormalization",
    "Loop",
    "MatMul",
    "MaxPool",
    "Mul",
    "NonZero",
    "OneHot",
    "Pad",
    "QuantizeLinear",
    "DequantizeLinear",
    "Range",
    "ReduceMean",
    "Relu",
    "Reshape",
    "Resize",
    "Scan",
    "Shape",
    "Size",
    "Slice",
    "Softmax",
    "Split",
    "SplitToSequence",
    "Squeeze",
    "Sum",
    "Tile",
    "TopK",
    "Transpose",
    "Unsqueeze",
    "Where",
    "NoSuchOperator",
]
DOMAINS = (
    "",
    "ai.onnx",
    "com.microsoft",
    "com.amd.quark",
    "ai.onnx.ml",
    "ai.onnx.contrib",
    "my.own",
    "\x00",
)
TYPES = (*range(-1, 28), 99, 2**31 - 1)
SIZES = (1, 2, 3, 4, 7, 64, 2**16)
HUGE = 2**30


def mutation(change: Mutation) -> Mutation:
    MUTATIONS.append(change)
    return change


def mutant(model: ModelProto, seed: int) -> tuple[bytes, list[str]]:
    """A damaged copy of a model as the bytes of a file, and the names of the mutations."""
    choice = random.Random(seed)
    copy = ModelProto()
    copy.CopyFrom(model)
    done = list[str]()
    for _ in range(choice.choice((1, 1, 1, 2, 3))):
        change = choice.choice(MUTATIONS)
        try:
            change(copy, choice)
        except Exception:
            # there is nothing in the model to change, or an earlier mutation is in the way
            continue
        done.append(change.__name__)
    data = copy.SerializeToString()
    if choice.random() < 0.15:
        data = _flipped(data, choice)
        done.append("bytes")
    return data, done


def _flipped(data: bytes, choice: random.Random) -> bytes:
    """Bytes changed, cut off, left out or added."""
    found = bytearray(data)
    kind = choice.randrange(4)
    if kind == 0:
        for _ in range(choice.randint(1, 8)):
            found[choice.randrange(len(found))] = choice.randrange(256)
    elif kind == 1:
        del found[choice.randrange(len(found)) :]
    elif kind == 2:
        start = choice.randrange(len(found))
        del found[start : start + choice.randint(1, 16)]
    else:
        start = choice.randrange(len(found))
        found[start:start] = choice.randbytes(choice.randint(1, 16))
    return bytes(found)


# What is there to change


def graphs(graph: GraphProto) -> Iterator[GraphProto]:
    yield graph
    for node in graph.node:
        for attribute in node.attribute:
            for body in ([attribute.g] if attribute.HasField("g") else []) + list(
                attribute.graphs
            ):
                yield from graphs(body)


def any_graph(model: ModelProto, choice: random.Random) -> GraphProto:
    return choice.choice(list(graphs(model.graph)))


def any_node(model: ModelProto, choice: random.Random) -> NodeProto:
    return choice.choice([node for graph in graphs(model.graph) for node in graph.node])


def any_attribute(model: ModelProto, choice: random.Random) -> AttributeProto:
    nodes = [node for graph in graphs(model.graph) for node in graph.node]
    return choice.choice([attribute for node in nodes for attribute in node.attribute])


def any_tensor(model: ModelProto, choice: random.Random) -> TensorProto:
    return choice.choice(
        [tensor for graph in graphs(model.graph) for tensor in graph.initializer]
    )


def any_value(model: ModelProto, choice: random.Random) -> ValueInfoProto:
    found = [
        v
        for graph in graphs(model.graph)
        for v in (*graph.input, *graph.output, *graph.value_info)
    ]
    return choice.choice(found)


def any_name(model: ModelProto, choice: random.Random) -> str:
    names = [
        name
        for graph in graphs(model.graph)
        for node in graph.node
        for name in (*node.input, *node.output)
    ]
    return choice.choice([*names, *NAMES])


# Nodes and edges


@mutation
def drop_node(model: ModelProto, choice: random.Random) -> None:
    graph = any_graph(model, choice)
    del graph.node[choice.randrange(len(graph.node))]


@mutation
def repeat_node(model: ModelProto, choice: random.Random) -> None:
    graph = any_graph(model, choice)
    graph.node.append(choice.choice(graph.node))


@mutation
def shuffle_nodes(model: ModelProto, choice: random.Random) -> None:
    graph = any_graph(model, choice)
    nodes = list(graph.node)
    choice.shuffle(nodes)
    del graph.node[:]
    graph.node.extend(nodes)


@mutation
def rename_node(model: ModelProto, choice: random.Random) -> None:
    any_node(model, choice).name = choice.choice(NAMES)


@mutation
def change_operator(model: ModelProto, choice: random.Random) -> None:
    any_node(model, choice).op_type = choice.choice([*OPERATORS, ""])


@mutation
def change_domain(model: ModelProto, choice: random.Random) -> None:
    any_node(model, choice).domain = choice.choice(DOMAINS)


@mutation
def rewire(model: ModelProto, choice: random.Random) -> None:
    node = any_node(model, choice)
    node.input[choice.randrange(len(node.input))] = any_name(model, choice)


@mutation
def rename_result(model: ModelProto, choice: random.Random) -> None:
    node = any_node(model, choice)
    node.output[choice.randrange(len(node.output))] = any_name(model, choice)


@mutation
def make_cycle(model: ModelProto, choice: random.Random) -> None:
    node = any_node(model, choice)
    node.input[choice.randrange(len(node.input))] = choice.choice(node.output)


@mutation
def omit_input(model: ModelProto, choice: random.Random) -> None:
    node = any_node(model, choice)
    place = choice.randrange(len(node.input))
    if choice.random() < 0.5:
        node.input[place] = ""
    else:
        del node.input[place]


@mutation
def omit_output(model: ModelProto, choice: random.Random) -> None:
    node = any_node(model, choice)
    place = choice.randrange(len(node.output))
    if choice.random() < 0.5:
        node.output[place] = ""
    else:
        del node.output[place]


@mutation
def more_inputs(model: ModelProto, choice: random.Random) -> None:
    any_node(model, choice).input.extend(
        [any_name(model, choice)] * choice.randint(1, 4)
    )


@mutation
def rename_everywhere(model: ModelProto, choice: random.Random) -> None:
    """A tensor gets another name wherever it stands in a graph."""
    graph, old, new = model.graph, any_name(model, choice), choice.choice(NAMES)
    for node in graph.node:
        for names in (node.input, node.output):
            for place, name in enumerate(names):
                names[place] = new if name == old else name
    for entry in (*graph.input, *graph.output, *graph.initializer):
        entry.name = new if entry.name == old else entry.name


# Attributes


@mutation
def drop_attribute(model: ModelProto, choice: random.Random) -> None:
    nodes = [
        node for graph in graphs(model.graph) for node in graph.node if node.attribute
    ]
    node = choice.choice(nodes)
    del node.attribute[choice.randrange(len(node.attribute))]


@mutation
def repeat_attribute(model: ModelProto, choice: random.Random) -> None:
    nodes = [
        node for graph in graphs(model.graph) for node in graph.node if node.attribute
    ]
    node = choice.choice(nodes)
    node.attribute.append(choice.choice(node.attribute))


@mutation
def attribute_of_another_type(model: ModelProto, choice: random.Random) -> None:
    attribute = any_attribute(model, choice)
    name = attribute.name
    attribute.CopyFrom(_attribute(name, choice))


@mutation
def attribute_type_alone(model: ModelProto, choice: random.Random) -> None:
    any_attribute(model, choice).type = choice.choice(range(15))


@mutation
def attribute_number(model: ModelProto, choice: random.Random) -> None:
    attribute = any_attribute(model, choice)
    if attribute.ints:
        attribute.ints[choice.randrange(len(attribute.ints))] = choice.choice(NUMBERS)
    elif attribute.type == AttributeProto.FLOAT:
        attribute.f = choice.choice((float("nan"), float("inf"), 0.0, -1.0, 3e38))
    else:
        attribute.i = choice.choice(NUMBERS)


@mutation
def attribute_length(model: ModelProto, choice: random.Random) -> None:
    attribute = any_attribute(model, choice)
    if choice.random() < 0.5:
        del attribute.ints[-1:]
    else:
        attribute.ints.extend([choice.choice(NUMBERS)] * choice.choice((1, 2, 5)))


@mutation
def strange_attribute(model: ModelProto, choice: random.Random) -> None:
    name = choice.choice(
        (
            "to",
            "axis",
            "axes",
            "value",
            "perm",
            "pads",
            "body",
            "group",
            "strides",
            "shape",
            "foo",
            "",
        )
    )
    any_node(model, choice).attribute.append(_attribute(name, choice))


def _attribute(name: str, choice: random.Random) -> AttributeProto:
    number = choice.choice(NUMBERS)
    values: list[Any] = [
        number,
        [number],
        [1, 2],
        1.5,
        [1.5, float("nan")],
        "text",
        b"\xff\xfe",
        ["a", "b"],
        numpy_helper.from_array(np.zeros((2, 2), np.float32)),
        helper.make_graph([], "empty", [], []),
        helper.make_sparse_tensor(
            numpy_helper.from_array(np.float32([1]), "values"),
            numpy_helper.from_array(np.int64([0]), "indices"),
            [HUGE],
        ),
    ]
    attribute = helper.make_attribute("name", choice.choice(values))
    attribute.name = name
    return attribute


# Tensors


@mutation
def tensor_size(model: ModelProto, choice: random.Random) -> None:
    tensor = any_tensor(model, choice)
    if tensor.dims and choice.random() < 0.7:
        tensor.dims[choice.randrange(len(tensor.dims))] = choice.choice(NUMBERS)
    else:
        tensor.dims.append(choice.choice(NUMBERS))


@mutation
def tensor_of_rank_0(model: ModelProto, choice: random.Random) -> None:
    name = any_tensor(model, choice).name
    for tensor in model.graph.initializer:
        if tensor.name == name:
            tensor.CopyFrom(
                numpy_helper.from_array(np.float32(choice.choice((0, 1, np.nan))), name)
            )


@mutation
def tensor_of_another_shape(model: ModelProto, choice: random.Random) -> None:
    tensor = any_tensor(model, choice)
    shape = [choice.choice((0, 1, 2, 3, 5)) for _ in range(choice.randrange(6))]
    dtype = choice.choice(
        (np.float32, np.float64, np.float16, np.int64, np.int8, np.uint8, np.bool_)
    )
    tensor.CopyFrom(numpy_helper.from_array(np.ones(shape, dtype), tensor.name))


@mutation
def tensor_values(model: ModelProto, choice: random.Random) -> None:
    tensor = any_tensor(model, choice)
    array = numpy_helper.to_array(tensor).copy()
    array.flat[choice.randrange(array.size)] = choice.choice(
        (np.nan, np.inf, -np.inf, 3e38) if array.dtype.kind == "f" else (-1, 0, 1000)
    )
    tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))


@mutation
def tensor_type(model: ModelProto, choice: random.Random) -> None:
    any_tensor(model, choice).data_type = choice.choice(TYPES)


@mutation
def tensor_bytes(model: ModelProto, choice: random.Random) -> None:
    tensor = any_tensor(model, choice)
    data = tensor.raw_data
    tensor.raw_data = choice.choice(
        (b"", data[:-1], data[: len(data) // 2], data + b"\0", data * 2, data[:3])
    )


@mutation
def tensor_fields(model: ModelProto, choice: random.Random) -> None:
    tensor = any_tensor(model, choice)
    if choice.random() < 0.5:
        tensor.ClearField("raw_data")
    field = choice.choice(
        ("float_data", "int32_data", "int64_data", "double_data", "uint64_data")
    )
    getattr(tensor, field).extend([1] * choice.choice((0, 1, 5)))
    if choice.random() < 0.2:
        tensor.string_data.extend([b"a"])


@mutation
def tensor_elsewhere(model: ModelProto, choice: random.Random) -> None:
    tensor = any_tensor(model, choice)
    tensor.data_location = choice.choice((0, 1, 1, 1))
    for key in choice.sample(
        ("location", "offset", "length", "checksum", "foo"), choice.randrange(5)
    ):
        entry = tensor.external_data.add()
        entry.key = key
        entry.value = choice.choice(
            (
                "",
                ".",
                "..",
                "m.onnx",
                "data.bin",
                "../data.bin",
                "/etc/passwd",
                "/dev/zero",
                "0",
                "-1",
                "16",
                str(2**40),
                "x",
            )
        )
    if choice.random() < 0.7:
        tensor.ClearField("raw_data")


@mutation
def repeat_tensor(model: ModelProto, choice: random.Random) -> None:
    model.graph.initializer.append(any_tensor(model, choice))


@mutation
def drop_tensor(model: ModelProto, choice: random.Random) -> None:
    graph = any_graph(model, choice)
    del graph.initializer[choice.randrange(len(graph.initializer))]


@mutation
def rename_tensor(model: ModelProto, choice: random.Random) -> None:
    any_tensor(model, choice).name = any_name(model, choice)


@mutation
def sparse_tensor(model: ModelProto, choice: random.Random) -> None:
    """A constant becomes a sparse one, whose parts need not fit together."""
    graph = model.graph
    place = choice.randrange(len(graph.initializer))
    name, dims = graph.initializer[place].name, list(graph.initializer[place].dims)
    del graph.initializer[place]
    indices = numpy_helper.from_array(
        np.int64(choice.choice(([0], [-1], [2**40], [[0, 0]], [0, 1]))), "indices"
    )
    sparse = graph.sparse_initializer.add(
        dims=choice.choice((dims, [], [HUGE], [HUGE, HUGE], [-1]))
    )
    sparse.values.CopyFrom(
        numpy_helper.from_array(np.ones(choice.choice((0, 1, 2)), np.float32), name)
    )
    sparse.indices.CopyFrom(indices)


# The interface


@mutation
def value_size(model: ModelProto, choice: random.Random) -> None:
    dims = any_value(model, choice).type.tensor_type.shape.dim
    dim = dims[choice.randrange(len(dims))]
    if choice.random() < 0.3:
        dim.dim_param = choice.choice(("N", "", "a\nb", "x" * 3000))
    else:
        dim.dim_value = choice.choice((*NUMBERS, *SIZES))


@mutation
def value_rank(model: ModelProto, choice: random.Random) -> None:
    shape = any_value(model, choice).type.tensor_type.shape
    if choice.random() < 0.5:
        del shape.dim[-1:]
    else:
        shape.dim.add().dim_value = choice.choice(SIZES)


@mutation
def value_type(model: ModelProto, choice: random.Random) -> None:
    any_value(model, choice).type.tensor_type.elem_type = choice.choice(TYPES)


@mutation
def value_of_another_kind(model: ModelProto, choice: random.Random) -> None:
    value = any_value(model, choice)
    kind = choice.randrange(5)
    value.ClearField("type")
    if kind == 1:
        value.type.CopyFrom(
            helper.make_sequence_type_proto(helper.make_tensor_type_proto(1, [1]))
        )
    elif kind == 2:
        value.type.CopyFrom(
            helper.make_optional_type_proto(helper.make_tensor_type_proto(1, [1]))
        )
    elif kind == 3:
        value.type.sparse_tensor_type.elem_type = 1
    elif kind == 4:
        value.type.map_type.key_type = choice.choice(TYPES)


@mutation
def value_name(model: ModelProto, choice: random.Random) -> None:
    any_value(model, choice).name = any_name(model, choice)


@mutation
def drop_value(model: ModelProto, choice: random.Random) -> None:
    graph = any_graph(model, choice)
    values = choice.choice((graph.input, graph.output))
    del values[choice.randrange(len(values))]


@mutation
def repeat_value(model: ModelProto, choice: random.Random) -> None:
    graph = any_graph(model, choice)
    values = choice.choice((graph.input, graph.output, graph.value_info))
    values.append(any_value(model, choice))


@mutation
def wrong_value_info(model: ModelProto, choice: random.Random) -> None:
    shape = [choice.choice((*SIZES, "N", None)) for _ in range(choice.randrange(5))]
    kind = choice.choice((1, 2, 6, 7, 10, 16))
    model.graph.value_info.append(
        helper.make_tensor_value_info(any_name(model, choice), kind, shape)
    )


# The model


@mutation
def opset_version(model: ModelProto, choice: random.Random) -> None:
    choice.choice(model.opset_import).version = choice.choice(
        (*NUMBERS, 5, 9, 13, 21, 25, 28, 29)
    )


@mutation
def opset_domain(model: ModelProto, choice: random.Random) -> None:
    if choice.random() < 0.4:
        choice.choice(model.opset_import).domain = choice.choice(DOMAINS)
    else:
        model.opset_import.append(
            helper.make_opsetid(
                choice.choice(DOMAINS), choice.choice((1, 11, 17, 21, 2**40))
            )
        )


@mutation
def no_opset(model: ModelProto, choice: random.Random) -> None:
    del model.opset_import[choice.randrange(len(model.opset_import)) :]


@mutation
def ir_version(model: ModelProto, choice: random.Random) -> None:
    model.ir_version = choice.choice((*NUMBERS, 3, 4, 10, 13, 14))


@mutation
def graph_name(model: ModelProto, choice: random.Random) -> None:
    any_graph(model, choice).name = choice.choice(NAMES)


@mutation
def metadata(model: ModelProto, choice: random.Random) -> None:
    for _ in range(2):
        entry = model.metadata_props.add()
        entry.key, entry.value = choice.choice(NAMES), choice.choice(NAMES)


@mutation
def function(model: ModelProto, choice: random.Random) -> None:
    """A node calls a function of the model, which may call itself or lack what it needs."""
    node = any_node(model, choice)
    body = [] if choice.random() < 0.3 else [helper.make_node("Relu", ["a"], ["b"])]
    if choice.random() < 0.3:
        body = [helper.make_node("Own", ["a"], ["b"], domain="fuzz")]
    opsets = (
        [helper.make_opsetid("", choice.choice((17, 2**31, 0)))]
        if choice.random() < 0.7
        else []
    )
    model.functions.append(
        helper.make_function("fuzz", "Own", ["a"], ["b"], body, opsets)
    )
    node.op_type, node.domain = "Own", "fuzz"
    if choice.random() < 0.7:
        model.opset_import.append(helper.make_opsetid("fuzz", 1))


# Subgraphs


@mutation
def wrong_body(model: ModelProto, choice: random.Random) -> None:
    node = any_node(model, choice)
    bodies = {
        "If": ("then_branch", "else_branch"),
        "Loop": ("body",),
        "Scan": ("body",),
    }
    node.op_type = choice.choice(list(bodies))
    body = GraphProto()
    body.CopyFrom(model.graph)
    if choice.random() < 0.5:
        del body.input[:]
    if choice.random() < 0.3:
        del body.output[:]
    del node.attribute[:]
    for name in bodies[node.op_type]:
        if choice.random() < 0.9:
            node.attribute.append(helper.make_attribute(name, body))


@mutation
def deep_bodies(model: ModelProto, choice: random.Random) -> None:
    """Bodies inside bodies; protobuf parses a hundred levels of messages."""
    output = helper.make_tensor_value_info("o", 1, [1])
    body = helper.make_graph(
        [helper.make_node("Identity", ["x"], ["o"])], "deep", [], [output]
    )
    for _ in range(choice.choice((3, 10, 22, 30))):
        node = (
            helper.make_node("If", ["x"], ["o"], then_branch=body, else_branch=body)
            if choice.random() < 0.1
            else None
        )
        node = node or helper.make_node("If", ["x"], ["o"], then_branch=body)
        body = helper.make_graph([node], "deep", [], [output])
    model.graph.node.extend(body.node)


# Little that becomes much


@mutation
def expansion(model: ModelProto, choice: random.Random) -> None:
    """A few bytes that stand for gigabytes, between a tensor and the node that reads it."""
    node = choice.choice([node for node in model.graph.node if any(node.input)])
    place = choice.choice([place for place, name in enumerate(node.input) if name])
    x, big = node.input[place], choice.choice((HUGE, 4 * HUGE, 2**40, 2**62))

    def constant(name: str, value: Any, dtype: Any = np.int64) -> str:
        model.graph.initializer.append(
            numpy_helper.from_array(np.array(value, dtype), name)
        )
        return name

    shape = constant("fuzz_shape", [big])
    made = {
        "ConstantOfShape": lambda: [
            helper.make_node("ConstantOfShape", [shape], ["fuzz"])
        ],
        "Expand": lambda: [
            helper.make_node(
                "Expand", [constant("fuzz_one", [1], np.float32), shape], ["fuzz"]
            )
        ],
        "Tile": lambda: [
            helper.make_node(
                "Tile", [constant("fuzz_one", [1], np.float32), shape], ["fuzz"]
            )
        ],
        "Range": lambda: [
            helper.make_node(
                "Range",
                [constant(f"fuzz_{n}", v) for n, v in (("s", 0), ("e", big), ("d", 1))],
                ["fuzz"],
            )
        ],
        "OneHot": lambda: [
            helper.make_node(
                "OneHot",
                [
                    constant("fuzz_i", [0, 1]),
                    constant("fuzz_depth", big),
                    constant("fuzz_v", [0, 1], np.float32),
                ],
                ["fuzz"],
            )
        ],
        "of an input": lambda: [
            helper.make_node("Shape", [x], ["fuzz_x"]),
            helper.make_node("Mul", ["fuzz_x", shape], ["fuzz_much"]),
            helper.make_node("ConstantOfShape", ["fuzz_much"], ["fuzz"]),
        ],
        "Pad": lambda: [
            helper.make_node(
                "Pad", [x, constant("fuzz_pads", [0, 0, 0, 0, 0, 0, 0, big])], ["fuzz"]
            )
        ],
        "Resize": lambda: [
            helper.make_node(
                "Resize",
                [x, "", constant("fuzz_scales", [1, 1, 2**15, 2**15], np.float32)],
                ["fuzz"],
            )
        ],
    }
    nodes = made[choice.choice(sorted(made))]()
    at = list(model.graph.node).index(node)
    rest = list(model.graph.node)[at:]
    del model.graph.node[at:]
    model.graph.node.extend(nodes)
    if choice.random() < 0.5:
        nodes.append(
            helper.make_node("ReduceMax", ["fuzz"], ["fuzz_small"], keepdims=0)
        )
        model.graph.node.append(nodes[-1])
    rest[0].input[place] = nodes[-1].output[0]
    model.graph.node.extend(rest)
