"""write_attributes: the defaults of ONNX, and pads that compute what auto_pad did, on every size."""  # noqa: E501

from __future__ import annotations

import numpy as np
import onnx

from quark_onnx import QConfig, quantize
from quark_onnx.graph import Graph
from quark_onnx.passes import write_attributes
from tests.cases import loop_over
from tests.models import parse, run, weight

NAMES = ("kernel_shape", "strides", "pads", "dilations", "group", "auto_pad")


def written(call: str, size: int = 9, **constants: np.ndarray) -> tuple[Graph, int]:
    """The graph after the pass, checked to compute what it did, and how many nodes were changed."""
    model = parse(
        f"g (float[1,4,{size},{size}] x) => (float[1,C,H,W] y) {{ y = {call} }}",
        **constants,
    )
    graph = Graph.of(model)
    graph.infer()
    count = write_attributes(graph)
    sample = {
        "x": np.random.default_rng(0).normal(size=(1, 4, size, size)).astype(np.float32)
    }
    np.testing.assert_array_equal(
        run(graph.to_model(), sample)[0], run(model, sample)[0]
    )
    return graph, count


def attributes(graph: Graph) -> dict[str, object]:
    [node] = graph.nodes
    return {
        name: value for name in NAMES if (value := node.attribute(name)) is not None
    }


def test_a_bare_convolution() -> None:
    graph, count = written("Conv (x, w)", w=weight(5, 4, 3, 3))
    expected = {
        "kernel_shape": [3, 3],
        "strides": [1, 1],
        "pads": [0] * 4,
        "dilations": [1, 1],
        "group": 1,
    }
    assert (attributes(graph), count) == (expected, 1)
    assert write_attributes(graph) == 0


def test_what_is_there_stays() -> None:
    graph, _ = written(
        "Conv <group = 2, pads = [1,0,1,0], strides = [2,1]> (x, w)",
        w=weight(6, 2, 3, 3),
    )
    assert attributes(graph)["pads"] == [1, 0, 1, 0] and attributes(graph)[
        "strides"
    ] == [2, 1]
    assert attributes(graph)["group"] == 2


@loop_over("size", [7, 8, 9, 10])
@loop_over("mode", ["SAME_UPPER", "SAME_LOWER", "VALID"])
@loop_over("window", ["strides = [2,2]", "strides = [1,2]", ""])
@loop_over("kind", ["Conv", "MaxPool", "AveragePool"])
def test_automatic_pads(kind: str, window: str, mode: str, size: int) -> None:
    settings = ", ".join([f'auto_pad = "{mode}"', *([window] if window else [])])
    call = (
        f"Conv <{settings}> (x, w)"
        if kind == "Conv"
        else f"{kind} <kernel_shape = [3,2], {settings}> (x)"
    )
    graph, count = written(
        call, size, **({"w": weight(5, 4, 3, 2)} if kind == "Conv" else {})
    )
    assert (
        count == 1
        and "auto_pad" not in attributes(graph)
        and len(list(graph.nodes[0].attribute("pads"))) == 4
    )


def test_automatic_pads_of_unknown_sizes_stay() -> None:
    model = parse(
        "g (float[N,4,H,W] x) => (float[N,C,H2,W2] y) { y = Conv <auto_pad ="
        ' "SAME_UPPER"> (x, w) }',
        w=weight(5, 4, 3, 3),
    )
    graph = Graph.of(model)
    write_attributes(graph)
    assert attributes(graph)["auto_pad"] == "SAME_UPPER" and "pads" not in attributes(
        graph
    )


def test_a_transposed_convolution() -> None:
    graph, _ = written("ConvTranspose <strides = [2,2]> (x, w)", w=weight(4, 5, 3, 3))
    assert attributes(graph)["pads"] == [0] * 4


