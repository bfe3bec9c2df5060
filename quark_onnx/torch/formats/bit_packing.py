"""Codes of a few bits in the integers of checkpoints, and back."""

from __future__ import annotations

from typing import Any

import torch

from quark_onnx.errors import ModelError

#: Which of eight neighbours the nibbles of an int32 hold, the lowest first: that of AutoAWQ's
#: kernels.
ORDERS = {"reorder": (0, 2, 4, 6, 1, 3, 5, 7), "order": tuple(range(8))}


def pack_nibbles(codes: Any, method: str = "reorder") -> Any:
    """Codes of 4 bits along the last axis, eight to an int32.

    What is missing to eight is filled with 0.

    Args:
        codes: integers of shape (..., n), -8..7 in two's complement or 0..15.
        method: "reorder" or "order".

    >>> pack_nibbles(torch.tensor([[1, 2, 3, 4, 5, 6, 7, 8]]), "order")
    tensor([[-2023406815]], dtype=torch.int32)
    """
    nibbles = in_blocks((codes & 15).to(torch.uint8), 8)
    order = ORDERS[method]
    octets = [
        nibbles[..., low] | nibbles[..., high] << 4
        for low, high in zip(order[::2], order[1::2], strict=True)
    ]
    return (
        torch.stack(octets, -1).view(torch.int32).squeeze(-1)
    )  # the lowest byte comes first, as in the files


def unpack_nibbles(
    words: Any,
    count: int,
    method: str = "reorder",
    signed: bool = False,
) -> Any:
    """The first ``count`` codes of the last axis that ``pack_nibbles`` packed: uint8, or int8 if
    signed.

    >>> unpack_nibbles(pack_nibbles(torch.arange(-5, 5)), 10, signed=True)
    tensor([-5, -4, -3, -2, -1,  0,  1,  2,  3,  4], dtype=torch.int8)
    """
    found = torch.empty((*words.shape, 8), dtype=torch.uint8, device=words.device)
    for place, source in enumerate(ORDERS[method]):
        found[..., source] = (words >> 4 * place & 15).to(torch.uint8)
    codes = found.flatten(-2)[..., :count]
    return (codes ^ 8).view(torch.int8) - 8 if signed else codes


def pack_words(codes: Any, bits: int) -> Any:
    """Codes along the last axis as one stream of bits in int32, the first code in the lowest bits
    of the first; the last one is filled up with 0.

    Args:
        codes: integers of shape (..., n), from 0 to 2^bits - 1.
        bits: 1 to 8.

    >>> pack_words(torch.tensor([[1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3]]), 3)
    tensor([[-786474799,          0]], dtype=torch.int32)
    """
    lanes = in_blocks(codes.to(torch.int32), 32)
    words = torch.zeros(
        (*lanes.shape[:-1], bits),
        dtype=torch.int32,
        device=codes.device,
    )
    for lane in range(32):
        word, place = divmod(lane * bits, 32)
        words[..., word] |= lanes[..., lane] << place
        if place + bits > 32:
            words[..., word + 1] |= lanes[..., lane] >> 32 - place
    return words.flatten(-2)[..., : -(-codes.shape[-1] * bits // 32)].contiguous()


def unpack_words(words: Any, bits: int, count: int) -> Any:
    """The ``count`` codes of the last axis that ``pack_words`` packed; uint8.

    Raises:
        ModelError: there are fewer words than they take, or more.

    >>> unpack_words(pack_words(torch.arange(7), 3), 3, 7)
    tensor([0, 1, 2, 3, 4, 5, 6], dtype=torch.uint8)
    """
    if words.shape[-1] != -(-count * bits // 32):
        raise ModelError(
            f"{words.shape[-1]} numbers of 32 bits do not hold {count} codes of {bits}"
            " bits",
        )
    groups = in_blocks(words.to(torch.int64) & 0xFFFFFFFF, bits)
    lanes = torch.empty(
        (*groups.shape[:-1], 32),
        dtype=torch.uint8,
        device=words.device,
    )
    for lane in range(32):
        word, place = divmod(lane * bits, 32)
        code = groups[..., word] >> place
        if place + bits > 32:
            code |= groups[..., word + 1] << 32 - place
        lanes[..., lane] = code & (1 << bits) - 1
    return lanes.flatten(-2)[..., :count]


def pack_bits(codes: Any, bits: int) -> Any:
    """Codes along the last axis as bytes, the first code in the lowest bits: 4 bits two to a byte,
    3 bits eight to three bytes, 6 bits four to three bytes, 2 bits four to a byte with the first in
    the highest bits.

    Raises:
        ModelError: the codes do not fill whole bytes.

    >>> pack_bits(torch.tensor([1, 2], dtype=torch.uint8), 4)
    tensor([33], dtype=torch.uint8)
    """
    each, size = _GROUPS[bits]
    if codes.shape[-1] % each:
        raise ModelError(
            f"{codes.shape[-1]} codes of {bits} bits do not fill whole bytes; a"
            f" multiple of {each} does",
        )
    parts = (codes & (1 << bits) - 1).to(torch.uint8).unflatten(-1, (-1, each))
    word = torch.zeros(
        parts.shape[:-1],
        dtype=torch.uint8 if size == 1 else torch.int32,
        device=codes.device,
    )
    for place, shift in enumerate(_shifts(bits)):
        word |= parts[..., place].to(word.dtype) << shift
    octets = [(word >> 8 * index & 255).to(torch.uint8) for index in range(size)]
    return torch.stack(octets, -1).flatten(-2)


def unpack_bits(octets: Any, bits: int, signed: bool = False) -> Any:
    """The codes that ``pack_bits`` packed: uint8, or int8 if signed.

    >>> unpack_bits(pack_bits(torch.arange(8), 3), 3)
    tensor([0, 1, 2, 3, 4, 5, 6, 7], dtype=torch.uint8)
    """
    size = _GROUPS[bits][1]
    parts = octets.to(torch.int32).unflatten(-1, (-1, size))
    word = sum(parts[..., index] << 8 * index for index in range(size))
    shifts = torch.tensor(_shifts(bits), dtype=torch.int32, device=octets.device)
    codes = (word[..., None] >> shifts & (1 << bits) - 1).flatten(-2).to(torch.uint8)
    half = 1 << bits - 1
    return (codes ^ half).view(torch.int8) - half if signed else codes


#: For each width, how many codes fill how many bytes.
_GROUPS = {2: (4, 1), 3: (8, 3), 4: (2, 1), 6: (4, 3)}


def codes_to_whole_bytes(bits: int) -> int:
    """Codes of which any multiple fills whole bytes.

    >>> codes_to_whole_bytes(3)
    8
    """
    return _GROUPS[bits][0]


def _shifts(bits: int) -> list[int]:
    """Where the codes lie in their bytes."""
    places = range(_GROUPS[bits][0])
    return [bits * place for place in (places[::-1] if bits == 2 else places)]


def in_blocks(x: Any, size: int) -> Any:
    """(..., n) as (..., blocks, size), the last block filled up with zeros.

    >>> in_blocks(torch.tensor([1, 2, 3]), 2)
    tensor([[1, 2],
            [3, 0]])
    """
    short = -x.shape[-1] % size
    return (torch.nn.functional.pad(x, (0, short)) if short else x).unflatten(
        -1,
        (-1, size),
    )
