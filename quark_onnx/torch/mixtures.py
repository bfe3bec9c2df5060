"""Mixtures of experts, found by their structure: stacks of experts, and the routers that choose among them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn
from torch.nn.modules.conv import _ConvNd

from quark_onnx.torch.layers import kind_of, outputs_first

#: Names of modules beside experts that are routers as a whole, however many layers they have.
_ROUTERS = ("gate", "router", "gating")


def routers_of(model: Any) -> list[str]:
    """Return the names of the modules with a weight that choose among experts, layers and others.

    A router stands beside a stack of experts. It is, or contains as its only matrix, a weight with as many outputs as
    there are experts; or it is called a router. The gate of a shared expert counts, too: it has a single output.

    >>> class Mixture(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.experts = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
    ...         self.choice = nn.Sequential(nn.Linear(8, 2))
    ...         self.after = nn.Linear(8, 8)
    >>> routers_of(nn.Sequential(Mixture()))
    ['0.choice.0']
    """
    stacks = _stacks_of(model)
    beside: dict[str, int] = {}
    for name, count in stacks.items():
        beside[_mixture_around(model, name, stacks)] = count
    found = set[str]()
    for mixture, count in beside.items():
        for child, module in model.get_submodule(mixture).named_children():
            name = f"{mixture}.{child}" if mixture else child
            if not any(_is_inside(stack, name) or _is_inside(name, stack) for stack in stacks):
                found.update(_routers_in(name, module, count))
    return [name for name, module in model.named_modules() if name in found or _is_called_router(name, module)]


def unknown_stacks_of(model: Any) -> dict[str, Any]:
    """Return the weights of stacks of experts that have not been taken apart, by their names.

    Those are matrices, and stacks of them, that belong to no layer and whose module stands beside a router.
    """
    stacks = _stacks_of(model)
    routers = routers_of(model)
    found = {}
    for stack in stacks:
        mixture = _mixture_around(model, stack, stacks)
        if not any(_is_inside(router, mixture) for router in routers):
            continue
        for owner, module in model.get_submodule(stack).named_modules(prefix=stack):
            for name, parameter in module.named_parameters(recurse=False):
                if parameter.ndim > 1 and kind_of(module) is None:
                    found[f"{owner}.{name}"] = parameter
    return found


def _stacks_of(model: Any) -> dict[str, int]:
    """Return the innermost modules that hold all experts of a mixture, each with the number of experts."""
    counts: dict[str, int] = {}
    for name, module in model.named_modules():
        count = _expert_count(name.rpartition(".")[2], module)
        if count > 1:
            counts[name] = count
    return {
        name: count
        for name, count in counts.items()
        if not any(other != name and _is_inside(other, name) for other in counts)
    }


def _expert_count(last: str, module: Any) -> int:
    """Return how many experts a module holds, by the last part of its name; 0 where it holds none."""
    if isinstance(module, nn.ModuleList | nn.ModuleDict):
        return len(module) if "expert" in last and "shared" not in last else 0
    if not isinstance(module, _ConvNd):
        lengths = {len(each) for each in module.parameters(recurse=False) if each.ndim == 3}
        if len(lengths) == 1:
            return lengths.pop()
    stated = getattr(module, "num_experts", 0)
    holds = last == "experts" or any(child.isdigit() for child, _ in module.named_children())
    return stated if holds and isinstance(stated, int) else 0


def _mixture_around(model: Any, stack: str, stacks: Mapping[str, int]) -> str:
    """Return the name of the smallest module around a stack that has a matrix outside of all stacks."""
    name = stack
    while name:
        name = name.rpartition(".")[0]
        start = f"{name}." if name else ""
        for owner, _ in _owners_of_matrices(model.get_submodule(name)):
            if not any(_is_inside(start + owner, other) for other in stacks):
                return name
    return name


def _routers_in(name: str, module: Any, count: int) -> Iterator[str]:
    """Yield the names of the routers in a module that stands beside experts."""
    owners = dict(_owners_of_matrices(module))
    names = [f"{name}.{owner}" if owner else name for owner in owners]
    if name.rpartition(".")[2] in _ROUTERS:
        yield from names
    elif len(owners) == 1:
        owner = next(iter(owners.values()))
        outputs = _outputs_of(owner)
        if outputs == count or (outputs == 1 and owner is module):
            yield names[0]


def _owners_of_matrices(module: Any) -> Iterator[tuple[str, Any]]:
    """Yield a module and its descendants that have a matrix of their own."""
    for name, each in module.named_modules():
        if any(parameter.ndim == 2 for parameter in each.parameters(recurse=False)):
            yield name, each


def _outputs_of(module: Any) -> int:
    matrix = next(each for each in module.parameters(recurse=False) if each.ndim == 2)
    return len(outputs_first(matrix, kind_of(module)))


def _is_called_router(name: str, module: Any) -> bool:
    """Return whether a module with a matrix is called a router, as that of experts that are looked up is (Doge)."""
    named = any("router" in part for part in name.split("."))
    return named and any(parameter.ndim == 2 for parameter in module.parameters(recurse=False))


def _is_inside(name: str, other: str) -> bool:
    """Return whether one module is another, or a part of it, by their names; "" is the whole model."""
    return not other or name == other or name.startswith(f"{other}.")
