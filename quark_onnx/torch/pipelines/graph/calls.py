"""Calls in an exported graph: layers and operators, with their names and arguments."""

from __future__ import annotations

import operator
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter, itemgetter
from typing import Any, cast

import torch
from torch import nn
from torch.fx import Graph, GraphModule, Node

from quark_onnx.common.containers import (
    grouped,
)
from quark_onnx.common.errors import ModelError
from quark_onnx.torch.config.torch_config import OPERATORS

#: Operators that are layers, by the class of the module that calls them.
KINDS = {
    "linear": "Linear",
    "conv2d": "Conv2d",
    "conv_transpose2d": "ConvTranspose2d",
    "embedding": "Embedding",
    "bag": "EmbeddingBag",
}
#: Layers without a quantized form, and operators into which decompositions split layers.
_OTHER_LAYERS = (
    "addmm",
    "bilinear",
    "conv1d",
    "conv3d",
    "convolution",
    "embedding_bag",
    "lstm",
    "gru",
    "mm",
)
#: This overload returns four tensors: results, and three about positions.
_BAG = torch.ops.aten.embedding_bag.padding_idx
_BAG_MODES = ("sum", "mean", "max")
#: Activations that runtimes fuse with the preceding operator if its result has no second reader.
ACTIVATIONS = ("relu", "relu6", "hardtanh")
#: Batch norms fold into convolutions, so that an activation after one follows a convolution.
_BEFORE_ACTIVATIONS = (*KINDS, "add", "batch_norm")
#: Inputs of embeddings without the weight, in the order of the modules' parameters.
_OPERANDS = {
    "Embedding": ("indices",),
    "EmbeddingBag": ("indices", "offsets", "per_sample_weights"),
}
#: Operators that move values and compute none: the output has the scale of the input.
_SAME_VALUES = (
    "max_pool2d",
    "flatten",
    "reshape",
    "view",
    "squeeze",
    "unsqueeze",
    "transpose",
    "permute",
    "contiguous",
    "view_as",
    "reshape_as",
    "expand_as",
    "clone",
    "alias",
    "detach",
    "expand",
    "dropout",
    "feature_dropout",
    "identity",
)


def bag(*args: Any) -> torch.Tensor:
    """Return the first result of ``aten.embedding_bag``, without the positions."""
    # a function of its own, as a node of a graph can only have one result
    result: torch.Tensor = _BAG(*args)[0]
    return result


def operator_of(node: Node) -> str:
    """Return the name of the ATen operator that a node calls, such as ``add``.

    The name is ``bag`` for calls of ``bag``, and empty for all other nodes.
    """
    # no overload of an operator, and so without a schema
    if node.target is bag:
        return "bag"
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        return ""
    space, _, name = node.target._schema.name.partition("::")
    # operators of extensions may have the names of others
    return name if space == "aten" else ""


def _schema_of(node: Node) -> Any:
    """Return the schema of a node's ATen operator."""
    operator: Any = _BAG if node.target is bag else node.target
    return operator._schema


def arguments(node: Node) -> dict[str, Any]:
    """Return the arguments of an ATen operator by parameter name, with the defaults."""
    parameters = _schema_of(node).arguments
    defaults = dict[str, Any]()
    for parameter in parameters:
        if parameter.has_default_value():
            defaults[parameter.name] = parameter.default_value
    return {
        **defaults,
        # arguments override defaults, and keywords follow the positional ones
        **dict(
            zip([parameter.name for parameter in parameters], node.args, strict=False)
        ),
        **node.kwargs,
    }


def attribute(module: GraphModule, target: str) -> Any:
    """Return a parameter, buffer or module of a model by its full name."""
    # children of a ModuleList are attributes with numbers as names
    return attrgetter(target)(module)


