"""Convert a model step by step, and verify each conversion by running the model."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from numbers import Integral
from pathlib import Path
from typing import Any

from onnx import ModelProto

from calibrators.base import is_number
from calibrators.onnx_runtime.isolation import isolated
from calibrators.onnx_runtime.tensors import loaded, model_bytes
from quark_onnx.check.inlined import inlined
from quark_onnx.check.sizes import check_sizes
from quark_onnx.common.errors import ConfigError, ModelError, crash_errors, raise_crash
from quark_onnx.common.registry import CONVERSIONS
from quark_onnx.config.checks import require
from quark_onnx.convert.base import Conversion, ConversionSettings
from quark_onnx.convert.verify import Stage, verify
from quark_onnx.files.io import load, staged
from quark_onnx.functions import DOMAINS
from quark_onnx.fusions.base import CONTRIB
from quark_onnx.graph import Graph, store_for
from quark_onnx.graph.node import inner_nodes
from quark_onnx.report import OutputError
from quark_onnx.running.function_bodies import OLD_DOMAIN, define_functions
from quark_onnx.running.run import Reference
from quark_onnx.writing.destination import destination, keeps_weights_beside
from quark_onnx.writing.finish import check

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Step:
    """Result of a conversion.

    Attributes:
        name: name of the conversion.
        keeps: whether the function of the model stays the same.
        notes: descriptions of the changes; none if there was nothing to convert.
        outputs: difference of each output, on random input; none if that could not be run.
    """

    name: str
    keeps: str
    notes: list[str]
    outputs: list[OutputError]


@dataclass(frozen=True)
class Converted:
    """A converted model, with the steps of the conversion.

    Attributes:
        model: the model.
        steps: results of the conversions.
        bytes_before: size of the original model.
        bytes_after: size of the converted model.
    """

    model: ModelProto
    steps: list[Step]
    bytes_before: int
    bytes_after: int


def convert(  # noqa: PLR0913  one call carries the settings of all conversions
    model: str | Path | ModelProto,
    to: str | Sequence[str],
    output: str | Path | None = None,
    *,
    shapes: Mapping[str, Sequence[int]] | None = None,
    opset: int | None = None,
    io: bool = False,
    external: bool = False,
    isolate: bool = False,
) -> Converted:
    """Convert a model to other forms, step by step.

    Args:
        model: a path or a model, which is not changed.
        to: names of conversions; ``quark-onnx list conversions`` lists them.
        output: where to write the model; None only returns it.
        shapes: for ``fixed-shapes``, the shape of each input with open sizes beyond the batch.
        opset: for ``opset``, the version to convert to.
        io: for ``float16`` and ``bfloat16``, convert inputs and outputs, too.
        external: store large tensors in a separate file, even if one file could hold them.
        isolate: run onnxruntime in another process, as for ``quantize``.

    Raises:
        ConfigError: a name or a setting is unknown, missing, or does not apply.
        ModelError: the model cannot be read or converted, or the result does not load.
        AccuracyError: a conversion that should keep the function changed an output; nothing is
            written.

    >>> from onnx import parser
    >>> dense = parser.parse_model('''<ir_version: 8, opset_import: ["" : 17]>
    ...     g (float[N, 2] x) => (float[N, 2] y)
    ...     <float[2, 2] w = {1, 2, 3, 4}> { y = MatMul (x, w) }''')
    >>> converted = convert(dense, ["fixed-shapes", "float16"])
    >>> [node.op_type for node in converted.model.graph.node]
    ['Cast', 'MatMul', 'Cast']
    >>> converted.steps[0].notes
    ["input 'x' has the shape [1, 2]"]
    """
    # Names and settings are checked before the model is read, which may take long.
    chosen = _chosen(to)
    settings = _settings(chosen, shapes, opset, io)
    target = destination(model, output)
    with crash_errors(model), isolated(isolate):
        return _converted(model, chosen, settings, target, external=external)


def _converted(
    model: str | Path | ModelProto,
    chosen: Sequence[Conversion],
    settings: ConversionSettings,
    target: Path | None,
    *,
    external: bool,
) -> Converted:
    """Convert a model by checked settings, and write it."""
    original = load(model)
    external |= keeps_weights_beside(model, target)
    store = store_for(original, target)
    try:
        # Functions are inlined, as conversions look at operators.
        start = Stage(Graph.of(inlined(original), store))
        stage = start
        steps = list[Step]()
        for conversion in chosen:
            stage, step = _apply(conversion, stage, settings)
            steps.append(step)
        # Without a change the original is written, byte by byte where possible.
        if any(step.notes for step in steps):
            written = _finished(_tidied(stage.graph), start, target, external=external)
        else:
            source = Path(model) if isinstance(model, str | Path) else None
            written = _finished(
                copy(original), start, target, external=external, source=source
            )
        return Converted(written, steps, model_bytes(original), model_bytes(written))
    finally:
        if store is not None:
            store.close()


def _chosen(to: str | Sequence[str]) -> list[Conversion]:
    """Return the conversions of given names, in this order.

    Raises:
        ConfigError: there is no name, or a name is unknown.
    """
    names = [to] if isinstance(to, str) else list(to)
    if not names:
        raise ConfigError(
            f"there is nothing to convert to; choose of {', '.join(CONVERSIONS)}",
        )
    return [CONVERSIONS[name] for name in names]


def _settings(
    chosen: list[Conversion],
    shapes: Mapping[str, Sequence[int]] | None,
    opset: int | None,
    io: bool,
) -> ConversionSettings:
    """Return the settings of conversions.

    Raises:
        ConfigError: a setting is malformed, or unused.
    """
    sizes = {
        name: _checked_shape(name, tuple(shape))
        for name, shape in (shapes or {}).items()
    }
    whole = opset is None or is_number(opset, Integral)
    require(whole, "opset", opset, "a whole number")
    # A setting that no conversion reads is probably a mistake in the command.
    given = {"shapes": bool(sizes), "opset": opset is not None, "io": bool(io)}
    _check_used([name for name, is_given in given.items() if is_given], chosen)
    return ConversionSettings(sizes, None if opset is None else int(opset), bool(io))


def _checked_shape(name: str, shape: tuple[Any, ...]) -> tuple[int, ...]:
    """Return the shape of an input as Python integers.

    Raises:
        ConfigError: there is no size, or a size is not a whole number above 0.
    """
    whole = all(is_number(size, Integral) and size > 0 for size in shape)
    where = f"the shape of {name!r}"
    require(bool(shape) and whole, where, list(shape), "whole numbers from 1")
    return tuple(int(size) for size in shape)


def _check_used(given: list[str], chosen: list[Conversion]) -> None:
    """Raise ConfigError if no chosen conversion reads a setting that the caller gave."""
    used = {setting for conversion in chosen for setting in conversion.reads}
    for setting in given:
        if setting not in used:
            users = [name for name in CONVERSIONS if setting in CONVERSIONS[name].reads]
            raise ConfigError(
                f"{setting} is given, which only {' and '.join(users)} reads; add it to"
                " what is converted to",
            )


def _apply(
    conversion: Conversion, before: Stage, settings: ConversionSettings
) -> tuple[Stage, Step]:
    """Run a conversion on a copy of a stage's graph, and verify the result.

    If there was nothing to convert, return ``before`` and a step without notes.

    Args:
        settings: the settings of all conversions, without samples.
    """
    sample = None
    if conversion.keeps == "but for rounding":
        # Such a conversion compares the results itself, and decides by them what it converts.
        sample = before.sample(before)
    settings = replace(settings, samples=[] if sample is None else [sample])
    # A copy, as conversions change a graph in place, and ``before`` is still compared.
    graph, notes = conversion.rewrite(before.graph.copy(), settings)
    if not notes:
        logger.warning("%s: there is nothing to convert", conversion.name)
        return before, Step(conversion.name, conversion.keeps, [], [])
    after = Stage(graph)
    outputs = verify(conversion, before, after)
    return after, Step(conversion.name, conversion.keeps, notes, outputs)


def _tidied(graph: Graph) -> ModelProto:
    """Return the model with function bodies for vendor operators, and without unused domains."""
    # Domains in use, also in bodies.
    kinds = {node.domain for node in (*graph.nodes, *inner_nodes(graph.nodes))}
    try:
        define_functions(graph)
    except ModelError as error:
        logger.warning("%s; the model runs only where the operator is known", error)
    # No vendor operator occurs any more.
    if kinds.isdisjoint(DOMAINS):
        graph.set_functions([])
    graph.infer()
    model = graph.to_model()
    unused = {*DOMAINS, OLD_DOMAIN, CONTRIB} - kinds
    kept = [entry for entry in model.opset_import if entry.domain not in unused]
    del model.opset_import[:]
    model.opset_import.extend(kept)
    return model


def _finished(
    model: ModelProto,
    start: Stage,
    target: Path | None,
    *,
    external: bool,
    source: Path | None = None,
) -> ModelProto:
    """Return the model after the final check and, with a target, the writing.

    A written model is read back, so that external tensors refer to the written files.

    Args:
        start: the original model, with its functions inlined.
        source: file of the original model, if nothing was converted.
    """
    original = start.graph.to_model()
    if target is None:
        check(model, original, "converted")
        return loaded(model)
    # A model beyond the size limit could not be read back.
    check_sizes(model)
    with staged(model, target, external=external, source=source) as path:
        check(path, original, "converted")
        plain = Reference(original, optimize=False)
        converted = Reference(model, path, optimize=False, what="the converted model")
        # A model that never ran on the CPU, such as one for an accelerator, gives no reason to
        # warn.
        if _opens(plain) and not _opens(converted):
            logger.warning(
                "onnxruntime loads the model on its CPU provider no more, which lacks"
                " kernels for it",
            )
    return load(target)


def _opens(reference: Reference) -> bool:
    """Return whether onnxruntime can open a session on a model.

    Raises:
        ModelError: its process ended.
    """
    try:
        reference.session  # noqa: B018  (whether it opens is the question)
    except ModelError as error:
        raise_crash(error)
        logger.debug("%s", error)
        return False
    return True
