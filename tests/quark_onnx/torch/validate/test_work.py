"""The work of a check grows as the number of layers does, also where each layer is named."""

from __future__ import annotations

import re
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
    layers_of,
    overriding_half,
)

LAYOUTS = {
    "quark": drafts.quark,
    "quark_kv": drafts.quark_kv,
    "awq": drafts.awq,
    "gptq": drafts.gptq,
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


@pytest.mark.parametrize("change", [excluding_half, overriding_half])
@pytest.mark.parametrize("experts", [0, 8])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_work_per_layer(
    layout: str,
    experts: int,
    change: Callable[[drafts.Draft], drafts.Draft],
) -> None:
    """Four times the blocks are about four times the work, and not sixteen times."""
    for client in ("vllm", "transformers"):
        few, many = (
            work(change(grown(LAYOUTS[layout](), blocks, experts)), client)
            for blocks in (15, 60)
        )
        assert many < 8 * few, client


def expression_calls(draft: drafts.Draft, client: str) -> int:
    """Comparisons of a name with a regular expression."""
    checkpoint = checkpoint_of(draft)
    calls = 0

    def call(frame: object, event: str, argument: object) -> None:
        nonlocal calls
        is_expression = isinstance(getattr(argument, "__self__", None), re.Pattern)
        calls += event == "c_call" and is_expression

    before = sys.getprofile()
    sys.setprofile(call)
    try:
        findings_of(checkpoint, client)
    finally:
        sys.setprofile(before)
    return calls


#: Regular expressions for a single layer.
WRITTEN: dict[str, Callable[[str], str]] = {
    "plain": str,
    "escaped": re.escape,
    "whole": lambda name: f"^{re.escape(name)}$",
}


@pytest.mark.parametrize("written", WRITTEN)
@pytest.mark.parametrize("layout", ["gptq", "compressed", "quark"])
def test_expressions_of_single_layers(layout: str, written: str) -> None:
    """A rule for each layer: not each of them is compared with each layer."""

    def calls(blocks: int) -> int:
        draft = grown(LAYOUTS[layout](), blocks)
        rules = [WRITTEN[written](name) for name in layers_of(draft)]
        entries = draft.quantization
        if layout == "gptq":
            entries["dynamic"] = {f"+:{rule}": {"bits": 4} for rule in rules}
        else:
            key = "exclude" if layout == "quark" else "ignore"
            entries[key] = [f"re:{rule}" for rule in rules]
        return expression_calls(draft, "vllm")

    few, many = calls(15), calls(60)
    assert many <= 4.5 * few
