"""quantize_to_accuracy: what is tried, in which order, and when it ends."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import onnx
import pytest

from quark_onnx import compare, quantize, quantize_to_accuracy
from quark_onnx.analysis.accuracy import AccuracyTarget, steps_of
from quark_onnx.common.errors import ConfigError, DataError, ModelError
from quark_onnx.recipes import choose
from tests.models import parse, residual, samples, weight


def pixels(count: int = 16) -> list[dict[str, Any]]:
    return samples(residual(), count)


def test_the_first_that_is_accurate_enough_is_taken(tmp_path: Path) -> None:
    data = pixels()
    found = quantize_to_accuracy(residual(), data, "10dB", tmp_path / "out.onnx")
    assert [attempt.name for attempt in found.attempts] == ["A8W8"]
    assert found.reached and found.best is found.attempts[0]
    judges = [sample for index, sample in enumerate(data) if index % 4 == 1]
    rest = [sample for index, sample in enumerate(data) if index % 4 != 1]
    assert found.judged == len(judges) == 4
    model = quantize(residual(), rest, found.best.config).model
    assert found.best.sqnr == compare(residual(), model, judges).sqnr
    written = onnx.load(tmp_path / "out.onnx")
    assert written == model == found.result.model
    assert json.loads(json.dumps(found.to_dict())) == found.to_dict()


def test_what_is_missed_goes_on_to_the_next_and_ends_with_the_nearest(
    tmp_path: Path,
) -> None:
    found = quantize_to_accuracy(residual(), pixels(), 500, tmp_path / "out.onnx")
    target = AccuracyTarget(500, False)
    names = [name for name, _ in steps_of(choose(residual()), target)]
    assert [attempt.name for attempt in found.attempts] == names
    assert not found.reached and not any(each.met for each in found.attempts)
    assert found.best.sqnr == max(each.sqnr or 0.0 for each in found.attempts)
    assert (tmp_path / "out.onnx").exists()


def test_the_order_is_that_of_what_results_cost() -> None:
    steps = dict(steps_of(choose(residual()), AccuracyTarget(20, False)))
    percent = dict(steps_of(choose(residual()), AccuracyTarget(1, True)))
    assert set(steps) - set(percent) == {"A8W8, some nodes float"}
    activations = [config.activation for config in steps.values()]
    bits = [32 if each is None else each.dtype.bits for each in activations]
    assert bits == sorted(bits) and next(iter(steps)) == "A8W8"
    configs = list(steps.values())
    assert all(configs.count(config) == 1 for config in configs)


def logits() -> Any:
    """A classifier of ten classes."""
    return parse(
        "g (float[1,3,8,8] x) => (float[1,10] probabilities) { a = Conv (x, k) p ="
        " GlobalAveragePool (a) f = Flatten (p) l = MatMul (f, w) probabilities = Softmax"
        " (l) }",
        k=weight(8, 3, 3, 3),
        w=weight(8, 10) * 20,
    )


def test_a_loss_in_percent_is_one_of_agreement() -> None:
    model = logits()
    data = samples(model, 40)
    found = quantize_to_accuracy(model, data, "20%")
    assert found.judged == 10 and found.resolution == 10.0
    assert found.best.loss is not None and found.best.loss <= 20
    assert found.reached and "class" in found.best.figure


def test_a_loss_in_percent_means_nothing_for_signals() -> None:
    model = residual()
    with pytest.raises(ConfigError, match=r"no share that agrees \(task \w+\); give"):
        quantize_to_accuracy(model, pixels(), "1%", task="signal")


def test_a_recipe_is_chosen_or_named() -> None:
    found = quantize_to_accuracy(residual(), pixels(), 0)
    assert found.choice.recipe is choose(residual()).recipe
    found = quantize_to_accuracy(residual(), pixels(), 0, recipe="detector")
    assert found.choice.recipe.name == "detector"
    with pytest.raises(ConfigError, match="unknown recipe 'detektor'; did you mean"):
        quantize_to_accuracy(residual(), pixels(), 0, recipe="detektor")


def test_a_budget_leaves_some_out_and_the_first_is_always_tried() -> None:
    found = quantize_to_accuracy(residual(), pixels(), 500, budget=1e-6)
    assert [attempt.name for attempt in found.attempts] == ["A8W8"]
    names = [name for name, _ in steps_of(found.choice, found.target)]
    assert found.left == tuple(names[1:])


def test_with_a_budget_sixteen_bits_are_tried_before_what_takes_long() -> None:
    """Learning would use up the budget; it still replaces a slower model if there is time."""
    data = pixels()
    open_end = quantize_to_accuracy(residual(), data, 500)
    limited = quantize_to_accuracy(residual(), data, 500, budget=3600)
    names = [attempt.name for attempt in limited.attempts]
    ladder = [name for name, _ in steps_of(limited.choice, limited.target)]
    assert [attempt.name for attempt in open_end.attempts] == ladder
    assert sorted(names) == sorted(ladder) and not limited.left
    assert names.index("A16W8") < names.index("A8W8 cle+adaquant+bias_correction")
    # The same model is chosen, whatever the order.
    assert limited.best.name == open_end.best.name
    between = sorted(each.sqnr for each in open_end.attempts if each.sqnr is not None)
    goal = between[len(between) // 2]
    found = [
        quantize_to_accuracy(residual(), data, goal, budget=b) for b in (None, 3600)
    ]
    assert [each.reached for each in found] == [True, True]
    assert found[0].best.name == found[1].best.name


@pytest.mark.parametrize(
    ("text", "target"),
    [
        ("1%", AccuracyTarget(1, True)),
        (" .5 % ", AccuracyTarget(0.5, True)),
        ("25dB", AccuracyTarget(25, False)),
        ("25 db", AccuracyTarget(25, False)),
        (25, AccuracyTarget(25, False)),
    ],
)
def test_targets(text: Any, target: AccuracyTarget) -> None:
    assert AccuracyTarget.of(text) == target


@pytest.mark.parametrize(
    "text",
    ["", "1", "-1%", "1 percent", "dB", None, True, [1], float("nan"), float("inf")],
)
def test_what_is_no_target(text: Any) -> None:
    with pytest.raises(ConfigError, match=r"accuracy is .*; it must be a loss such as"):
        AccuracyTarget.of(text)


def test_bad_input() -> None:
    with pytest.raises(ConfigError, match="budget is 0"):
        quantize_to_accuracy(residual(), pixels(), 20, budget=0)
    with pytest.raises(DataError, match="at least two samples"):
        quantize_to_accuracy(residual(), pixels(1), 20)
    with pytest.raises(ModelError, match=r"nowhere\.onnx"):
        quantize_to_accuracy("nowhere.onnx", [], 20)
