"""What a careless or hostile caller does: each is served right, or refused with an error of this
package.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import ModelProto, numpy_helper

from calibrators import CalibrationError, Entropy, MinMax, MinMSE, Percentile
from calibrators.onnx_runtime.session import open_session
from quark_onnx import Override, QConfig, compare, quantize, quantize_static
from quark_onnx.common.errors import AccuracyError, ConfigError, ModelError

DENSE = onnx.parser.parse_model("""<ir_version: 8, opset_import: ["" : 17]>
    g (float[N, 3] x) => (float[N, 2] y) <float[3, 2] w = {1, 2, 3, 4, 5, 6}> {
        h = MatMul (x, w)
        r = Relu (h)
        y = Sigmoid (r)
    }""")


def samples(count: int = 24) -> Iterator[dict[str, Any]]:
    for seed in range(count):
        yield {
            "x": (
                np.random.default_rng(seed)
                .normal(0, 1 + seed, (4, 3))
                .astype(np.float32)
            )
        }


def one_buffer() -> Iterator[dict[str, Any]]:
    """The samples, each in the array that held the last."""
    buffer = np.empty((4, 3), np.float32)
    for sample in samples():
        buffer[:] = sample["x"]
        yield {"x": buffer}


class Loader:
    """Starts over at each pass, and fills one buffer, as data loaders do."""

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return one_buffer()


class OrtReader:
    def __init__(self) -> None:
        self.samples = one_buffer()

    def get_next(self) -> dict[str, Any] | None:
        return next(self.samples, None)


@pytest.mark.parametrize("source", [one_buffer, Loader, OrtReader])
@pytest.mark.parametrize("preset", ["A8W8", "XINT8"])
def test_samples_that_share_a_buffer(source: Any, preset: str) -> None:
    """Two samples are alive at a time, and those held out or searched on until the end."""
    expected = quantize_static(DENSE, list(samples()), preset)
    assert (
        quantize_static(DENSE, source(), preset).SerializeToString()
        == expected.SerializeToString()
    )


@pytest.mark.parametrize(
    "config",
    [
        {1: 2},
        {None: 3},
        {"activation": {1: 2}},
        {"overrides": [{3: True}]},
        {"overrides": 5},
        {"overrides": [{"between": 5, "keep": True}]},
        {"overrides": [{"between": None, "keep": True}]},
        {"overrides": [{"between": "ab", "keep": True}]},
        {"overrides": [{"nodes": "*", "keep": "no"}]},
        {"calibrator": MinMax},
        {"calibrator": "percentile:percentile=0"},
        {"calibrator": "percentile:percentile=101"},
        {"calibrator": "percentile:percentile=true"},
        {"calibrator": "minmse:steps=0"},
        {"calibrator": "minmse:steps=1.5"},
        {"calibrator": "minmse:least=nan"},
        {"calibrator": "entropy:candidates=-3"},
        {"calibrator": "minmax:moving_average=2"},
        {"calibrator": "minmax:moving_average=true,constant=2"},
        {"min_sqnr": float("nan")},
        {"min_sqnr": True},
        {"min_sqnr": "20"},
    ],
    ids=str,
)
def test_settings_that_are_none(config: dict[Any, Any]) -> None:
    with pytest.raises(ConfigError):
        QConfig.of(config)


def test_settings_in_python_that_are_none() -> None:
    with pytest.raises(
        ConfigError, match="overrides is None; it must be a list of Override"
    ):
        QConfig(overrides=None)  # type: ignore[arg-type]
    with pytest.raises(
        ConfigError, match="between of an override is 5; it must be two sets of names"
    ):
        Override(between=5, keep=True)  # type: ignore[arg-type]
    for calibrator, settings in (
        (Percentile, {"percentile": "abc"}),
        (MinMSE, {"steps": 0}),
        (Entropy, {"candidates": 0}),
    ):
        with pytest.raises(CalibrationError, match="it must be"):
            calibrator(**settings)


@pytest.mark.parametrize("preset", ["A8W8", "S8S8", "A16W8", "XINT8"])
@pytest.mark.parametrize(
    ("opset", "shape", "axis"),
    [(13, "N, 1, 4", 1), (17, "N, 1", -1), (11, "N, 2, 1, 1", 2)],
)
def test_softmax_of_a_single_value_is_one(
    opset: int, shape: str, axis: int, preset: str
) -> None:
    """onnxruntime's integer softmax overflows there: its 1 became 0."""
    model = onnx.parser.parse_model(f"""<ir_version: 8, opset_import: ["" : {opset}]>
        g (float[{shape}] x) => (float[{shape}] y) {{
            r = Tanh (x)
            y = Softmax <axis = {axis}> (r)
        }}""")
    x = np.ones([int(size) for size in shape.replace("N", "3").split(", ")], np.float32)
    quantized = quantize_static(model, [{"x": x}], QConfig.of(preset).with_(safe=False))
    for optimize in (True, False):
        [y] = open_session(quantized, optimize=optimize).run(None, {"x": x})
        np.testing.assert_allclose(y, 1, atol=0.01)


