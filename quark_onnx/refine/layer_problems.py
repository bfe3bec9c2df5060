"""Layer-wise problems: a layer's codes to choose, its inputs and its target outputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import groupby, islice
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from quark_onnx.dtypes import Integer, Minifloat
from quark_onnx.graph import Graph, Node
from quark_onnx.graph.matching import only_use, other_input
from quark_onnx.kernels import im2col
from quark_onnx.kernels.im2col import Window
from quark_onnx.kernels.levels import Levels
from quark_onnx.kernels.parallel import side_by_side
from quark_onnx.optimizers.problem import Doubles, Floats, RoundingProblem, SampledRows
from quark_onnx.patterns.activation import activation_behind
from quark_onnx.patterns.conv_and_gemm import LAYERS, SPATIAL, Layer
from quark_onnx.plan import Plan, Quantize, Use
from quark_onnx.refine.calibration_rows import Mix, Room, finite
from quark_onnx.refine.layer_stream import LayerStream
from quark_onnx.refine.stored_activation import StoredActivation
from quark_onnx.scales.compute_qparams import Params

T = TypeVar("T", bound=np.generic)

#: Number of training rows per layer, and the limit of their size in bytes.
_ROWS, _BYTES = 8192, 1 << 27
#: Stride of held-out samples.
_EVERY = 8
#: Bytes of tensors and rows per batch: batches are cheaper for small samples.
_AT_ONCE = 1 << 22
#: Rows per matrix product.
_SLAB = 4096


@dataclass(frozen=True)
class LayerTask:
    """A layer of the graph that can be optimized.

    Attributes:
        layer: the operator and the storage of its weight.
        use: the use of its weight's scale.
        result: the output tensor, after the addition of a bias.
        bias: name of the constant bias; empty without a bias that may change.
        offset: the added values, one per output.
        bias_use: the use of the bias scale, if it differs from the scale of the products.
    """

    layer: Layer
    use: Use
    result: str
    bias: str
    offset: Doubles
    bias_use: Use | None = None

    @property
    def node(self) -> Node:
        return self.layer.node

    @property
    def weight(self) -> str:
        return self.node.input(1)


def places_in(
    graph: Graph, plan: Plan, params: Params
) -> tuple[list[LayerTask], list[str]]:
    """Return the optimizable layers in graph order, and reasons for skipped layers.

    Args:
        graph: the float graph.
        plan: the plan of the graph.
        params: the scales of the weights.

    Returns:
        The layers with codes to choose, and for each other layer with a quantized weight a text
        with the node and the reason.
    """
    tasks, skipped = list[LayerTask](), list[str]()
    for node in graph.nodes:
        if node.kind not in LAYERS or not graph.is_constant(node.input(1)):
            continue
        if not isinstance(plan.entry(plan.use(node.input(1), node)), Quantize):
            continue
        layer = Layer.of(graph, node)
        if layer:
            task = _task(graph, plan, params, layer)
        else:
            task = "its weight or its attributes are of another kind"
        if isinstance(task, LayerTask):
            tasks.append(task)
        else:
            skipped.append(f"{node.name} ({node.op_type}): {task}")
    return tasks, skipped


def _task(graph: Graph, plan: Plan, params: Params, layer: Layer) -> LayerTask | str:
    """Return the task of optimizing a layer, or the reason to skip the layer.

    Args:
        params: the scales of weights and biases.
        layer: a layer with a constant, quantized weight.
    """
    node = layer.node
    use = plan.root(plan.use(node.input(1), node))
    entry = plan.entries[use]
    # Codes chosen for one layer would harm the other readers.
    if len(graph.consumers(node.input(1))) > 1 or graph.is_output(node.input(1)):
        return "others read its weight too"
    if (
        use not in params.table
        # A weight that shares the scale of another tensor cannot change by itself.
        or use.tensor != node.input(1)
        or not isinstance(entry, Quantize)
        or not isinstance(entry.spec.dtype, Integer | Minifloat)
    ):
        return "its format has no scale of its own"
    offset = layer.bias(graph)
    if offset is None:
        return "what is added to it is no constant vector"
    # The bias of a MatMul is an Add behind it.
    bias, adder = (node.input(2), node) if node.kind != "MatMul" else ("", node)
    if node.kind == "MatMul" and (added := _added(graph, node, offset.size)):
        bias, adder = added
        value = graph.constant(bias)
        assert value is not None
        offset = value.reshape(-1).astype(np.float64)
    result = adder.outputs[0]
    if not bias:
        return LayerTask(layer, use, result, "", offset)
    bias_use = plan.root(plan.use(bias, adder))
    is_rounded = isinstance(plan.entries.get(bias_use), Quantize)
    has_scale = is_rounded and bias_use.tensor == bias and bias_use in params.table
    # A shared bias must stay as it is; a rounded one needs a scale of its own to be rounded by.
    alone = len(graph.consumers(bias)) == 1 and not graph.is_output(bias)
    free = alone and (has_scale or not is_rounded)
    return LayerTask(
        layer,
        use,
        result,
        bias if free else "",
        offset,
        bias_use if has_scale else None,
    )


def _added(graph: Graph, node: Node, outputs: int) -> tuple[str, Node] | None:
    """Return the constant vector added to a product, and the addition.

    Args:
        outputs: number of outputs of the product, the length of the vector.

    Returns:
        The name of the vector, and the Add; None unless the addition is the only consumer.
    """
    result = node.outputs[0]
    addition = only_use(graph, result, "Add")
    if addition is None:
        return None
    summand = other_input(addition, result)
    value = graph.constant(summand)
    # (1, outputs) is a vector, too; (outputs, 1) would be added along another axis.
    if value is None or value.size != outputs or value.shape[-1:] != (outputs,):
        return None
    return summand, addition


def summand_of(graph: Graph, place: LayerTask) -> tuple[Node, int] | None:
    """Return the addition after a layer, and the input index of the other summand.

    None unless the addition is the layer's only consumer, and its summand is no constant.
    """
    readers = graph.consumers(place.result)
    if (
        len(readers) != 1
        or readers[0].kind != "Add"
        or graph.is_output(place.result)
        or graph.captured(place.result)
    ):
        return None
    [addition] = readers
    summands = [
        index for index, name in enumerate(addition.inputs) if name != place.result
    ]
    # No other summand: the result is added to itself.
    if len(summands) != 1 or graph.is_constant(addition.inputs[summands[0]]):
        return None
    return addition, summands[0]


def lattice_of(graph: Graph, plan: Plan, params: Params, place: LayerTask) -> Levels:
    """Return the representable weights of a layer, (groups, outputs, inputs)."""
    return _lattice(
        graph, plan, params, place.use, lambda array: flat(place.layer.arranged(array))
    )


def bias_lattice_of(
    graph: Graph, plan: Plan, params: Params, place: LayerTask
) -> Levels | None:
    """Return the representable biases, (groups, outputs); None for any value.

    Args:
        graph: the float graph.
        plan: the plan of the graph.
        params: the scales of weights and biases.
        place: the layer; without a ``bias_use`` every bias is representable.
    """
    if place.bias_use is None:
        return None
    groups = place.layer.groups
    return _lattice(
        graph, plan, params, place.bias_use, lambda array: array.reshape(groups, -1)
    )


def _lattice(
    graph: Graph,
    plan: Plan,
    params: Params,
    use: Use,
    arranged: Callable[[NDArray[Any]], NDArray[Any]],
) -> Levels:
    """Return the representable values of a constant.

    Args:
        use: the use of the constant, with parameters of its own.
        arranged: converts an array from the shape of the stored constant to that of the result.

    Returns:
        Scales and ends of the codes, in the shape that ``arranged`` returns.
    """
    entry = plan.entries[use]
    assert isinstance(entry, Quantize)
    stored = graph.constant(use.tensor)
    assert stored is not None
    # A scale and a zero point for every weight, in the layout of the stored tensor.
    spread = entry.spread(params.table[use], stored.shape)
    scale, zero = (np.broadcast_to(array, stored.shape) for array in spread)
    steps = arranged(np.ascontiguousarray(scale, np.float32))
    return _levels(entry, steps, arranged(np.ascontiguousarray(zero)))


def rounded(graph: Graph, plan: Plan, params: Params, use: Use) -> NDArray[np.float32]:
    """Return a constant with every value rounded to a representable one.

    Args:
        graph: the float graph.
        plan: the plan of the graph.
        params: the scales.
        use: the use of the constant, with parameters of its own.
    """
    entry = plan.entries[use]
    assert isinstance(entry, Quantize)
    stored = graph.constant(use.tensor)
    assert stored is not None
    # Not one for every weight: scales broadcast.
    scale, zero = entry.spread(params.table[use], stored.shape)
    return _levels(entry, scale, zero).nearest(stored)


def _levels(entry: Quantize, scale: NDArray[Any], zero: NDArray[Any]) -> Levels:
    """Return the representable values of a planned constant.

    Args:
        zero: the zero points, in the shape of the scales.
    """
    zeros = zero.astype(np.float32)
    if isinstance(entry.spec.dtype, Minifloat):
        return Levels(scale, entry.spec.dtype.levels, zeros, zeros)
    # Levels are codes minus zero point, so that a level times the scale is the value.
    grid = entry.spec.grid
    return Levels(scale, np.zeros(0, np.float32), grid.qmin - zeros, grid.qmax - zeros)


def scalable(plan: Plan, params: Params, place: LayerTask) -> bool:
    """Return whether a layer has per-channel float scales.

    Args:
        plan: the plan of the graph.
        params: the scales of the weights.
        place: the layer. A scale per output is required, stored in float32.
    """
    entry, qparams = plan.entries[place.use], params.table[place.use]
    if (
        not isinstance(entry, Quantize)
        or qparams.axis is None
        or qparams.block_size
        or entry.spec.pow2
    ):
        return False
    return entry.spec.scale == "float32" and qparams.scale.size == place.offset.size


def flat(array: NDArray[Any]) -> NDArray[Any]:
    """Return a weight as (groups, outputs, inputs), with inputs flattened."""
    return array.reshape(*array.shape[:2], -1)


@dataclass(frozen=True)
class RowCollector:
    """A collector of a layer's rows: quantized inputs and float target outputs.

    Attributes:
        source: the layer's input in the quantized model.
        rooms: buffers for training and held-out rows, reused by the next layer.
        beside: the other summand of the layer's result, in the float and in the quantized
            model. The layer should compensate the summand's error, because later layers read
            the sum. None to ignore the summand.
    """

    place: LayerTask
    source: StoredActivation
    floating: LayerStream
    quantized: LayerStream
    rooms: tuple[Room, Room]
    beside: tuple[str, StoredActivation] | None = None

    def problem(
        self, lattice: Levels, bias_lattice: Levels | None, scalable: bool, seed: int
    ) -> RoundingProblem:
        """Return the problem of the layer.

        Args:
            lattice: the representable weights, (groups, outputs, inputs).
            bias_lattice: the representable biases, (groups, outputs); None for any value.
            scalable: the scales may be multiplied, see ``scalable``.
            seed: seed of the sampled positions and of the optimizer's random numbers.

        Returns:
            The problem; its rows are in the buffers ``rooms``, and valid until the next call.

        Raises:
            IndexError, ValueError: the input in the quantized model does not fit the layer's result
                in the float model.
        """
        graph = self.floating.graph
        weight = flat(self.place.layer.weight(graph))
        groups = self.place.layer.groups
        offset = self.place.offset.reshape(groups, -1)
        train, held = self._rows(weight.shape[2] + weight.shape[1], groups, seed)
        return RoundingProblem(
            name=self.place.node.name,
            weight=weight,
            bias=offset,
            lattice=lattice,
            biased=bool(self.place.bias),
            activation=activation_behind(graph, self.place.result),
            train=train,
            held=held,
            # Computed on demand: few optimizers read means or Hessians, which take a pass over the
            # samples.
            mean=cache(lambda: self._mean(groups)),
            gram=lambda: self._gram(range(len(self.quantized))),
            learned=lambda: self._gram(self._parts[0]),
            seed=seed,
            bias_lattice=bias_lattice,
            scalable=scalable,
        )

    @property
    def _parts(self) -> tuple[list[int], list[int]]:
        """Return the training and the held-out samples; equal for a single sample."""
        count = len(self.quantized)
        # Fewer than 8 samples: the last one is held out.
        held = list(range(_EVERY - 1, count, _EVERY)) or [count - 1]
        return [index for index in range(count) if index not in held] or held, held

    def _rows(
        self, width: int, groups: int, seed: int
    ) -> tuple[SampledRows, SampledRows]:
        """Return training and held-out rows.

        Args:
            width: number of values of a row, inputs and targets together.
            seed: seed of the sampled positions.
        """
        trained, held = self._parts
        # 4 bytes a value; rows of wide layers are fewer, but never fewer than 256.
        most = max(256, min(_ROWS, _BYTES // (4 * width * groups)))
        train = self._taken(trained, most, seed, self.rooms[0])
        if trained == held:  # there is a single sample
            # Rows of the only sample are in random order, so that a part of them can be held out.
            cut = max(1, len(train) // _EVERY)
            return (
                SampledRows(train.inputs[:, cut:], train.targets[:, cut:]),
                SampledRows(train.inputs[:, :cut], train.targets[:, :cut]),
            )
        return train, self._taken(held, most // 4, seed + 1, self.rooms[1])

    def _taken(
        self, which: Sequence[int], most: int, seed: int, room: Room
    ) -> SampledRows:
        """Return rows of samples, at random positions.

        Every ``len(which)`` consecutive rows hold one row per sample.

        Args:
            which: indices of the samples.
            most: wanted number of rows over all samples; fewer if the samples have fewer.
            room: the buffer of the rows.
        """
        shapes = self.floating.shapes(self.place.result)
        most_places = max(
            im2col.count_places(shapes[index], spatial=self._spatial) for index in which
        )
        # Rounded up, so that at least ``most`` rows are taken where the samples have them.
        rows_per_sample = min(-(-most // len(which)), most_places)
        shape = flat(self.place.layer.weight(self.floating.graph)).shape
        rows = Mix(shape, len(which), rows_per_sample, room)
        width = shape[0] * (shape[1] + shape[2])
        # Sequential: parallel threads would only wait for each other.
        for start, run in self._runs(which, 4 * width * rows_per_sample):
            # Seeds of a layer (10007 is prime) and a sample: positions do not depend on the
            # batches.
            seeds = [seed * 10007 + index for index in which[start : start + len(run)]]
            count = im2col.count_places(run[0][1].shape, spatial=self._spatial)
            places = im2col.places_of(count, rows_per_sample, seeds)
            rows.put(start, *self._of(run, places))
        return rows.mixed()

    def _runs(
        self, which: Sequence[int], size: int
    ) -> Iterator[tuple[int, list[tuple[NDArray[Any], ...]]]]:
        """Yield runs of consecutive samples with equal shapes, with their start.

        A run holds the layer's inputs and target outputs, and the float and quantized summand.

        Args:
            size: bytes of a sample's rows.

        Yields:
            The position in ``which`` of the first sample, and a tuple of tensors per sample.
        """
        sources = [
            (self.quantized, self.source.name),
            (self.floating, self.place.result),
        ]
        if self.beside is not None:
            sources += [
                (self.floating, self.beside[0]),
                (self.quantized, self.beside[1].name),
            ]
        # Values are read from memory or files as batches are formed.
        samples = zip(
            *(walk.values(name, which) for walk, name in sources), strict=True
        )
        start = 0
        for _, alike in groupby(
            samples, lambda tensors: [tensor.shape for tensor in tensors]
        ):
            for run in _together(alike, size):
                yield start, run
                start += len(run)

    @property
    def _spatial(self) -> bool:
        return self.place.node.kind in SPATIAL

    def _of(
        self, run: list[tuple[NDArray[Any], ...]], places: NDArray[np.int64]
    ) -> tuple[Floats, Floats]:
        """Return rows of inputs and targets at sampled positions.

        Args:
            run: tensors of every sample, as from ``_runs``.
            places: positions of the output, (samples, rows).

        Returns:
            Dequantized inputs, (samples, groups, rows, inputs), and target outputs, (samples,
            groups, rows, outputs), which compensate the error of the other summand if there is one.
        """
        # From tensors per sample to samples per tensor.
        xs, ys, *summands = (
            [tensors[index] for tensors in run] for index in range(len(run[0]))
        )
        if self._spatial:
            inputs = self._windowed(xs, places, ys[0].shape[2:])
        else:
            inputs = im2col.rows_at(xs, places)
        targets = self._results(ys, places)
        if self.beside is not None and all(
            summand[0].shape == ys[0].shape for summand in summands
        ):
            floating, quantized = (
                self._results(summand, places) for summand in summands
            )
            # The error of the other summand.
            targets = targets + (floating - self.beside[1].values(quantized))
        return self.source.values(inputs), targets

    def _results(
        self, ys: Sequence[NDArray[T]], places: NDArray[np.int64]
    ) -> NDArray[T]:
        """Return outputs of the layer at sampled positions, (samples, groups, rows, outputs).

        ``places`` is (samples, rows).
        """
        if self._spatial:
            return im2col.at_places(ys, places, self.place.layer.groups)
        return im2col.rows_at(ys, places)

    def _windowed(
        self,
        xs: Sequence[NDArray[T]],
        places: NDArray[np.int64],
        output: tuple[int, ...],
    ) -> NDArray[T]:
        """Return im2col patches of the layer, (samples, groups, rows, inputs).

        Args:
            xs: inputs of one shape, a tensor per sample, in codes if the activation is stored so.
            places: positions of the output, (samples, rows).
            output: sizes of the spatial axes of the output.
        """
        window = window_of(self.place.node, xs[0].shape[2:], output, self._kernel)
        return im2col.windowed(
            xs, places, output, window, self.place.layer.groups, self.source.zero
        )

    @property
    def _kernel(self) -> tuple[int, ...]:
        shape = self.floating.graph.sizes(self.place.weight)
        return tuple(int(size) for size in shape[2:] if size is not None)

    def _mean(self, groups: int) -> Doubles:
        """Return the float input means: the channel mean at every kernel tap.

        Returns:
            (groups, inputs), with the inputs of a group in the order of the flattened weight.
        """
        source = self.place.node.input(0)
        total, count = np.zeros(1), np.zeros(1, np.int64)
        for x in self.floating.values(source):
            channel_axis = 1 if self._spatial else x.ndim - 1
            axes = tuple(axis for axis in range(x.ndim) if axis != channel_axis)
            # Means over the finite values, as rows with others are left out of the problem, too.
            is_finite = np.isfinite(x)
            total = total + np.sum(x, axis=axes, dtype=np.float64, where=is_finite)
            count = count + is_finite.sum(axis=axes)
        mean = (total / np.maximum(1, count)).reshape(groups, -1)
        # Strides of a transposed convolution insert zeros between the inputs.
        if self.place.node.kind == "ConvTranspose":
            mean = mean / np.prod(self.place.node.attribute("strides", [1]))
        taps = 1
        if self._spatial:
            taps = int(np.prod(self._kernel))
        # (groups, inputs * taps), the flattened inputs of a weight.
        return np.repeat(mean, taps, axis=1)

    def _gram(self, which: Sequence[int]) -> tuple[Doubles, int]:
        """Return the Hessian X X^T, (groups, inputs, inputs), and its number of finite rows."""
        total, count = np.zeros(1), 0
        # In the order of the samples, so that the sum does not depend on the number of cores.
        for hessian, rows in side_by_side(self._gram_of, which):
            total, count = total + hessian, count + rows
        return total, count

    # Products of values beyond 1e19 overflow; GPTQ then skips the layer.
    @np.errstate(over="ignore", invalid="ignore")
    def _gram_of(self, index: int) -> tuple[Doubles, int]:
        """Return the Hessian X X^T of a sample, (groups, inputs, inputs), and its row count."""
        # One sample in memory for each core.
        [x] = self.quantized.values(self.source.name, [index])
        total, count = np.zeros(1), 0
        for codes in self._all_rows(x, index):
            rows = self.source.values(codes)
            if not (usable := finite(rows)).all():
                rows = rows[:, usable]
            # (groups, inputs, inputs): float32 within a slab, float64 over slabs.
            total = total + (rows.swapaxes(1, 2) @ rows).astype(np.float64)
            count += rows.shape[1]
        return total, count

    def _all_rows(self, x: NDArray[Any], index: int) -> Iterator[NDArray[Any]]:
        """Yield all rows of a sample, a slab at a time.

        Args:
            x: the stored input of the layer on the sample.

        Yields:
            (groups, rows, inputs), as stored: in codes, or in float.
        """
        if not self._spatial:
            rows = x.reshape(-1, x.shape[-1])
            # (1, rows, inputs): a product has one group.
            for start in range(0, len(rows), _SLAB):
                yield rows[None, start : start + _SLAB]
            return
        [y] = self.floating.values(self.place.result, [index])
        count = im2col.count_places(y.shape, spatial=True)
        for start in range(0, count, _SLAB):
            yield self._windowed(
                [x], np.arange(start, min(count, start + _SLAB))[None], y.shape[2:]
            )[0]


def _together(
    samples: Iterator[tuple[NDArray[Any], ...]], size: int
) -> Iterator[list[tuple[NDArray[Any], ...]]]:
    """Yield batches of samples with equal shapes that fit into memory.

    Args:
        size: additional bytes per sample.
    """
    for sample in samples:
        # At least one sample, whatever its size.
        more = _AT_ONCE // max(1, size + sum(tensor.nbytes for tensor in sample)) - 1
        yield [sample, *islice(samples, max(0, more))]


def window_of(
    node: Node, size: tuple[int, ...], output: tuple[int, ...], kernel: tuple[int, ...]
) -> Window:
    """Return the window of a convolution with explicit padding.

    Args:
        node: a Conv or ConvTranspose.
        size: sizes of the spatial axes of the input.
        output: sizes of the spatial axes of the output.
        kernel: sizes of the kernel.

    Returns:
        The window; ``auto_pad`` and ``output_shape`` are resolved to padding.
    """
    rank = len(kernel)
    strides = tuple(node.attribute("strides", [1] * rank))
    dilations = tuple(node.attribute("dilations", [1] * rank))
    turned = node.kind == "ConvTranspose"
    auto = node.attribute("auto_pad", "NOTSET")
    fixed = list(node.attribute("output_shape", ())) if turned else []
    if auto in ("NOTSET", "") and not fixed:
        begins = tuple(node.attribute("pads", [0] * 2 * rank)[:rank])
        return Window(kernel, strides, dilations, begins, turned)
    pads = []
    extra = node.attribute("output_padding", [0] * rank) if turned else [0] * rank
    for axis in range(rank):
        # The extent of a dilated kernel (ONNX Conv, auto_pad).
        reach = (kernel[axis] - 1) * dilations[axis] + 1
        if turned:
            total = (
                strides[axis] * (size[axis] - 1) + extra[axis] + reach - output[axis]
            )
        else:
            total = (output[axis] - 1) * strides[axis] + reach - size[axis]
        total = 0 if auto == "VALID" else max(0, total)
        first_more = (auto == "SAME_LOWER") if not turned else auto != "SAME_UPPER"
        pads.append(total - total // 2 if first_more else total // 2)
    return Window(kernel, strides, dilations, tuple(pads), turned)
