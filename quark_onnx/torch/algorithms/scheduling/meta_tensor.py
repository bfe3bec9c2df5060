"""Skip computations whose results are unused, by propagating meta tensors through the block."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._pytree import tree_leaves, tree_map


class MetaTensorError(RuntimeError):
    """An operation would write unknown values into a tensor."""


class MetaTensor(torch.Tensor):
    """A tensor with a shape, a type and a device, and without values.

    ``device`` is the device of the tensor that it replaces: tensors that a model creates there have
    values.

    Raises:
        MetaTensorError: an operation would write unknown values into another tensor.
        RuntimeError: values are read; the message is torch's.
    """

    _device: torch.device

    @classmethod
    def of(cls, like: torch.Tensor, device: torch.device) -> MetaTensor:
        """Return a meta tensor with the shape and type of a tensor."""
        tensor: MetaTensor = like.to("meta").as_subclass(cls)
        tensor._device = device
        return tensor

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Return the meta result of a function with at least one meta argument."""
        kwargs = kwargs or {}
        leaves = tree_leaves((args, kwargs))
        device = next(leaf._device for leaf in leaves if isinstance(leaf, MetaTensor))
        # Attributes arrive here as the getters of torch.Tensor.
        if func == torch.Tensor.device.__get__:
            return device
        if func == torch.Tensor.is_cuda.__get__:  # type: ignore[attr-defined]  # bool in stubs
            return device.type == "cuda"
        # A write into a real tensor would lose data without an error on the meta device.
        if any(
            isinstance(value, torch.Tensor) and not isinstance(value, MetaTensor)
            for value in _changed(func, args, kwargs)
        ):
            raise MetaTensorError(f"{func.__name__} writes a meta tensor into a tensor")
        if func == scaled_dot_product_attention:
            return cls.of(_attention(*args, **kwargs), device)
        # Without this context, the call would come back here.
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*tree_map(_to_meta, args), **tree_map(_to_meta, kwargs))
            return tree_map(
                lambda value: (
                    cls.of(value, device) if isinstance(value, torch.Tensor) else value
                ),
                result,
            )


def _attention(
    query: torch.Tensor, key: torch.Tensor, value: Any, *others: Any, **named: Any
) -> Any:
    """Return the output of attention on the meta device.

    torch decomposes attention on that device, which takes milliseconds.
    """
    # (..., heads, tokens, features): axes before the heads broadcast.
    shapes = [query.shape, key.shape, value.shape]
    batch = torch.broadcast_shapes(*(shape[:-3] for shape in shapes))
    # queries may share keys and values
    heads = max(shape[-3:-2] for shape in shapes)
    size = (*batch, *heads, query.shape[-2], value.shape[-1])
    return torch.empty(size, dtype=query.dtype, device="meta")


def _changed(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> list[Any]:
    """Return the tensors that a function changes: ``out``, and the first argument of ``f_``."""
    name = func.__name__.split(".")[0]
    # In-place operators (__iadd__), assignments (__setitem__), and methods that end in "_", but not
    # such as __add__.
    changes = (
        name.startswith("__i")
        or name == "__setitem__"
        or (name.endswith("_") and not name.endswith("__"))
    )
    changed = [kwargs.get("out")]
    if changes:
        changed.append(args[0] if args else next(iter(kwargs.values()), None))
    leaves: list[Any] = tree_leaves(changed)
    return leaves


def _to_meta(value: Any) -> Any:
    """Move an argument to the meta device."""
    if isinstance(value, torch.Tensor):
        return value.to("meta")
    # A model that creates a tensor on the device of a meta argument must not mix devices.
    if isinstance(value, torch.device):
        return torch.device("meta")
    return value
