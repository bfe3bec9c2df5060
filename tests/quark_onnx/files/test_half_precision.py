"""16-bit models get float32 inside, and their interface back."""

from __future__ import annotations

import numpy as np

from quark_onnx.files.half_precision import upcast_to_float32
from tests.models import parse, run


def test_a_body_defines_the_name_of_an_input_in_float32() -> None:
    model = parse("""g (bool c, float16[2] x) => (float16[2] y) {
        y = If (c) <
            then_branch = a () => (float16[2] x_float) { x_float = Relu (x) },
            else_branch = b () => (float16[2] z) { z = Neg (x) }
        > }""")
    wide, original = upcast_to_float32(model)
    feeds = {"c": np.array(True), "x": np.float16([-1, 2])}
    [result] = run(original.restore_interface(wide), feeds)
    assert result.dtype == np.float16 and result.tolist() == [0, 2]
