"""Forms of operators that onnxruntime's CPU runs faster, with the same values.

onnxruntime makes an Add and the LayerNormalization that alone reads it a SkipLayerNormalization,
which takes five times as long as both on a CPU: BERT with int8 layers takes 2.17 ms then, and
1.64 ms otherwise (192 channels, 64 tokens, onnxruntime 1.32). A Sum of two tensors has the same
values and is left as it is.

Its PRelu has one value at a time: six int8 convolutions with PRelu take 10.6 ms, and 4.5 ms with
Max(x, slope x), which is the same function for slopes up to 1 (32 channels, 96 x 96).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from quark_onnx.common.registry import TARGETS
from quark_onnx.common.wording import counted
from quark_onnx.config import QConfig
from quark_onnx.dtypes import Integer
from quark_onnx.graph import Graph, Node
from quark_onnx.graph.codes import constant_behind, dequantized
from quark_onnx.graph.node import DEQUANTIZE
from quark_onnx.patterns.norms import Norm, norms

#: First opset whose Sum and Max broadcast.
_OPSET = 8
#: Most axes of a constant that onnxruntime may add within a layer, as its bias. It would not
#: recognize a Sum.
_BIAS_AXES = 2


@dataclass(frozen=True)
class _Form:
    """A form that is written for a portable operator.

    Attributes:
        operator: the portable operator.
        written: the operator that the form is known by.
        place: where it is written, with a space before; empty for anywhere.
        reason: what onnxruntime does with the portable form.
        find: returns the operators that have the form.
        write: replaces one of them.
    """

    operator: str
    written: str
    place: str
    reason: str
    find: Callable[[Graph], list[Node]]
    write: Callable[[Graph, Node], None]


def write_cpu_forms(graph: Graph, config: QConfig) -> list[str]:
    """Write the forms that onnxruntime's CPU runs faster, in place.

    Without the target ``cpu`` the result is portable, and keeps the operators: a note says what the
    target would change. ``passes.sum_to_add`` is the reverse for sums, for models that are
    quantized again.

    Args:
        graph: the quantized graph, without the bodies of its nodes.
        config: the settings of the run.

    Returns:
        Notes for the report.
    """
    if graph.opset < _OPSET or not _is_for_onnxruntime(config):
        return []
    notes = list[str]()
    for form in _FORMS:
        nodes = form.find(graph)
        if not nodes:
            continue
        if not config.target:
            portable = counted(len(nodes), form.operator, f"{form.operator}s")
            notes.append(
                f"{portable}{form.place}: {form.reason}; --target cpu writes"
                f" {form.written} instead"
            )
            continue
        for node in nodes:
            form.write(graph, node)
        written = counted(len(nodes), f"{form.operator} is", f"{form.operator}s are")
        notes.append(f"{written} written as {form.written}{form.place}: {form.reason}")
    return notes


def _is_for_onnxruntime(config: QConfig) -> bool:
    """Return whether the result is for onnxruntime's CPU, whose kernels have the activations."""
    takes = TARGETS[config.target].takes if config.target else None
    if config.portable or (config.target and (takes is None or not takes.cpu_forms)):
        return False
    spec = config.activation
    return spec is None or (isinstance(spec.dtype, Integer) and not spec.pow2)


def _sums(graph: Graph) -> list[Node]:
    additions = (_summed(graph, norm) for norm in norms(graph))
    return [addition for addition in additions if addition is not None]


def _summed(graph: Graph, norm: Norm) -> Node | None:
    """Return the Add that a normalization alone reads; None if there is none."""
    if not norm.centered or len(norm.sources) != 1:
        return None
    source = norm.sources[0]
    addition = graph.producer(source)
    if addition is None or addition.kind != "Add" or graph.is_output(source):
        return None
    if any(_is_small_constant(graph, name) for name in addition.inputs):
        return None
    readers = frozenset(graph.consumers(source))
    return addition if readers == norm.nodes else None


def _is_small_constant(graph: Graph, name: str) -> bool:
    """Return whether an operand of an Add is a constant of few axes, in codes or not."""
    stored = constant_behind(graph, name)
    return bool(stored) and len(graph.sizes(stored)) <= _BIAS_AXES


def _write_sum(graph: Graph, addition: Node) -> None:
    addition.rename("Sum")


def _prelus(graph: Graph) -> list[Node]:
    return [node for node in graph.nodes_of({"PRelu"}) if _is_maximum(graph, node)]


def _is_maximum(graph: Graph, prelu: Node) -> bool:
    """Return whether Max(x, slope x) has the values of a PRelu for every x."""
    slope = _constant(graph, prelu.inputs[1])
    if slope is None or not np.all(slope <= 1):
        return False
    # Infinity times 0 is not a number; dequantized values are finite.
    if not np.isfinite(slope).all():
        return False
    is_finite = graph.producer_of_type(prelu.inputs[0], DEQUANTIZE) is not None
    return is_finite or bool(np.all(slope > 0))


def _constant(graph: Graph, name: str) -> np.ndarray | None:
    """Return the values of a constant, which may be stored in codes; None if it is computed."""
    dequantize = graph.producer_of_type(name, DEQUANTIZE)
    if dequantize is None:
        return graph.constant(name)
    stored = [graph.constant(part) for part in dequantize.operands]
    if any(value is None for value in stored):
        return None
    return dequantized(dequantize, [value for value in stored if value is not None])


def _write_maximum(graph: Graph, prelu: Node) -> None:
    source, slope = prelu.inputs
    result = prelu.outputs[0]
    scaled = graph.fresh(f"{result}_scaled")
    graph.remove([prelu])
    graph.add("Mul", [source, slope], [scaled], name=f"{prelu.name}_scale")
    graph.add("Max", [source, scaled], [result], name=prelu.name)


_FORMS = (
    _Form(
        "Add",
        "Sum",
        " before a LayerNormalization",
        "onnxruntime on the CPU fuses Add to a slower operator",
        _sums,
        _write_sum,
    ),
    _Form(
        "PRelu",
        "Max",
        "",
        "onnxruntime on the CPU computes PRelu value by value",
        _prelus,
        _write_maximum,
    ),
)