def stored(folder: Path, location: str) -> Path:
    """A model in a folder with its weights in a file of their own."""
    weight = np.random.default_rng(0).normal(size=(64, 64)).astype(np.float32)
    model = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["" : 17]> g (float[N, 64] x) => (float[N, 64]'
        " y) { y = MatMul (x, w) }"
    )
    model.graph.initializer.append(numpy_helper.from_array(weight, "w"))
    onnx.save_model(
        model,
        str(folder / "m.onnx"),
        save_as_external_data=True,
        location=location,
        size_threshold=0,
    )
    return folder / "m.onnx"


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize(
    ("location", "output"),
    [("q.onnx.data", "q.onnx"), ("weights.onnx", "weights.onnx")],
)
def test_output_that_would_replace_weights_of_the_input(
    tmp_path: Path, location: str, output: str
) -> None:
    path = stored(tmp_path, location)
    before = contents(tmp_path)
    with pytest.raises(
        ConfigError,
        match=f"would replace '{location}', which holds weights of the input model",
    ):
        quantize_static(
            path, [{"x": np.ones((2, 64), np.float32)}], "A8W8", tmp_path / output
        )
    assert contents(tmp_path) == before


def test_weights_that_are_not_loaded(tmp_path: Path) -> None:
    model = onnx.load(str(stored(tmp_path, "w.data")), load_external_data=False)
    with pytest.raises(
        ModelError, match=r"not loaded, they lie in \['w.data'\]; pass its path"
    ):
        quantize_static(model, [{"x": np.ones((2, 64), np.float32)}])


@pytest.mark.parametrize("output", [5, b"q.onnx", "q\0.onnx"])
def test_output_that_is_no_path(output: Any) -> None:
    with pytest.raises(ConfigError, match="it must be a path"):
        quantize_static(DENSE, list(samples()), "A8W8", output)


def test_input_that_is_no_path() -> None:
    with pytest.raises(ModelError, match="cannot be read: embedded null byte"):
        quantize_static("q\0.onnx", list(samples()))


@pytest.mark.skipif(
    not hasattr(os, "mkfifo"), reason="there are no pipes in this file system"
)
def test_output_that_is_a_device_or_a_pipe(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(
        ConfigError, match="a device or a pipe, which a file would replace"
    ):
        quantize_static(DENSE, list(samples()), "A8W8", tmp_path / "pipe")


def test_output_over_a_file_that_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "q.onnx").write_bytes(b"junk")
    (tmp_path / "q.onnx.data").write_bytes(b"mine")
    quantized = quantize_static(DENSE, list(samples()), "A8W8", tmp_path / "q.onnx")
    written = ModelProto.FromString((tmp_path / "q.onnx").read_bytes())
    assert written.graph == quantized.graph
    assert sorted(contents(tmp_path)) == ["q.onnx", "q.onnx.data"]
    assert contents(tmp_path)["q.onnx.data"] == b"mine"