def is_float(module: GraphModule, node: object) -> bool:
    """Return whether a node stands for a tensor of floats.

    Args:
        module: the graph, with the attributes that its nodes read.
        node: an argument of an operator; values that are no nodes are not floats.
    """
    if not isinstance(node, Node):
        return False
    # export records a FakeTensor of the result here
    value = node.meta.get("val")
    if node.op == "get_attr":
        value = attribute(module, str(node.target))
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def _module_of(node: Node) -> tuple[str, str]:
    """Return the name and the class of the module that calls an operator.

    Both are empty if the export recorded no module. The class name includes its packages.
    """
    stack = node.meta.get("nn_module_stack")
    if not stack:
        return "", ""
    # the innermost module is the last
    name, kind = list(stack.values())[-1]
    kind = kind if isinstance(kind, str) else f"{kind.__module__}.{kind.__qualname__}"
    return re.sub(r"@\d+", "", name), kind  # "relu@1" is the second call of "relu"


def operator_name(node: Node) -> str:
    """Return the name of an operator in configurations.

    This is the name of the ``torch.nn`` module that computes the operator. Operators without such a
    module are named by their node and the enclosing module.
    """
    name, kind = _module_of(node)
    # a module of torch has one operator; other modules may call several
    if name and kind.startswith("torch.nn.modules."):
        return name
    return f"{name}.{node.name}" if name else str(node.name)


@dataclass(frozen=True)
class LayerCalls:
    """Layer of a graph and the calls of the layer.

    Attributes:
        kind: the class of the layer.
        nodes: the calls.
        layer: the float layer; its weight and bias are those of the graph.
    """

    kind: str
    nodes: tuple[Any, ...]
    layer: Any

    @property
    def inputs(self) -> tuple[Any, ...]:
        """Return the input of each call (the indices of an embedding)."""
        return tuple(map(itemgetter(0), self.operands))

    @property
    def operands(self) -> tuple[tuple[Any, ...], ...]:
        """Return the arguments for a module in place of each call."""
        names = _OPERANDS.get(self.kind, ("input",))
        calls = [arguments(node) for node in self.nodes]
        return tuple(tuple(call[name] for name in names) for call in calls)


def layers_of_graph(
    module: GraphModule,
) -> tuple[dict[str, LayerCalls], dict[str, str]]:
    """Find the layers of a graph by module name.

    Returns:
        The layers by name, and the calls that cannot be quantized, with the reason.
    """
    calls, kept = _calls_of_layers(module.graph)
    layers = dict[str, LayerCalls]()
    for name, nodes in calls.items():
        reason = _reason_to_keep(nodes)
        if reason:
            kept[name] = reason
        else:
            kind = KINDS[operator_of(nodes[0])]
            layer = _float_layer(module, kind, _settings(nodes[0]))
            layers[name] = LayerCalls(kind, tuple(nodes), layer)
    return layers, kept


def _calls_of_layers(graph: Graph) -> tuple[dict[str, list[Node]], dict[str, str]]:
    """Return the calls of layers by module name.

    Returns:
        The calls whose weight is a parameter, and the other calls, with the reason.
    """
    calls, kept = list[tuple[str, Node]](), dict[str, str]()
    for node in graph.nodes:
        kind = KINDS.get(operator_of(node))
        # noted with a reason, so that no layer stays float silently
        if operator_of(node) in _OTHER_LAYERS:
            own = f"aten.{operator_of(node)}, which is none of {', '.join(KINDS)}"
            kept[operator_name(node)] = (
                f"it is {own}; export it without run_decompositions() if it was one"
            )
        if kind is None:
            continue
        weight = arguments(node)["weight"]
        name, cls = _module_of(node)
        if weight.op != "get_attr":
            kept[name or node.name] = "its weight is computed"
            continue
        if cls.rpartition(".")[2] != kind:
            # a function of the weight of another module
            name = str(weight.target).removesuffix(".weight")
        # a module that is called twice is one layer with two calls
        calls.append((name, node))
    return grouped(calls), kept


def _reason_to_keep(nodes: list[Node]) -> str:
    """Return the reason against a quantized layer for some calls, or an empty string.

    Args:
        nodes: the calls of a layer, at least one.
    """
    settings = [(operator_of(node), _settings(node)) for node in nodes]
    # one module replaces all calls, so that weight, stride and the like must be the same
    if any(each != settings[0] for each in settings):
        return "its calls differ in more than what they read"
    values = _flat(settings[0][1], but=("weight", "bias"))
    # a module has fixed settings
    if any(isinstance(value, Node | torch.SymInt) for value in values):
        return "its settings are computed"
    return ""


