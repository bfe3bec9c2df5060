"""Functions are inlined with the values of attributes that their calls, or their defaults, give."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import ModelProto, parser

from quark_onnx import quantize_weights
from quark_onnx.check.inlined import inlined
from quark_onnx.check.sizes import check_sizes
from quark_onnx.common.errors import ModelError
from tests.models import normal, run


def model(text: str, functions: str) -> ModelProto:
    return parser.parse_model(
        '<ir_version: 9, opset_import: ["": 17, "own": 1]>'
        f"g (float[2,4] x, bool c) => (float[2,4] y) {{ {text} }} {functions}"
    )


LEAKY = """<domain: "own", opset_import: ["": 17]>
    leaky <a: float = 0.6> (x) => (y) { y = LeakyRelu <alpha: float = @a> (x) }"""
TWICE = """<domain: "own", opset_import: ["": 17, "own": 1]>
    twice <b: float = 0.4> (x) => (y) {
        z = own.leaky <a: float = @b> (x) n = Neg (z) y = own.leaky (n)
    }"""
CALLS = {
    "default": "y = own.leaky (x)",
    "given": "y = own.leaky <a = 0.3> (x)",
    "in a function": "y = own.twice (x)",
    "through a function": "y = own.twice <b = 0.2> (x)",
    "in a body": """y = If (c) <
        then_branch = t () => (p) { p = own.leaky (x) },
        else_branch = e () => (q) { q = own.twice (x) }
    >""",
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_attributes_of_functions_keep_their_values(call: str) -> None:
    """onnx's inliner leaves default values out."""
    before = model(call, LEAKY + TWICE)
    after = inlined(before)
    assert not after.functions
    for condition in True, False:
        feeds = {"x": normal(2, 4), "c": np.array(condition)}
        np.testing.assert_array_equal(run(after, feeds)[0], run(before, feeds)[0])


GATHER = """<domain: "own", opset_import: ["": 17]>
    pick {} (x) => (y) {{
        p = Constant <value = int64[2,1] {{0, 1}}> ()
        y = GatherND <batch_dims: int = @d> (x, p)
    }}"""


@pytest.mark.parametrize(
    "broken",
    [
        model("y = own.pick <d = -2147483648> (x)", GATHER.format("<d>")),
        model("y = own.pick (x)", GATHER.format("<d: int = -2147483648>")),
    ],
    ids=["call", "default"],
)
def test_an_attribute_of_a_function_is_checked_before_native_code_reads_it(
    broken: ModelProto,
) -> None:
    for call in (check_sizes, quantize_weights):
        with pytest.raises(ModelError, match="attribute 'batch_dims' is -2147483648"):
            call(broken)