def noise(
    model: ModelProto,
    quantized: ModelProto,
    feeds: dict[str, Any],
    *,
    optimize: bool = True,
) -> list[float]:
    """SQNR of each output, in dB."""
    found = [
        open_session(m, optimize=optimize).run(None, feeds) for m in (model, quantized)
    ]
    return [
        float(
            10
            * np.log10(
                np.square(a, dtype=np.float64).sum()
                / (np.square(b - a, dtype=np.float64).sum() + 1e-30)
            )
        )
        for a, b in zip(*found, strict=True)
    ]


def with_weights(text: str, **weights: Any) -> ModelProto:
    model = onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["" : 17]> {text}')
    model.graph.initializer.extend(
        numpy_helper.from_array(np.float32(w), name) for name, w in weights.items()
    )
    return model


def gaussian(*shape: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


@pytest.mark.parametrize("preset", ["A8W8", "S8S8", "A16W8"])
def test_a_relu_that_somebody_reads_unquantized_is_not_dropped(preset: str) -> None:
    branch = "=> (float[4, 5] {0}) {{ {0} = {1} (r) }}"
    model = with_weights(
        f"""g (float[4, 8] x, bool c) => (float[4, 5] y, float[4, 3] z) {{
            g = MatMul (x, w)
            r = Relu (g)
            y = If (c) <then_branch = t () {branch.format("a", "Identity")},
                        else_branch = e () {branch.format("b", "Neg")}>
            z = MatMul (r, w2)
        }}""",
        w=gaussian(8, 5),
        w2=gaussian(5, 3),
    )
    feeds = {"x": gaussian(4, 8, seed=1), "c": np.array(True)}
    assert min(noise(model, quantize_static(model, [feeds], preset), feeds)) > 25


@pytest.mark.parametrize("preset", ["A8W8", "S8S8", "A16W8"])
@pytest.mark.parametrize("bias", [True, False])
def test_a_bias_near_the_limit_leaves_room_for_the_sum(preset: str, bias: bool) -> None:
    """Its code shares an int32 with the sum of 512 products; the runtime lets it overflow."""
    w = np.abs(gaussian(4, 512, 1, 1)) * 1e-6
    model = with_weights(
        "g (float[N, 512, 2, 2] x) => (float[N, 4, 2, 2] y) { y = Conv (x, w, b) }",
        w=w,
        b=[10.0, 20.0, 30.0, 40.0],
    )
    feeds = {"x": np.abs(gaussian(2, 512, 2, 2))}
    quantized = quantize_static(model, [feeds], QConfig.of(preset).with_(bias=bias))
    assert (
        min(
            *noise(model, quantized, feeds),
            *noise(model, quantized, feeds, optimize=False),
        )
        > 30
    )


@pytest.mark.parametrize("preset", ["A8W8", "S8S8", "A16W8", "XINT8"])
def test_room_for_a_bias_is_not_made_at_the_cost_of_others(preset: str) -> None:
    """The weight is tied, and its other reader needs the fine scale.

    Or it is computed, and others read it.
    """
    tied = with_weights(
        "g (float[N, 8] x, float[N, 8] u) => (float[N, 4] y, float[N, 4] z) { y = Gemm"
        " (x, w, b)  z = MatMul (u, w) }",
        w=gaussian(8, 4),
        b=10 * gaussian(4, seed=3),
    )
    feeds = {"x": 1e-6 * gaussian(16, 8, seed=1), "u": gaussian(16, 8, seed=2)}
    assert min(noise(tied, quantize_static(tied, [feeds], preset), feeds)) > 20
    computed = with_weights(
        "g (float[2, 4] x) => (float[3, 4] a, float[2, 4] z) { a = Gemm (k, x, b)  z ="
        " Relu (x) }",
        k=1e-3 * gaussian(3, 2),
        b=300 * gaussian(4),
    )
    feeds = {"x": gaussian(2, 4)}
    assert min(noise(computed, quantize_static(computed, [feeds], preset), feeds)) > 25


@pytest.mark.parametrize("preset", ["A8W8", "S8S8", "A16W8"])
def test_small_denominators(preset: str) -> None:
    model = with_weights(
        """g (float[N, 16] x) => (float[N, 16] y) {
            c = MatMul (x, w)
            n = ReduceL2 <axes = [-1]> (c)
            y = Div (c, n)
        }""",
        w=gaussian(16, 16),
    )
    feeds = {
        "x": (
            gaussian(32, 16, seed=1) * np.float32(10 ** np.linspace(-2, 0, 32))[:, None]
        )
    }
    plain = noise(model, quantize_static(model, [feeds], "A16W8"), feeds)
    assert min(plain) > 20
    constant = with_weights(
        "g (float[N, 4] x) => (float[N, 4] y) { y = Div (x, k) }", k=[1e-3, 1, 10, 1]
    )
    feeds = {"x": np.abs(gaussian(64, 4))}
    assert min(noise(constant, quantize_static(constant, [feeds], preset), feeds)) > 30


_SHAPE = "k = Constant <value_ints = [32, 16]> ()"
#: Spellings of ``c`` in directions, with zero for a row of zeros, as exporters write them.
DIRECTIONS = {
    "clip": "m = Clip (n, tiny) y = Div (c, m)",
    "clip and expand": f"m = Clip (n, tiny) {_SHAPE} e = Expand (m, k) y = Div (c, e)",
    "max": "m = Max (n, tiny) y = Div (c, m)",
    "add": "m = Add (n, tiny) y = Div (c, m)",
    "where": "z = Equal (n, zero) m = Where (z, one, n) y = Div (c, m)",
    "reciprocal": "m = Clip (n, tiny) r = Reciprocal (m) y = Mul (c, r)",
    "moved": f"m = Max (n, tiny) r = Reciprocal (m) {_SHAPE} e = Expand (r, k) y = Mul (e, c)",
    "one over": "m = Max (n, tiny) r = Div (one, m) y = Mul (c, r)",
    "power": "m = Add (n, tiny) r = Pow (m, minus) y = Mul (c, r)",
}


@pytest.mark.parametrize("preset", ["A8W8", "S8S8", "A16W8"])
@pytest.mark.parametrize("spelling", DIRECTIONS.values(), ids=DIRECTIONS)
def test_directions_of_zeros(spelling: str, preset: str) -> None:
    """The rounded bound of a norm is 0, and 0 / 0 is no number."""
    constants = {
        "tiny": np.float32(1e-12),
        "zero": np.float32(0),
        "one": np.float32(1),
        "minus": np.float32(-1),
    }
    model = with_weights(
        f"""g (float[32, 16] x) => (float[32, 16] y) {{
            c = MatMul (x, w)
            n = ReduceL2 <axes = [-1]> (c)
            {spelling}
        }}""",
        w=gaussian(16, 16),
        **{name: value for name, value in constants.items() if name in spelling},
    )
    sizes = np.float32(np.linspace(0, 1, 32))[:, None]
    feeds = {"x": gaussian(32, 16, seed=1) * sizes}
    assert min(noise(model, quantize_static(model, [feeds], preset), feeds)) > 20


@pytest.mark.parametrize("preset", ["A8W8", "S8S8", "XINT8"])
def test_known_bounds_that_are_hardly_used(preset: str) -> None:
    """A softmax over a thousand values, and a tangent close to zero."""
    soft = (
        "g (float[4, 1024] x) => (float[4, 8] y) { s = Softmax (x)  y = MatMul (s, w) }"
    )
    model = with_weights(soft, w=gaussian(1024, 8))
    feeds = {"x": gaussian(4, 1024, seed=1)}
    assert min(noise(model, quantize_static(model, [feeds], preset), feeds)) > 15
    model = with_weights(
        "g (float[4, 64] x) => (float[4, 8] y) { s = Tanh (x)  y = MatMul (s, w) }",
        w=gaussian(64, 8),
    )
    feeds = {"x": 0.01 * gaussian(4, 64, seed=1)}
    assert min(noise(model, quantize_static(model, [feeds], preset), feeds)) > 25


def test_a_reduced_dimension_keeps_its_name_when_the_opset_is_raised() -> None:
    model = onnx.parser.parse_model("""<ir_version: 8, opset_import: ["" : 11]>
        g (float[N, 6, 10] x) => (float[N, 6, 10] y) {
            t = Tanh (x)
            r = ReduceMean <axes = [1, -1], keepdims = 1> (t)
            y = Sub (t, r)
        }""")
    quantized = quantize_static(model, [{"x": gaussian(3, 6, 10)}], "A16W8")
    [r] = [value for value in quantized.graph.value_info if value.name == "r"]
    assert [dim.dim_param or dim.dim_value for dim in r.type.tensor_type.shape.dim] == [
        "N",
        1,
        1,
    ]


def test_what_the_guard_keeps_float_keeps_its_constants_float() -> None:
    model = with_weights(
        """g (float[1, 3, 8, 8] x) => (float[1, 16, 3] y) {
            c = Conv (x, w)
            flat = Reshape (c, shape)
            t = Transpose <perm = [0, 2, 1]> (flat)
            boxes, scores = Split <axis = 2> (t, sizes)
            moved = Add (boxes, grid)
            scaled = Mul (moved, stride)
            s = Sigmoid (scores)
            y = Concat <axis = 2> (scaled, s)
        }""",
        w=gaussian(3, 3, 5, 5),
        grid=np.arange(16)[None, :, None].repeat(2, axis=2),
        stride=[8.0, 32.0],
    )
    model.graph.initializer.extend(
        [
            numpy_helper.from_array(np.int64([1, 3, 16]), "shape"),
            numpy_helper.from_array(np.int64([2, 1]), "sizes"),
        ]
    )
    quantized = quantize_static(model, [{"x": gaussian(1, 3, 8, 8)}], "A8W8")
    floats = {
        t.name
        for t in quantized.graph.initializer
        if t.data_type == onnx.TensorProto.FLOAT
    }
    assert {"grid", "stride"} <= floats


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("data.npz", "is named like another format; the result is an ONNX model"),
        ("config.yaml", "is named like another format; the result is an ONNX model"),
        ("notes", "exists and is not named .onnx; it is not replaced by a model"),
    ],
)
def test_a_file_that_is_no_model_is_not_replaced(
    tmp_path: Path, name: str, message: str
) -> None:
    (tmp_path / name).write_bytes(b"mine")
    with pytest.raises(ConfigError, match=message):
        quantize_static(DENSE, list(samples()), "A8W8", tmp_path / name)
    assert contents(tmp_path) == {name: b"mine"}


