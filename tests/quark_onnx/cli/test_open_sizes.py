"""Sizes that depend on an open dimension are those of a sample, a shape or a fixed dimension.

K / H is greatest at H = 1, so that no value of H gives a bound: a model is refused for sizes that
do not depend on open dimensions, and for those of the sample on which it is to run.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import ModelProto

from calibrators.limits import VARIABLE
from quark_onnx import quantize
from tests.models import normal, parse, weight
from tests.quark_onnx.cli.conftest import CommandLine

#: Height and width that the model is for. At 1 some tensor has above 9 GB.
SIDE = 112
#: p is 224 / H * 224 / W, and n the same as an integer, as a shape.
START = """
    f = Conv <kernel_shape = [3, 3], pads = [1, 1, 1, 1]> (x, w)
    s = Shape (x) spatial = Slice (s, two, four) floating = Cast <to = 1> (spatial)
    quotient = Div (side, floating) p = ReduceProd <keepdims = 0> (quotient)
    p_vector = ReduceProd (quotient) n = Cast <to = 7> (p_vector)
    m = ReduceMean <axes = [2, 3]> (f)
"""
CONSTANTS = {
    "w": weight(4, 3, 3, 3),
    "two": np.int64([2]),
    "four": np.int64([4]),
    "side": np.float32([224]),
    "zero": np.int64([0]),
    "one": np.int64([1]),
    "eight": np.int64([8]),
    "ones": np.float32([1, 1]),
    "zero_scalar": np.int64(0),
    "one_scalar": np.int64(1),
    "off_on": np.float32([0, 1]),
    "zeros": np.int64([0, 0, 0, 0, 0, 0]),
}
PATTERNS = {
    "Resize": (
        'scales = Concat <axis = 0> (ones, p_vector, p_vector) y = Resize <mode = "nearest">'
        " (f, , scales)"
    ),
    "Expand": "t = Concat <axis = 0> (one, one, n, n) y = Expand (m, t)",
    "Tile": "t = Concat <axis = 0> (one, one, n, n) y = Tile (m, t)",
    "ConstantOfShape": (
        "t = Concat <axis = 0> (one, one, n, n) e = ConstantOfShape (t) y = Add (m, e)"
    ),
    "Pad": "t = Concat <axis = 0> (zeros, n, n) y = Pad (f, t)",
    "Range": (
        "i = Cast <to = 7> (p) j = Mul (i, i) r = Range (zero_scalar, j, one_scalar)"
        " q = Cast <to = 1> (r) y = Add (m, q)"
    ),
    "OneHot": ("j = Mul (n, n) o = OneHot (one, j, off_on) y = Add (m, o)"),
}
SHAPE = f"x=1,3,{SIDE},{SIDE}"
DIMS = ["--random-data", "2", "--dim", f"H={SIDE}", "--dim", f"W={SIDE}"]
COMMANDS = {
    "explain": ["explain", "m.onnx"],
    "check": ["npu", "check", "m.onnx"],
    "preflight": ["npu", "preflight", "m.onnx"],
    "legalize": ["npu", "legalize", "m.onnx", "-o", "o.onnx", "--shape", SHAPE],
    "cut": ["npu", "cut", "m.onnx", "--at", "f", "-o", "a.onnx", "b.onnx"],
    "convert": ["convert", "m.onnx", "-o", "o.onnx", "--to", "float16"],
    "fixed shapes": ["convert", "m.onnx", "-o", "o.onnx", "--to", "fixed-shapes", "--shape", SHAPE],
    "weights": ["quantize", "m.onnx", "-o", "o.onnx", "--preset", "W8"],
    "dynamic": ["quantize", "m.onnx", "-o", "o.onnx", "--dynamic"],
    "quantize": ["quantize", "m.onnx", "-o", "o.onnx", *DIMS],
    "data": ["quantize", "m.onnx", "-o", "o.onnx", "--data", "d.npz"],
    "calibrate": ["calibrate", "m.onnx", "-o", "ranges.json", *DIMS],
    "compare": ["compare", "m.onnx", "m.onnx", *DIMS],
    "analyze": ["analyze", "m.onnx", "q.onnx", *DIMS],
    "search": ["search", "m.onnx", *DIMS, "--trials", "1"],
}  # fmt: skip


def model(pattern: str) -> ModelProto:
    """A model whose output is large for small images."""
    return parse(
        f"g (float[N, 3, H, W] x) => (float[a, b, c, d] y) {{ {START} {PATTERNS[pattern]} }}",
        opset=16,
        **CONSTANTS,
    )


@pytest.fixture(autouse=True)
def small_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """A low limit: tensors below it are computed, and a gigabyte takes time."""
    monkeypatch.setenv(VARIABLE, "0.01")


@cache
def quantized(pattern: str) -> ModelProto:
    return quantize(model(pattern), None, "W8").model


def write_files(folder: Path, pattern: str) -> None:
    """Write the model, the same in 8 bits, and two samples."""
    onnx.save(model(pattern), folder / "m.onnx")
    onnx.save(quantized(pattern), folder / "q.onnx")
    np.savez(folder / "d.npz", x=normal(2, 3, SIDE, SIDE))


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("pattern", PATTERNS)
def test_what_depends_on_an_open_dimension_is_no_reason_to_refuse(
    pattern: str, command: str, cli: CommandLine, folder: Path
) -> None:
    """Every command takes the model, with and without a sample or a shape."""
    write_files(folder, pattern)
    finished = cli(*COMMANDS[command], "--no-isolation")
    # The check finds that the sizes are open, and does its work.
    assert finished.code == int(command == "check"), finished.err


@pytest.mark.parametrize("pattern", PATTERNS)
def test_the_sizes_of_a_sample_count(
    pattern: str, cli: CommandLine, folder: Path
) -> None:
    """On a sample of 1 x 1 the tensor is too large, and no session runs."""
    write_files(folder, pattern)
    for command in (
        ["quantize", "m.onnx", "-o", "o.onnx", "--random-data", "2"],
        ["calibrate", "m.onnx", "-o", "ranges.json", "--random-data", "2"],
        ["compare", "m.onnx", "m.onnx", "--random-data", "2"],
        ["analyze", "m.onnx", "q.onnx", "--random-data", "2"],
        ["search", "m.onnx", "--random-data", "2"],
        ["npu", "deploy", "m.onnx", "-o", "bundle", "--random-data", "2"],
    ):
        finished = cli(*command, "--no-isolation")
        assert finished.code == 2
        assert (
            "on a sample with the shapes {'x': (1, 3, 1, 1)}: tensor " in finished.err
        )
        assert "above the limit of 10,737,418 bytes" in finished.err


@pytest.mark.parametrize("command", ["legalize", "fixed shapes"])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_the_sizes_of_a_shape_count(
    pattern: str, command: str, cli: CommandLine, folder: Path
) -> None:
    onnx.save(model(pattern), folder / "m.onnx")
    words = [word.replace(SHAPE, "x=1,3,1,1") for word in COMMANDS[command]]
    finished = cli(*words, "--no-isolation")
    assert finished.code == 2
    assert "above the limit of 10,737,418 bytes" in finished.error


@pytest.mark.parametrize("command", COMMANDS)
def test_what_is_too_large_for_every_sample_is_refused(
    command: str, cli: CommandLine, folder: Path
) -> None:
    """An open dimension beside it counts as 1."""
    write_files(folder, "Pad")
    hostile = parse(
        "g (float[N, 3, H, W] x) => (float[a, b, c, d] y) {"
        " c = Conv (x, w) s = Shape (c) t = Mul (s, n) e = ConstantOfShape (t)"
        " m = ReduceMax (e) y = Add (c, m) }",
        w=CONSTANTS["w"],
        n=np.int64([1, 2**22, 1, 1]),
    )
    onnx.save(hostile, folder / "m.onnx")
    finished = cli(*COMMANDS[command], "--no-isolation")
    assert finished.code == 2
    assert "tensor 'e' of node 'e' (ConstantOfShape) has the shape" in finished.error
    assert "above the limit of 10,737,418 bytes" in finished.error
