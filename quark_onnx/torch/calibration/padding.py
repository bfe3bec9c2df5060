"""Removal of padding tokens from calibration data, to exclude them from statistics."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch


def unpadded(batch: Any) -> Iterator[Any]:
    """Split a batch into batches without padding, by the length of rows.

    A batch is yielded unchanged if its ``attention_mask`` hides nothing or hides tokens other than
    padding, or if the batch has tensors of other shapes than the mask.

    >>> batch = {"input_ids": torch.tensor([[0, 5, 6], [7, 8, 9]])}
    >>> batch["attention_mask"] = torch.tensor([[0, 1, 1], [1, 1, 1]])
    >>> [each["input_ids"].tolist() for each in unpadded(batch)]
    [[[5, 6]], [[7, 8, 9]]]
    """
    mask = batch.get("attention_mask") if isinstance(batch, Mapping) else None
    if not isinstance(mask, torch.Tensor) or not _hides_padding(mask):
        yield batch
        return
    tensors = {name: value for name, value in batch.items() if torch.is_tensor(value)}
    # Token ids, mask and labels are cut at the same positions; anything else keeps the batch as it
    # is.
    if {tensor.shape for tensor in tensors.values()} != {mask.shape}:
        yield batch
        return
    rows_at = dict[tuple[int, ...], list[int]]()
    # Rows with tokens at the same positions, all of one length, stay together in a batch.
    for row, shown in enumerate(mask.bool()):
        rows_at.setdefault(tuple(shown.nonzero().flatten().tolist()), []).append(row)
    for positions, rows in rows_at.items():
        # A row of padding alone has no tokens.
        if positions:
            columns = list(positions)
            cut = {name: tensor[rows][:, columns] for name, tensor in tensors.items()}
            yield dict(batch) | cut


def _hides_padding(mask: torch.Tensor) -> bool:
    """Return whether a mask of (rows, tokens) hides tokens, and shows a single run of each row."""
    if mask.ndim != 2 or bool(mask.all()):
        return False
    shown = mask.bool()
    # (rows,): the number of runs of shown tokens; padding on one side or both leaves a single one.
    starts = shown[:, :1].sum(1) + (shown[:, 1:] & ~shown[:, :-1]).sum(1)
    return bool((starts <= 1).all())
