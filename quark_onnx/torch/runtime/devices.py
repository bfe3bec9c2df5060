"""Devices that blocks are quantized on, by the text of ``--device``."""

from __future__ import annotations

import os

import torch

from quark_onnx.common.errors import ConfigError

#: The share of a device's free memory for the hidden states of the float model, and again for the
#: hidden states of the quantized model; blocks need the rest.
_SHARE = 0.25


def device_named(text: str) -> torch.device:
    """Return the device that a text names.

    Args:
        text: "auto" for the GPU of this process, or the CPU if there is no GPU; "cpu"; "cuda" or
            "cuda:1" (also for ROCm); or another device of torch. The GPU of a process without a
            number is the first one; for the processes of torchrun, the one of LOCAL_RANK.

    Returns:
        A ``torch.device``.

    Raises:
        ConfigError: torch does not know the device, or the device is not available.

    >>> device_named("cpu")
    device(type='cpu')
    """
    if text == "auto":
        text = "cuda" if torch.cuda.is_available() else "cpu"
    # torchrun starts one process for each GPU of a machine. Without a number, all processes would
    # share the first GPU.
    if text == "cuda" and "LOCAL_RANK" in os.environ:
        text = f"cuda:{os.environ['LOCAL_RANK']}"
    try:
        device = torch.device(text)
    except RuntimeError as error:
        raise ConfigError(
            f"device is {text!r}; it must be auto, cpu, cuda, or cuda:N",
        ) from error
    # torch accepts "meta", whose tensors have a shape and no values.
    if device.type == "meta":
        raise ConfigError("device is 'meta', which computes nothing")
    if device.type == "cpu":
        return device
    # torch.device accepts a backend that the build or the machine lacks; the first allocation
    # fails.
    try:
        torch.empty(1, device=device)
    # A build without CUDA raises AssertionError, a build without MPS NotImplementedError, and a
    # backend of another package (hpu) ImportError.
    except (RuntimeError, AssertionError, NotImplementedError, ImportError) as error:
        # Errors of CUDA go on with general advice; the first line names the cause.
        reason = str(error).strip().partition("\n")[0]
        raise ConfigError(
            f"device {text!r} is not there: {reason}; leave --device out, or choose cpu",
        ) from error
    return device


def room_for_states(device: torch.device) -> int | None:
    """Return the number of bytes for hidden states on a device; None for no limit.

    Hidden states of a model on the CPU have no limit.
    """
    if device.type != "cuda":
        return None
    # Other processes on the GPU have taken their memory already.
    free, _ = torch.cuda.mem_get_info(device)
    return int(free * _SHARE)
