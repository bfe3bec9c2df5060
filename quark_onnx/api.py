"""The straight line from a float model to a quantized one."""

from __future__ import annotations

import logging
import os
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, overload

import numpy as np
import onnx
from onnx import ModelProto, helper

import calibrators
from calibrators.data import InputSpec, Reader, open_reader
from quark_onnx.config import QConfig
from quark_onnx.errors import ConfigError, DataError, ModelError
from quark_onnx.graph import Graph
from quark_onnx.graph.io import data_file, external_files, read
from quark_onnx.onnxruntime_spelling import is_onnxruntime_call, translate
from quark_onnx.passes import CLEANING
from quark_onnx.plan import Plan, select
from quark_onnx.progress import Progress
from quark_onnx.report import Report, summarize
from quark_onnx.steps import (
    Reference,
    calibrate,
    clean,
    finish,
    guard,
    insert,
    make_plan,
    prepare,
    raise_opset_for,
    search,
    solve,
    solve_biases,
    tolerated,
)
from quark_onnx.steps.calibrate import HoldOut

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Result:
    """A quantized model, how it came about, and how good it is."""

    model: ModelProto
    plan: Plan
    report: Report


def quantize(
    model: str | Path | ModelProto,
    data: Any,
    config: QConfig | str | Path | dict[str, Any] = "A8W8",
    output: str | Path | None = None,
    *,
    executor: Executor | None = None,
    progress: bool | None = False,
) -> Result:
    """Quantize a model statically and say what was done; ``quantize_static`` returns the model alone.

    Raises:
        QuarkError: see ``quark_onnx.errors``; nothing is written.
    """
    config = QConfig.of(config)
    target = _target(model, output)
    original = load(model)
    external = _external(model, target)
    graph = Graph.of(original)
    select(graph, config)  # patterns are held against the graph that the user knows
    reader = reader_for(graph, data, config)
    first = _first(reader)

    reference = Reference(original, Path(model) if isinstance(model, str | Path) else None)
    graph, notes = prepare(graph, config, reference, first)
    plan = make_plan(graph, config, strict=False)
    graph, raised = raise_opset_for(graph, plan, reference, first)
    if raised:
        plan = make_plan(graph, config, strict=False)
    held = HoldOut(reader, remember=config.search)
    with Progress(progress, reader.length, "calibrating", "sample") as bar:
        ranges = calibrate(graph, plan, held, executor=executor, progress=bar.update)
    found = guard(graph, plan, ranges) if config.safe else []
    params = solve(graph, plan, ranges)
    count = search(graph, plan, params, held.first, progress)
    moved = [f"{count} power-of-two scales moved by the error at the outputs"] if count else []
    solve_biases(graph, plan, params)
    result = insert(graph, plan, params)
    quantized, errors = finish(
        result, reference, held.samples or [first], target, min_sqnr=config.min_sqnr, external=external
    )
    operators, kept_nodes, kept_tensors = summarize(plan)
    report = Report(
        config=str(config),
        samples=held.count,
        held_out=len(held.samples),
        bytes_before=original.ByteSize(),
        bytes_after=quantized.ByteSize(),
        operators=operators,
        kept_nodes=kept_nodes,
        kept_tensors=kept_tensors,
        notes=[*notes, *raised, *found, *moved, *params.notes],
        outputs=errors,
    )
    logger.debug("%s", report)
    return Result(quantized, plan, report)


@overload
def quantize_static(
    model: str | Path | ModelProto,
    data: Any,
    config: QConfig | str | Path | dict[str, Any] = "A8W8",
    output: str | Path | None = None,
    *,
    executor: Executor | None = None,
    progress: bool | None = False,
) -> ModelProto: ...


@overload
def quantize_static(
    model_input: str | Path | ModelProto,
    model_output: str | Path,
    calibration_data_reader: Any,
    *onnxruntime_positional: Any,
    **onnxruntime_keywords: Any,
) -> ModelProto: ...


def quantize_static(*arguments: Any, **keywords: Any) -> ModelProto:
    """Quantize a float model to integers with scales measured on calibration data.

    Called as ``quantize_static(model, data, config="A8W8", output=None, *, executor=None, progress=False)``, or with
    the arguments of ``onnxruntime.quantization.quantize_static``, which are translated.

    Args:
        model: path of the float model, or a ModelProto, which is not changed.
        data: calibration samples: an iterable or generator of ``{input name: array}``, an onnxruntime
            ``CalibrationDataReader``, a torch ``DataLoader``, a .npz or .npy file or a folder of them, or, with the
            options of ``calibrators.data.open_reader``, ``partial(open_reader, "images/", images=ImageSpec(...))``.
        config: a preset's name, a YAML file, a dictionary, or a QConfig.
        output: where to write the model; None only returns it.
        executor: any ``concurrent.futures.Executor``; calibration is sharded over it, with the same result.
        progress: show a progress bar on stderr; None shows it on a terminal only.

    Returns:
        The quantized model. Its inputs and outputs are those of the float model.

    Raises:
        QuarkError: the model, the data or a setting is wrong, or the result misses ``config.min_sqnr``.
    """
    if is_onnxruntime_call(arguments, keywords):
        call = translate(arguments, keywords)
        return quantize(call.model, call.data, call.config, call.output).model
    return quantize(*arguments, **keywords).model


