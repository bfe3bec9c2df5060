"""search: scales move, by octaves or quarters, only where the outputs gain, and always the same
way.
"""

from __future__ import annotations

import sys

import numpy as np
import pytest
from onnx import ModelProto

from calibrators.onnx_runtime.session import open_session
from quark_onnx import quantize
from quark_onnx.plan import BiasOf, Quantize, Use
from quark_onnx.trials.local import LocalErrors
from quark_onnx.trials.scale_search import search
from tests.models import Feeds, conv_net, normal, parse, residual, run, samples, weight
from tests.pipeline import Stages
from tests.settings import POW2, TENSOR


def noise(model: ModelProto, quantized: ModelProto, data: list[Feeds]) -> float:
    """Mean logarithm of the noise over the signal, which is what is searched for."""
    shares = []
    for feeds in data:
        a, b = (run(m, feeds)[0].astype(np.float64) for m in (model, quantized))
        shares.append(np.log(((a - b) ** 2).sum() / (a**2).sum() + 1e-3))
    return float(np.mean(shares))


@pytest.mark.parametrize("make", [residual, conv_net], ids=lambda make: make.__name__)
def test_outputs_come_closer_to_the_float_ones(make: object) -> None:
    model = make()
    data = samples(model)
    stages = Stages.of(model, POW2.with_(bias=False), data)
    before = {use: params.scale.copy() for use, params in stages.params.table.items()}
    start = noise(model, stages.model, data)
    moved = search(stages.graph, stages.plan, stages.params, stages.limits, data, False)
    assert (noise(model, stages.model, data) < start) == (moved > 0)
    changed = [
        use
        for use, scale in before.items()
        if (stages.params.table[use].scale != scale).any()
    ]
    assert len(changed) == moved
    for use in before.keys() - {
        use for use, entry in stages.plan.entries.items() if isinstance(entry, BiasOf)
    }:
        assert isinstance(stages.plan.entries[use], Quantize)
        assert (np.frexp(stages.params.table[use].scale)[0] == 0.5).all(), (
            "still a power of two"
        )


def test_float_scales_of_activations_move_too() -> None:
    data = samples(residual())
    clipped = TENSOR.with_(calibrator="percentile:percentile=90", bias=False)
    stages = Stages.of(residual(), clipped, data)
    before, start = dict(stages.params.table), noise(residual(), stages.model, data)
    moved = search(stages.graph, stages.plan, stages.params, stages.limits, data, False)
    assert moved and noise(residual(), stages.model, data) < start
    for use, params in before.items():
        now = stages.params.table[use]
        assert (now.zero_point == params.zero_point).all()
        if stages.graph.is_constant(use.tensor):
            assert (now.scale == params.scale).all()
        steps = 4 * np.log2(now.scale.astype(np.float64) / params.scale)
        np.testing.assert_allclose(steps, np.rint(steps), atol=1e-4)


def check_that_coarse_scores_are_repaired(model: ModelProto) -> None:
    """Of a tensor called s."""
    data = samples(model)
    stages = Stages.of(model, TENSOR.with_(bias=False), data)
    use = Use("s")
    right = stages.params.table[use]
    stages.params.table[use] = right.with_scale(right.scale * 16)
    assert search(stages.graph, stages.plan, stages.params, stages.limits, data, False)
    assert (stages.params.table[use].scale < right.scale * 4).all()


def detector() -> ModelProto:
    """Boxes hundreds wide beside scores between 0 and 1, in one tensor."""
    return parse(
        """g (float[1,3,8,8] x) => (float[1,64,6] y) {
            [body] a = Conv <pads = [1,1,1,1]> (x, k) [relu] r = Relu (a)
            [boxes] b = Conv (r, wide) [scores] s = Conv (r, small) [likely] p = Sigmoid (s)
            [both] c = Concat <axis = 1> (b, p) [flat] f = Reshape (c, shape)
            [turned] y = Transpose <perm = [0,2,1]> (f)
        }""",
        k=weight(8, 3, 3, 3), wide=100 * weight(4, 8, 1, 1), small=weight(2, 8, 1, 1), shape=np.int64([1, 6, 64]),  # noqa: E501
    )  # fmt: skip


def test_parts_of_an_output_count_alike() -> None:
    """Scores that are far too coarse do not show in the error of the whole output, and are repaired
    all the same.
    """
    check_that_coarse_scores_are_repaired(detector())