def test_weights_beside_the_output_that_are_not_its_own(tmp_path: Path) -> None:
    path = stored(tmp_path, "w.bin")
    (tmp_path / "q.onnx.data").write_bytes(b"mine")
    with pytest.raises(
        ConfigError,
        match=(
            r"q.onnx.data for its weights, which exists and is not an earlier output's"
        ),
    ):
        quantize_static(
            path, [{"x": np.ones((2, 64), np.float32)}], "A8W8", tmp_path / "q.onnx"
        )
    assert (tmp_path / "q.onnx.data").read_bytes() == b"mine"


def test_a_gate_on_nothing_is_missed() -> None:
    model = onnx.parser.parse_model(
        """<ir_version: 8, opset_import: ["" : 17]>
        g (float[N, 4] x) => (int64[N, 1] y)
        <float[4, 2] w = {1, 2, 3, 4, 5, 6, 7, 8}>
        { r = MatMul (x, w)  y = ArgMax <axis = 1> (r) }"""
    )
    data = [{"x": gaussian(3, 4)}]
    with pytest.raises(
        AccuracyError,
        match="no output has float values to measure the 20 dB asked for on",
    ):
        quantize_static(model, data, QConfig(min_sqnr=20))
    quantize_static(model, data)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("preset: c.yaml", "unknown preset 'c.yaml'"),
        ("calibrator: minmax\ncalibrator: entropy", "'calibrator' is given twice"),
        ("min_sqnr: 2020-99-99", "is not valid YAML"),
        ("[" * 5000, "is not valid YAML"),
        (
            "calibrator: 'percentile:percentile=50,percentile=60'",
            "'percentile' is given twice",
        ),
        (
            "calibrator: entropy:candidates=1000000000000",
            "it must be 1 to 16384 thresholds",
        ),
        (
            "overrides: [{op_types: Conv, activation: {block_size: 32}}]",
            "block_size belongs to the weight",
        ),
        ("weight: {dynamic: true}", "dynamic belongs to the activation"),
    ],
)
def test_configurations_that_are_none(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "c.yaml").write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=message):
        QConfig.of(tmp_path / "c.yaml")


