"""Verify that onnxruntime computes the outputs of torch up to rounding noise."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from calibrators.onnx_runtime.session import open_session
from quark_onnx.errors import ModelError
from quark_onnx.torch.exports.onnx.stand_in import StandIn
from quark_onnx.torch.exports.onnx.trace import Batch, Flat

#: The largest relative difference (L2) that is always taken for noise, by the type that is computed
#: in.
TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2}
#: Rounded activations turn noise into steps from code to code. So many times the difference that
#: noise on what layers read makes in torch itself is noise, too.
TIMES = 10.0
#: That noise, in units of the last place of the greatest value that a layer reads, as sums have it
#: that are added up in another order; and how often it is drawn.
UNITS, DRAWS = 8.0, 3


def verify(  # noqa: PLR0913
    path: Path,
    flat: Flat,
    batch: Batch,
    axes: Mapping[str, Mapping[int, str]],
    dtype: Any,
    *,
    integers: bool = True,
) -> float:
    """The largest relative difference (L2) between onnxruntime and torch at any output.

    The model is run on the inputs and, where axes are dynamic, on some of other lengths.

    Args:
        path: of the model.
        flat: what torch computes.
        batch: the inputs.
        axes: those that are dynamic.
        dtype: the type that is computed in.
        integers: onnxruntime may make operators on integers of what stands between Q/DQ pairs, as
            it does by default.

    Raises:
        ModelError: onnxruntime does not load or run the model, or computes something else.
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
            found = session.run(
                None,
                {name: value.numpy() for name, value in tensors.items()},
            )
        except Exception as error:  # onnxruntime raises several unrelated types
            raise ModelError(
                f"onnxruntime cannot run the exported model on {_shapes(tensors)}:"
                f" {error}",
            ) from error
        shown = _shown(tensors)
        noisy = list[list[NDArray[Any]]]()
        for place, output in enumerate(session.get_outputs()):
            difference, allowed = (
                distance(found[place], expected[place], shown),
                TOLERANCE[dtype],
            )
            if difference > allowed and not noisy:
                with noise(flat, dtype):
                    noisy = [_run(flat, tensors) for _ in range(DRAWS)]
            allowed = max(
                allowed,
                *(
                    TIMES * distance(each[place], expected[place], shown)
                    for each in noisy
                ),
                0.0,
            )
            if not difference <= allowed:
                raise ModelError(
                    f"output {output.name!r} of the exported model differs from torch's"
                    f" on {_shapes(tensors)}: {difference:.2g} relative, {allowed:.2g}"
                    " is what rounding explains; nothing was written",
                )
            worst = max(worst, difference)
    return worst


def distance(
    found: NDArray[Any],
    expected: NDArray[Any],
    shown: NDArray[Any] | None = None,
) -> float:
    """Relative difference (L2) of two tensors.

    Infinite if they are not of one shape or not both finite.

    Args:
        shown: bool (batch, sequence): where tokens are; what a model computes of padding means
            nothing.

    >>> distance(np.float32([3, 4]), np.float32([3, 4.5]))
    0.0924...
    """
    if found.shape != expected.shape:
        return float("inf")
    if shown is not None and found.shape[:2] == shown.shape:
        found, expected = found[shown], expected[shown]
    if expected.dtype.kind != "f":
        return 0.0 if np.array_equal(found, expected) else float("inf")
    found, expected = found.astype(np.float64), expected.astype(np.float64)
    same = np.isfinite(expected)
    if not np.array_equal(found[~same], expected[~same], equal_nan=True):
        return float("inf")
    error = float(np.linalg.norm(found[same] - expected[same]))
    return (
        error
        / max(float(np.linalg.norm(expected[same])), float(np.finfo(np.float32).tiny))
        if error
        else 0.0
    )


def _samples(
    batch: Batch,
    axes: Mapping[str, Mapping[int, str]],
) -> Iterator[dict[str, Any]]:
    """The inputs; and such that have twice the first dynamic axis, and one less of others."""
    yield batch.tensors
    if not any(axes.values()):
        return
    varied = {}
    for name, tensor in batch.tensors.items():
        for axis, kind in axes[name].items():
            if kind == "batch":
                tensor = torch.cat([tensor, tensor], axis)
            elif tensor.shape[axis] > 2:
                tensor = tensor.narrow(axis, 1, tensor.shape[axis] - 1).contiguous()
        varied[name] = tensor
    yield varied


def _run(flat: Flat, tensors: Mapping[str, Any]) -> list[NDArray[Any]]:
    with torch.no_grad():
        return [value.numpy() for value in flat(*tensors.values())]


def _shown(tensors: Mapping[str, Any]) -> NDArray[np.bool_] | None:
    mask = tensors.get("attention_mask")
    return None if mask is None or mask.ndim != 2 else (mask.numpy() > 0)


def _shapes(tensors: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in tensors.items())


@contextmanager
def noise(flat: Flat, dtype: Any) -> Iterator[None]:
    """Context manager: what each quantized layer reads is off by some units in the last place."""
    generator = torch.Generator().manual_seed(0)
    share = UNITS * torch.finfo(dtype).eps

    def disturb(module: Any, operands: tuple[Any, ...]) -> tuple[Any, ...]:
        x, *more = operands
        if not x.is_floating_point():
            return operands
        drawn = torch.randn(x.shape, generator=generator).to(x.dtype)
        return (x + share * x.abs().max() * drawn, *more)

    handles = [
        module.register_forward_pre_hook(disturb)
        for module in flat.modules()
        if isinstance(module, StandIn)
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
