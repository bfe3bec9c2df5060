"""Insertion of the planned QuantizeLinear and DequantizeLinear nodes.

No other module creates Q/DQ nodes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import TensorProto

import calibrators
from calibrators import Grid, QParams, quantize
from quark_onnx.common.containers import grouped_by
from quark_onnx.config import QuantizationSpec
from quark_onnx.dtypes import INT4, INT32, UINT4, Block, Float4, Half, Integer, Scaled
from quark_onnx.files.half_precision import add_narrow
from quark_onnx.functions import DOMAIN, float4, mx
from quark_onnx.fusions.base import CONTRIB
from quark_onnx.graph import Graph, Node, add_parameter
from quark_onnx.graph.moved import pair_moved
from quark_onnx.graph.unfused_biases import unfuse_biases
from quark_onnx.kernels.blockfloat import ELEMENTS, EXPONENTS, better_mx
from quark_onnx.patterns.clip_bounds import clip_bounds
from quark_onnx.patterns.weight_axes import Moves
from quark_onnx.plan import (
    EXCLUDED,
    BiasOf,
    Entry,
    Keep,
    Plan,
    Quantize,
    Use,
    fused_into,
)
from quark_onnx.planning.blocks import lower_blocks
from quark_onnx.planning.opsets import newest_with_pairs
from quark_onnx.rules import WEIGHTED
from quark_onnx.scales.compute_qparams import Params
from quark_onnx.scales.encoded_constants import Encoding
from quark_onnx.writing.fusion_barriers import (
    behind_softmax,
    from_readers,
    is_small,
    moves_codes,
)
from quark_onnx.writing.moved_codes import drop_moved_pairs

#: Suffixes that onnxruntime appends to the name of a tensor for codes and dequantized values.
#: Its debugging tools rely on these names.
QUANTIZED, DEQUANTIZED = "_QuantizeLinear_Output", "_DequantizeLinear_Output"
#: Types of scales and zero points with typed fields in a TensorProto.
_PLAIN = tuple(map(np.dtype, ("float32", "int8", "uint8", "int16", "uint16", "int32")))
#: Types of codes whose single zero points have typed fields.
_NARROW = (INT4.numpy, UINT4.numpy)
#: Half a step between codes, with room for the rounding of scales to float32.
_HALF_STEP = 0.5 + 1e-4
#: First opsets whose DequantizeLinear has per-channel and blocked scales.
_AXIS_OPSET, _BLOCK_OPSET = 13, 21


@dataclass(frozen=True)
class _Scale:
    """Names of scale and zero point in the graph, and the range of codes."""

    dtype: Scaled
    grid: Grid
    params: QParams
    scale: str
    zero_point: str


def insert(
    graph: Graph, plan: Plan, params: Params, *, form: str = "qdq", lower: bool = True
) -> Graph:
    """Return a copy of ``graph`` with Q/DQ pairs and quantized constants.

    An activation gets one pair, shared by its consumers. A consumer with an entry of its own
    gets a second pair after the first. A graph output keeps its name. A Relu or Clip that
    saturation makes redundant is dropped.

    Args:
        graph: the float graph.
        plan: the decisions about its tensors.
        params: the scales.
        form: notation of pairs, ``QConfig.pairs``.
        lower: write blocked weights in a form that onnxruntime reads at every opset; otherwise
            in a form for ``fuse`` only.
    """
    writer = _Writer(graph, plan, params, form)
    writer.drop_clipping()
    writer.write_all()
    if lower:
        lower_blocks(writer.graph)
    writer.graph.drop_unused()
    return writer.graph


def insert_live(
    graph: Graph, plan: Plan, params: Params, live: Iterable[Use]
) -> tuple[Graph, dict[Use, str]]:
    """Insert pairs as ``insert`` does, with the scales of ``live`` as graph inputs.

    Constants with a live scale stay float and are quantized at runtime. Biases stay float.

    Args:
        graph: the float graph.
        plan: the decisions about its tensors.
        params: the scales.
        live: uses whose scales become inputs.

    Returns:
        The graph, and the input name of every live scale.
    """
    writer = _LiveWriter(graph, plan, params, live)
    writer.write_all()
    writer.graph.drop_unused()
    return writer.graph, writer.names


class _Writer:
    def __init__(
        self, graph: Graph, plan: Plan, params: Params, form: str = "qdq"
    ) -> None:
        """Copy the graph; nothing is written yet.

        Args:
            graph: the float graph; not changed.
            params: the scales; codes of constants are kept in ``params.encoded``.
            form: ``QConfig.pairs``. "vendor" writes the vendor's Extended operators, "contrib" the
                com.microsoft domain; every other form writes ONNX's operators where they suffice.
        """
        self.vendor = form == "vendor"
        self.contributed = form == "contrib"
        # A copy: the float graph serves the search, the checks and a second attempt.
        self.graph = graph.copy()
        self.plan = plan
        self.params = params
        self._scales: dict[Use, _Scale] = {}
        self._shared: dict[str, str] = {}
        self._dynamics: dict[str, str] = {}
        self._nodes = {node.name: node for node in self.graph.nodes}
        self._clipped_codes: list[tuple[Node, Use]] = []

    def write_all(self) -> None:
        """Write every entry of the plan."""
        # In the order of the plan, so that equal plans give equal files.
        for tensor, uses in grouped_by(
            self.plan.entries, lambda use: use.tensor
        ).items():
            # The shared pair first, which pairs of single readers may follow.
            self._write(tensor, sorted(uses, key=lambda use: use.node is not None))
        for node, use in self._clipped_codes:
            # The pair before a kept clip has the scale of the pair after it.
            source = node.inputs[0]
            pair = self._pair(source, Use(source), self._scale(self.plan.root(use)))
            self.graph.replace_input(node, source, pair)
        if self.plan.asked.moves:
            drop_moved_pairs(self.graph)
        pair_moved(self.graph)
        unfuse_biases(self.graph)

    def drop_clipping(self) -> None:
        """Drop each Relu and Clip with the bounds of its consumers' grid."""
        # A clip is dropped only where it is the one reader of its input, and no reader needs its
        # float result.
        for node in self.graph.nodes:
            if node.kind not in ("Relu", "Clip") or node.name in self.plan.kept:
                continue
            source, result = node.inputs[0], node.outputs[0]
            producer = self.graph.producer(source)
            if producer is None or not self._is_fused(node) or self._read_float(result):
                continue
            if self._saturates(node, Use(result)) and not self._keeps_symmetric(result):
                self.graph.remove([node])
                # The name of the clip's result stays, to which the plan's entries refer.
                self.graph.set_output(producer, producer.outputs.index(source), result)
            elif self._rounds_before(producer, Use(result)):
                self._clipped_codes.append((node, Use(result)))

    def _keeps_symmetric(self, result: str) -> bool:
        """Return whether onnxruntime's placement keeps a clip to symmetric codes."""
        entry = self.plan.entry(Use(result))
        is_symmetric = isinstance(entry, Quantize) and entry.spec.symmetric
        return self.plan.asked.all_pairs and is_symmetric

    def _is_fused(self, clip: Node) -> bool:
        """Return whether the next rounding takes over a clip, which alone reads its input."""
        source = clip.inputs[0]
        if self.graph.consumers(source) != [clip] or self.graph.is_output(source):
            return False
        entry = self.plan.entries.get(Use(source))
        return entry == fused_into(clip.name, clip.op_type)

    def _rounds_before(self, producer: Node, use: Use) -> bool:
        """Return whether a pair before the Relu or Clip of a layer or Concat makes it integer.

        Rounding before and after a Relu or Clip on one scale gives the same codes as rounding
        after it, because both are monotonic and zero is a code. onnxruntime has integer kernels
        only for a layer between Q/DQ pairs, and a fused Conv and Relu of floats otherwise
        (SqueezeNet S8S8: 14.9 instead of 7.5 ms). The integer engines of power-of-two scales
        fuse both and need no pair.

        Args:
            producer: the node that computes the input of the Relu or Clip.
            use: the shared use of the result of the Relu or Clip.
        """
        if producer.kind == "Concat":
            factors = producer.inputs
        elif producer.kind in WEIGHTED:
            # The bias has no codes of 8 bits.
            factors = producer.inputs[:2]
        else:
            return False
        uses = [self.plan.use(name, producer) for name in factors]
        return all(self._eight_bits(self.plan.entry(member)) for member in [*uses, use])

    @staticmethod
    def _eight_bits(entry: Entry) -> bool:
        """Return whether a tensor has 8-bit codes with a static float scale."""
        if not isinstance(entry, Quantize) or entry.spec.pow2 or entry.spec.dynamic:
            return False
        dtype = entry.spec.dtype
        return isinstance(dtype, Integer) and dtype.bits == 8

    def _read_float(self, tensor: str) -> bool:
        """Return whether a consumer reads the unquantized value."""
        # A body reads the float value of a captured tensor, which no entry of the plan describes.
        if self.graph.captured(tensor):
            return True
        uses = [Use(tensor)]
        uses += [self.plan.use(tensor, node) for node in self.graph.consumers(tensor)]
        return any(isinstance(self.plan.entry(use), Keep) for use in uses)

    def _saturates(self, node: Node, use: Use) -> bool:
        """Return whether QuantizeLinear saturates at the bounds of a Relu or Clip.

        Args:
            node: the Relu or Clip.
            use: the shared use of its result.

        Returns:
            True if both bounds are end codes of the grid, or lie within half a step of them; False
            without constant bounds or without an own per-tensor scale.
        """
        entry = self.plan.entries.get(use)
        bounds = clip_bounds(self.graph, node)
        if not isinstance(entry, Quantize) or bounds is None:
            return False
        if (
            use not in self.params.table
            or not entry.spec.dtype.uniform
            or entry.axis is not None
        ):
            return False
        grid = entry.spec.grid
        # The bounds of the clip are the end codes: QuantizeLinear saturates at the same values.
        params = self.params.table[use]
        codes = quantize(np.array(bounds), params, grid)
        ends = np.array([grid.qmin, grid.qmax])
        # A bound halfway between two codes is rounded to either: its end code is as near.
        past = np.abs((ends - params.zero_point) * params.scale - bounds)
        return bool(np.all((codes == ends) | (past <= _HALF_STEP * params.scale)))

    def _write(self, tensor: str, uses: list[Use]) -> None:
        """Quantize a tensor: the shared pair first, then consumers' own entries.

        Args:
            uses: the uses of the tensor with an entry; the shared use comes first, if there is one.
        """
        # Before any rewiring, which changes the readers of the tensor.
        readers = self._readers(tensor, uses)
        value = quantized = self._release(tensor, uses)
        converted: list[tuple[Use, str]] = []
        for use in uses:
            # A reader with another format gets the float value, unless the producer has decided on
            # codes; a reader for which the user keeps the tensor float gets it in any case.
            is_spoken = tensor in self.plan.spoken
            is_excluded = self.plan.entries[use] == Keep(EXCLUDED)
            source = quantized if is_spoken and not is_excluded else value
            # A graph output: the dequantized value takes the name of the tensor.
            is_renamed = value != tensor and not use.node
            # The names of onnxruntime's quantizer.
            is_apart = self._dedicated(use) and len(readers[use]) > 1
            name = f"{use_name(use)}{DEQUANTIZED}_1" if is_apart else ""
            # Readers that ask for the same format share a pair.
            alike = [form for other, form in converted if self._alike(other, use)]
            if alike and not is_apart:
                result = alike[0]
            else:
                if use.node and source == quantized and readers.get(Use(tensor)):
                    source = self._for_conversion(source)
                result = self._form(source, use, tensor if is_renamed else name)
            if use.node is None:
                quantized = result
            else:
                converted.append((use, result))
            for index, node in enumerate(readers[use]):
                if index and self._dedicated(use):
                    name = f"{use_name(use)}{DEQUANTIZED}_{index + 1}"
                    result = self._form(source, use, name)
                self.graph.replace_input(node, tensor, result)

    def _for_conversion(self, quantized: str) -> str:
        """Return a dequantized value for a conversion, apart from that of other readers.

        onnxruntime's quantizer writes such a DequantizeLinear: an engine makes one operator of it
        and the QuantizeLinear after it.
        """
        node = self.graph.producer(quantized)
        if not self.plan.asked.like_onnxruntime or node is None:
            return quantized
        if node.op_type != "DequantizeLinear":
            return quantized
        return self.graph.compute(
            node.op_type,
            node.inputs,
            f"{quantized}_convert",
            domain=node.domain,
            **node.attributes,
        )

    def _alike(self, one: Use, other: Use) -> bool:
        """Return whether two readers of an activation get equal codes of one format."""
        if self.graph.is_constant(one.tensor) or self._dedicated(other):
            return False
        roots = self.plan.root(one), self.plan.root(other)
        first, second = (self.params.table.get(root) for root in roots)
        if first is None or second is None:
            return False
        return self.plan.entries[roots[0]] == self.plan.entries[roots[1]] and (
            np.array_equal(first.scale, second.scale)
            and np.array_equal(first.zero_point, second.zero_point)
        )

    def _dedicated(self, use: Use) -> bool:
        """Return whether every consumer of a tensor gets a separate pair."""
        given = self.plan.asked.tensors.of(use.tensor, use.node or "")
        return given is not None and given.dedicated

    def _form(self, source: str, use: Use, result: str) -> str:
        """Write the quantized form of a tensor under a use.

        Args:
            source: name of the value to quantize: the float value, or the dequantized value of the
                shared pair.
            result: name of the dequantized value; empty for a new name.

        Returns:
            The name of the value that the consumers of the use read: ``result`` if given, or
            ``source`` if the use stays float.
        """
        # A tensor with the scale of another one (SameAs) is written with the parameters of that
        # one.
        root = self.plan.root(use)
        entry = self.plan.entries.get(root)
        if isinstance(entry, Quantize):
            return self._quantized(source, use, root, entry, result)
        # A bias is always a constant.
        if isinstance(entry, BiasOf) and entry.stored:
            return self._constant(use.tensor, use, root)
        return source

    def _quantized(
        self, source: str, use: Use, root: Use, entry: Quantize, result: str
    ) -> str:
        """Write a tensor in the format of an entry.

        Args:
            source: name of the float value.
            root: the use whose parameters are used.
            entry: the decision for ``root``.
            result: name of the result; empty for a new one.

        Returns:
            The name of the dequantized value.
        """
        spec, constant = entry.spec, self.graph.is_constant(use.tensor)
        # Formats without a scale come first, as they have no parameters in the table.
        if isinstance(spec.dtype, Half):
            return self._cast(source, use, spec, result, constant)
        if isinstance(spec.dtype, Block):
            return self._block(source, use, entry, spec.dtype, result)
        if spec.dynamic:
            return self._dynamic(source)
        given = self.plan.asked.tensors.of(use.tensor, use.node or "")
        if constant and (given is None or given.stored):
            return self._constant(use.tensor, use, root)
        if entry.layout is not None:
            return self._laid_out_pair(source, use, root, entry)
        return self._pair(source, use, self._scale(root), result)

    def _laid_out_pair(self, source: str, use: Use, root: Use, entry: Quantize) -> str:
        """Append Q and DQ to a weight in the shape of its codes; return the restored weight."""
        assert entry.layout is not None
        shape = entry.layout.shape
        stored = entry.stored_sizes(shape)
        arranged = self._moved(source, entry.layout.arranging())
        if stored != entry.layout.merged:
            arranged = self._reshaped(arranged, stored)
        codes = self._pair(arranged, use, self._scale(root))
        return self._moved(codes, entry.layout.restoring(stored))

    def _readers(self, tensor: str, uses: list[Use]) -> dict[Use, list[Node]]:
        """Return the consumers of the tensor for every use with an entry.

        Returns:
            For the shared use, every consumer without an entry of its own; for any other use, the
            named consumer, or an empty list if the graph has no such node.
        """
        # A reader with an entry of its own does not read the shared pair.
        named = {use.node for use in uses}
        readers = dict[Use, list[Node]]()
        for use in uses:
            if use.node is None:
                consumers = self.graph.consumers(tensor)
                readers[use] = [node for node in consumers if node.name not in named]
            else:
                reader = self._nodes.get(use.node)
                readers[use] = [] if reader is None else [reader]
        return readers

    def _release(self, tensor: str, uses: list[Use]) -> str:
        """Return the name of the float value; a quantized graph output gets another one.

        DequantizeLinear takes over the name of the output.
        """
        producer = self.graph.producer(tensor)
        entry = self.plan.entry(uses[0])
        is_quantized = uses[0].node is None and isinstance(entry, Quantize)
        if producer is None or not is_quantized or not self.graph.is_output(tensor):
            return tensor
        name = self.graph.fresh(f"{tensor}_QuantizeLinear_Input")
        self.graph.set_output(producer, producer.outputs.index(tensor), name)
        return name

    def _pair(self, source: str, use: Use, scale: _Scale, result: str = "") -> str:
        """Append Q and DQ to a tensor.

        A Max or Min is added where QuantizeLinear alone would leave the grid, and a Min where
        onnxruntime must not fuse the pair with a neighbour.

        Args:
            source: name of the float value.
            use: the use of the tensor, from which the names of the new nodes are derived.
            scale: the scale and zero point to use.
            result: name of the dequantized value; empty for a new name.

        Returns:
            The name of the dequantized value.
        """
        result = result or self.graph.fresh(f"{use_name(use)}{DEQUANTIZED}")
        # The names of onnxruntime's quantizer.
        codes = self.graph.fresh(f"{use_name(use)}{QUANTIZED}")
        if self.graph.is_constant(use.tensor):
            # onnxruntime stores the codes of a constant when it loads the model.
            apart = from_readers(self.plan, use, scale.dtype, scale.params)
        else:
            # Operators on codes do not support these.
            apart = is_small(scale.dtype) or scale.params.axis is not None
        # The dequantized value gets another name, because Min, which follows, writes the result.
        plain = self.graph.fresh(f"{use_name(use)}_plain") if apart else result
        # Before QuantizeLinear, whose own saturation may reach codes outside the grid.
        source = self._saturated(source, use, scale)
        producer = self.graph.producer(source)
        if (apart and moves_codes(producer)) or behind_softmax(
            self.plan.graph,
            use.tensor,
            scale.dtype,
            scale.params,
            cautious=self.plan.asked.saturates,
        ):
            float_name = self.graph.fresh(f"{use_name(use)}_float")
            source = self._apart(source, use, scale, float_name)
        qparams = [scale.scale, scale.zero_point]
        self._node("QuantizeLinear", [source, *qparams], codes, use, scale)
        self._node("DequantizeLinear", [codes, *qparams], plain, use, scale)
        if not apart:
            return result
        return self._apart(plain, use, scale, result)

    def _apart(self, source: str, use: Use, scale: _Scale, result: str) -> str:
        """Write a Min without effect, to prevent a fusion (``writing.fusion_barriers``).

        Returns ``result``, the name of its output.
        """
        # The greatest magnitude of any dequantized value: Min with it changes nothing.
        reached = calibrators.covered(scale.params, scale.dtype.grid(symmetric=False))
        # A bound that overflows becomes infinite, which has no effect either.
        with np.errstate(over="ignore"):
            end = np.float32(max(np.abs(reached.lo).max(), np.abs(reached.hi).max()))
        greatest = self.graph.add_constant(f"{use_name(use)}_greatest", end)
        self.graph.add("Min", [source, greatest], [result])
        return result

    def _saturated(self, source: str, use: Use, scale: _Scale) -> str:
        """Clip a tensor to the real range of the codes; return the name of the result.

        QuantizeLinear saturates at the ends of the storage type, and a grid may have fewer
        codes: a format without an ONNX type, with an unused bit, or without the least code.
        Unlike Clip, Max and Min are not fused with a pair.

        Args:
            source: name of the float value.
            scale: the scale of the tensor; formats other than integers need no clipping.

        Returns:
            The name of the clipped value; ``source`` if no code can leave the grid.
        """
        if not isinstance(scale.dtype, Integer) or not self._is_clipped(scale.dtype):
            return source
        # A constant that never leaves the grid needs neither operator.
        least, greatest = self._reached(source, scale, scale.dtype)
        if least < scale.grid.qmin:
            end = self._end(use, scale, scale.grid.qmin)
            result = f"{use_name(use)}_from_least"
            source = self.graph.compute("Max", [source, end], result)
        if greatest > scale.grid.qmax:
            end = self._end(use, scale, scale.grid.qmax)
            result = f"{use_name(use)}_to_greatest"
            source = self.graph.compute("Min", [source, end], result)
        return source

    def _reached(self, source: str, scale: _Scale, dtype: Integer) -> tuple[int, int]:
        """Return QuantizeLinear's least and greatest code, those of a constant computed."""
        least, greatest = dtype.storable
        array = self.graph.constant(source)
        if array is None or not array.size:
            return least, greatest
        codes = quantize(array, scale.params, Grid(least, greatest))
        return int(codes.min()), int(codes.max())

    def _end(self, use: Use, scale: _Scale, code: int) -> str:
        """Write the real value of a code, per channel or block, as a constant.

        Returns:
            The name of the constant, float32, in a shape that broadcasts against the tensor.
        """
        shape = self._shape(use, scale)
        step, zero_point = scale.params.spread(shape)
        # In float64, because a code of 32 bits times a scale is inexact in float32.
        with np.errstate(over="ignore"):
            real = ((code - zero_point) * step.astype(np.float64)).astype(np.float32)
        return self.graph.add_constant(f"{use_name(use)}_end", real)

    def _shape(self, use: Use, scale: _Scale) -> tuple[int, ...]:
        """Return the tensor's shape, as far as needed for the ends of codes.

        Args:
            use: the use of the tensor; its rank is known if the scale has an axis.

        Returns:
            The sizes, with 1 for symbolic sizes; empty for a per-tensor scale.
        """
        params = scale.params
        if params.axis is None:
            return ()
        sizes = self.graph.shape(use.tensor)
        assert sizes is not None, f"{use.tensor}: channels of an unknown rank"
        entry = self.plan.entries.get(self.plan.root(use))
        if isinstance(entry, Quantize):
            sizes = entry.sizes(sizes)
        # Symbolic sizes are never those of the channels, and broadcast as 1.
        return tuple(size if isinstance(size, int) else 1 for size in sizes)

    def _dynamic(self, source: str) -> str:
        """Compute scale and codes of a tensor at runtime, once for every consumer.

        Args:
            source: name of the float value.

        Returns:
            The output name of DequantizeLinear.
        """
        # Layers that read one tensor share its codes.
        if source not in self._dynamics:
            codes = [
                self.graph.fresh(f"{source}_{suffix}")
                for suffix in ("quantized", "scale", "zero_point")
            ]
            result = self.graph.fresh(f"{source}{DEQUANTIZED}")
            for op_type, inputs, outputs in (
                ("DynamicQuantizeLinear", [source], codes),
                ("DequantizeLinear", codes, [result]),
            ):
                self.graph.add(op_type, inputs, outputs, name=f"{source}_{op_type}")
            self._dynamics[source] = result
        return self._dynamics[source]

    def _cast(
        self, source: str, use: Use, spec: QuantizationSpec, result: str, constant: bool
    ) -> str:
        """Cast a tensor to 16 bits and back; a constant is stored in 16 bits.

        Args:
            source: name of the float value.
            use: the use of the tensor, from which the names of the new nodes are derived.
            spec: quantization to a 16-bit float; with ``saturate``, values are clipped to the
                largest finite value first.
            result: name of the float32 result; empty for a new name.
            constant: ``source`` is a constant.

        Returns:
            The name of the float32 result.
        """
        stem, dtype = use_name(use), spec.dtype
        assert isinstance(dtype, Half)
        result = result or self.graph.fresh(f"{stem}_dequantized")
        if constant:
            array = self.graph.known(source)
            if spec.saturate:
                # Greater values would be stored as infinity.
                array = array.clip(-dtype.largest, dtype.largest)
            halves = array.astype(dtype.numpy)
            narrow = self.graph.add_constant(f"{stem}_{dtype.name}", halves)
        else:
            narrow = self.graph.fresh(f"{stem}_{dtype.name}")
            if spec.saturate:
                ends = [
                    self._once(f"{dtype.name}_least", np.float32(-dtype.largest)),
                    self._once(f"{dtype.name}_greatest", np.float32(dtype.largest)),
                ]
                source = self.graph.compute(
                    "Clip", [source, *ends], f"{stem}_clipped", name=f"{stem}_Clip"
                )
            if self.vendor:
                self._extended("ExtendedQuantizeLinear", source, narrow, use, dtype)
            else:
                self.graph.add(
                    "Cast",
                    [source],
                    [narrow],
                    name=f"{stem}_Cast_to_{dtype.name}",
                    to=dtype.onnx,
                )
        if self.vendor:
            self._extended("ExtendedDequantizeLinear", narrow, result, use, dtype)
        else:
            self.graph.add(
                "Cast",
                [narrow],
                [result],
                name=f"{stem}_Cast_from_{dtype.name}",
                to=int(TensorProto.FLOAT),
            )
        return result

    def _extended(
        self, op_type: str, source: str, result: str, use: Use, dtype: Half
    ) -> None:
        """Write a vendor's cast: scale one, and a zero point of the target type.

        Args:
            op_type: ExtendedQuantizeLinear or ExtendedDequantizeLinear.
            use: the use of the tensor, from which the name of the node is derived.
            dtype: the 16-bit type.
        """
        # AMD's Extended operators take scale and zero point for 16-bit floats, too.
        inputs = [
            source,
            self._once("one", np.float32(1)),
            self._once(f"{dtype.name}_zero", np.zeros((), dtype.numpy)),
        ]
        self.graph.import_domain(DOMAIN)
        self.graph.add(
            op_type, inputs, [result], name=f"{use_name(use)}_{op_type}", domain=DOMAIN
        )

    def _once(self, name: str, value: NDArray[Any] | np.generic) -> str:
        """Write a constant at the first call with a name, and return the name in the graph."""
        if name not in self._shared:
            self._shared[name] = self.graph.add_constant(name, np.asarray(value))
        return self._shared[name]

    def _block(
        self, source: str, use: Use, entry: Quantize, dtype: Block, result: str
    ) -> str:
        """Write a node that rounds blocks.

        Blocks lie along the channels (axis 1) unless the plan names another axis. If the better
        of two scales is chosen per block, the constant is stored rounded, and the node computes
        the scales again.

        Args:
            source: name of the float value.
            entry: the decision for the tensor, with the axis of the blocks.
            dtype: the block format of ``entry``.
            result: name of the rounded value; empty for a new name.

        Returns:
            The name of the rounded value.
        """
        stem, axis, rule = use_name(use), entry.axis, entry.spec.exponent
        result = result or self.graph.fresh(f"{stem}_{dtype.name}")
        if axis is None:
            # Vectors and tensors of unknown rank have blocks along the last axis.
            axis = 1 if len(self.graph.sizes(use.tensor)) > 1 else -1
        # Only constants have values to compare scales on.
        array = self.graph.constant(source) if rule == "best" else None
        if array is not None and dtype.element in ELEMENTS:
            rounded = better_mx(array, axis, dtype.element, dtype.block_size)
            source = self.graph.add_constant(f"{stem}_rounded", rounded)
        attributes = {**dict(dtype.attributes), "axis": axis}
        domain = DOMAIN
        if rule in EXPONENTS and rule != "floor":
            # AMD's operator rounds exponents down; other rules need functions of this package's
            # domain.
            domain, attributes["exponent"] = mx.OWN, rule
        self.graph.import_domain(domain)
        name = f"{stem}_{dtype.op_type}"
        self.graph.add(
            dtype.op_type, [source], [result], name=name, domain=domain, **attributes
        )
        return result

    def _constant(self, tensor: str, use: Use, root: Use) -> str:
        """Store a constant as codes followed by DQ.

        Args:
            tensor: name of the float constant.
            use: the use of the constant, from which the names of codes and node are derived.
            root: the use whose scale and zero point are used.

        Returns:
            The name of the dequantized value.
        """
        scale = self._scale(root)
        entry = self.plan.entries[root]
        name = self._codes(tensor, use, scale, entry)
        result = self.graph.fresh(f"{use_name(use)}{DEQUANTIZED}")
        inputs = [name, scale.scale, scale.zero_point]
        if scale.params.block_size and not scale.params.zero_point.any():
            # onnxruntime 1.32 reads and subtracts a zero point for every value, if there is one.
            del inputs[2]
        self._node("DequantizeLinear", inputs, result, use, scale)
        result = self._restored(result, tensor, entry)
        if isinstance(entry, Quantize) and from_readers(
            self.plan, use, scale.dtype, scale.params
        ):
            float_name = self.graph.fresh(f"{use_name(use)}_float")
            return self._apart(result, use, scale, float_name)
        return result

    def _codes(self, tensor: str, use: Use, scale: _Scale, entry: Entry) -> str:
        """Store the codes of a constant, those of an earlier insertion if known.

        Args:
            tensor: name of the float constant.
            use: the use of the constant, from which the name of the codes is derived.
            entry: the decision for the constant, with the arrangement of its codes.

        Returns:
            The name of the codes.
        """
        name = self.graph.fresh(f"{use_name(use)}_quantized")
        flat = isinstance(entry, Quantize) and entry.flat
        layout = entry.layout if isinstance(entry, Quantize) else None
        encoding = Encoding(
            self.graph.initializers[tensor],
            scale.params,
            scale.dtype,
            scale.grid,
            flat,
            layout,
        )
        # The search and the acceptance of biases insert pairs several times; weights are encoded
        # once.
        encoded = self.params.encoded.find(name, encoding)
        if encoded is not None:
            self.graph.initializers[name] = encoded
            return name
        array = self.graph.known(tensor)
        if layout is not None:
            array = np.ascontiguousarray(layout.arranged(array))
        codes = scale.dtype.encode(array, scale.params, scale.grid)
        # The axis of blocks and all later axes become one.
        lines = (*array.shape[: scale.params.axis], -1)
        self.graph.set_constant(name, codes.reshape(lines) if flat else codes)
        self.params.encoded.keep(name, encoding, self.graph.initializers[name])
        return name

    def _restored(self, source: str, tensor: str, entry: Entry) -> str:
        """Restore the shape of a constant from that of its codes; return the name of the result.

        Args:
            source: name of the dequantized value.
            tensor: name of the float constant.
            entry: the decision for the constant.
        """
        if not isinstance(entry, Quantize):
            return source
        shape = tuple(self.graph.initializers[tensor].dims)
        if entry.layout is not None:
            stored = entry.stored_sizes(shape)
            return self._moved(source, entry.layout.restoring(stored))
        # Blocks over several axes: the codes are a matrix.
        return self._reshaped(source, shape) if entry.flat else source

    def _moved(self, source: str, steps: Moves) -> str:
        """Write Reshape and Transpose operators; return the name of the last result."""
        for op_type, sizes in steps:
            if op_type == "Reshape":
                source = self._reshaped(source, sizes)
                continue
            result = f"{source}_transposed"
            source = self.graph.compute(op_type, [source], result, perm=sizes)
        return source

    def _reshaped(self, source: str, shape: tuple[int, ...]) -> str:
        """Reshape a tensor; return the name of the result."""
        by = self._once(f"shape_{'_'.join(map(str, shape))}", np.array(shape, np.int64))
        return self.graph.compute("Reshape", [source, by], f"{source}_reshaped")

    def _scale(self, root: Use) -> _Scale:
        """Return the scale and zero point of a root, written once.

        Args:
            root: a use with a ``Quantize`` or ``BiasOf`` entry and with parameters.
        """
        # Tensors with the scale of another one (SameAs) share the initializers of their root.
        if root not in self._scales:
            entry, params = self.plan.entries[root], self.params.table[root]
            assert isinstance(entry, Quantize | BiasOf)
            dtype: Scaled
            if isinstance(entry, BiasOf):
                dtype = entry.dtype
                grid = dtype.grid(symmetric=True)
            else:
                dtype = entry.spec.codes
                grid = self._grid(entry)
            # The type of the zero point is the type of the codes (ONNX, QuantizeLinear).
            zero_point = params.zero_point.astype(dtype.numpy)
            zero_name = f"{use_name(root)}_zero_point"
            # onnxruntime's quantizer stores vectors for biases, as bytes.
            in_vectors = isinstance(entry, BiasOf) and self.plan.asked.like_onnxruntime
            if in_vectors and zero_point.ndim:
                zero = self.graph.add_constant(zero_name, zero_point)
            else:
                zero = self._parameter(zero_name, zero_point)
            if in_vectors:
                scales = np.atleast_1d(params.scale)
                stored = self.graph.add_constant(f"{use_name(root)}_scale", scales)
            else:
                stored = self._store(root, params)
            self._scales[root] = _Scale(dtype, grid, params, stored, zero)
        return self._scales[root]

    def _grid(self, entry: Quantize) -> Grid:
        """Return the codes that a tensor may have, which the user may extend to those stored."""
        dtype = entry.spec.codes
        if self._is_clipped(dtype):
            return entry.spec.grid
        return dtype.grid(symmetric=entry.spec.symmetric)

    def _is_clipped(self, dtype: Scaled) -> bool:
        """Return whether codes stay in grids that are narrower than what ONNX stores."""
        if not isinstance(dtype, Integer) or self.plan.asked.saturates:
            return True
        # Formats of fewer bits than ONNX stores have to be clipped in any case.
        return dtype.storable != (dtype.qmin, dtype.qmax)

    def _store(self, root: Use, params: QParams) -> str:
        """Write the scale of a root, in float32 or float16 as the entry requests.

        Returns:
            The name of the float32 scale; of the Cast's output for a float16 scale.
        """
        entry = self.plan.entries[root]
        if not isinstance(entry, Quantize) or entry.spec.scale == "float32":
            return self._parameter(f"{use_name(root)}_scale", params.scale)
        return add_narrow(
            self.graph, f"{use_name(root)}_scale", params.scale.astype(np.float16)
        )

    def _parameter(self, name: str, array: NDArray[Any]) -> str:
        """Write a scale or a zero point, large for blocked formats; return its name."""
        # Typed fields are written value by value, which is slow for the many scales of blocks.
        typed = array.dtype in _PLAIN or (array.size == 1 and array.dtype in _NARROW)
        if array.ndim <= 1 and typed:
            return add_parameter(self.graph, name, array)
        return self.graph.add_constant(name, array)

    def _node(
        self, op_type: str, inputs: list[str], output: str, use: Use, scale: _Scale
    ) -> None:
        """Append a QuantizeLinear or DequantizeLinear node, in a domain that has the format.

        Args:
            inputs: names of the value, of the scale, and of the zero point if there is one.
            use: the use of the tensor, from which the name of the node is derived.
            scale: format, axis and block size.
        """
        params, dtype = scale.params, scale.dtype
        # Per-tensor nodes have no axis, which opsets before 13 do not know.
        attributes = {} if params.axis is None else {"axis": params.axis}
        if params.block_size:
            attributes["block_size"] = params.block_size
        # Both nodes of a pair, or neither.
        is_known = dtype.read and (dtype.emitted or self.graph.is_constant(inputs[0]))
        # onnxruntime 1.20 refuses an int32 zero point other than 0, which 1.32 subtracts.
        is_known &= not (dtype is INT32 and params.zero_point.any())
        domain = ""
        if isinstance(dtype, Float4):
            # The functions have no zero point.
            op_type, domain, inputs = f"Float4{op_type}", float4.DOMAIN, inputs[:2]
            # onnx's evaluator ignores defaults of function attributes.
            attributes.setdefault("axis", 0)
        elif not is_known or self._is_extended(dtype, params):
            op_type, domain = f"Extended{op_type}", DOMAIN
        elif self._is_contributed(dtype, params):
            domain = CONTRIB
        if domain:
            self.graph.import_domain(domain)
        self.graph.add(
            op_type,
            inputs,
            [output],
            name=f"{use_name(use)}_{op_type}",
            domain=domain,
            **attributes,
        )

    def _is_extended(self, dtype: Scaled, params: QParams) -> bool:
        """Return whether the vendor's operators write a format that ONNX has, too."""
        if not self.vendor or params.block_size:
            return False
        return isinstance(dtype, Integer) and dtype.bits >= 8

    def _is_contributed(self, dtype: Scaled, params: QParams) -> bool:
        """Return whether operators of the com.microsoft domain write a format."""
        if self.contributed:
            return True
        least = _least_opset(dtype, params)
        return not least <= self.graph.opset <= newest_with_pairs()


