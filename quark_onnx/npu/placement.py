"""Device of a node, and the reason: an ordered list of rules, the first match decides.

Each rule returns None or a placement. The rules come from the documentation, from the published
source of an older converter, from logs of AMD's own runs (RyzenAI-SW,
quark_quantization/models/*.log, 2025-10-14, release 1.7) and from third-party measurements. A
placement names its source.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from functools import cached_property

from onnx import TensorProto

from quark_onnx.common.wording import counted
from quark_onnx.graph import Graph, Node, reach
from quark_onnx.graph.codes import beyond_pairs, constant_behind
from quark_onnx.graph.node import DEQUANTIZE, QUANTIZE
from quark_onnx.npu.support import (
    CONVERTED,
    LOGS,
    ONNXSIM,
    SOURCE,
    evidence,
    is_listed,
    listed,
    measured_on,
    shown,
)
from quark_onnx.patterns.conv_and_gemm import LAYERS
from quark_onnx.patterns.depthwise import is_depthwise
from quark_onnx.targets import Target, is_fused
from quark_onnx.targets.structure import (
    BY_DATA,
    LEAST_CONVOLUTIONS,
    OPEN_INPUT,
    batch_of,
    dynamic_tensor,
    has_few_convolutions,
    is_fatal,
    is_padded_automatically,
    missing_attributes,
    open_inputs,
    why_dynamic,
)

NPU, CPU, ABORT = "NPU", "CPU", "abort"
#: The reason for float nodes that no quantized layer follows.
FLOAT_TAIL = "it is left float behind the last layer, as the decoding of boxes is"
_LOGS = LOGS
_VAIP = "zmaychek84/vaip ad80269 (2025-03), to_xir_ops_pass.cpp"
_DOCS = "Ryzen AI documentation 1.8 (2026-07-23), model_quantization.rst"
_ONNXSIM = ONNXSIM
#: Operators that the table lists without their domain. AMD's quantizer writes 16-bit pairs in this
#: domain, also in the models of its logs.
_CONTRIBUTED = {
    "com.microsoft::QuantizeLinear",
    "com.microsoft::DequantizeLinear",
    "com.microsoft::Gelu",
}
#: First opset in which the bounds of Clip are inputs.
_BOUNDS_OPSET = 11
#: Maximum rank of tensors that the engine can move.
_RANK = 4
#: Coordinate transformations of a Resize by its mode, as the converter of X1 takes them.
_PLACES = frozenset({"half_pixel", "pytorch_half_pixel", "align_corners", "asymmetric"})
_PLACES_OF_RESIZE = {"linear": _PLACES, "nearest": _PLACES | {"tf_half_pixel_for_nn"}}
_INTEGER = ("XINT8", "A8W8")
#: Formats of models with Q/DQ pairs; a BF16 model is given in float32.
_ON_CODES = (*_INTEGER, "A16W8")
#: Compilers without rules for single operators; the provider's default has no name.
_NOT_X1 = ("X2", "")
_MOVING = frozenset({"Reshape", "Transpose", "Flatten", "Squeeze", "Unsqueeze"})
#: Types in which nodes between Q/DQ pairs compute.
_FLOATS = (TensorProto.FLOAT, TensorProto.FLOAT16)


@dataclass(frozen=True)
class NodePlacement:
    """Device of a node, with the reason.

    Attributes:
        node: name of the node.
        op_type: operator of the node.
        output: first output tensor, by which reports identify the node.
        device: "NPU", "CPU", or "abort" if the compiler ends the process.
        reason: the reason in words.
        fix: how to bring the node to the NPU; empty if no way is known, or the node is there.
        confidence: "measured" on a device of this architecture by AMD or others; "documented";
            "read" in source code; "inferred"; "unknown" where no source names the operator.
        source: publication with the rule, and its date.
        cause: the reason without tensor names, by which nodes are grouped; empty if ``reason`` has
            no names.
        measured_on: architecture and release of the measurement; empty for another confidence.
    """

    node: str
    op_type: str
    output: str
    device: str
    reason: str
    fix: str
    confidence: str
    source: str
    cause: str = ""
    measured_on: str = ""


def placement(  # noqa: PLR0913
    node: Node,
    device: str,
    reason: str,
    fix: str = "",
    confidence: str = "documented",
    source: str = SOURCE,
    cause: str = "",
) -> NodePlacement:
    """Return the placement of a node.

    Args:
        node: the node.
        device: as in ``NodePlacement``.
        reason: as in ``NodePlacement``.
        fix: as in ``NodePlacement``.
        confidence: as in ``NodePlacement``.
        source: as in ``NodePlacement``.
        cause: as in ``NodePlacement``.
    """
    return NodePlacement(
        node.name,
        node.op_type,
        next(iter(node.outputs), ""),
        device,
        reason,
        fix,
        confidence,
        source,
        cause,
    )


@dataclass(frozen=True)
class Case:
    """Context of the placement of a node.

    Attributes:
        graph: the model's graph.
        target: the device.
        kind: the number format: "XINT8", "A8W8", "A16W8" or "BF16".
        release: release of Ryzen AI, such as "1.7".
        quantized: True if the graph has Q/DQ pairs; otherwise they are still to be inserted.
    """

    graph: Graph
    target: Target
    kind: str
    release: str
    quantized: bool = False

    def around(self, node: Node) -> list[str]:
        """Return the tensors that a node reads and computes, without constants."""
        names = (*node.operands, *node.results)
        return [name for name in names if not self.graph.is_constant(name)]

    @cached_property
    def static_shapes(self) -> tuple[str, str]:
        """Why the model has dynamic shapes, and how they become static."""
        cause = why_dynamic(self.graph)
        if cause == OPEN_INPUT:
            sizes = [f"--shape {name}=SIZES" for name in open_inputs(self.graph)]
            return cause, " ".join([_LEGALIZE, *sizes])
        if cause == BY_DATA:
            return cause, "cut the model in front of it (quark-onnx npu cut)"
        return cause, _LEGALIZE

    @cached_property
    def up_to_layers(self) -> frozenset[Node]:
        """The quantized convolutions and products, and all nodes before one of them."""
        layers = [
            node
            for node in self.graph.nodes_of(LAYERS)
            if not self.graph.is_constant(node.input(1))
        ]
        return frozenset(reach(layers, self.graph.leaders))

    @property
    def on_convolution_engine(self) -> bool:
        """Return True for the compiler of X1, whose converter has a rule per operator."""
        return self.target.compiler == "X1"


def place(case: Case, node: Node) -> NodePlacement:
    """Return the placement of a node.

    Args:
        case: the context.
        node: the node.
    """
    return on_device(case.target, _decided(case, node))


def on_device(target: Target, placed: NodePlacement) -> NodePlacement:
    """Return a placement with the certainty that it has on a target.

    A measurement on another architecture is an inference for this one.
    """
    if placed.confidence != "measured":
        return placed
    architecture, release = measured_on(placed.source)
    if architecture and target.architecture not in ("", architecture):
        return replace(placed, confidence="inferred")
    where = f"{architecture}, Ryzen AI {release}" if architecture else ""
    return replace(placed, measured_on=where)


def _decided(case: Case, node: Node) -> NodePlacement:
    """Return the placement by the first rule about a node, or by the table of operators."""
    # Crashes come first: a node that ends the process is not on the CPU.
    for rule in _RULES:
        decided = rule.decide(case, node) if rule.covers(case, node) else None
        if decided is not None:
            return decided
    if case.on_convolution_engine:
        device, reason = CPU, "its converter has no rule for it"
        # X1 has no table of documented operators; the source of its converter is the best published
        # predictor.
        if node.kind in CONVERTED:
            device, reason = NPU, "its converter takes it"
        return placement(node, device, reason, "", "read", _VAIP)
    kind = node.op_type if node.kind in _CONTRIBUTED else node.kind
    if listed(kind, case.kind):
        reason = f"listed for {case.kind}"
        return placement(node, NPU, reason, "", *evidence(kind, case.kind))
    if shown(kind, case.kind):
        return placement(
            node,
            NPU,
            "not listed, but models with it run there",
            confidence="inferred",
        )
    # The model's own format is none of them: it is not listed.
    others = [preset for preset in case.target.presets if listed(kind, preset)]
    fix = ""
    if others:
        fix = f"quantize to {' or '.join(others)}, which list it"
    confidence = "documented" if is_listed(kind) else "unknown"
    return placement(node, CPU, f"not listed for {case.kind}", fix, confidence)


def whole_model(case: Case) -> tuple[str, str, str, str] | None:
    """Return the reason why no node can run on the processor.

    Returns:
        Reason, fix, confidence and source; None if no such reason is known.
    """
    graph, target = case.graph, case.target
    # Measured on XDNA1: a model of another format runs on the CPU as a whole.
    if case.kind not in target.presets:
        reason = (
            f"{target.name} takes {', '.join(target.presets)}, the model is {case.kind}"
        )
        fix = f"quantize to {target.presets[0]}"
        return reason, fix, "measured", f"{_DOCS}; XDNA1 study (2026-07)"
    # The first such tensor is named; constants of this type are cast before the graph is given.
    # Constants do not count: ``around`` leaves them out.
    for node in graph.nodes:
        for name in case.around(node):
            if graph.elem_type(name) == TensorProto.BFLOAT16:
                reason = f"{name!r} is bfloat16, which the provider refuses as an invalid graph"
                fix = "give it the float32 model and the config_file"
                return reason, fix, "measured", _ONNXSIM
    for value in graph.inputs:
        batch = batch_of(graph, value.name)
        # A static batch of 2 offloads a part of the nodes, and fills the first result only.
        if batch != 1:
            reason = f"input {value.name!r} has a batch of {batch}"
            return reason, _ONE, "measured", "amd/RyzenAI-SW#401"
    # minimum_num_of_conv in the converter's configuration, 2 by default.
    if case.on_convolution_engine and has_few_convolutions(graph, target):
        count = counted(len(graph.nodes_of({"Conv"})), "convolution")
        reason = f"{count}; its compiler wants {LEAST_CONVOLUTIONS}"
        return reason, "run it on the CPU", "read", f"{_VAIP}; amd/RyzenAI-SW#85, #126"
    return None


def _crash(case: Case, node: Node) -> NodePlacement | None:
    """Report a node that crashes the compiler."""
    if not is_fatal(case.graph, node):
        return None
    if node.kind == "If":
        reason = "a branch around which shapes are dynamic"
        fix = "fix the shapes, or run this model on the CPU"
    else:
        reason = "the compiler crashes at it"
        fix = f"run this model on the CPU, or cut it in front of the {node.kind}"
    return placement(node, ABORT, reason, fix, "measured", _ONNXSIM)


def _unwritten(_case: Case, node: Node) -> NodePlacement | None:
    """Refuse a Conv whose attributes are left to their defaults."""
    missing = missing_attributes(node)
    if not missing:
        return None
    reason = f"attributes missing: {', '.join(missing)}"
    return placement(node, ABORT, reason, _LEGALIZE, "measured", _ONNXSIM)


def _ignored_pads(_case: Case, node: Node) -> NodePlacement | None:
    """Report a pool whose automatic padding the converter ignores.

    The shape that the converter infers then differs from ONNX's, which ends the process.
    """
    if not is_padded_automatically(node):
        return None
    reason = f"auto_pad is {node.attribute('auto_pad')}, which is ignored"
    return placement(node, ABORT, reason, _LEGALIZE, "measured", "amd/RyzenAI-SW#264")


_LEGALIZE = "quark-onnx npu legalize MODEL -o OUT"
_CUT = "quark-onnx npu cut MODEL -o FIRST SECOND"
_ONE = (
    "export the model with a batch of 1, or with a dynamic batch, which"
    " 'quark-onnx npu legalize' makes 1"
)


def _shape(case: Case, node: Node) -> NodePlacement | None:
    """Keep a node with a dynamic shape on the CPU."""
    name = dynamic_tensor(case.graph, node)
    if not name:
        return None
    shape = case.graph.shape(name)
    cause, fix = case.static_shapes
    return placement(
        node,
        CPU,
        f"{name!r} has the shape {'unknown' if shape is None else list(shape)}",
        fix,
        "read",
        f"{_VAIP}; amd/RyzenAI-SW#312",
        cause=f"a tensor has a dynamic shape: {cause}",
    )


def _cubic(_case: Case, node: Node) -> NodePlacement | None:
    """Keep a cubic Resize on the CPU; the table lists the operator without its modes."""
    if node.attribute("mode", "nearest") != "cubic":
        return None
    return placement(
        node,
        CPU,
        "a cubic Resize, which the published converter refuses",
        "resize linearly",
        "inferred",
        _VAIP,
    )


def alone(node: Node) -> NodePlacement:
    """Return the placement of a node in a model without a layer on the processor."""
    return placement(
        node,
        CPU,
        "no convolution or product of the model is on the NPU; activations, norms and moves"
        " alone stay on the CPU",
        "",
        "measured",
        f"{_ONNXSIM}; amd/RyzenAI-SW#343",
    )


def _ends(case: Case, node: Node) -> NodePlacement | None:
    """Keep nodes on the CPU that only move data at the end of a model."""
    last = node
    readers = case.graph.followers(last)
    # Down to the output, also through the pair that rounds the result.
    while len(readers) == 1 and readers[0].op_type in QUANTIZE | DEQUANTIZE | _MOVING:
        last = readers[0]
        readers = case.graph.followers(last)
    if not case.graph.is_output(last.outputs[0]):
        return None
    reason = "it is the last node: what moves data at the end stays on the CPU"
    return placement(node, CPU, reason, "", "measured", f"{_LOGS}, SqueezeNet")


def _factored(case: Case, node: Node) -> Node:
    """Return the node whose engine arithmetic a Mul imitates by a constant factor.

    Other nodes are returned unchanged.
    """
    # Float models have no such factor yet; amd-quark writes it when it quantizes.
    leaders = case.graph.leaders(node)
    if node.kind != "Mul" or len(leaders) != 1:
        return node
    return leaders[0] if any(map(case.graph.is_constant, node.inputs)) else node


def _gate(case: Case, node: Node) -> NodePlacement | None:
    """Keep gates with power-of-two scales on the CPU, with their factors."""
    if _factored(case, node).kind not in ("HardSigmoid", "Sigmoid"):
        return None
    reason = "a gate with power-of-two scales"
    confidence = "measured"
    # Releases from "1.5" to "1.8" compare correctly as texts.
    if case.release >= "1.7":
        reason += ", which releases from 1.7 on may take"
        confidence = "inferred"
    fix = "quantize to A8W8 or A16W8, or try the compiler of X1"
    source = (
        f"{_LOGS}, EfficientNet and MobileNetV3; RyzenAI-SW performance_results.json"
    )
    return placement(node, CPU, reason, fix, confidence, source)


def _mean(case: Case, node: Node) -> NodePlacement | None:
    """Keep means with power-of-two scales on the CPU, with their factors."""
    if _factored(case, node).kind != "ReduceMean":
        return None
    reason = "a mean with power-of-two scales; GlobalAveragePool runs there"
    return placement(node, CPU, reason, _LEGALIZE, "measured", f"{_LOGS}, ShuffleNetV2")


def _ranks(case: Case, node: Node) -> NodePlacement | None:
    """Keep a reshape or transpose of more than four dimensions on the CPU."""
    ranks = [len(case.graph.sizes(name)) for name in case.around(node)]
    greatest = max(ranks, default=0)
    # The channel shuffles of ShuffleNetV2 have five dimensions: 3 nodes per shuffle are on the CPU
    # in the logs.
    if greatest <= _RANK:
        return None
    return placement(
        node,
        CPU,
        f"it moves data in {greatest} dimensions",
        "write it in 4 dimensions",
        "measured",
        f"{_LOGS}, ShuffleNetV2",
    )


def _beside_moving(case: Case, node: Node) -> NodePlacement | None:
    """Place a reshape or transpose with its five-dimensional neighbour."""
    neighbours = (
        *beyond_pairs(node, case.graph.leaders),
        *beyond_pairs(node, case.graph.followers),
    )
    for neighbour in neighbours:
        moving = _ranks(case, neighbour) if neighbour.kind in _MOVING else None
        if moving is None:
            continue
        its_reason = moving.reason.removeprefix("it ")
        return placement(
            node,
            CPU,
            f"it stands beside {moving.node}, which {its_reason}",
            moving.fix,
            "inferred",
            moving.source,
            "it is connected to a node that moves data in more than 4 dimensions",
        )
    return None


def _depthwise(case: Case, node: Node) -> NodePlacement | None:
    """Place depthwise convolutions.

    AMD's logs name no nodes; the affected convolutions are inferred from the logs' counts. Those of
    DenseNet are the ones with one tap, to which a BatchNormalization becomes.
    """
    conv = node
    # The activation shares the fate of the convolution that it is fused into.
    if node.kind in ("Relu", "Clip"):
        conv = next(iter(case.graph.leaders(node)), node)
    side = _depthwise_side(case.graph, conv)
    if not side or (side == 1 and case.kind != "XINT8"):
        return None
    # MobileNetV2 (Relu6) has these islands in both formats, MobileNetV3 (Relu) in XINT8 alone.
    affected = ("Relu", "Clip") if case.kind == "XINT8" else ("Clip",)
    followers = case.graph.followers(conv)
    if len(followers) != 1 or followers[0].kind not in affected:
        return None
    reason = (
        f"a depthwise {side}x{side} convolution with {followers[0].kind} in 8 bits, which some"
        " releases refuse"
    )
    # The logs of DenseNet in other formats end before the placement.
    fix, networks = "", "DenseNet121 and DenseNet169"
    if side == 3:
        fix, networks = "quantize to A16W8", "MobileNetV2 and MobileNetV3"
    return placement(node, CPU, reason, fix, "inferred", f"{_LOGS}, {networks}")


def _depthwise_side(graph: Graph, node: Node) -> int:
    """Return the side of a depthwise convolution's kernel, 1 or 3; 0 for other nodes."""
    kernel = graph.sizes(node.input(1))
    for side in (1, 3):
        if is_depthwise(graph, node) and kernel[2:] == (side, side):
            return side
    return 0


