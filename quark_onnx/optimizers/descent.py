"""What optimizers that descend a gradient have in common: their settings, and a layer in the parts
they work on.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from quark_onnx.errors import ConfigError
from quark_onnx.kernels.device import DEVICES, Device, device_for
from quark_onnx.kernels.rounding import Part, in_parts
from quark_onnx.kernels.threads import one_thread
from quark_onnx.optimizers.base import require_number, require_whole
from quark_onnx.optimizers.problem import Problem

#: Errors are divided by those of rounding to nearest, where there are any.
_LEAST_NORM = 1e-20


def check(optimizer: Any) -> None:
    """Raise ConfigError unless the common settings are right."""
    require_whole(optimizer, "iterations", "rows")
    require_number(optimizer, "rate", least=0)
    if optimizer.device not in DEVICES:
        raise ConfigError(
            f"device of {optimizer.name} is {optimizer.device!r}; it must be one of:"
            f" {', '.join(DEVICES)}",
        )
    device_of(optimizer)


def device_of(optimizer: Any) -> Device:
    """The device that an optimizer asks for.

    Raises:
        ConfigError: there is none.
    """
    try:
        return device_for(optimizer.device)
    except LookupError as error:
        raise ConfigError(
            f"device of {optimizer.name} is {optimizer.device!r}, but {error}; choose"
            " auto or cpu, or install a torch that sees it",
        ) from error


def descend(
    problem: Problem,
    device: Device,
    work: Callable[[Part, tuple[slice, slice]], None],
) -> None:
    """Let ``work`` deal with all groups and outputs of a layer, each part of them on the device."""
    activation, train = problem.activation, problem.train
    wanted = activation.value(train.targets)
    with one_thread():
        norm = np.maximum(problem.loss(problem.nearest(), train), _LEAST_NORM).astype(
            np.float32,
        )
    value, derivative = (
        partial(f, xp=device.xp) for f in (activation.value, activation.derivative)
    )

    @np.errstate(
        over="ignore",
        invalid="ignore",
    )  # a loss that is no number is not kept
    def one(groups: slice, outputs: slice) -> None:
        part = Part(
            train.inputs[groups],
            wanted[groups, :, outputs],
            value,
            derivative,
            norm[groups, outputs],
        )
        work(part.on(device), (groups, outputs))

    in_parts(one, *problem.weight.shape, whole=device.parallel)