def test_a_mask_in_front_of_a_softmax_does_not_end_the_search() -> None:
    model = parse(
        """g (float[1,3,8,8] x) => (float[1,4,8,8] y) {
            [body] a = Conv <pads = [1,1,1,1]> (x, k) [relu] r = Relu (a) [scores] s = Conv (r, l)
            [mask] m = Add (s, bias) [likely] y = Softmax <axis = 1> (m)
        }""",
        k=weight(8, 3, 3, 3), l=weight(4, 8, 1, 1), bias=np.float32([0, 0, -np.inf, 0]).reshape(1, 4, 1, 1),  # noqa: E501
    )  # fmt: skip
    check_that_coarse_scores_are_repaired(model)


def test_values_that_are_selected_do_not_end_the_search() -> None:
    """As in a detector that selects boxes: with rounded scores it selects another number."""
    model = parse(
        """g (float[1,3,8,8] x) => (float[1,4,8,8] y, float[N] z) {
            [body] a = Conv <pads = [1,1,1,1]> (x, k) [relu] r = Relu (a) [scores] s = Conv (r, l)
            [likely] y = Softmax <axis = 1> (s) [large] above = Greater (s, least)
            [flat] f = Reshape (s, line) [mask] m = Reshape (above, line)
            [chosen] c = Compress <axis = 0> (f, m) [squares] z = Mul (c, c)
        }""",
        k=weight(8, 3, 3, 3), l=weight(4, 8, 1, 1), least=np.float32(0.1), line=np.int64([-1]),
    )  # fmt: skip
    check_that_coarse_scores_are_repaired(model)


@pytest.mark.parametrize("odd", [0.0, np.inf])
def test_a_sample_without_a_signal_does_not_end_the_search(odd: float) -> None:
    """A black picture may have no detections at all, and an overflow no finite output."""
    model = parse(
        """g (float[1,3,8,8] x) => (float[1,4,8,8] y) {
            [body] a = Conv <pads = [1,1,1,1]> (x, k) [relu] r = Relu (a) [scores] s = Conv (r, l)
            [last] y = Relu (s)
        }""",
        k=weight(8, 3, 3, 3), l=weight(4, 8, 1, 1),
    )  # fmt: skip
    data = samples(model)
    stages = Stages.of(model, TENSOR.with_(bias=False), data)
    use = Use("r")
    right = stages.params.table[use]
    stages.params.table[use] = right.with_scale(right.scale * 16)
    data[-1] = {"x": np.full_like(data[-1]["x"], odd)}  # among those that judge moves
    assert search(stages.graph, stages.plan, stages.params, stages.limits, data, False)
    assert (stages.params.table[use].scale < right.scale * 4).all()


def test_without_samples_nothing_moves() -> None:
    stages = Stages.of(residual(), POW2)
    assert (
        search(stages.graph, stages.plan, stages.params, stages.limits, [], False) == 0
    )


def test_a_search_never_costs_signal_and_repeats_itself() -> None:
    model = conv_net()
    data = samples(model, 10)
    plain, searched, again = (
        quantize(model, data, POW2.with_(search=count)) for count in (0, 8, 8)
    )
    assert searched.report.worst_sqnr >= plain.report.worst_sqnr - 0.2
    assert searched.model == again.model


def test_local_errors_are_those_of_the_layers_behind() -> None:
    """Beside float64 arithmetic: the tensor is rounded, and the error counts behind the next Conv
    and its Relu.
    """
    model = parse(
        """g (float[1,3,8,8] x) => (float[1,2,8,8] y) {
            a = Conv (x, k) r = Relu (a) b = Conv (r, l) y = Relu (b)
        }""",
        k=weight(4, 3, 1, 1), l=weight(2, 4, 1, 1),
    )  # fmt: skip
    data = samples(model, 3)
    stages = Stages.of(model, POW2.with_(bias=False), data)
    use = Use("r")
    errors = LocalErrors(stages.graph, stages.plan, stages.params, [use], data)
    scales = {
        (use, step): np.asarray(stages.params.table[use].scale * np.float32(2.0**step))
        for step in (-2, 0, 1)
    }
    found = errors.measure(scales)
    for step, scale in scales.items():
        for place, feeds in enumerate(data):
            x = feeds["x"].astype(np.float64)
            r = np.maximum(
                np.einsum(
                    "oi,nihw->nohw",
                    weight(4, 3, 1, 1)[:, :, 0, 0].astype(np.float64),
                    x,
                ),
                0,
            )
            rounded = np.clip(np.rint(r / scale), -128, 127) * scale
            outputs = [
                np.maximum(
                    np.einsum(
                        "oi,nihw->nohw",
                        weight(2, 4, 1, 1)[:, :, 0, 0].astype(np.float64),
                        each,
                    ),
                    0,
                )
                for each in (r, rounded)
            ]
            expected = ((outputs[1] - outputs[0]) ** 2).sum() / (outputs[0] ** 2).sum()
            assert found[step][place] == pytest.approx(expected, rel=0.02)


