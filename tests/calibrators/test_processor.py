"""Models compute the same on all processors, whatever the kernels of this one make of 8-bit
products.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from onnx import ModelProto
from onnx.reference import ReferenceEvaluator

import calibrators.onnx_runtime.session
from calibrators.onnx_runtime.cpu_features import saturates
from calibrators.onnx_runtime.session import DEFINED, PRECISE, is_defined, open_session
from calibrators.onnx_runtime.worker import SessionSettings
from tests.models import Feeds, normal, parse


def largest() -> tuple[ModelProto, Feeds]:
    """Q/DQ pairs around a product of the largest codes, some of which cancel.

    Every number is exact.
    """
    model = parse(
        """g (float[N,64] x) => (float[N,32] y) {
            q = QuantizeLinear (x, one, zero) d = DequantizeLinear (q, one, zero)
            v = DequantizeLinear (w, one) h = MatMul (d, v)
            p = QuantizeLinear (h, wide, center) y = DequantizeLinear (p, wide, center)
        }""",
        opset=19,
        w=np.where(normal(64, 32) > 0, 127, -127).astype(np.int8),
        one=np.float32(1),
        zero=np.uint8(0),
        wide=np.float32(2**14),
        center=np.uint8(128),
    )
    return model, {"x": np.full((4, 64), 255, np.float32)}


def test_sessions_compute_what_onnx_defines_on_any_processor() -> None:
    model, feeds = largest()
    [expected] = ReferenceEvaluator(model).run(None, feeds)
    np.testing.assert_array_equal(open_session(model).run(None, feeds)[0], expected)
    np.testing.assert_array_equal(
        open_session(model, integers=False).run(None, feeds)[0], expected
    )
    on_integers = open_session(model, integers=True).run(None, feeds)[0]
    assert np.array_equal(on_integers, expected) != saturates()


def products(codes: str) -> tuple[ModelProto, Feeds]:
    """Operators on codes, the largest ones."""
    model = parse(
        "g (float[N,64] x) => (float[N,32] y) { q, s, z = DynamicQuantizeLinear (x)"
        " h = MatMulInteger (q, w, z) f = Cast <to = 1> (h) y = Mul (f, s) }",
        opset=19,
        w=np.full((64, 32), 127, codes),
    )
    return model, {"x": np.full((4, 64), 255, np.float32)}


def test_operators_on_codes_are_exact_on_any_processor() -> None:
    model, feeds = products("int8")
    expected = np.full((4, 32), 255 * 127 * 64, np.float32)
    np.testing.assert_array_equal(open_session(model).run(None, feeds)[0], expected)
    on_integers = open_session(model, integers=True).run(None, feeds)[0]
    assert np.array_equal(on_integers, expected) != saturates()
    model, feeds = products("uint8")
    np.testing.assert_array_equal(
        open_session(model, integers=True).run(None, feeds)[0], expected
    )


def entries(session: Any) -> tuple[bool, bool]:
    """Whether weights become uint8 ones, and whether pairs are kept apart."""

    def on(entry: str) -> bool:
        try:
            return bool(
                session.get_session_options().get_session_config_entry(entry) == "1"
            )
        except RuntimeError:  # there is no such entry
            return False

    assert is_defined(session) == on(DEFINED)
    return on(PRECISE), on(DEFINED)


@pytest.mark.parametrize("wrong", [True, False])
def test_kernels_that_saturate_are_used_where_they_are_asked_for(
    wrong: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calibrators.onnx_runtime.session, "saturates", lambda: wrong)
    model, _ = largest()
    found = [
        entries(open_session(model, integers=each)) for each in (None, True, False)
    ]
    assert found == [(wrong, False), (False, False), (False, True)]


def test_where_weights_cannot_become_others_pairs_are_kept_apart(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As onnxruntime 1.32 has it for convolutions with one weight."""
    module, opened = (
        calibrators.onnx_runtime.session,
        calibrators.onnx_runtime.session.open_source,
    )

    def refused(source: str | bytes, settings: SessionSettings, *more: Any) -> Any:
        if PRECISE not in settings.entries:
            return opened(source, settings, *more)
        raise RuntimeError("AddInitializerWithOrtValue")

    monkeypatch.setattr(module, "saturates", lambda: True)
    monkeypatch.setattr(module, "open_source", refused)
    model, feeds = largest()
    session = open_session(model)
    assert entries(session) == (False, True)
    np.testing.assert_array_equal(
        session.run(None, feeds)[0], ReferenceEvaluator(model).run(None, feeds)[0]
    )


@pytest.mark.parametrize(
    "scales, product", [("scales", "MatMul (d, v)"), ("scales, zeros", "MatMul (v, d)")]
)
def test_where_converted_weights_do_not_run_pairs_are_kept_apart(
    scales: str, product: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As onnxruntime 1.32 has it for weights per channel without zero points, and for those on the
    left.
    """
    monkeypatch.setattr(calibrators.onnx_runtime.session, "saturates", lambda: True)
    model = parse(
        f"""g (float[16,16] x) => (float[16,16] y) {{
            q = QuantizeLinear (x, one, zero) d = DequantizeLinear (q, one, zero)
            v = DequantizeLinear <axis = 1> (w, {scales}) h = {product}
            p = QuantizeLinear (h, one, zero) y = DequantizeLinear (p, one, zero)
        }}""",
        opset=19,
        w=np.where(normal(16, 16) > 0, 3, -3).astype(np.int8),
        scales=2.0 ** np.arange(-8, 8, dtype=np.float32),
        zeros=np.zeros(16, np.int8),
        one=np.float32(1),
        zero=np.uint8(128),
    )
    feeds = {"x": normal(16, 16) * 9}
    session = open_session(model)
    [expected] = ReferenceEvaluator(model).run(None, feeds)
    for _ in range(2):
        np.testing.assert_array_equal(session.run(None, feeds)[0], expected)
    with pytest.raises(Exception, match="Required inputs"):
        session.run(None, {"z": feeds["x"]})


def test_a_run_that_no_session_can_do_fails_as_it_does_elsewhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(calibrators.onnx_runtime.session, "saturates", lambda: True)
    model, feeds = largest()
    session = open_session(model)
    with pytest.raises(Exception, match="Required inputs"):
        session.run(None, {"z": feeds["x"]})
    np.testing.assert_array_equal(
        session.run(None, feeds)[0], ReferenceEvaluator(model).run(None, feeds)[0]
    )
