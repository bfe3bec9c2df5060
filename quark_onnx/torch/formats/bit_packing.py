"""Packing of codes with few bits into the integers of checkpoints, and unpacking."""

from __future__ import annotations

import torch

from quark_onnx.common.errors import ModelError

#: The positions of eight codes in the nibbles of an int32, the lowest first: the order of AutoAWQ's
#: kernels.
ORDERS = {
    "reorder": (0, 2, 4, 6, 1, 3, 5, 7),
    "order": tuple(range(8)),
}


def pack_nibbles(codes: torch.Tensor, method: str = "reorder") -> torch.Tensor:
    """Pack 4-bit codes along the last axis, eight to an int32.

    The last word is padded with 0.

    Args:
        codes: integers of shape (..., n), -8..7 in two's complement or 0..15.
        method: "reorder" or "order".

    Returns:
        int32 of shape (..., ceil(n / 8)).

    >>> pack_nibbles(torch.tensor([[1, 2, 3, 4, 5, 6, 7, 8]]), "order")
    tensor([[-2023406815]], dtype=torch.int32)
    """
    nibbles = in_blocks((codes & 15).to(torch.uint8), 8)
    order = ORDERS[method]
    octets = [
        nibbles[..., low] | nibbles[..., high] << 4
        for low, high in zip(order[::2], order[1::2], strict=True)
    ]
    # The lowest byte comes first, as in the files.
    return torch.stack(octets, -1).view(torch.int32).squeeze(-1)


def unpack_nibbles(
    words: torch.Tensor,
    count: int,
    method: str = "reorder",
    signed: bool = False,
) -> torch.Tensor:
    """Unpack the first ``count`` codes of ``pack_nibbles`` along the last axis.

    Args:
        words: int32 of shape (..., words).
        count: number of codes.
        method: "reorder" or "order".
        signed: whether the codes are in two's complement.

    Returns:
        uint8, or int8 if signed, of shape (..., count).

    >>> unpack_nibbles(pack_nibbles(torch.arange(-5, 5)), 10, signed=True)
    tensor([-5, -4, -3, -2, -1,  0,  1,  2,  3,  4], dtype=torch.int8)
    """
    nibbles = torch.empty((*words.shape, 8), dtype=torch.uint8, device=words.device)
    for position, source in enumerate(ORDERS[method]):
        nibbles[..., source] = (words >> 4 * position & 15).to(torch.uint8)
    codes = nibbles.flatten(-2)[..., :count]
    if not signed:
        return codes
    # Sign extension without a branch: flipping the sign bit and subtracting it.
    return (codes ^ 8).view(torch.int8) - 8


