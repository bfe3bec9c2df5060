"""Weight-only quantization takes little more memory than the result, whatever the size."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

LAYERS, WIDTH = 16, 1024

#: Samples the anonymous memory of the process, as mapped files are not held.
CHILD = """
import sys, threading, time
import onnxruntime
from quark_onnx import quantize

def anonymous():
    line = next(l for l in open("/proc/self/status") if l.startswith("RssAnon"))
    return int(line.split()[1]) * 1024

before, peak = anonymous(), 0

def watch():
    global peak
    while True:
        peak = max(peak, anonymous())
        time.sleep(0.001)

threading.Thread(target=watch, daemon=True).start()
quantize(sys.argv[1], None, sys.argv[3], sys.argv[2])
print(peak - before)
"""


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of 64 MiB: layers with a matrix of 4 MiB each."""
    random = np.random.default_rng(0)
    names = ["x", *(f"r{place}" for place in range(LAYERS - 1)), "y"]
    nodes, weights = [], []
    for place in range(LAYERS):
        matrix = random.normal(0, WIDTH**-0.5, (WIDTH, WIDTH)).astype(np.float32)
        weights.append(numpy_helper.from_array(matrix, f"w{place}"))
        product = f"p{place}"
        nodes.append(helper.make_node("MatMul", [names[place], f"w{place}"], [product]))
        nodes.append(helper.make_node("Relu", [product], [names[place + 1]]))
    x, y = (
        helper.make_tensor_value_info(name, TensorProto.FLOAT, ["N", WIDTH])
        for name in "xy"
    )
    graph = helper.make_graph(nodes, "g", [x], [y], weights)
    model = helper.make_model(
        graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10
    )
    path = tmp_path_factory.mktemp("memory") / "model.onnx"
    onnx.save(model, path)
    return path


@pytest.mark.slow
@pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="reads the memory from /proc"
)
@pytest.mark.parametrize("preset", ["W8", "INT4"])
def test_memory_of_weight_only_quantization(
    source: Path, tmp_path: Path, preset: str
) -> None:
    """The float weights stay in their file; four to five times its size were taken once."""
    output = tmp_path / "quantized.onnx"
    done = subprocess.run(
        [sys.executable, "-c", CHILD, str(source), str(output), preset],
        capture_output=True,
        text=True,
        check=True,
    )
    taken = int(done.stdout.split()[-1])
    # The result, the file's copy in onnxruntime, and temporary values.
    assert taken < 1.6 * source.stat().st_size
