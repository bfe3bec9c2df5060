"""quantize_graph: quantize a traced model, with operators between layers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram
from torch.fx import Graph, GraphModule

from quark_onnx.common.errors import ConfigError, ModelError
from quark_onnx.torch.calibration.block_stream import call, inference
from quark_onnx.torch.config.spec import LayerSpec
from quark_onnx.torch.config.torch_config import TorchConfig, require_config
from quark_onnx.torch.models.float_weights import (
    ROUTER,
    TOO_NARROW,
    check_not_all_float,
    fills_a_group,
    reason_of,
)
from quark_onnx.torch.models.mixtures import routers_of
from quark_onnx.torch.models.names import instances
from quark_onnx.torch.models.quantized_layer import QuantizedLayer
from quark_onnx.torch.pipelines.block import rounded_weight
from quark_onnx.torch.pipelines.graph.calls import (
    KINDS,
    LayerCalls,
    activations_of,
    attribute,
    check_evaluation,
    fold_batch_norms,
    layers_of_graph,
    operator_name,
    operator_of,
    operators_of,
    with_plain_batch_norms,
    with_single_bags,
    without_mutations,
)
from quark_onnx.torch.pipelines.graph.roundings import Roundings
from quark_onnx.torch.pipelines.report import TorchReport

_NEEDS_EXPORT = (
    "graph mode needs an exported model: give torch.export.export(model,"
    " args).module(), or example_args to quantize_graph"
)


def quantize_graph(
    model: nn.Module | ExportedProgram,
    data: Iterable[Any] | None,
    config: TorchConfig,
    example_args: Any = None,
    *,
    dynamic_shapes: Any = None,
) -> tuple[GraphModule, TorchReport]:
    """Quantize a graph of ATen operators.

    Layers become QuantizedLayers under the names they had. Batch norms are folded into the
    preceding convolutions. Inputs and outputs of add, mul, cat, pooling and activations are
    quantized as the configuration says: by name, by type, or by its default if the default has a
    calibrated scale. Tensors between an operator and its fused activation stay float. All readers
    of a tensor share its scale. Pooling and shape operators keep the scale.

    Args:
        model: an ExportedProgram, its ``module()``, or any module with ``example_args``; it is not
            changed.
        data: batches: tensors, dicts of keywords or lists of arguments; needed only to calibrate
            scales, else None.
        config: the quantization configuration. Algorithms work on modules only.
        example_args: the arguments with which a module is exported: a tensor, a dict of keywords or
            a list of arguments.
        dynamic_shapes: the axes that may vary, as torch.export takes them.

    Returns:
        A new module, and the report on its layers.

    Raises:
        ConfigError: a name matches nothing, nothing would be quantized, or an algorithm or
            attention is asked for.
        DataError: data is needed and missing, or the model cannot be run on it.
        ModelError: the model cannot be exported, or was exported in training mode.
    """
    require_config(config)
    _check_config(config)
    if isinstance(model, nn.Module) and instances(model, QuantizedLayer):
        raise ModelError("the model is quantized already; start from the float model")
    report = TorchReport()
    # from here on a copy of the graph is changed; parameters are shared with the model
    graph_module = _graph_of(model, example_args, dynamic_shapes, report)
    # before layers are chosen, as in-place operators have names of their own (add_)
    mutating = without_mutations(graph_module.graph)
    # an exported program has no modules in which routers could be found
    routers = routers_of(model) if not isinstance(model, ExportedProgram) else []
    layers, operators = _chosen(graph_module, config, routers, report)
    specs = [*(spec for _, spec in layers.values()), *operators.values()]
    # a rounded copy would miss what the operator writes into the tensor afterwards
    if mutating and not all(spec.weight_only for spec in specs):
        raise ModelError(
            f"{mutating} writes into a tensor that others read;"
            " run_decompositions({}) of the exported program makes operators that do"
            " not, or quantize weights alone",
        )
    weights = {
        name: calls for name, (calls, spec) in layers.items() if spec.weight is not None
    }
    # before scales are measured: they are those of the folded outputs
    if folded := fold_batch_norms(graph_module, weights):
        report.notes.append(
            f"batch norms are part of the weights of {', '.join(folded)}",
        )
    roundings = Roundings(
        graph_module,
        layers,
        operators,
        config.kv_cache.least if config.kv_cache else 0.0,
    )
    # on the float graph, as for modules
    roundings.measure(data)
    floats = {name: (calls.layer, spec) for name, (calls, spec) in layers.items()}
    for name, (calls, spec) in layers.items():
        layer = QuantizedLayer(calls.layer, rounded_weight(name, floats), spec)
        layer.input = roundings.module(roundings.inputs.get(name))
        layer.output = roundings.module(roundings.outputs.get(name))
        _put(graph_module, name, layer, calls)
    # after the layers are replaced, as their inputs and outputs are rounded inside of them
    roundings.put()
    # drops the attributes that only the replaced calls have read
    graph_module.graph.eliminate_dead_code()
    graph_module.graph.lint()
    return _fresh(graph_module, graph_module.graph), report


def _check_config(config: TorchConfig) -> None:
    """Raise ConfigError for settings that work on modules alone."""
    if config.algorithms:
        raise ConfigError(
            f"{config.algorithms[0].name} works on modules, not on exported graphs;"
            " leave it out there",
        )
    if config.attention is not None:
        raise ConfigError(
            "attention works on modules of transformers, not on exported graphs; leave"
            " it out there",
        )


def _graph_of(
    model: Any,
    example: Any,
    dynamic_shapes: Any,
    report: TorchReport,
) -> GraphModule:
    """Return a graph of ATen operators that shares the model's parameters.

    The graph may be changed without an effect on the model.

    Args:
        model: a module, an ``ExportedProgram``, or a ``GraphModule`` of ATen operators.
        example: arguments for the export of a module: a tensor, a dict of keywords or a list; None
            for exported models.
        dynamic_shapes: axes that may vary, as for ``torch.export.export``.
        report: the report, for notes on the mode of the module and on nested graphs.

    Raises:
        ConfigError: the model is not exported, and there is no example.
        ModelError: the export failed, or the graph was exported in training mode.
    """
    if isinstance(model, ExportedProgram):
        found = model.module()
        graph_module = _fresh(found, found.graph)
    # a symbolic trace is a GraphModule, too, but calls modules and functions of torch
    elif isinstance(model, GraphModule) and any(map(operator_of, model.graph.nodes)):
        # ``ExportedProgram.module`` above returns a new graph at each call; this one is the
        # caller's
        graph_module = _fresh(model, _copied(model.graph))
    elif example is None:
        raise ConfigError(
            f"{type(model).__name__} is no exported graph; {_NEEDS_EXPORT}",
        )
    else:
        found = _exported(model, example, dynamic_shapes, report)
        graph_module = _fresh(found, found.graph)
    # bodies of torch.cond and the like
    for name, module in graph_module.named_modules():
        if (
            name
            and isinstance(module, GraphModule)
            and any(operator_of(node) in KINDS for node in module.graph.nodes)
        ):
            report.notes.append(
                f"layers in {name}, a graph within the graph, stay float",
            )
    check_evaluation(graph_module.graph)
    with_plain_batch_norms(graph_module.graph)
    with_single_bags(graph_module.graph)
    return graph_module


def _fresh(root: Any, graph: Any) -> GraphModule:
    """Build a module in evaluation mode with the attributes that a graph reads.

    The mode of exported modules cannot be changed.
    """
    # a new GraphModule is in training mode by default
    return GraphModule(root, graph, type(root).__name__).eval()


def _copied(graph: Any) -> Graph:
    """Copy a graph, with its signature."""
    copied = Graph()
    copied.output(copied.graph_copy(graph, {}))
    # the signature is part of the code generator, and is not copied with the nodes
    copied.set_codegen(graph._codegen)
    return copied


def _exported(
    model: Any,
    example: Any,
    dynamic_shapes: Any,
    report: TorchReport,
) -> Any:
    """Export a module with torch in evaluation mode, and return the graph.

    Args:
        example: its arguments: a tensor, a dict of keywords or a list.
        dynamic_shapes: the axes that may vary.
        report: the report, for a note on a module in training mode.
    """
    args, named = call(lambda *args, **named: (args, named), example)
    # dropout and batch norms compute otherwise in training
    if model.training:
        report.notes.append(
            "the model was in training mode; it is exported as it computes in"
            " evaluation mode",
        )
    with inference(model):
        try:
            program = torch.export.export(
                model,
                args,
                named,
                dynamic_shapes=dynamic_shapes,
                # by running the module: strict export traces bytecode, and fails on many models of
                # transformers
                strict=False,
            )
        except Exception as error:  # torch raises several unrelated types
            text = "\n".join(str(error).strip().splitlines()[:6])[:800]
            raise ModelError(
                f"torch cannot export the {type(model).__name__}:"
                f" {text or type(error).__name__}",
            ) from error
        return program.module()


def _chosen(
    module: GraphModule,
    config: TorchConfig,
    routers: Sequence[str],
    report: TorchReport,
) -> tuple[dict[str, tuple[LayerCalls, LayerSpec]], dict[Any, LayerSpec]]:
    """Choose the layers (by name) and the operator calls to quantize.

    Args:
        config: the quantization configuration.
        routers: names of routers of mixtures, which stay float unless the configuration names them.
        report: the report, to which specs and reasons for float layers are added.

    Returns:
        The layers by name, with their specs, and the specs of operators by node.

    Raises:
        ConfigError: a pattern of the configuration matches nothing, or no layer would be quantized.
    """
    found, kept = layers_of_graph(module)
    named = {node: operator_name(node) for node in operators_of(module)}
    # runtimes compute an operator and its activation at once, without a tensor between them
    together = activations_of(module.graph)
    config.check([*found, *named.values()])
    report.kept |= kept
    layers = dict[str, tuple[LayerCalls, LayerSpec]]()
    operators = dict[Any, LayerSpec]()
    for name, calls in found.items():
        spec = config.spec_of(name, calls.kind)
        if name in routers and name not in config.named:
            report.kept[name] = ROUTER
        # config.exclude or no default for the kind
        elif spec is None:
            report.kept[name] = reason_of(name, config)
        elif not fills_a_group(calls.layer, spec) and name not in config.named:
            report.kept[name] = TOO_NARROW
        else:
            if calls.kind.startswith("Embedding"):
                # it reads indices
                spec = spec.with_(input=None)
            layers[name] = calls, spec
            report.quantized[name] = spec
    for node, name in named.items():
        spec = config.spec_of(name, operator_of(node))
        # operators that no setting names get nothing but the default's calibrated scales
        own = LayerSpec() if spec is None else _operator_spec(spec, config)
        # its input is the output of the fused operator, which stays float
        if node in together:
            own = own.with_(input=None)
        if own != LayerSpec():
            operators[node] = report.quantized[name] = own
    check_not_all_float(report.quantized, report.kept)
    return layers, operators


def _operator_spec(spec: LayerSpec, config: TorchConfig) -> LayerSpec:
    """Return how the inputs and the output of an operator are quantized.

    Args:
        spec: the specification that the configuration has for the operator.
    """
    # named by the user, who may want per-token scales there
    if spec != config.default:
        return spec.with_(weight=None)
    # per-token scales belong to the inputs of layers; operators need a calibrated scale
    read, computed = (
        each if each and each.measured else None for each in (spec.input, spec.output)
    )
    return LayerSpec(None, read, computed)


def _put(
    module: GraphModule,
    name: str,
    layer: QuantizedLayer,
    calls: LayerCalls,
) -> None:
    """Replace the calls of a layer by a quantized layer.

    Args:
        module: the graph; it is changed.
        calls: the calls of the float layer, which become calls of the module.
    """
    for node, operands in zip(calls.nodes, calls.operands, strict=True):
        # the node stays, so that its readers need no change
        node.op, node.target, node.args, node.kwargs = "call_module", name, operands, {}
    for node in module.graph.nodes:  # parameters with further readers
        if (
            node.op == "get_attr"
            and node.users
            # attributes below the name go with the float module, but other nodes may read them
            and f"{node.target}.".startswith(f"{name}.")
        ):
            value, target = attribute(module, str(node.target)), f"{node.name}_kept"
            if isinstance(value, nn.Parameter):
                module.register_parameter(target, value)
            else:
                module.register_buffer(target, value)
            node.target = target
    parent, _, last = name.rpartition(".")
    owner = module.get_submodule(parent)
    # the float module, of which only a container of parameters is left after export
    if hasattr(owner, last):
        delattr(owner, last)
    module.add_submodule(name, layer)
