"""Experts whose weights are stacked in one tensor become a list of layers, which are quantized like
any other.

transformers keeps the weights of all experts of a block in two tensors of three axes. Checkpoints,
and what reads them, have a layer for each expert: ``experts.0.gate_proj`` and so on.
"""

from __future__ import annotations

import copy
from inspect import signature
from typing import Any

import torch
from torch import nn

from quark_onnx.torch.models.structure import set_module


class Experts(nn.Module):
    """The layers of each expert, as children "0", "1" and so on.

    Computes what the stacked module computes.

    The weights are views of the stacked ones where their rows lie one after the other, and copies
    elsewhere: products of strided ones are summed in another order, so that scales of activations
    would differ from those of a checkpoint's single experts.

    Args:
        stacked: a module with ``gate_up_proj`` (or ``up_proj``) and ``down_proj`` of three axes,
            and an activation.
    """

    def __init__(self, stacked: Any) -> None:
        super().__init__()
        self.num_experts = stacked.down_proj.shape[0]
        self._gated = hasattr(stacked, "gate_up_proj")
        self._interleaved = not getattr(stacked, "is_concatenated", True)
        #: Whether the stack has inputs before outputs.
        self.turned = _is_turned(stacked)
        self._activation = _activation_of(stacked, self._gated)
        up = _matrices(
            stacked,
            "gate_up_proj" if self._gated else "up_proj",
            self.turned,
        )
        down = _matrices(stacked, "down_proj", self.turned)
        for index in range(self.num_experts):
            expert = nn.Module()
            weight, bias = up[index]
            if self._gated:
                for name, part in zip(
                    ("gate_proj", "up_proj"),
                    self.halves(len(weight)),
                    strict=True,
                ):
                    expert.add_module(
                        name,
                        _linear(weight[part], None if bias is None else bias[part]),
                    )
            else:
                expert.add_module("up_proj", _linear(weight, bias))
            expert.add_module("down_proj", _linear(*down[index]))
            self.add_module(str(index), expert)

    def halves(self, count: int) -> tuple[slice, slice]:
        """Where the rows of the gate and of the other factor lie."""
        if self._interleaved:
            return slice(0, None, 2), slice(1, None, 2)
        return slice(0, count // 2), slice(count // 2, None)

    def forward(
        self,
        hidden_states: Any,
        top_k_index: Any = None,
        top_k_weights: Any = None,
    ) -> Any:
        """The sum of what the chosen experts compute, weighted.

        Without a choice, what each computes of its own part.

        Args:
            hidden_states: (tokens, features); without a choice (experts x tokens, features), as
            Llama 4 has them. top_k_index, top_k_weights: (tokens, experts of each), which experts
            and how much of each.
        """
        if top_k_index is None:
            experts = (
                self.get_submodule(str(index)) for index in range(self.num_experts)
            )
            parts = zip(experts, hidden_states.chunk(self.num_experts), strict=True)
            return torch.cat(
                [expert.down_proj(self._gate(expert, x)) for expert, x in parts],
            )
        total = torch.zeros_like(hidden_states)
        for index in range(self.num_experts):
            tokens, places = torch.where(top_k_index == index)
            if not len(tokens):
                continue
            expert = self.get_submodule(str(index))
            x = hidden_states[tokens]
            found = (
                expert.down_proj(self._gate(expert, x))
                * top_k_weights[tokens, places, None]
            )
            total.index_add_(0, tokens, found.to(total.dtype))
        return total

    def _gate(self, expert: Any, x: Any) -> Any:
        if not self._gated:
            return self._activation(expert.up_proj(x))
        parts = (expert.gate_proj(x), expert.up_proj(x))
        both = (
            torch.stack(parts, -1).flatten(-2)
            if self._interleaved
            else torch.cat(parts, -1)
        )
        return self._activation(both)


class ParallelExperts(nn.Module):
    """One linear layer of each expert, as children "0", "1" and so on, for tokens that are sorted
    by expert (JetMoE).

    Args:
        stacked: a module with a ``weight`` of shape (experts, outputs, inputs).
    """

    def __init__(self, stacked: Any) -> None:
        super().__init__()
        self.num_experts = len(stacked.weight)
        for index, weight in enumerate(stacked.weight.detach()):
            self.add_module(str(index), _linear(weight, None))

    def forward(self, inputs: Any, expert_size: Any) -> Any:
        """Return what each expert computes of its tokens.

        Args:
            inputs: (tokens, inputs), those of the first expert first.
            expert_size: how many tokens each expert has, a list.
        """
        parts = inputs.split(expert_size)
        return torch.cat(
            [self.get_submodule(str(index))(part) for index, part in enumerate(parts)],
        )


#: The modules that stacks of experts become.
UNFUSED = (Experts, ParallelExperts)


def unfuse_experts(model: Any) -> int:
    """Take the stacked experts of a model apart, in place, without a copy of weights where they lie
    side by side.

    Returns:
        How many modules there were.
    """
    made = dict[str, Any]()
    for name, module in model.named_modules():
        if _is_stacked(module):
            made[name] = Experts(module)
        elif _is_parallel(module):
            made[name] = ParallelExperts(module)
    for name, module in made.items():
        set_module(model, name, module)
    return len(made)


#: Parameters of stacks that ``Experts`` takes apart.
_STACKED = {
    "gate_up_proj",
    "up_proj",
    "down_proj",
    "gate_up_proj_bias",
    "up_proj_bias",
    "down_proj_bias",
}


def stack_names(model: Any) -> list[str]:
    """Return the names that the parameters of a model's stacks of experts had before these were
    taken apart.
    """
    stacks = [
        name for name, module in model.named_modules() if isinstance(module, Experts)
    ]
    return [f"{name}.{own}" for name in stacks for own in sorted(_STACKED)]


def _is_stacked(module: Any) -> bool:
    weights = dict(module.named_parameters(recurse=False))
    if not weights.keys() <= _STACKED:
        return False
    down, up = (
        weights.get("down_proj"),
        weights.get("gate_up_proj", weights.get("up_proj")),
    )
    if down is None or up is None or not down.ndim == up.ndim == 3:
        return False
    return len(signature(module.forward).parameters) in (
        1,
        3,
    )  # as ``Experts`` is called


def _is_parallel(module: Any) -> bool:
    """Return whether a module with a single stack of weights computes what ``ParallelExperts``
    does.

    The forward of its class is run on small random weights, so that the module may be without
    memory (device "meta").
    """
    names = [name for name, _ in (*module.named_parameters(), *module.named_buffers())]
    if (
        names != ["weight"]
        or module.weight.ndim != 3
        or len(signature(module.forward).parameters) != 2
    ):
        return False
    generator = torch.Generator("cpu").manual_seed(0)
    count = len(module.weight)
    weight = torch.randn(
        count,
        5,
        3,
        generator=generator,
        dtype=torch.float32,
        device="cpu",
    )
    small = copy.copy(module)
    small._parameters = {"weight": nn.Parameter(weight, requires_grad=False)}
    sizes = [index % 3 for index in range(count)]
    x = torch.randn(
        sum(sizes),
        3,
        generator=generator,
        dtype=torch.float32,
        device="cpu",
    )
    try:
        with torch.no_grad():
            found = type(module).forward(small, x, sizes)
    except (
        Exception
    ):  # a forward may raise anything when it is called otherwise than it expects
        return False
    expected = ParallelExperts(small)(x, sizes)
    return (
        isinstance(found, torch.Tensor)
        and found.shape == expected.shape
        and torch.allclose(found, expected)
    )


def _is_turned(stacked: Any) -> bool:
    """Whether weights have inputs before outputs: most modules say so, the shapes of Llama 4 do."""
    if hasattr(stacked, "is_transposed") or not hasattr(stacked, "gate_up_proj"):
        return bool(getattr(stacked, "is_transposed", False))
    (_, rows, columns), (_, inner, outer) = (
        stacked.gate_up_proj.shape,
        stacked.down_proj.shape,
    )
    return bool(rows == outer and columns == 2 * inner)


def _activation_of(stacked: Any, gated: bool) -> Any:
    """What comes between the two products, from the product with all rows of the first weight."""
    own = getattr(type(stacked), "_apply_gate", None)
    if gated and own is not None:
        shell = object.__new__(type(stacked))  # its settings without its weights
        nn.Module.__init__(shell)
        settings = {
            key: value
            for key, value in vars(stacked).items()
            if not key.startswith("_")
        }
        shell.__dict__.update(settings)
        for name, child in stacked.named_children():
            shell.add_module(name, child)
        return lambda both: own(shell, both)
    act = stacked.act_fn
    if not gated:
        return act

    def gate(both: Any) -> Any:
        first, second = both.chunk(2, -1)
        return act(first) * second

    return gate


def _matrices(stacked: Any, name: str, turned: bool) -> list[tuple[Any, Any]]:
    """The weight (outputs, inputs) and the bias of each expert."""
    weight, bias = getattr(stacked, name), getattr(stacked, f"{name}_bias", None)
    weight = weight.detach().transpose(1, 2) if turned else weight.detach()
    return [
        (weight[index], None if bias is None else bias.detach()[index])
        for index in range(len(weight))
    ]


def _linear(weight: Any, bias: Any) -> Any:
    layer = nn.Linear(1, 1, bias=bias is not None, device="meta")
    layer.out_features, layer.in_features = weight.shape
    layer.weight = nn.Parameter(weight.contiguous(), requires_grad=False)
    if bias is not None:
        layer.bias = nn.Parameter(bias, requires_grad=False)
    return layer
