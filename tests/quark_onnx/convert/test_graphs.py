"""fixed-shapes, opset, initializers: what the graph looks like, and that it computes the same."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import ModelProto, numpy_helper

from quark_onnx import convert
from quark_onnx.common.errors import ConfigError
from quark_onnx.graph import Graph
from tests.models import MODELS, kinds, normal, parse, run, samples, weight


def shapes(model: ModelProto) -> dict[str, list[int | str]]:
    values = (*model.graph.input, *model.graph.value_info, *model.graph.output)
    return {
        v.name: [
            d.dim_value or d.dim_param or "?" for d in v.type.tensor_type.shape.dim
        ]
        for v in values
    }


def flattened() -> ModelProto:
    """As exporters flatten: the batch is taken out of the shape, and joined with -1."""
    return parse(
        """g (float[N,3,H,W] x) => (float[N,K] y) {
            s = Shape (x)
            n = Gather (s, zero)
            u = Unsqueeze (n, axis)
            t = Concat <axis = 0> (u, rest)
            f = Reshape (x, t)
            y = Relu (f)
        }""",
        zero=np.int64(0),
        axis=np.int64([0]),
        rest=np.int64([-1]),
    )


def test_shapes_are_fixed_and_what_was_computed_of_them_folded() -> None:
    model = flattened()
    done = convert(model, "fixed-shapes", shapes={"x": (2, 3, 4, 5)})
    assert kinds(done.model) == ["Reshape", "Relu"]
    assert shapes(done.model) == {"x": [2, 3, 4, 5], "f": [2, 60], "y": [2, 60]}
    x = normal(2, 3, 4, 5)
    np.testing.assert_array_equal(run(done.model, {"x": x})[0], run(model, {"x": x})[0])
    assert done.steps[0].outputs[0].sqnr == float("inf")


def test_a_batch_without_a_shape_is_one() -> None:
    assert shapes(convert(MODELS["conv_relu"](), "fixed-shapes").model) == {
        "x": [1, 3, 8, 8],
        "h": [1, 4, 8, 8],
        "y": [1, 4, 8, 8],
    }


@pytest.mark.parametrize(
    "asked",
    [
        "Shape (x)",
        "Shape <start = 1> (x)",
        "Shape <start = -9, end = -1> (x)",
        "Size (x)",
    ],
)
def test_parts_of_shapes(asked: str) -> None:
    model = parse(f"""g (float[2,H,5] x) => (float[2,H,5] y) {{
            s = {asked}
            f = Cast <to = 1> (s)
            m = ReduceSum <keepdims = 0> (f)
            y = Add (x, m)
        }}""")
    done = convert(model, "fixed-shapes", shapes={"x": (2, 3, 5)}).model
    x = {"x": normal(2, 3, 5)}
    assert kinds(done) == ["Add"]
    np.testing.assert_array_equal(run(done, x)[0], run(model, x)[0])


def test_inputs_that_share_a_dimension() -> None:
    model = parse("g (float[N,L] x, float[N,L] z) => (float[N,L] y) { y = Add (x, z) }")
    assert set(
        map(
            tuple,
            shapes(convert(model, "fixed-shapes", shapes={"z": (3, 7)}).model).values(),
        )
    ) == {(3, 7)}


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (
            {},
            (
                "dimension 'H' of input 'x' has no size; give the shape (--shape"
                " x=1,3,N,N)"
            ),
        ),
        ({"x": (1, 3, 4)}, "shape of 'x' has 3 dimensions, the input has 4"),
        (
            {"x": (1, 4, 4, 4)},
            "shape of 'x' is [1, 4, 4, 4], but the input has 3 for 4",
        ),
        ({"X": (1, 3, 4, 4)}, "the model has no input 'X'"),
        ({"x": (1, 3, 0, 4)}, "it must be whole numbers from 1"),
    ],
)
def test_shapes_that_do_not_fit(given: dict[str, tuple[int, ...]], words: str) -> None:
    with pytest.raises(ConfigError) as error:
        convert(flattened(), "fixed-shapes", shapes=given)
    assert words in str(error.value)


def test_shapes_in_bodies_are_folded() -> None:
    model = parse("""g (float[N,4] x, bool c) => (float[N,4] y) {
            y = If (c) <
                then_branch = t () => (float[M,4] a) {
                    s = Shape (x)
                    f = Cast <to = 1> (s)
                    r = ReduceSum <keepdims = 0> (f)
                    a = Add (x, r)
                },
                else_branch = e () => (float[M,4] b) { b = Neg (x) }
            >
        }""")
    done = convert(model, "fixed-shapes", shapes={"x": (2, 4)})
    branches = [attribute.g for attribute in done.model.graph.node[-1].attribute]
    assert sorted(node.op_type for branch in branches for node in branch.node) == [
        "Add",
        "Neg",
    ]
    sample = {"x": normal(2, 4), "c": np.array(True)}
    np.testing.assert_array_equal(run(done.model, sample)[0], run(model, sample)[0])


@pytest.mark.parametrize("version", [13, 21, 23])
@pytest.mark.parametrize(
    "name", ["residual", "conv_1d", "unlike_concat", "detector_head"]
)
def test_opset(name: str, version: int) -> None:
    model = MODELS[name]()
    done = convert(model, "opset", opset=version).model
    assert [entry.version for entry in done.opset_import] == [version]
    onnx.checker.check_model(done, full_check=True)
    for sample in samples(model, 2):
        for a, b in zip(run(model, sample), run(done, sample), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("opset", "words"),
    [
        (None, "needs the version"),
        (0, "the installed onnx knows 1 to"),
        (99, "knows 1 to"),
    ],
)
def test_opsets_that_are_none(opset: int | None, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        convert(MODELS["residual"](), "opset", opset=opset)


def shared() -> ModelProto:
    return parse(
        "g (float[N,4] x) => (float[N,4] y) { h = MatMul (x, w) a = Add (h, b) i ="
        " MatMul (a, w) y = Add (i, c) }",
        w=weight(4, 4),
        b=normal(4),
        c=normal(4),
    )


def test_initializers() -> None:
    model, x = shared(), {"x": normal(3, 4)}
    unique = convert(model, "unique-initializers").model
    readers = [
        name
        for node in unique.graph.node
        for name in node.input
        if name in {t.name for t in unique.graph.initializer}
    ]
    assert len(readers) == len(set(readers)) == 4
    once = convert(unique, "shared-initializers").model
    assert len(once.graph.initializer) == 2
    for each in (unique, once):
        np.testing.assert_array_equal(run(each, x)[0], run(model, x)[0])


def test_equal_means_bit_by_bit() -> None:
    model = parse(
        """g (float[N,1] x) => (float[N,1] y) {
            a = Div (x, p)
            b = Div (x, n)
            c = Add (a, b)
            d = Cast <to = 1> (i)
            y = Add (c, d)
        }""",
        p=np.float32([0.0]),
        n=np.float32([-0.0]),
        i=np.int32([0]),
    )
    assert convert(model, "shared-initializers").steps[0].notes == []


def test_shared_weights_behind_one_dequantizer_get_one_each() -> None:
    model = parse(
        """g (float[N,2] x) => (float[N,2] y) {
            d = DequantizeLinear (w, s)
            h = MatMul (x, d)
            y = MatMul (h, d)
        }""",
        w=np.int8([[1, 2], [3, 4]]),
        s=np.float32(0.5),
    )
    done = convert(model, "unique-initializers").model
    assert kinds(done).count("DequantizeLinear") == 2
    assert (
        len({name for node in done.graph.node for name in node.input if "w" in name})
        == 2
    )
    x = {"x": normal(3, 2)}
    np.testing.assert_array_equal(run(done, x)[0], run(model, x)[0])


def test_what_no_runtime_runs_is_converted_with_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = parse(
        """<ir_version: 8, opset_import: ["" : 17, "no.such" : 1]>
        g (float[N,2] x) => (float[N,2] y) { h = no.such.Thing (x) a = Add (h, w) y = Add (a, v) }""",  # noqa: E501
        w=np.float32([1, 2]),
        v=np.float32([1, 2]),
    )
    done = convert(model, "shared-initializers")
    assert len(done.model.graph.initializer) == 1 and done.steps[0].outputs == []
    assert "nothing could be verified" in caplog.text


def test_a_defect_would_be_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A conversion that keeps the function and does not is an error, and nothing is written."""
    from quark_onnx.common.errors import AccuracyError
    from quark_onnx.common.registry import CONVERSIONS
    from quark_onnx.convert.base import conversion

    def spoil(graph: object, settings: object) -> object:
        graph.set_constant("b", np.float32([9, 9, 9, 9]))  # type: ignore[attr-defined]
        return graph, ["done"]

    spoiled = conversion("spoil", keeps="exactly")(spoil)  # type: ignore[arg-type]
    monkeypatch.setitem(CONVERSIONS.contents, "spoil", spoiled)
    with pytest.raises(
        AccuracyError, match=r"spoil changes output 'y'.*nothing was written"
    ):
        convert(shared(), "spoil")