def test_calls_that_are_none() -> None:
    data = list(samples(3))
    with pytest.raises(
        ConfigError, match=r"unexpected keyword argument 'confg'; did you mean 'config'"
    ):
        quantize_static(DENSE, data, confg="A8W8")  # type: ignore[call-overload]
    with pytest.raises(ConfigError, match="missing a required argument"):
        quantize_static(DENSE)  # type: ignore[call-overload]
    with pytest.raises(ConfigError, match="executor is 5"):
        quantize_static(DENSE, data, executor=5)  # type: ignore[call-overload]
    with pytest.raises(ConfigError, match="progress is 'x'"):
        quantize_static(DENSE, data, progress="x")  # type: ignore[call-overload]
    with pytest.raises(ConfigError, match="is no path that a file can have"):
        quantize_static(DENSE, data, "A8W8", "q" * 300 + ".onnx")


def test_an_override_does_not_bring_in_what_was_left_out() -> None:
    wide = Override(op_types="Sigmoid", activation=QConfig.of("A16W8").activation)
    quantized = quantize_static(
        DENSE, list(samples(3)), QConfig(op_types=("MatMul",), overrides=(wide,))
    )
    assert "y_scale" not in {tensor.name for tensor in quantized.graph.initializer}


@pytest.mark.parametrize(
    "operator", ["Relu", "MatMul", "Add", "Conv", "Clip", "Softmax", "Reshape"]
)
def test_nodes_without_inputs(operator: str) -> None:
    model = onnx.helper.make_model(
        onnx.helper.make_graph(
            [onnx.helper.make_node(operator, [], ["y"], "bad")],
            "g",
            [onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [1])],
            [onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, None)],
        )
    )
    with pytest.raises(
        ModelError, match=rf"node 'bad' \({operator}\) has no inputs; it needs \["
    ):
        quantize_static(model, [{"x": np.ones(1, np.float32)}])


def test_models_that_are_quantized_already_are_still_read(tmp_path: Path) -> None:
    """Two quantized models are compared, and the rest of one is quantized, with data or without."""
    quantized = quantize_static(DENSE, list(samples()), QConfig(exclude=("*Sigmoid*",)))
    assert compare(quantized, quantized, list(samples())).sqnr == float("inf")
    rest = QConfig.of("BF16").with_(keep_existing=True)
    assert quantize(quantized, None, rest).report.notes == [
        "nothing was quantized: the result is the float model"
    ]
    assert (
        quantize(
            quantized, list(samples()), QConfig(keep_existing=True)
        ).report.quantized
        == 0
    )
