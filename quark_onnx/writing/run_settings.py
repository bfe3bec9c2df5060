"""Settings of a run for advice, from its configuration or from a quantized model."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from onnx import ModelProto, NodeProto, TensorProto
from onnx.numpy_helper import to_array

from quark_onnx.common.errors import ConfigError
from quark_onnx.common.registry import PRESETS
from quark_onnx.config import QConfig, QuantizationSpec, format_calibrator
from quark_onnx.graph import scopes_of
from quark_onnx.graph.codes import written_type
from quark_onnx.graph.node import Node
from quark_onnx.report.verdict import AdvisedSettings
from quark_onnx.targets.target import npu_names
from quark_onnx.writing.provenance import PRODUCER

#: Minimum SQNR of every output that advice aims at, in dB.
GOAL = 20.0
#: Bits of the integer types of codes. Biases have 32 bits.
_BITS: dict[int, int] = {
    TensorProto.INT4: 4,
    TensorProto.UINT4: 4,
    TensorProto.INT8: 8,
    TensorProto.UINT8: 8,
    TensorProto.INT16: 16,
    TensorProto.UINT16: 16,
}
#: Calibrators of the presets for activations, by bits; for an NPU or power-of-two scales, and for
#: any processor.
_USUAL_ON_NPU, _USUAL = {8: "minmse", 16: "minmax"}, {8: "best", 16: "minmax"}


def settings_of_config(config: QConfig, samples: int) -> AdvisedSettings:
    """Return the settings of a run.

    Args:
        config: the settings as requested.
        samples: number of calibration samples.
    """
    activation, weight = config.activation, config.weight
    calibrator = usual = ""
    if activation is not None and activation.measured:
        calibrator = format_calibrator(activation.calibrator)
        usual = usual_calibrator(activation)
    return AdvisedSettings(
        activation.dtype.bits if activation is not None else None,
        weight.dtype.bits if weight is not None else None,
        weight is None or weight.per_channel,
        frozenset(optimizer.name for optimizer in config.optimizers),
        config.npu or None,
        samples,
        max(GOAL, config.min_sqnr or 0.0),
        calibrator,
        usual,
        activation is not None and activation.pow2,
        config,
    )


def usual_calibrator(spec: QuantizationSpec) -> str:
    """Return the calibrator of the first preset with equal activations; empty without one.

    >>> usual_calibrator(QConfig.of("A8W8").with_(calibrator="minmax").activation)
    'best'
    """
    for preset in PRESETS.values():
        usual = preset.activation
        if usual is not None and usual.with_(calibrator=spec.calibrator) == spec:
            return format_calibrator(usual.calibrator)
    return ""


def settings_of_model(model: ModelProto) -> AdvisedSettings | None:
    """Return the settings of a quantized model, of any tool; None if it has no Q/DQ pairs.

    Bits and granularity are those of the Q/DQ pairs. Optimizers, target and calibrator are those
    of the metadata, which models of this package have.

    Args:
        model: the quantized model.
    """
    pairs = _pairs_of(model)
    # The fewest bits decide, because advice is about the coarsest tensors.
    activation = min(pairs.activations - {0}, default=None)
    weight = min(pairs.weights - {0}, default=None)
    if activation is None and weight is None:
        return None
    texts = _provenance(model)
    optimizers = texts.get("optimizers", "").split()
    named = texts.get("target")
    target = named if named in npu_names() else None
    powers_of_two = bool(pairs.scales) and all(map(_is_power_of_two, pairs.scales))
    # Models of other tools have no target in their metadata, but scales of an NPU are powers of
    # two.
    usual = _USUAL_ON_NPU if target or powers_of_two else _USUAL
    return AdvisedSettings(
        activation,
        weight,
        pairs.per_channel or weight is None,
        frozenset(text.partition(":")[0] for text in optimizers),
        target,
        calibrator=texts.get("calibrator", ""),
        usual_calibrator=usual.get(activation or 0, ""),
        powers_of_two=powers_of_two,
        config=config_of_model(model),
    )


def config_of_model(model: ModelProto) -> QConfig | None:
    """Return the configuration in the metadata of a quantized model.

    None for a model of another tool, for formats without a preset, for a configuration with
    overrides, which the metadata only counts, and for metadata that is damaged or names what is
    not installed.

    Args:
        model: the quantized model.
    """
    texts = _provenance(model)
    if texts.get("preset") not in PRESETS or "overrides" in texts:
        return None
    try:
        return _config_of(texts)
    except (ConfigError, ValueError):  # shlex raises ValueError for an open quotation
        return None


def _config_of(texts: Mapping[str, str]) -> QConfig:
    """Return the configuration of a model's metadata.

    Raises:
        ConfigError: a value is wrong, or not installed.
        ValueError: a text has an open quotation.
    """
    patterns = ("exclude", "op_types", "nodes")
    config = QConfig.of(texts["preset"]).with_(
        optimizers=texts.get("optimizers", "").split(),
        target=texts.get("target", ""),
        **{name: shlex.split(texts.get(name, "")) for name in patterns},
    )
    if calibrator := texts.get("calibrator"):
        config = config.with_(calibrator=calibrator)
    weight = config.weight
    if weight is not None and texts.get("weight", str(weight)) != str(weight):
        config = config.with_(per_channel=not weight.per_channel)
    return config


def _provenance(model: ModelProto) -> dict[str, str]:
    """Return the settings in a model's metadata, by key without the prefix."""
    prefix = f"{PRODUCER}."
    return {
        entry.key.removeprefix(prefix): entry.value
        for entry in model.metadata_props
        if entry.key.startswith(prefix)
    }