def _results(case: Case, node: Node) -> NodePlacement | None:
    """Keep a node with several results on the CPU; the converter writes a Split as slices."""
    if len(node.results) > 1 and node.kind != "Split":
        return placement(node, CPU, "it has more than one result", "", "read", _VAIP)
    return None


def _unquantized(case: Case, node: Node) -> NodePlacement | None:
    """Place products that are not quantized, or that multiply two computed tensors."""
    # A weight is constant, or behind a DequantizeLinear of constant codes.
    if not constant_behind(case.graph, node.input(1)):
        reason = "its weight is computed as the model runs"
        fix = ""
        if node.input(1) in case.graph.initializers:
            reason = "its weight is an input of the model, too"
            fix = _LEGALIZE
        return placement(
            node, CPU, reason, fix, "measured", f"{_ONNXSIM}; 1bit-MONSTER#1468"
        )
    # A constant in a quantized model, without a DequantizeLinear, is a layer that stayed float.
    float_weight = case.quantized and case.graph.is_constant(node.input(1))
    if float_weight and case.on_convolution_engine:
        reason = "it is left float, which can push the whole model off the processor"
        return placement(
            node,
            CPU,
            reason,
            _CUT,
            "measured",
            "XDNA1 study, Ryzen AI 1.7.1",
        )
    return None


