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
    if (
        not isinstance(mask, torch.Tensor)
        or mask.ndim != 2
        or bool(mask.all())
        or not _is_padding(mask.bool())
    ):
        yield batch
        return
    tensors = {
        key: each for key, each in batch.items() if isinstance(each, torch.Tensor)
    }
    if any(each.shape != mask.shape for each in tensors.values()):
        yield batch
        return
    rows = dict[tuple[int, ...], list[int]]()
    for row, shown in enumerate(mask.bool()):
        rows.setdefault(tuple(shown.nonzero().flatten().tolist()), []).append(row)
    for places, same in rows.items():
        if places:
            yield {
                **batch,
                **{key: each[same][:, list(places)] for key, each in tensors.items()},
            }


def _is_padding(shown: Any) -> bool:
    """Return whether each row of a mask shows a single run of tokens."""
    starts = shown[:, :1].sum(1) + (shown[:, 1:] & ~shown[:, :-1]).sum(1)
    return bool((starts <= 1).all())
