"""PlanBuilder: a plan under construction, with the methods by which rules decide."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from calibrators.shown import short
from quark_onnx.config import QuantizationSpec, TensorOverride
from quark_onnx.config.checks import require
from quark_onnx.dtypes import Block, Integer
from quark_onnx.graph import Node
from quark_onnx.patterns.weight_axes import WeightAxes, transposed_matrix, weight_axes
from quark_onnx.plan.blocks import in_blocks
from quark_onnx.plan.entries import BiasOf, Entry, Keep, Quantize, SameAs, Use
from quark_onnx.plan.integer import has_integer_product, with_one_zero_point
from quark_onnx.plan.plan import Plan
from quark_onnx.plan.select import EXCLUDED

_SOFTMAXES = frozenset({"Softmax", "com.microsoft::BiasSoftmax"})


class PlanBuilder(Plan):
    """A plan under construction, for rules and for steps that decide anew."""

    entries: dict[Use, Entry]
    kept: dict[str, str]
    spoken: set[str]

    def _hold(
        self,
        entries: Mapping[Use, Entry],
        kept: Mapping[str, str],
        spoken: Iterable[str],
    ) -> None:
        """Take copies of the decisions that rules change."""
        self.entries = dict(entries)
        self.kept = dict(kept)
        self.spoken = set(spoken)
        #: Names of sums in residual streams, which a step before the rules finds.
        self.streams = set[str]()

    @classmethod
    def of(cls, plan: Plan) -> PlanBuilder:
        """Return a copy of a plan, to change it."""
        return plan.copied(cls, plan.entries)

    def build(self) -> Plan:
        """Return the decisions as a plan."""
        return self.copied(Plan, self.entries)

    def activation(
        self,
        node: Node,
        *tensors: str,
        bounds: tuple[float, float] | None = None,
        along: int | None = None,
    ) -> None:
        """Request quantization of tensors as activations of ``node``; they may be constant.

        The producer of a tensor decides first. A reader that needs another format gets an entry of
        its own.

        Args:
            node: the node that reads or computes the tensors.
            *tensors: names; empty ones are ignored.
            bounds: range of the values, if known.
            along: axis over which ``node`` sums products of the values, along which blocks run.
        """
        spec = self.specs[node].activation
        if spec is None:
            return
        if spec.dynamic:
            self._dynamic(node, tensors, spec)
            return
        # onnxruntime's quantizer knows the range of a softmax alone.
        if self.asked.like_onnxruntime and node.kind not in _SOFTMAXES:
            bounds = None
        # Readers of a silent result may still request its quantization with an entry of their own.
        silent = node.outputs if node.kind in self.asked.silent else ()
        for tensor in tensors:
            if tensor in silent:
                continue
            if not self._takes(tensor, spec):
                continue
            axis = self._axis_of_scales(tensor, spec, bounds, along)
            if self.graph.is_constant(tensor):
                # The values are known: clipping would only lose information.
                # The least power of two above the range may be nearly twice the range, which wastes
                # a bit.
                unclipped = spec.with_(calibrator="minmse" if spec.pow2 else "minmax")
                self._put(node, tensor, Quantize(unclipped, axis))
            else:
                self._put(node, tensor, Quantize(spec, axis, bounds))

    def _axis_of_scales(
        self,
        tensor: str,
        spec: QuantizationSpec,
        bounds: tuple[float, float] | None,
        along: int | None,
    ) -> int | None:
        """Return the axis of an activation's channels or blocks; None for one scale.

        Args:
            bounds: range of the values, if known.
            along: axis over which the reader sums, along which blocks run.
        """
        # Known bounds, such as 0 to 1 of a sigmoid, are those of every channel: one scale is
        # enough.
        if spec.per_channel and bounds is None:
            return self._channels(tensor)
        # A reader that sums over no axis leaves the axis of the blocks open (None).
        if isinstance(spec.dtype, Block):
            return self._axis(tensor, along)
        return None

    def weight(
        self, node: Node, tensor: str, axis: int | None, along: int | None = None
    ) -> None:
        """Request quantization of a weight; a computed weight is an activation.

        Args:
            node: the node that reads the weight.
            tensor: name of the weight.
            axis: axis of the output channels; None where per-channel scales are impossible.
            along: axis that ``node`` sums over, for blocks; None where blocks are impossible.
        """
        if not self.graph.is_constant(tensor):
            self.activation(node, tensor, along=along)
            return
        spec = self._weight_spec(node, tensor)
        if spec is not None:
            self._put(node, tensor, self._weight_entry(tensor, spec, axis, along))

    def weight_at(self, node: Node, place: int) -> None:
        """Request quantization of the weight that a node reads as an input, as the table says.

        An input without output channels, and a computed one, are activations. See
        ``patterns.weight_axes``.
        """
        tensor = node.input(place)
        axes = weight_axes(self.graph, node, place)
        if axes is None or not self.graph.is_constant(tensor):
            summed = None if axes is None else axes.summed
            transpose = transposed_matrix(self.graph, tensor)
            spec = self.specs[node].activation
            if transpose is None or summed is None or spec is None or spec.dynamic:
                self.activation(node, tensor, along=summed)
            else:
                # ``summed`` is an axis of the result, and the other one of the matrix.
                self.weight(transpose, transpose.inputs[0], summed, 1 - summed)
            return
        spec = self._weight_spec(node, tensor)
        if spec is None:
            return
        axis = self._axis_in_kernels(tensor, axes)
        entry = self._weight_entry(tensor, spec, axis, axes.summed)
        if isinstance(entry, Quantize) and axes.channels:
            entry = self._separated(tensor, axes, entry)
        self._put(node, tensor, entry)

    def _weight_spec(self, node: Node, tensor: str) -> QuantizationSpec | None:
        """Return the quantization of a constant weight; None if it stays float."""
        spec = self.specs[node].weight
        if spec is None or not self._takes(tensor, spec):
            return None
        if self.specs[node].dynamic:
            # Only integer products read zero points at runtime; Q/DQ pairs support one per channel.
            return with_one_zero_point(node, spec)
        return spec

    def _axis_in_kernels(self, tensor: str, axes: WeightAxes) -> int | None:
        """Return the axis of the scales that integer kernels take; None for one scale."""
        if axes.in_kernels is not None:
            return next(iter(axes.in_kernels), None)
        if not axes.channels:
            return None
        layout = axes.layout(self.graph.initializers[tensor].dims)
        return layout.axis if layout.is_plain else None

    def _separated(self, tensor: str, axes: WeightAxes, entry: Quantize) -> Entry:
        """Return a decision with scales per output channel, where they are needed.

        Args:
            entry: the decision with scales as integer kernels take them, or with blocks.
        """
        spec, shape = entry.spec, tuple(self.graph.initializers[tensor].dims)
        if not spec.dtype.scaled:
            return entry
        if spec.block_size:
            # Blocks of a transposed convolution, over several axes or along all inputs, would hold
            # values of several output channels: they run as in the kernel of a Conv.
            if axes.summed == 0 and (entry.flat or axes.groups > 1):
                kernel = axes.layout(shape, first_axis=True)
                blocks = in_blocks(spec, kernel.merged, 0, 1, padded=self.fuses)
                if isinstance(blocks, Quantize):
                    return replace(blocks, layout=kernel)
            return entry
        if not spec.per_channel:
            return entry
        if axes.in_kernels is not None and not axes.loses(self.graph.known(tensor)):
            return entry
        layout = axes.layout(shape)
        return replace(
            entry, axis=layout.axis, layout=None if layout.is_plain else layout
        )

    def _weight_entry(
        self, tensor: str, spec: QuantizationSpec, axis: int | None, along: int | None
    ) -> Entry:
        """Return the decision for a constant weight: per block, per channel or per tensor.

        Args:
            axis: axis of the output channels, None where per-channel scales are impossible.
            along: axis of the sum, None where blocks are impossible.
        """
        channel_axis = axis if spec.per_channel else None
        if along is None:
            # Solvers that compensate errors along the sum need to know its axis.
            return Quantize(spec.with_(block_size=0, solver="nearest"), channel_axis)
        if spec.block_size:
            shape = tuple(self.graph.initializers[tensor].dims)
            # MatMulNBits pads the last block of a line; a DequantizeLinear with block_size does
            # not.
            return in_blocks(spec, shape, axis, along, padded=self.fuses)
        if isinstance(spec.dtype, Block):
            return Quantize(spec, along)
        return Quantize(spec, channel_axis)

    def bias(  # noqa: PLR0913  the parts of a product with a bias
        self,
        node: Node,
        tensor: str,
        x: str,
        w: str,
        *,
        repeat: int = 1,
        product: Node | None = None,
    ) -> None:
        """Request quantization of a constant that is added to the product of ``x`` and ``w``.

        Next to integers the bias gets the product of their scales, next to scaled floats it stays
        float, and in formats without a scale it is rounded like the activations. A bias that the
        user keeps stays float.

        Args:
            node: the node that adds the bias.
            tensor: name of the bias.
            x: name of the activation.
            w: name of the weight.
            repeat: number of repetitions of the weight's channel scales.
            product: the node that multiplies ``x`` and ``w``; None for ``node`` itself.
        """
        spec = self.specs[node].activation
        # Rules request both factors before the bias: their decisions are final for this node.
        activation = self.use(x, product or node)
        weight = self.use(w, product or node)
        activation_entry = self.entry(activation)
        weight_entry = self.entry(weight)
        if spec is None or not self.graph.is_constant(tensor):
            return
        if not self._takes(tensor, spec):
            return
        # ``_put`` applies overrides to formats alone, and an integer bias has none of its own.
        override = self.asked.tensors.of(tensor, node.name)
        if override is not None and override.keep:
            self.keep_for(node, tensor, EXCLUDED)
            return
        if override is not None and override.decides:
            # A format or a scale of its own, like a weight; runtimes then add the bias in float.
            given = self.specs[node].weight or spec
            self._put(node, tensor, Quantize(given.with_(block_size=0)))
            return
        # The scale of the bias is the product of the scale of the activation, which is one number,
        # and of those of the weight, which may be one per channel.
        if _has_one_integer_scale(activation_entry) and _multiplies(weight_entry):
            # Another reader may add the bias to another product, whose scale differs: onnxruntime
            # takes the codes of a bias for those of the product that they are added to.
            alone = self.graph.consumers(tensor) == [node]
            use = Use(tensor) if alone else Use(tensor, node.name)
            self.entries.setdefault(use, BiasOf(activation, weight, repeat))
        elif not spec.dtype.scaled and self.quantized(x, product or node):
            self._put(
                node,
                tensor,
                # A bias has a single axis, along which blocks can run.
                Quantize(spec, 0 if isinstance(spec.dtype, Block) else None),
            )

    def same_as(self, node: Node, result: str, source: str) -> None:
        """Quantize ``result``, which holds values of ``source`` only, with the scale of ``source``.

        Not so if a reader has requested another format already, or if the result was kept float.

        Args:
            node: the node that moves the values.
            result: name of its result.
            source: name of its input; a float source leaves the result as it is.
        """
        if self.specs[node].activation is None or node.kind in self.asked.silent:
            return
        # The root of a chain: a source may itself have the scale of its own source.
        origin = self.entry(self.use(source, node))
        # Moved values may be no signal, for example indices or sizes.
        if isinstance(origin, Quantize) and not self.ineligible(result):
            self._share_scale(node, result, source, origin)

    def align(self, node: Node) -> None:
        """Give 16-bit inputs of a node the scale of its result, where a target aligns them.

        amd-quark 0.13 does so with its A16W8 at a Concat, and not with its A8W8: a step of a common
        range costs 8 bits accuracy.
        """
        result = self.root(Use(node.outputs[0]))
        entry = self.entries.get(result)
        if not self.aligns or not isinstance(entry, Quantize) or entry.axis is not None:
            return
        if self.integer_only(node) or entry.spec.dtype.bits < 16:
            return
        for name in node.operands:
            source = self.root(self.use(name, node))
            origin = self.entries.get(source)
            if source == result or not isinstance(origin, Quantize):
                continue
            if origin.spec == entry.spec and not self._is_separate(source.tensor):
                self.entries[source] = SameAs(result)

    def _share_scale(
        self, node: Node, result: str, source: str, origin: Quantize
    ) -> None:
        """Quantize a result as its source; with the scale of the source where possible.

        Args:
            node: the node that moves the values.
            source: name of the tensor that holds the values before.
        """
        # A format of the user's choice for the result excludes the scale of the source.
        if self._is_separate(result):
            self._put(node, result, Quantize(origin.spec))
        elif not origin.spec.dtype.scaled:
            # A format without a scale has no scale to share.
            if self._holds(result, origin.spec):
                self._put(node, result, Quantize(origin.spec))
        elif origin.axis is not None:
            # The channels may lie along another axis than in the source, so that no scale is
            # shared. A dynamic run measures no channels.
            if Use(result) not in self.entries and self.specs[node].static:
                axis = self._channels(result)
                self._put(node, result, Quantize(origin.spec, axis))
        elif _may_share(origin, self.entries.get(Use(result))):
            self.entries[Use(result)] = SameAs(self.use(source, node))

    def _is_separate(self, tensor: str) -> bool:
        """Return whether the user's override gives a tensor a scale of its own."""
        override = self.asked.tensors.of(tensor)
        return override is not None and override.separates

    def keep(self, tensor: str, reason: str) -> None:
        """Keep a tensor float, also for readers with an entry of their own.

        Args:
            tensor: name of the tensor.
            reason: the reason, as ``explain`` and the report show it.
        """
        self.entries[Use(tensor)] = Keep(reason)
        # Entries of single readers take precedence over the shared one, so that each must change.
        for node in self.graph.consumers(tensor):
            use = Use(tensor, node.name)
            if use in self.entries:
                self.entries[use] = Keep(reason)

    def keep_for(self, node: Node, tensor: str, reason: str) -> None:
        """Let ``node`` read the float value of a tensor, whatever other nodes read.

        Args:
            node: the reader; nothing changes unless its activations are quantized statically.
            tensor: name of the tensor.
            reason: the reason.
        """
        # Without static activations there is no shared entry from which the reader must be exempt.
        if self.static(node) and not self.ineligible(tensor):
            self.entries[Use(tensor, node.name)] = Keep(reason)

    def keep_exact(self, node: Node, tensor: str, reason: str) -> None:
        """Let ``node`` read the float value of a tensor to compute a shape from it."""
        # A float tensor needs no entry: the plan shows only decisions that change a reader's
        # values.
        if self.quantized(tensor, node):
            self.entries[Use(tensor, node.name)] = Keep(reason)

    def keep_node(self, node: Node, reason: str) -> None:
        """Keep a node float; other nodes may still request quantized tensors."""
        self.kept[node.name] = reason

    def _dynamic(
        self, node: Node, tensors: tuple[str, ...], spec: QuantizationSpec
    ) -> None:
        """Quantize the activation of an integer product with a scale per run.

        The scale serves the product alone. Other readers compute in float, where rounding gains
        nothing. Constants stay float unless they are weights.

        Args:
            spec: quantization of the activations, with dynamic scales.
        """
        weight = self.specs[node].weight
        if weight is None or not has_integer_product(self.graph, node, weight):
            return
        # MatMulInteger and ConvInteger: the first input is the activation, the second the weight.
        tensor = node.inputs[0]
        if tensor in tensors and self._is_free(tensor, node):
            self.entries[Use(tensor, node.name)] = Quantize(spec)

    def _is_free(self, tensor: str, node: Node) -> bool:
        """Return whether ``node`` may compute a scale of a tensor at runtime."""
        # A step before the rules may have kept the tensor float, such as an overridable
        # initializer.
        if isinstance(self.entries.get(self.use(tensor, node)), Keep):
            return False
        return not (self.ineligible(tensor) or self.graph.is_constant(tensor))

    def _given(self, entry: Quantize, tensor: str, reader: str) -> Entry:
        """Apply the user's override for a tensor, as read by a node, to the rules' decision.

        Args:
            reader: name of the node; empty for the producer and the readers without a name.

        Returns:
            The decision after the override; the same without an override.
        """
        override = self.asked.tensors.of(tensor, reader)
        if override is None:
            return entry
        if override.keep:
            return Keep(EXCLUDED)
        if override.axis is None:
            axis, layout = entry.axis, entry.layout
        else:
            axis, layout = self._given_axis(tensor, override), None
        spec = override.applied(entry.spec)
        return replace(
            entry,
            spec=spec,
            axis=axis,
            layout=layout,
            # Without blocks there are no axes to flatten.
            flat=entry.flat and spec.block_size > 0,
            given=override,
        )

    def _given_axis(self, tensor: str, override: TensorOverride) -> int | None:
        """Return the axis of an override, counted from the front if the rank is known.

        Args:
            override: the user's override with an axis.

        Raises:
            ConfigError: the tensor has no such axis.
        """
        axis = override.axis
        shape = self.graph.shape(tensor)
        if axis is not None and shape is not None:
            rank = len(shape)
            require(
                -rank <= axis < rank,
                f"{override.where}: axis of {short(tensor)}",
                axis,
                f"an axis of a tensor of rank {rank}",
            )
        return self._axis(tensor, axis)

    def _put(self, node: Node, tensor: str, entry: Entry) -> None:
        """Record a decision; after a different decision, for ``node`` alone.

        Args:
            node: the node that reads or computes the tensor.
            entry: the rules' decision, before the user's overrides.
        """
        shared = Use(tensor)
        if isinstance(entry, Quantize) and self.asked.tensors:
            entry = self._overridden(node, tensor, entry)
        present = self.entries.get(shared)
        # Readers with another format then get the values that the producer's pair has rounded.
        if self.graph.producer(tensor) is node:
            self.spoken.add(tensor)
        # A reader that knows the axis of the blocks refines a decision with an open axis.
        refined = isinstance(entry, Quantize) and present == entry.any_axis
        if present is None or refined:
            self.entries[shared] = entry
        # The root counts: behind SameAs stands the format of another tensor.
        elif self._is_given_apart(tensor, entry) or not _alike(
            self.entry(shared), entry
        ):
            self.entries[Use(tensor, node.name)] = entry

    def _is_given_apart(self, tensor: str, entry: Entry) -> bool:
        """Return whether the user's override is for the reader, and not for all."""
        given = entry.given if isinstance(entry, Quantize) else None
        return given is not None and given != self.asked.tensors.of(tensor)

    def _overridden(self, node: Node, tensor: str, entry: Quantize) -> Entry:
        """Return the decision for ``node`` after the user's overrides of the tensor.

        If only ``node`` has another format, the other readers get an entry as well.

        Args:
            node: the node that reads or computes the tensor.
            entry: the rules' decision.
        """
        shared = Use(tensor)
        # Two entries: an override may name readers, and applies to no other reader then.
        shared_entry = self._given(entry, tensor, "")
        reader_entry = self._given(entry, tensor, node.name)
        # Another format for this reader, which gets the values rounded to the shared format; a
        # reader that keeps them float gets the float values.
        if shared not in self.entries and shared_entry != reader_entry:
            self.entries[shared] = shared_entry
            if not isinstance(reader_entry, Keep):
                self.spoken.add(tensor)
        return reader_entry

    def rounded_result(self, node: Node) -> None:
        """Request quantization of the first result where the engine has no float32."""
        if self.rounds_results(node):
            self.activation(node, node.outputs[0])

    def _takes(self, tensor: str, spec: QuantizationSpec) -> bool:
        """Return whether a tensor can be quantized in a format."""
        return not self.ineligible(tensor) and self._holds(tensor, spec)

    def _holds(self, tensor: str, spec: QuantizationSpec) -> bool:
        """Return whether a tensor has an axis for blocks; a known scalar has none."""
        return bool(self.graph.shape(tensor)) or not isinstance(spec.dtype, Block)

    def _channels(self, tensor: str) -> int | None:
        """Return the channel axis of an activation, 1; None for an unknown shape."""
        shape = self.graph.sizes(tensor)
        # The number of scales is stored in the model: an open size leaves it unknown.
        is_known = len(shape) > 1 and isinstance(shape[1], int) and shape[1] > 0
        return 1 if is_known else None

    def _axis(self, tensor: str, axis: int | None) -> int | None:
        """Return an axis counted from the front, if the rank is known.

        Args:
            axis: the axis, from the end if negative; None is returned unchanged.
        """
        shape = self.graph.shape(tensor)
        if axis is None or axis >= 0 or shape is None:
            return axis
        return axis % len(shape)


