"""Verification that onnxruntime computes torch's outputs up to rounding noise."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from calibrators.onnx_runtime.session import open_session
from quark_onnx.common.errors import ModelError
from quark_onnx.torch.exports.onnx.stand_in import StandIn
from quark_onnx.torch.exports.onnx.trace import Batch, Flat
from quark_onnx.torch.models.names import instances

#: Relative difference (L2) that is always accepted, by dtype of the computation.
TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2}
#: Rounded activations amplify noise to steps of a code. The accepted difference is therefore also
#: a multiple of the effect of input noise in torch.
TIMES = 10.0
#: The input noise in ulps of a layer's greatest input, as caused by a different order of sums; and
#: the number of draws.
UNITS, DRAWS = 8.0, 3


def verify(  # noqa: PLR0913
    path: Path,
    flat: Flat,
    batch: Batch,
    axes: Mapping[str, Mapping[int, str]],
    dtype: torch.dtype,
    *,
    integers: bool = True,
) -> float:
    """Return the largest relative difference (L2) of onnxruntime from torch.

    The model is run on the inputs and, if axes are dynamic, on inputs of other sizes. Every output
    is compared.

    Args:
        path: the ONNX model.
        flat: the torch model.
        batch: the inputs.
        axes: the dynamic axes.
        dtype: dtype of the computation.
        integers: let onnxruntime fuse Q/DQ pairs into integer operators, as it does by default.

    Raises:
        ModelError: onnxruntime does not load or run the model, or the difference is more than
            noise.
    """
    try:
        session = open_session(path, integers=None if integers else False)
    except Exception as error:  # onnxruntime raises several unrelated types
        raise ModelError(
            f"onnxruntime cannot load the exported model: {error}",
        ) from error
    worst = 0.0
    for tensors in _samples(batch, axes):
        expected = _run(flat, tensors)
        try:
            feeds = {name: tensor.numpy() for name, tensor in tensors.items()}
            results = session.run(None, feeds)
        except Exception as error:  # onnxruntime raises several unrelated types
            raise ModelError(
                f"onnxruntime cannot run the exported model on {_shapes(tensors)}:"
                f" {error}",
            ) from error
        shown = _shown(tensors)
        # Drawn for the first output that differs, as each draw runs the model.
        noisy = list[list[NDArray[Any]]]()
        for index, output in enumerate(session.get_outputs()):
            difference = distance(results[index], expected[index], shown)
            allowed = TOLERANCE[dtype]
            if difference > allowed and not noisy:
                with noise(flat, dtype):
                    noisy = [_run(flat, tensors) for _ in range(DRAWS)]
            for outputs in noisy:
                noise_effect = distance(outputs[index], expected[index], shown)
                allowed = max(allowed, TIMES * noise_effect)
            # Not ``>``, since NaN must fail, too.
            if not difference <= allowed:
                raise ModelError(
                    f"output {output.name!r} of the exported model differs from torch's"
                    f" on {_shapes(tensors)}: {difference:.2g} relative, {allowed:.2g}"
                    " is what rounding explains; nothing was written",
                )
            worst = max(worst, difference)
    return worst


def distance(
    actual: NDArray[Any],
    expected: NDArray[Any],
    shown: NDArray[Any] | None = None,
) -> float:
    """Compute the relative difference (L2) of two tensors.

    The difference is infinite if shapes differ or values are not finite in both.

    Args:
        actual: the tensor to compare.
        expected: the reference.
        shown: bool (batch, sequence): positions of tokens; outputs at padding are ignored.

    >>> distance(np.float32([3, 4]), np.float32([3, 4.5]))
    0.0924...
    """
    if actual.shape != expected.shape:
        return float("inf")
    if shown is not None and actual.shape[:2] == shown.shape:
        actual, expected = actual[shown], expected[shown]
    # Integers and bools have to be equal.
    if expected.dtype.kind != "f":
        if np.array_equal(actual, expected):
            return 0.0
        return float("inf")
    actual, expected = actual.astype(np.float64), expected.astype(np.float64)
    # Infinities and NaN stand at the same places in both, and are left out of the norm.
    same = np.isfinite(expected)
    if not np.array_equal(actual[~same], expected[~same], equal_nan=True):
        return float("inf")
    error = float(np.linalg.norm(actual[same] - expected[same]))
    if not error:
        return 0.0
    return error / max(
        # An expected output of zeros divides by the least normal number.
        float(np.linalg.norm(expected[same])),
        float(np.finfo(np.float32).tiny),
    )


def _samples(
    batch: Batch,
    axes: Mapping[str, Mapping[int, str]],
) -> Iterator[dict[str, Any]]:
    """Yield the inputs, and inputs with other sizes of dynamic axes.

    The batch is doubled, and further dynamic axes are shortened by one.
    """
    yield batch.tensors
    if not any(axes.values()):
        return
    varied = {}
    for name, tensor in batch.tensors.items():
        for axis, kind in axes[name].items():
            if kind == "batch":
                tensor = torch.cat([tensor, tensor], axis)
            # At least two stay, since a size of 1 is special in traces.
            elif tensor.shape[axis] > 2:
                tensor = tensor.narrow(axis, 1, tensor.shape[axis] - 1).contiguous()
        varied[name] = tensor
    yield varied


def _run(flat: Flat, tensors: Mapping[str, Any]) -> list[NDArray[Any]]:
    """Return the outputs of torch, in the order of the ONNX model."""
    with torch.no_grad():
        return [output.numpy() for output in flat(*tensors.values())]


def _shown(tensors: Mapping[str, Any]) -> NDArray[np.bool_] | None:
    """Return the positions of tokens, (batch, sequence); None without a mask."""
    mask = tensors.get("attention_mask")
    return None if mask is None or mask.ndim != 2 else (mask.numpy() > 0)


def _shapes(tensors: Mapping[str, Any]) -> str:
    """Return the names and shapes of inputs, for errors."""
    return ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in tensors.items())


@contextmanager
def noise(flat: Flat, dtype: torch.dtype) -> Iterator[None]:
    """Add noise of some ulps to the inputs of quantized layers inside the context."""
    generator = torch.Generator().manual_seed(0)
    share = UNITS * torch.finfo(dtype).eps

    def disturb(module: nn.Module, operands: tuple[Any, ...]) -> tuple[Any, ...]:
        x, *more = operands
        # Indices of an embedding are exact.
        if not x.is_floating_point():
            return operands
        # A share of the greatest input, as sums round relative to it.
        drawn = torch.randn(x.shape, generator=generator).to(x.dtype)
        return (x + share * x.abs().max() * drawn, *more)

    with ExitStack() as stack:
        for module in instances(flat, StandIn).values():
            stack.enter_context(module.register_forward_pre_hook(disturb))
        yield
