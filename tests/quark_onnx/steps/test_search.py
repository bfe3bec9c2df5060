"""search: scales move, by octaves or quarters, only where the outputs gain, and always the same way."""

from __future__ import annotations

import sys

import numpy as np
import pytest
from onnx import ModelProto

from quark_onnx import quantize
from quark_onnx.plan import BiasOf, Quantize, Use
from quark_onnx.steps import search, trial
from quark_onnx.steps.insert import insert_live
from quark_onnx.steps.trial import Probe
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
    changed = [use for use, scale in before.items() if (stages.params.table[use].scale != scale).any()]
    assert len(changed) == moved
    for use in before.keys() - {use for use, entry in stages.plan.entries.items() if isinstance(entry, BiasOf)}:
        assert isinstance(stages.plan.entries[use], Quantize)
        assert (np.frexp(stages.params.table[use].scale)[0] == 0.5).all(), "still a power of two"


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


def check_that_coarse_scores_are_mended(model: ModelProto) -> None:
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
        k=weight(8, 3, 3, 3), wide=100 * weight(4, 8, 1, 1), small=weight(2, 8, 1, 1), shape=np.int64([1, 6, 64]),
    )  # fmt: skip


def test_parts_of_an_output_count_alike() -> None:
    """Scores that are far too coarse do not show in the error of the whole output, and are mended all the same."""
    check_that_coarse_scores_are_mended(detector())


def test_a_mask_in_front_of_a_softmax_does_not_end_the_search() -> None:
    model = parse(
        """g (float[1,3,8,8] x) => (float[1,4,8,8] y) {
            [body] a = Conv <pads = [1,1,1,1]> (x, k) [relu] r = Relu (a) [scores] s = Conv (r, l)
            [mask] m = Add (s, bias) [likely] y = Softmax <axis = 1> (m)
        }""",
        k=weight(8, 3, 3, 3), l=weight(4, 8, 1, 1), bias=np.float32([0, 0, -np.inf, 0]).reshape(1, 4, 1, 1),
    )  # fmt: skip
    check_that_coarse_scores_are_mended(model)


def test_without_samples_nothing_moves() -> None:
    stages = Stages.of(residual(), POW2)
    assert search(stages.graph, stages.plan, stages.params, stages.limits, [], False) == 0


def test_a_search_never_costs_signal_and_repeats_itself() -> None:
    model = conv_net()
    data = samples(model, 10)
    plain, searched, again = (quantize(model, data, POW2.with_(search=count)) for count in (0, 8, 8))
    assert searched.report.worst_sqnr >= plain.report.worst_sqnr - 0.2
    assert searched.model == again.model


def deep() -> ModelProto:
    """Seven layers, and a second output behind the second of them."""
    layers = [f"h{i} = Conv <pads = [1,1,1,1]> (r{i}, w{i}, b{i}) r{i + 1} = Relu (h{i})" for i in range(1, 7)]
    return parse(
        f"""g (float[N,3,6,6] x) => (float[N,4,6,6] r7, float[N,4,1,1] z) {{
            r1 = Conv <pads = [1,1,1,1]> (x, w0) {" ".join(layers)} z = GlobalAveragePool (r3)
        }}""",
        w0=weight(4, 3, 3, 3), **{f"w{i}": weight(4, 4, 3, 3) for i in range(1, 7)},
        **{f"b{i}": weight(4, seed=i) / 3 for i in range(1, 7)},
    )  # fmt: skip


def test_what_is_computed_once_and_for_all_changes_no_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """No bit: onnxruntime rounds biases between quantized tensors, and parts that meet elsewhere lost that."""
    monkeypatch.setattr(trial, "_WORTH", 0)
    data = samples(deep())
    stages = Stages.of(deep(), POW2.with_(bias=False), data)
    uses = [use for use in stages.params.table if isinstance(stages.plan.entries[use], Quantize)]
    live, names = insert_live(stages.graph, stages.plan, stages.params, uses)
    scales = {name: np.asarray(stages.params.table[use].scale) for use, name in names.items() if name}
    with Probe(stages.graph, live, data) as whole, Probe(stages.graph, live, data) as parts:
        assert [node.name for node in parts.nodes] == [node.name for node in live.nodes]
        counts = [len(parts.nodes)]
        for layers in (0, 1, 2, 4):
            done = {"x", "w0", *(f"{kind}{i}" for i in range(1, layers + 1) for kind in "rw")}
            still = [name for use, name in names.items() if name and use.tensor not in done]
            assert parts.freeze(scales, still)
            counts.append(len(parts.nodes))
            for name in still:
                other = scales | {name: np.asarray(scales[name] * np.float32(2))}
                assert parts.noise(other, []) == whole.noise(other, [])
        assert counts == sorted(counts, reverse=True) and counts[-1] < counts[0] / 2
        # a scale that was thought to be settled
        other = scales | {names[Use("x")]: np.asarray(scales[names[Use("x")]] * np.float32(2))}
        assert parts.noise(other, []) == whole.noise(other, []) != parts.noise(scales, [])
        assert parts.freeze(other, still)
        assert parts.noise(other, []) == whole.noise(other, [])


def test_a_model_that_does_not_run_in_parts_is_run_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object) -> None:
        raise ValueError("no such part")

    data, moved, frozen = samples(deep()), list[int](), list[bool]()
    behind = Probe._behind
    monkeypatch.setattr(trial, "_WORTH", 0)
    monkeypatch.setattr(Probe, "_behind", lambda *arguments: frozen.append(True) or behind(*arguments))
    for replaced in (trial.segment, fail):
        monkeypatch.setattr(trial, "segment", replaced)
        stages = Stages.of(deep(), POW2.with_(bias=False), data)
        moved.append(search(stages.graph, stages.plan, stages.params, stages.limits, data, False))
    assert moved[0] == moved[1] and len(frozen) > 8  # once where it fails


def test_samples_of_other_ranks_inside_are_searched_on_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """A part is for one rank: onnxruntime would end the run at the first sample of another."""
    monkeypatch.setattr(trial, "_WORTH", 0)
    model = parse(
        """g (float[N,4,6,6] x) => (float y) {
            a = Conv (x, w, b) r = Relu (a) c = Conv (r, v) s = Relu (c) t = Squeeze (s) g = Sigmoid (t) u = Mul (g, k)
            y = ReduceMean <axes = [-1]> (u)
        }""",
        w=weight(4, 4, 1, 1),
        b=normal(4),
        v=weight(4, 4, 1, 1, seed=1),
        k=normal(6),
    )
    model.graph.output[0].type.tensor_type.ClearField("shape")
    data: list[Feeds] = [{"x": normal(2 - seed % 2, 4, 6, 6, seed=seed)} for seed in range(4)]
    searched, plain = (quantize(model, data, POW2.with_(search=count)).report.worst_sqnr for count in (2, 0))
    assert searched >= plain - 0.2


def test_a_gain_within_its_error_is_none() -> None:
    step = sys.modules["quark_onnx.steps.search"]
    assert step._better([-3.0, -2.1, -4.0], [-2.9, -2.0, -3.9])
    assert not step._better([-3.0, -2.1, -4.0], [-3.0, -2.1, -4.0])
    assert not step._better([-3.0, -2.0, -4.0], [-2.0, -3.0, -3.99])  # a gain of 0.003, and errors of 0.6
    assert not step._better([-9.0], [-2.9, -2.0])  # worse on the first ones, or more would have been run
    assert step._better([-3.0], [-2.9])
