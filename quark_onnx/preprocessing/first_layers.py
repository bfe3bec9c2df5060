"""Statistics of the first convolutions on data, compared with training statistics."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import GraphProto, ModelProto, TensorProto, helper

from calibrators.onnx_runtime.external_tensors import values
from calibrators.onnx_runtime.session import open_session, outputs_of
from quark_onnx.graph import constants_of
from quark_onnx.graph.node import makers_of
from quark_onnx.graph.traversal import reach

Feeds = Mapping[str, NDArray[Any]]
Floats = NDArray[np.float64]

#: Mean and variance of each channel, layer by layer.
Responses = list[tuple[Floats, Floats]]

#: Maximum number of first convolutions.
_LAYERS = 3
#: Minimum number of layers with a bias that tell the size of the inputs on their own.
_ENOUGH_LAYERS = 2
#: Normalizations that make up for inputs of any size, and operators that may stand before them.
_NORMALIZING = frozenset(
    {"InstanceNormalization", "GroupNormalization", "LayerNormalization", "GroupNorm"}
)
_REARRANGING = frozenset({"Reshape", "Transpose"})
#: Operators by which a model scales its input itself.
_OWN_SCALING = frozenset(
    {"Mul", "Add", "Sub", "Div", "BatchNormalization", "Transpose", "Identity", "Cast"}
)
#: Ratio of responses to biases for too large inputs (minimum), and for fitting inputs (maximum).
_TOO_LARGE, _FITS = 20.0, 8.0
#: Distance in octaves beyond which a scaling is farther from the biases than another one, and
#: beyond which the biases speak against it: inputs of 0 to 1 and of 0 to 255 are 8 octaves apart,
#: common scalings of either size at most 3.
_FARTHER, _MUCH_FARTHER = 0.5, 3.5
#: Deviation of means in running standard deviations, and ratio of variances, beyond which the
#: data differ from training data.
_OTHER_MEAN, _OTHER_VARIANCE = 1.0, 4.0
#: Distance in standard deviations and nats by which another scaling has to be nearer to the
#: statistics of the training, and beyond which no data that the model was meant for are.
_NEARER, _FAR = 0.7, 4.0


@dataclass(frozen=True)
class _Layer:
    """A convolution with output, bias and BatchNormalization's running statistics."""

    output: str
    bias: Floats | None
    mean: Floats | None
    variance: Floats | None


class FirstLayers:
    """The first convolutions of a model, run separately."""

    def __init__(self, model: ModelProto) -> None:
        """Extract the first convolutions, without changing the model."""
        self._layers = _first(model)
        self._session: Any = None
        if self._layers:
            self._session = open_session(
                _cut(model, [layer.output for layer in self._layers]),
                what="a first layer",
            )

    def __bool__(self) -> bool:
        return bool(self._layers)

    def responses(self, feeds: Sequence[Feeds]) -> Responses:
        """Return the mean and the variance of every channel, (channels,) each, per layer.

        Args:
            feeds: the samples, at least one; only the inputs that the first layers read are used.
        """
        if not self._layers:
            return []
        outputs = [layer.output for layer in self._layers]
        moments: list[list[Floats]] = []
        for feed in feeds:
            arrays = outputs_of(self._session, feed, outputs)
            moments.append([_moments(array) for array in arrays.values()])
        # (3, channels) for each layer: sums over the samples, which may have different numbers of
        # rows.
        totals = [sum(of_layer) for of_layer in zip(*moments, strict=True)]
        responses = []
        for count, values_sum, squares_sum in totals:
            mean = values_sum / count
            # Rounding can make a variance of 0 slightly negative.
            variance = np.maximum(squares_sum / count - mean * mean, 0)
            responses.append((mean, variance))
        return responses

    def ratios(self, responses: Responses) -> list[float]:
        """Return the median ratio of standard deviation to bias, per layer with a bias.

        The ratio is about 1 if BatchNormalization was folded into the layer and the inputs have
        the training distribution. A constant that is added behind the layer is a bias, too.

        Args:
            responses: mean and variance by channel, for every first layer.

        Returns:
            A ratio per layer with a bias other than zero and without a normalization after it.
        """
        medians = []
        for layer, (_, variance) in zip(self._layers, responses, strict=True):
            if layer.bias is not None and layer.mean is None:
                # The floor keeps channels with a bias of 0 finite; the median ignores the few of
                # them.
                ratio = np.sqrt(variance) / np.maximum(np.abs(layer.bias), 1e-9)
                medians.append(float(np.median(ratio)))
        return medians

    def batch_norm_distance(self, responses: Responses) -> BatchNormDistance | None:
        """Return the distance of BatchNormalization's statistics from the data's.

        The first BatchNormalization of the model is compared.

        Args:
            responses: mean and variance by channel, for every first layer; empty for no layers.

        Returns:
            The medians over channels; None without a BatchNormalization.
        """
        for layer, (mean, variance) in zip(self._layers, responses, strict=True):
            if layer.mean is None or layer.variance is None:
                continue
            # Dead channels have a running variance of 0.
            running = np.maximum(layer.variance, 1e-12)
            deviation = np.abs(mean - layer.mean) / np.sqrt(running)
            # A logarithm, so that half and twice the variance are equally far.
            ratio = np.abs(np.log(np.maximum(variance, 1e-12) / running))
            return BatchNormDistance(
                float(np.median(deviation)), float(np.exp(np.median(ratio)))
            )
        return None