def _float_addend(case: Case, node: Node) -> NodePlacement | None:
    """Keep a product on the CPU whose sum with a constant has that constant in float."""
    if not case.quantized:
        return None
    for follower in case.graph.followers(node):
        if follower.kind == "Add" and any(map(case.graph.is_constant, follower.inputs)):
            reason = "its bias is added in float"
            fix = "quantize the Add behind it as well"
            return placement(node, CPU, reason, fix, "measured", _ONNXSIM)
    return None


def _left_float(case: Case, node: Node) -> NodePlacement | None:
    """Keep a node on the CPU that computes in float between the integer operators of a model."""
    if not case.quantized or not (
        _reads_float(case, node) or _is_read_in_float(case, node)
    ):
        return None
    # Measured on XDNA1 for the decoding of boxes, on XDNA2 for the bias of a product.
    source = "XDNA1 study, Ryzen AI 1.7.1" if case.on_convolution_engine else _ONNXSIM
    if node not in case.up_to_layers:
        fix = _CUT if case.on_convolution_engine else ""
        return placement(node, CPU, FLOAT_TAIL, fix, "inferred", source)
    return placement(
        node,
        CPU,
        "it is left float, between integer operators",
        "quantize it as well, or cut the model in front of it (quark-onnx npu cut)",
        "inferred",
        source,
    )


