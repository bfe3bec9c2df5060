"""Sessions of a run: how many are opened, and how many bytes of weights are serialized for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx
import pytest

from calibrators.onnx_runtime import session
from calibrators.onnx_runtime.cpu_features import saturates
from calibrators.onnx_runtime.external_tensors import is_stored
from calibrators.onnx_runtime.isolation import Isolation
from quark_onnx import quantize
from quark_onnx.writing.unsigned_codes import faster_unsigned
from tests.models import parse, samples, weight

CHANNELS = 160
#: Maximum number of sessions on the model, and how often its quantized weights are serialized, by
#: preset: int8 activations are measured in unsigned codes, in a model that is no file. Where sums
#: saturate, the result is run as the processor computes it, too.
SESSIONS = {
    "A8W8": (3 + saturates(), 0),
    "XINT8": (4 + (faster_unsigned() or saturates()), 1),
}
#: A model of fewer bytes tells how this processor or this onnxruntime computes.
PROBE = 500


def convolutions() -> onnx.ModelProto:
    """Return a model of 2 MB."""
    shape = f"float[N,{CHANNELS},6,6]"
    return parse(
        f"""g ({shape} x) => ({shape} y) {{
            a = Conv <pads = [1,1,1,1]> (x, w, b) c = Relu (a)
            d = Conv <pads = [1,1,1,1]> (c, v, b) y = Relu (d)
        }}""",
        w=weight(CHANNELS, CHANNELS, 3, 3),
        v=weight(CHANNELS, CHANNELS, 3, 3, seed=1),
        b=weight(CHANNELS),
    )


@pytest.mark.parametrize("preset", SESSIONS)
def test_weights_are_not_serialized_for_each_session(
    preset: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    path = tmp_path / "model.onnx"
    onnx.save(convolutions(), path)
    serialized = list[int]()
    native = session.native_session

    def counted(source: Any, *arguments: Any) -> Any:
        serialized.append(len(source) if isinstance(source, bytes) else 0)
        return native(source, *arguments)

    monkeypatch.setattr(session, "native_session", counted)
    data = samples(convolutions(), count=8)
    first = quantize(path, data, preset, tmp_path / "first.onnx")
    weights = 2 * 4 * CHANNELS * CHANNELS * 9
    probes = [size for size in serialized if 0 < size < PROBE]
    count, copies = SESSIONS[preset]
    assert len(serialized) - len(probes) <= count
    assert sum(serialized) <= 0.05 * weights + copies * weights / 4

    # the same model without a file, whose weights stay in the message
    second = quantize(convolutions(), data, preset, tmp_path / "second.onnx")
    assert (tmp_path / "first.onnx").read_bytes() == (
        tmp_path / "second.onnx"
    ).read_bytes()
    assert first.model == second.model
    assert not any(map(is_stored, first.model.graph.initializer))


def test_another_process_reads_weights_from_one_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "model.onnx"
    onnx.save(convolutions(), path)
    written = list[int]()
    store = Isolation.stored

    def stored(isolation: Isolation, arrays: Any) -> Any:
        found = store(isolation, arrays)
        folder = isolation.folder
        written.append(sum(file.stat().st_size for file in folder.glob("*.weights")))
        assert all(file.stat().st_size < 50_000 for file in folder.glob("*.onnx"))
        return found

    data = samples(convolutions(), count=8)
    expected = quantize(path, data, "XINT8").model
    monkeypatch.setattr(Isolation, "stored", stored)
    assert quantize(path, data, "XINT8", isolate=True).model == expected
    assert len(written) > 2
    assert len(set(written)) == 1