def _alike(present: Entry, wanted: Entry) -> bool:
    """Return whether a tensor with decision ``present`` serves a reader that needs ``wanted``.

    Args:
        present: decision at the root of the tensor's shared use.
        wanted: decision that the rule of the reader requests.
    """
    # A tensor that is kept float is float for all readers.
    if isinstance(present, Keep):
        return True
    if isinstance(present, Quantize) and isinstance(wanted, Quantize):
        same_layout = present.layout == wanted.layout
        return (
            same_layout
            and present.spec.alike(wanted.spec)
            and _fits_axis(present, wanted)
        )
    return present == wanted


def _fits_axis(present: Quantize, wanted: Quantize) -> bool:
    """Return whether scales or blocks run along the axis that a reader needs."""
    # A reader without an axis for its blocks accepts blocks along any axis.
    if wanted.axis is None and isinstance(wanted.spec.dtype, Block):
        return True
    return present.axis == wanted.axis


def _may_share(origin: Quantize, present: Entry | None) -> bool:
    """Return whether a result can have the scale of its source.

    Args:
        present: decision for the result, None if there is none.
    """
    # A dynamic scale belongs to one product, and is not shared.
    if origin.spec.dynamic:
        return False
    if isinstance(present, Quantize):
        return _alike(origin, present)
    return present is None


def _has_one_integer_scale(entry: Entry) -> bool:
    """Return whether an activation has integer codes with one static scale for the tensor."""
    return isinstance(entry, Quantize) and entry.axis is None and _multiplies(entry)


def _multiplies(entry: Entry) -> bool:
    """Return whether products of the codes are integers with a static scale."""
    if not isinstance(entry, Quantize) or not isinstance(entry.spec.dtype, Integer):
        return False
    spec = entry.spec
    # The scale of a bias is stored: dynamic scales are unknown then, and blocks along the sum have
    # several scales per output.
    return spec.dtype.bits <= 16 and not spec.dynamic and not spec.block_size
