"""Records of what the modules of a model read and compute in a run."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

#: Changes of tensors, by the name of the module that reads or computes them.
Changes = Mapping[str, Callable[[torch.Tensor], torch.Tensor]]


@dataclass(frozen=True)
class Record:
    """Inputs and outputs of modules, call by call, in the order of their first calls."""

    inputs: dict[str, list[torch.Tensor]] = field(default_factory=dict)
    outputs: dict[str, list[torch.Tensor]] = field(default_factory=dict)


@contextlib.contextmanager
def recording(
    modules: Mapping[str, nn.Module],
    inputs: Changes,
    outputs: Changes,
) -> Iterator[Record]:
    """Record the modules that run inside the context.

    The input of a module is its first tensor; masks and positions follow.

    Args:
        modules: the modules, by name.
        inputs: changes of inputs of floats, which are recorded before.
        outputs: changes of outputs, which are recorded before. Outputs of several parts are
            neither changed nor recorded.
    """
    record = Record()
    with contextlib.ExitStack() as hooks:
        for name, module in modules.items():
            # Inputs are recorded before the module runs, as it may change them in place.
            pre_hook = _input_hook(record.inputs, name, inputs.get(name, _same))
            handle = module.register_forward_pre_hook(pre_hook, with_kwargs=True)
            hooks.enter_context(handle)
            hook = _output_hook(record.outputs, name, outputs.get(name, _same))
            hooks.enter_context(module.register_forward_hook(hook))
        yield record


def _same(x: torch.Tensor) -> torch.Tensor:
    return x


def _input_hook(
    record: dict[str, list[torch.Tensor]],
    name: str,
    change: Callable[[torch.Tensor], torch.Tensor],
) -> Callable[..., Any]:
    def hook(module: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        values = dict(enumerate(args)) | named
        tensors = (key for key in values if isinstance(values[key], torch.Tensor))
        key = next(tensors, None)
        if (
            key is None
            or not values[key].is_floating_point()
            or not values[key].numel()
        ):
            return None
        record.setdefault(name, []).append(values[key])
        values[key] = change(values[key])
        count = len(args)
        return tuple(values.pop(index) for index in range(count)), values

    return hook


def _output_hook(
    record: dict[str, list[torch.Tensor]],
    name: str,
    change: Callable[[torch.Tensor], torch.Tensor],
) -> Callable[..., Any]:
    def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        if not isinstance(output, torch.Tensor):
            return None
        record.setdefault(name, []).append(output)
        return change(output)

    return hook
