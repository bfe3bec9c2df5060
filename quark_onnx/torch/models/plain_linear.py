"""Recognition of ``nn.Linear`` subclasses whose forward is a plain matrix product.

Falcon has such a class.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

#: The size of the trial weight. Both numbers are prime, so that views into groups or
#: heads fail.
_OUTPUTS = 7
_INPUTS = 11
#: The scales of the inputs. A forward that clamps or normalizes differs from a product at one of
#: them.
_SCALES = (1.0, 1000.0)
_RELATIVE_ERROR = 1e-5

_known: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()


def is_plain_linear(module: nn.Module) -> bool:
    """Return whether an ``nn.Linear`` subclass only computes ``F.linear``.

    The forward of the class runs on a small random weight. The module itself may be on device
    "meta". A module with children, or with tensors in addition to weight and bias, is not plain:
    their effect may depend on values. An adapter, for example, is zero before training.

    >>> class Doubled(nn.Linear):
    ...     def forward(self, input):
    ...         return 2 * super().forward(input)
    >>> is_plain_linear(nn.Linear(2, 2)), is_plain_linear(Doubled(2, 2))
    (True, False)
    """
    if type(module).forward is nn.Linear.forward:
        return True
    # The trial takes several products, and kind_of asks again and again; weak keys keep no model
    # alive.
    if module not in _known:
        _known[module] = _has_only_weight_and_bias(module) and _computes_product(module)
    return _known[module]


def _has_only_weight_and_bias(module: Any) -> bool:
    tensors = {*module._parameters, *module._buffers}
    # A subclass may replace the weight by a property, and then is no plain Linear.
    return (
        tensors <= {"weight", "bias"}
        and not module._modules
        and isinstance(module.weight, nn.Parameter)
    )


def _computes_product(module: Any) -> bool:
    """Compare the forward of the class with ``F.linear``, in float32 on the CPU."""
    random = random_tensors()
    weight = random(_OUTPUTS, _INPUTS)
    bias = None if module.bias is None else random(_OUTPUTS)
    small = with_parameters(module, weight=weight, bias=bias)
    small.out_features, small.in_features = _OUTPUTS, _INPUTS
    # Dropout in a forward would make the trial random.
    small.training = False
    # (2, 3, inputs): two leading axes, as hidden states have, and more than one value in each.
    for scale in _SCALES:
        x = scale * random(2, 3, _INPUTS)
        output, expected = tried(small, x), F.linear(x, weight, bias)
        if output is None or output.shape != expected.shape:
            return False
        error = (output - expected).abs().max()
        # Not ``>``: a NaN in the result must fail.
        if not bool(error <= _RELATIVE_ERROR * expected.abs().max()):
            return False
    return True


def random_tensors() -> Callable[..., torch.Tensor]:
    """Return a function of sizes that returns random float32 tensors, the same in each process."""
    generator = torch.Generator("cpu").manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(
            shape, generator=generator, dtype=torch.float32, device="cpu"
        )

    return random


def with_parameters(module: Any, **parameters: torch.Tensor | None) -> Any:
    """Return a shallow copy of a module with other parameters; the module stays unchanged."""
    small = copy.copy(module)
    small._parameters = {
        name: None if value is None else nn.Parameter(value, requires_grad=False)
        for name, value in parameters.items()
    }
    return small


def tried(module: Any, *inputs: Any) -> torch.Tensor | None:
    """Return the output of a forward; None if it raises an error, or returns no tensor."""
    try:
        with torch.no_grad():
            output = type(module).forward(module, *inputs)
    except Exception:
        # a forward may raise any exception for unexpected sizes
        return None
    return output if isinstance(output, torch.Tensor) else None
