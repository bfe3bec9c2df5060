"""Meta tensors: results computed from one are meta tensors of the right shape, and no other tensor
changes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from quark_onnx.torch.algorithms.scheduling.meta_tensor import (
    MetaTensor,
    MetaTensorError,
)

LINEAR = nn.Linear(4, 8)
COMPUTED: list[Callable[[Any], Any]] = [
    lambda x: x + torch.ones(2, 3, 1),
    lambda x: torch.ones(4, 4) @ x.transpose(1, 2),
    lambda x: LINEAR(x),
    lambda x: torch.cat([torch.ones(2, 1, 4), x], 1),
    lambda x: nn.functional.scaled_dot_product_attention(
        x, torch.ones(2, 5, 4), torch.ones(2, 5, 6), is_causal=True
    ),
    lambda x: nn.functional.scaled_dot_product_attention(
        x[:, :, None].expand(-1, -1, 7, -1),
        torch.ones(1, 1, 5, 4),
        value=torch.ones(2, 1, 5, 6),
    ),
    lambda x: nn.functional.scaled_dot_product_attention(
        x.reshape(1, 6, 1, 4),
        torch.ones(1, 2, 5, 4),
        torch.ones(1, 2, 5, 4),
        torch.ones(1, 5).bool(),
        enable_gqa=True,
    ),
    lambda x: nn.functional.scaled_dot_product_attention(
        x[0], torch.ones(5, 4), torch.ones(5, 6)
    ),
    lambda x: x.float().reshape(6, 4)[..., 1:].contiguous().to(torch.float16),
    lambda x: x.mul_(2).add_(torch.ones(4)),
    lambda x: x.split(2, -1)[1],
    lambda x: torch.where(torch.ones(4) > 0, torch.zeros(4), x).softmax(-1),
    lambda x: torch.zeros_like(x, device="cpu") * x,
    lambda x: x.to(torch.ones(1).device, torch.bfloat16) + torch.ones(4).to(x.device),
]


@pytest.mark.parametrize("compute", COMPUTED)
def test_what_is_computed_of_a_blank_is_one(compute: Callable[[Any], Any]) -> None:
    plain = torch.ones(2, 3, 4)
    with torch.no_grad():
        found, wanted = compute(MetaTensor.of(plain, plain.device)), compute(plain)
    assert (
        isinstance(found, MetaTensor)
        and found.device == plain.device
        and found.is_cuda == plain.is_cuda
    )
    assert found.shape == wanted.shape and found.dtype == wanted.dtype


CHANGES: list[Callable[[Any, Any], Any]] = [
    lambda real, blank: real.add_(blank),
    lambda real, blank: real.copy_(blank),
    lambda real, blank: real.__setitem__(0, blank[0]),
    lambda real, blank: real.__iadd__(blank),
    lambda real, blank: torch.add(real, blank, out=real),
    lambda real, blank: torch._foreach_add_([real], [blank]),
    lambda real, blank: torch._foreach_add_(self=[real], other=[blank]),
    lambda real, blank: torch.clamp_(input=real, max=blank),
    lambda real, blank: torch.ops.aten.add_.Tensor(real, blank),
    lambda real, blank: real.index_put_((torch.zeros(2, dtype=torch.int64),), blank),
    lambda real, blank: real.masked_fill_(blank > 0, 1.0),
]


@pytest.mark.parametrize("change", CHANGES)
def test_no_tensor_changes_by_a_blank(change: Callable[[Any, Any], Any]) -> None:
    real = torch.zeros(2, 3)
    with pytest.raises(MetaTensorError):
        change(real, MetaTensor.of(torch.ones(2, 3), real.device))
    assert not real.any()


@pytest.mark.parametrize(
    "ask", [bool, float, lambda x: x.item(), lambda x: x.nonzero(), lambda x: x.numpy()]
)
def test_a_blank_has_no_numbers(ask: Callable[[Any], Any]) -> None:
    with pytest.raises((RuntimeError, TypeError)):
        ask(MetaTensor.of(torch.ones(1), torch.device("cpu")).sum())


def test_what_is_made_for_its_device_has_numbers() -> None:
    blank = MetaTensor.of(torch.ones(2, 3), torch.device("cpu"))
    assert torch.arange(3, device=blank.device).tolist() == [0, 1, 2]
    assert torch.ones(3).to(blank.device).sum() == 3
