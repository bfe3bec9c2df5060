"""The local error of a scale: the error in the layers that read the rounded tensor.

One session runs the float model and, for every scale in question, a second copy of the layers
after the tensor. The copy reads rounded values and ends where the next tensors are rounded, where
values decide a shape, which may then differ from that of the float model, and before a sequence or
a map. A single pass over the samples thus judges every scale, at a cost linear in the number of
layers. Unlike the error of the tensor itself, the local error gives little weight to rounding that
a layer averages out, and much weight to clipping that accumulates.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto, NodeProto, TensorProto, helper

from calibrators.onnx_runtime.interrupt import AT_ONCE, Lanes
from calibrators.onnx_runtime.session import open_session, outputs_of
from quark_onnx.graph import Graph, Node
from quark_onnx.graph.node import QUANTIZE, kinds_of
from quark_onnx.graph.shapes import ir_version_for, untyped
from quark_onnx.patterns.conv_and_gemm import LAYERS
from quark_onnx.plan import Plan, Use
from quark_onnx.running.run import Sample
from quark_onnx.scales.compute_qparams import Params
from quark_onnx.writing.insert import insert_live

#: A scale of a use, as a number of steps from its start.
Step = tuple[Use, int]

# A signal of zero gives a large finite ratio instead of a division by zero.
_LEAST_SIGNAL = 1e-30
# Types of results with an error; a type that shape inference leaves open counts as float.
_FLOAT = (TensorProto.FLOAT, TensorProto.UNDEFINED)


@dataclass(frozen=True)
class _Window:
    """The nodes between the rounding of a tensor and the next rounding or selection of values.

    Attributes:
        scale: name of the scale, an input of the graph.
        nodes: the nodes in order, the Q/DQ pair first.
        results: outputs of the nodes that are read elsewhere.
    """

    scale: str
    nodes: list[Node]
    results: list[str]


class LocalErrors:
    """Errors of scales in the results of layers with rounded inputs."""

    def __init__(
        self,
        graph: Graph,
        plan: Plan,
        params: Params,
        uses: Sequence[Use],
        samples: Sequence[Sample],
    ) -> None:
        """Insert the pairs, and find the layers that read each rounded tensor.

        Args:
            graph: the float graph.
            plan: the decisions about its tensors.
            params: the scales.
            uses: the uses whose scales may be judged.
            samples: the samples to measure on.
        """
        self._graph, self._samples, self._shapes = graph, samples, plan.shapes
        self._live, names = insert_live(graph, plan, params, uses)
        self._live.infer()
        self._float_nodes = {node.name: node for node in graph.nodes}
        self._positions = {node: index for index, node in enumerate(self._live.nodes)}
        # A use without a name has no live scale: insertion wrote no pair for it.
        windows = {use: self._window(names[use]) for use in uses if names[use]}
        self._windows = {
            use: window for use, window in windows.items() if window.results
        }

    @property
    def uses(self) -> list[Use]:
        """The uses whose scales can be judged."""
        return list(self._windows)

    def has_layer(self, use: Use) -> bool:
        """Return whether a layer with weights reads a rounded tensor before the next rounding.

        Such a layer sums products, in which rounding averages out and clipping accumulates; and its
        errors are costly to measure.
        """
        return not LAYERS.isdisjoint(kinds_of(self._windows[use].nodes))

    def measure(
        self, scales: Mapping[Step, NDArray[np.float32]]
    ) -> dict[Step, NDArray[np.float64]]:
        """Return noise over signal per scale, summed over the results of a window.

        A non-finite result is ignored.

        Args:
            scales: the scales to judge.

        Returns:
            By scale, an array of shape (samples,).
        """
        model, errors = self._model(list(scales))
        # With two or three copies of every node, onnxruntime's optimizations take longer than
        # they save on a few samples.
        session = open_session(
            model,
            threads=1,
            optimize=False,
            what="the float model with roundings next to it",
        )
        outputs = [value.name for value in model.graph.output]
        scale_inputs = {
            _scale_name(number): scale for number, scale in enumerate(scales.values())
        }

        def run(sample: Sample) -> dict[str, Any]:
            # Scales are inputs, so that all steps and samples run in one session.
            return outputs_of(session, {**sample, **scale_inputs}, outputs)

        ratios: dict[Step, list[float]] = {step: [] for step in scales}
        with Lanes(AT_ONCE) as lanes:
            # Runs of one session may overlap; results come in the order of the samples.
            runs = list(lanes.in_order(run, self._samples))
        for values in runs:
            # Sums of squares are float32, and may overflow for large tensors; their ratio is then
            # dropped.
            for step, pairs in errors.items():
                shares = [
                    float(values[noise]) / max(float(values[signal]), _LEAST_SIGNAL)
                    for noise, signal in pairs
                ]
                ratios[step].append(
                    sum(share for share in shares if np.isfinite(share))
                )
        return {step: np.array(shares) for step, shares in ratios.items()}

    def _window(self, scale: str) -> _Window:
        """Return the nodes that read a rounded tensor, up to the next rounding or selection.

        Args:
            scale: name of the live scale of the tensor.
        """
        live = self._live
        pair = live.consumers(scale)
        inside, results, todo = dict.fromkeys(pair), dict[str, None](), list(pair)
        while todo:
            for tensor in todo.pop().outputs:
                if live.is_output(tensor):
                    results[tensor] = None
                for reader in live.consumers(tensor):
                    if reader in inside:
                        continue
                    if self._ends(reader, tensor):
                        results[tensor] = None
                        continue
                    inside[reader] = None
                    todo.append(reader)
        # The search is depth-first; copied nodes must be in topological order.
        ordered = sorted(inside, key=self._positions.__getitem__)
        return _Window(
            scale, ordered, [name for name in results if live.elem_type(name) in _FLOAT]
        )

    def _ends(self, reader: Node, tensor: str) -> bool:
        """Return whether a window ends before a reader of a tensor.

        Args:
            reader: the node, which does not round the tensor of the window.
        """
        # Bodies are not reached by copies of nodes.
        if reader.op_type in QUANTIZE or tensor in reader.captures:
            return True
        results = list(filter(None, reader.outputs))
        # Sequences and maps have no difference.
        if not all(map(self._live.is_tensor, results)):
            return True
        # Rounded values select another number of values, whose difference from the float ones is
        # not defined.
        return any(
            self._shapes.sized_by_data(self._float_name(result)) for result in results
        )

    def _float_name(self, tensor: str) -> str:
        """Return the float graph's name of a tensor of the live graph."""
        producer = self._live.producer(tensor)
        while producer is not None:
            original = self._float_nodes.get(producer.name)
            if original is not None:
                return original.outputs[producer.outputs.index(tensor)]
            # Nodes that insertion added (Q, DQ, Min, Max, Reshape) pass their first input on.
            tensor = producer.inputs[0]
            producer = self._live.producer(tensor)
        return tensor

    def _model(
        self, steps: Sequence[Step]
    ) -> tuple[ModelProto, dict[Step, list[tuple[str, str]]]]:
        """Return the float model with a copy of the window for every step.

        Args:
            steps: uses and numbers of steps; the scale of step number n is the input with number n.

        Returns:
            The model, and the names of noise and signal of every result.
        """
        model = self._live.shell()
        graph = model.graph
        graph.name = "local_errors"
        graph.node.extend(node.to_proto() for node in self._graph.nodes)
        graph.input.extend(self._graph.inputs)
        errors: dict[Step, list[tuple[str, str]]] = {}
        signals: dict[str, str] = {}
        for number, step in enumerate(steps):
            use, _ = step
            window, prefix = self._windows[use], f"{_PREFIX}{number}/"
            # Scales are scalars or vectors of known length.
            shape = [
                size for size in self._live.sizes(window.scale) if isinstance(size, int)
            ]
            name = _scale_name(number)
            graph.input.append(
                helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)
            )
            graph.node.extend(self._copies(window, prefix, number))
            errors[step] = []
            for result in window.results:
                reference = self._float_name(result)
                signal = f"{_PREFIX}signal/{reference}"
                # The signal of a tensor is the same for all steps, and is computed once.
                if reference not in signals:
                    signals[reference] = signal
                    graph.node.append(_squares(reference, signal))
                difference = f"{prefix}difference/{result}"
                noise = f"{prefix}noise/{result}"
                graph.node.append(
                    helper.make_node(
                        "Sub", [prefix + result, reference], [difference], difference
                    )
                )
                graph.node.append(_squares(difference, noise))
                errors[step].append((noise, signal))
        noises = [noise for pairs in errors.values() for noise, _ in pairs]
        graph.output.extend(untyped([*noises, *signals.values()]))
        self._give_constants(model)
        return model, errors

    def _copies(self, window: _Window, prefix: str, number: int) -> list[NodeProto]:
        """Return the nodes of a window under new names.

        Inputs from outside the window are read from the float model.

        Args:
            prefix: prefix of the names of nodes and results, distinct for each copy.
            number: number of the step, which decides the name of the scale.
        """
        computed = {output for node in window.nodes for output in node.outputs}
        copies = list[NodeProto]()
        for node in window.nodes:
            proto = node.to_proto()
            original = self._float_nodes.get(node.name)
            if original:
                # By position: a pair may have changed the names of the inputs in the live graph.
                float_inputs = original.inputs
            else:
                float_inputs = tuple(self._float_name(name) for name in node.inputs)
            for index, name in enumerate(node.inputs):
                if name == window.scale:
                    proto.input[index] = _scale_name(number)
                elif name in computed:
                    proto.input[index] = prefix + name
                else:
                    proto.input[index] = float_inputs[index]
            for index, name in enumerate(node.outputs):
                proto.output[index] = prefix + name if name else ""
            proto.name = prefix + node.name
            copies.append(proto)
        return copies

    def _give_constants(self, model: ModelProto) -> None:
        """Add the nodes' initializers, preferring the float graph's.

        Args:
            model: the model with all nodes; changed in place.
        """
        constants = {**self._live.initializers, **self._graph.initializers}
        read = dict.fromkeys(
            name
            for node in self._graph.nodes
            for name in (*node.inputs, *node.captures)
        )
        read |= dict.fromkeys(name for node in model.graph.node for name in node.input)
        model.graph.initializer.extend(
            constants[name] for name in read if name in constants
        )
        model.ir_version = ir_version_for(model)


_PREFIX = "local_errors/"


def _scale_name(number: int) -> str:
    return f"{_PREFIX}{number}/scale"


def _squares(tensor: str, result: str) -> NodeProto:
    return helper.make_node("ReduceSumSquare", [tensor], [result], result, keepdims=0)
