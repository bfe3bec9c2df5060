"""TensorErrors: histograms rule out scales that the layers behind would not prefer."""

from __future__ import annotations

import numpy as np
import pytest

from calibrators import Histogram, Statistic
from quark_onnx.plan import Use
from quark_onnx.trials.local import LocalErrors
from quark_onnx.trials.scale_search import Scales, search
from quark_onnx.trials.tensor_errors import TensorErrors
from tests.models import Feeds, conv_net, parse, residual, samples, weight
from tests.pipeline import Stages
from tests.settings import POW2


def with_values(values: np.ndarray) -> tuple[TensorErrors, Use, np.ndarray]:
    """Errors for a tensor with these values, a use of it, and the scale at which 127 is 1."""
    model = conv_net()
    stages = Stages.of(model, POW2.with_(bias=False), samples(model))
    use = next(
        use for use in stages.params.table if not stages.graph.is_constant(use.tensor)
    )
    known = stages.params.table[use]
    stages.params.table[use] = known.with_scale(np.full_like(known.scale, 2.0**-7))
    statistic = Histogram()
    statistic.observe(values.astype(np.float32).reshape(1, -1))
    errors = TensorErrors(stages.plan, stages.params, {use: statistic})
    return errors, use, stages.params.table[use].scale


UNIFORM = np.linspace(-0.99, 0.99, 40_000)
#: One value in a thousand lies far outside.
CLIPPED = np.concatenate([UNIFORM, np.full(40, 8.0)])


def test_a_larger_scale_is_hopeless_unless_values_are_clipped() -> None:
    errors, use, scale = with_values(UNIFORM)
    assert errors.is_hopeless(use, scale, scale * 2)
    errors, use, scale = with_values(CLIPPED)
    assert not errors.is_hopeless(use, scale, scale * 2)


def test_a_smaller_scale_is_hopeless_where_it_clips_much() -> None:
    errors, use, scale = with_values(UNIFORM)
    assert errors.is_hopeless(use, scale, scale / 2)
    # Half of the codes are unused: the smaller scale has a quarter of the error.
    errors, use, scale = with_values(UNIFORM / 2.1)
    assert not errors.is_hopeless(use, scale, scale / 2)


def test_nothing_is_hopeless_without_a_histogram() -> None:
    model = conv_net()
    stages = Stages.of(model, POW2.with_(bias=False), samples(model))
    errors = TensorErrors(stages.plan, stages.params, {})
    for use, params in stages.params.table.items():
        assert not errors.is_hopeless(use, params.scale, params.scale * 2)


@pytest.mark.parametrize("make", [residual, conv_net], ids=lambda make: make.__name__)
@pytest.mark.parametrize("factor", [0.25, 1.0, 4.0])
def test_histograms_spare_measurements_and_lead_to_the_same_scales(
    make: object, factor: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make()
    data = samples(model, 12)
    measured: list[int] = []
    measure = LocalErrors.measure

    def counted(self: LocalErrors, scales: Scales) -> object:
        measured.append(len(scales))
        return measure(self, scales)

    monkeypatch.setattr(LocalErrors, "measure", counted)
    without, most = searched(model, data, factor, {}), sum(measured)
    measured.clear()
    found = searched(model, data, factor, None)
    assert found == without
    assert sum(measured) < most


def test_where_every_scale_is_ruled_out_nothing_is_measured(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A pass without scales asked onnxruntime for no output, and ended in a warning."""

    def is_hopeless(*_: object) -> bool:
        return True

    monkeypatch.setattr(TensorErrors, "is_hopeless", is_hopeless)
    model = conv_net()
    data = samples(model)
    stages = Stages.of(model, POW2.with_(bias=False), data)
    before = dict(stages.params.table)
    moved = search(stages.graph, stages.plan, stages.params, stages.limits, data, False)
    assert not moved
    assert stages.params.table == before
    assert not caplog.messages


def test_functions_without_a_layer_are_measured_whatever_histograms_say(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Clipped values may leave the greatest one where it was."""

    def is_hopeless(*_: object) -> bool:
        return True

    asked: set[Use] = set()
    measure = LocalErrors.measure

    def noted(self: LocalErrors, scales: Scales) -> object:
        asked.update(use for use, _ in scales)
        return measure(self, scales)

    monkeypatch.setattr(TensorErrors, "is_hopeless", is_hopeless)
    monkeypatch.setattr(LocalErrors, "measure", noted)
    model = parse(
        """g (float[1,3,8,8] x) => (float[1,4,8,8] y) {
            [layer] a = Conv (x, k) [function] y = Hardmax <axis = 1> (a)
        }""",
        k=weight(4, 3, 1, 1),
    )
    data = samples(model)
    stages = Stages.of(model, POW2.with_(bias=False), data)
    search(stages.graph, stages.plan, stages.params, stages.limits, data, False)
    assert asked == {Use("a")}


def searched(
    model: object,
    data: list[Feeds],
    factor: float,
    ranges: dict[Use, Statistic] | None,
) -> dict[Use, float]:
    """Scales after a search from scales that are wrong by a factor.

    Args:
        model: the model.
        data: its samples.
        factor: the factor.
        ranges: the statistics to search with; None for those of calibration.
    """
    stages = Stages.of(model, POW2.with_(bias=False), data)
    for use, known in stages.params.table.items():
        if not stages.graph.is_constant(use.tensor):
            stages.params.table[use] = known.with_scale(known.scale * factor)
    search(
        stages.graph,
        stages.plan,
        stages.params,
        stages.limits,
        data,
        False,
        ranges=stages.ranges if ranges is None else ranges,
    )
    return {use: float(each.scale.max()) for use, each in stages.params.table.items()}
