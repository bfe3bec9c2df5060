"""MatMulNBits unpacks what the Q/DQ form dequantizes, and rows are gathered before they are."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from onnx import ModelProto

from quark_onnx import QConfig, QuantizationSpec
from quark_onnx.api import quantize
from quark_onnx.common.registry import DTYPES
from quark_onnx.graph import Graph
from quark_onnx.writing.fuse import fuse
from tests.models import kinds, normal, parse, run, samples, weight
from tests.pipeline import Stages


def gemm(k: int, n: int, trans_b: int, bias: bool) -> ModelProto:
    w = weight(n, k) if trans_b else weight(n, k).T.copy()
    constants = {"b": normal(n)} if bias else {}
    return parse(
        f"g (float[5,{k}] x) => (float[5,{n}] y) {{ y = Gemm <transB = {trans_b}> (x,"
        f" w{', b' * bias}) }}",
        w=w,
        **constants,
    )


def matmul(k: int, n: int) -> ModelProto:
    return parse(
        f"g (float[2,5,{k}] x) => (float[2,5,{n}] y) {{ y = MatMul (x, w) }}",
        w=weight(n, k).T.copy(),
    )


MODELS: dict[str, Callable[[], ModelProto]] = {
    "matmul": lambda: matmul(64, 24),
    "matmul with an odd K": lambda: matmul(45, 7),
    "gemm": lambda: gemm(64, 9, 0, bias=False),
    "gemm transposed with a bias": lambda: gemm(64, 9, 1, bias=True),
    "gemm with a bias and an odd K": lambda: gemm(33, 9, 0, bias=True),
}


def blocks(dtype: str, symmetric: bool) -> QConfig:
    return QConfig(
        None, QuantizationSpec(DTYPES[dtype], symmetric=symmetric, block_size=32)
    )


FORMATS = ["int2", "uint2", "int4", "uint4", "int8", "uint8"]


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("name", MODELS)
def test_matmul_nbits(name: str, dtype: str) -> None:
    float_model = MODELS[name]()
    config = blocks(dtype, symmetric=not dtype.startswith("u"))
    pairs = quantize(float_model, None, config.with_(form="qdq")).model
    fused = quantize(float_model, None, config.with_(form="operators")).model
    assert set(kinds(fused)) == {"MatMulNBits"}
    for feeds in samples(float_model, 2):
        [plain] = run(pairs, feeds)
        for optimize in (False, True):
            [found] = run(fused, feeds, optimize=optimize)
            np.testing.assert_allclose(found, plain, atol=1e-4 * np.abs(plain).max())


def table(width: int) -> ModelProto:
    text = f"g (int64[2,3] ids) => (float[2,3,{width}] y) {{ y = Gather (table, ids) }}"
    return parse(text, opset=21, ir_version=10, table=weight(7, width))


#: A scale and a zero point for every row.
ROWS = QuantizationSpec("int8", symmetric=False, per_channel=True)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (QConfig.of("INT4"), ["Gather", "Gather", "Cast", "Mul"]),
        (
            QConfig.of("INT4").with_(embedding=QConfig.of("INT4").weight),
            ["GatherBlockQuantized"],
        ),
        (
            QConfig.of("UINT4").with_(embedding=QConfig.of("UINT4").weight),
            ["GatherBlockQuantized"],
        ),
        (QConfig.of("DYNAMIC"), ["Gather", "Gather", "Cast", "Mul"]),
        (QConfig.of("DYNAMIC").with_(per_channel=False), ["Gather", "Cast", "Mul"]),
        (
            QConfig.of("DYNAMIC").with_(embedding=ROWS),
            ["Gather", "Gather", "Gather", "Cast", "Sub", "Mul"],
        ),
        (
            QConfig.of("DYNAMIC").with_(embedding=ROWS.with_(per_channel=False)),
            ["Gather", "Cast", "Sub", "Mul"],
        ),
    ],
    ids=[
        "INT4",
        "INT4-blocks",
        "UINT4-blocks",
        "DYNAMIC",
        "DYNAMIC-tensor",
        "zero points of rows",
        "one zero point",
    ],
)
def test_gather(config: QConfig, expected: list[str]) -> None:
    float_model = table(64)
    pairs = Stages.of(float_model, config).model
    assert sorted(kinds(pairs)) == ["DequantizeLinear", "Gather"]
    fused = fuse(Graph.of(pairs), samples(float_model))[0].to_model()
    assert sorted(kinds(fused)) == sorted(expected)
    for feeds in samples(float_model, 2):
        [plain] = run(pairs, feeds)
        for optimize in (False, True):
            np.testing.assert_array_equal(
                run(fused, feeds, optimize=optimize)[0], plain
            )


def test_a_table_of_activations_is_gathered_as_codes() -> None:
    float_model = table(64)
    done = quantize(
        float_model, samples(float_model), QConfig.of("A8W8").with_(form="operators")
    )
    assert kinds(done.model) == ["Gather", "DequantizeLinear"]
