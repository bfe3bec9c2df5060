"""Models beyond what one protobuf message holds: with the limit lowered to 1 MB, every strategy goes through files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import ModelProto, numpy_helper

from calibrators import runner, session
from calibrators.session import open_session
from quark_onnx import QConfig, compare, quantize
from quark_onnx.graph import io
from quark_onnx.steps import finish

LIMIT = 1_000_000
WIDTH = 512


@pytest.fixture(autouse=True)
def small_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name in (
        (session, "PROTOBUF_LIMIT"),
        (runner, "PROTOBUF_LIMIT"),
        (io, "EXTERNAL_DATA_LIMIT"),
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
    model.graph.initializer.append(numpy_helper.from_array(np.ones(WIDTH, np.float32), "bias"))
    return model


def data(count: int = 3) -> list[dict[str, Any]]:
    random = np.random.default_rng(1)
    return [
        {"x": random.normal(size=(4, WIDTH)).astype(np.float32), "i": random.integers(0, WIDTH, 4)}
        for _ in range(count)
    ]


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    (tmp_path / "in").mkdir()
    path = tmp_path / "in" / "model.onnx"
    onnx.save_model(large(), str(path), save_as_external_data=True, location="weights.bin", size_threshold=0)
    return path


@pytest.mark.parametrize("preset", ["A8W8", "A16W8", "XINT8", "DYNAMIC", "INT4", "BF16", "FP8E4M3", "BFP16"])
def test_every_strategy_from_file_to_file(stored: Path, preset: str) -> None:
    before = {path: path.read_bytes() for path in stored.parent.iterdir()}
    output = stored.parent.parent / "out" / "q.onnx"
    needed = data() if QConfig.of(preset).measures else None
    result = quantize(stored, needed, preset, output)
    assert {path: path.read_bytes() for path in stored.parent.iterdir()} == before, "the input is untouched"
    assert sorted(path.name for path in output.parent.iterdir()) == ["q.onnx", "q.onnx.data"]
    assert output.stat().st_size < 200_000, "the weights lie beside it"
    [y, e] = open_session(output).run(None, data(1)[0])
    [expected, looked_up] = open_session(stored).run(None, data(1)[0])
    for found, wanted in ((y, expected), (e, looked_up)):
        noise = float(np.square(found - wanted).sum() / np.square(wanted).sum())
        assert -10 * np.log10(noise + 1e-12) > {"INT4": 12, "FP8E4M3": 20}.get(preset, 25)
    assert result.report.bytes_before > 4 * LIMIT
    assert len(compare(stored, output, data()).outputs) == 2


def test_a_model_in_memory(tmp_path: Path) -> None:
    model = large()
    before = model.SerializeToString()
    quantized = quantize(model, data(), "A8W8").model
    assert model.SerializeToString() == before
    assert quantized.ByteSize() < 0.5 * model.ByteSize()
    quantize(model, data(), "INT4", tmp_path / "q.onnx")
    assert [path.name for path in tmp_path.iterdir()] == ["q.onnx"], "what is small enough again is one file"
