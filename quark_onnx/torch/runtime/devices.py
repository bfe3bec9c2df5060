"""device_named: the device that blocks are quantized on, by the text of ``--device``."""

from __future__ import annotations

from typing import Any

import torch

from quark_onnx.errors import ConfigError

#: The share of a device's free memory that hidden states may take, those of the float model and
#: those of the quantized one each; blocks need the rest.
_SHARE = 0.25


def device_named(text: str) -> Any:
    """The device that a text names.

    Args:
        text: "auto" for the first GPU, or the CPU where there is none; "cpu"; "cuda" or "cuda:1",
            which ROCm has as well; or any other that torch knows.

    Raises:
        ConfigError: torch does not know it, or it is not there.

    >>> device_named("cpu")
    device(type='cpu')
    """
    if text == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(text)
    except RuntimeError as error:
        raise ConfigError(
            f"device is {text!r}; it must be auto, cpu, cuda, or cuda:N",
        ) from error
    if device.type == "meta":
        raise ConfigError("device is 'meta', which computes nothing")
    if device.type == "cpu":
        return device
    try:
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise ConfigError(
            f"device {text!r} is not there: {reason}; leave --device out, or choose cpu",
        ) from error
    return device


def room_for_states(device: Any) -> int | None:
    """Bytes that hidden states may take on a device; None where there is no limit.

    On the CPU they are in memory anyway.
    """
    if device.type != "cuda":
        return None
    free, _ = torch.cuda.mem_get_info(device)
    return int(free * _SHARE)
