"""Modules of a model by name, and names of their parts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from torch import nn

T = TypeVar("T")


def joined(owner: str, name: str) -> str:
    """Return the name of a part of a module; either may be empty, for the module itself.

    >>> joined("layers.0", "weight"), joined("", "weight"), joined("layers.0", "")
    ('layers.0.weight', 'weight', 'layers.0')
    """
    return ".".join(filter(None, (owner, name)))


def within(name: str, block: str) -> bool:
    """Return whether a module is a block or a part of the block, by their names.

    >>> within("layers.1.up", "layers.1"), within("layers.10", "layers.1")
    (True, False)
    """
    return name == block or name.startswith(f"{block}.")


def within_any(name: str, blocks: Iterable[str]) -> bool:
    """Return whether a module is one of some blocks, or a part of one."""
    return any(within(name, block) for block in blocks)


def outside_of(modules: Mapping[str, T], blocks: Iterable[str]) -> dict[str, T]:
    """Return the modules that neither are one of some blocks nor parts of one, by name."""
    blocks = tuple(blocks)
    return {
        name: module for name, module in modules.items() if not within_any(name, blocks)
    }


def block_around(name: str, blocks: Iterable[str]) -> str:
    """Return the block that a module is or belongs to; empty if there is none."""
    return next((block for block in blocks if within(name, block)), "")


def instances(model: nn.Module, kind: type[T] | tuple[type[T], ...]) -> dict[str, T]:
    """Return the modules of a class, or of one of several, by name."""
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, kind)
    }
