"""A weight that is a table turned round is stored once."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import ModelProto, TensorProto, numpy_helper

from calibrators.onnx_runtime.session import open_session
from quark_onnx import QConfig, QuantizationSpec, quantize
from quark_onnx.graph import Graph
from quark_onnx.writing.tie_transposed_weights import tie_transposed_weights

WIDTH = 24


def tied(rows: int = 40) -> ModelProto:
    model = onnx.parser.parse_model(f"""<ir_version: 8, opset_import: ["" : 17]>
        g (int64[N] ids) => (float[N, {rows}] y) {{
            e = Gather (table, ids)
            h = Relu (e)
            t = Transpose <perm = [1, 0]> (table)
            y = MatMul (h, t)
        }}""")
    table = np.random.default_rng(0).normal(size=(rows, WIDTH)).astype(np.float32)
    model.graph.initializer.append(numpy_helper.from_array(table, "table"))
    return model


def matrices(model: ModelProto) -> list[TensorProto]:
    return [
        tensor
        for tensor in model.graph.initializer
        if min((*tensor.dims, 0)[:2] or [0]) > 1
    ]


@pytest.mark.parametrize("rows", [40, WIDTH])
@pytest.mark.parametrize(
    ("config", "data"),
    [
        (QConfig.of("W8"), None),
        (QConfig.of("XINT8"), [{"ids": np.arange(WIDTH)}]),
        (
            QConfig(QuantizationSpec("int8"), QuantizationSpec("int8")),
            [{"ids": np.arange(WIDTH)}],
        ),
    ],
    ids=["weights", "XINT8", "S8S8"],
)
def test_a_tied_table_is_stored_once(
    config: QConfig, data: list[dict[str, np.ndarray]] | None, rows: int
) -> None:
    model = tied(rows)
    result = quantize(model, data, config)
    [codes] = matrices(result.model)
    assert codes.data_type == TensorProto.INT8
    assert any("turned round" in note for note in result.report.notes)
    feeds = {"ids": np.arange(rows)}
    [expected] = open_session(model).run(None, feeds)
    for optimize in (True, False):
        [found] = open_session(result.model, optimize=optimize).run(None, feeds)
        assert 10 * np.log10(
            np.square(expected).sum() / np.square(found - expected).sum()
        ) > (35 if data is None else 18)


def test_weights_that_are_quantized_in_another_way_stay_apart() -> None:
    result = quantize(tied(), [{"ids": np.arange(7)}], "A8W8")
    assert len(matrices(result.model)) == 2
    assert not any("turned round" in note for note in result.report.notes)


@pytest.mark.parametrize("preset", ["INT4", "UINT4", "W8"])
def test_a_table_stays_float_where_a_float_head_has_its_values(preset: str) -> None:
    """The head is left float, so that the floats are stored in any case: once, and looked up as
    they are.
    """
    model = tied()
    model.graph.node[1].CopyFrom(onnx.helper.make_node("MatMul", ["e", "inner"], ["h"]))
    inner = np.random.default_rng(1).normal(size=(WIDTH, WIDTH)).astype(np.float32)
    model.graph.initializer.append(numpy_helper.from_array(inner, "inner"))
    model.graph.node[3].name = "head"
    model.graph.output.append(
        onnx.helper.make_tensor_value_info("e", TensorProto.FLOAT, None)
    )
    result = quantize(model, None, QConfig.of(preset).with_(exclude=("head",)))
    assert (
        result.report.kept_tensors["table"]
        == "node 'head' has the same values, and stays float"
    )
    floats = [
        tensor
        for tensor in matrices(result.model)
        if tensor.data_type == TensorProto.FLOAT
    ]
    assert [sorted(tensor.dims) for tensor in floats if 40 in tensor.dims] == [
        [WIDTH, 40]
    ]
    assert result.report.operators["MatMul"] == (1, 2)
    feeds = {"ids": np.arange(40)}
    for optimize in (True, False):
        [found] = open_session(result.model, optimize=optimize).run(["e"], feeds)
        np.testing.assert_array_equal(
            found, numpy_helper.to_array(model.graph.initializer[0])
        )


@pytest.mark.parametrize("preset", ["INT4", "UINT4"])
def test_a_table_has_a_byte_for_each_value(preset: str) -> None:
    """The rows that are looked up are those of int8 codes with a scale for each row, in float64."""
    model = tied()
    table = numpy_helper.to_array(model.graph.initializer[0]).astype(np.float64)
    model.graph.output.append(
        onnx.helper.make_tensor_value_info("e", TensorProto.FLOAT, None)
    )
    result = quantize(model, None, preset).model
    scale = np.abs(table).max(1, keepdims=True) / 127
    for optimize in (True, False):
        found = open_session(result, optimize=optimize).run(
            ["e"], {"ids": np.arange(40)}
        )[0]
        np.testing.assert_allclose(found, np.rint(table / scale) * scale, atol=1e-6)
    assert any(
        tensor.data_type == TensorProto.INT8 and tuple(tensor.dims) == (40, WIDTH)
        for tensor in matrices(result)
    )


def of_codes(*matrices: np.ndarray) -> Graph:
    """A graph that reads matrices of codes."""
    model = onnx.parser.parse_model("""<ir_version: 8, opset_import: ["" : 17]>
        g (float[2] x) => (float[2] y) { y = Identity (x) }""")
    for place, codes in enumerate(matrices):
        model.graph.initializer.append(numpy_helper.from_array(codes, f"w{place}"))
        model.graph.node.add(op_type="Shape", input=[f"w{place}"], output=[f"s{place}"])
        model.graph.output.append(
            onnx.helper.make_tensor_value_info(f"s{place}", TensorProto.INT64, [2])
        )
    return Graph.of(model)


def test_each_matrix_is_read_a_few_times_however_many_there_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    random, count = np.random.default_rng(0), 200
    graph = of_codes(*(random.integers(-9, 9, (8, 8), np.int8) for _ in range(count)))
    read = list[str]()
    constant = Graph.constant
    monkeypatch.setattr(
        Graph, "constant", lambda self, name: read.append(name) or constant(self, name)
    )
    assert tie_transposed_weights(graph) == []
    assert len(read) <= 4 * count


def test_matrices_of_another_type_or_shape_or_with_other_values_are_no_twins() -> None:
    codes = np.arange(6, dtype=np.int8).reshape(2, 3)
    almost = codes.T.copy()
    almost[2, 1] += 1
    graph = of_codes(
        codes, codes, codes.T.astype(np.uint8), codes.reshape(3, 2), almost
    )
    assert tie_transposed_weights(graph) == []


def test_all_transposes_are_computed_from_the_first_twin() -> None:
    codes = np.arange(6, dtype=np.int8).reshape(2, 3)
    graph = of_codes(codes, codes.T.copy(), codes, codes.T.copy())
    assert tie_transposed_weights(graph) == [
        f"'{name}' is 'w0' turned round, and not stored" for name in ("w1", "w3")
    ]
    assert set(graph.initializers) == {"w0", "w2"}
