"""Unfusing of mixtures of experts: a stacked tensor becomes a list of linear layers.

transformers stores the weights of all experts of a block in two tensors of three axes. Checkpoints
and clients have a layer for every expert: ``experts.0.gate_proj`` and so on. Linear layers are
quantized by the usual code.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from inspect import signature
from itertools import product
from typing import Any

import torch
from torch import nn

from quark_onnx.torch.models.names import instances
from quark_onnx.torch.models.plain_linear import (
    random_tensors,
    tried,
    with_parameters,
)
from quark_onnx.torch.models.structure import set_module


class Experts(nn.Module):
    """Experts of a mixture as linear layers, in children "0", "1" and so on.

    The module computes the same function as the stacked module.

    Weights are views of the stacked tensor where the rows are contiguous, and copies elsewhere. A
    product with a strided weight is summed in another order: activation scales would differ from
    the scales of a checkpoint with single experts.

    Args:
        stacked: module with ``gate_up_proj`` (or ``up_proj``) and ``down_proj`` of three axes, and
            an activation function.
    """

    def __init__(self, stacked: Any) -> None:
        super().__init__()
        self.num_experts = stacked.down_proj.shape[0]
        self._gated = hasattr(stacked, "gate_up_proj")
        # gpt-oss alternates gate and up rows; other models have all gate rows first.
        self._interleaved = not getattr(stacked, "is_concatenated", True)
        #: Whether stacked weights have the shape (experts, inputs, outputs).
        self.turned = _is_turned(stacked)
        self._activation = _activation_of(stacked, self._gated)
        # weight (rows, inputs) with 2 * features rows if gated; bias (rows,) or None.
        first = "gate_up_proj" if self._gated else "up_proj"
        up = _matrices(stacked, first, self.turned)
        down = _matrices(stacked, "down_proj", self.turned)
        for index in range(self.num_experts):
            expert = nn.Module()
            for name, layer in self._first_layers(*up[index]):
                expert.add_module(name, layer)
            expert.add_module("down_proj", _linear(*down[index]))
            self.add_module(str(index), expert)

    def _first_layers(
        self, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> Iterator[tuple[str, nn.Module]]:
        """Yield the layers before the activation of an expert, by name.

        Args:
            weight: (rows, inputs), with gate and up rows if the experts are gated.
            bias: (rows,), or None.
        """
        if not self._gated:
            yield "up_proj", _linear(weight, bias)
            return
        gate_rows, up_rows = self.halves(len(weight))
        for name, rows in (("gate_proj", gate_rows), ("up_proj", up_rows)):
            yield name, _linear(weight[rows], None if bias is None else bias[rows])

    def halves(self, count: int) -> tuple[slice, slice]:
        """Return the slices of gate rows and up rows in a stack of ``count`` rows."""
        if self._interleaved:
            return slice(0, None, 2), slice(1, None, 2)
        return slice(0, count // 2), slice(count // 2, None)

    def forward(
        self,
        hidden_states: torch.Tensor,
        top_k_index: torch.Tensor | None = None,
        top_k_weights: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the weighted sum of the outputs of the chosen experts.

        Without routing, expert i computes the i-th chunk of the tokens.

        Args:
            hidden_states: (tokens, features); without routing (experts x tokens, features), as in
                Llama 4.
            top_k_index: (tokens, k) expert indices; None without routing.
            top_k_weights: (tokens, k) weights of the chosen experts.

        Returns:
            A tensor of the shape of ``hidden_states``.
        """
        if top_k_index is None:
            # (experts * tokens, features): Llama 4 repeats the tokens for every expert, already
            # weighted by the router.
            chunks = hidden_states.chunk(self.num_experts)
            outputs = [
                self._output(index, x)
                for index, x in zip(range(self.num_experts), chunks, strict=True)
            ]
            return torch.cat(outputs)
        assert top_k_weights is not None
        # Expert by expert, as the eager forward of transformers: another order of sums rounds
        # differently.
        total = torch.zeros_like(hidden_states)
        for index in range(self.num_experts):
            # (chosen,) rows of hidden_states, and the column of top_k_weights of each.
            tokens, columns = torch.where(top_k_index == index)
            # Skipped as in transformers, so that the hooks of calibration see no empty inputs.
            if not len(tokens):
                continue
            output = self._output(index, hidden_states[tokens])
            weighted = output * top_k_weights[tokens, columns, None]
            total.index_add_(0, tokens, weighted.to(total.dtype))
        return total

    def _output(self, index: int, x: torch.Tensor) -> torch.Tensor:
        """Return the output of an expert for (tokens, features)."""
        expert: Any = self.get_submodule(str(index))
        result: torch.Tensor = expert.down_proj(self._gate(expert, x))
        return result

    def stacked_parameters(self) -> dict[str, Any]:
        """Return weights and biases of all experts as the stacked module has them, by name.

        Returns:
            Weights of three axes, (experts, outputs, inputs), or (experts, inputs, outputs) where
            ``turned``; biases (experts, outputs), if the experts have biases.
        """
        stacks = dict[str, Any]()
        for name in self._stacked:
            for key, end in (("weight", ""), ("bias", "_bias")):
                parts = [
                    self._rows(index, name, key) for index in range(self.num_experts)
                ]
                # all experts have biases, or none
                if parts[0] is not None:
                    stacks[name + end] = torch.stack(parts)
            if self.turned:
                stacks[name] = stacks[name].transpose(1, 2).contiguous()
        return stacks

    @property
    def _stacked(self) -> tuple[str, str]:
        """Names of the stacked weights."""
        if self._gated:
            return "gate_up_proj", "down_proj"
        return "down_proj", "up_proj"

    def _rows(self, index: int, name: str, key: str) -> Any:
        """Return the weight or bias of an expert as its stack has it; None for no bias."""
        # By number: an activation that is a module is a child of its own.
        expert: Any = self.get_submodule(str(index))
        if name != "gate_up_proj":
            return getattr(expert.get_submodule(name), key)
        gate, up = getattr(expert.gate_proj, key), getattr(expert.up_proj, key)
        if gate is None:
            return None
        rows = 2 * len(gate)
        both = gate.new_empty((rows, *gate.shape[1:]))
        gate_rows, up_rows = self.halves(rows)
        both[gate_rows] = gate.detach()
        both[up_rows] = up.detach()
        return both

    def _gate(self, expert: Any, x: Any) -> Any:
        """Return the activation between the two products of an expert, (tokens, features)."""
        if not self._gated:
            return self._activation(expert.up_proj(x))
        halves = (expert.gate_proj(x), expert.up_proj(x))
        # Two (tokens, features) become (tokens, 2 * features) in the order that the activation
        # expects.
        if self._interleaved:
            return self._activation(torch.stack(halves, -1).flatten(-2))
        return self._activation(torch.cat(halves, -1))


