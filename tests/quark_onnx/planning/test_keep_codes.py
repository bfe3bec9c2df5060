"""Weights that a model stores as codes keep them: Cast and Mul become a DequantizeLinear."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from onnx import ModelProto, numpy_helper

from quark_onnx import Override, QConfig, quantize
from quark_onnx.graph import Graph
from quark_onnx.patterns.coded_constants import CodedConstant, coded_constants
from tests.models import Feeds, in_constant_nodes, kinds, parse, run

RANDOM = np.random.default_rng(0)


def codes(*shape: int) -> np.ndarray:
    """Codes that do not use the whole range, so that other scales would give other codes."""
    return RANDOM.integers(-100, 101, shape).astype(np.int8)


def scales(*shape: int) -> np.ndarray:
    return RANDOM.uniform(0.002, 0.004, shape).astype(np.float32)


CONSTANTS: dict[str, Any] = {
    "table_q": codes(1000, 64),
    "table_s": scales(1000, 1),
    "types_q": codes(300, 64),
    "types_s": scales(),
    "w_q": codes(64, 128),
    "w_s": scales(128),
    "v_q": (codes(128, 64).astype(np.int16) + 125).clip(0, 255).astype(np.uint8),
    "v_z": np.array(125, np.float32),
    "v_s": scales(1),
    "k_q": codes(16, 64, 3),
    "k_s": scales(16, 1, 1),
}
CODES = ("table_q", "types_q", "w_q", "v_q", "k_q")


def stored_in_codes() -> ModelProto:
    """Two tables, two matrices and a kernel in eight bits."""
    return parse(
        """g (int64[1,12] i, int64[1,12] j) => (float[1,16,10] y) {
        table_c = Cast <to=1> (table_q) table = Mul (table_c, table_s)
        types_c = Cast <to=1> (types_q) types = Mul (types_s, types_c)
        w_c = Cast <to=1> (w_q) w = Mul (w_c, w_s)
        v_c = Cast <to=1> (v_q) v_d = Sub (v_c, v_z) v = Mul (v_d, v_s)
        k_c = Cast <to=1> (k_q) k = Mul (k_c, k_s)
        a = Gather (table, i) b = Gather (types, j) e = Add (a, b)
        h = MatMul (e, w) r = Relu (h) p = MatMul (r, v)
        t = Transpose <perm=[0,2,1]> (p) y = Conv (t, k) }""",
        opset=21,
        ir_version=10,
        **CONSTANTS,
    )


def samples(count: int = 6) -> list[Feeds]:
    random = np.random.default_rng(1)
    return [
        {"i": random.integers(0, 1000, (1, 12)), "j": random.integers(0, 300, (1, 12))}
        for _ in range(count)
    ]


def in_float64(feeds: Feeds) -> np.ndarray:
    """The model by its definition."""
    c = {name: array.astype(np.float64) for name, array in CONSTANTS.items()}
    rows = (c["table_q"] * c["table_s"])[feeds["i"]]
    rows = rows + (c["types_q"] * c["types_s"])[feeds["j"]]
    hidden = np.maximum(rows @ (c["w_q"] * c["w_s"]), 0)
    moved = (hidden @ ((c["v_q"] - c["v_z"]) * c["v_s"])).transpose(0, 2, 1)
    windows = np.lib.stride_tricks.sliding_window_view(moved[0], 3, axis=1)
    return np.asarray(np.einsum("ocw,cpw->op", c["k_q"] * c["k_s"], windows)[None])


def found_codes(model: ModelProto) -> set[str]:
    """The constants of the source whose codes are in the result, with or without an offset."""
    stored = [numpy_helper.to_array(tensor) for tensor in model.graph.initializer]
    return {
        name
        for name in CODES
        if any(
            array.shape == CONSTANTS[name].shape
            and array.dtype == CONSTANTS[name].dtype
            and np.array_equal(array, CONSTANTS[name])
            for array in stored
        )
    }


@pytest.mark.parametrize("constants", ["initializers", "nodes"])
@pytest.mark.parametrize("preset", ["W8", "A8W8", "A16W8", "S8S8", "U8U8"])
def test_codes_stay(preset: str, constants: str) -> None:
    model = stored_in_codes()
    if constants == "nodes":
        model = in_constant_nodes(model)
    config = QConfig.of(preset)
    result = quantize(model, samples() if config.measures else None, config)
    assert found_codes(result.model) == set(CODES)
    # Scales, zero points and Q/DQ pairs of activations are added, but no weight grows.
    assert result.model.ByteSize() < model.ByteSize() + 6_000
    for feeds in samples(2):
        expected = in_float64(feeds)
        [found] = run(result.model, feeds)
        noise = np.square(found - expected).sum() / np.square(expected).sum()
        assert -10 * np.log10(noise) > (28 if config.measures else 100)


@pytest.mark.parametrize("preset", ["XINT8", "INT4"])
def test_other_formats_quantize_anew(preset: str) -> None:
    """Scales that are powers of two, and blocks of four bits."""
    config = QConfig.of(preset)
    result = quantize(stored_in_codes(), samples() if config.measures else None, config)
    assert not {"w_q", "v_q"} & found_codes(result.model)


def test_what_stays_float_is_stored_in_codes() -> None:
    """A layer that is excluded reads the product of codes and scale, as in the source."""
    model = stored_in_codes()
    config = QConfig.of("A8W8").with_(
        overrides=(Override(op_types="MatMul", keep=True),)
    )
    result = quantize(model, samples(), config)
    assert found_codes(result.model) == set(CODES)
    assert {"Cast", "Sub", "Mul"} <= set(kinds(result.model))
    assert result.model.ByteSize() < model.ByteSize() + 6_000


CHAINS = {
    "product": ("Mul (c, s)", {}),
    "zero point": ("d = Sub (c, z) y = Mul (d, s)", {"z": np.array([3.0], np.float32)}),
    "offset": ("m = Mul (c, s) y = Add (m, o)", {"o": np.array([-0.75], np.float32)}),
    "difference": (
        "m = Mul (s, c) y = Sub (m, o)",
        {"o": np.array([0.75], np.float32)},
    ),
}


@pytest.mark.parametrize("name", CHAINS)
def test_the_parameters_of_a_chain(name: str) -> None:
    """(codes - zero point) * scale is what the operators compute."""
    line, more = CHAINS[name]
    line = line if "y =" in line else f"y = {line}"
    model = parse(
        f"g (float[1] x) => (float[5,4] z1) {{ c = Cast <to=1> (q) {line} z1 = Add (y, x) }}",
        q=codes(5, 4),
        s=np.array([0.25], np.float32),
        **more,  # type: ignore[arg-type]
    )
    graph = Graph.of(model)
    [(tensor, coded)] = coded_constants(graph).items()
    parameters = coded.parameters()
    assert tensor == "y" and parameters is not None and parameters.axis is None
    stored = numpy_helper.to_array(coded.tensor).astype(np.float64)
    expected = (stored - parameters.zero_point) * parameters.scale
    [found] = run(model, {"x": np.zeros(1, np.float32)})
    np.testing.assert_array_equal(found, expected)
    np.testing.assert_array_equal(coded.dequantized(), expected)
    coded.write(graph, graph.fresh("again"))
    assert graph.producer("again") is not None


def test_an_offset_between_two_codes_has_no_zero_point() -> None:
    model = parse(
        """g (float[1] x) => (float[5,4] z) {
        c = Cast <to=1> (q) m = Mul (c, s) y = Add (m, o) z = Add (y, x) }""",
        q=codes(5, 4),
        s=np.array([0.25], np.float32),
        o=np.array([0.1], np.float32),
    )
    [coded] = coded_constants(Graph.of(model)).values()
    assert coded.parameters() is None


ODD_PARAMETERS: dict[str, tuple[str, dict[str, float]]] = {
    "zero point above the codes": (
        "d = Sub (c, z) w = Mul (d, s)",
        {"z": 300, "s": 0.01},
    ),
    "zero point below the codes": (
        "d = Sub (c, z) w = Mul (d, s)",
        {"z": -5, "s": 0.01},
    ),
    "scale of 0": ("m = Mul (c, s) w = Add (m, o)", {"s": 0, "o": 1}),
    "offset of many steps": ("m = Mul (c, s) w = Add (m, o)", {"s": 1e-30, "o": -1e10}),
}


@pytest.mark.filterwarnings("error::RuntimeWarning")
@pytest.mark.parametrize("preset", ["W8", "A8W8"])
@pytest.mark.parametrize("name", ODD_PARAMETERS)
def test_weights_whose_parameters_no_format_has_are_quantized_anew(
    name: str, preset: str
) -> None:
    line, numbers = ODD_PARAMETERS[name]
    constants = {key: np.array(value, np.float32) for key, value in numbers.items()}
    model = parse(
        f"g (float[4,8] x) => (float[4,6] y) {{ c = Cast <to=1> (q) {line} y = MatMul (x, w) }}",
        q=RANDOM.integers(0, 256, (8, 6)).astype(np.uint8),
        **constants,  # type: ignore[arg-type]
    )
    feeds = {"x": RANDOM.normal(size=(4, 8)).astype(np.float32)}
    data = [feeds] if QConfig.of(preset).measures else None
    result = quantize(model, data, preset)
    [expected], [found] = run(model, feeds), run(result.model, feeds)
    noise = np.square(found - expected).sum() / np.square(expected).sum()
    assert noise < 1e-3


@pytest.mark.parametrize("scale", [np.inf, np.nan])
def test_scales_that_are_not_finite_are_no_parameters(scale: float) -> None:
    tensor = numpy_helper.from_array(codes(5, 4))
    assert CodedConstant(tensor, np.array(scale, np.float32)).parameters() is None


@pytest.mark.parametrize("offset", [np.inf, np.nan])
def test_offsets_that_are_not_finite_are_no_parameters(offset: float) -> None:
    tensor = numpy_helper.from_array(codes(5, 4))
    shifted = CodedConstant(
        tensor, np.array(1, np.float32), offset=np.array(offset, np.float32)
    )
    assert shifted.parameters() is None


def test_no_codes_have_no_parameters() -> None:
    tensor = numpy_helper.from_array(codes(0, 4))
    empty = CodedConstant(tensor, scales(0, 1), offset=scales(0, 1))
    assert empty.parameters() is None


@pytest.mark.parametrize("preset", ["W8", "A8W8", "XINT8", "INT4"])
def test_a_branch_reads_a_weight_that_is_stored_in_codes(preset: str) -> None:
    model = parse(
        """g (float[4,8] x, bool b) => (float[4,8] y) {
        c = Cast <to=1> (q) w = Mul (c, s) h = MatMul (x, w)
        y = If (b) <then_branch = yes () => (float[4,8] o) { o = MatMul (h, w) },
                    else_branch = no () => (float[4,8] p) { p = Relu (h) }> }""",
        q=codes(8, 8),
        s=scales(8),
    )
    feeds = {
        "x": RANDOM.normal(size=(4, 8)).astype(np.float32),
        "b": np.array(True),
    }
    data = [feeds] if QConfig.of(preset).measures else None
    result = quantize(model, data, preset)
    [expected], [found] = run(model, feeds), run(result.model, feeds)
    noise = np.square(found - expected).sum() / np.square(expected).sum()
    assert noise < (0.1 if preset == "INT4" else 1e-2)