def _settings(node: Node) -> dict[str, Any]:
    """Return the arguments of a call without its inputs."""
    inputs = {"input", *chain.from_iterable(_OPERANDS.values())}
    return {
        name: value for name, value in arguments(node).items() if name not in inputs
    }


def _flat(settings: dict[str, Any], but: tuple[str, ...]) -> Iterator[Any]:
    """Yield single values of settings, except some names, and a computed bias.

    Args:
        settings: arguments of a call by parameter name, without its inputs.
        but: names to leave out; a computed bias is yielded nevertheless.
    """
    for name, value in settings.items():
        # a computed bias cannot be a parameter
        if name == "bias" and isinstance(value, Node) and value.op != "get_attr":
            yield value
        elif name not in but:
            yield from value if isinstance(value, list | tuple) else (value,)


def _float_layer(module: GraphModule, kind: str, settings: dict[str, Any]) -> Any:
    """Build the float module that computes a call.

    Args:
        module: the graph with its parameters.
        kind: the class of the layer, a value of ``KINDS``.
        settings: arguments of the call by parameter name, without its inputs. None of them is
            computed.

    Returns:
        A module of ``torch.nn`` that shares the memory of weight and bias, without gradients.
    """
    weight = attribute(module, settings["weight"].target)
    bias = None
    if settings.get("bias") is not None:
        bias = attribute(module, settings["bias"].target)
        # detached: the parameter of the model keeps its own gradients
        bias = nn.Parameter(bias.detach(), requires_grad=False)
    rest = {
        key: value for key, value in settings.items() if key not in ("weight", "bias")
    }
    # (outputs, inputs, ...); of transposed convolutions (inputs, outputs, ...)
    rows, columns = weight.shape[:2]
    if kind == "Linear":
        # "meta": the parameters are replaced below, and need no memory
        layer: Any = nn.Linear(columns, rows, bias=False, device="meta")
    elif kind == "Embedding":  # further settings only affect gradients
        layer = nn.Embedding(rows, columns, device="meta")
    elif kind == "EmbeddingBag":
        own = {
            key: rest[key]
            for key in ("include_last_offset", "padding_idx")
            if key in rest
        }
        layer = nn.EmbeddingBag(
            rows,
            columns,
            mode=_BAG_MODES[rest["mode"]],
            device="meta",
            **own,
        )
    else:
        groups = rest["groups"]
        # weights hold the channels of one group: (out, in / groups) or (in, out / groups)
        size = (rows, columns * groups)
        if kind == "Conv2d":
            size = (columns * groups, rows)
        layer = getattr(nn, kind)(
            *size,
            tuple(weight.shape[2:]),
            bias=False,
            device="meta",
            **rest,
        )
    layer.weight = nn.Parameter(weight.detach(), requires_grad=False)
    if kind not in _OPERANDS:
        layer.bias = bias
    return layer


def fused(node: Node) -> Node:
    """Return the activation that is fused with an operator, or else the operator."""
    # with a second reader, the tensor before the activation is computed as well
    if len(node.users) != 1 or operator_of(node) not in _BEFORE_ACTIVATIONS:
        return node
    [reader] = node.users
    return reader if operator_of(reader) in ACTIVATIONS else node


def root_of(node: Node) -> Node:
    """Return the source of a tensor's values, before operators that move values."""
    # the moved tensor is the first argument of all of them
    while operator_of(node) in _SAME_VALUES:
        node = cast(Node, node.args[0])
    return node


def activations_of(graph: Graph) -> set[Any]:
    """Return the activations that are fused with the preceding operator."""
    activations = set[Any]()
    for node in graph.nodes:
        activation = fused(node)
        if activation is not node:
            activations.add(activation)
    return activations


def operators_of(module: GraphModule) -> Iterator[Any]:
    """Yield the calls of float operators that are no layers."""
    for node in module.graph.nodes:
        if operator_of(node) in OPERATORS and is_float(module, node):
            yield node


