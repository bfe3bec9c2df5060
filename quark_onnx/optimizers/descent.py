"""Share settings and partitioning between optimizers by gradient descent."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from quark_onnx.common.errors import ConfigError
from quark_onnx.config.checks import require_one_of
from quark_onnx.kernels.device import DEVICES, Device, device_for
from quark_onnx.kernels.rounding import OutputPart, in_parts
from quark_onnx.kernels.threads import one_thread
from quark_onnx.optimizers.base import require_number, require_whole
from quark_onnx.optimizers.problem import RoundingProblem

#: Least error of RTN by which errors are divided.
_LEAST_NORM = 1e-20


def check(optimizer: Any) -> None:
    """Raise ConfigError unless the common settings are valid."""
    require_whole(optimizer, "iterations", "rows")
    require_number(optimizer, "rate", least=0)
    require_one_of(f"device of {optimizer.name}", optimizer.device, DEVICES)
    # A missing GPU is an error of the configuration, and found before any calibration.
    device_of(optimizer)


def device_of(optimizer: Any) -> Device:
    """Return the requested device of an optimizer.

    Raises:
        ConfigError: the device is not available.
    """
    try:
        return device_for(optimizer.device)
    except LookupError as error:
        raise ConfigError(
            f"device of {optimizer.name} is {optimizer.device!r}, but {error}; choose"
            " auto or cpu, or install a torch that sees it",
        ) from error


def descend(
    problem: RoundingProblem,
    device: Device,
    work: Callable[[OutputPart, tuple[slice, slice]], None],
) -> None:
    """Call ``work`` for the blocks of groups and outputs of a layer, with rows on the device.

    Args:
        problem: the layer.
        device: the device that computes.
        work: takes the rows of a block, and the slices of groups and outputs; it is called from
            several threads, and stores its results itself.
    """
    activation = problem.activation
    train = problem.train
    # The targets do not change during the descent.
    wanted = activation.value(train.targets)
    with one_thread():
        # Errors relative to RTN, so that one learning rate serves layers of any range.
        loss = problem.loss(problem.nearest(), train)
    norm = np.maximum(loss, _LEAST_NORM).astype(np.float32)
    value = partial(activation.value, xp=device.xp)
    derivative = partial(activation.derivative, xp=device.xp)

    # A loss of NaN is never accepted.
    @np.errstate(over="ignore", invalid="ignore")
    def work_on(groups: slice, outputs: slice) -> None:
        part = OutputPart(
            train.inputs[groups],
            wanted[groups, :, outputs],
            value,
            derivative,
            norm[groups, outputs],
        )
        work(part.on(device), (groups, outputs))

    # A GPU takes large parts, one after another; cores share small ones.
    in_parts(work_on, *problem.weight.shape, whole=device.parallel)
