"""Build the body of an ONNX function, operator by operator.

Follows the ONNX IR specification, section Functions. onnxruntime 1.31 ignores the overload of a
function (IR 10), so that one body has to serve all nodes of an operator: ``dispatch`` selects among
variants by the attributes of a node.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, DTypeLike
from onnx import (
    AttributeProto,
    FunctionProto,
    GraphProto,
    NodeProto,
    TensorProto,
    helper,
    numpy_helper,
)

from quark_onnx.common.errors import ModelError

#: Domain of the vendor's operators.
DOMAIN = "com.amd.quark"
#: First opset with all operators of the bodies.
MIN_OPSET = 17
#: Last tested opset. onnxruntime 1.32 runs the block formats there, but QuantizeLinear only up to
#: 27.
MAX_OPSET = 28

#: End of a Slice that takes all that follows.
END = np.iinfo(np.int64).max

Value = int | str
Settings = Mapping[str, Value]


@dataclass(frozen=True)
class Ref:
    """A reference to a node's attribute of the function."""

    name: str
    kind: AttributeProto.AttributeType = AttributeProto.INT


@dataclass
class BodyBuilder:
    """A growing list of nodes; methods return the names of the tensors that new nodes compute.

    Attributes:
        nodes: nodes in order of execution.
        used: names in use, shared with branches, which must not reuse an outer name.
    """

    nodes: list[NodeProto] = field(default_factory=list)
    used: list[str] = field(default_factory=list)

    def name(self) -> str:
        """Return an unused name.

        >>> body = BodyBuilder()
        >>> body.name(), body.name()
        ('t0', 't1')
        """
        self.used.append(f"t{len(self.used)}")
        return self.used[-1]

    def op(self, kind: str, *inputs: str, output: str = "", **attributes: Any) -> str:
        """Add a node with one output; an attribute may be a ``Ref``.

        >>> body = BodyBuilder()
        >>> body.op("Neg", body.op("Abs", "x"), output="y")
        'y'
        >>> [node.op_type for node in body.nodes]
        ['Abs', 'Neg']
        """
        fixed = {
            name: value
            for name, value in attributes.items()
            if not isinstance(value, Ref)
        }
        output = output or self.name()
        node = helper.make_node(kind, inputs, [output], **fixed)
        for name, value in attributes.items():
            if isinstance(value, Ref):
                node.attribute.append(
                    AttributeProto(name=name, ref_attr_name=value.name, type=value.kind)
                )
        self.nodes.append(node)
        return output

    def constant(self, value: ArrayLike, dtype: DTypeLike = np.float32) -> str:
        """Add a constant tensor."""
        return self.op(
            "Constant", value=numpy_helper.from_array(np.asarray(value, dtype))
        )

    def ints(self, *values: int) -> str:
        """Add a vector of int64, for shapes and positions."""
        return self.constant(values, np.int64)

    def largest(self, x: str, axis: int, count: int) -> str:
        """Compute the maximum along an axis of length ``count``, and keep the axis; NaN propagates.

        ReduceMax may lose a NaN in onnxruntime, and is slower for a small ``count``.
        """
        # Split and Max of one part would only copy.
        if count == 1:
            return x
        parts = [self.name() for _ in range(count)]
        self.nodes.append(
            helper.make_node("Split", [x, self.ints(*[1] * count)], parts, axis=axis)
        )
        return self.op("Max", *parts)

    def any(self, flags: str) -> str:
        """Compute whether a possibly empty bool tensor has a true element; a scalar."""
        # ReduceMax and ReduceSum take no bool; the sum of no elements is 0.
        count = self.op(
            "ReduceSum", self.op("Cast", flags, to=TensorProto.FLOAT), keepdims=0
        )
        return self.op("Greater", count, self.constant(0))

    def choose(
        self,
        condition: str,
        yes: Callable[[BodyBuilder], str],
        no: Callable[[BodyBuilder], str],
        dtype: int,
    ) -> str:
        """Compute ``yes`` or ``no``, of type ``dtype``, by the scalar ``condition``."""
        return self.op(
            "If",
            condition,
            then_branch=self._branch(yes, dtype),
            else_branch=self._branch(no, dtype),
        )

    def _branch(self, build: Callable[[BodyBuilder], str], dtype: int) -> GraphProto:
        # The list of names is shared: a branch sees the names of the surroundings.
        inner = BodyBuilder(used=self.used)
        output = build(inner)
        if not inner.nodes or inner.nodes[-1].output[0] != output:
            # A branch must compute its result itself.
            output = inner.op("Identity", output)
        return helper.make_graph(
            inner.nodes,
            self.name(),
            [],
            # The type is required; a shape is left to inference.
            [helper.make_tensor_value_info(output, dtype, None)],
        )

    def is_value(self, attribute: str, value: Value) -> str:
        """Compute whether a node sets ``value`` for an attribute; a scalar."""
        if isinstance(value, int):
            return self.op(
                "Equal",
                # A Constant turns an attribute of the function into a tensor.
                self.op("Constant", value_int=Ref(attribute)),
                self.constant(value, np.int64),
            )
        # Equal supports strings only since opset 19: StringNormalizer leaves one of two strings if
        # the first one is a stop word.
        given = self.op("Constant", value_string=Ref(attribute, AttributeProto.STRING))
        # A second string, since StringNormalizer of no remaining strings returns one empty
        # string.
        both = self.op(
            "Concat",
            self.op("Reshape", given, self.ints(1)),
            self.op("Constant", value_strings=["-"]),
            axis=0,
        )
        remaining = self.op(
            "StringNormalizer", both, stopwords=[value], is_case_sensitive=1
        )
        return self.op("Equal", self.op("Size", remaining), self.constant(1, np.int64))