#: The parameters that tell an export in training mode, by operators that then compute otherwise.
_IN_TRAINING = {
    "batch_norm": "training",
    "dropout": "train",
    "feature_dropout": "train",
}


def check_evaluation(graph: Graph) -> None:
    """Raise ModelError if a graph was exported in training mode."""
    for node in graph.nodes:
        named = _IN_TRAINING.get(operator_of(node))
        # dropout would be part of the calibration, and of the quantized model
        if named is not None and arguments(node)[named]:
            raise ModelError(
                f"{operator_name(node)} was exported in training mode; export model.eval()",
            )


def with_single_bags(graph: Graph) -> None:
    """Replace embedding bags by single-result calls if the positions have no reader.

    Args:
        graph: the graph; it is changed in place.
    """
    # a list, since the loop changes the graph
    for node in list(graph.nodes):
        if node.target is not _BAG:
            continue
        results = dict[Any, Node]()
        for user in node.users:
            if user.target is operator.getitem:
                results[user.args[1]] = user
        # a reader of all results, or of the positions, needs the original operator
        positions = {key: value for key, value in results.items() if key not in [0]}
        if len(results) < len(node.users):
            continue
        if any(map(attrgetter("users"), positions.values())):
            continue
        with graph.inserting_after(node):
            single = graph.call_function(bag, node.args, node.kwargs)
        # "val" of the node is a tuple of FakeTensors
        single.meta = {**node.meta, "val": node.meta["val"][0]}
        for index, user in results.items():
            if not index:
                user.replace_all_uses_with(single)
            graph.erase_node(user)
        graph.erase_node(node)


def with_plain_batch_norms(graph: Graph) -> None:
    """Replace decomposed batch norms by the operator that modules call.

    ``run_decompositions({})`` introduces the decomposed operator.

    Args:
        graph: the graph; it is changed in place, and unused nodes are removed.
    """
    for node in graph.nodes:
        if operator_of(node) != "_native_batch_norm_legit_no_training":
            continue
        # input, weight, bias, running mean and running variance, in the order of the schema
        *tensors, momentum, eps = arguments(node).values()
        with graph.inserting_before(node):
            plain = graph.call_function(
                torch.ops.aten.batch_norm.default,
                # training, and cudnn_enabled
                (*tensors, False, momentum, eps, True),
            )
        plain.meta = {**node.meta, "val": node.meta["val"][0]}
        for output in list(node.users):  # the others are statistics of training
            if output.args[1] == 0:
                output.replace_all_uses_with(plain)
    graph.eliminate_dead_code()


def without_mutations(graph: Graph) -> str | None:
    """Replace in-place operators by out-of-place ones if no reader is affected.

    Returns:
        The name of an in-place operator that cannot be replaced; None if there is none.
    """
    left = None
    for node in graph.nodes:
        name = operator_of(node)
        if not name or not _schema_of(node).is_mutable:
            continue
        anew = None
        # ``add_`` becomes ``add``: a trailing underscore stands for in place
        if name.endswith("_"):
            anew = getattr(torch.ops.aten, name.removesuffix("_"), None)
        overload = node.target._overloadname
        if anew is not None and overload in anew.overloads() and _is_own(node.args[0]):
            node.target = getattr(anew, overload)
        else:
            # the first, for the error message
            left = left or str(node.name)
    return left


def _is_own(node: Node) -> bool:
    """Return whether a tensor has memory without a second reader."""
    while operator_of(node) and len(node.users) == 1:
        # the operator returns new memory, and no view of an argument
        if all(each.alias_info is None for each in _schema_of(node).returns):
            return True
        node = cast(Node, node.args[0])
    return False


def fold_batch_norms(module: GraphModule, layers: dict[str, LayerCalls]) -> list[str]:
    """Fold batch norms into the weights of the preceding convolutions.

    A batch norm is folded only if the convolution's output has no second reader.

    Args:
        module: the graph; it is changed.
        layers: the layers that may change.

    Returns:
        The names of the layers into which a batch norm was folded.
    """
    taken = list[str]()
    for name, calls in layers.items():
        norm = _norm_after(calls)
        parts = None if norm is None else _norm_parts(module, norm)
        if norm is None or parts is None:
            continue
        node = calls.nodes[0]
        weight, bias, mean, variance = parts
        # float64: the product is rounded once, when it becomes the weight
        factor = (variance + arguments(norm)["eps"]).rsqrt()
        _take_in(calls, weight, bias, mean, factor)
        _set_parameters(module, node, calls.layer)
        norm.replace_all_uses_with(node)
        module.graph.erase_node(norm)
        taken.append(name)
    return taken