@dataclass
class _Pairs:
    """The Q/DQ pairs of a quantized model.

    Attributes:
        activations: bits of the activations; 0 stands for types without an entry in ``_BITS``, such
            as float8, which do not count as integers.
        weights: bits of the weights, likewise.
        scales: the scales of the activations.
        per_channel: whether a weight has several scales.
    """

    activations: set[int] = field(default_factory=set)
    weights: set[int] = field(default_factory=set)
    scales: list[TensorProto] = field(default_factory=list)
    per_channel: bool = False

    def add(self, node: NodeProto, constants: Mapping[str, TensorProto]) -> None:
        """Record a QuantizeLinear of an activation, or a DequantizeLinear of a constant."""
        stored = bool(node.input) and node.input[0] in constants
        if node.op_type == "QuantizeLinear" and not stored:
            self.add_activation(node, constants)
        elif node.op_type == "DequantizeLinear" and stored:
            self.add_weight(node, constants)

    def add_activation(
        self, node: NodeProto, constants: Mapping[str, TensorProto]
    ) -> None:
        """Record a QuantizeLinear whose input is no constant."""
        self.activations.add(_BITS.get(written_type(Node(node), constants), 0))
        scale = constants.get(node.input[1])
        if scale is not None:
            self.scales.append(scale)

    def add_weight(self, node: NodeProto, constants: Mapping[str, TensorProto]) -> None:
        """Record a DequantizeLinear of constant codes."""
        bits = _BITS.get(constants[node.input[0]].data_type, 0)
        self.weights.add(bits)
        scale = constants.get(node.input[1])
        # Biases of 32 bits are not in _BITS. Their scale has a value per channel without meaning
        # that the weights have one.
        if bits and scale is not None:
            self.per_channel |= math.prod(scale.dims) > 1


def _pairs_of(model: ModelProto) -> _Pairs:
    """Return the Q/DQ pairs of a model and of its bodies."""
    pairs = _Pairs()
    for graph, constants in scopes_of(model):
        for node in graph.node:
            pairs.add(node, constants)
    return pairs


def _is_power_of_two(scale: TensorProto) -> bool:
    """Return whether all values of a scale are powers of two."""
    # frexp returns a mantissa in [0.5, 1), which is 0.5 for powers of two alone; 0 has mantissa 0.
    mantissas = np.frexp(to_array(scale).astype(np.float64))[0]
    return bool((mantissas == 0.5).all())
