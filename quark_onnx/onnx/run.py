"""Quantization of a model by a draft, through this package's configuration."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from onnx import ModelProto

from calibrators.readers.open import CalibrationData, RandomData, open_reader
from quark_onnx.api import quantize
from quark_onnx.check.inlined import inlined
from quark_onnx.common.errors import ConfigError, nearest
from quark_onnx.config import Override, QConfig, TensorOverride
from quark_onnx.config.spec import has_powers_of_two
from quark_onnx.convert import convert
from quark_onnx.files.half_precision import upcast_to_float32
from quark_onnx.files.io import load, staged
from quark_onnx.graph import Graph, Node, reach
from quark_onnx.graph.node import kinds_of
from quark_onnx.job import Result
from quark_onnx.onnx import translation
from quark_onnx.onnx.algorithm import AlgoConfig
from quark_onnx.onnx.calibration.data_readers import NO_DATA
from quark_onnx.onnx.draft import Draft
from quark_onnx.onnx.layout import convert_nchw_to_nhwc
from quark_onnx.onnx.option_effects import input_shapes
from quark_onnx.onnxruntime_spelling.overrides import tensor_overrides
from quark_onnx.onnxruntime_spelling.selection import (
    every_node,
    known_nodes,
    ruled_kinds,
)
from quark_onnx.optimizers import AutoMixedPrecision
from quark_onnx.plan import matching

logger = logging.getLogger(__name__)

#: Optimizers in the order in which AMD Quark runs them.
_ORDER = (
    "cle",
    "smooth_quant",
    "quarot",
    "auto_mixprecision",
    "gptq",
    "adaround",
    "adaquant",
    "bias_correction",
)


def handed_back(result: Result, output: str | Path | None) -> ModelProto | None:
    """Return the quantized model unless it was written to a file."""
    return result.model if output is None else None


def run(
    draft: Draft,
    model: str | Path | ModelProto,
    data: CalibrationData | None,
    output: str | Path | None,
) -> Result:
    """Quantize a model by a draft.

    Args:
        draft: the request.
        model: path of the float model, or a ModelProto.
        data: calibration data, as for ``quark_onnx.quantize_static``; None without data.
        output: path of the model; None to return it alone.

    Returns:
        The quantized model and the report.

    Raises:
        QuarkError: the model, the data or a setting is wrong.
    """
    # First, as names and shapes of the converted model count.
    model = _converted(draft, model)
    config = native(draft, model)
    # Weights alone need no data, unless an optimizer or a search reads some.
    needs_data = config.measures or config.rereads or config.search
    samples = _data(draft, data) if needs_data else None
    # The layout changes last, so that calibration data has that of the float model.
    path = None if draft.channels_last else output
    result = quantize(
        model, samples, config, path, external=draft.external, resume=draft.resume
    )
    if not draft.channels_last:
        return result
    result = replace(result, model=convert_nchw_to_nhwc(result.model))
    if output is not None:
        # ``staged`` replaces the file at the end of the block, which has nothing to add.
        with staged(result.model, Path(output), external=draft.external):
            pass
    return result


def native(draft: Draft, model: str | Path | ModelProto) -> QConfig:
    """Translate a draft for a model into a configuration of this package.

    Names that match nothing in the model are omitted with a warning. AMD Quark omits them silently.

    Args:
        draft: the request.
        model: path of the float model, or a ModelProto.
    """
    names = _Names(model)
    if draft.dynamic:
        config = QConfig.of("DYNAMIC")
    else:
        # The preset has the settings that AMD Quark lacks; all others are set below.
        config = QConfig.of("XINT8" if has_powers_of_two(draft.activation) else "A8W8")
    # The sort is stable; AMD Quark ignores the order of algo_config.
    algorithms = sorted(
        draft.algorithms, key=lambda algorithm: _ORDER.index(algorithm.name)
    )
    config = config.with_(
        # Runtime scales have one format, that of DynamicQuantizeLinear.
        activation=config.activation if draft.dynamic else draft.activation,
        weight=draft.weight,
        bias=draft.bias,
        form="operators" if draft.dynamic else draft.form,
        accuracy_level=draft.accuracy_level,
        target=draft.target,
        fix_sizes=False,  # AMD Quark keeps a dynamic batch unless FixShapes is set
        op_types=names.known_types(draft.op_types, draft.op_types_setting),
        tensors=names.tensor_overrides(draft),
        nodes=names.known_nodes(draft.nodes),
        safe=not draft.nodes,  # explicit names disable the exclusions for safety
        optimizers=names.optimizers(algorithms),
        equalize=False,  # AMD Quark equalizes where include_cle says so
        **draft.changes,
    )
    matching_overrides = [
        names.known_override(override) for override in draft.overrides
    ]
    overrides = [override for override in matching_overrides if override is not None]
    # Overrides that keep nodes float come last: for AMD Quark, no configuration of a layer
    # quantizes such nodes.
    overrides.sort(key=lambda override: override.keep)
    singles = translation.single_names(draft.exclude)
    patterns = [translation.pattern(name) for name in singles]
    overrides += [Override(name, keep=True) for name in names.known(patterns)]
    pairs = translation.pairs_of_ends(draft.exclude)
    subgraphs = [names.known_ends(ends) for ends in pairs]
    overrides += [
        Override(between=ends, keep=True) for ends in subgraphs if ends is not None
    ]
    outside = [*names.outside(draft.input_nodes, draft.output_nodes)]
    if draft.constant_matmul:
        outside += names.variable_products()
    if outside:
        # Each name once: a product of two activations may also lie before the inputs.
        overrides.append(Override(tuple(dict.fromkeys(outside)), keep=True))
    return config.with_(overrides=tuple(overrides))


class _Names:
    """Names in a model that a script may use.

    The model is read on first use.
    """

    def __init__(self, model: str | Path | ModelProto) -> None:
        self._model = model

    @cached_property
    def graph(self) -> Graph:
        """Return the graph before quantization, with functions inlined."""
        # Functions are inlined and float16 is widened for the plan, too: names are those of the
        # plan.
        return Graph.of(upcast_to_float32(inlined(load(self._model)))[0])

    def known(self, patterns: Iterable[str]) -> tuple[str, ...]:
        """Return the patterns with a matching node; warn otherwise."""
        return tuple(
            name
            for name in patterns
            if self._warned(
                name, matching(self.graph, Override(name, keep=True), strict=False)
            )
        )

    def optimizers(self, algorithms: Sequence[AlgoConfig]) -> tuple[Any, ...]:
        """Translate algorithms into optimizers, with existing node names alone."""
        optimizers = list[Any]()
        for algorithm in algorithms:
            # None for an analysis that changes nothing, see AutoMixprecisionConfig.
            optimizer = algorithm.native()
            if isinstance(optimizer, AutoMixedPrecision):
                # without a match, the optimizer's error lists the nodes
                nodes = self.known(optimizer.nodes) or optimizer.nodes
                exclude = self.known(optimizer.exclude)
                optimizer = replace(optimizer, nodes=nodes, exclude=exclude)
            if optimizer is not None:
                optimizers.append(optimizer)
        return tuple(optimizers)

    def known_nodes(self, nodes: Sequence[str]) -> tuple[str, ...]:
        """Return the nodes to quantize that are in the model.

        Raises:
            ConfigError: no node remains.
        """
        # An empty list means all nodes, for which the graph need not be read.
        if not nodes:
            return ()
        existing = known_nodes(self.graph, nodes, "nodes_to_quantize")
        if not existing:
            raise ConfigError(
                f"nodes_to_quantize is {list(nodes)}: nothing would be quantized, as"
                " the model has no such node",
            )
        return existing

    def known_types(self, op_types: Sequence[str], setting: str) -> tuple[str, ...]:
        """Return the operator types that are in the model and have a rule.

        Args:
            op_types: the operator types; empty for all.
            setting: name of the setting that has chosen them, for messages.

        Raises:
            ConfigError: no operator type remains.
        """
        if not op_types:
            return ()
        # Bodies of If, Loop and Scan count, as their nodes are quantized, too.
        in_model = kinds_of(every_node(self.graph))
        existing = tuple(sorted(ruled_kinds(op_types) & in_model))
        for op_type in op_types:
            if ruled_kinds([op_type]).isdisjoint(in_model):
                logger.warning(
                    "%s: no %s is quantized; the model has none, or it has no rule",
                    setting,
                    op_type,
                )
        if not existing:
            raise ConfigError(
                f"{setting} is {list(op_types)}: nothing would be quantized, as the"
                " model has no such operator, or there is no rule for it",
            )
        return existing

    def known_override(self, override: Override) -> Override | None:
        """Return the matching part of an override; None without a match."""
        if override.between:
            # An override selects by ends, or by names and types: it never has both.
            ends = self.known_ends(override.between)
            if ends is None:
                return None
            return replace(override, between=ends)
        nodes = self.known(override.nodes)
        kinds = kinds_of(self.graph.nodes)
        op_types = tuple(
            op_type
            for op_type in override.op_types
            if self._warned(op_type, op_type in kinds)
        )
        if not nodes and not op_types:
            return None
        return replace(override, nodes=nodes, op_types=op_types)

    def known_ends(
        self,
        ends: Sequence[Sequence[str]],
    ) -> tuple[tuple[str, ...], tuple[str, ...]] | None:
        """Return start and end nodes of a subgraph; None for an empty subgraph."""
        # AMD's ends are nodes; tensors are accepted, too.
        names = self._tensors() | {node.name for node in self.graph.nodes}
        starts, stops = (
            tuple(name for name in end if self._warned(name, name in names))
            for end in ends
        )
        between = Override(between=(starts, stops), keep=True)
        # Existing ends need not be connected.
        if starts and stops and matching(self.graph, between, strict=False):
            return starts, stops
        logger.warning("exclude: no node lies between %s and %s", *ends)
        return None

    def _tensors(self) -> set[str]:
        """Return the names of all tensors that nodes read or compute."""
        return {
            name for node in self.graph.nodes for name in (*node.inputs, *node.outputs)
        }

    def tensor_overrides(self, draft: Draft) -> tuple[TensorOverride, ...]:
        """Return overrides of existing tensors, and overrides for float results."""
        # The model need not be read.
        if not draft.overridden and not draft.float_nodes:
            return tuple(draft.tensors)
        names = self._tensors()
        given = {
            name: settings
            for name, settings in draft.overridden.items()
            if self._warned(name, name in names, names)
        }
        formats = partial(translation.dtype_of, options=draft.options)
        overrides = tensor_overrides(self.graph, given, formats)
        silent = known_nodes(
            self.graph, draft.float_nodes, "NodesToExcludeOutputQuantization"
        )
        # ``results`` leaves out omitted optional outputs.
        results = [
            result
            for node in self.graph.nodes
            if node.name in silent
            for result in node.results
        ]
        if results:
            overrides.append(TensorOverride(results, keep=True))
        return (*draft.tensors, *overrides)

    def outside(self, inputs: Sequence[str], outputs: Sequence[str]) -> list[str]:
        """Return the nodes before the input nodes and after the output nodes."""
        # A dictionary as an ordered set: the order of the nodes reaches the configuration.
        nodes: dict[Node, None] = {}
        if inputs:
            starts = self._nodes(inputs, "input_nodes")
            nodes |= _beyond(starts, self.graph.leaders)
        if outputs:
            nodes |= _beyond(self._nodes(outputs, "output_nodes"), self.graph.followers)
        return [node.name for node in nodes]

    def variable_products(self) -> list[str]:
        """Return the MatMul nodes without a constant factor."""
        return [
            node.name
            for node in self.graph.nodes_of_type({"MatMul"})
            if not any(self.graph.is_constant(name) for name in node.inputs)
        ]

    def _nodes(self, names: Sequence[str], setting: str) -> list[Node]:
        nodes = {node.name: node for node in self.graph.nodes}
        unknown = [name for name in names if name not in nodes]
        if unknown:
            raise ConfigError(
                f"{setting}: no node of the model is called {unknown[0]!r}"
                f"{nearest(unknown[0], nodes)}",
            )
        return [nodes[name] for name in names]

    def _warned(
        self,
        name: str,
        found: Any,
        choices: Iterable[str] | None = None,
    ) -> bool:
        """Return True if a name was found; otherwise warn.

        The warning suggests the closest choice, a node if ``choices`` is None.
        """
        if not found:
            if choices is None:
                choices = [node.name for node in self.graph.nodes]
            logger.warning(
                "%r matches nothing in the model and has no effect%s",
                name,
                nearest(name, choices),
            )
        return bool(found)


def _beyond(
    nodes: list[Node],
    step: Callable[[Node], Iterable[Node]],
) -> dict[Node, None]:
    """Return the nodes that steps reach from given nodes, without the given nodes."""
    return dict.fromkeys(node for node in reach(nodes, step) if node not in nodes)


def _converted(draft: Draft, model: Any) -> Any:
    """Return the model after the requested conversions."""
    names: list[str] = []
    if draft.widen:
        names.append("float32")
    if draft.opset is not None:
        names.append("opset")
    if draft.shapes:
        names.append("fixed-shapes")
    if not names:
        return model
    shapes = input_shapes(draft.shapes, model) if draft.shapes else {}
    return convert(model, names, shapes=shapes, opset=draft.opset).model


def _data(draft: Draft, data: Any) -> Any:
    """Return the calibration data; random data if requested and no data is given.

    Raises:
        ConfigError: there is no calibration data.
    """
    # Given data wins over UseRandomData, which presets such as VINT8 set.
    if data is None:
        if not draft.random:
            raise ConfigError(NO_DATA)
        return RandomData(
            samples=draft.samples or 1,
            shapes=draft.random_shapes,
            ranges=draft.random_ranges,
        )
    if draft.samples is None:
        return data
    # The inputs of the model, which the reader needs, are known later.
    return partial(open_reader, data, limit=draft.samples)