def _reads_float(case: Case, node: Node) -> bool:
    """Return whether no pair rounds an operand of a node.

    The operands of a fused node are those of the operator that it belongs to. Moves of data keep
    what is rounded.
    """
    graph, head = case.graph, node
    while True:
        # Slopes and bounds are constants, and may have pairs of their own.
        computed = [name for name in head.operands if not constant_behind(graph, name)]
        producer = graph.producer(computed[0]) if len(computed) == 1 else None
        if producer is None or not _belongs(case, producer, head):
            break
        head = producer
    for name in head.operands:
        if graph.is_constant(name) or graph.elem_type(name) not in _FLOATS:
            continue
        producer = graph.producer(name)
        while producer is not None and producer.kind in _MOVING:
            producer = graph.producer(producer.inputs[0])
        if producer is None or producer.op_type not in DEQUANTIZE:
            return True
    return False


def _is_read_in_float(case: Case, node: Node) -> bool:
    """Return whether an operator that is not fused reads the result of a node without a pair."""
    todo = [(node, reader) for reader in case.graph.followers(node)]
    while todo:
        producer, reader = todo.pop()
        # The branches of an If read what leaves the graph, as the caller does.
        if reader.op_type in QUANTIZE or producer.outputs[0] not in reader.inputs:
            continue
        if reader.kind not in _MOVING and not _belongs(case, producer, reader):
            return case.graph.elem_type(producer.outputs[0]) in _FLOATS
        todo += [(reader, follower) for follower in case.graph.followers(reader)]
    return False


