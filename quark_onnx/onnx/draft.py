"""Draft: what a script asks for in AMD's spelling, in this package's terms, while it is still being
collected.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from quark_onnx.config import Override, QuantizationSpec

if TYPE_CHECKING:
    from quark_onnx.onnx.quantization.config.algorithm import AlgoConfig


@dataclass
class Draft:
    """A request that options change one after the other.

    Attributes:
        activation, weight: how activations and weights are quantized; None keeps them float.
        bias: the format of biases, as in ``quark_onnx.QConfig``.
        dynamic: scales of activations are computed as the model runs.
        form: how the result is written, as in ``quark_onnx.QConfig``.
        target: the NPU target, or empty.
        op_types, nodes: what is quantized; empty for everything.
        exclude: names of nodes, and pairs of start and end nodes, that stay float.
        overrides: decisions for some nodes.
        input_nodes, output_nodes: nothing before the first and behind the last is quantized.
        float_results: operator types whose results are not quantized for their own sake.
        float_nodes: nodes whose results stay float.
        everywhere: what is said of all tensors, as arguments of ``TensorOverride``.
        contrib: Q/DQ pairs are in the domain com.microsoft.
        tensors: what is said of single tensors, as onnxruntime's TensorQuantOverrides.
        options: the extra options, as the script gives them.
        constant_matmul: a MatMul without a constant factor stays float.
        algorithms: in AMD's spelling.
        accuracy_level: of MatMulNBits.
        samples: calibration stops after so many samples; None for all.
        random_shapes, random_ranges: of random calibration data by input; None where data is given.
        shapes: inputs get these sizes first.
        opset: the model is converted to this opset first; None leaves it.
        widen: float16 becomes float32 first.
        external: large tensors are written beside the model.
        resume: folder in which optimizers keep what they have done.
    """

    activation: QuantizationSpec | None
    weight: QuantizationSpec | None
    bias: bool | str = True
    dynamic: bool = False
    form: str = "qdq"
    target: str = ""
    op_types: Sequence[str] = ()
    nodes: Sequence[str] = ()
    exclude: list[Any] = field(default_factory=list)
    overrides: list[Override] = field(default_factory=list)
    input_nodes: Sequence[str] = ()
    output_nodes: Sequence[str] = ()
    constant_matmul: bool = False
    float_results: Sequence[str] = ()
    float_nodes: Sequence[str] = ()
    everywhere: dict[str, Any] = field(default_factory=dict)
    contrib: bool = False
    tensors: dict[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict, compare=False)
    algorithms: list[AlgoConfig] = field(default_factory=list)
    accuracy_level: int = 0
    samples: int | None = None
    random_shapes: Mapping[str, Sequence[int]] | None = None
    random_ranges: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    opset: int | None = None
    widen: bool = False
    external: bool = False
    resume: str | None = None
