"""Blanks: tensors whose numbers nobody needs. What is computed of one is one, too, and takes no time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map


class BlankError(RuntimeError):
    """A tensor was to be changed by numbers that nobody has."""


class Blank(torch.Tensor):
    """A tensor with a shape and a type, and without numbers.

    Raises:
        BlankError: numbers of another tensor were to be changed by those of a blank.
        RuntimeError: its numbers are asked for; what is said of it is torch's.
    """

    @classmethod
    def of(cls, like: Any) -> Blank:
        """One of that shape and type."""
        blank: Blank = like.to("meta").as_subclass(cls)
        return blank

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """What a function makes of tensors of which one is blank."""
        kwargs = kwargs or {}
        changed = tree_leaves(kwargs.get("out", args[0] if args and _changes(func) else None))
        if any(isinstance(each, torch.Tensor) and not each.is_meta for each in changed):
            raise BlankError(f"{func.__name__} changes a tensor by a blank")
        with torch._C.DisableTorchFunctionSubclass():
            return tree_map(_wrapped, func(*tree_map(_without_numbers, args), **tree_map(_without_numbers, kwargs)))


def _changes(func: Callable[..., Any]) -> bool:
    """Whether a function changes its first argument, as torch names those."""
    name = func.__name__
    return name.startswith("__i") or name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))


def _without_numbers(value: Any) -> Any:
    """An argument as blanks take it: there are no numbers on any device."""
    if isinstance(value, torch.Tensor):
        return value.to("meta")
    return torch.device("meta") if isinstance(value, torch.device) else value


def _wrapped(value: Any) -> Any:
    return value.as_subclass(Blank) if isinstance(value, torch.Tensor) else value
