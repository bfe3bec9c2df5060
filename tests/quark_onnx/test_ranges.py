"""calibrate and ranges: measured once, used by many runs."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnxruntime.quantization.calibrate import (
    CalibrationMethod,
    TensorData,
    TensorsData,
    load_tensors_data,
    save_tensors_data,
)
from onnxruntime.quantization.quant_utils import write_calibration_table

from quark_onnx import Calibration, QConfig, calibrate, quantize
from quark_onnx.common.errors import ConfigError, DataError
from quark_onnx.graph import Graph, tensor_keys
from tests.models import MODELS, conv_relu, parse, residual, samples

CALIBRATORS = ["best", "minmax", "mean_minmax", "percentile", "minmse", "entropy"]
MOVING = "minmax:moving_average=true"


class Data:
    """Samples that count how often they are read."""

    def __init__(self, count: int = 24) -> None:
        self.samples = samples(residual(), count)
        self.runs = 0

    def __iter__(self) -> Any:
        self.runs += 1
        return iter(self.samples)


@pytest.fixture
def ranges(tmp_path: Path) -> Path:
    path = tmp_path / "ranges.json"
    calibrate(residual(), samples(residual(), 24), path)
    return path


@pytest.mark.parametrize("preset", ["A8W8", "S8S8", "A16W8", "XINT8"])
def test_a_file_serves_every_preset_and_calibrator_without_data(
    ranges: Path, preset: str
) -> None:
    for calibrator in CALIBRATORS:
        config = QConfig.of(preset).with_(calibrator=calibrator, search=0)
        result = quantize(residual(), None, config, ranges=ranges)
        assert result.model.graph.node
        assert result.report.samples == 0


@pytest.mark.parametrize("optimizers", [(), ("cle",), ("bias_correction",)])
@pytest.mark.parametrize("preset", ["A8W8", "XINT8"])
def test_a_run_with_what_others_measured_is_the_same_as_one_by_itself(
    preset: str, optimizers: tuple[str, ...]
) -> None:
    """Optimizers that change a tensor have it measured anew."""
    shared = Calibration("")
    data = samples(residual(), 24)
    for calibrator in (*CALIBRATORS, MOVING):
        config = QConfig.of(preset).with_(calibrator=calibrator, optimizers=optimizers)
        alone = quantize(residual(), data, config)
        with_shared = quantize(residual(), data, config, ranges=shared)
        assert with_shared.model == alone.model
        assert with_shared.report.outputs == alone.report.outputs


@pytest.mark.parametrize("name", MODELS)
def test_any_model_is_the_same_with_what_is_measured_for_all(name: str) -> None:
    model = MODELS[name]()
    data = samples(model, 12)
    alone = quantize(model, data, "A8W8")
    assert quantize(model, data, "A8W8", ranges=Calibration("")).model == alone.model


def test_bodies_are_measured_in_each_run(tmp_path: Path) -> None:
    model = MODELS["loop"]()
    path = tmp_path / "ranges.json"
    calibrate(model, samples(model, 12), path)
    with pytest.raises(
        ConfigError, match=r"has bodies \(If, Loop or Scan\).*give data"
    ):
        quantize(model, None, "A8W8", ranges=path)
    quantize(model, samples(model, 12), "A8W8", ranges=path)


def test_all_samples_of_calibrate_count(tmp_path: Path) -> None:
    """No sample is held out, as none judges."""
    data = samples(residual(), 24)
    path = tmp_path / "ranges.json"
    found = calibrate(residual(), data, path)
    assert found.samples == 24 and found.kinds == ["grouped_histogram"]
    document = json.loads(path.read_text(encoding="utf-8"))
    assert document["samples"] == 24
    assert "x" in [row["name"] for row in document["tensors"]]


def test_mixed_precision_and_the_run_measure_once() -> None:
    config = QConfig.of("A8W8").with_(optimizers="auto_mixed_precision:target=99")
    model = residual()
    alone = quantize(model, samples(model, 24), config)
    shared = quantize(model, samples(model, 24), config, ranges=Calibration(""))
    assert alone.model == shared.model


# What does not fit


def test_ranges_of_another_model(ranges: Path) -> None:
    with pytest.raises(ConfigError, match="were measured on another model; measure"):
        quantize(conv_relu(), None, "A8W8", ranges=ranges)


def test_a_statistic_that_there_is_not(ranges: Path) -> None:
    config = QConfig.of("A8W8").with_(calibrator=MOVING)
    with pytest.raises(
        ConfigError,
        match=r"tensors lack a statistic that this configuration needs .*there are"
        r" grouped_histogram of \d+ tensors; give data, or measure anew",
    ):
        quantize(residual(), None, config, ranges=ranges)
    quantize(residual(), samples(residual(), 24), config, ranges=ranges)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "it is empty"),
        (b"{", "is no JSON: line 1, column 2"),
        (b"\xff\xfe", "is no text in UTF-8: byte 0 is 0xff"),
        (b'{"quark_onnx_ranges": 99}', "not of this version of the package"),
        (
            b'{"quark_onnx_ranges": 1, "model": "a", "samples": 1}',
            "without the key 'tensors'",
        ),
        (b'{"data": 3}', "data is 3, and must be an object"),
        (
            b'{"data": {"x": {"lowest": "a", "highest": 1}}}',
            r"data\.x\.lowest is 'a', and",
        ),
        (b'{"data": {"x": {"lowest": NaN, "highest": 1}}}', "must be a finite number"),
        (b'{"data": {"x": {"lowest": 2, "highest": 1}}}', "is from 2.0 to 1.0"),
        (b"TRT-8601-EntropyCalibration2\nx: zz\n", "line 2 is 'x: zz'"),
        (b"x\n", "line 1 is 'x'"),
        (b"elsewhere 2.5\n", "none of its tensors is in the model"),
    ],
)
def test_files_that_hold_no_ranges(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "ranges"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=words):
        quantize(residual(), None, "A8W8", ranges=path)


@pytest.mark.parametrize("value", [3, "", "a\0b"])
def test_what_is_no_file(value: Any) -> None:
    with pytest.raises(ConfigError, match="ranges is"):
        quantize(residual(), None, "A8W8", ranges=value)
    with pytest.raises(ConfigError, match="cannot be read"):
        quantize(residual(), None, "A8W8", ranges="nowhere.json")


def test_calibrating_nothing() -> None:
    with pytest.raises(ConfigError, match="config measures no activation"):
        calibrate(residual(), samples(residual()), config="W8")
    with pytest.raises(ConfigError, match="unknown format of ranges 'tensort'"):
        calibrate(residual(), samples(residual()), format="tensort")
    with pytest.raises(DataError, match="holds no sample"):
        calibrate(residual(), [])


# Formats of other tools


def ends(path: Path) -> dict[str, tuple[float, float]]:
    """What onnxruntime reads in its own format."""
    return {
        name: tuple(float(np.min(end)) for end in found.range_value)  # type: ignore[misc]
        for name, found in load_tensors_data(path).items()
    }


def test_onnxruntime_reads_what_is_written_for_it(tmp_path: Path) -> None:
    path = tmp_path / "cache.json"
    config = QConfig.of("A8W8").with_(calibrator="minmax")
    data = samples(residual(), 24)
    calibrate(residual(), data, path, config=config, format="onnxruntime")
    low, high = ends(path)["x"]
    assert low == min(float(sample["x"].min()) for sample in data)
    assert high == max(float(sample["x"].max()) for sample in data)


def test_tensorrt_gets_the_bits_of_a_scale(tmp_path: Path) -> None:
    path = tmp_path / "cache"
    config = QConfig.of("A8W8").with_(calibrator="minmax")
    data = samples(residual(), 24)
    calibrate(residual(), data, path, config=config, format="tensorrt")
    first, *rows = path.read_text(encoding="utf-8").splitlines()
    assert first.startswith("TRT-") and first.endswith("-EntropyCalibration2")
    (bits,) = [row.removeprefix("x: ") for row in rows if row.startswith("x: ")]
    greatest = max(float(np.abs(sample["x"]).max()) for sample in data)
    assert struct.unpack(">f", bytes.fromhex(bits))[0] == np.float32(greatest / 127)


@pytest.mark.parametrize("kind", ["tensorrt", "onnxruntime", "saved", "table", "text"])
def test_caches_of_other_tools_are_read(tmp_path: Path, kind: str) -> None:
    """All tensors get the range that the cache has."""
    names = [
        entry.name for _, entry in calibrate(residual(), samples(residual())).entries()
    ]
    path = tmp_path / "cache"
    given = {
        name: TensorData(lowest=np.float32(-2), highest=np.float32(2)) for name in names
    }
    # str.splitlines would end a line within this name.
    given["else\u2028where"] = given["x"]
    if kind == "tensorrt":
        bits = struct.pack(">f", 2 / 127).hex()
        lines = ["TRT-8503-EntropyCalibration2", *(f"{name}: {bits}" for name in given)]
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    elif kind in ("table", "text"):
        write_calibration_table(given, str(tmp_path))
        path = tmp_path / (
            "calibration.json" if kind == "table" else "calibration.cache"
        )
    else:
        save_tensors_data(TensorsData(CalibrationMethod.MinMax, given), path)
    result = quantize(residual(), None, "S8S8", ranges=path)
    constants = {each.name: each for each in result.model.graph.initializer}
    (scale,) = [
        constants[node.input[1]]
        for node in result.model.graph.node
        if node.op_type == "QuantizeLinear" and node.input[0] == "x"
    ]
    found = np.frombuffer(scale.raw_data or struct.pack("f", scale.float_data[0]), "f")
    np.testing.assert_allclose(found, [2 / 127], rtol=0.01)


# Keys of tensors


def test_keys_tell_what_a_tensor_is_computed_of() -> None:
    text = (
        "g (float[2,4] x) => (float[2,4] y) { a = Relu (x) b = %s (a, c) y = Neg (b) }"
    )

    def keys(operator: str, value: float, text: str = text) -> dict[str, str]:
        return tensor_keys(Graph.of(parse(text % operator, c=np.float32([value]))))

    plain, other, constant = keys("Add", 1), keys("Mul", 1), keys("Add", 2)
    for changed in (other, constant):
        assert changed["a"] == plain["a"]
        assert changed["b"] != plain["b"] and changed["y"] != plain["y"]
    renamed = keys("Add", 1, text.replace(" a = ", " r = ").replace("(a, c)", "(r, c)"))
    assert renamed["y"] == plain["y"]
    assert len(set(plain.values())) == len(plain)


def test_a_file_of_ranges_knows_its_samples(tmp_path: Path) -> None:
    """ "Held out" is said of samples that no range was measured on, and of no others.

    A file of an earlier version does not know its samples, which are then taken as seen.
    """
    path, data = tmp_path / "ranges.json", samples(residual(), 32)
    calibrate(residual(), data, path)
    fresh = quantize(residual(), data, "A8W8").report
    assert fresh.held_out == 3 and not any("the ranges" in note for note in fresh.notes)
    seen = quantize(residual(), data, "A8W8", ranges=path).report
    assert seen.held_out == 0 and seen.clipping is None
    assert "on calibration samples (none is held out)" in str(seen)
    assert any("were measured on all of these samples" in each for each in seen.notes)
    others = [*data[:16], *samples(residual(), 16, seed=1)]
    partly = quantize(residual(), others, "A8W8", ranges=path).report
    assert partly.held_out == 2
    assert any("measured on 1 of 3 held-out samples" in each for each in partly.notes)
    new = quantize(residual(), samples(residual(), 32, seed=1), "A8W8", ranges=path)
    assert new.report.held_out == 3
    document = json.loads(path.read_text(encoding="utf-8"))
    assert len(document["digests"]) == document["samples"] == 32
    del document["digests"]
    path.write_text(json.dumps(document), encoding="utf-8")
    unknown = quantize(residual(), samples(residual(), 32, seed=1), "A8W8", ranges=path)
    assert unknown.report.held_out == 0


def test_statistics_of_a_run_do_not_spoil_its_held_out_samples() -> None:
    data, shared = samples(residual(), 32), Calibration("")
    for _ in range(2):
        assert quantize(residual(), data, "A8W8", ranges=shared).report.held_out == 3
    assert len(shared.digests) == 29
