"""convert: a model to another form, conversion by conversion, each verified by running the model."""  # noqa: E501

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from numbers import Integral
from pathlib import Path

from onnx import ModelProto

from calibrators.base import is_number
from calibrators.onnx_runtime.session import model_bytes
from quark_onnx.convert.base import Conversion, Settings
from quark_onnx.convert.verify import Stage, verify
from quark_onnx.errors import ConfigError, ModelError
from quark_onnx.functions import DOMAINS
from quark_onnx.fusions.base import CONTRIB
from quark_onnx.graph import Graph, inlined, store_for
from quark_onnx.graph.io import load, loaded, read, staged
from quark_onnx.graph.node import inner_nodes
from quark_onnx.graph.sizes import check_sizes
from quark_onnx.registry import CONVERSIONS
from quark_onnx.report import OutputError
from quark_onnx.steps import (
    OLD_DOMAIN,
    Reference,
    check,
    define_functions,
    destination,
    keeps_weights_beside,
)

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Step:
    """What one conversion did.

    Attributes:
        name, keeps: of the conversion. notes: what it did, a line each; none if there was nothing
        to convert. outputs: how far each output is from what it was, on random input; none where
        that could not be run.
    """

    name: str
    keeps: str
    notes: list[str]
    outputs: list[OutputError]


@dataclass(frozen=True)
class Converted:
    """A model in another form, and how it came about.

    Attributes:
        model: the model.
        steps: one for each conversion.
        bytes_before, bytes_after: sizes of the models.
    """

    model: ModelProto
    steps: list[Step]
    bytes_before: int
    bytes_after: int


def convert(  # noqa: PLR0913
    model: str | Path | ModelProto,
    to: str | Sequence[str],
    output: str | Path | None = None,
    *,
    shapes: Mapping[str, Sequence[int]] | None = None,
    opset: int | None = None,
    io: bool = False,
    external: bool = False,
) -> Converted:
    """Convert a model to other forms, one after the other.

    Args:
        model: a path or a model, which is not changed.
        to: names of conversions; ``quark-onnx list conversions`` has them all.
        output: where to write the model; None only returns it.
        shapes: for ``fixed-shapes``, the shape of each input whose sizes are open beyond the batch.
        opset: for ``opset``, the version to convert to.
        io: for ``float16`` and ``bfloat16``, inputs and outputs get the type, too.
        external: keep large tensors in a file beside the output, also where one file would hold
            them.

    Raises:
        ConfigError: a name or a setting is unknown, missing, or does not fit.
        ModelError: the model cannot be read or converted, or does not load after it.
        AccuracyError: a conversion that keeps the function of a model has changed its outputs;
            nothing is written.

    >>> from onnx import parser
    >>> dense = parser.parse_model('''<ir_version: 8, opset_import: ["" : 17]>
    ...     g (float[N, 2] x) => (float[N, 2] y) <float[2, 2] w = {1, 2, 3, 4}> { y = MatMul (x, w) }''')
    >>> converted = convert(dense, ["fixed-shapes", "float16"])
    >>> [node.op_type for node in converted.model.graph.node]
    ['Cast', 'MatMul', 'Cast']
    >>> converted.steps[0].notes
    ["input 'x' has the shape [1, 2]"]
    """  # noqa: E501
    chosen = _chosen(to)
    settings = _settings(chosen, shapes, opset, io)
    target = destination(model, output)
    original = load(model)
    external |= keeps_weights_beside(model, target)
    store = store_for(original, target)
    try:
        first = Stage(Graph.of(inlined(original), store))
        stage, steps = first, list[Step]()
        for each in chosen:
            stage, step = _apply(each, stage, settings)
            steps.append(step)
        if any(step.notes for step in steps):
            written = _finished(_tidied(stage.graph), first, target, external=external)
        else:
            source = Path(model) if isinstance(model, str | Path) else None
            written = _finished(
                copy(original),
                first,
                target,
                external=external,
                source=source,
            )
        return Converted(written, steps, model_bytes(original), model_bytes(written))
    finally:
        if store is not None:
            store.close()


def _chosen(to: str | Sequence[str]) -> list[Conversion]:
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
) -> Settings:
    """The settings, each of which some conversion reads.

    Raises:
        ConfigError: one is malformed, or nothing reads it.
    """
    sizes = {name: tuple(shape) for name, shape in (shapes or {}).items()}
    for name, shape in sizes.items():
        if not shape or not all(
            is_number(size, Integral) and size > 0 for size in shape
        ):
            raise ConfigError(
                f"the shape of {name!r} is {list(shape)}; it must be whole numbers"
                " from 1",
            )
    if opset is not None and not is_number(opset, Integral):
        raise ConfigError(f"opset is {opset!r}; it must be a whole number")
    given = {"shapes": bool(sizes), "opset": opset is not None, "io": bool(io)}
    read_by_some = {setting for each in chosen for setting in each.reads}
    for setting in (
        name for name, there in given.items() if there and name not in read_by_some
    ):
        users = [name for name in CONVERSIONS if setting in CONVERSIONS[name].reads]
        raise ConfigError(
            f"{setting} is given, which only {' and '.join(users)} reads; add it to"
            " what is converted to",
        )
    return Settings(
        {name: tuple(map(int, shape)) for name, shape in sizes.items()},
        None if opset is None else int(opset),
        bool(io),
    )


def _apply(
    conversion: Conversion,
    before: Stage,
    settings: Settings,
) -> tuple[Stage, Step]:
    sample = before.sample(before) if conversion.keeps == "but for rounding" else None
    settings = replace(settings, samples=[] if sample is None else [sample])
    graph, notes = conversion.rewrite(before.graph.copy(), settings)
    if not notes:
        logger.warning("%s: there is nothing to convert", conversion.name)
        return before, Step(conversion.name, conversion.keeps, [], [])
    after = Stage(graph)
    return after, Step(
        conversion.name,
        conversion.keeps,
        notes,
        verify(conversion, before, after),
    )


def _tidied(graph: Graph) -> ModelProto:
    """The model, with bodies for operators of the vendors, and without domains that nothing is left
    of.
    """
    kinds = {node.domain for node in (*graph.nodes, *inner_nodes(graph.nodes))}
    try:
        define_functions(graph)
    except ModelError as error:
        logger.warning("%s; the model runs only where the operator is known", error)
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
    first: Stage,
    target: Path | None,
    *,
    external: bool,
    source: Path | None = None,
) -> ModelProto:
    """The model, which has been checked and, with a target, written.

    What lies in files is read from there.

    Args:
        source: the file that the model was read from, if nothing in it was converted.
    """
    original = first.graph.to_model()
    if target is None:
        check(model, original, "converted")
        return loaded(model)
    check_sizes(model)  # or it could not be read back
    with staged(model, target, external=external, source=source) as path:
        check(path, original, "converted")
        plain = Reference(original, optimize=False)
        if _opens(plain) and not _opens(
            Reference(model, path, optimize=False, what="the converted model"),
        ):
            logger.warning(
                "onnxruntime loads the model on its CPU provider no more, which lacks"
                " kernels for it",
            )
    return read(target)


def _opens(reference: Reference) -> bool:
    try:
        reference.session  # noqa: B018  (whether it opens is the question)
    except ModelError as error:
        logger.debug("%s", error)
        return False
    return True
