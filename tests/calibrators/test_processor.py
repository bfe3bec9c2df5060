"""Models compute what ONNX defines, whatever this processor's kernels make of 8-bit products."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import ModelProto
from onnx.reference import ReferenceEvaluator

import calibrators.session
from calibrators.processor import saturates
from calibrators.session import open_session
from tests.models import Feeds, normal, parse


def largest() -> tuple[ModelProto, Feeds]:
    """Q/DQ pairs around a product of the largest codes, some of which cancel; every number is exact."""
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
    np.testing.assert_array_equal(open_session(model, integers=False).run(None, feeds)[0], expected)
    on_integers = open_session(model, integers=True).run(None, feeds)[0]
    assert np.array_equal(on_integers, expected) != saturates()


@pytest.mark.parametrize("wrong", [True, False])
def test_integers_are_asked_for_only_where_they_are_right(wrong: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibrators.session, "saturates", lambda: wrong)
    model, _ = largest()

    def kept_apart(integers: bool | None) -> bool:
        options = open_session(model, integers=integers).get_session_options()
        name = "session.disable_quant_qdq"
        try:
            return bool(options.get_session_config_entry(name) == "1")
        except RuntimeError:  # there is no such entry
            return False

    assert [kept_apart(each) for each in (None, True, False)] == [wrong, False, True]