def test_overridable_defaults_keep_their_type() -> None:
    model = parse(
        "g (float[N,2] x, float[2] w) => (float[N,2] y) { y = Add (x, w) }",
        w=np.float32([1, 2]),
    )
    done = convert(model, "float16").model
    assert numpy_helper.to_array(done.graph.initializer[0]).dtype == np.float32
    x = np.float32([[1, 2]])
    np.testing.assert_array_equal(run(done, {"x": x})[0], x + np.float32([1, 2]))
    np.testing.assert_array_equal(
        run(done, {"x": x, "w": np.float32([3, 4])})[0], x + np.float32([3, 4])
    )


def test_a_branch_in_float16() -> None:
    model = parse(
        """g (float[2,4] x, bool c) => (float[2,4] y) {
            h = Abs (x)
            y = If (c) <
                then_branch = t () => (float[2,4] a) {
                    k = Constant <value_floats = [1.0, 2.0, 3.0, 4.0]> ()
                    a = Add (h, k)
                },
                else_branch = e () => (float[2,4] b) { b = Mul (h, w) }
            >
        }""",
        w=np.float32([1, 2, 3, 4]),
    )
    done = convert(model, "float16").model
    for truth in (True, False):
        sample = {"x": normal(2, 4), "c": np.array(truth)}
        np.testing.assert_allclose(
            run(done, sample)[0], run(model, sample)[0], rtol=2e-3
        )


def test_shapes_may_be_numbers_of_numpy() -> None:
    model = parse("g (float[N,S] x) => (float[N,S] y) { y = Relu (x) }")
    found = convert(model, "fixed-shapes", shapes={"x": np.array([2, 5])})
    assert Graph.of(found.model).shape("y") == (2, 5)
