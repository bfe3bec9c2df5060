"""Calibrators under AMD Quark's names, compared with numpy and with onnxruntime."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import ModelProto, numpy_helper, parser

from quark_onnx.common.errors import ConfigError, DataError
from quark_onnx.onnx import (
    CalibraterBase,
    CalibrationDataReader,
    CalibrationMethod,
    LayerWiseMethod,
    MinMaxCalibrater,
    PowerOfTwoMethod,
    create_calibrator_float_scale,
    create_calibrator_power_of_two,
    dump_model,
    quantize_static,
    write_calibration_table,
)
from quark_onnx.onnx.calibration import (
    calibrate_model,
    fake_calibration,
    get_data_reader,
    nearest_non_passthrough_ancestor_mapping,
    run_calibration,
    update_tensors_range_with_dependencies,
)

RNG = np.random.default_rng(0)
SAMPLES = [RNG.normal(size=(4, 8)).astype(np.float32) for _ in range(5)]


class Reader(CalibrationDataReader):
    """Reader of the samples."""

    def __init__(self, samples: list[Any]) -> None:
        self.samples = iter(samples)

    def get_next(self) -> dict[str, Any] | None:
        sample = next(self.samples, None)
        return None if sample is None else {"x": sample}


@pytest.fixture
def weighted() -> ModelProto:
    model = parser.parse_model(
        """<ir_version: 9, opset_import: ["": 17]> g (float[4,8] x) => (float[32] z)
        <int64[1] shape = {32}>
        { a = MatMul (x, w)
          y = Relu (a)
          z = Reshape (y, shape) }"""
    )
    weight = np.random.default_rng(1).normal(size=(8, 8)).astype(np.float32)
    model.graph.initializer.append(numpy_helper.from_array(weight, "w"))
    return model


def ends(data: Any) -> dict[str, tuple[float, float]]:
    """Return the ranges of a TensorsData."""
    ranges = {name: data[name].range_value for name in data.keys()}  # noqa: SIM118
    return {name: (low.item(), high.item()) for name, (low, high) in ranges.items()}


def test_ranges_are_those_of_onnxruntime(weighted: ModelProto, tmp_path: Path) -> None:
    from onnxruntime.quantization.calibrate import create_calibrator

    onnx.save(weighted, tmp_path / "model.onnx")
    theirs = create_calibrator(
        tmp_path / "model.onnx", augmented_model_path=str(tmp_path / "augmented.onnx")
    )
    theirs.collect_data(Reader(SAMPLES))
    ours = create_calibrator_float_scale(weighted)
    ours.collect_data(Reader(SAMPLES[:2]))
    ours.collect_data(Reader(SAMPLES[2:]))
    expected, found = ends(theirs.compute_data()), ends(ours.compute_data())
    assert found.keys() == expected.keys()
    for name, (low, high) in expected.items():
        # Ranges here include zero, which must have a code.
        assert found[name] == pytest.approx((min(low, 0), max(high, 0)), rel=1e-6)


def test_a_percentile_is_that_of_numpy(weighted: ModelProto) -> None:
    calibrator = create_calibrator_float_scale(
        weighted,
        ["MatMul"],
        calibrate_method=CalibrationMethod.Percentile,
        extra_options={"percentile": 90.0},
    )
    calibrator.collect_data(Reader(SAMPLES))
    low, high = ends(calibrator.compute_data())["x"]
    magnitudes = np.abs(np.concatenate(SAMPLES, dtype=np.float64))
    assert low == -high
    # The bins of a histogram are narrower than the distance of neighbours here.
    assert 0.8 * np.quantile(magnitudes, 0.8) < high < np.quantile(magnitudes, 0.97)


@pytest.mark.parametrize("method", PowerOfTwoMethod)
def test_power_of_two_ranges(weighted: ModelProto, method: PowerOfTwoMethod) -> None:
    calibrator = create_calibrator_power_of_two(weighted, calibrate_method=method)
    assert isinstance(calibrator, CalibraterBase)
    calibrator.collect_data(Reader(SAMPLES))
    low, high = ends(calibrator.compute_data())["x"]
    values = np.concatenate(SAMPLES, dtype=np.float64)

    def error(scale: float) -> float:
        codes = np.clip(np.rint(values / scale), -128, 127)
        return float(np.sum((values - codes * scale) ** 2))

    exponent = np.ceil(np.log2(max(high / 127, -low / 128)))
    if method is PowerOfTwoMethod.NonOverflow:
        assert 2.0**exponent * 127 >= values.max()
        assert 2.0 ** (exponent - 1) * 127 < np.abs(values).max()
    else:
        best = min(error(2.0**power) for power in range(-10, 2))
        assert error(2.0**exponent) == pytest.approx(best, rel=1e-9)


def test_calibration_as_a_function(weighted: ModelProto) -> None:
    method = LayerWiseMethod.LayerWisePercentile
    one = run_calibration(weighted, Reader(SAMPLES), calibrate_method=method)
    two = calibrate_model(weighted, Reader(SAMPLES), calibrate_method=method)
    assert ends(one) == ends(two)
    first = run_calibration(
        weighted, Reader(SAMPLES), extra_options={"CalibDataSize": 1}
    )
    low, high = float(SAMPLES[0].min()), float(SAMPLES[0].max())
    assert ends(first)["x"] == pytest.approx((low, high), rel=1e-6)
    symmetric = run_calibration(
        weighted, Reader(SAMPLES), extra_options={"CalibTensorRangeSymmetric": True}
    )
    assert all(low == -high for low, high in ends(symmetric).values())
    assert set(ends(fake_calibration(weighted)).values()) == {(0.0, 1.0)}


def test_errors(weighted: ModelProto) -> None:
    with pytest.raises(
        ConfigError, match=r"calibrate_method.*MinMax.*one of: NonOverflow"
    ):
        create_calibrator_power_of_two(weighted, calibrate_method="MinMax")
    with pytest.raises(ConfigError, match="per_channel is True"):
        MinMaxCalibrater(weighted, per_channel=True)
    with pytest.raises(DataError, match="has no sample"):
        MinMaxCalibrater(weighted).collect_data(Reader([]))
    with pytest.raises(DataError, match="call collect_data first"):
        MinMaxCalibrater(weighted).compute_data()
    with pytest.raises(ConfigError, match="Percentile: percentile is 200"):
        create_calibrator_float_scale(
            weighted,
            calibrate_method="Percentile",
            extra_options={"percentile": 200},
        )


def test_readers(weighted: ModelProto, tmp_path: Path) -> None:
    reader = Reader(SAMPLES)
    assert get_data_reader(weighted, reader, "folder") is reader
    np.save(tmp_path / "a.npy", SAMPLES[0])
    read = get_data_reader(weighted, None, tmp_path).get_next()
    assert np.array_equal(read["x"], SAMPLES[0])
    random = get_data_reader(weighted, extra_options={"UseRandomData": True})
    assert random.get_next()["x"].shape == (4, 8)
    with pytest.raises(ConfigError, match="there is no calibration data"):
        get_data_reader(weighted)


def test_ranges_follow_values_that_are_passed_on(weighted: ModelProto) -> None:
    sources, without = nearest_non_passthrough_ancestor_mapping(weighted, ["Reshape"])
    assert (sources, without) == ({"z": "y"}, [])
    relu_too, _ = nearest_non_passthrough_ancestor_mapping(
        weighted, ["Reshape", "Relu"]
    )
    assert relu_too == {"y": "a", "z": "a"}
    ranges = run_calibration(weighted, Reader(SAMPLES))
    updated = ends(update_tensors_range_with_dependencies(ranges, relu_too))
    before = ends(ranges)
    assert updated["z"] == updated["y"] == before["a"] != before["y"]
    assert updated["x"] == before["x"]


def test_a_table_of_ranges(weighted: ModelProto, tmp_path: Path) -> None:
    pytest.importorskip("flatbuffers", reason="onnxruntime writes one with it")
    data = run_calibration(weighted, Reader(SAMPLES))
    write_calibration_table(data.data, tmp_path)
    lines = (tmp_path / "calibration.cache").read_text("utf-8").splitlines()
    assert {line.split()[0] for line in lines} == {"x", "a", "y", "z"}


def test_a_dump_has_codes_and_floats(weighted: ModelProto, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no QuantizeLinear"):
        dump_model(weighted, output_dir=tmp_path)
    dump_model(
        weighted, Reader(SAMPLES), dump_float=True, output_dir=tmp_path / "float"
    )
    found = np.fromfile(tmp_path / "float/a_float.bin", np.float32)
    weight = numpy_helper.to_array(weighted.graph.initializer[1]).astype(np.float64)
    expected = SAMPLES[0].astype(np.float64) @ weight
    assert np.allclose(found, expected.reshape(-1), rtol=1e-5, atol=1e-5)
    assert np.allclose(np.loadtxt(tmp_path / "float/a_float.txt"), found, rtol=1e-6)
    quantize_static(weighted, tmp_path / "q.onnx", Reader(SAMPLES))
    dump_model(tmp_path / "q.onnx", Reader(SAMPLES), output_dir=tmp_path / "codes")
    codes = list((tmp_path / "codes").glob("*.bin"))
    assert codes and not list((tmp_path / "codes").glob("*_float.*"))
