"""Options that no pattern has: caches, strides, bare names of contributed operators, and the
documented table.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import onnxruntime.quantization as theirs
import pytest
from onnx import TensorProto, numpy_helper, parser

import quark_onnx
import quark_onnx.compat_onnxruntime as ours
from quark_onnx.onnxruntime_spelling import translate_dynamic, translate_static
from tests.compat_onnxruntime import networks
from tests.compat_onnxruntime.patterns import reader
from tests.models import parse


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    networks.save(networks.convolutions(), tmp_path)
    return tmp_path


def scales(path: Path) -> dict[str, float]:
    model = onnx.load(path)
    return {
        tensor.name: float(numpy_helper.to_array(tensor).max())
        for tensor in model.graph.initializer
        if tensor.name.endswith("_scale")
    }


def data() -> Any:
    return reader(theirs, networks.samples(networks.convolutions()))


def test_a_cache_gives_the_same_model_without_data(folder: Path) -> None:
    source, cache = str(folder / "float.onnx"), folder / "ranges.json"
    ours.quantize_static(
        source, str(folder / "a.onnx"), data(), calibration_cache_path=cache
    )
    ours.quantize_static(
        source, str(folder / "b.onnx"), None, calibration_cache_path=cache
    )
    first, second = scales(folder / "a.onnx"), scales(folder / "b.onnx")
    assert first.keys() == second.keys()
    np.testing.assert_allclose(
        [first[name] for name in first], [second[name] for name in first], rtol=1e-5
    )
    assert (
        theirs.load_tensors_data(cache).calibration_method
        == theirs.CalibrationMethod.MinMax
    )


def test_a_cache_of_onnxruntime_is_read(folder: Path) -> None:
    source, cache = str(folder / "float.onnx"), folder / "ranges.json"
    theirs.quantize_static(
        source, str(folder / "a.onnx"), data(), calibration_cache_path=cache
    )
    ours.quantize_static(
        source, str(folder / "b.onnx"), None, calibration_cache_path=cache
    )
    first, second = scales(folder / "a.onnx"), scales(folder / "b.onnx")
    np.testing.assert_allclose(first["x_scale"], second["x_scale"], rtol=1e-6)
    with pytest.raises(ValueError, match=r"was written by CalibrationMethod\.MinMax"):
        ours.quantize_static(
            source,
            str(folder / "b.onnx"),
            None,
            calibration_cache_path=cache,
            calibrate_method=theirs.CalibrationMethod.Entropy,
        )


_NO_CACHE = "is no calibration cache of onnxruntime"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "is no JSON: line 1, column 1"),
        ("[1]", "the document is an array, and must be an object"),
        ("{}", _NO_CACHE),
        ('{"CLS": "CalibrationMethod", "value": "CalibrationMethod.Bogus"}', _NO_CACHE),
        (
            '{"CLS": "TensorsData", "data": {"x": {"CLS": "TensorData", "low": 1}}}',
            _NO_CACHE,
        ),
        (b"\xff", "is no text in UTF-8: byte 0 is 0xff"),
    ],
)
def test_what_is_no_cache_is_named(
    folder: Path, content: str | bytes, message: str
) -> None:
    cache = folder / "ranges.json"
    cache.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError, match=rf"ranges\.json.* {message}"):
        ours.quantize_static(
            str(folder / "float.onnx"),
            str(folder / "q.onnx"),
            None,
            calibration_cache_path=cache,
        )


def test_an_infinite_range_of_a_cache_leaves_the_tensor_float(folder: Path) -> None:
    source, cache = str(folder / "float.onnx"), folder / "ranges.json"
    ours.quantize_static(
        source, str(folder / "a.onnx"), data(), calibration_cache_path=cache
    )
    ranges = theirs.load_tensors_data(cache)
    ranges["x"] = theirs.TensorData(lowest=np.float32(-np.inf), highest=np.float32(1))
    theirs.save_tensors_data(ranges, cache)
    ours.quantize_static(
        source, str(folder / "b.onnx"), None, calibration_cache_path=cache
    )
    assert "x_scale" in scales(folder / "a.onnx")
    assert "x_scale" not in scales(folder / "b.onnx")


def test_a_cache_of_a_model_that_has_a_pair_without_a_zero_point(folder: Path) -> None:
    text = """g (float[N,4] x) => (float[N,4] y) <float s = {0.1}, float[4,4] w = {
        1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16}>
        { q = QuantizeLinear (x, s) d = DequantizeLinear (q, s) y = MatMul (d, w) }"""
    source, cache = str(folder / "pair.onnx"), folder / "ranges.json"
    onnx.save(parse(text), source)
    samples = [{"x": np.ones((1, 4), np.float32)}]
    ours.quantize_static(
        source,
        str(folder / "a.onnx"),
        reader(theirs, samples),
        calibration_cache_path=cache,
    )
    low, high = theirs.load_tensors_data(cache)["x"].range_value
    assert (low, high) == (0, np.float32(25.5))


def test_without_data_and_cache_it_is_an_error(folder: Path) -> None:
    with pytest.raises(ValueError, match="calibration_data_reader is None"):
        ours.quantize_static(str(folder / "float.onnx"), str(folder / "q.onnx"), None)


class Strided:
    """A reader that is asked for ranges of samples."""

    def __init__(self, samples: list[networks.Feeds]) -> None:
        self.samples, self.asked = samples, list[tuple[int, int]]()
        self.rest = iter(samples)

    def __len__(self) -> int:
        return len(self.samples)

    def set_range(self, start_index: int, end_index: int) -> None:
        self.asked.append((start_index, end_index))
        self.rest = iter(self.samples[start_index:end_index])

    def get_next(self) -> networks.Feeds | None:
        return next(self.rest, None)


def test_data_in_strides(folder: Path) -> None:
    strided = Strided(networks.samples(networks.convolutions()))
    source = str(folder / "float.onnx")
    ours.quantize_static(
        source, str(folder / "a.onnx"), strided, extra_options={"CalibStridedMinMax": 8}
    )
    assert strided.asked == [(0, 8), (8, 16), (16, 24)]
    ours.quantize_static(source, str(folder / "b.onnx"), data())
    assert scales(folder / "a.onnx") == scales(folder / "b.onnx")
    with pytest.raises(ValueError, match="of which 24 samples are no multiple"):
        ours.quantize_static(
            source,
            str(folder / "a.onnx"),
            strided,
            extra_options={"CalibStridedMinMax": 7},
        )


def test_smoothquant() -> None:
    options = {"SmoothQuant": True, "SmoothQuantAlpha": 0.7}
    found = translate_static(
        (networks.attention(), "q", data()), {"extra_options": options}
    ).config
    assert found.optimizers == (quark_onnx.SmoothQuant(alpha=0.7, insert=True),)


def test_contributed_operators_are_found_by_their_bare_names() -> None:
    model = parser.parse_model("""<ir_version: 8, opset_import: ["" : 17, "com.microsoft" : 1]>
        g (float[2, 8] x) => (float[2, 8] y) {
            h = com.microsoft.QuickGelu (x)
            y = Tanh (h)
        }""")
    found = translate_static(
        (model, "q", None), {"op_types_to_quantize": ["QuickGelu"]}
    ).config
    assert "com.microsoft::QuickGelu" in found.op_types


def test_types_that_are_named_are_quantized() -> None:
    """Also where they are all that the model has: get_qdq_config names them all, for NPUs."""
    types = ["Conv", "Relu", "MaxPool", "Add", "GlobalAveragePool", "Flatten", "Gemm"]
    found = translate_static(
        (networks.convolutions(), "q", None), {"op_types_to_quantize": types}
    ).config
    assert (found.op_types, found.safe) == (tuple(sorted(types)), False)


def test_a_model_without_operators_of_the_default_types(tmp_path: Path) -> None:
    source, output = tmp_path / "float.onnx", tmp_path / "q.onnx"
    onnx.save(parse("g (float[2] x) => (float[2] y) { y = Tanh (x) }"), source)
    ours.quantize_dynamic(source, output)
    ours.quantize_static(source, output, reader(theirs, [{"x": np.ones(2, "f")}]))
    assert [node.op_type for node in onnx.load(output).graph.node] == ["Tanh"]


def test_an_override_of_a_bias_is_obeyed(folder: Path) -> None:
    """A bias with a format of its own is stored like a weight, as in onnxruntime."""
    options = {"TensorQuantOverrides": {"b1": [{"quant_type": theirs.QuantType.QInt8}]}}
    source = str(folder / "float.onnx")
    for package, name in ((ours, "a.onnx"), (theirs, "b.onnx")):
        package.quantize_static(
            source, str(folder / name), data(), extra_options=options
        )
    first, second = scales(folder / "a.onnx"), scales(folder / "b.onnx")
    np.testing.assert_allclose(first["b1_scale"], second["b1_scale"], rtol=1e-6)


def test_dynamic_products_that_there_are_not_are_warned_of(
    caplog: pytest.LogCaptureFixture,
) -> None:
    translate_dynamic(
        (networks.convolutions(), "q"), {"op_types_to_quantize": ["MaxPool", "Conv"]}
    )
    assert "quantize_dynamic has no products of codes for MaxPool" in caplog.text


def test_dynamic_tables_are_quantized(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    networks.save(networks.embedding(), tmp_path)
    output = tmp_path / "q.onnx"
    quark_onnx.compat_onnxruntime.quantize_dynamic(
        tmp_path / "float.onnx", output, op_types_to_quantize=["Gather", "MatMul"]
    )
    assert "stay float" not in caplog.text
    tables = [
        each
        for each in onnx.load(output).graph.initializer
        if each.name.startswith("table")
    ]
    assert TensorProto.INT8 in {each.data_type for each in tables}


def embeddings(low: float, high: float, seed: int) -> onnx.ModelProto:
    """EmbedLayerNormalization with tables of random values between two bounds."""
    random = np.random.default_rng(seed)
    shapes = {"word": (32, 16), "position": (16, 16), "segment": (2, 16)}
    tables = {name: random.uniform(low, high, size) for name, size in shapes.items()}
    norm = {"gamma": random.random(16), "beta": random.random(16)}
    model = parser.parse_model("""<ir_version: 8, opset_import: ["" : 14, "com.microsoft" : 1]>
        g (int32[8,16] i, int32[8,16] s) => (float[8,16,16] y, int32[8] m) {
            y, m = com.microsoft.EmbedLayerNormalization
                (i, s, word, position, segment, gamma, beta)
        }""")
    for name, values in (tables | norm).items():
        model.graph.initializer.append(
            numpy_helper.from_array(values.astype(np.float32), name)
        )
    return model


@pytest.mark.parametrize(("low", "high"), [(0, 1), (-1, 0), (-1, 1), (0.5, 1)])
def test_tables_are_as_accurate_as_onnxruntimes(
    tmp_path: Path, low: float, high: float
) -> None:
    """Also where they lie on one side of zero, where a symmetric scale wastes half the codes."""
    errors = np.zeros(2)
    for seed in range(6):
        source = str(tmp_path / "float.onnx")
        onnx.save(embeddings(low, high, seed), source)
        random = np.random.default_rng(seed)
        feeds = {
            "i": random.integers(0, 32, (8, 16)).astype(np.int32),
            "s": random.integers(0, 2, (8, 16)).astype(np.int32),
        }
        [wanted] = outputs(source, feeds)
        for place, module in enumerate((ours, theirs)):
            output = str(tmp_path / "q.onnx")
            module.quantize_dynamic(source, output)
            errors[place] += np.square(outputs(output, feeds)[0] - wanted).sum()
    # Equal codes: no table is dequantized in each run.
    assert errors[0] == pytest.approx(errors[1])


def outputs(path: str, feeds: networks.Feeds) -> list[np.ndarray]:
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    return session.run(["y"], feeds)


@pytest.mark.parametrize("options", [{}, {"WeightSymmetric": False}])
def test_zero_points_of_channels_are_those_of_onnxruntime(
    folder: Path, options: dict[str, bool]
) -> None:
    """They are equal: kernels of onnxruntime read one for all channels."""
    codes = []
    for module in (ours, theirs):
        module.quantize_static(
            str(folder / "float.onnx"),
            str(folder / "q.onnx"),
            data(),
            weight_type=theirs.QuantType.QUInt8,
            activation_type=theirs.QuantType.QUInt8,
            per_channel=True,
            extra_options=options,
        )
        found = {
            tensor.name: numpy_helper.to_array(tensor).tolist()
            for tensor in onnx.load(folder / "q.onnx").graph.initializer
        }
        codes.append([found[f"w{layer}_zero_point"] for layer in (1, 2, 3)])
    assert codes[0] == codes[1] == [[128] * 8, [128] * 8, [128] * 5]


@pytest.mark.parametrize("per_channel", [False, True])
@pytest.mark.parametrize("kind", ["QInt4", "QUInt4"])
def test_four_bits_are_as_accurate_as_onnxruntimes(
    tmp_path: Path, kind: str, per_channel: bool
) -> None:
    errors = np.zeros(2)
    for seed in range(6):
        random = np.random.default_rng(seed)
        model = parser.parse_model("""<ir_version: 10, opset_import: ["" : 21]>
            g (float[1,4,9,9] x) => (float[1,8,7,7] y) { y = Conv (x, w) }""")
        weight = random.normal(size=(8, 4, 3, 3)).astype(np.float32)
        model.graph.initializer.append(numpy_helper.from_array(weight, "w"))
        source, output = str(tmp_path / "float.onnx"), str(tmp_path / "q.onnx")
        onnx.save(model, source)
        feeds = {"x": random.normal(size=(1, 4, 9, 9)).astype(np.float32)}
        [wanted] = outputs(source, feeds)
        for place, module in enumerate((ours, theirs)):
            module.quantize_static(
                source,
                output,
                reader(theirs, [feeds]),
                weight_type=theirs.QuantType[kind],
                per_channel=per_channel,
            )
            errors[place] += np.square(outputs(output, feeds)[0] - wanted).sum()
    assert errors[0] < errors[1]


ALONE = {
    "Relu": "g (float[4,6] x, bool[4,6] m) => (float[4,6] y) { y = Relu (x) }",
    "Clip": "g (float[4,6] x, bool[4,6] m) => (float[4,6] y) { y = Clip (x, low) }",
    "Where": "g (float[4,6] x, bool[4,6] m) => (float[4,6] y) { y = Where (m, x, x) }",
    "Relu of a float Exp": """g (float[4,6] x, bool[4,6] m) => (float[4,6] y)
        { h = Exp (x) y = Relu (h) }""",
}


@pytest.mark.parametrize("form", ["QDQ", "QOperator"])
@pytest.mark.parametrize("name", ALONE)
def test_between_floats_nothing_is_rounded(
    tmp_path: Path, name: str, form: str
) -> None:
    """As in onnxruntime: Relu, Clip and Where are quantized only after quantized inputs."""
    model = parser.parse_model(
        f'<ir_version: 8, opset_import: ["" : 17]> {ALONE[name]}'
    )
    model.graph.initializer.append(numpy_helper.from_array(np.float32(0.1), "low"))
    source, output = str(tmp_path / "float.onnx"), str(tmp_path / "q.onnx")
    onnx.save(model, source)
    random = np.random.default_rng(0)
    feeds = {
        "x": random.normal(size=(4, 6)).astype(np.float32),
        "m": random.random((4, 6)) > 0.5,
    }
    arguments = {"quant_format": quark_onnx.QuantFormat[form]}
    ours.quantize_static(source, output, reader(theirs, [feeds]), **arguments)
    np.testing.assert_array_equal(outputs(output, feeds), outputs(source, feeds))


def test_where_is_quantized_where_it_is_forced() -> None:
    forced = {"extra_options": {"ForceQuantizeNoInputCheck": True}}
    model = networks.convolutions()
    assert translate_static((model, "q", None), {}).config.follow_inputs == (
        "Clip",
        "Relu",
        "Where",
    )
    assert translate_static((model, "q", None), forced).config.follow_inputs == (
        "Clip",
        "Relu",
    )


def test_fixed_scales_of_sigmoids() -> None:
    found = translate_static(
        (networks.attention(), "q", None),
        {"extra_options": {"extra.Sigmoid.nnapi": True}},
    ).config
    assert found.tensors == (
        quark_onnx.TensorOverride("g", dtype="uint8", scale=1 / 256, zero_point=0),
    )


def test_types_by_number_and_by_name() -> None:
    for kind in (
        TensorProto.INT4,
        theirs.QuantType.QInt4,
        quark_onnx.QuantType.QInt4,
        "QInt4",
    ):
        call = translate_static(
            (networks.attention(), "q", None), {"weight_type": kind}
        )
        weight = call.config.weight
        assert weight is not None and weight.dtype.name == "int4"


def test_dynamic_in_the_root_package(tmp_path: Path) -> None:
    source = networks.save(networks.attention(), tmp_path)
    output = tmp_path / "q.onnx"
    for arguments in ((str(source), str(output)), (source, output)):
        result = quark_onnx.quantize_dynamic(
            *arguments, weight_type=quark_onnx.QuantType.QUInt8
        )
        assert onnx.load(output) == result
        weights = {
            tensor.data_type
            for tensor in result.graph.initializer
            if tensor.name.endswith("_quantized")
        }
        assert weights == {TensorProto.UINT8}
    assert quark_onnx.quantize_dynamic(str(source), "DYNAMIC").graph.node


def test_dynamic_options(caplog: pytest.LogCaptureFixture) -> None:
    options = {"ActivationSymmetric": True, "MatMulConstBOnly": False}
    found = translate_dynamic(
        (networks.attention(), "q"),
        {"extra_options": options, "per_channel": True, "reduce_range": True},
    )
    assert found.config.weight is not None
    assert (found.config.weight.per_channel, found.config.weight.reduce_range) == (
        True,
        True,
    )
    assert caplog.text.count("extra option") == 2


def test_default_operators_are_those_of_onnxruntime() -> None:
    from onnxruntime.quantization.registry import QDQRegistry, QLinearOpsRegistry

    found = translate_static((networks.detector(), "q", None), {}).config.op_types
    bare = {kind.rpartition("::")[2] for kind in found}
    if onnxruntime.__version__.startswith("1.32"):
        assert bare == {*QDQRegistry, *QLinearOpsRegistry}
    assert "Conv" in bare and "Sub" not in bare


def test_overrides_of_channels_are_symmetric() -> None:
    """As in onnxruntime, also where the range lies on one side of zero."""
    kind = theirs.QuantType.QUInt8
    one = {"axis": 0, "quant_type": kind, "rmin": 0.0, "rmax": 1.0}
    given = {"w1": [one, *({"rmin": 0.2, "rmax": 0.8, "quant_type": kind},) * 7]}
    [override] = translate_static(
        (networks.convolutions(), "q", None),
        {"extra_options": {"TensorQuantOverrides": given}},
    ).config.tensors
    assert override.symmetric is True and override.axis == 0