def _belongs(case: Case, producer: Node, node: Node) -> bool:
    """Return whether a node is fused with its producer: an activation, a factor or a bias."""
    if producer.op_type in DEQUANTIZE:
        return False
    if is_fused(producer, node) or _factored(case, node) is producer:
        return True
    # A bias has codes, or the product is on the CPU.
    is_float = any(map(case.graph.is_constant, node.operands))
    return producer.kind in LAYERS and node.kind == "Add" and not is_float


def _gate_of_x1(_case: Case, node: Node) -> NodePlacement | None:
    """Place a Sigmoid on X1, for which AMD's quantizer writes a HardSigmoid."""
    return placement(
        node,
        NPU,
        "its converter takes it, but AMD's quantizer writes a HardSigmoid for it, as --optimize"
        " dpu does",
        "",
        "inferred",
        f"{_VAIP}; amd-quark 0.13, simulate_dpu.py",
    )


def _strict(case: Case, node: Node) -> NodePlacement | None:
    """Place nodes that the converter of X1 does not support."""
    if _is_on_numbers(case, node):
        return placement(node, CPU, "it computes a single number", "", "read", _VAIP)
    # The order decides which of several reasons is shown.
    for kinds, reason, refused in _REFUSED:
        if node.kind in kinds and refused(case, node):
            return placement(node, CPU, reason, "", "read", _VAIP)
    return None


