"""Each pass on the smallest model that shows it.

What it claims is checked by onnxruntime before and after.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
import pytest
from onnx import ModelProto, numpy_helper

from quark_onnx.common.registry import PASSES
from quark_onnx.graph import Graph
from quark_onnx.passes import (
    LEGALIZING,
    fold_batch_norm,
    fold_constants,
    padded_means_to_conv,
    raise_opset,
    remove_identity,
    sum_to_add,
    write_ranks,
)
from tests.cases import loop_over
from tests.models import (
    batch_norm_net,
    interface,
    kinds,
    norm_parameters,
    normal,
    old_ir,
    parse,
    residual,
    run,
    samples,
    weight,
)

Pass = Callable[[Graph], int]


def applied(single: Pass, model: ModelProto) -> tuple[int, ModelProto]:
    """The model after a pass, which must compute the same through the same interface."""
    graph = Graph.of(model)
    count = single(graph)
    graph.drop_unused()
    after = graph.to_model()
    onnx.checker.check_model(after, full_check=True)
    assert interface(after) == interface(model)
    for feeds in samples(model, 2):
        for expected, found in zip(run(model, feeds), run(after, feeds), strict=True):
            np.testing.assert_allclose(
                found,
                expected,
                rtol=1e-4,
                atol=1e-5 * max(1.0, np.abs(expected).max(initial=0)),
            )
    return count, after


# fold_batch_norm

NORM = "BatchNormalization {attributes} (h, gamma, beta, mean, variance)"
LAYERS = {
    "conv": ("float[N,3,4,4]", "[N,4,2,2]", "Conv (x, w)", (4, 3, 3, 3)),
    "conv 1d": ("float[N,3,4]", "[N,4,2]", "Conv (x, w)", (4, 3, 3)),
    "depthwise": (
        "float[N,4,4,4]",
        "[N,4,2,2]",
        "Conv <group = 4> (x, w)",
        (4, 1, 3, 3),
    ),
    "groups": ("float[N,6,4,4]", "[N,4,2,2]", "Conv <group = 2> (x, w)", (4, 3, 3, 3)),
    "transposed": ("float[N,3,4,4]", "[N,4,6,6]", "ConvTranspose (x, w)", (3, 4, 3, 3)),
    "transposed groups": (
        "float[N,6,4,4]",
        "[N,4,6,6]",
        "ConvTranspose <group = 2> (x, w)",
        (6, 2, 3, 3),
    ),
    "gemm": ("float[N,5]", "[N,4]", "Gemm (x, w)", (5, 4)),
    "gemm transposed": ("float[N,5]", "[N,4]", "Gemm <transB = 1> (x, w)", (4, 5)),
}


def normalized(
    layer: str, *, bias: bool, attributes: str = "", extra: str = "", outputs: str = ""
) -> ModelProto:
    x, y, call, shape = LAYERS[layer]
    call = call.replace("w)", "w, b)") if bias else call
    return parse(
        f"""g ({x} x) => (float{y} y{outputs}) {{
            [layer] h = {call}
            [norm] y = {NORM.format(attributes=attributes)}
            {extra}
        }}""",
        w=weight(*shape),
        **norm_parameters(4),
        **({"b": normal(4, seed=5)} if bias else {}),
    )


@loop_over("bias", {"plain": False, "bias": True})
@loop_over("attributes", {"default epsilon": "", "epsilon": "<epsilon = 0.1>"})
@loop_over("layer", tuple(LAYERS))
def test_batch_norm_is_folded(layer: str, attributes: str, bias: bool) -> None:
    count, after = applied(
        fold_batch_norm, normalized(layer, attributes=attributes, bias=bias)
    )
    assert (
        count == 1 and len(after.graph.node) == 1 and len(after.graph.initializer) == 2
    )


@pytest.mark.parametrize(
    ("attributes", "extra", "outputs"),
    [
        ("", "[other] z = Relu (h)", ", float[N,4,2,2] z"),
        ("", "", ", float[N,4,2,2] h"),
        ("", "[if] z = If (c) <then_branch = t () => (float[N,4,2,2] a) { a = Neg (h) }, "
         "else_branch = e () => (float[N,4,2,2] b) { b = Exp (y) }>", ", float[N,4,2,2] z"),
    ],
    ids=["read elsewhere", "graph output", "read in a subgraph"],
)  # fmt: skip
def test_a_result_that_is_needed_before_the_norm_prevents_folding(
    attributes: str, extra: str, outputs: str
) -> None:
    model = normalized(
        "conv", bias=False, attributes=attributes, extra=extra, outputs=outputs
    )
    if "(c)" in extra:
        model.graph.initializer.append(
            onnx.numpy_helper.from_array(np.bool_(True), "c")
        )
    assert applied(fold_batch_norm, model)[0] == 0


def test_batch_norm_in_training_mode_is_not_folded() -> None:
    model = normalized("conv", bias=False, attributes="<training_mode = 1>")
    model.graph.node[1].output.extend(["running_mean", "running_variance"])
    graph = Graph.of(model)
    assert fold_batch_norm(graph) == 0


@pytest.mark.parametrize("constant", ["w", "gamma", "variance"])
def test_computed_parameters_are_not_folded(constant: str) -> None:
    model = normalized("conv", bias=False)
    (tensor,) = (t for t in model.graph.initializer if t.name == constant)
    model.graph.initializer.remove(tensor)
    model.graph.input.append(
        onnx.helper.make_tensor_value_info(constant, 1, tensor.dims)
    )
    graph = Graph.of(model)
    assert fold_batch_norm(graph) == 0


def test_a_shared_weight_is_folded_into_a_copy() -> None:
    model = normalized(
        "conv",
        bias=False,
        extra="[other] z = Conv (x, w)",
        outputs=", float[N,4,2,2] z",
    )
    count, after = applied(fold_batch_norm, model)
    assert count == 1 and kinds(after) == ["Conv", "Conv"]


@pytest.mark.parametrize("attributes", ["<alpha = 0.5>", "<beta = 2.0>"])
def test_a_scaled_gemm_is_left_alone_or_folded_right(attributes: str) -> None:
    model = normalized("gemm", bias=True)
    name, value = attributes.strip("<>").split(" = ")
    model.graph.node[0].attribute.append(onnx.helper.make_attribute(name, float(value)))
    applied(fold_batch_norm, model)


# fold_constants


def test_constants_are_folded_through_chains() -> None:
    count, after = applied(
        fold_constants,
        parse(
            """g (float[N,4] x) => (float[N,2] y, int64[2] shape) {
                [value] a = Constant <value = int64[2] {4, 2}> ()
                [reshape] w = Reshape (v, a)
                [scalar] s = Constant <value_float = 2.0> ()
                [scale] u = Mul (w, s)
                [fc] y = MatMul (x, u)
                [ints] shape = Constant <value_ints = [1, 2]> ()
            }""",
            v=normal(8),
        ),
    )
    assert count == 5 and kinds(after) == ["MatMul"]
    assert sorted(t.name for t in after.graph.initializer) == ["shape", "u"]


def test_a_large_result_of_little_stays_an_operator() -> None:
    text = (
        "g (float[N,N] x) => (float[N,N] y) { [expand] e = Expand (one, size) [sum] y ="
        " Add (x, e) }"
    )
    large = parse(
        text, one=np.float32([[1]]), size=np.int64([600, 600])
    )  # 1.4 MB from 4 bytes
    small = parse(text, one=np.float32([[1]]), size=np.int64([10, 10]))
    assert kinds(applied(fold_constants, large)[1]) == ["Expand", "Add"]
    assert kinds(applied(fold_constants, small)[1]) == ["Add"]


def test_a_large_weight_behind_a_cast_is_folded() -> None:
    model = parse(
        "g (float[N,600] x) => (float[N,600] y) { [cast] w = Cast <to = 1> (half) [fc]"
        " y = MatMul (x, w) }",
        half=weight(600, 600).astype(np.float16),
    )
    assert kinds(applied(fold_constants, model)[1]) == ["MatMul"]


@pytest.mark.parametrize(
    "text",
    [
        "g (float[2] x) => (float[2] y) { r = RandomNormalLike (k) y = Add (x, r) }",
        (
            "g (float[2] x) => (float[2] y) { q = QuantizeLinear (k, s, z) d ="
            " DequantizeLinear (q, s, z) y = Add (x, d) }"
        ),
        (
            "g (float[2] x, bool c) => (float[2] y) { y = If (c) <then_branch = t () =>"
            " (float[2] a) { a = Neg (k) }, else_branch = e () => (float[2] b) { b ="
            " Exp (k) }> }"
        ),
    ],
    ids=["random", "quantized", "branch"],
)
def test_what_must_not_be_computed_once(text: str) -> None:
    model = parse(text, k=normal(2), s=np.float32(0.1), z=np.uint8(3))
    graph = Graph.of(model)
    assert fold_constants(graph) == 0
    assert [node.op_type for node in graph.nodes] == kinds(model)


def test_a_default_of_an_input_is_no_constant() -> None:
    model = parse(
        "g (float[2] x, float[2] k) => (float[2] y) { n = Neg (k) y = Add (x, n) }",
        k=normal(2),
    )
    graph = Graph.of(model)
    assert fold_constants(graph) == 0


def test_what_onnxruntime_cannot_compute_stays() -> None:
    model = parse("g (float[2] x) => (float[2] y) { r = Reshape (k, size) y = Add (x, r) }",
                  k=normal(3), size=np.int64([2]))  # fmt: skip
    graph = Graph.of(model)
    assert fold_constants(graph) == 0 and [node.op_type for node in graph.nodes] == [
        "Reshape",
        "Add",
    ]


# sum_to_add


@pytest.mark.parametrize(
    ("summands", "opset", "left"),
    [
        ("x, n", 17, "Add"),
        ("x, k", 8, "Add"),  # of another shape
        ("x, x", 17, "Add"),
        ("x", 17, "Sum"),
        ("x, n, k", 17, "Sum"),
        ("x, n", 7, "Sum"),
    ],
)
def test_sums_of_two(summands: str, opset: int, left: str) -> None:
    model = parse(
        f"g (float[N,2] x) => (float[N,2] y) {{ n = Neg (x) y = Sum ({summands}) }}",
        k=normal(2),
    )
    model.opset_import[0].version = opset
    assert kinds(applied(sum_to_add, model)[1])[-1] == left


# write_ranks


@pytest.mark.parametrize(
    ("text", "opset", "shape"),
    [
        ("y = PRelu (x, k)", 17, [1, 2, 1, 1]),
        ("y = PRelu (x, k)", 7, [2, 1, 1]),  # Max does not broadcast
        ("a = Max (x, k) y = Min (k, a)", 17, [1, 2, 1, 1]),
        ("a = Less (x, zero) y = Where (a, k, x)", 17, [1, 2, 1, 1]),
        ("a = PRelu (x, k) y = Mul (a, k)", 17, [2, 1, 1]),  # a product reads it, too
        ("a = Max (k, zero) y = PRelu (x, k)", 17, [2, 1, 1]),  # of two ranks
    ],
)
def test_constants_of_the_rank_of_an_image(
    text: str, opset: int, shape: list[int]
) -> None:
    constants = {"k": normal(2, 1, 1), "zero": np.float32(0)}
    model = parse(
        f"g (float[N,2,4,4] x) => (float[N,2,4,4] y) {{ {text} }}",
        opset=opset,
        **{name: value for name, value in constants.items() if name in text},
    )
    done, after = applied(write_ranks, model)
    (constant,) = (each for each in after.graph.initializer if each.name == "k")
    assert list(constant.dims) == shape and done == (len(shape) == 4)


# padded_means_to_conv

MEAN = "AveragePool <kernel_shape = [3,3], pads = [1,0,1,2]"


@pytest.mark.parametrize(
    ("text", "done"),
    [
        (f"y = {MEAN}, count_include_pad = 1> (x)", 1),
        (f"y = {MEAN}, count_include_pad = 1, strides = [2,1]> (x)", 1),
        (f"y = {MEAN}> (x)", 0),
        ("y = AveragePool <kernel_shape = [3,3], count_include_pad = 1> (x)", 0),
        (f"r = Relu (x) y = {MEAN}, count_include_pad = 1> (r)", 0),
        (f"y = {MEAN}, count_include_pad = 1, ceil_mode = 1, strides = [2,2]> (x)", 0),
    ],
)
def test_means_that_count_padding(text: str, done: int) -> None:
    model = parse(f"g (float[N,3,8,8] x) => (float[N,3,H,W] y) {{ {text} }}")
    count, after = applied(padded_means_to_conv, model)
    assert count == done == kinds(after).count("Conv")


# remove_identity


@pytest.mark.parametrize(
    ("text", "left"),
    [
        (
            (
                "g (float[2] x) => (float[2] y) { h = Neg (x) i = Identity (h) y = Exp"
                " (i) }"
            ),
            ["Neg", "Exp"],
        ),
        ("g (float[2] x) => (float[2] y) { h = Neg (x) y = Identity (h) }", ["Neg"]),
        ("g (float[2] x) => (float[2] y) { h = Neg (x) y = Dropout (h) }", ["Neg"]),
        (
            (
                "g (float[2] x) => (float[2] y) { h = Neg (x) d, m = Dropout (h) y ="
                " Exp (d) }"
            ),
            ["Neg", "Exp"],
        ),
        (
            "g (float[2] x) => (float[2] y) { h = Cast <to = 1> (x) y = Neg (h) }",
            ["Neg"],
        ),
        (
            (
                "g (float[2] x) => (float[2] y) { i = Identity (x) j = Identity (i) y ="
                " Neg (j) }"
            ),
            ["Neg"],
        ),
        # kept: it is all there is between an input and an output, or it does something
        ("g (float[2] x) => (float[2] y) { y = Identity (x) }", ["Identity"]),
        (
            (
                "g (float[2] x) => (float[2] y, float[2] z) { y = Neg (x) z = Identity"
                " (y) }"
            ),
            ["Neg", "Identity"],
        ),
        ("g (float[2] x) => (bool[2] m) { d, m = Dropout (x) }", ["Dropout"]),
        ("g (float[2] x) => (int64[2] y) { y = Cast <to = 7> (x) }", ["Cast"]),
    ],
)
def test_identities(text: str, left: list[str]) -> None:
    assert kinds(applied(remove_identity, parse(text))[1]) == left


def test_dropout_in_training_stays() -> None:
    text = (
        "g (float[2] x) => (float[2] y) { d = Dropout (x, ratio, training) y = Neg"
        " (d) }"
    )
    ratio = np.float32(0.5)
    on, off = (
        parse(text, ratio=ratio, training=np.bool_(value)) for value in (True, False)
    )
    assert remove_identity(Graph.of(on)) == 0
    assert kinds(applied(remove_identity, off)[1]) == ["Neg"]


# raise_opset


@pytest.mark.parametrize(
    "make", [residual, batch_norm_net, old_ir], ids=lambda make: make.__name__
)
def test_a_raised_model_computes_the_same(make: Callable[[], ModelProto]) -> None:
    model = make()
    after = raise_opset(model, 21)
    assert (
        after is not None
        and after.opset_import[0].version == 21
        and after.ir_version >= 10
    )
    onnx.checker.check_model(after, full_check=True)
    assert interface(after) == interface(model)
    feeds = samples(model)[0]
    for expected, found in zip(run(model, feeds), run(after, feeds), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_inferred_shapes_do_not_leak_into_the_interface() -> None:
    model = parse(  # the constant is one row, so N can only be 1
        "g (float[N,3] x) => (float[N,6] y) { [join] y = Concat <axis = 1> (x, row) }",
        opset=13,
        row=normal(1, 3),
    )
    after = raise_opset(model, 21)
    assert after is not None and interface(after) == interface(model)


def test_large_weights_travel_around_the_converter() -> None:
    model = parse(
        "g (float[N,64] x) => (float[N,64] y) { [fc] y = MatMul (x, w) }",
        opset=11,
        w=weight(64, 64),
    )
    after = raise_opset(model, 13)
    assert after is not None and after.graph.initializer == model.graph.initializer
    assert [value.name for value in after.graph.input] == ["x"]


def test_what_the_converter_cannot_convert_is_refused() -> None:
    model = parse("""<ir_version: 8, opset_import: ["" : 11, "my.own" : 1]>
        g (float[2] x) => (float[2] y) { y = my.own.Op (x) }""")
    model.graph.node[0].op_type = "Upsample"
    model.graph.node[0].domain = ""
    assert raise_opset(model, 13) is None


# What an accelerator wants

X = "g (float[1,6,8,8] x) =>"
REWRITTEN = {
    "fold_shapes": (
        (
            f"{X} (float[1,384] y) {{ s = Shape <start = 0, end = 1> (x) c = Concat"
            " <axis = 0> (s, q) y = Reshape (x, c) }"
        ),
        "Shape",
        0,
    ),
    "size": (f"{X} (int64[1] y) {{ n = Size (x) y = Reshape (n, one) }}", "Size", 0),
    "split": (
        (
            f"{X} (float[1,2,8,8] y) {{ a, b, c = Split <axis = 1, num_outputs = 3> (x)"
            " d = Add (a, b) y = Mul (c, d) }"
        ),
        "Slice",
        3,
    ),
    "uneven": (
        (
            f"{X} (float[1,1,8,8] y, float[1,5,8,8] z) {{ y, z = Split <axis = -3> (x,"
            " parts) }"
        ),
        "Slice",
        2,
    ),
    "rest": (
        (
            f"{X} (float[1,6,8,3] a, float[1,6,8,3] b, float[1,6,8,2] c) {{ "
            "a, b, c = Split <axis = 3, num_outputs = 3> (x) }"
        ),
        "Slice",
        3,
    ),
    "mean": (
        f"{X} (float[1,6,1,1] y) {{ y = ReduceMean (x, last) }}",
        "GlobalAveragePool",
        1,
    ),
    "flat": (
        f"{X} (float[1,6] y) {{ y = ReduceMean <keepdims = 0> (x, negative) }}",
        "GlobalAveragePool",
        1,
    ),
    "norm": (
        (
            f"{X} (float[1,6,8,8] y) {{ r = Relu (x) y = BatchNormalization <epsilon ="
            " 0.01> (r, gamma, beta, mean, variance) }"
        ),
        "Conv",
        1,
    ),
    "large": (
        "g (float[1,2,40,30] x) => (float[1,2,1,1] y) { y = GlobalAveragePool (x) }",
        "AveragePool",
        1,
    ),
    "shared": (
        f"{X} (float[1,6,8,8] y) {{ a = Conv (x, w, v) y = Conv (a, w, v) }}",
        "Conv",
        2,
    ),
}
SINGLE = {"size": "fold_shapes", "uneven": "split", "rest": "split", "flat": "mean"}
FULL = {
    "split": "split_to_slices",
    "mean": "mean_to_pool",
    "norm": "batch_norm_to_conv",
}
FULL |= {"large": "split_large_pools", "shared": "unshare_initializers"}


@pytest.mark.parametrize("case", REWRITTEN)
def test_what_an_accelerator_wants(case: str) -> None:
    text, kind, count = REWRITTEN[case]
    constants = norm_parameters(6)
    whole = {
        "q": [384],
        "one": [1],
        "parts": [1, 5],
        "last": [2, 3],
        "negative": [-1, -2],
    }
    constants |= {name: np.array(value, np.int64) for name, value in whole.items()}
    constants |= {"w": weight(6, 6, 1, 1), "v": normal(6)}
    model = parse(
        text,
        opset=18,
        **{name: value for name, value in constants.items() if name in text},
    )
    name = SINGLE.get(case, case)
    done, after = applied(PASSES[FULL.get(name, name)], model)
    assert done == 1 + (case == "shared") and kinds(after).count(kind) == count
    assert applied(PASSES[FULL.get(name, name)], after)[0] == 0


@pytest.mark.parametrize(
    "text",
    [
        "g (float[1,6,H,8] x) => (int64[4] y) { y = Shape (x) }",
        "g (float[1,6,8] x) => (float[1,6] y) { y = ReduceMean <keepdims = 0> (x, a) }",
        "g (float[1,6,8,8] x) => (float[1,6,8,1] y) { y = ReduceMean (x, a) }",
        "g (int32[1,6,8,8] x) => (int32[1,6,1,1] y) { y = ReduceMean (x, last) }",
        "g (float[1,2,523,1] x) => (float[1,2,1,1] y) { y = GlobalAveragePool (x) }",
        "g (float[1,2,16,32] x) => (float[1,2,1,1] y) { y = GlobalAveragePool (x) }",
    ],
)
def test_what_stays(text: str) -> None:
    axes = {"a": np.array([-1], np.int64), "last": np.array([2, 3], np.int64)}
    named = {name: value for name, value in axes.items() if f", {name})" in text}
    model = parse(text, opset=18, **named)
    for name in {each.__name__ for each in LEGALIZING} - {"write_defaults"}:
        assert applied(PASSES[name], model)[0] == 0


def test_sizes_in_place_of_an_input_that_is_named_empty() -> None:
    model = parse(
        f"{X} (float[1,3,8,8] a, float[1,3,8,8] b) {{ a, b = Split <axis = 1,"
        " num_outputs = 2> (x) }",
        opset=18,
    )
    model.graph.node[0].input.append("")
    done, after = applied(PASSES["write_sizes"], model)
    assert done == 1 and len(after.graph.node[0].input) == 2


def test_defaults_are_those_of_the_opset() -> None:
    text = (
        "g (float[2,3,4] x) => (float[2,3,4] y) { a = Softmax (x) y = LeakyRelu (a) }"
    )
    for opset, axis in ((11, 1), (13, -1)):
        _, after = applied(PASSES["write_defaults"], parse(text, opset=opset))
        softmax, leaky = after.graph.node
        assert [(a.name, a.i) for a in softmax.attribute] == [("axis", axis)]
        assert [(a.name, round(a.f, 6)) for a in leaky.attribute] == [("alpha", 0.01)]


@pytest.mark.parametrize("inputs", ["x, w", "x, w, c"])
def test_factors_of_a_product_go_into_its_constants(inputs: str) -> None:
    text = (
        "g (float[2,4] x) => (float[2,3] y) { y = Gemm <alpha = 0.5, beta = 3.0,"
        f" transB = 1> ({inputs}) }}"
    )
    model = parse(text, w=weight(3, 4), **({"c": normal(3)} if "c" in inputs else {}))
    done, after = applied(PASSES["fold_gemm_alpha_beta"], model)
    factors = {
        a.name: a.f
        for a in after.graph.node[0].attribute
        if a.name in ("alpha", "beta")
    }
    assert done == 1 and factors == {"alpha": 1.0, "beta": 1.0}
    assert applied(PASSES["fold_gemm_alpha_beta"], after)[0] == 0


@pytest.mark.parametrize(
    ("call", "written"),
    [
        (
            "Resize (x, , s)",
            {"mode": "nearest", "coordinate_transformation_mode": "half_pixel"},
        ),
        ("Pad (x, p)", {"mode": "constant"}),
        ("DepthToSpace <blocksize = 2> (x)", {"mode": "DCR"}),
        (
            "AveragePool <kernel_shape = [2, 2]> (x)",
            {"count_include_pad": 0, "ceil_mode": 0},
        ),
        ("LpNormalization (x)", {"p": 2, "axis": -1}),
    ],
)
def test_modes_are_written_out(call: str, written: dict[str, object]) -> None:
    model = parse(
        f"g (float[1,4,4,4] x) => (float[A,B,C,D] y) {{ y = {call} }}",
        s=np.ones(4, np.float32),
    )
    model.graph.initializer.append(numpy_helper.from_array(np.zeros(8, np.int64), "p"))
    graph = Graph.of(model)
    count = PASSES["write_defaults"](graph)
    [node] = graph.nodes
    assert count == 1 and {name: node.attribute(name) for name in written} == written
    sample = {
        "x": np.random.default_rng(0).normal(size=(1, 4, 4, 4)).astype(np.float32)
    }
    np.testing.assert_array_equal(
        run(graph.to_model(), sample)[0], run(model, sample)[0]
    )


@pytest.mark.parametrize(
    ("call", "opset", "kind"),
    [
        ("Clip (x, zero)", 17, "Relu"),
        ("Clip (x, low)", 17, "Clip"),
        ("Clip (x, , high)", 17, "Clip"),
        ("Clip (x)", 17, "Clip"),
        ("Clip <min = -0.5> (x)", 10, "Clip"),
    ],
)
def test_bounds_are_written_out(call: str, opset: int, kind: str) -> None:
    """Without one the converter of X1 leaves a Clip to the CPU; values are those of the model."""
    bounds = {"zero": 0.0, "low": -0.5, "high": 0.5}
    constants = {
        name: np.array(value, np.float32)
        for name, value in bounds.items()
        if name in call
    }
    text = f"g (float[2,8] x) => (float[2,8] y) {{ y = {call} }}"
    model = parse(text, opset=opset, **constants)
    done, after = applied(PASSES["write_bounds"], model)
    assert done == 1 and kinds(after) == [kind]
    assert applied(PASSES["write_bounds"], after)[0] == 0
    x = np.float32([np.linspace(-3e38, 3e38, 8), np.linspace(-1, 1, 8)])
    np.testing.assert_array_equal(run(after, {"x": x})[0], run(model, {"x": x})[0])


def test_bounds_of_integers_and_computed_ones_stay() -> None:
    for text in (
        "g (int32[4] x) => (int32[4] y) { y = Clip (x) }",
        "g (float[4] x, float m, float n) => (float[4] y) { y = Clip (x, m, n) }",
    ):
        assert applied(PASSES["write_bounds"], parse(text))[0] == 0
