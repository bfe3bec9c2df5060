"""The size of what a layer computes, as the losses have it."""

from __future__ import annotations

import pytest
import torch

from quark_onnx.torch.algorithms.weight_rounding.losses import Loss, squares_of


@pytest.mark.parametrize(
    ("outputs", "within"), [(7, 1e-5), (128, 1e-5), (129, 0.05), (1000, 0.05)]
)
def test_the_power_is_that_of_all_outputs(outputs: int, within: float) -> None:
    """Of few outputs it is exact; of many, of inputs that depend on each other, near."""
    generator = torch.Generator().manual_seed(outputs)
    weight = (
        torch.randn(outputs, 40, generator=generator)
        * torch.linspace(0.1, 3, outputs)[:, None]
    )
    x = torch.randn(300, 40, generator=generator) @ torch.randn(
        40, 40, generator=generator
    )
    exact = float((weight.double() @ x.double().t()).square().sum())
    found = float(Loss(weight, squares_of(x.t() @ x)).power())
    assert found == pytest.approx(exact, rel=within)
    assert found == float(Loss(weight, squares_of(x.t() @ x)).power())


def test_the_power_of_equal_outputs_is_off_by_an_eighth_at_most_times_three() -> None:
    weight, x = torch.ones(2000, 8), torch.ones(5, 8)
    found = float(Loss(weight, squares_of(x.t() @ x)).power())
    assert found == pytest.approx(5 * 8**2 * 2000, rel=3 / 8)
