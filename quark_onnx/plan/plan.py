"""Plan: what becomes of every tensor, as data, before any node moves.

And the verbs with which rules write it.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
from onnx import TensorProto

from quark_onnx.config import QuantizationSpec, TensorOverrides
from quark_onnx.dtypes import Block, Integer
from quark_onnx.errors import PlanError
from quark_onnx.graph import Graph, Node, ShapeArithmetic
from quark_onnx.plan.blocks import in_blocks
from quark_onnx.plan.entries import BiasOf, Entry, Keep, Quantize, SameAs, Use
from quark_onnx.plan.integer import has_integer_product, with_one_zero_point
from quark_onnx.plan.select import EXCLUDED, NodeSpec

#: Constants from here on mean "never", as in attention masks; a scale that spans them leaves
#: nothing for real values.
HUGE = 1e4
#: Why an initializer stays float that is an input as well.
OVERRIDABLE = (
    "it is an input, whose stored value callers may override (keep_initializer_inputs)"
)


@dataclass(frozen=True)
class Asked:
    """What the user has said beyond nodes.

    Attributes:
        tensors: of single tensors.
        silent: operator types that do not ask for their results to be quantized.
        clipping: a Relu or Clip may go where saturation does the same.
    """

    tensors: TensorOverrides = field(default_factory=TensorOverrides)
    silent: tuple[str, ...] = ()
    clipping: bool = True


class Plan:
    """Decisions by use, and the nodes that stay float.

    Attributes:
        graph: what is planned; a plan never changes it.
        specs: what the user asked for each node.
        entries: decision for each use. A use that has none stays float.
        kept: nodes that stay float by name, and why.
        spoken: tensors whose producer has decided; a reader that wants another format gets what is
            left of them.
        safe: rules leave float what few bits are known to ruin.
        fuses: operators that compute on codes will be written.
        aligns: what is pooled has to keep its scale, as the integer engine of the target wants it.
        shapes: which tensors are shape arithmetic and never quantized.
        asked: what the user has said of single tensors, and of kinds of operators.
    """

    def __init__(  # noqa: PLR0913
        self,
        graph: Graph,
        specs: dict[Node, NodeSpec],
        *,
        safe: bool = True,
        fuses: bool = False,
        aligns: bool = False,
        shapes: ShapeArithmetic | None = None,
        asked: Asked | None = None,
    ) -> None:
        self.graph = graph
        self.specs = specs
        self.safe = safe
        self.fuses = fuses
        self.aligns = aligns
        self.shapes = shapes or ShapeArithmetic.of(graph)
        self.asked = asked or Asked()
        self.entries: dict[Use, Entry] = {}
        self.kept: dict[str, str] = {}
        self.spoken: set[str] = set()

    # -- verbs for rules
    # -------------------------------------------------------------------------------------------

    def activation(
        self,
        node: Node,
        *tensors: str,
        bounds: tuple[float, float] | None = None,
        along: int | None = None,
    ) -> None:
        """``node`` wants these tensors quantized as its activations; constants among them too.

        The producer of a tensor speaks first. A reader that wants another format gets an entry of
        its own.

        Args:
            bounds: the range of their values, where it is known.
            along: the axis over which ``node`` sums their products: the one that blocks run along.
        """
        spec = self.specs[node].activation
        if spec is not None and spec.dynamic:
            self._dynamic(node, tensors, spec)
            return
        for tensor in tensors:
            if spec is None or self.ineligible(tensor) or not self._holds(tensor, spec):
                continue
            if node.kind in self.asked.silent and tensor in node.outputs:
                continue
            axis = self._axis(tensor, along) if isinstance(spec.dtype, Block) else None
            if spec.per_channel and bounds is None:
                axis = self._channels(tensor)
            if self.graph.is_constant(tensor):
                # its values are known, so there is nothing to clip away
                known = spec.with_(calibrator="minmse" if spec.pow2 else "minmax")
                self._put(node, tensor, Quantize(known, axis))
            else:
                self._put(node, tensor, Quantize(spec, axis, bounds))

    def weight(
        self,
        node: Node,
        tensor: str,
        axis: int | None,
        along: int | None = None,
    ) -> None:
        """``node`` wants a weight quantized; a computed weight is an activation.

        Args:
            axis: of its output channels, for scales per channel; None where such scales cannot be
                used.
            along: the axis that ``node`` sums over, for blocks; None where blocks cannot be used.
        """
        spec, activation = self.specs[node].weight, self.specs[node].activation
        if spec is not None and activation is not None and activation.dynamic:
            spec = with_one_zero_point(node, spec)
        if not self.graph.is_constant(tensor):
            self.activation(node, tensor, along=along)
        elif (
            spec is not None
            and not self.ineligible(tensor)
            and self._holds(tensor, spec)
        ):
            shape = tuple(self.graph.initializers[tensor].dims)
            if along is None:
                entry: Entry = Quantize(
                    spec.with_(block_size=0, solver="nearest"),
                    axis if spec.per_channel else None,
                )
            elif spec.block_size:
                entry = in_blocks(spec, shape, axis, along, padded=self.fuses)
            elif isinstance(spec.dtype, Block):
                entry = Quantize(spec, along)
            else:
                entry = Quantize(spec, axis if spec.per_channel else None)
            self._put(node, tensor, entry)

    def bias(  # noqa: PLR0913
        self,
        node: Node,
        tensor: str,
        x: str,
        w: str,
        *,
        axis: int = 0,
        repeat: int = 1,
    ) -> None:
        """A constant that is added to the product of ``x`` and ``w``.

        Beside integers it gets the product of their scales, beside floats with a scale it stays
        float, and in formats that need no scale it is rounded as the activations are.
        """
        spec = self.specs[node].activation
        both = [self.entry(self.use(tensor, node)) for tensor in (x, w)]
        if (
            not self.graph.is_constant(tensor)
            or self.ineligible(tensor)
            or spec is None
            or not self._holds(tensor, spec)
        ):
            return
        whole = isinstance(both[0], Quantize) and both[0].axis is None
        if whole and all(
            isinstance(entry, Quantize) and _multiplies(entry.spec) for entry in both
        ):
            self._put(
                node,
                tensor,
                BiasOf(self.use(x, node), self.use(w, node), axis, repeat),
            )
        elif not spec.dtype.scaled and self.quantized(x, node):
            self._put(
                node,
                tensor,
                Quantize(spec, 0 if isinstance(spec.dtype, Block) else None),
            )

    def same_as(self, node: Node, result: str, source: str) -> None:
        """``result`` holds nothing but values of ``source``: if that one is quantized, so is this
        one, alike.

        Unless its reader has asked for it in another format already, or it was decided that it
        stays float.
        """
        origin, present = (
            self.entry(self.use(source, node)),
            self.entries.get(Use(result)),
        )
        spec = self.specs[node].activation
        if (
            spec is None
            or not isinstance(origin, Quantize)
            or self.ineligible(result)
            or node.kind in self.asked.silent
        ):
            return
        given = self.asked.tensors.of(result)
        if given is not None and (given.decides or given.keep):
            self._put(node, result, Quantize(origin.spec))
            return
        if not origin.spec.dtype.scaled:
            if self._holds(result, origin.spec):
                self._put(
                    node,
                    result,
                    Quantize(origin.spec),
                )  # a format without a scale has none to hand on
        elif origin.axis is not None:
            if (
                present is None and not spec.dynamic
            ):  # its channels may lie elsewhere; a dynamic run measures none
                self._put(node, result, Quantize(origin.spec, self._channels(result)))
        elif not origin.spec.dynamic and (
            present is None
            or (isinstance(present, Quantize) and _alike(origin, present))
        ):
            self.entries[Use(result)] = SameAs(self.use(source, node))

    def keep(self, tensor: str, reason: str) -> None:
        """A tensor stays float, also for readers with an entry of their own."""
        own = [Use(tensor, node.name) for node in self.graph.consumers(tensor)]
        for use in (Use(tensor), *(use for use in own if use in self.entries)):
            self.entries[use] = Keep(reason)

    def keep_for(self, node: Node, tensor: str, reason: str) -> None:
        """``node`` reads the float value of a tensor, whatever others do."""
        if self.static(node) and not self.ineligible(tensor):
            self.entries[Use(tensor, node.name)] = Keep(reason)

    def keep_exact(self, node: Node, tensor: str, reason: str) -> None:
        """``node`` reads a tensor that others may read rounded, as it computes a shape of it."""
        if self.quantized(tensor, node):
            self.entries[Use(tensor, node.name)] = Keep(reason)

    def keep_node(self, node: Node, reason: str) -> None:
        """A node stays float: it asks nothing of its tensors, though others may."""
        self.kept[node.name] = reason

    def without(self, kind: type[Entry]) -> Plan:
        """A copy that lacks the entries of one kind: their tensors stay float."""
        copy = Plan(
            self.graph,
            self.specs,
            safe=self.safe,
            fuses=self.fuses,
            aligns=self.aligns,
            shapes=self.shapes,
            asked=self.asked,
        )
        copy.entries = {
            use: entry
            for use, entry in self.entries.items()
            if not isinstance(entry, kind)
        }
        copy.kept, copy.spoken = dict(self.kept), set(self.spoken)
        return copy

    # -- reading
    # ----------------------------------------------------------------------------------

    def use(self, tensor: str, node: Node | None = None) -> Use:
        """The use under which ``node`` reads ``tensor``."""
        own = Use(tensor, node.name) if node is not None else Use(tensor)
        return own if own in self.entries else Use(tensor)

    def root(self, use: Use) -> Use:
        """The use whose scale this one has, itself unless it is the same as another."""
        for _ in range(len(self.entries) + 1):
            entry = self.entries.get(use)
            if not isinstance(entry, SameAs):
                return use
            use = entry.use
        raise PlanError(f"tensor {use} has its own scale as its origin")

    def entry(self, use: Use) -> Entry:
        """The decision at the root of a use."""
        return self.entries.get(self.root(use), Keep("nothing asks for it"))

    def quantized(self, tensor: str, node: Node | None = None) -> bool:
        """Whether ``node`` reads ``tensor`` quantized."""
        return isinstance(self.entry(self.use(tensor, node)), Quantize)

    def touches(self, node: Node) -> bool:
        """Whether a node that does not stay float as a whole reads or computes something quantized."""  # noqa: E501
        tensors = [
            *((name, node) for name in node.inputs),
            *((name, None) for name in node.outputs),
        ]
        return node.name not in self.kept and any(
            self.quantized(name, reader) for name, reader in tensors if name
        )

    def ineligible(self, tensor: str) -> str:  # noqa: PLR0911
        """Why a tensor can never be quantized; empty if it can."""
        if not tensor:
            return "omitted"
        kind = self.graph.elem_type(tensor)
        if kind not in (TensorProto.FLOAT, TensorProto.UNDEFINED):
            known = kind in TensorProto.DataType.values()
            return (
                "its type is"
                f" {TensorProto.DataType.Name(kind).lower() if known else kind}"
            )
        if tensor in self.graph.sparse:
            return "it is sparse"
        if tensor in self.graph.initializers and self.graph.is_input(tensor):
            return OVERRIDABLE
        if 0 in (self.graph.shape(tensor) or ()):
            return "it has no elements"
        array = self.graph.constant(tensor)
        if array is not None and not np.isfinite(array).all():
            return "it holds values that are not finite"
        why = self.shapes.reason(tensor)
        return f"it {why}" if why else ""

    def is_low_bit(self, node: Node) -> bool:
        """Whether ``node`` is to be safe from too few bits: it is asked for less than 16."""
        spec = self.specs[node].activation
        return (
            self.safe
            and spec is not None
            and spec.dtype.uniform
            and spec.dtype.bits < 16
            and not spec.dynamic
        )

    def static(self, node: Node) -> bool:
        """Whether ``node`` wants activations in a format whose scale, if any, is known before the
        model runs.
        """
        spec = self.specs[node].activation
        return spec is not None and not spec.dynamic

    def integer_only(self, node: Node) -> bool:
        """Whether what runs ``node`` has no float arithmetic at all, as power-of-two scales tell."""  # noqa: E501
        spec = self.specs[node].activation
        return spec is not None and spec.pow2

    def rounds_results(self, node: Node) -> bool:
        """Whether what runs ``node`` has no float32 for its results: for want of float arithmetic,
        or of float32.
        """
        spec = self.specs[node].activation
        return self.integer_only(node) or (spec is not None and not spec.dtype.scaled)

    def holds_mask_constants(self, tensor: str) -> bool:
        """Whether a constant holds values that mean "never" rather than a number."""
        array = self.graph.constant(tensor)
        return (
            array is not None
            and array.size > 0
            and array.dtype.kind == "f"
            and bool(np.abs(array).max() >= HUGE)
        )

    # -- inside
    # ----------------------------------------------------------------------------------

    def _dynamic(
        self,
        node: Node,
        tensors: tuple[str, ...],
        spec: QuantizationSpec,
    ) -> None:
        """Quantize the activation of an integer product with the scale of each run, for this
        product alone.

        Every other reader reads the float tensor: its arithmetic is float, so that rounding gains
        nothing there. Constants stay float unless they are weights.
        """
        weight = self.specs[node].weight
        if weight is None or not has_integer_product(self.graph, node, weight):
            return
        tensor = node.inputs[0]
        stays = isinstance(self.entries.get(self.use(tensor, node)), Keep)
        if (
            tensor in tensors
            and not stays
            and not self.ineligible(tensor)
            and not self.graph.is_constant(tensor)
        ):
            self.entries[Use(tensor, node.name)] = Quantize(spec)

    def _given(self, entry: Quantize, tensor: str, reader: str) -> Entry:
        """What the rules want of a tensor, changed by what the user has said of it, as a node reads
        it.
        """
        given = self.asked.tensors.of(tensor, reader)
        if given is None:
            return entry
        if given.keep:
            return Keep(EXCLUDED)
        axis = entry.axis if given.axis is None else self._axis(tensor, given.axis)
        spec = given.applied(entry.spec)
        return replace(
            entry,
            spec=spec,
            axis=axis,
            flat=entry.flat and spec.block_size > 0,
            given=given,
        )

    def _put(self, node: Node, tensor: str, entry: Entry) -> None:
        everybody = Use(tensor)
        if isinstance(entry, Quantize) and self.asked.tensors:
            plain, entry = (
                self._given(entry, tensor, ""),
                self._given(entry, tensor, node.name),
            )
            if (
                everybody not in self.entries and plain != entry
            ):  # another format, which starts from the first
                self.entries[everybody] = plain
                self.spoken.add(tensor)
        present = self.entries.get(everybody)
        if self.graph.producer(tensor) is node:
            self.spoken.add(tensor)
        refined = (
            isinstance(entry, Quantize) and present == entry.any_axis
        )  # the axis of its blocks is known now
        if present is None or refined:
            self.entries[everybody] = entry
        elif not _alike(self.entry(everybody), entry):
            self.entries[Use(tensor, node.name)] = entry

    def _holds(self, tensor: str, spec: QuantizationSpec) -> bool:
        """Whether a tensor has the axis that blocks take: it is no scalar, and known not to be one."""  # noqa: E501
        return bool(self.graph.shape(tensor)) or not isinstance(spec.dtype, Block)

    def _channels(self, tensor: str) -> int | None:
        """The axis of the channels of an activation, the second one.

        None where their number is not known.
        """
        shape = self.graph.shape(tensor) or ()
        return (
            1 if len(shape) > 1 and isinstance(shape[1], int) and shape[1] > 0 else None
        )

    def _axis(self, tensor: str, axis: int | None) -> int | None:
        """An axis counted from the front, where the rank is known."""
        shape = self.graph.shape(tensor)
        return axis if axis is None or axis >= 0 or shape is None else axis % len(shape)


def _alike(present: Entry, wanted: Entry) -> bool:
    """Whether a tensor that is quantized as ``present`` serves a reader that wants it as
    ``wanted``.
    """
    if isinstance(present, Keep):
        return True  # it was decided that this tensor stays float, whoever reads it
    if isinstance(present, Quantize) and isinstance(wanted, Quantize):
        any_axis = wanted.axis is None and isinstance(wanted.spec.dtype, Block)
        return present.spec.alike(wanted.spec) and (
            any_axis or present.axis == wanted.axis
        )
    return present == wanted


def _multiplies(spec: QuantizationSpec) -> bool:
    """Whether products of such codes are integers with a scale that is known beforehand, and per
    channel at most.
    """
    return (
        isinstance(spec.dtype, Integer)
        and spec.dtype.bits <= 16
        and not spec.dynamic
        and not spec.block_size
    )