@loop_over("taps", [1, 2, 3, 4, 5])
@loop_over("stride", [1, 2, 3])
@loop_over(
    "mode",
    [
        'auto_pad = "SAME_UPPER"',
        'auto_pad = "SAME_LOWER"',
        'auto_pad = "VALID"',
        "sized",
    ],
)
def test_pads_of_a_transposed_convolution(mode: str, stride: int, taps: int) -> None:
    output = 9 * stride - (taps < stride) * (stride - taps)
    settings = f"output_shape = [{output},{output}]" if mode == "sized" else mode
    graph, _ = written(
        f"ConvTranspose <{settings}, strides = [{stride},{stride}]> (x, w)",
        w=weight(4, 5, taps, taps),
    )
    assert not {"auto_pad", "output_shape"} & {
        each.name for each in graph.nodes[0].to_proto().attribute
    }
    assert len(list(graph.nodes[0].attribute("pads"))) == 4


def test_an_output_beyond_the_windows_stays_as_it_was_asked_for() -> None:
    graph, _ = written(
        "ConvTranspose <output_shape = [27,27], strides = [3,3]> (x, w)",
        w=weight(4, 5, 2, 2),
    )
    assert "pads" not in attributes(graph)


@loop_over("size", [7, 8, 9, 10])
@loop_over(
    "pads",
    ["pads = [0,0,0,0]", "pads = [1,0,0,1]", "pads = [1,1,1,1]", 'auto_pad = "VALID"'],
)
@loop_over("stride", [1, 2, 3, 4])
@loop_over("kind", ["MaxPool", "AveragePool"])
def test_pads_in_the_place_of_rounding_up(
    kind: str, stride: int, pads: str, size: int
) -> None:
    call = (
        f"{kind} <kernel_shape = [3,2], ceil_mode = 1, strides = [{stride},{stride}],"
        f" {pads}> (x)"
    )
    graph, count = written(call, size)
    shapes = (
        onnx.shape_inference.infer_shapes(graph.to_model())
        .graph.output[0]
        .type.tensor_type.shape.dim
    )
    sample = {"x": np.zeros((1, 4, size, size), np.float32)}
    assert count == 1 and "auto_pad" not in attributes(graph)
    assert graph.nodes[0].attribute("ceil_mode") == 0
    assert [each.dim_value for each in shapes] == list(
        run(graph.to_model(), sample)[0].shape
    )


@loop_over("size", [8, 9])
@loop_over("mode", ["SAME_UPPER", "SAME_LOWER"])
def test_automatic_pads_do_not_round_up(mode: str, size: int) -> None:
    call = (
        "AveragePool <kernel_shape = [3,2], strides = [2,2], ceil_mode = 1, auto_pad ="
        f' "{mode}"> (x)'
    )
    graph, _ = written(call, size)
    assert graph.nodes[0].attribute("ceil_mode") == 0 and "auto_pad" not in attributes(
        graph
    )


def test_what_counts_the_padding_rounds_up_as_before() -> None:
    call = (
        "AveragePool <kernel_shape = [3,3], ceil_mode = 1, strides = [2,2],"
        " count_include_pad = 1> (x)"
    )
    assert written(call, 8)[0].nodes[0].attribute("ceil_mode") == 1


def test_automatic_pads_stand_above_others() -> None:
    graph, _ = written(
        'MaxPool <kernel_shape = [3,3], auto_pad = "SAME_UPPER", pads = [0,0,0,0]> (x)'
    )
    assert attributes(graph)["pads"] == [1, 1, 1, 1] and "auto_pad" not in attributes(
        graph
    )


def test_models_for_a_target_have_them() -> None:
    model = parse(
        "g (float[1,4,9,9] x) => (float[1,5,7,7] y) { y = Conv (x, w) }",
        w=weight(5, 4, 3, 3),
    )
    data = [
        {"x": np.random.default_rng(seed).normal(size=(1, 4, 9, 9)).astype(np.float32)}
        for seed in range(3)
    ]
    for target, missing in (("", True), ("stx", False)):
        result = quantize(model, data, QConfig.of("A8W8").with_(target=target)).model
        [conv] = [node for node in result.graph.node if node.op_type == "Conv"]
        assert ("group" not in {each.name for each in conv.attribute}) == missing
