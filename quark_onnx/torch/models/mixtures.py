"""Mixtures of experts: stacks of experts and their routers, found by structure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import Any

from torch import nn
from torch.nn.modules.conv import _ConvNd

from quark_onnx.torch.models.names import joined
from quark_onnx.torch.models.quantized_layer import kind_of, outputs_first

#: Names of modules next to experts that are routers, with any number of layers.
_ROUTERS = ("gate", "router", "gating")


def routers_of(model: nn.Module) -> list[str]:
    """Return the names of modules with a weight that choose among experts.

    A router is next to a stack of experts. The router is, or contains as its only matrix, a weight
    with one output per expert; or "router" is part of its name. The gate of a shared expert is
    included: it has a single output.

    Args:
        model: model with stacked or unfused experts.

    Returns:
        Names in the order of the model.

    >>> class Mixture(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.experts = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
    ...         self.choice = nn.Sequential(nn.Linear(8, 2))
    ...         self.after = nn.Linear(8, 8)
    >>> routers_of(nn.Sequential(Mixture()))
    ['0.choice.0']
    """
    stacks = stacks_of(model)
    # Neighbours that contain a stack themselves are other mixtures.
    around_stacks = _ancestors_of(stacks)
    routers = set[str]()
    for stack, mixture in _mixtures_of(model, stacks).items():
        for child, module in model.get_submodule(mixture).named_children():
            name = joined(mixture, child)
            if name not in stacks and name not in around_stacks:
                routers.update(_routers_in(name, module, stacks[stack]))
    # Doge's experts are looked up by a module with "router" in its name.
    return [
        name
        for name, module in model.named_modules()
        if name in routers or ("router" in name and _has_matrix(module))
    ]


def unknown_stacks_of(model: nn.Module) -> dict[str, Any]:
    """Return the weights of expert stacks of unknown structure, by name.

    The weights are matrices, or stacks of matrices, outside of layers. Their module is next to a
    router.

    Args:
        model: model whose known stacks are unfused already.

    Returns:
        Parameters of two axes or more, by their names in the model.
    """
    stacks = stacks_of(model)
    around_routers = _ancestors_of(routers_of(model))
    unknown = {}
    for stack, mixture in _mixtures_of(model, stacks).items():
        # Without a router beside it, a stack may hold anything, such as a matrix per attention
        # head.
        if mixture not in around_routers:
            continue
        for owner, module in model.get_submodule(stack).named_modules(prefix=stack):
            for name, parameter in module.named_parameters(recurse=False):
                if parameter.ndim > 1 and kind_of(module) is None:
                    unknown[f"{owner}.{name}"] = parameter
    return unknown


def stacks_of(model: nn.Module) -> dict[str, int]:
    """Return the innermost module around the experts of every mixture.

    Returns:
        The number of experts by the name of the module.
    """
    counts: dict[str, int] = {}
    for name, module in model.named_modules():
        count = _expert_count(name.rpartition(".")[2], module)
        if count > 1:
            counts[name] = count
    # A module around a stack may state num_experts as well; the innermost one holds the experts.
    outer = _ancestors_of(counts)
    return {name: count for name, count in counts.items() if name not in outer}


def _mixtures_of(model: nn.Module, stacks: Collection[str]) -> dict[str, str]:
    """Return for every stack the smallest module around it with a matrix outside of stacks."""
    stack_names = set(stacks)
    # Matrices that belong to neither a stack nor a part of one: of routers and shared experts.
    outside = [
        name
        for name, module in model.named_modules()
        if _has_matrix(module) and stack_names.isdisjoint((name, *_parents_of(name)))
    ]
    around = _ancestors_of(outside)
    mixtures = dict[str, str]()
    for stack in stacks:
        # Parents come from the inside to the outside; the first with a matrix outside of stacks is
        # the mixture.
        parents = (parent for parent in _parents_of(stack) if parent in around)
        mixtures[stack] = next(parents, "")
    return mixtures


def _expert_count(last: str, module: nn.Module) -> int:
    """Return the number of experts in a module by the last part of its name; 0 for no experts."""
    if isinstance(module, nn.ModuleList | nn.ModuleDict):
        if "expert" in last and "shared" not in last:
            return len(module)
        return 0
    # The weight of a convolution has three axes, too.
    lengths = {len(parameter) for parameter in _parameters_of(module, ndim=3)}
    if len(lengths) == 1 and not isinstance(module, _ConvNd):
        return lengths.pop()
    # Unfused experts are children "0", "1" and so on of a module that states their number.
    stated = getattr(module, "num_experts", 0)
    is_numbered = any(child.isdigit() for child, _ in module.named_children())
    has_experts = last == "experts" or is_numbered
    return stated if has_experts and isinstance(stated, int) else 0


def _routers_in(name: str, module: nn.Module, count: int) -> Iterator[str]:
    """Yield the names of the routers that a module next to ``count`` experts is or contains."""
    owners = {
        owner_name: owner
        for owner_name, owner in module.named_modules(prefix=name)
        if _has_matrix(owner)
    }
    if name.rpartition(".")[2] in _ROUTERS:
        yield from owners
    elif len(owners) == 1:
        ((owner_name, owner),) = owners.items()
        matrix = _parameters_of(owner, ndim=2)[0]
        outputs, inputs = outputs_first(matrix, kind_of(owner)).shape
        # The gate of a shared expert is a Linear with one output (Qwen 2 MoE), next to the stack.
        of_shared_expert = outputs == 1 and owner is module
        # a projection may match the count of other stacked weights by chance, those of a
        # convolution, say: that is no router
        if of_shared_expert or count == outputs < inputs:
            yield owner_name


def _parameters_of(module: nn.Module, ndim: int) -> list[nn.Parameter]:
    """Return a module's own parameters with a number of axes."""
    parameters = module.parameters(recurse=False)
    return [parameter for parameter in parameters if parameter.ndim == ndim]


def _has_matrix(module: nn.Module) -> bool:
    return bool(_parameters_of(module, ndim=2))


def _parents_of(name: str) -> Iterator[str]:
    """Yield the names of the modules around a module, the innermost first.

    The last name is "", the model itself.

    >>> list(_parents_of("layers.0.mlp"))
    ['layers.0', 'layers', '']
    """
    while name:
        name = name.rpartition(".")[0]
        yield name


def _ancestors_of(names: Iterable[str]) -> set[str]:
    """Return the names of all modules around the named modules."""
    return {parent for name in names for parent in _parents_of(name)}
