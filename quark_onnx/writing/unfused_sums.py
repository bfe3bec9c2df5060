"""Float sums before a normalization, in a form that onnxruntime does not fuse.

onnxruntime makes an Add and the LayerNormalization that alone reads it a SkipLayerNormalization,
which takes five times as long as both on a CPU: BERT with int8 layers takes 2.17 ms then, and
1.64 ms otherwise (192 channels, 64 tokens, onnxruntime 1.32). A Sum of two tensors has the same
values and is left as it is.
"""

from __future__ import annotations

from quark_onnx.common.registry import TARGETS
from quark_onnx.common.wording import counted
from quark_onnx.config import QConfig
from quark_onnx.dtypes import Integer
from quark_onnx.graph import Graph, Node
from quark_onnx.graph.node import DEQUANTIZE
from quark_onnx.patterns.norms import Norm, norms

#: First opset whose Sum broadcasts as Add does.
_SUM_OPSET = 8
#: Most axes of a constant that onnxruntime may add within a layer, as its bias. It would not
#: recognize a Sum.
_BIAS_AXES = 2


def unfuse_sums(graph: Graph, config: QConfig) -> list[str]:
    """Write each float Add that only a LayerNormalization reads as Sum, in place.

    Without the target ``cpu`` the result is portable, and keeps Add: a note says what the target
    would change. ``passes.sum_to_add`` is the reverse, for models that are quantized again.

    Args:
        graph: the quantized graph, without the bodies of its nodes.
        config: the settings of the run.

    Returns:
        Notes for the report.
    """
    takes = TARGETS[config.target].takes if config.target else None
    if graph.opset < _SUM_OPSET or not _is_for_onnxruntime(config):
        return []
    found = (_summed(graph, norm) for norm in norms(graph))
    additions = [addition for addition in found if addition is not None]
    if not additions:
        return []
    if takes is None:
        sums = counted(len(additions), "Add", "Adds")
        return [
            f"{sums} before a LayerNormalization: onnxruntime on the CPU fuses Add to a"
            " slower operator; --target cpu writes Sum instead"
        ]
    for addition in additions:
        addition.rename("Sum")
    sums = counted(len(additions), "Add is", "Adds are")
    return [
        f"{sums} written as Sum before a LayerNormalization: onnxruntime fuses Add to a"
        " slower operator"
    ]


def _is_for_onnxruntime(config: QConfig) -> bool:
    """Return whether the result is for onnxruntime's CPU, whose kernels have the activations."""
    takes = TARGETS[config.target].takes if config.target else None
    if config.portable or (config.target and (takes is None or not takes.sums)):
        return False
    spec = config.activation
    return spec is None or (isinstance(spec.dtype, Integer) and not spec.pow2)


def _summed(graph: Graph, norm: Norm) -> Node | None:
    """Return the Add whose only reader is the normalization; None without such an Add."""
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
    dequantize = graph.producer_of_type(name, DEQUANTIZE)
    stored = name if dequantize is None else dequantize.input(0)
    return graph.is_constant(stored) and len(graph.sizes(stored)) <= _BIAS_AXES
