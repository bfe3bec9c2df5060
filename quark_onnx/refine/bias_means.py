"""Bias correction: subtract the mean output error that weight rounding causes.

Nagel et al. 2019, "Data-Free Quantization Through Weight Equalization and Bias Correction",
section 4.2, with means of real data. A weight with a single power-of-two scale is coarse for
channels with small values, and its rounding shifts the channels of the result. Unlike noise, a
shift does not average out over positions and samples.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import TensorProto

from calibrators.onnx_runtime.session import open_session, outputs_of
from quark_onnx.graph import Graph, Node
from quark_onnx.graph.shapes import untyped
from quark_onnx.patterns.conv_and_gemm import LAYERS, SPATIAL, Layer
from quark_onnx.plan import Plan
from quark_onnx.refine.layer_problems import LayerTask, places_in, rounded
from quark_onnx.running.run import Sample
from quark_onnx.scales.compute_qparams import Params

Doubles = NDArray[np.float64]
#: The input of a layer, and whether its channels are axis 1.
MeanKey = tuple[str, bool]
Means = dict[MeanKey, Doubles]

logger = logging.getLogger(__name__)


class InputMeans:
    """Channel means of the inputs of layers, as further outputs of a float graph.

    Attributes:
        graph: a copy of the float graph with the means among the outputs.
    """

    def __init__(
        self, graph: Graph, skipped: Callable[[str], bool] = lambda _: False
    ) -> None:
        """Add the means of every layer with a constant float32 weight.

        Args:
            graph: a float graph; not changed.
            skipped: returns whether a tensor gets no mean.
        """
        self.graph = graph.copy()
        self._names: dict[MeanKey, str] = {}
        # (channels,) for each key, by position of the sample.
        self._seen: dict[int, dict[MeanKey, Doubles]] = {}
        for node in graph.nodes:
            layer = Layer.of(graph, node) if node.kind in LAYERS else None
            # A weight that is no initializer is computed, and has no rounding error to correct.
            weight = None
            if layer:
                weight = graph.initializers.get(node.input(1))
            if layer is None or weight is None or weight.data_type != TensorProto.FLOAT:
                continue  # onnxruntime has no means of other types
            key = _key(node)
            # Layers that read one tensor share its means.
            if key not in self._names and not skipped(node.input(0)):
                groups, _, inputs = layer.shape(graph)[:3]
                self._names[key] = _add_mean(self.graph, *key, groups * inputs)
        self.graph.outputs += untyped(self.names)

    @property
    def names(self) -> list[str]:
        """The names of the means."""
        return list(self._names.values())

    def observe(self, position: int, outputs: Mapping[str, Any]) -> None:
        """Receive the outputs of ``graph`` on a sample.

        Args:
            position: position of the sample.
            outputs: outputs by name.
        """
        self._seen[position] = {
            key: _channel_mean(outputs[name]) for key, name in self._names.items()
        }

    def over(self, count: int) -> Means:
        """Return the means over the first samples; empty if one was not observed.

        Args:
            count: number of leading samples.

        Returns:
            (channels,) for each layer input, all samples weighted equally.
        """
        # A mean over other samples would be that of other data.
        if not self._seen.keys() >= set(range(count)):
            return {}
        # Samples weigh equally, whatever their number of rows.
        totals: Means = {}
        for position in range(count):
            for key, mean in self._seen[position].items():
                totals[key] = totals.get(key, 0.0) + mean / count
        return totals


def _key(node: Node) -> MeanKey:
    """Return the input of a layer, and whether its channels are axis 1."""
    return node.input(0), node.kind in SPATIAL


def _channel_mean(value: NDArray[Any]) -> Doubles:
    """Return the mean over the batch of channel means, (channels,).

    Args:
        value: (batch, channels, 1, ...), as ``_add_mean`` computes it.
    """
    # (batch, channels, 1, ...) to (channels,).
    mean: Doubles = value.reshape(*value.shape[:2]).mean(axis=0, dtype=np.float64)
    return mean


def correct_biases(  # noqa: PLR0913
    graph: Graph,
    plan: Plan,
    params: Params,
    samples: Sequence[Sample],
    optimizers: Sequence[Any] = (),
    known: Means | None = None,
) -> Graph:
    """Return a copy of the graph with biases that compensate the rounding of weights.

    Layers without a constant bias of their own are skipped. The graph itself is returned
    without samples, or if a layer optimizer will choose the biases.

    Args:
        graph: the float graph.
        plan: the decisions about its tensors.
        params: the scales of the weights.
        samples: samples for the input means of the layers.
        optimizers: optimizers of the run.
        known: input means over the samples; the float model is run if a layer's are missing.
    """
    # A layer optimizer starts from the float bias, and would correct a correction.
    if not samples or any(optimizer.stage == "layer" for optimizer in optimizers):
        return graph
    places = [place for place in places_in(graph, plan, params)[0] if place.bias]
    if not places:
        return graph
    try:
        means = _means_of(graph, places, samples, known or {})
    except Exception as error:
        # onnxruntime raises several unrelated types; uncorrected biases are valid, too
        logger.warning(
            "the biases are not corrected, the model does not run with means of its"
            " tensors: %s",
            error,
        )
        return graph
    corrected = graph.copy()
    for place in places:
        mean = means.get(_key(place.node))
        if mean is None:
            continue
        shift = _shift(graph, plan, params, place, mean)
        bias = graph.constant(place.bias)
        assert bias is not None
        # A sample with infinite values in the input of a layer has no mean; its bias stays.
        if np.isfinite(shift).all():
            corrected.set_constant(
                place.bias, (bias - shift.reshape(bias.shape)).astype(np.float32)
            )
    return corrected


def _shift(
    graph: Graph, plan: Plan, params: Params, place: LayerTask, mean: Doubles
) -> Doubles:
    """Return the mean error of each output.

    Windows across the border are treated as interior windows.

    Args:
        params: the scales of the weights.
        mean: mean of each input channel, (channels,).

    Returns:
        (groups, outputs): the mean output with the rounded weight, less that with the float one.
    """
    stored = graph.constant(place.weight)
    assert stored is not None
    # (groups, outputs, inputs, kernel...).
    error = place.layer.arranged(rounded(graph, plan, params, place.use) - stored)
    groups, outputs, inputs = error.shape[:3]
    # The input of a layer has one mean per channel, so that the taps of a kernel add up.
    rounding = error.reshape(groups, outputs, inputs, -1).sum(axis=3)
    shift: Doubles = np.einsum(
        "goi,gi->go", rounding.astype(np.float64), mean.reshape(groups, inputs)
    )
    return shift


def _means_of(
    graph: Graph, places: Sequence[LayerTask], samples: Sequence[Sample], known: Means
) -> Means:
    """Return channel means of the inputs of layers, known or by a run of the float model.

    Args:
        known: means over these samples, returned if they include every layer; empty for none.
    """
    tensors = {place.node.input(0) for place in places}
    if all(_key(place.node) in known for place in places):
        return known
    means = InputMeans(graph, lambda tensor: tensor not in tensors)
    model = means.graph.to_model()
    names = means.names
    del model.graph.output[:]
    model.graph.output.extend(untyped(names))
    session = open_session(
        model, threads=1, what="the float model with means of its tensors"
    )
    for position, sample in enumerate(samples):
        means.observe(position, outputs_of(session, sample, names))
    return means.over(len(samples))


def _add_mean(graph: Graph, tensor: str, spatial: bool, channels: int) -> str:
    """Add nodes that compute the channel means, (batch, channels, 1, ...).

    Args:
        graph: the graph; changed in place.
        spatial: the channels are axis 1; otherwise they are the last axis.

    Returns:
        The name of the result. Rows of a matrix count as positions of one batch element.
    """
    if not spatial:
        # A matrix of any rank as (1, rows, channels), and then (1, channels, rows).
        shape = graph.add_constant(
            f"{tensor}_rows", np.array([1, -1, channels], np.int64)
        )
        rows = graph.fresh(f"{tensor}_as_rows")
        columns = graph.fresh(f"{tensor}_as_columns")
        graph.add("Reshape", [tensor, shape], [rows])
        graph.add("Transpose", [rows], [columns], perm=[0, 2, 1])
        tensor = columns
    # GlobalAveragePool averages over the spatial axes, where the rows of a matrix are now.
    result = graph.fresh(f"{tensor}_mean")
    graph.add("GlobalAveragePool", [tensor], [result])
    return result
