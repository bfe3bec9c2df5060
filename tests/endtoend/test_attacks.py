"""What a careless or hostile caller does: each is served right, or refused with an error of this package."""

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
from calibrators.session import open_session
from quark_onnx import Override, QConfig, quantize_static
from quark_onnx.errors import ConfigError, ModelError

DENSE = onnx.parser.parse_model("""<ir_version: 8, opset_import: ["" : 17]>
    g (float[N, 3] x) => (float[N, 2] y) <float[3, 2] w = {1, 2, 3, 4, 5, 6}> {
        h = MatMul (x, w)
        r = Relu (h)
        y = Sigmoid (r)
    }""")


def samples(count: int = 24) -> Iterator[dict[str, Any]]:
    for seed in range(count):
        yield {"x": np.random.default_rng(seed).normal(0, 1 + seed, (4, 3)).astype(np.float32)}


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
    assert quantize_static(DENSE, source(), preset).SerializeToString() == expected.SerializeToString()


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
    with pytest.raises(ConfigError, match="overrides is None; it must be a list of Override"):
        QConfig(overrides=None)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="between of an override is 5; it takes two sets of names"):
        Override(between=5, keep=True)  # type: ignore[arg-type]
    for calibrator, settings in (
        (Percentile, {"percentile": "abc"}),
        (MinMSE, {"steps": 0}),
        (Entropy, {"candidates": 0}),
    ):
        with pytest.raises(CalibrationError, match="it must be a number"):
            calibrator(**settings)


@pytest.mark.parametrize("preset", ["A8W8", "S8S8", "A16W8", "XINT8"])
@pytest.mark.parametrize(("opset", "shape", "axis"), [(13, "N, 1, 4", 1), (17, "N, 1", -1), (11, "N, 2, 1, 1", 2)])
def test_softmax_of_a_single_value_is_one(opset: int, shape: str, axis: int, preset: str) -> None:
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
        '<ir_version: 8, opset_import: ["" : 17]> g (float[N, 64] x) => (float[N, 64] y) { y = MatMul (x, w) }'
    )
    model.graph.initializer.append(numpy_helper.from_array(weight, "w"))
    onnx.save_model(model, str(folder / "m.onnx"), save_as_external_data=True, location=location, size_threshold=0)
    return folder / "m.onnx"


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize(("location", "output"), [("q.onnx.data", "q.onnx"), ("weights", "weights")])
def test_output_that_would_replace_weights_of_the_input(tmp_path: Path, location: str, output: str) -> None:
    path = stored(tmp_path, location)
    before = contents(tmp_path)
    with pytest.raises(ConfigError, match=f"would replace '{location}', which holds weights of the input model"):
        quantize_static(path, [{"x": np.ones((2, 64), np.float32)}], "A8W8", tmp_path / output)
    assert contents(tmp_path) == before


def test_weights_that_are_not_loaded(tmp_path: Path) -> None:
    model = onnx.load(str(stored(tmp_path, "w.data")), load_external_data=False)
    with pytest.raises(ModelError, match=r"not loaded, they lie in \['w.data'\]; pass its path"):
        quantize_static(model, [{"x": np.ones((2, 64), np.float32)}])


@pytest.mark.parametrize("output", [5, b"q.onnx", "q\0.onnx"])
def test_output_that_is_no_path(output: Any) -> None:
    with pytest.raises(ConfigError, match="it must be a path"):
        quantize_static(DENSE, list(samples()), "A8W8", output)


def test_input_that_is_no_path() -> None:
    with pytest.raises(ModelError, match="cannot be read: embedded null byte"):
        quantize_static("q\0.onnx", list(samples()))


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no pipes in this file system")
def test_output_that_is_a_device_or_a_pipe(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match="a device or a pipe, which a file would replace"):
        quantize_static(DENSE, list(samples()), "A8W8", tmp_path / "pipe")


def test_output_over_a_file_that_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "q.onnx").write_bytes(b"junk")
    (tmp_path / "q.onnx.data").write_bytes(b"mine")
    quantized = quantize_static(DENSE, list(samples()), "A8W8", tmp_path / "q.onnx")
    written = ModelProto.FromString((tmp_path / "q.onnx").read_bytes())
    assert written.graph == quantized.graph
    assert sorted(contents(tmp_path)) == ["q.onnx", "q.onnx.data"]
    assert contents(tmp_path)["q.onnx.data"] == b"mine"