class ParallelExperts(nn.Module):
    """Experts with one linear layer apiece, for tokens sorted by expert (JetMoE).

    The layers are children "0", "1" and so on.

    Args:
        stacked: module with a ``weight`` of shape (experts, outputs, inputs).
    """

    def __init__(self, stacked: Any) -> None:
        super().__init__()
        self.num_experts = len(stacked.weight)
        for index, weight in enumerate(stacked.weight.detach()):
            self.add_module(str(index), _linear(weight, None))

    def stacked_parameters(self) -> dict[str, Any]:
        """Return the weights of all experts as the stacked module has them, by name."""
        layers: Iterator[Any] = self.children()
        return {"weight": torch.stack([layer.weight for layer in layers])}

    def forward(self, inputs: torch.Tensor, expert_size: Sequence[int]) -> torch.Tensor:
        """Return the outputs of the experts for their own tokens.

        Args:
            inputs: (tokens, inputs), sorted by expert.
            expert_size: number of tokens of every expert, a list.

        Returns:
            A tensor of shape (tokens, outputs).
        """
        # An expert without tokens gets an empty part.
        outputs = [
            self.get_submodule(str(index))(tokens)
            for index, tokens in enumerate(inputs.split(expert_size))
        ]
        return torch.cat(outputs)


#: The modules that stacks of experts become.
UNFUSED = (Experts, ParallelExperts)


def unfuse_experts(model: nn.Module) -> int:
    """Replace stacked experts of a model by linear layers, in place.

    Weights are not copied where their rows are contiguous.

    Args:
        model: model with any number of stacks; other modules stay.

    Returns:
        The number of replaced modules.
    """
    # Replaced after the walk, which would otherwise enter the new modules.
    unfused = dict[str, Any]()
    for name, module in model.named_modules():
        if _is_stacked(module):
            unfused[name] = Experts(module)
        elif _is_parallel(module):
            unfused[name] = ParallelExperts(module)
    for name, module in unfused.items():
        set_module(model, name, module)
    return len(unfused)


#: Parameters of stacks that ``Experts`` unfuses.
_STACKED = {
    "gate_up_proj",
    "up_proj",
    "down_proj",
    "gate_up_proj_bias",
    "up_proj_bias",
    "down_proj_bias",
}


def stack_names(model: nn.Module) -> list[str]:
    """Return the parameter names of a model's expert stacks before unfusing.

    Args:
        model: model whose stacks are unfused.

    Returns:
        Names that the stacks may have had, some of which did not exist.
    """
    names = product(instances(model, Experts), sorted(_STACKED))
    return [f"{stack}.{parameter}" for stack, parameter in names]