def plan_for(model: str | Path | ModelProto, config: QConfig | str | Path | dict[str, Any] = "A8W8") -> Plan:
    """What would become of each tensor, as far as that is known without data."""
    config = QConfig.of(config)
    graph = Graph.of(load(model))
    select(graph, config)  # patterns are held against the graph that the user knows
    return make_plan(clean(graph, CLEANING)[0] if config.prepare else graph, config, strict=False)


def load(model: str | Path | ModelProto) -> ModelProto:
    """A model from a path, or the model itself, which is never changed."""
    if isinstance(model, ModelProto):
        if files := external_files(model):
            raise ModelError(f"the weights of the model are not loaded, they lie in {sorted(files)}; pass its path")
        return model
    if isinstance(model, str | Path):
        return read(Path(model))
    raise ModelError(f"model is a {type(model).__name__}; it must be a path or a ModelProto")


def input_specs(graph: Graph, config: QConfig | None = None) -> list[InputSpec]:
    """What the data has to provide: name, type, shape and possible values of each input that has no default."""
    specs, allowed = [], tolerated(graph, make_plan(graph, config or QConfig()))
    for value in graph.inputs:
        if value.name in graph.initializers:
            continue
        kind = graph.elem_type(value.name)
        try:
            dtype = np.dtype(helper.tensor_dtype_to_np_dtype(kind)) if kind else None
        except (KeyError, TypeError):
            dtype = None
        tensor = value.type.WhichOneof("value") in ("tensor_type", None)
        shape = graph.shape(value.name) if tensor else None
        specs.append(InputSpec(value.name, dtype, shape, allowed.get(value.name, "finite"), tensor))
    return specs


def reader_for(graph: Graph, data: Any, config: QConfig | None = None) -> Reader:
    """The calibration data as a reader of checked samples; a ``partial`` of ``open_reader`` lacks only the inputs."""
    if data is None:
        raise DataError("no calibration data was given; pass an iterable of {input name: array}, a folder or a reader")
    try:
        if isinstance(data, Reader):
            return data
        opening = data if isinstance(data, partial) else partial(open_reader, data)
        return opening(input_specs(graph, config))
    except calibrators.CalibrationError as error:
        raise DataError(str(error)) from error


def _first(reader: Reader) -> Any:
    try:
        return reader.first()
    except calibrators.CalibrationError as error:
        raise DataError(str(error)) from error


def _target(model: object, output: object) -> Path | None:
    if output is None:
        return None
    if not isinstance(output, str | Path) or "\0" in str(output):
        raise ConfigError(f"output is {output!r}; it must be a path")
    target = Path(output)
    if target.is_dir():
        raise ConfigError(f"output {target} is a folder; give the name of the .onnx file to write")
    if target.exists() and not target.is_file():
        raise ConfigError(f"output {target} is a device or a pipe, which a file would replace; name a file")
    if isinstance(model, str | Path) and _same_file(target, Path(model)):
        raise ConfigError(f"output {target} is the input model itself; the float model is never overwritten")
    folder = next(parent for parent in target.absolute().parents if parent.exists())
    if not (folder.is_dir() and os.access(folder, os.W_OK)):
        raise ConfigError(f"output {target} cannot be written: {folder} is no folder that can be written to")
    return target


def _external(model: str | Path | ModelProto, target: Path | None) -> bool:
    """Whether a model keeps tensors in other files, which the output must not replace."""
    if isinstance(model, ModelProto):
        return False
    files = external_files(onnx.load(str(model), load_external_data=False))
    written = [] if target is None else [target, data_file(target)]
    for name in files:
        if any(_same_file(path, Path(model).parent / name) for path in written):
            raise ConfigError(f"output {target} would replace {name!r}, which holds weights of the input model")
    return bool(files)


def _same_file(first: Path, second: Path) -> bool:
    """Whether two paths lead to one file, also through links or in another case where the file system has none."""
    if first.exists() and second.exists():
        return first.samefile(second)
    return first.resolve() == second.resolve()
