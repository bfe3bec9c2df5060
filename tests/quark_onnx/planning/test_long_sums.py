"""long_sums: a window that is summed value by value stays float, and nothing else does."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import ModelProto

from quark_onnx import QConfig, quantize
from quark_onnx.graph import Graph
from quark_onnx.planning.make_plan import make_plan
from tests.models import parse, run, samples, weight
from tests.settings import TENSOR, WIDE

XINT8 = QConfig.of("XINT8").with_(search=0)


def pooling(columns: int, *, residual: bool = False) -> ModelProto:
    """A pooling over columns, as torch decomposes it: a Gather and an Add a column.

    Args:
        columns: number of columns of the window.
        residual: each Add reads the result of a convolution of its own instead of a column.
    """
    lines, weights = list[str](), {"w": weight(4, 3, 1, 1)}
    for place in range(columns):
        read = f"[part{place}] p{place} = Gather <axis = 3> (r, i{place})"
        weights[f"i{place}"] = np.int64([place])
        if residual:
            read = f"[part{place}] p{place} = Conv (x, w{place})"
            weights[f"w{place}"] = weight(4, 3, 1, 1, seed=place)
        lines.append(read)
    total = "p0"
    for place in range(1, columns):
        lines.append(f"[add{place}] s{place} = Add ({total}, p{place})")
        total = f"s{place}"
    body = "\n".join(lines)
    width = columns if residual else 1
    return parse(
        f"""g (float[1,3,4,{columns}] x) => (float[1,2,4,{width}] y) {{
            [conv] c = Conv (x, w)
            [relu] r = Relu (c)
            {body}
            [mean] m = Mul ({total}, share)
            [last] y = Conv (m, wl)
        }}""",
        wl=weight(2, 4, 1, 1, seed=9),
        share=np.float32(1 / columns),
        **weights,
    )


def floats(model: ModelProto, config: QConfig = TENSOR) -> set[str]:
    """The nodes that stay float as parts of a long sum."""
    kept = make_plan(Graph.of(model), config).kept
    return {name for name, why in kept.items() if why.startswith("a sum of many parts")}


def test_a_long_sum_and_the_operators_that_cut_it_out_stay_float() -> None:
    model = pooling(8)
    expected = {f"part{place}" for place in range(8)}
    expected |= {f"add{place}" for place in range(1, 8)}
    assert floats(model) == expected


@pytest.mark.parametrize("preset", ["A8W8", "S8S8", "U8U8"])
def test_the_layers_around_it_run_on_integers_and_the_sum_is_not_rounded(
    preset: str,
) -> None:
    model = pooling(8)
    data = samples(model)
    found = quantize(model, data, preset).model
    plain = quantize(model, data, QConfig.of(preset).with_(safe=False)).model
    rounded = {
        node.input[0] for node in found.graph.node if node.op_type == "QuantizeLinear"
    }
    # the whole sum and what the layers read, and no sum before it
    assert rounded >= {"x", "s7", "m"}
    assert not rounded & {f"s{place}" for place in range(1, 7)}

    def error(quantized: ModelProto) -> float:
        pairs = [(run(model, feed)[0], run(quantized, feed)[0]) for feed in data]
        return sum(float(np.square(a - b).sum()) for a, b in pairs)

    assert error(found) < error(plain)


def test_a_short_sum_is_quantized() -> None:
    assert not floats(pooling(4))
    assert floats(pooling(5))


def test_a_residual_stream_is_quantized() -> None:
    assert not floats(pooling(8, residual=True))


@pytest.mark.parametrize(
    "config",
    [WIDE, XINT8, TENSOR.with_(safe=False), TENSOR.with_(target="stx")],
    ids=["16 bits", "powers of two", "not safe", "an integer engine"],
)
def test_other_formats_and_engines_round_every_sum(config: QConfig) -> None:
    assert not floats(pooling(8), config)


def test_a_sum_that_converts_more_than_it_adds_is_quantized() -> None:
    model = parse(
        """g (float[1,3,4,64] x) => (float[1,2,4,1] y) {
            [conv] c = Conv (x, w)
            [p0] a = Gather <axis = 3> (c, i)
            [p1] b = Gather <axis = 3> (c, j)
            [s1] d = Add (a, b)
            [s2] e = Add (d, b)
            [s3] f = Add (e, b)
            [s4] h = Add (f, b)
            [last] y = Conv (h, wl)
        }""",
        w=weight(4, 3, 1, 1),
        wl=weight(2, 4, 1, 1, seed=9),
        i=np.int64([0]),
        j=np.int64([1]),
    )
    assert not floats(model)