def dispatch(
    body: BodyBuilder,
    variants: Sequence[Settings],
    build: Callable[[BodyBuilder, Settings], str],
    dtype: int = TensorProto.FLOAT,
) -> str:
    """Build the variant that has the attributes of the node.

    Args:
        body: receives the nodes.
        variants: the occurring settings, at least one; each has its relevant keys.
        build: adds the nodes of a variant, and returns the name of the result.
        dtype: element type of the result.

    Returns:
        The name of the result.
    """
    variant, *others = variants
    if not others:
        return build(body, variant)
    # Attributes on which all variants agree need no test.
    differing = [
        name
        for name in variant
        if any(other.get(name) != variant[name] for other in others)
    ]
    condition = ""
    for name in differing:
        holds = body.is_value(name, variant[name])
        condition = body.op("And", condition, holds) if condition else holds
    return body.choose(
        condition,
        lambda inner: build(inner, variant),
        lambda inner: dispatch(inner, others, build, dtype),
        dtype,
    )


def settings(
    node: NodeProto,
    defaults: Settings,
    allowed: Mapping[str, Collection[Value]] | None = None,
) -> dict[str, Value]:
    """Return the attributes of a vendor node, with defaults.

    Args:
        node: the node.
        defaults: all known attributes with their defaults.
        allowed: supported values by attribute; other attributes are not checked.

    Raises:
        ModelError: an attribute is unknown, of another type, or of an unsupported value.

    >>> node = helper.make_node("MXQuantizeDequantize", ["x"], ["y"], domain=DOMAIN, block_size=16)
    >>> settings(node, {"axis": 1, "block_size": 32})
    {'axis': 1, 'block_size': 16}
    """
    values = dict(defaults)
    for attribute in node.attribute:
        value = helper.get_attribute_value(attribute)
        if isinstance(value, bytes):
            value = value.decode()
        if attribute.name not in defaults:
            raise ModelError(
                f"{where(node)}: attribute {attribute.name!r} is unknown; known are"
                f" {', '.join(defaults)}"
            )
        # The default has the type of the attribute.
        if not isinstance(value, type(defaults[attribute.name])):
            raise ModelError(
                f"{where(node)}: attribute {attribute.name!r} has the value {value!r}"
                " of another type"
            )
        values[attribute.name] = value
    for name, supported in (allowed or {}).items():
        if values[name] not in supported:
            raise ModelError(
                f"{where(node)}: {name} = {values[name]!r} cannot be computed; allowed:"
                f" {supported}"
            )
    return values


def where(node: NodeProto) -> str:
    """Return the name of a node for messages."""
    if node.name:
        return f"{node.op_type} node {node.name!r}"
    return f"the {node.op_type} node that computes {', '.join(map(repr, node.output))}"


def distinct(nodes: Iterable[Settings], keys: Iterable[str]) -> list[Settings]:
    """Return the distinct values of attributes of nodes, in order.

    >>> distinct([{"a": 1, "b": 2}, {"a": 1, "b": 3}], ["a"])
    [{'a': 1}]
    """
    names = list(keys)
    rows = dict.fromkeys(tuple(node[name] for name in names) for node in nodes)
    return [dict(zip(names, row, strict=True)) for row in rows]


def along(body: BodyBuilder, vector: str, x: str = "x") -> str:
    """Reshape a scalar or a vector along the attribute ``axis`` to broadcast against ``x``."""
    # Shape from ``axis`` on, without the axis itself: the sizes behind the axis.
    after = body.op(
        "Slice", body.op("Shape", x, start=Ref("axis")), body.ints(1), body.ints(END)
    )
    ones = body.op("Expand", body.ints(1), body.op("Shape", after))
    return body.op(
        "Reshape",
        vector,
        # (-1, 1, ..., 1) broadcasts from the last axis, so that the axes before need no ones.
        body.op("Concat", body.ints(-1), ones, axis=0),
    )


def function(  # noqa: PLR0913  the parts of a function
    name: str,
    inputs: Sequence[str],
    body: BodyBuilder,
    defaults: Settings,
    opset: int,
    *,
    domain: str = DOMAIN,
) -> FunctionProto:
    """Return the function whose result is the output of the body's last node.

    Args:
        name: name of the operator.
        inputs: names of the operator's inputs.
        body: nodes of the function.
        defaults: attributes with their defaults.
        opset: version of the default domain.
        domain: domain of the operator.

    Raises:
        ModelError: the opset is not supported.
    """
    if not MIN_OPSET <= opset <= MAX_OPSET:
        raise ModelError(
            f"{name} can be written for the opsets {MIN_OPSET} to {MAX_OPSET}, not for"
            f" opset {opset}"
        )
    output = body.nodes[-1].output[0]
    proto = helper.make_function(
        domain, name, inputs, [output], body.nodes, [helper.make_opsetid("", opset)]
    )
    # Defaults of attributes: nodes may omit any of them.
    proto.attribute_proto.extend(
        helper.make_attribute(key, value) for key, value in defaults.items()
    )
    return proto
