"""Models beyond what one protobuf message holds: with the limit lowered to 1 MB, every strategy
goes through files.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import ModelProto, numpy_helper

from calibrators.onnx_runtime import external_tensors as stored_values
from calibrators.onnx_runtime import runner, session
from calibrators.onnx_runtime.session import open_session
from quark_onnx import QConfig, compare, quantize
from quark_onnx.common.errors import AccuracyError
from quark_onnx.files import io
from quark_onnx.graph import store
from quark_onnx.writing.finish import finish

LIMIT = 1_000_000
WIDTH = 512


@pytest.fixture(autouse=True)
def small_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name in (
        (session, "PROTOBUF_LIMIT"),
        (runner, "PROTOBUF_LIMIT"),
        (io, "EXTERNAL_DATA_LIMIT"),
        (store, "LARGE_MODEL"),
        (__import__("sys").modules[finish.__module__], "PROTOBUF_LIMIT"),
    ):
        monkeypatch.setattr(module, name, LIMIT)


def large() -> ModelProto:
    """Four layers of 1 MB each, the last weight tied to a look-up table."""
    model = onnx.parser.parse_model(f"""<ir_version: 10, opset_import: ["" : 21]>
        g (float[N, {WIDTH}] x, int64[N] i) => (float[N, {WIDTH}] y, float[N, {WIDTH}] e) {{
            a = MatMul (x, w0)
            b = Relu (a)
            c = MatMul (b, w1)
            d = Gelu (c)
            f = Gemm (d, w2, bias)
            y = Tanh (f)
            e = Gather (w3, i)
        }}""")
    random = np.random.default_rng(0)
    for place in range(4):
        weight = (random.normal(size=(WIDTH, WIDTH)) / 16).astype(np.float32)
        model.graph.initializer.append(numpy_helper.from_array(weight, f"w{place}"))
    model.graph.initializer.append(
        numpy_helper.from_array(np.ones(WIDTH, np.float32), "bias")
    )
    return model


def data(count: int = 3) -> list[dict[str, Any]]:
    random = np.random.default_rng(1)
    return [
        {
            "x": random.normal(size=(4, WIDTH)).astype(np.float32),
            "i": random.integers(0, WIDTH, 4),
        }
        for _ in range(count)
    ]


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    (tmp_path / "in").mkdir()
    path = tmp_path / "in" / "model.onnx"
    onnx.save_model(
        large(),
        str(path),
        save_as_external_data=True,
        location="weights.bin",
        size_threshold=0,
    )
    return path


@pytest.mark.parametrize(
    "preset", ["A8W8", "A16W8", "XINT8", "DYNAMIC", "INT4", "BF16", "FP8E4M3", "BFP16"]
)
def test_every_strategy_from_file_to_file(stored: Path, preset: str) -> None:
    before = {path: path.read_bytes() for path in stored.parent.iterdir()}
    output = stored.parent.parent / "out" / "q.onnx"
    needed = data() if QConfig.of(preset).measures else None
    result = quantize(stored, needed, preset, output)
    assert {path: path.read_bytes() for path in stored.parent.iterdir()} == before, (
        "the input is untouched"
    )
    assert sorted(path.name for path in output.parent.iterdir()) == [
        "q.onnx",
        "q.onnx.data",
    ]
    assert output.stat().st_size < 200_000, "the weights lie beside it"
    [y, e] = open_session(output).run(None, data(1)[0])
    [expected, looked_up] = open_session(stored).run(None, data(1)[0])
    for found, wanted in ((y, expected), (e, looked_up)):
        noise = float(np.square(found - wanted).sum() / np.square(wanted).sum())
        assert -10 * np.log10(noise + 1e-12) > {"INT4": 12, "FP8E4M3": 20}.get(
            preset, 25
        )
    assert result.report.bytes_before > 4 * LIMIT
    assert len(compare(stored, output, data()).outputs) == 2


def test_a_model_in_memory(tmp_path: Path) -> None:
    model = large()
    before = model.SerializeToString()
    quantized = quantize(model, data(), "A8W8").model
    assert model.SerializeToString() == before
    assert quantized.ByteSize() < 0.5 * model.ByteSize()
    quantize(model, data(), "INT4", tmp_path / "q.onnx")
    assert [path.name for path in tmp_path.iterdir()] == ["q.onnx"], (
        "what is small enough again is one file"
    )


def test_a_model_in_float16(stored: Path, tmp_path: Path) -> None:
    model = onnx.load(stored)
    for tensor in model.graph.initializer:
        half = numpy_helper.to_array(tensor).astype(np.float16)
        tensor.CopyFrom(numpy_helper.from_array(half, tensor.name))
    for value in (model.graph.input[0], *model.graph.output):
        value.type.tensor_type.elem_type = onnx.TensorProto.FLOAT16
    source = tmp_path / "half.onnx"
    onnx.save_model(
        model,
        str(source),
        save_as_external_data=True,
        location="half.bin",
        size_threshold=0,
    )
    result = quantize(source, None, "INT4", tmp_path / "out" / "q.onnx")
    sample = {"x": data(1)[0]["x"].astype(np.float16), "i": data(1)[0]["i"]}
    [y, _] = open_session(tmp_path / "out" / "q.onnx").run(None, sample)
    [expected, _] = open_session(source).run(None, sample)
    assert y.dtype == np.float16
    assert np.abs(y - expected).mean() < 0.2 * np.abs(expected).mean()
    assert result.report.bytes_after < 0.6 * result.report.bytes_before
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "half.bin",
        "half.onnx",
        "in",
        "out",
    ]


def test_nothing_is_left_behind_when_the_result_is_refused(
    stored: Path, tmp_path: Path
) -> None:
    with pytest.raises(AccuracyError, match="the minimum is 90 dB"):
        quantize(
            stored, None, QConfig.of("INT4").with_(min_sqnr=90.0), tmp_path / "q.onnx"
        )
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


PEAK = """
import sys, threading, time
from pathlib import Path
peak = [0]
def resident():
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon"))
    return int(line.split()[1]) / 1024