def chain(layers: int) -> ModelProto:
    names = [
        f"h{i} = Conv <pads = [1,1,1,1]> (r{i}, w{i}) r{i + 1} = Relu (h{i})"
        for i in range(layers)
    ]
    return parse(
        f"g (float[N,4,6,6] r0) => (float[N,4,6,6] r{layers}) {{ {' '.join(names)} }}",
        **{f"w{i}": weight(4, 4, 3, 3, seed=i) for i in range(layers)},
    )


def test_the_work_grows_with_the_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice the layers are twice the nodes that run, and no more runs."""
    step = sys.modules["quark_onnx.trials.local"]
    counts = list[tuple[int, int]]()
    for layers in (8, 16, 32):
        data, nodes, runs = samples(chain(layers)), list[int](), list[int]()

        def opened(
            model: ModelProto,
            nodes: list[int] = nodes,
            runs: list[int] = runs,
            **options: object,
        ) -> object:
            nodes.append(len(model.graph.node))
            session = open_session(model, **options)
            monkeypatch.setattr(
                session,
                "run",
                lambda *given, run=session.run: runs.append(1) or run(*given),
            )
            return session

        monkeypatch.setattr(step, "open_session", opened)
        stages = Stages.of(chain(layers), POW2.with_(bias=False), data)
        search(stages.graph, stages.plan, stages.params, stages.limits, data, False)
        assert len(runs) <= 4 * len(data)
        counts.append((layers, nodes[0]))
    first, second, third = (nodes for _, nodes in counts)
    assert third - second == 2 * (second - first)


def test_moves_are_judged_by_other_samples_than_they_were_found_on() -> None:
    """The first samples are small; clipping what is larger would serve them alone."""
    model = residual()
    small, large = (
        samples(model, 4),
        [
            {name: 16 * value for name, value in each.items()}
            for each in samples(model, 4)
        ],
    )
    stages = Stages.of(model, POW2.with_(bias=False), [*small, *large])
    before, start = dict(stages.params.table), noise(model, stages.model, large)
    assert (
        search(stages.graph, stages.plan, stages.params, stages.limits, small, False)
        > 0
    )
    stages.params.table.update(before)
    search(
        stages.graph, stages.plan, stages.params, stages.limits, [*small, *large], False
    )
    assert noise(model, stages.model, large) <= start


def test_samples_of_other_ranks_inside_are_searched() -> None:
    model = parse(
        """g (float[N,4,6,6] x) => (float y) {
            a = Conv (x, w, b) r = Relu (a) c = Conv (r, v) s = Relu (c) t = Squeeze (s) g = Sigmoid (t) u = Mul (g, k)
            y = ReduceMean <axes = [-1]> (u)
        }""",  # noqa: E501
        w=weight(4, 4, 1, 1),
        b=normal(4),
        v=weight(4, 4, 1, 1, seed=1),
        k=normal(6),
    )
    model.graph.output[0].type.tensor_type.ClearField("shape")
    data: list[Feeds] = [
        {"x": normal(2 - seed % 2, 4, 6, 6, seed=seed)} for seed in range(4)
    ]
    searched, plain = (
        quantize(model, data, POW2.with_(search=count)).report.worst_sqnr
        for count in (2, 0)
    )
    assert searched >= plain - 0.2


def test_a_gain_within_its_error_is_none() -> None:
    step = sys.modules["quark_onnx.trials.scale_search"]
    assert step.is_better([-3.0, -2.1, -4.0], [-2.9, -2.0, -3.9])
    assert not step.is_better([-3.0, -2.1, -4.0], [-3.0, -2.1, -4.0])
    assert not step.is_better(
        [-3.0, -2.0, -4.0], [-2.0, -3.0, -3.99]
    )  # a gain of 0.003, and errors of 0.6
    assert step.is_better([-3.0], [-2.9])


def test_outputs_are_worse_by_more_than_their_error() -> None:
    step = sys.modules["quark_onnx.trials.scale_search"]
    assert step.is_worse([-2.8, -1.9, -3.9], [-2.9, -2.0, -3.99])
    assert not step.is_worse([-2.9, -2.0, -4.0], [-2.9, -2.0, -4.0])
    assert not step.is_worse([-2.0, -3.0, -3.9], [-3.0, -2.0, -4.0])  # a mean loss of 0.03, and errors of 0.6  # fmt: skip  # noqa: E501
    assert step.is_worse([float("inf"), -2.0], [-3.0, -2.0])
    assert step.is_worse([float("inf")], [float("inf")])
    assert not step.is_worse([-3.0, -2.0], [float("inf"), -2.0])
    assert step.is_worse([-2.8], [-2.9])