@dataclass(frozen=True)
class BatchNormDistance:
    """The distance of data from the training data of a BatchNormalization.

    Attributes:
        deviation: deviation of the mean in running standard deviations.
        ratio: ratio of the variances, at least 1.
    """

    deviation: float
    ratio: float

    @property
    def total(self) -> float:
        """Return both distances as one: standard deviations and nats are alike in size."""
        return self.deviation + float(np.log(self.ratio))

    @property
    def is_other_data(self) -> bool:
        """Return whether the data differ from the training data."""
        return self.deviation > _OTHER_MEAN or self.ratio > _OTHER_VARIANCE

    @property
    def is_far(self) -> bool:
        """Return whether no data that the model was meant for are as far away."""
        return self.total > _FAR

    def is_nearer_than(self, other: BatchNormDistance) -> bool:
        """Return whether the data are clearly nearer than other data."""
        return self.total + _NEARER < other.total


def scaled_by_model(
    model: ModelProto, name: str, feeds: Sequence[Feeds]
) -> list[NDArray[Any]]:
    """Return the pictures that the first convolution reads, if the model scales them itself.

    Args:
        model: the float model; not changed.
        name: the input with the pictures.
        feeds: the samples.

    Returns:
        (batch, channels, height, width) for each sample; empty if the first convolution reads the
        input itself, or something else than the input times and plus constants.
    """
    scaled = _scaled(model, name)
    if not scaled:
        return []
    session = open_session(_cut(model, [scaled]), what="the model's own scaling")
    return [outputs_of(session, feed, [scaled])[scaled] for feed in feeds]


def too_large(ratios: Sequence[float]) -> bool:
    """Return whether responses of every first layer far exceed the bias.

    Args:
        ratios: median ratios of standard deviation to bias; False for fewer than three layers.
    """
    # Fewer layers give too little evidence.
    return len(ratios) == _LAYERS and min(ratios) > _TOO_LARGE


def fits(ratios: Sequence[float]) -> bool:
    """Return whether the responses of the first layers fit training inputs.

    Args:
        ratios: median ratios of standard deviation to bias; False without any.
    """
    return bool(ratios) and max(ratios) < _FITS


def farther(ratios: Sequence[float], other: Sequence[float]) -> bool:
    """Return whether responses are farther from the biases than other responses.

    Args:
        ratios: ratios of standard deviation to bias, by layer.
        other: ratios of fitting responses.
    """
    return octaves(ratios) > octaves(other) + _FARTHER


def much_farther(ratios: Sequence[float], other: Sequence[float]) -> bool:
    """Return whether the biases alone speak for the inputs of other responses.

    Args:
        ratios: ratios of standard deviation to bias, by layer; False for a single layer.
        other: ratios with another scaling.
    """
    enough = len(ratios) >= _ENOUGH_LAYERS
    return enough and octaves(ratios) > octaves(other) + _MUCH_FARTHER


def octaves(ratios: Sequence[float]) -> float:
    """Return the mean distance of the ratios from 1, in octaves."""
    return float(np.abs(np.log2(np.maximum(ratios, 1e-9))).mean())


def _first(model: ModelProto) -> list[_Layer]:
    """Return the first convolutions with a constant weight, in the order of the file.

    Returns:
        At most three layers, with the running statistics of a BatchNormalization that reads their
        output; without a Conv, an empty list.
    """
    graph = model.graph
    tensors = constants_of(model)

    def constant(name: str) -> Floats | None:
        tensor = tensors.get(name)
        return None if tensor is None else values(tensor).astype(np.float64)

    # With 5 inputs, BatchNormalization has running statistics: mean and variance are inputs 3 and
    # 4.
    norms = {
        node.input[0]: node
        for node in graph.node
        if node.op_type == "BatchNormalization" and len(node.input) == 5
    }
    layers: list[_Layer] = []
    for node in graph.node:
        if node.op_type != "Conv" or node.input[1] not in tensors:
            continue
        # The names of a BatchNormalization's input link it to the convolution before it.
        output = node.output[0]
        norm = norms.get(output)
        bias = mean = variance = None
        if len(node.input) > 2:
            bias = constant(node.input[2])
        elif norm is None:
            channels = tensors[node.input[1]].dims[0]
            output, name = _added_constant(graph, tensors, output, channels)
            bias = constant(name)
        if norm is not None:
            mean = constant(norm.input[3])
            variance = constant(norm.input[4])
        # Such biases have no size that the inputs of the training gave them.
        if bias is not None and (
            not np.median(np.abs(bias)) or _is_normalized(graph, output)
        ):
            bias = None
        layers.append(_Layer(output, bias, mean, variance))
        if len(layers) == _LAYERS:
            break
    return layers