def watch():
    while True:
        peak[0] = max(peak[0], resident())
        time.sleep(0.005)
from quark_onnx import quantize_weights
start = resident()
threading.Thread(target=watch, daemon=True).start()
quantize_weights(sys.argv[1], sys.argv[2], sys.argv[3])
print((peak[0] - start) * 1.048576)
"""  # noqa: E501


def peak_of(model: Path, preset: str, output: Path) -> float:
    """The peak of a process's own memory while it quantizes weights, in MB."""
    done = subprocess.run(
        [sys.executable, "-c", PEAK, str(model), preset, str(output)],
        text=True,
        capture_output=True,
        check=True,
    )
    return float(done.stdout)


needs_proc = pytest.mark.skipif(
    not Path("/proc/self/status").exists(),
    reason="the system does not tell how much memory is used",
)


@needs_proc
@pytest.mark.parametrize("preset", ["W8", "INT4"])
def test_a_model_of_one_file_takes_one_copy_of_the_result(
    preset: str, tmp_path: Path
) -> None:
    layers, width = 50, 1024
    text = "".join(f"t{i + 1} = MatMul (t{i}, w{i}) " for i in range(layers))
    shapes = f"(float[N, {width}] t0) => (float[N, {width}] t{layers})"
    model = onnx.parser.parse_model(
        f'<ir_version: 10, opset_import: ["" : 21]> g {shapes} {{{text}}}'
    )
    random = np.random.default_rng(0)
    model.graph.initializer.extend(
        numpy_helper.from_array(
            random.standard_normal((width, width), np.float32), f"w{i}"
        )
        for i in range(layers)
    )
    onnx.save(model, tmp_path / "m.onnx")
    found = peak_of(tmp_path / "m.onnx", preset, tmp_path / "out" / "q.onnx")
    result = (tmp_path / "out" / "q.onnx").stat().st_size / 1e6
    working = 40  # MB: onnxruntime, and what is worked on at a time
    assert found < result + working, (found, result)


@pytest.mark.slow
@needs_proc
@pytest.mark.parametrize(("preset", "share"), [("INT8", 1 / 4), ("INT4", 5 / 32)])
def test_weights_alone_take_the_memory_of_the_largest_tensor_and_of_the_result(
    preset: str, share: float, tmp_path: Path
) -> None:
    layers, width = 7, 4096
    size, text = (
        width * width * 4,
        "".join(f"t{i + 1} = MatMul (t{i}, w{i}) " for i in range(layers)),
    )
    shapes = f"(float[N, {width}] t0) => (float[N, {width}] t{layers})"
    model = onnx.parser.parse_model(
        f'<ir_version: 10, opset_import: ["" : 21]> g {shapes} {{{text}}}'
    )
    with (tmp_path / "w.bin").open("wb") as file:
        for place in range(layers):
            weight = (
                np.random.default_rng(place).standard_normal((width, width), np.float32)
                / width**0.5
            )
            tensor = onnx.TensorProto(name=f"w{place}", data_type=1, dims=weight.shape)
            stored_values.place(
                tensor, "w.bin", file.tell(), file.write(weight.tobytes())
            )
            model.graph.initializer.append(tensor)
    (tmp_path / "m.onnx").write_bytes(model.SerializeToString())
    found = peak_of(tmp_path / "m.onnx", preset, tmp_path / "out" / "q.onnx")
    working = 100  # MB: onnxruntime and what is worked on at a time, whatever the model
    assert (
        found
        < (size + share * layers * size) / 1e6 + working
        < layers * size / 1e6 / 1.5
    )