def pack_words(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack codes along the last axis into a bit stream of int32 words.

    The first code is in the lowest bits of the first word. The last word is padded with 0.

    Args:
        codes: integers of shape (..., n), from 0 to 2^bits - 1.
        bits: 1 to 8.

    Returns:
        int32 of shape (..., ceil(n * bits / 32)).

    >>> pack_words(torch.tensor([[1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3]]), 3)
    tensor([[-786474799,          0]], dtype=torch.int32)
    """
    # 32 codes fill exactly ``bits`` words, so that every group of lanes has the same layout.
    lanes = in_blocks(codes.to(torch.int32), 32)
    words = torch.zeros(
        (*lanes.shape[:-1], bits), dtype=torch.int32, device=codes.device
    )
    for lane in range(32):
        word, offset = divmod(lane * bits, 32)
        # A shift drops the bits beyond an int32; they begin the next word.
        words[..., word] |= lanes[..., lane] << offset
        if offset + bits > 32:
            words[..., word + 1] |= lanes[..., lane] >> 32 - offset
    return words.flatten(-2)[..., : -(-codes.shape[-1] * bits // 32)].contiguous()


def unpack_words(words: torch.Tensor, bits: int, count: int) -> torch.Tensor:
    """Unpack ``count`` codes of ``pack_words`` along the last axis, as uint8.

    Args:
        words: int32 of shape (..., words).
        bits: 1 to 8.
        count: number of codes.

    Raises:
        ModelError: the number of words does not match ``count``.

    >>> unpack_words(pack_words(torch.arange(7), 3), 3, 7)
    tensor([0, 1, 2, 3, 4, 5, 6], dtype=torch.uint8)
    """
    if words.shape[-1] != -(-count * bits // 32):
        raise ModelError(
            f"{words.shape[-1]} numbers of 32 bits do not hold {count} codes of {bits}"
            " bits",
        )
    # As int64: a right shift of a negative int32 would fill with ones.
    groups = in_blocks(words.to(torch.int64) & 0xFFFFFFFF, bits)
    lanes = torch.empty(
        (*groups.shape[:-1], 32), dtype=torch.uint8, device=words.device
    )
    for lane in range(32):
        word, offset = divmod(lane * bits, 32)
        code = groups[..., word] >> offset
        if offset + bits > 32:
            code |= groups[..., word + 1] << 32 - offset
        lanes[..., lane] = code & (1 << bits) - 1
    return lanes.flatten(-2)[..., :count]


def pack_bits(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack codes along the last axis into bytes, the first code in the lowest bits.

    Two 4-bit codes fill a byte, eight 3-bit codes three bytes, four 6-bit codes three bytes, and
    four 2-bit codes a byte. The first 2-bit code is in the highest bits.

    Args:
        codes: integers of shape (..., n).
        bits: 2, 3, 4 or 6.

    Returns:
        uint8 of shape (..., n * bits / 8).

    Raises:
        ModelError: the codes do not fill whole bytes.

    >>> pack_bits(torch.tensor([1, 2], dtype=torch.uint8), 4)
    tensor([33], dtype=torch.uint8)
    """
    count, size = _GROUPS[bits]
    if codes.shape[-1] % count:
        raise ModelError(
            f"{codes.shape[-1]} codes of {bits} bits do not fill whole bytes; a"
            f" multiple of {count} does",
        )
    groups = (codes & (1 << bits) - 1).to(torch.uint8).unflatten(-1, (-1, count))
    word = torch.zeros(
        groups.shape[:-1],
        dtype=torch.uint8 if size == 1 else torch.int32,
        device=codes.device,
    )
    for index, shift in enumerate(_shifts(bits)):
        word |= groups[..., index].to(word.dtype) << shift
    octets = [(word >> 8 * index & 255).to(torch.uint8) for index in range(size)]
    return torch.stack(octets, -1).flatten(-2)


def unpack_bits(octets: torch.Tensor, bits: int, signed: bool = False) -> torch.Tensor:
    """Unpack the codes of ``pack_bits``: uint8, or int8 if signed.

    Args:
        octets: uint8 of shape (..., bytes).
        bits: 2, 3, 4 or 6.
        signed: whether the codes are in two's complement.

    >>> unpack_bits(pack_bits(torch.arange(8), 3), 3)
    tensor([0, 1, 2, 3, 4, 5, 6, 7], dtype=torch.uint8)
    """
    size = _GROUPS[bits][1]
    groups = octets.to(torch.int32).unflatten(-1, (-1, size))
    word: torch.Tensor = sum(groups[..., index] << 8 * index for index in range(size))
    shifts = torch.tensor(_shifts(bits), dtype=torch.int32, device=octets.device)
    codes = (word[..., None] >> shifts & (1 << bits) - 1).flatten(-2).to(torch.uint8)
    if not signed:
        return codes
    half = 1 << bits - 1
    return (codes ^ half).view(torch.int8) - half


#: For each width, how many codes fill how many bytes.
_GROUPS = {
    2: (4, 1),
    3: (8, 3),
    4: (2, 1),
    6: (4, 3),
}


def codes_to_whole_bytes(bits: int) -> int:
    """Return the smallest number of codes that fills whole bytes.

    >>> codes_to_whole_bytes(3)
    8
    """
    return _GROUPS[bits][0]


def _shifts(bits: int) -> list[int]:
    """Return the bit positions of codes in their byte group."""
    shifts = [bits * index for index in range(_GROUPS[bits][0])]
    # 2-bit codes fill a byte from its highest bits down.
    return shifts[::-1] if bits == 2 else shifts


def in_blocks(x: torch.Tensor, size: int) -> torch.Tensor:
    """Reshape (..., n) to (..., blocks, size), with the last block padded by zeros.

    Size 0 stands for no blocks, and leaves the tensor unchanged.

    >>> in_blocks(torch.tensor([1, 2, 3]), 2)
    tensor([[1, 2],
            [3, 0]])
    """
    if not size:
        return x
    short = -x.shape[-1] % size
    if short:
        x = torch.nn.functional.pad(x, (0, short))
    blocks: torch.Tensor = x.unflatten(-1, (-1, size))
    return blocks
