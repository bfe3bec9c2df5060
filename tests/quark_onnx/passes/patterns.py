"""One small model for each pass, in which the pass finds its pattern."""

from __future__ import annotations

import numpy as np
from onnx import ModelProto

from tests.models import Array, Factory, norm_parameters, normal, parse, weight

#: The start of a model with one image as input.
_IMAGE = "g (float[1,6,8,8] x) =>"
_NORM = "BatchNormalization (h, gamma, beta, mean, variance)"
_GELU = """a = Div (x, root) e = Erf (a) b = Add (e, one) c = Mul (x, b)
    y = Mul (c, half)"""
_LAYER_NORM = """m = ReduceMean <axes = {axes}> (x) d = Sub (x, m) q = Pow (d, two)
    v = ReduceMean <axes = {axes}> (q) e = Add (v, small) r = Sqrt (e) y = Div (d, r)"""
_SHUFFLE = """a = Reshape (x, split) t = Transpose <perm = [1,0,2]> (a)
    b = Reshape (t, halves) l = Gather <axis = 0> (b, zero)
    right = Gather <axis = 0> (b, one) y = Neg (l)"""
_EXPRESSIONS = {
    "fold_constants": "g (float[N,2] x) => (float[N,2] y) { n = Neg (k) y = Add (x, n) }",
    "remove_identity": "g (float[N] x) => (float[N] y) { i = Identity (x) y = Neg (i) }",
    "fold_batch_norm": f"""{_IMAGE} (float[1,6,8,8] y) {{
        h = Conv (x, w) y = {_NORM} }}""",
    "cancel_transposes": f"""{_IMAGE} (float[1,6,8,8] y) {{
        t = Transpose <perm = [0,2,3,1]> (x) r = Relu (t)
        y = Transpose <perm = [0,3,1,2]> (r) }}""",
    "fold_affine": f"""{_IMAGE} (float[1,6,8,8] y) {{
        h = Conv (x, w) y = Mul (h, two) }}""",
    "batch_norm_to_conv": f"{_IMAGE} (float[1,6,8,8] y) {{ h = Relu (x) y = {_NORM} }}",
    "pick_channels": f"""g (float[1,8,4,6] x) => (float[1,4,4,6] y, float[1,4,4,6] right)
        {{ {_SHUFFLE} }}""",
    "sum_to_add": "g (float[N,2] x) => (float[N,2] y) { n = Neg (x) y = Sum (n, x) }",
    "fold_gemm_alpha_beta": """g (float[2,4] x) => (float[2,6] y) {
        y = Gemm <alpha = 0.5, beta = 3.0> (x, matrix, k) }""",
    "fold_shapes": f"""{_IMAGE} (int64[2] y) {{
        s = Shape <start = 0, end = 2> (x) y = Identity (s) }}""",
    "fuse_gelu": f"g (float[2,3,4] x) => (float[2,3,4] y) {{ {_GELU} }}",
    "fuse_layer_norm": f"""g (float[2,3,4] x) => (float[2,3,4] y) {{
        {_LAYER_NORM.format(axes=[-1])} }}""",
    "whole_image_norms": f"""{_IMAGE} (float[1,6,8,8] y) {{
        {_LAYER_NORM.format(axes=[2, 3])} }}""",
    "hard_swish_to_gate": f"{_IMAGE} (float[1,6,8,8] y) {{ y = HardSwish (x) }}",
    "lower_rank_moves": f"""{_IMAGE} (float[1,6,8,8] y) {{
        a = Reshape (x, groups) t = Transpose <perm = [0,2,1,3,4]> (a)
        y = Reshape (t, whole) }}""",
    "mean_to_pool": f"""{_IMAGE} (float[1,6,1,1] y) {{
        y = ReduceMean <axes = [2, 3]> (x) }}""",
    "split_large_pools": """g (float[1,2,40,30] x) => (float[1,2,1,1] y) {
        y = GlobalAveragePool (x) }""",
    "split_to_slices": f"""{_IMAGE} (float[1,2,8,8] y, float[1,4,8,8] z) {{
        y, z = Split <axis = 1> (x, parts) }}""",
    "unshare_initializers": f"""{_IMAGE} (float[1,6,8,8] y) {{
        a = Conv (x, w) y = Conv (a, w) }}""",
    "write_attributes": f"{_IMAGE} (float[1,6,8,8] y) {{ y = Conv (x, w) }}",
    "write_bounds": f"{_IMAGE} (float[1,6,8,8] y) {{ y = Clip (x, half) }}",
    "write_defaults": "g (float[2,3] x) => (float[2,3] y) { y = Softmax (x) }",
    "write_sizes": f"""{_IMAGE} (float[1,3,8,8] y, float[1,3,8,8] z) {{
        y, z = Split <axis = 1, num_outputs = 2> (x) }}""",
}
#: The first opset that has what a pattern uses; 17 elsewhere.
_OPSETS = {"write_sizes": 18}


def _constants() -> dict[str, Array]:
    integers = {
        "split": [4, 2, 24],
        "groups": [1, 2, 3, 8, 8],
        "whole": [1, 6, 8, 8],
        "halves": [2, 1, 4, 4, 6],
        "zero": 0,
        "parts": [2, 4],
    }
    floats = {"root": 2**0.5, "half": 0.5, "two": 2, "small": 1e-5}
    constants: dict[str, Array] = {}
    constants |= {name: np.array(value, np.int64) for name, value in integers.items()}
    constants |= {name: np.array(value, np.float32) for name, value in floats.items()}
    return constants | norm_parameters(6)


def _pattern(name: str) -> ModelProto:
    text = _EXPRESSIONS[name]
    constants = _constants()
    constants["k"] = normal(6 if "Gemm" in text else 2)
    constants["matrix"] = weight(4, 6)
    constants["w"] = weight(6, 6, 1, 1)
    constants["one"] = np.int64(1) if "Gather" in text else np.float32(1)
    read = text.replace(",", " ").replace("(", " ").replace(")", " ").split()
    used = {key: value for key, value in constants.items() if key in read}
    return parse(text, opset=_OPSETS.get(name, 17), **used)


def _factory(name: str) -> Factory:
    return lambda: _pattern(name)


PATTERNS = {name: _factory(name) for name in _EXPRESSIONS}