def _is_on_numbers(case: Case, node: Node) -> bool:
    """Return True if the result of a node is a scalar, or each of its inputs."""
    shapes = [case.graph.shape(name) for name in case.around(node)]
    if not shapes:
        return False
    *inputs, result = shapes
    # An unknown shape is None, and no scalar.
    return result == () or {()}.issuperset(inputs)


def _inconstant(*indices: int) -> Callable[[Case, Node], bool]:
    """Return a test for inputs that are computed as the model runs."""

    def is_computed(case: Case, node: Node) -> bool:
        # Omitted inputs have defaults, which are constants.
        names = filter(None, map(node.input, indices))
        return not all(map(case.graph.is_constant, names))

    return is_computed


def _not_on_images(case: Case, node: Node) -> bool:
    """Return True if the result has no four dimensions."""
    return len(case.graph.sizes(node.outputs[0])) != _RANK


def _bounded(case: Case, node: Node) -> bool:
    """Return True for a Clip with both bounds, as constants."""
    # Both bounds must be present: an omitted one is an empty name, which is no constant.
    if case.graph.opset >= _BOUNDS_OPSET:
        return all(map(case.graph.is_constant, (node.input(1), node.input(2))))
    return None not in (node.attribute("min"), node.attribute("max"))


def _odd(case: Case, node: Node) -> bool:
    """Return True for a Resize without a rule in the converter of X1."""
    mode = node.attribute("mode", "nearest")
    places = node.attribute("coordinate_transformation_mode", "half_pixel")
    if places not in _PLACES_OF_RESIZE.get(mode, ()):
        return True
    before = case.graph.sizes(node.inputs[0])
    after = case.graph.sizes(node.outputs[0])
    # Batch and channels keep their sizes; only height and width are resized.
    are_images = len(before) == len(after) == _RANK and before[:2] == after[:2]
    return not are_images


