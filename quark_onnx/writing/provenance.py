"""Provenance in the metadata of a quantized model.

Model viewers (Netron, ``onnxruntime.InferenceSession.get_modelmeta``) show the metadata. It has
no date, no path and no host name, so that equal input gives equal bytes.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping

from quark_onnx.common.registry import PRESETS
from quark_onnx.common.version import __version__
from quark_onnx.config import QConfig, QuantizationSpec
from quark_onnx.config.spec import format_calibrator
from quark_onnx.config.text import format_call
from quark_onnx.graph import Graph

PRODUCER = "quark_onnx"
#: Characters of the longest text of a selection: a model may have thousands of names.
_LONGEST = 2000


def write_provenance(graph: Graph, config: QConfig) -> None:
    """Write the producer and the settings into the metadata of a model.

    Args:
        graph: graph of the quantized model.
        config: the settings as requested.
    """
    write_producer(graph, described(config))


def write_producer(graph: Graph, settings: Mapping[str, str]) -> None:
    """Write the producer and settings into the metadata of a model.

    Metadata of the float model is kept. Its producer moves to ``quark_onnx.float_producer``.

    Args:
        graph: graph of the quantized model.
        settings: texts by key, without the prefix ``quark_onnx``.
    """
    # A model that this package wrote keeps the float producer that its metadata names already.
    before = " ".join(filter(None, graph.producer_info))
    if before and graph.producer_info[0] != PRODUCER:
        graph.set_metadata(f"{PRODUCER}.float_producer", before)
    graph.set_producer(PRODUCER, __version__)
    for key, value in settings.items():
        graph.set_metadata(f"{PRODUCER}.{key}", value)


def described(config: QConfig) -> dict[str, str]:
    """Return the settings that distinguish quantized models, as texts.

    >>> described(QConfig.of("S8S8"))["preset"], described(QConfig.of("S8S8"))["calibrator"]
    ('S8S8', 'best')
    """
    activation = config.activation
    texts = {
        "version": __version__,
        "preset": preset_of(config),
        "activation": str(activation or "float"),
        "weight": str(config.weight or "float"),
        "calibrator": _calibrator(activation) if activation else "",
        "optimizers": " ".join(map(format_call, config.optimizers)),
        "target": config.target,
        **_patterns(config),
    }
    # Empty settings leave no entry, so that metadata of a plain model stays short.
    return {key: text for key, text in texts.items() if text}


def _patterns(config: QConfig) -> dict[str, str]:
    """Return the selections of nodes as texts; of long ones, and of overrides, their number."""
    texts = dict[str, str]()
    others = len(config.overrides) + len(config.tensors)
    for name in ("exclude", "op_types", "nodes"):
        patterns = getattr(config, name)
        text = shlex.join(patterns)
        if len(text) <= _LONGEST:
            texts[name] = text
        else:
            others += len(patterns)
    return texts | {"overrides": str(others or "")}


def preset_of(config: QConfig) -> str:
    """Return the first preset with equal formats; empty without a match.

    >>> preset_of(QConfig.of("A8W8").with_(exclude="head")), preset_of(QConfig.of("INT4"))
    ('A8W8', 'INT4')
    """
    # Formats alone identify a preset: calibrator, granularity, exclusions and optimizers have
    # entries of their own.
    activation, weight = config.activation, config.weight
    for name, preset in PRESETS.items():
        usual = [preset.activation, preset.weight]
        if activation is not None and usual[0] is not None:
            usual[0] = usual[0].with_(calibrator=activation.calibrator)
        if weight is not None and usual[1] is not None and not weight.block_size:
            usual[1] = usual[1].with_(per_channel=weight.per_channel)
        if [activation, weight] == usual:
            return name
    return ""


def _calibrator(spec: QuantizationSpec) -> str:
    return format_calibrator(spec.calibrator) if spec.measured else ""