def _scaled(model: ModelProto, name: str) -> str:
    """Return the tensor that a convolution reads after the model's own scaling of an input.

    Args:
        name: the input.

    Returns:
        The tensor; empty without a scaling, or where anything else reads the input.
    """
    tensors = constants_of(model)
    while True:
        readers = [node for node in model.graph.node if name in node.input]
        if len(readers) != 1:
            return ""
        [reader] = readers
        if reader.op_type == "Conv":
            return "" if name in (value.name for value in model.graph.input) else name
        first, *others = reader.input
        # Sums and products are the same from either side; a quotient is not.
        if reader.op_type in ("Mul", "Add", "Sub") and others == [name]:
            first, others = name, [first]
        known = all(other in tensors for other in others)
        if reader.op_type not in _OWN_SCALING or first != name or not known:
            return ""
        name = reader.output[0]


def _is_normalized(graph: GraphProto, output: str) -> bool:
    """Return whether only a normalization of the data themselves reads an output."""
    name = output
    while True:
        readers = [
            node
            for node in graph.node
            if name in node.input and node.op_type != "Shape"
        ]
        if len(readers) != 1:
            return False
        [reader] = readers
        if reader.op_type in _NORMALIZING:
            return True
        if reader.op_type not in _REARRANGING:
            return False
        name = reader.output[0]


def _added_constant(
    graph: GraphProto, tensors: Mapping[str, TensorProto], output: str, channels: int
) -> tuple[str, str]:
    """Follow Mul and Add of constants: a bias, or a written-out BatchNormalization.

    Args:
        tensors: the constants of the graph.
        output: the output of a convolution.
        channels: its number of channels.

    Returns:
        The tensor that a constant by channel is added to, and the name of the constant; the output
        and an empty name without one.
    """
    name = output
    while True:
        readers = [node for node in graph.node if name in node.input]
        if len(readers) != 1 or readers[0].op_type not in ("Mul", "Add"):
            return output, ""
        [reader] = readers
        by_channel = [
            other
            for other in reader.input
            if other in tensors and np.prod(tensors[other].dims) == channels
        ]
        if not by_channel:
            return output, ""
        if reader.op_type == "Add":
            return name, by_channel[0]
        name = reader.output[0]


def _cut(model: ModelProto, outputs: Sequence[str]) -> ModelProto:
    """Return the part of a model up to tensors.

    Args:
        model: the float model; not changed.
        outputs: the tensors, which become the outputs of the part, in order.
    """
    makers = makers_of(model.graph.node)

    def before(name: str) -> Iterable[str]:
        return filter(None, makers[name].input) if name in makers else ()

    needed = reach(outputs, before)
    part = ModelProto()
    part.ir_version = model.ir_version
    part.opset_import.extend(model.opset_import)
    # Nodes before the first convolutions may call functions.
    part.functions.extend(model.functions)
    part.graph.name = "first_layers"
    part.graph.node.extend(
        node for node in model.graph.node if not needed.keys().isdisjoint(node.output)
    )
    stored = {tensor.name: tensor for tensor in model.graph.initializer}
    part.graph.initializer.extend(stored[name] for name in needed if name in stored)
    inputs = {value.name: value for value in model.graph.input}
    part.graph.input.extend(inputs[name] for name in needed if name in inputs)
    part.graph.output.extend(map(helper.make_empty_tensor_value_info, outputs))
    return part


def _moments(output: NDArray[Any]) -> Floats:
    """Return count, sum and sum of squares by channel, (3, channels).

    Args:
        output: output of a convolution, (batch, channels, ...).
    """
    # (batch, channels, positions).
    rows = output.reshape(*output.shape[:2], -1).astype(np.float32, copy=False)
    count = np.full(rows.shape[1], float(rows.shape[0] * rows.shape[2]))
    # Without an array of the squares, as large as the output.
    squares = np.einsum("nci,nci->c", rows, rows)
    return np.stack([count, rows.sum(axis=(0, 2), dtype=np.float64), squares])