_REFUSED: tuple[tuple[frozenset[str], str, Callable[[Case, Node], bool]], ...] = (
    (frozenset({"Conv", "GlobalAveragePool"}), "it is not on images", _not_on_images),
    (
        frozenset({"ConvTranspose"}),
        "it has output padding",
        lambda case, node: any(node.attribute("output_padding", [])),
    ),
    (
        frozenset({"Clip"}),
        "it lacks a bound",
        lambda case, node: not _bounded(case, node),
    ),
    (
        frozenset({"MaxPool", "AveragePool"}),
        "its kernel is not of an image",
        _not_on_images,
    ),
    (frozenset({"Split"}), "its parts are computed", _inconstant(1)),
    (
        frozenset({"LpNormalization"}),
        "p is not 2",
        lambda case, node: node.attribute("p", 2) != 2,
    ),
    (
        frozenset({"Flatten"}),
        "its axis is the rank",
        lambda case, node: (
            node.attribute("axis", 1) == len(case.graph.sizes(node.inputs[0]))
        ),
    ),
    (
        frozenset({"Gemm"}),
        "its converter does not look at alpha and beta: results would be wrong",
        lambda case, node: (
            node.attribute("alpha", 1.0) != 1.0 or node.attribute("beta", 1.0) != 1.0
        ),
    ),
    (
        frozenset({"ReduceMax", "ReduceMean", "ReduceMin", "ReduceSum"}),
        "its axes are an input",
        lambda case, node: bool(node.input(1)),
    ),
    (
        frozenset({"Pad"}),
        "its mode is another than constant, reflect and edge",
        lambda case, node: (
            node.attribute("mode", "constant") not in ("constant", "reflect", "edge")
        ),
    ),
    (
        frozenset({"Resize"}),
        "it is none of the resizings of images that are known",
        _odd,
    ),
    (
        frozenset({"HardSigmoid"}),
        "alpha is not 1/6, or beta not 0.5",
        lambda case, node: (
            abs(node.attribute("alpha", 0.2) - 1 / 6) > 1e-6
            or node.attribute("beta", 0.5) != 0.5
        ),
    ),
    (frozenset({"Slice"}), "its bounds or axes are computed", _inconstant(1, 2, 3, 4)),
    (
        frozenset({"Slice"}),
        "its axes are left out",
        lambda case, node: case.graph.opset >= 10 and not node.input(3),
    ),
    (frozenset({"Pad"}), "its pads are computed", _inconstant(1)),
    (
        frozenset({"Reshape", "Squeeze", "Unsqueeze"}),
        "its shape or axes are computed",
        _inconstant(1),
    ),
    (frozenset({"Resize"}), "its sizes are computed", _inconstant(2, 3)),
)


@dataclass(frozen=True)
class _Rule:
    """A rule with the models and nodes that it is about.

    Attributes:
        decide: returns the placement of a node, or None.
        kinds: operators; empty for all.
        formats: number formats of the model; empty for all.
        compilers: compilers of the device; empty for all.
    """

    decide: Callable[[Case, Node], NodePlacement | None]
    kinds: Collection[str] = ()
    formats: Collection[str] = ()
    compilers: Collection[str] = ()

    def covers(self, case: Case, node: Node) -> bool:
        """Return True if the rule is about a node of a model."""
        return (
            (not self.kinds or node.kind in self.kinds)
            and (not self.formats or case.kind in self.formats)
            and (not self.compilers or case.target.compiler in self.compilers)
        )


_RULES = (
    # From certain to inferred: crashes, shapes, refusals of the converter, logs.
    _Rule(_crash),
    _Rule(_unwritten, kinds=["Conv"]),
    _Rule(_ignored_pads, kinds=("MaxPool", "AveragePool")),
    _Rule(_shape),
    _Rule(_results),
    _Rule(_cubic, kinds=["Resize"], compilers=_NOT_X1),
    _Rule(_unquantized, kinds=LAYERS, formats=_ON_CODES),
    _Rule(_float_addend, kinds=["MatMul"], formats=_ON_CODES, compilers=_NOT_X1),
    _Rule(_ends, kinds=("Flatten", "Reshape", "Squeeze")),
    _Rule(_left_float, formats=_ON_CODES),
    _Rule(_strict, compilers=["X1"]),
    _Rule(_gate_of_x1, kinds=["Sigmoid"], compilers=["X1"]),
    _Rule(_gate, formats=["XINT8"], compilers=_NOT_X1),
    _Rule(_mean, formats=["XINT8"]),
    _Rule(_ranks, kinds=_MOVING, formats=_ON_CODES),
    _Rule(_beside_moving, kinds=_MOVING, formats=_ON_CODES),
    _Rule(_depthwise, formats=_INTEGER, compilers=_NOT_X1),
)
