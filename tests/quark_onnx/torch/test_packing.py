"""Packed codes against integers that Python shifts."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quark_onnx.common.errors import ModelError
from quark_onnx.torch.formats.bit_packing import (
    ORDERS,
    pack_bits,
    pack_nibbles,
    unpack_bits,
    unpack_nibbles,
)


@pytest.mark.parametrize("method", ORDERS)
@given(codes=st.lists(st.integers(0, 15), min_size=1, max_size=40))
def test_nibbles(method: str, codes: list[int]) -> None:
    words = pack_nibbles(torch.tensor(codes), method)
    padded = codes + [0] * (-len(codes) % 8)
    for index, word in enumerate(words.tolist()):
        eight = padded[8 * index : 8 * index + 8]
        expected = sum(
            eight[source] << 4 * place for place, source in enumerate(ORDERS[method])
        )
        assert word % (1 << 32) == expected
    assert unpack_nibbles(words, len(codes), method).tolist() == codes


@given(codes=st.lists(st.integers(-8, 7), min_size=1, max_size=20))
def test_signed_nibbles(codes: list[int]) -> None:
    assert (
        unpack_nibbles(
            pack_nibbles(torch.tensor(codes)), len(codes), signed=True
        ).tolist()
        == codes
    )


@pytest.mark.parametrize("bits, each, size", [(3, 8, 3), (4, 2, 1), (6, 4, 3)])
@given(data=st.data())
def test_bits_lowest_first(
    bits: int, each: int, size: int, data: st.DataObject
) -> None:
    count = each * data.draw(st.integers(1, 5))
    codes = data.draw(
        st.lists(st.integers(0, (1 << bits) - 1), min_size=count, max_size=count)
    )
    octets = pack_bits(torch.tensor(codes, dtype=torch.uint8), bits)
    whole = sum(code << bits * place for place, code in enumerate(codes))
    assert bytes(octets.tolist()) == whole.to_bytes(count * bits // 8, "little")
    assert unpack_bits(octets, bits).tolist() == codes


@given(codes=st.lists(st.integers(0, 3), min_size=4, max_size=4))
def test_two_bits_highest_first(codes: list[int]) -> None:
    octets = pack_bits(torch.tensor(codes, dtype=torch.uint8), 2)
    assert octets.tolist() == [codes[0] << 6 | codes[1] << 4 | codes[2] << 2 | codes[3]]
    assert unpack_bits(octets, 2).tolist() == codes


def test_codes_that_fill_no_byte_are_refused() -> None:
    with pytest.raises(ModelError, match="5 codes of 3 bits"):
        pack_bits(torch.zeros(5, dtype=torch.uint8), 3)