def _norm_after(calls: LayerCalls) -> Node | None:
    """Return the batch norm after a convolution without further readers, or None."""
    node = calls.nodes[0]
    # a layer with several calls may be followed by different norms
    if calls.kind not in ("Conv2d", "ConvTranspose2d") or len(calls.nodes) > 1:
        return None
    if len(node.users) != 1:
        return None
    (reader,) = node.users
    return reader if operator_of(reader) == "batch_norm" else None


def _norm_parts(module: GraphModule, norm: Node) -> list[Any] | None:
    """Return weight, bias, mean and variance of a batch norm, in float64.

    Weight and bias may be None. The result is None if a part is computed, or if there are no
    running statistics.

    Args:
        module: the graph with its parameters.
        norm: a call of ``batch_norm``.
    """
    given = arguments(norm)
    names = ("weight", "bias", "running_mean", "running_var")
    nodes = {name: given[name] for name in names if name in given}
    if any(
        part.op != "get_attr"
        for part in [value for value in nodes.values() if value is not None]
    ):
        return None
    # such a norm computes statistics of each batch
    if nodes["running_mean"] is None or nodes["running_var"] is None:
        return None
    return [_doubles(module, part) for part in nodes.values()]


def _doubles(module: GraphModule, part: Node | None) -> Any:
    """Return the values of an optional attribute in float64."""
    if part is None:
        return None
    return attribute(module, str(part.target)).detach().double()


def _set_parameters(module: GraphModule, node: Node, layer: Any) -> None:
    """Let a call of a convolution read the weight and the bias of a layer.

    Args:
        module: the graph, to which two parameters are added.
        layer: the layer with the folded weight and bias.
    """
    own = list[Any]()
    for side in ("weight", "bias"):
        # a new attribute, as other calls may read the parameters of the model
        target = f"{node.name}_folded_{side}"
        module.register_parameter(target, getattr(layer, side))
        with module.graph.inserting_before(node):
            own.append(module.graph.get_attr(target))
    # input, weight and bias are the first three arguments of all convolutions
    node.args = (arguments(node)["input"], *own, *node.args[3:])
    node.kwargs = {
        key: value
        for key, value in node.kwargs.items()
        if key not in ("weight", "bias")
    }


def _take_in(calls: LayerCalls, weight: Any, bias: Any, mean: Any, factor: Any) -> None:
    """Fold a batch norm into the layer that computes y, in float64.

    The batch norm is ``(y - mean) * factor * weight + bias``.

    Args:
        calls: the convolution; weight and bias of its layer are replaced.
        weight: weight of the norm, of shape (outputs,); None for ones.
        bias: bias of the norm, of shape (outputs,); None for zeros.
        mean: running mean, of shape (outputs,).
        factor: 1 / sqrt(running variance + eps), of shape (outputs,).
    """
    layer = calls.layer
    if weight is not None:
        factor = factor * weight
    own, dtype = layer.weight.double(), layer.weight.dtype
    if calls.kind == "Conv2d":
        # (outputs, inputs / groups, height, width): a factor for each output
        own = own * factor.view(-1, 1, 1, 1)
    else:  # inputs first, and outputs by group
        groups = layer.groups
        # (groups, inputs / groups, outputs / groups, height, width)
        own = own.unflatten(0, (groups, -1)) * factor.view(groups, 1, -1, 1, 1)
        own = own.flatten(0, 1)
    # a convolution before a norm mostly has no bias
    before = -mean if layer.bias is None else layer.bias.double() - mean
    offset = before * factor
    if bias is not None:
        offset = offset + bias
    layer.weight = nn.Parameter(own.to(dtype), requires_grad=False)
    layer.bias = nn.Parameter(offset.to(dtype), requires_grad=False)
