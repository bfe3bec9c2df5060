"""Functions that round activations: onnxruntime computes what torch computes, bit for bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

torch = pytest.importorskip("torch")

from quark_onnx.torch.config.spec import TensorSpec
from quark_onnx.torch.exports.onnx import bodies
from quark_onnx.torch.formats.affine import Params
from quark_onnx.torch.formats.quantized_tensor import fake_quantize

OPSET = 21


def computed(spec: TensorSpec, x: Any, **told: Any) -> Any:
    """What the function of a spec makes of a tensor in onnxruntime."""
    names = bodies.inputs_of(spec)
    node = helper.make_node(
        bodies.name_of(spec), names, ["y"], domain=bodies.DOMAIN, axis=-1
    )
    value = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, None)
        for name in ("x", "y")
    ]
    constants = [
        numpy_helper.from_array(np.asarray(told[name], np.float32), name)
        for name in names[1:]
    ]
    graph = helper.make_graph([node], "g", value[:1], value[1:], constants)
    opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid(bodies.DOMAIN, 1)]
    model = helper.make_model(
        graph,
        opset_imports=opsets,
        functions=[bodies.rounding(spec, OPSET)],
        ir_version=10,
    )
    session = ort.InferenceSession(
        model.SerializeToString(), providers=["CPUExecutionProvider"]
    )
    return session.run(None, {"x": x.numpy()})[0]


def activations() -> list[Any]:
    """Ordinary values; ones of very different size; ties; zeros; a length that no block divides."""
    generator = torch.Generator().manual_seed(0)
    normal = torch.randn(2, 5, 64, generator=generator)
    spread = torch.randn(40, 64, generator=generator) * torch.exp2(
        torch.randint(-60, 60, (40, 1), generator=generator)
    )
    ties = torch.arange(-32, 32).repeat(3, 1) / 4
    near = torch.exp2(torch.randint(-3, 3, (64, 64), generator=generator)) * (
        2 - torch.rand(64, 64, generator=generator) * 0.3
    )
    return [
        normal,
        spread,
        ties,
        near,
        torch.zeros(2, 64),
        torch.randn(3, 4, 37, generator=generator),
        normal[0, 0],
    ]


DYNAMIC = [
    TensorSpec(dtype, symmetric=symmetric, dynamic=True, **shape)
    for dtype, symmetric in (
        ("int8", True),
        ("uint8", False),
        ("int4", True),
        ("uint4", False),
        ("int8", False),
    )
    for shape in ({}, {"per_channel": True}, {"block_size": 16})
]
SMALL = [
    TensorSpec(dtype, dynamic=True, **shape)
    for dtype in ("fp8e4m3", "fp8e5m2")
    for shape in ({}, {"per_channel": True}, {"block_size": 32})
]
BLOCKS = [
    TensorSpec(dtype, exponent=exponent)
    for dtype in (
        "mxfp4e2m1",
        "mxfp6e2m3",
        "mxfp6e3m2",
        "mxfp8e4m3",
        "mxfp8e5m2",
        "mxint8",
    )
    for exponent in ("even", "ceil", "rceil", "floor")
]


@pytest.mark.parametrize(
    "spec",
    [*DYNAMIC, *SMALL, *BLOCKS, TensorSpec("nvfp4", dynamic=True)],
    ids=lambda spec: bodies.name_of(spec),
)
def test_scales_that_each_run_computes(spec: TensorSpec) -> None:
    for x in activations():
        np.testing.assert_array_equal(computed(spec, x), fake_quantize(x, spec).numpy())


def test_the_scale_of_nvfp4_that_data_has_told() -> None:
    spec = TensorSpec("nvfp4")
    for x in activations():
        whole = torch.tensor(0.0013)
        np.testing.assert_array_equal(
            computed(spec, x, whole=whole), fake_quantize(x, spec, whole=whole).numpy()
        )


@pytest.mark.parametrize(
    "spec", [TensorSpec("int3"), TensorSpec("uint2", symmetric=False)], ids=str
)
def test_codes_that_onnx_has_no_type_for(spec: TensorSpec) -> None:
    for x in activations():
        params = Params(torch.tensor(0.37), torch.tensor(1.0))
        expected = fake_quantize(x, spec, params).numpy()
        np.testing.assert_array_equal(
            computed(spec, x, scale=params.scale, zero=params.zero), expected
        )
