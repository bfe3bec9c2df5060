"""join_ranges: the result of a Concat has the range that its inputs span together."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import ModelProto, TensorProto, helper

from calibrators import QParams
from quark_onnx import QConfig, TensorOverride, compare, quantize_static
from quark_onnx.plan import Use
from tests.models import Feeds, kinds, parse, run, weight
from tests.pipeline import Stages
from tests.settings import POW2, SIGNED, TENSOR

#: Percentile clips each tensor by itself, so that the joined tensor would get a range of its own.
CLIPPING = TENSOR.with_(calibrator="percentile:percentile=95")


def joined(axis: int = 1) -> ModelProto:
    """Two inputs, joined and multiplied."""
    return parse(
        f"""g (float[N, 8] a, float[N, 8] b) => (float[N, 4] y)
        {{ c = Concat <axis = {axis}> (a, b) y = MatMul (c, w) }}""",
        w=weight(16, 4),
    )


def uniform(
    a: tuple[float, float], b: tuple[float, float], count: int = 8
) -> list[Feeds]:
    """Samples that reach both ends of the given ranges."""
    random = np.random.default_rng(0)

    def sample(low: float, high: float) -> np.ndarray:
        values = random.uniform(low, high, (2, 8)).astype(np.float32)
        values[0, 0] = low
        values[0, 1] = high
        return values

    return [{"a": sample(*a), "b": sample(*b)} for _ in range(count)]


@pytest.mark.parametrize("config", [TENSOR, CLIPPING, SIGNED])
def test_a_spanning_input_gives_its_parameters(config: QConfig) -> None:
    stages = Stages.of(joined(), config, uniform((-1, 1), (-5, 5)))
    table = stages.params.table
    assert table[Use("c")] == table[Use("b")] != table[Use("a")]


def test_no_value_is_clipped_at_the_join() -> None:
    stages = Stages.of(joined(), CLIPPING, uniform((-5, 1), (-1, 5)))
    a, b, c = (stages.params.table[Use(name)] for name in "abc")

    def ends(part: QParams) -> tuple[float, float]:
        low = -float(part.zero_point) * float(part.scale)
        return low, low + 255 * float(part.scale)

    step = float(c.scale)
    assert ends(c)[0] == pytest.approx(min(ends(a)[0], ends(b)[0]), abs=step)
    assert ends(c)[1] == pytest.approx(max(ends(a)[1], ends(b)[1]), abs=step)


SHARED = """g (float[N, 8] a, float[N, 8] b) => (float[N, 4] y)
{ c = Concat <axis = 1> (a, b) d = Concat <axis = 1> (b, c) y = MatMul (d, w) }"""


def test_an_engine_that_moves_codes_gets_one_scale() -> None:
    """Also through a tensor that two Concats read, of which the first one spans more."""
    data = uniform((-9, 1), (-5, 5))
    model = parse(SHARED, w=weight(24, 4))
    usual = Stages.of(model, QConfig.of("A8W8"), data).params.table
    table = Stages.of(
        model, QConfig.of("A8W8").with_(target="openvino"), data
    ).params.table
    assert table[Use("a")] == table[Use("b")] == table[Use("c")] == table[Use("d")]
    low = -float(table[Use("a")].zero_point) * float(table[Use("a")].scale)
    step = float(table[Use("a")].scale)
    assert low == pytest.approx(-9, abs=step)
    assert low + 255 * step == pytest.approx(5, abs=step)
    assert usual[Use("a")] != usual[Use("b")]


def test_a_scale_of_the_user_stays_where_codes_are_moved() -> None:
    given = TensorOverride("b", low=-6.0, high=6.0)
    config = QConfig.of("A8W8").with_(target="openvino", tensors=[given])
    data = uniform((-9, 1), (-5, 5))
    table = Stages.of(parse(SHARED, w=weight(24, 4)), config, data).params.table
    assert float(table[Use("b")].scale) == pytest.approx(12 / 255)
    assert table[Use("a")] != table[Use("b")]


def test_codes_of_the_spanning_input_are_copied() -> None:
    stages = Stages.of(joined(), CLIPPING, uniform((-1, 1), (-5, 5)))
    feeds = uniform((-1, 1), (-9, 9), 1)[0]
    model = stages.model
    names = ("b_DequantizeLinear_Output", "c_DequantizeLinear_Output")
    model.graph.output.extend(
        helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in names
    )
    _, b, c = run(model, feeds)
    np.testing.assert_array_equal(c[:, 8:], b)


def test_ranges_that_somebody_has_chosen_stay() -> None:
    given = CLIPPING.with_(tensors=(TensorOverride("c", scale=1.0, zero_point=7),))
    data = uniform((-1, 1), (-5, 5))
    params = Stages.of(joined(), given, data).params.table[Use("c")]
    assert (float(params.scale), int(params.zero_point)) == (1.0, 7)


def test_power_of_two_scales_are_left_to_their_search() -> None:
    data = uniform((-1, 1), (-5, 5))
    table = Stages.of(joined(), POW2, data).params.table
    assert float(table[Use("c")].scale) in {2.0**-n for n in range(12)}


def test_a_float_input_leaves_the_result_as_it_is() -> None:
    model = parse(
        """g (float[N, 8] a, float[N, 8] b) => (float[N, 4] y, float[N, 16] c)
        { c = Concat <axis = 1> (a, b) y = MatMul (c, w) }""",
        w=weight(16, 4),
    )
    config = TENSOR.with_(tensors=(TensorOverride("a", keep=True),))
    data = uniform((-1, 1), (-5, 5))
    stages = Stages.of(model, config, data)
    assert Use("a") not in stages.params.table and "Concat" in kinds(stages.model)


def padded(size: float, width: int = 8) -> ModelProto:
    """An input, joined with a constant of one value, and multiplied."""
    return parse(
        """g (float[N, 8] a) => (float[N, 4] y)
        { h = MatMul (a, v) c = Concat <axis = 0> (h, b) y = MatMul (c, w) }""",
        b=np.full((2, width), size, np.float32),
        v=weight(8, width),
        w=weight(width, 4),
    )


@pytest.mark.parametrize("config", [TENSOR, CLIPPING, SIGNED])
def test_zeros_get_the_range_of_the_others(config: QConfig) -> None:
    samples = [{"a": sample["a"]} for sample in uniform((-1, 1), (0, 0))]
    table = Stages.of(padded(0), config, samples).params.table
    assert table[Use("b")] == table[Use("c")] == table[Use("h")]


@pytest.mark.parametrize("preset", ["A8W8", "S8S8", "A16W8", "A8W4", "XINT8", "INT8"])
def test_zeros_cost_no_accuracy(preset: str) -> None:
    samples = [{"a": sample["a"]} for sample in uniform((-0.3, 0.3), (0, 0))]
    sqnr = [
        compare(model, quantize_static(model, samples, preset), samples).sqnr
        for model in (padded(0), padded(1e-6))
    ]
    assert sqnr[0] > sqnr[1] - 0.5