def _is_stacked(module: Any) -> bool:
    """Return whether a module has the parameters and arguments of a stack for ``Experts``.

    The parameters are ``down_proj`` and ``gate_up_proj`` or ``up_proj`` of three axes, with or
    without biases.
    """
    weights = dict(module.named_parameters(recurse=False))
    # A parameter of another name would have an unknown effect.
    if not weights.keys() <= _STACKED:
        return False
    down = weights.get("down_proj")
    up = weights.get("gate_up_proj", weights.get("up_proj"))
    if down is None or up is None:
        return False
    if not down.ndim == up.ndim == 3:
        return False
    # as ``Experts`` is called, without routing and with it
    return len(signature(module.forward).parameters) in (1, 3)


def _is_parallel(module: Any) -> bool:
    """Return whether a module with one weight stack computes as ``ParallelExperts``.

    The forward of the class runs on small random weights. The module itself may be on device
    "meta".
    """
    names = [*dict(module.named_parameters()), *dict(module.named_buffers())]
    if (
        names != ["weight"]
        or module.weight.ndim != 3
        or len(signature(module.forward).parameters) != 2
    ):
        return False
    random, count = random_tensors(), len(module.weight)
    # A shallow copy has the module's settings and none of its weights, which may be on "meta".
    small = with_parameters(module, weight=random(count, 5, 3))
    # Unequal numbers of tokens, and experts without any.
    sizes = [index % 3 for index in range(count)]
    x = random(sum(sizes), 3)
    output = tried(small, x, sizes)
    if output is None:
        return False
    expected = ParallelExperts(small)(x, sizes)
    return output.shape == expected.shape and torch.allclose(output, expected)


def _is_turned(stacked: Any) -> bool:
    """Return whether weights of a stack have the shape (experts, inputs, outputs).

    Most modules have the attribute ``is_transposed``. For Llama 4 the shapes decide.
    """
    if hasattr(stacked, "is_transposed") or not hasattr(stacked, "gate_up_proj"):
        return bool(getattr(stacked, "is_transposed", False))
    # Transposed: (experts, hidden, 2 * features) and (experts, features, hidden). With outputs
    # first, rows are twice outer, so that the shapes are never ambiguous.
    _, rows, columns = stacked.gate_up_proj.shape
    _, inner, outer = stacked.down_proj.shape
    return bool(rows == outer and columns == 2 * inner)


def _activation_of(stacked: Any, gated: bool) -> Any:
    """Return the function between the two products, of the first product (tokens, rows)."""
    # gpt-oss, DeepSeek-V4 and others do not compute act(gate) * up, but a product of their own.
    apply_gate = getattr(type(stacked), "_apply_gate", None)
    if gated and apply_gate is not None:
        # the module's settings without its weights
        shell = object.__new__(type(stacked))
        nn.Module.__init__(shell)
        for name, setting in vars(stacked).items():
            if not name.startswith("_"):
                shell.__dict__[name] = setting
        for name, child in stacked.named_children():
            shell.add_module(name, child)
        return lambda both: apply_gate(shell, both)
    act = stacked.act_fn
    if not gated:
        return act

    def gate(both: torch.Tensor) -> torch.Tensor:
        gates, ups = both.chunk(2, -1)
        result: torch.Tensor = act(gates) * ups
        return result

    return gate


def _matrices(
    stacked: Any, name: str, turned: bool
) -> list[tuple[torch.Tensor, torch.Tensor | None]]:
    """Return weight (outputs, inputs) and bias (outputs,) or None of every expert."""
    weight, bias = getattr(stacked, name), getattr(stacked, f"{name}_bias", None)
    weight = weight.detach()
    if turned:
        # (experts, inputs, outputs) to (experts, outputs, inputs); _linear makes the copy.
        weight = weight.transpose(1, 2)
    if bias is None:
        return [(matrix, None) for matrix in weight]
    return list(zip(weight, bias.detach(), strict=True))


def _linear(weight: torch.Tensor, bias: torch.Tensor | None) -> nn.Module:
    """Return a linear layer.

    Args:
        weight: (outputs, inputs); copied where the rows are not contiguous.
        bias: (outputs,); None for no bias.
    """
    # nn.Linear's constructor would initialize weights, of up to 70,000 layers, that are replaced
    layer = nn.Linear.__new__(nn.Linear)
    nn.Module.__init__(layer)
    layer.out_features, layer.in_features = weight.shape
    layer.weight = nn.Parameter(weight.contiguous(), requires_grad=False)
    if bias is None:
        layer.register_parameter("bias", None)
    else:
        layer.bias = nn.Parameter(bias, requires_grad=False)
    return layer
