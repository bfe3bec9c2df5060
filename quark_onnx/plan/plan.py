"""The decision for every tensor, as a value."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TypeVar

import numpy as np
from onnx import TensorProto

from calibrators.shown import printable
from quark_onnx.common.errors import PlanError
from quark_onnx.common.reported import preformatted
from quark_onnx.config import TensorOverrides
from quark_onnx.config.spec import has_powers_of_two
from quark_onnx.graph import Graph, Node, ShapeArithmetic
from quark_onnx.graph.decisions import is_layer
from quark_onnx.plan.entries import Entry, Keep, Quantize, SameAs, Use
from quark_onnx.plan.select import NodeSpec

P = TypeVar("P", bound="Plan")

#: Larger constants mean "never", as in attention masks; a scale that spans them rounds signals to
#: 0.
HUGE = 1e4
#: Reason to keep an initializer float that is an input as well.
OVERRIDABLE = (
    "it is an input, whose stored value callers may override (keep_initializer_inputs)"
)


def _is_sparse(graph: Graph, tensor: str) -> bool:
    return tensor in graph.sparse


def _is_overridable(graph: Graph, tensor: str) -> bool:
    """Return whether callers may override a stored value, whose codes would not follow."""
    return tensor in graph.initializers and graph.is_input(tensor)


def _is_empty(graph: Graph, tensor: str) -> bool:
    return 0 in graph.sizes(tensor)


def _holds_nonfinite(graph: Graph, tensor: str) -> bool:
    """Return whether a constant holds NaN or an infinity.

    No scale spans an infinity, and NaN has no integer code.
    """
    array = graph.constant(tensor)
    return array is not None and not bool(np.isfinite(array).all())


#: Properties for which a tensor is never quantized, with the reason; the first one is reported.
_INELIGIBLE = (
    (_is_sparse, "it is sparse"),
    (_is_overridable, OVERRIDABLE),
    (_is_empty, "it has no elements"),
    (_holds_nonfinite, "it holds values that are not finite"),
)


@dataclass(frozen=True)
class Asked:
    """The user's wishes beyond single nodes.

    Attributes:
        tensors: overrides for single tensors.
        silent: operator types that do not request quantization of their results.
        clipping: remove a Relu or Clip if saturation has the same effect.
        following: operator types that are quantized only after quantized inputs.
        all_pairs: quantize tensors, too, that need no pair, as onnxruntime's quantizer does.
        like_onnxruntime: decide as its quantizer even where that costs accuracy: measure the ranges
            of Sigmoid and Tanh, and round what ArgMax alone reads.
        saturates: write a Max and a Min where a part of the codes is used, as with 7 of 8 bits, and
            before the pair of a Softmax of unknown size.
        makes_gemms: the engine makes a Gemm of a MatMul and the Add of its bias, as onnxruntime
            does: the bias is stored as that of a Gemm.
        moves: the engine moves codes through operators without a pair after them, and the inputs
            of a Concat get one scale for this.
    """

    tensors: TensorOverrides = field(default_factory=TensorOverrides)
    silent: tuple[str, ...] = ()
    clipping: bool = True
    following: tuple[str, ...] = ()
    all_pairs: bool = False
    like_onnxruntime: bool = False
    saturates: bool = True
    makes_gemms: bool = True
    moves: bool = False


class Plan:
    """Decisions per use of a tensor, and the nodes that stay float.

    A plan is a value: it never changes. ``PlanBuilder.of(plan)`` makes a copy to change, and
    ``print(plan)`` shows the decisions, node by node.

    Attributes:
        graph: the planned model, which a plan never changes.
        specs: the settings of each node.
        entries: decision for each use; a use without an entry stays float.
        kept: nodes that stay float, with the reason.
        spoken: tensors whose producer has decided; a reader that needs another format gets the
            already rounded values.
        safe: rules keep operators float that are known to degrade with few bits.
        fuses: operators that compute on integer codes will be written.
        aligns: pooling keeps its scale, as the integer engine of the target requires.
        shapes: tensors of shape arithmetic, which are never quantized.
        asked: overrides for single tensors and operator types.
    """

    entries: Mapping[Use, Entry]
    kept: Mapping[str, str]
    spoken: AbstractSet[str]

    def __init__(  # noqa: PLR0913  the settings of a plan are independent
        self,
        graph: Graph,
        specs: Mapping[Node, NodeSpec],
        *,
        safe: bool = True,
        fuses: bool = False,
        aligns: bool = False,
        shapes: ShapeArithmetic | None = None,
        asked: Asked | None = None,
        entries: Mapping[Use, Entry] | None = None,
        kept: Mapping[str, str] | None = None,
        spoken: Iterable[str] = (),
    ) -> None:
        """Hold copies of the decisions.

        Args:
            graph: the planned model.
            specs: the settings of each node of the graph.
            safe: as the attribute.
            fuses: as the attribute.
            aligns: as the attribute.
            shapes: as the attribute; None computes them from the graph; pass them for subgraphs.
            asked: as the attribute; None for no wishes.
            entries: decisions so far; None for none.
            kept: nodes that stay float, with the reason; None for none.
            spoken: tensors whose producer has decided.
        """
        self.graph = graph
        self.specs = specs
        self.safe = safe
        self.fuses = fuses
        self.aligns = aligns
        self.shapes = shapes or ShapeArithmetic.of(graph)
        self.asked = asked or Asked()
        self._hold(entries or {}, kept or {}, spoken)

    def _hold(
        self,
        entries: Mapping[Use, Entry],
        kept: Mapping[str, str],
        spoken: Iterable[str],
    ) -> None:
        """Take copies of the decisions that nobody can change."""
        self.entries = MappingProxyType(dict(entries))
        self.kept = MappingProxyType(dict(kept))
        self.spoken = frozenset(spoken)

    def _repr_html_(self) -> str:
        """Return the text as a notebook shows it."""
        return preformatted(self)

    def __str__(self) -> str:
        return explain(self)

    def copied(self, kind: type[P], entries: Mapping[Use, Entry]) -> P:
        """Return a copy of the plan as another class, with other entries.

        Args:
            kind: ``Plan``, or ``PlanBuilder`` for a plan to change.
            entries: the decisions of the copy, in place of those of this plan.
        """
        return kind(
            self.graph,
            self.specs,
            safe=self.safe,
            fuses=self.fuses,
            aligns=self.aligns,
            shapes=self.shapes,
            asked=self.asked,
            entries=entries,
            kept=self.kept,
            spoken=self.spoken,
        )

    def revised(self, changes: Mapping[Use, Entry]) -> Plan:
        """Return a plan with some decisions replaced or added.

        Args:
            changes: the new decisions; a use that the plan knows keeps its place in the order.
        """
        return self.copied(Plan, {**self.entries, **changes})

    def without(self, *kinds: type[Entry], uses: Iterable[Use] = ()) -> Plan:
        """Return a plan without entries of some kinds and for some uses, which stay float.

        Args:
            *kinds: classes of entries to leave out.
            uses: uses whose entries are left out, whatever the kind.
        """
        left_out = set(uses)
        entries = {
            use: entry
            for use, entry in self.entries.items()
            if not isinstance(entry, kinds) and use not in left_out
        }
        return self.copied(Plan, entries)

    def use(self, tensor: str, node: Node | None = None) -> Use:
        """Return the use of ``tensor`` by ``node``.

        Args:
            tensor: name of the tensor.
            node: the reader; None for the shared use.

        Returns:
            The reader's own use if it has an entry, otherwise the shared use.
        """
        # An entry of a single reader takes precedence over the shared one.
        if node is not None and Use(tensor, node.name) in self.entries:
            return Use(tensor, node.name)
        return Use(tensor)

    def reads(self, node: Node) -> list[Use]:
        """Return the uses of the tensors that ``node`` reads."""
        return [self.use(tensor, node) for tensor in node.operands]

    def root(self, use: Use) -> Use:
        """Return the use that owns the scale: the end of a chain of SameAs entries.

        Args:
            use: any use; one without an entry is its own root.

        Raises:
            PlanError: the chain is a cycle.
        """
        # A chain visits each entry once at most: a longer one is a cycle.
        for _ in range(len(self.entries) + 1):
            entry = self.entries.get(use)
            if not isinstance(entry, SameAs):
                return use
            use = entry.use
        raise PlanError(f"tensor {use} has its own scale as its origin")

    def entry(self, use: Use) -> Entry:
        """Return the decision at the root of a use; ``Keep`` for a root without an entry."""
        return self.entries.get(self.root(use), Keep("nothing asks for it"))

    def quantized(self, tensor: str, node: Node | None = None) -> bool:
        """Return whether ``node`` reads ``tensor`` quantized.

        Args:
            tensor: name of the tensor.
            node: the reader; None for readers without an entry of their own.
        """
        return isinstance(self.entry(self.use(tensor, node)), Quantize)

    def touches(self, node: Node) -> bool:
        """Return whether a node that is not kept float reads or computes quantized tensors."""
        # A float node reads quantized tensors through a DequantizeLinear, without computing on
        # codes.
        if node.name in self.kept:
            return False
        uses = [*self.reads(node), *map(Use, node.results)]
        return any(isinstance(self.entry(use), Quantize) for use in uses)

    def computes_on_codes(self, node: Node) -> bool:
        """Return whether a node that ``touches`` quantized tensors has a quantized weight, too.

        A layer whose constant weight stays float multiplies in float, whatever its activations
        are. Where the settings ask for no weights, activations alone count.
        """
        if not self.touches(node):
            return False
        if not is_layer(node.kind) or self.specs[node].weight is None:
            return True
        # The third input of a layer is a bias, which may be float.
        constants = list(filter(self.graph.is_constant, node.inputs[:2]))
        return not constants or any(self.quantized(name, node) for name in constants)

    def ineligible(self, tensor: str) -> str:
        """Return the reason why a tensor can never be quantized; empty if it can.

        Args:
            tensor: name of the tensor; an empty name, of an omitted input, is ineligible.
        """
        if not tensor:
            return "omitted"
        kind = self.graph.elem_type(tensor)
        # An unknown type is taken for float: most tensors of a model without type inference are.
        if kind not in (TensorProto.FLOAT, TensorProto.UNDEFINED):
            name: object = kind
            # A malformed file may hold a number that stands for no type.
            if kind in TensorProto.DataType.values():
                name = TensorProto.DataType.Name(kind).lower()
            return f"its type is {name}"
        return self._ineligible_value(tensor)

    def _ineligible_value(self, tensor: str) -> str:
        """Return the reason in the values or the use of a float tensor; empty without one.

        Args:
            tensor: name of a tensor of type float32 or of unknown type.
        """
        for holds, reason in _INELIGIBLE:
            if holds(self.graph, tensor):
                return reason
        why = self.shapes.reason(tensor)
        if not why:
            return ""
        return f"it {why}"

    def is_low_bit(self, node: Node) -> bool:
        """Return whether ``node`` needs protection from too few bits: below 16, and ``safe``."""
        if not self.safe:
            return False
        spec = self.specs[node].activation
        if spec is None or not self.static(node):
            return False
        return spec.dtype.uniform and spec.dtype.bits < 16

    def static(self, node: Node) -> bool:
        """Return whether ``node``'s activation scales, if any, are known before inference."""
        return self.specs[node].static

    def integer_only(self, node: Node) -> bool:
        """Return whether the engine has no float arithmetic, as power-of-two scales imply."""
        return has_powers_of_two(self.specs[node].activation)

    def rounds_results(self, node: Node) -> bool:
        """Return whether the engine rounds results for lack of float arithmetic or of float32."""
        spec = self.specs[node].activation
        if spec is None or self.integer_only(node):
            return spec is not None
        # Formats without a scale are those of engines that compute in the format, such as bfloat16.
        if not spec.dtype.scaled:
            return True
        # A target's compiler takes a sum whose operands have pairs. 16 bits cost no accuracy there,
        # and amd-quark rounds these results as well.
        return self.aligns and self.static(node) and spec.dtype.bits >= 16

    def holds_mask_constants(self, tensor: str) -> bool:
        """Return whether a constant holds values that mean "never" rather than a number."""
        array = self.graph.constant(tensor)
        # Integer constants are sizes and indices, whose magnitude has no meaning.
        if array is None or not array.size or array.dtype.kind != "f":
            return False
        return bool(np.abs(array).max() >= HUGE)


def explain(plan: Plan) -> str:
    """Return a paragraph per node: name and type, inputs (<), outputs (>), decisions."""
    return "\n".join(_paragraph(plan, node) for node in plan.graph.nodes)


def _paragraph(plan: Plan, node: Node) -> str:
    title = f"{printable(node.name)} ({printable(node.kind)})"
    reason = plan.kept.get(node.name)
    if reason:
        title += f"  float: {reason}"
    inputs = _decisions(plan, "<", plan.reads(node))
    outputs = _decisions(plan, ">", map(Use, node.results))
    return "\n".join((title, *inputs, *outputs))


def _decisions(plan: Plan, sign: str, uses: Iterable[Use]) -> Iterator[str]:
    """Yield a line per use with a decision; a tensor kept float at the root is shown float.

    Args:
        sign: "<" for inputs, ">" for outputs.
    """
    for use in uses:
        entry = plan.entries.get(use)
        # A tensor that nothing asked for is float, and has no line.
        if entry is not None:
            root = plan.entry(use)
            text = str(root if isinstance(root, Keep) else entry)
            yield f"  {sign} {printable(use.tensor)}: {printable(text)}"
