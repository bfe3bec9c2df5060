"""Matching of a float model's tensors with their counterparts in a quantized model.

Names come first: most tools keep the name of a tensor, or add a suffix. Other tensors are found by
walking both graphs from their inputs. A node is matched with a node of the same operator that reads
matched tensors at the same positions. Of several candidates the node with the closest weights wins,
then the first. A fused or folded operator (Relu, BatchNormalization, Identity) has no node of its
own, and its result is the result of the operator before it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from quark_onnx.analysis.reading import FLOATS, Operand, Reading
from quark_onnx.common.errors import ModelError
from quark_onnx.graph import Node

#: Suffixes that tools add to tensor names.
#: The plain name comes first, and values before codes, so that the tensor with real values is
#: found.
SUFFIXES = (
    "",
    "_DequantizeLinear_Output",
    "_dequantized",
    "_QuantizeLinear_Input",
    "_float",
    "_quantized",
    "_QuantizeLinear_Output",
)
_SATURATING = ("Relu", "Clip")
#: Operators that tools fold into the operator before them, or omit.
FOLDED = ("BatchNormalization", "Identity", "Dropout", "Cast")
#: Folded operators whose result equals their input.
_UNCHANGING = ("Identity", "Dropout", "Cast")
#: Tools may exchange the two operands of these.
_COMMUTATIVE = ("Add", "Mul", "Max", "Min", "Sum")


@dataclass(frozen=True)
class TensorPair:
    """A tensor of the float model and its counterpart.

    Attributes:
        tensor: tensor of the float model.
        raw: tensor of the quantized model before its grid.
        how: name or structure.
        fused: the float operator if it has no node of its own, so that ``raw`` is the result of
            another operator; otherwise empty.
    """

    tensor: str
    raw: str
    how: str
    fused: str = ""


@dataclass
class Matching:
    """Counterparts of tensors and nodes.

    Attributes:
        pairs: pairs by tensor of the float model. Pairs of other types than float lead to further
            pairs and are not compared.
        nodes: node of the float model -> node of the quantized model with the same computation and
            weights.
        unmatched: tensors of the float model without a counterpart, with the reason.
    """

    pairs: dict[str, TensorPair] = field(default_factory=dict)
    nodes: dict[Node, Node] = field(default_factory=dict)
    unmatched: dict[str, str] = field(default_factory=dict)


def match(reference: Reading, other: Reading) -> Matching:
    """Pair the tensors of two models.

    Args:
        reference: the float model.
        other: the quantized model.

    Returns:
        Pairs of tensors and nodes.

    Raises:
        ModelError: the models have no input in common.
    """
    walk = _Walk(reference, other)
    walk.match_inputs()
    walk.match_names()
    # In topological order: inputs of a node are paired before the node. match_names comes first,
    # because names are certain, and structure only closes the gaps.
    for node in filter(walk.computes, reference.graph.nodes):
        walk.match_node(node)
    walk.explain()
    return walk.found


class _Walk:
    def __init__(self, reference: Reading, other: Reading) -> None:
        self.reference, self.other = reference, other
        self.found = Matching()
        # Nodes of the quantized model that have a partner; one node has one partner at most.
        self._taken: set[Node] = set()
        # Place in graph order, which breaks ties between equal weights.
        self._place = {node: place for place, node in enumerate(other.graph.nodes)}
        self._names = set(other.graph.results())
        self._reasons: dict[str, str] = {}

    def computes(self, node: Node) -> bool:
        """Return True if a node's result depends on the inputs of the float model."""
        known = self.reference.constants.known
        return not all(known(name) for name in node.results)

    def match_inputs(self) -> None:
        """Pair the inputs of both models by name.

        Raises:
            ModelError: the quantized model lacks an input of the float model.
        """
        inputs = [value.name for value in self.reference.graph.fed]
        others = {value.name for value in self.other.graph.inputs}
        missing = [value for value in inputs if value not in others]
        if missing:
            # Initializers may be inputs as well (always up to IR version 3), which no caller feeds.
            input_names = sorted(others - self.other.graph.initializers.keys())
            raise ModelError(
                f"the quantized model lacks the input {missing[0]!r} of the float"
                f" model; its inputs are: {', '.join(input_names) or 'none'}",
            )
        for name in inputs:
            self._pair(name, name, "name")

    def match_names(self) -> None:
        """Pair tensors by name.

        Names are ignored if most tensors with equal names are computed by other operators.
        """
        sure, doubtful = self._same_names()
        # A tool that renumbers tensors ("123" is another tensor then) makes most namesakes
        # doubtful.
        trusted = len(sure) >= len(doubtful)
        for tensor, raw in sure + doubtful * trusted:
            producer = self.reference.graph.producer(tensor)
            fused = ""
            # Another operator computes the namesake, so the float operator must have been fused.
            if producer is not None and not self._alike(producer, raw):
                fused = producer.op_type
            self._pair(tensor, raw, "name", fused=fused)
            self._match_producers(tensor, raw)

    def _same_names(self) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
        """Return tensors with their namesakes before the grids.

        Returns:
            Namesakes by the same operator or at an output, and by other operators.
        """
        sure = list[tuple[str, str]]()
        doubtful = list[tuple[str, str]]()
        for node in filter(self.computes, self.reference.graph.nodes):
            for tensor in node.results:
                name = self._namesake(tensor)
                # The float tensor depends on the data: a constant of that name is another tensor.
                if not name or self.other.constants.known(name):
                    continue
                # The namesake may be the output of a DequantizeLinear; the pair is of results
                # before the grid.
                raw = self.other.origin(name)
                certain = self._certain(node, tensor, raw)
                (sure if certain else doubtful).append((tensor, raw))
        return sure, doubtful

    def _namesake(self, tensor: str) -> str:
        """Return the tensor of the quantized model with the same name; empty if none."""
        namesakes = (tensor + suffix for suffix in SUFFIXES)
        return next((name for name in namesakes if name in self._names), "")

    def _certain(self, node: Node, tensor: str, raw: str) -> bool:
        """Return whether a tensor is surely its namesake in the quantized model."""
        if self.reference.graph.is_output(tensor):
            # tools keep the names of inputs and outputs
            return True
        return self._alike(node, raw) or self._before_fused(node, raw)

    def match_node(self, node: Node) -> None:
        """Pair results of a node without a counterpart by structure."""
        # Some outputs may be paired by name already.
        missing = [result for result in node.results if result not in self.found.pairs]
        if not missing:
            return
        chosen = self._choose(node)
        if chosen is None:
            self._fold(node)
            return
        self._taken.add(chosen)
        self.found.nodes[node] = chosen
        # The optional outputs that the quantized node lacks (empty names) stay without a partner.
        for name in missing:
            counterpart = chosen.output(node.outputs.index(name))
            if counterpart:
                self._pair(name, counterpart, "structure")

    def explain(self) -> None:
        """Record a reason for every float tensor without a counterpart."""
        for node in filter(self.computes, self.reference.graph.nodes):
            reason = f"no {node.op_type} of the quantized model reads the same tensors"
            for name in node.results:
                if name not in self.found.pairs and self._float(name):
                    self.found.unmatched[name] = self._reasons.get(name, reason)

    # -- by name
    # ----------------------------------------------------------------------------------

    def _alike(self, node: Node, raw: str) -> bool:
        """Return whether a quantized tensor is computed by the operator of a node."""
        producer = self.other.graph.producer(raw)
        return producer is not None and self._are_alike(node, producer)

    def _are_alike(self, node: Node, other: Node) -> bool:
        """Return True if a node of the quantized model has the operator of a float node."""
        return self.other.operands(other)[0] == self.reference.operands(node)[0]

    def _before_fused(self, node: Node, raw: str) -> bool:
        """Return True if the operator before a fused operator computes a tensor.

        Args:
            node: node of the float model, which may have been fused into the operator before.
            raw: tensor of the quantized model before its grid.
        """
        # Chains such as Conv, BatchNormalization, Relu fuse into the first operator.
        while node.op_type in _SATURATING or node.op_type in FOLDED:
            before = self.reference.graph.producer(node.inputs[0])
            if before is None:
                return self.other.graph.is_input(raw)
            if self._alike(before, raw):
                return True
            node = before
        return False

    def _match_producers(self, tensor: str, raw: str) -> None:
        """Pair the producers of two tensors.

        Fused producers have no counterpart, and neither have their inputs.

        Args:
            tensor: tensor of the float model.
            raw: its counterpart, before the grid.
        """
        node = self.reference.graph.producer(tensor)
        producer = self.other.graph.producer(raw)
        if node is None or producer is None:
            return
        # The operators agree, or the names alone pair the results.
        if not self._before_fused(node, raw):
            if self._alike(node, raw) and producer not in self._taken:
                self.found.nodes[node] = producer
            self._taken.add(producer)
            return
        # Walk up the fused chain, as _before_fused did. The results inside it do not exist in the
        # quantized model.
        while not self._alike(node, raw):
            source = node.inputs[0]
            self._reasons[source] = _fused_reason(node)
            if self._counterpart(source) == raw:
                del self.found.pairs[source]
            before = self.reference.graph.producer(source)
            if before is None:
                return
            node = before
        # The first pairing of a node stays: an earlier name was found first.
        self.found.nodes.setdefault(node, producer)
        self._taken.add(producer)

    # -- by structure
    # ----------------------------------------------------------------------------------

    def _choose(self, node: Node) -> Node | None:
        """Return the quantized model's node with equal operator and inputs, or None.

        Args:
            node: node of the float model; of its inputs at least one must be paired.

        Returns:
            The node with the nearest weights if several fit; the first in graph order among equals.
        """
        inputs = [self._counterpart(name) for name in node.inputs]
        # Candidates read at least one paired input: a search in the neighbourhood, and not in the
        # whole graph.
        readers = dict[Node, None]()  # in the order of the inputs
        for raw in filter(None, inputs):
            readers.update(dict.fromkeys(self.other.readers(raw)))
        fitting = [
            reader
            for reader in readers
            if reader not in self._taken and self._fits(node, inputs, reader)
        ]
        # Weights are read only where several candidates fit; large ones cost time.
        if len(fitting) < 2:
            return fitting[0] if fitting else None
        return min(
            fitting,
            key=lambda reader: (self._distance(node, reader), self._place[reader]),
        )

    def _counterpart(self, tensor: str) -> str | None:
        pair = self.found.pairs.get(tensor)
        return pair.raw if pair is not None else None

    def _fits(self, node: Node, inputs: list[str | None], reader: Node) -> bool:
        """Return True if a node has the operator and reads the counterparts of the inputs.

        Args:
            node: node of the float model.
            inputs: counterparts of the inputs of ``node``; None where unknown.
            reader: node of the quantized model.
        """
        kind, operands = self.other.operands(reader)
        if not operands or not self._are_alike(node, reader):
            return False
        origins = [self.other.origin(operand.tensor) for operand in operands]
        if _are_read(inputs, origins):
            return True
        # Reversed for two operands; a Sum or Max of three or more in another order is not
        # recognized.
        return kind in _COMMUTATIVE and _are_read(inputs, origins[::-1])

    def _distance(self, node: Node, reader: Node) -> float:
        """Return the relative distance of two nodes' weights; 0 without weights.

        Args:
            node: node of the float model.
            reader: node of the quantized model with the same operator.

        Returns:
            The norm of the difference by the norm of the first float weight; infinity for weights
            of different shapes.
        """
        operands = self.other.operands(reader)[1]
        # The quantized node may lack trailing inputs, or have more of them. The first weight
        # decides.
        for name, operand in zip(node.inputs, operands, strict=False):
            if not self._is_weight(name, operand):
                continue
            # Equal layers side by side read the same tensor: their weights tell them apart.
            a = self.reference.constants.value(name).astype(np.float64)
            b = self.other.reals(operand)
            if a.shape != b.shape:
                # Another shape never wins against a candidate of equal shape.
                return float("inf")
            # Relative to the float weight; weights of zeros must not divide by zero.
            norm = max(float(np.linalg.norm(a)), 1e-30)
            return float(np.linalg.norm(a - b) / norm)
        return 0.0

    def _is_weight(self, name: str, operand: Operand) -> bool:
        """Return True if an operand is a float constant in both models."""
        if not self.reference.constants.known(name):
            return False
        return self.other.constants.known(operand.tensor) and self._float(name)

    def _fold(self, node: Node) -> None:
        """Pair the result of a fused node with its input if both are equal.

        Args:
            node: node of the float model without a counterpart. Nothing is paired unless the
                operator folds, or saturates at a grid that begins at zero.
        """
        source = node.input(0)
        before = self.found.pairs.get(source)
        if before is None or not node.outputs:
            return
        # A Relu disappears where the grid itself begins at zero: quantization then clips negative
        # values.
        saturates = node.op_type in _SATURATING and self._at_zero(before.raw)
        if not saturates and node.op_type not in FOLDED:
            return
        is_computed = self.reference.graph.producer(source) is not None
        # The input of the fused operator no longer exists; its name in the quantized model holds
        # the fused result.
        if is_computed and node.op_type not in _UNCHANGING:
            self._reasons[source] = _fused_reason(node)
            del self.found.pairs[source]
        self._pair(node.outputs[0], before.raw, "structure", fused=node.op_type)

    def _at_zero(self, raw: str) -> bool:
        """Return whether the grid of a tensor clips negative values."""
        grid = self.other.view(raw).grid
        if grid is None or grid.ends is None:
            return False
        # Less than a step below zero: no code stands for a negative value.
        return bool(np.all(grid.ends.lo > -grid.ends.step))

    def _float(self, tensor: str) -> bool:
        # 0 (UNDEFINED): the type was not inferred.
        return self.reference.graph.elem_type(tensor) in (*FLOATS, 0)

    def _pair(self, tensor: str, raw: str, how: str, *, fused: str = "") -> None:
        """Record a pair of tensors, matched by name or structure."""
        self.found.pairs[tensor] = TensorPair(tensor, raw, how, fused)


def _fused_reason(node: Node) -> str:
    return f"{node.op_type} is fused into the operator that computes it"


def _are_read(inputs: list[str | None], origins: list[str]) -> bool:
    """Return True if tensors have known counterparts; unknown ones (None) fit anything."""
    return all(
        raw in (None, origin) for raw, origin in zip(inputs, origins, strict=False)
    )
