"""Drafts: requests of AMD scripts during their translation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from quark_onnx.config import Override, QuantizationSpec
from quark_onnx.onnxruntime_spelling.request import Wanted

if TYPE_CHECKING:
    from quark_onnx.onnx.algorithm import AlgoConfig


@dataclass
class Draft(Wanted):
    """A request that options change step by step.

    Attributes:
        activation: specification of activations; None keeps them float.
        weight: specification of weights; None keeps them float.
        bias: format of biases, as in ``quark_onnx.QConfig``.
        dynamic: True to compute scales of activations at runtime.
        form: form of the result, as in ``quark_onnx.QConfig``.
        target: the NPU target, or empty.
        op_types: operator types to quantize; empty for all.
        op_types_setting: setting that has chosen the operator types, for messages.
        nodes: nodes to quantize; empty for all.
        exclude: names of nodes, and pairs of start and end nodes, that stay float.
        overrides: decisions for some nodes.
        input_nodes: nodes before these stay float.
        output_nodes: nodes after these stay float.
        float_nodes: nodes whose results stay float.
        overridden: settings of single tensors, as onnxruntime's TensorQuantOverrides.
        options: extra options as given by the script.
        constant_matmul: True to keep a MatMul without a constant factor in float.
        algorithms: algorithms with AMD's names.
        accuracy_level: attribute of MatMulNBits.
        samples: maximum number of calibration samples; None for all.
        random: True to calibrate on random data where none is given.
        random_shapes: shapes of random calibration data by input.
        random_ranges: ranges of random calibration data by input.
        shapes: sizes that inputs get before quantization.
        opset: opset to which the model is converted before quantization; None to keep it.
        channels_last: True to put the channels of four-dimensional inputs and outputs last in the
            result; calibration data has the layout of the float model.
        widen: True to convert float16 to float32 before quantization.
        external: True to write large tensors to external data.
        resume: folder for intermediate results of optimizers.
    """

    activation: QuantizationSpec | None
    weight: QuantizationSpec | None
    bias: bool | str = True
    dynamic: bool = False
    form: str = "qdq"
    target: str = ""
    op_types: Sequence[str] = ()
    # Not compared: a field and an option can ask for the same.
    op_types_setting: str = field(default="op_types_to_quantize", compare=False)
    nodes: Sequence[str] = ()
    exclude: list[Any] = field(default_factory=list)
    overrides: list[Override] = field(default_factory=list)
    input_nodes: Sequence[str] = ()
    output_nodes: Sequence[str] = ()
    constant_matmul: bool = False
    float_nodes: Sequence[str] = ()
    overridden: dict[str, Any] = field(default_factory=dict)
    # Not compared: options that are spelt differently can ask for the same.
    options: Mapping[str, Any] = field(default_factory=dict, compare=False)
    algorithms: list[AlgoConfig] = field(default_factory=list)
    accuracy_level: int = 0
    samples: int | None = None
    random: bool = False
    random_shapes: Mapping[str, Sequence[int]] = field(default_factory=dict)
    random_ranges: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    opset: int | None = None
    channels_last: bool = False
    widen: bool = False
    external: bool = False
    resume: str | None = None
