"""Perplexity: how well a language model predicts held-out tokens."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from quark_onnx.common.errors import DataError
from quark_onnx.common.progress import Progress
from quark_onnx.torch.calibration.block_stream import inference


def perplexity(
    model: nn.Module,
    windows: Iterable[torch.Tensor],
    *,
    batch: int = 8,
    progress: bool | None = None,
) -> float:
    """Compute the perplexity, exp of the mean negative log likelihood of tokens.

    The first token of each window is not predicted.

    Args:
        model: computes ``logits`` from ``input_ids``.
        windows: token ids, each of shape (length,), with the same length.
        batch: number of windows per run.
        progress: whether to show a progress bar; None shows it if stderr is a terminal.

    Returns:
        The perplexity.

    Raises:
        DataError: there is no window of two tokens, or the model cannot be run on a window.
    """
    rows = [torch.as_tensor(window).long() for window in windows]
    if not rows or rows[0].numel() < 2:
        raise DataError("perplexity needs windows of at least two tokens")
    # A model without parameters is on the CPU.
    device = next(model.parameters(), torch.empty(0)).device
    total, count = 0.0, 0
    with inference(model), Progress(progress, len(rows), "evaluating", "window") as bar:
        for start in range(0, len(rows), batch):
            ids = torch.stack(rows[start : start + batch]).to(device)
            # (windows, length - 1, vocabulary): position t predicts token t + 1. In float32, since
            # the softmax of bfloat16 logits would lose digits.
            logits = _logits(model, ids)[:, :-1].float()
            loss = torch.nn.functional.cross_entropy(
                logits.flatten(0, 1),
                ids[:, 1:].flatten(),
                # Summed here and divided once: a smaller last batch would otherwise weigh too much.
                reduction="sum",
            )
            total, count = total + float(loss), count + ids[:, 1:].numel()
            bar.update(min(start + batch, len(rows)))
    # Overflow is infinity, where math.exp would raise an error.
    return float(torch.exp(torch.tensor(total / count, dtype=torch.float64)))


def _logits(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """Run a model on windows of token ids; raise DataError if it cannot be run."""
    try:
        logits: torch.Tensor = model(input_ids=ids).logits
        return logits
    except Exception as error:
        raise DataError(
            f"the model cannot be run on windows of {ids.shape[1]} tokens:"
            f" {type(error).__name__}: {error}",
        ) from error


def windows_of(tokens: torch.Tensor, length: int) -> list[torch.Tensor]:
    """Split tokens into windows of one length without overlap; drop the remainder.

    >>> windows_of(torch.arange(7), 3)
    [tensor([0, 1, 2]), tensor([3, 4, 5])]
    """
    tokens = torch.as_tensor(tokens).reshape(-1)
    return [
        tokens[start : start + length]
        for start in range(0, len(tokens) - length + 1, length)
    ]
