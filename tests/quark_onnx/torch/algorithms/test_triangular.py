"""Halves of symmetric matrices and their factors: against numpy in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from quark_onnx.torch.algorithms.gptq import triangular
from quark_onnx.torch.algorithms.gptq.triangular import (
    add_products,
    factor_flipped,
    mirror,
    permute,
    quadratic_form,
    store_lower,
)


@pytest.fixture(autouse=True)
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Panels that end within the matrices here."""
    monkeypatch.setattr(triangular, "PANEL", 7)
    monkeypatch.setattr(triangular, "ROWS", 5)
    monkeypatch.setattr(triangular.panels, "__defaults__", (7,))


def tokens(count: int, inputs: int) -> torch.Tensor:
    return torch.randn(count, inputs, generator=torch.Generator().manual_seed(inputs))


@pytest.mark.parametrize("inputs", [1, 7, 30])
def test_products_are_those_of_all_parts(inputs: int) -> None:
    x, total = tokens(50, inputs), torch.zeros(inputs, inputs)
    for part in x.split(20):
        add_products(total, part)
    mirror(total)
    assert torch.equal(total, total.t())
    assert np.allclose(
        total.numpy(), x.double().T.numpy() @ x.double().numpy(), rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("inputs", [1, 7, 30])
def test_a_form_reads_the_upper_half(inputs: int) -> None:
    x, off = tokens(50, inputs), tokens(4, inputs)
    gram = x.T @ x
    found = quadratic_form(
        off, gram.triu(1) + torch.full_like(gram, torch.nan).tril(), gram.diagonal()
    )
    assert np.allclose(
        found.numpy(), (off.double() @ x.double().T).square().sum(1).numpy(), rtol=1e-5
    )


@pytest.mark.parametrize("inputs", [1, 7, 30])
def test_a_factor_is_that_of_the_matrix_in_its_order(inputs: int) -> None:
    x = tokens(50, inputs)
    order = torch.randperm(inputs, generator=torch.Generator().manual_seed(0))
    gram = (x.T @ x)[order][:, order]
    work = permute(x.T @ x, order.flip(0))
    assert torch.equal(work.flip(0, 1), gram)
    assert factor_flipped(work)
    matrix = gram.clone()
    store_lower(work, matrix)
    lower = matrix.tril().double()
    assert torch.equal(matrix.triu(1), gram.triu(1))
    size = float(gram.diagonal().max())
    assert np.allclose(
        (lower.T @ lower).numpy(), gram.double().numpy(), rtol=0, atol=1e-6 * size
    )


def test_a_factor_has_the_same_bits_on_any_number_of_threads() -> None:
    x = tokens(900, 700) + 1
    gram = x.T @ x + 0.01 * torch.eye(700) * x.square().sum() / 700
    found, before = [], torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            work = gram.clone()
            assert factor_flipped(work)
            found.append(work.triu())
    finally:
        torch.set_num_threads(before)
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])
    exact = torch.linalg.cholesky(gram.double(), upper=True)
    assert float((found[0].double() - exact).abs().max()) <= 1e-5 * float(
        exact.abs().max()
    )


@pytest.mark.parametrize("wrong", [-1.0, torch.inf, torch.nan])
def test_what_has_no_factor_is_told(wrong: float) -> None:
    work = torch.eye(9)
    work[3, 3] = wrong
    assert not factor_flipped(work)
