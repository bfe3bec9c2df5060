"""Properties of the processor: its cores, and 8-bit products that saturate in onnxruntime.

Without VNNI instructions (x64) onnxruntime adds two products of u8 and s8 in 16 bits, which can
saturate: https://onnxruntime.ai/docs/performance/model-optimizations/quantization.html, "When and
why do I need to try U8U8?". A model then computes other results than on other processors.
"""

from __future__ import annotations

import os
from functools import cache

import numpy as np

#: Text of warnings about saturation, and the advice.
SATURATION = (
    "on processors without VNNI, like this one, sums of 8-bit products saturate in"
    " onnxruntime"
)
ADVICE = "reduce_range for the weights avoids it"
#: The advice where onnxruntime can avoid saturation itself.
BETTER = (
    f"{ADVICE}, as does session.x64quantprecision=1 in the application's session,"
    " without a bit less"
)

#: Size of the trial product: large enough for the kernels that run layers.
_PRODUCTS = 64
_SUMS = 32


def available_cores() -> int:
    """Return the number of cores available to this process."""
    # A container or taskset may grant fewer cores than the machine has. macOS and Windows lack the
    # call.
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@cache
def saturates() -> bool:
    """Return whether sums of large u8 x s8 products are wrong on this processor.

    A small model is run once.
    """
    import onnxruntime as ort
    from onnx import TensorProto, helper, numpy_helper

    codes = numpy_helper.from_array(np.full((_PRODUCTS, _SUMS), 127, np.int8), "codes")
    graph = helper.make_graph(
        [helper.make_node("MatMulInteger", ["x", "codes"], ["y"])],
        "products",
        [helper.make_tensor_value_info("x", TensorProto.UINT8, ["N", _PRODUCTS])],
        [helper.make_tensor_value_info("y", TensorProto.INT32, ["N", _SUMS])],
        [codes],
    )
    model = helper.make_model(
        graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8
    )
    options = ort.SessionOptions()
    options.log_severity_level = 4
    session = ort.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    [sums] = session.run(None, {"x": np.full((4, _PRODUCTS), 255, np.uint8)})
    # Two products, 2 * 255 * 127 = 64770, exceed the 32767 of a 16-bit sum.
    return bool((sums != 255 * 127 * _PRODUCTS).any())