class _LiveWriter(_Writer):
    def __init__(
        self, graph: Graph, plan: Plan, params: Params, live: Iterable[Use]
    ) -> None:
        """Copy the graph; nothing is written yet.

        Args:
            graph: the float graph; not changed.
            plan: the decisions about its tensors; those for biases are ignored.
            params: the scales; for ``live``, the scales from which a search starts.
            live: uses whose scales become graph inputs.
        """
        # The scale of a bias would have to follow the live scales: biases stay float.
        super().__init__(graph, plan.without(BiasOf), params)
        self.names = dict.fromkeys(live, "")

    def _store(self, root: Use, params: QParams) -> str:
        if root not in self.names:
            return super()._store(root, params)
        self.names[root] = self.graph.add_input(
            f"{use_name(root)}_scale", TensorProto.FLOAT, params.scale.shape
        )
        return self.names[root]

    def _alike(self, one: Use, other: Use) -> bool:
        # Each live scale is an input of its own.
        return False

    def _reached(self, source: str, scale: _Scale, dtype: Integer) -> tuple[int, int]:
        if scale.scale not in self.names.values():
            return super()._reached(source, scale, dtype)
        # The live scale is unknown, and any code of the storage type may occur.
        return dtype.storable

    def _apart(self, source: str, use: Use, scale: _Scale, result: str) -> str:
        if scale.scale not in self.names.values():
            return super()._apart(source, use, scale, result)
        # The bound of the Min would be that of the first scale, and clip at greater ones. Models
        # with live scales run without the fusions that the Min prevents.
        self.graph.add("Identity", [source], [result])
        return result

    def _end(self, use: Use, scale: _Scale, code: int) -> str:
        if scale.scale not in self.names.values():
            return super()._end(use, scale, code)
        # The real value of the code, computed at runtime: (code - zero point) * scale.
        steps = (code - scale.params.zero_point).astype(np.float32)
        inputs = [self.graph.add_constant(f"{use_name(use)}_steps", steps), scale.scale]
        result = self.graph.compute("Mul", inputs, f"{use_name(use)}_end")
        if scale.params.axis is None:
            return result
        # (channels,) in the shape that broadcasts against the tensor.
        _, along = scale.params.spread(self._shape(use, scale))
        return self._reshaped(result, along.shape)

    def _constant(self, tensor: str, use: Use, root: Use) -> str:
        if root not in self.names:
            return super()._constant(tensor, use, root)
        entry, scale = self.plan.entries[root], self._scale(root)
        if isinstance(entry, Quantize) and entry.layout is not None:
            return self._laid_out_pair(tensor, use, root, entry)
        if not isinstance(entry, Quantize) or not entry.flat:
            return self._pair(tensor, use, scale)
        shape = tuple(self.graph.initializers[tensor].dims)
        lines = self._reshaped(tensor, (*shape[: entry.axis], -1))
        return self._reshaped(self._pair(lines, use, scale), shape)


def _least_opset(dtype: Scaled, params: QParams) -> int:
    """Return the first opset whose DequantizeLinear supports a format.

    Args:
        params: scale and zero point; axis and block size need later opsets.
    """
    if params.block_size:
        return max(dtype.min_opset, _BLOCK_OPSET)
    if params.axis is None:
        return dtype.min_opset
    return max(dtype.min_opset, _AXIS_OPSET)


def use_name(use: Use) -> str:
    """Return the stem of a use's names: the tensor, and the reader for a use of its own."""
    if use.node is None:
        return use.tensor
    return f"{use.tensor}_{use.node}"
