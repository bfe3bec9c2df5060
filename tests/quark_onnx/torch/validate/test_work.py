"""The work of a check grows as the number of layers does, also where each layer is named."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest

from quark_onnx.torch.validate.clients import findings_of
from tests.quark_onnx.torch.validate.scaled import (
    checkpoint_of,
    drafts,
    excluding_half,
    grown,
    overriding_half,
)

LAYOUTS = {
    "quark": drafts.quark,
    "quark_kv": drafts.quark_kv,
    "awq": drafts.awq,
    "fp8": drafts.fp8,
    "compressed": drafts.compressed,
    "nvfp4": drafts.nvfp4,
}


class Counted(str):
    """A name that counts how often it is compared."""

    __slots__ = ()
    count = 0

    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        Counted.count += 1
        return str.__eq__(self, other)

    def __contains__(self, part: object) -> bool:
        Counted.count += 1
        return str.__contains__(self, part)  # type: ignore[arg-type]


def counted(value: Any) -> Any:
    """A configuration whose names count."""
    if isinstance(value, dict):
        return {counted(key): counted(item) for key, item in value.items()}
    if isinstance(value, list):
        return [counted(item) for item in value]
    return Counted(value) if isinstance(value, str) and "layers." in value else value


def work(draft: drafts.Draft, client: str) -> int:
    """Calls of functions, of Python and of C, and comparisons of names."""
    entries = draft.config["quantization_config"]
    draft.config["quantization_config"] = counted(entries)
    checkpoint = checkpoint_of(draft)
    calls = 0

    def call(frame: object, event: str, argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    Counted.count = 0
    before = sys.getprofile()
    sys.setprofile(call)
    try:
        findings_of(checkpoint, client)
    finally:
        sys.setprofile(before)
    return calls + Counted.count


@pytest.mark.parametrize("client", ["vllm", "transformers"])
@pytest.mark.parametrize("change", [excluding_half, overriding_half])
@pytest.mark.parametrize("experts", [0, 8])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_work_per_layer(
    layout: str,
    experts: int,
    change: Callable[[drafts.Draft], drafts.Draft],
    client: str,
) -> None:
    """Four times the blocks are about four times the work, and not sixteen times."""
    few, many = (
        work(change(grown(LAYOUTS[layout](), blocks, experts)), client)
        for blocks in (15, 60)
    )
    assert many < 8 * few
