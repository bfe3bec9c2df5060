"""Target constraints: scales move until the target can compute with them.

Weights are rounded again afterwards.
"""

from __future__ import annotations

import numpy as np
import pytest
from onnx import ModelProto, numpy_helper

from quark_onnx import QConfig, quantize
from quark_onnx.npu import check
from quark_onnx.plan import Use
from quark_onnx.scales.apply_target_constraints import Limits, apply_target_constraints
from quark_onnx.trials.scale_search import search
from tests.models import Feeds, parse, run, weight
from tests.pipeline import Stages

XINT8 = QConfig.of("XINT8").with_(search=0, target="npu")


def joined() -> ModelProto:
    """Two branches of very different size, joined, pooled and read again."""
    return parse(
        """g (float[1,4,8,8] x) => (float[1,5] y) {
            a = Conv (x, w) b = Conv (x, v) c = Concat <axis = 1> (a, b) d = MaxPool <kernel_shape = [2,2]> (c)
            p = GlobalAveragePool (d) f = Flatten (p) y = Gemm (f, u)
        }""",  # noqa: E501
        w=weight(4, 4, 1, 1) * 4,
        v=weight(4, 4, 1, 1, seed=1) / 4,
        u=weight(8, 5),
    )


def images(count: int = 6, size: float = 1.0) -> list[Feeds]:
    random = np.random.default_rng(0)
    return [
        {"x": (size * random.normal(size=(1, 4, 8, 8))).astype(np.float32)}
        for _ in range(count)
    ]


def scale(stages: Stages, tensor: str) -> float:
    return float(stages.params.table[stages.plan.root(Use(tensor))].scale)


def test_joined_and_pooled_tensors_get_the_coarsest_scale() -> None:
    stages = Stages.of(joined(), XINT8, images())
    before = {name: scale(stages, name) for name in "abcp"}
    assert len(set(before.values())) > 1
    assert apply_target_constraints(stages.limits, stages.params) > 0
    after = {scale(stages, name) for name in "abcdp"}
    assert after == {max(before.values())}
    assert apply_target_constraints(stages.limits, stages.params) == 0


def test_without_a_target_nothing_moves() -> None:
    stages = Stages.of(joined(), XINT8.with_(target=""), images())
    assert (
        not stages.limits.uses
        and apply_target_constraints(stages.limits, stages.params) == 0
    )


def test_a_search_moves_tied_scales_together_and_stays_within_the_limits() -> None:
    data = images()
    stages = Stages.of(joined(), XINT8.with_(bias=False), data)
    apply_target_constraints(stages.limits, stages.params)
    for use in stages.limits.tied(Use("c")):
        stages.params.table[use] = stages.params.table[use].with_scale(
            stages.params.table[use].scale * 8
        )
    coarse = scale(stages, "c")
    assert (
        search(stages.graph, stages.plan, stages.params, stages.limits, data, False)
        >= 4
    )
    assert (
        scale(stages, "c") < coarse
        and len({scale(stages, name) for name in "abcdp"}) == 1
    )
    assert {finding.rule for finding in check(stages.model, "phx").findings} == {
        "G3",
        "G4",
    }, "attributes alone"


def test_weights_are_rounded_anew_where_their_scale_moves() -> None:
    """2048 channels of ones: their sum is shifted by 17 bits, one too many, so that the weight gets
    a coarser scale.

    amd-quark 0.13 rewrites that scale alone, under codes that stay what they were: every weight is
    doubled.
    """
    ones = np.ones((1, 2048, 1, 1), np.float32)
    model = parse(
        "g (float[1,2048,2,2] x) => (float[1,1,2,2] y) { a = Conv (x, w) r = Relu (a) y"
        " = Conv (r, v) }",
        w=ones,
        v=np.ones((1, 1, 1, 1), np.float32),
    )
    random = np.random.default_rng(0)
    data = [
        {"x": random.uniform(0.5, 1, size=(1, 2048, 2, 2)).astype(np.float32)}
        for _ in range(4)
    ]
    stages = Stages.of(model, XINT8, data)
    before = scale(stages, "w")
    assert apply_target_constraints(stages.limits, stages.params) == 1
    assert (before, scale(stages, "w")) == (2.0**-6, 2.0**-5)
    [codes] = [
        numpy_helper.to_array(t)
        for t in stages.model.graph.initializer
        if tuple(t.dims) == (1, 2048, 1, 1)
    ]
    np.testing.assert_array_equal(codes * np.float32(scale(stages, "w")), ones)
    assert (codes == 32).all()


@pytest.mark.parametrize("size", [1e-3, 1.0, 1e3])
def test_scores_that_are_an_average_stay_float(size: float) -> None:
    """They would have the scale of what is averaged, of which they use little."""
    model = parse(
        """g (float[1,4,8,8] x) => (float[1,6] y) {
            a = Conv (x, w) r = Relu (a) p = GlobalAveragePool (r) f = Flatten (p) y = Softmax <axis = 1> (f)
        }""",  # noqa: E501
        w=weight(6, 4, 1, 1),
    )
    data = images(size=size)
    plain, safe = (
        quantize(model, data, XINT8.with_(safe=safe, target="stx")).model
        for safe in (False, True)
    )
    errors = [
        float(np.abs(run(each, s)[0] - run(model, s)[0]).max())
        for each in (plain, safe)
        for s in data[:1]
    ]
    assert errors[1] <= errors[0]
    read = [
        [node.op_type for node in each.graph.node if "p" in node.input]
        for each in (plain, safe)
    ]
    assert read == [["QuantizeLinear"], ["Flatten"]]


def test_limits_leave_free_zero_points_and_float_scales_alone() -> None:
    for preset in ("A8W8", "S8S8", "A16W8"):
        stages = Stages.of(joined(), QConfig.of(preset).with_(target="stx"), images())
        assert not Limits(
            stages.graph,
            stages.plan,
            stages.params,
            QConfig.of(preset).with_(target="stx"),
        ).uses
