"""Functions that quantize a float model, by strategy."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from contextlib import contextmanager
from dataclasses import replace
from functools import wraps
from pathlib import Path
from typing import Any, ParamSpec, Protocol, overload

from onnx import ModelProto
from onnx.parser import parse_model

from calibrators.onnx_runtime.custom_operators import (
    Library,
    current_libraries,
    libraries,
)
from calibrators.onnx_runtime.isolation import isolated
from calibrators.onnx_runtime.session import open_session
from calibrators.onnx_runtime.tensors import loaded
from calibrators.readers.open import CalibrationData
from calibrators.shown import short
from quark_onnx.check.inlined import inlined
from quark_onnx.common.errors import (
    ConfigError,
    ConfigNotFoundError,
    crash_errors,
    nearest,
)
from quark_onnx.common.progress import Show, showing
from quark_onnx.common.wording import counted
from quark_onnx.config import QConfig
from quark_onnx.config.checks import require, require_known
from quark_onnx.config.spec import is_dynamic
from quark_onnx.files.half_precision import upcast_to_float32
from quark_onnx.files.io import has_external_data, load
from quark_onnx.files.overwrites import refuse_overwritten_arguments, same_file
from quark_onnx.graph import Graph, gather_constants
from quark_onnx.job import Job, Result, measure_ranges, run
from quark_onnx.measuring.calibration import Calibration
from quark_onnx.measuring.labelled import (
    has_class_folders,
    labelled_findings,
    scorer_for,
)
from quark_onnx.measuring.range_files import (
    FORMATS,
    GivenRanges,
    load_ranges,
    save_ranges,
)
from quark_onnx.onnxruntime_spelling import (
    CallError,
    TranslatedCall,
    is_dynamic_call,
    is_static_call,
    translate_dynamic,
    translate_static,
    write_cache,
)
from quark_onnx.passes import CLEANING
from quark_onnx.plan import Plan, select
from quark_onnx.planning.make_plan import make_plan
from quark_onnx.planning.prepare import clean
from quark_onnx.preprocessing import Finding
from quark_onnx.report.verdict import check_task

logger = logging.getLogger(__name__)

#: A model for a session that only tests whether libraries of custom operators can be registered.
_IDENTITY = '<ir_version: 8, opset_import: ["" : 17]> g (float x) => (float y) { y = Identity (x) }'

#: SQNR in dB below which an output counts as damaged: the error has half the power of the output.
_DAMAGED = 3.0

#: Accepted forms of a configuration.
Config = QConfig | str | Path | dict[str, Any]
#: Parameters of a function that also accepts the arguments of onnxruntime's function.
Parameters = ParamSpec("Parameters")


class _AcceptsOnnxruntimeCalls(Protocol[Parameters]):
    """A function that also accepts the arguments of onnxruntime's function of the same name."""

    @overload
    def __call__(
        self, *arguments: Parameters.args, **keywords: Parameters.kwargs
    ) -> ModelProto: ...

    @overload
    def __call__(
        self,
        model_input: str | Path | ModelProto,
        model_output: str | Path,
        *onnxruntime_positional: Any,
        **onnxruntime_keywords: Any,
    ) -> ModelProto: ...


def _accepting_onnxruntime_calls(
    is_onnxruntime_call: Callable[[tuple[Any, ...], dict[str, Any]], bool],
    translate: Callable[[tuple[Any, ...], dict[str, Any]], TranslatedCall],
) -> Callable[[Callable[Parameters, ModelProto]], _AcceptsOnnxruntimeCalls[Parameters]]:
    """Return a decorator that also accepts the arguments of onnxruntime's function.

    Args:
        is_onnxruntime_call: returns whether arguments and keywords are those of onnxruntime.
        translate: returns the call with the settings of this package.
    """

    def decorate(
        function: Callable[Parameters, ModelProto],
    ) -> _AcceptsOnnxruntimeCalls[Parameters]:
        @wraps(function)
        def wrapper(*arguments: Any, **keywords: Any) -> ModelProto:
            if is_onnxruntime_call(arguments, keywords):
                # ``isolate`` is no argument of onnxruntime's function.
                isolate = keywords.pop("isolate", False)
                return _quantize_onnxruntime_call(
                    translate(arguments, keywords), isolate=isolate
                )
            _require_arguments_of(function, arguments, keywords)
            return function(*arguments, **keywords)

        return wrapper

    return decorate


def _require_arguments_of(
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
    keywords: dict[str, Any],
) -> None:
    """Check the arguments of a call against a function's signature.

    Raises:
        ConfigError: the arguments do not fit; the message names the nearest keyword.
    """
    signature = inspect.signature(function)
    try:
        signature.bind(*arguments, **keywords)
    except TypeError as error:
        parameters = signature.parameters
        unknown = next((name for name in keywords if name not in parameters), "")
        positional = [
            parameter.name
            for parameter in parameters.values()
            if parameter.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
        ]
        hint = nearest(unknown, parameters) if unknown else ""
        raise ConfigError(
            f"{function.__name__}({', '.join(positional)}): {error}{hint}"
        ) from error


def quantize(  # noqa: PLR0913
    model: str | Path | ModelProto,
    data: CalibrationData | None,
    config: Config = "A8W8",
    output: str | Path | None = None,
    *,
    executor: Executor | None = None,
    progress: Show = False,
    external: bool = False,
    resume: str | Path | None = None,
    ranges: Calibration | str | Path | None = None,
    task: str = "auto",
    labels: str | Path | None = None,
    verdict: bool = True,
    isolate: bool = False,
) -> Result:
    """Quantize a model and return the result with a report.

    ``quantize_static``, ``quantize_dynamic`` and ``quantize_weights`` return the model only.

    Args:
        model: path of the float model, or a ModelProto, which is not changed.
        data: as for ``quantize_static``; None if the config needs no measurement: float
            activations, dynamic scales, or known ranges.
        config: as for ``quantize_static``.
        output: the file to write; None only returns the model.
        executor: as for ``quantize_static``.
        progress: as for ``quantize_static``.
        external: store large tensors in a file next to the output, even if a single file could
            hold them.
        resume: a folder for the layers that optimizers have finished. After an interruption the
            same call continues with these layers; the result is that of an uninterrupted run.
        ranges: the result of ``calibrate`` or its file, or a calibration cache of TensorRT or
            onnxruntime. Known ranges are not measured again; if all are known, no data is
            needed. The measurements of this run are added to a ``Calibration``.
        task: task of the model, for ``report.verdict``: ``classifier``, ``segmentation``,
            ``detector``, ``embedding``, ``language``, ``image`` or ``signal``; ``auto`` detects
            it from the outputs.
        labels: labels of the data, as for ``compare``: the report has the metric of both models on
            the held-out samples. Class folders, and integers that come with the data, need no file.
            A low top-1 of the float model is reported as wrong preprocessing.
        verdict: judge the result in the terms of its task, and look for wrong preprocessing. False
            leaves both out: ``report.verdict`` is None, and the report still has the errors of the
            outputs.
        isolate: run onnxruntime in another process, started for this call. A native crash of
            onnxruntime, which would end this process, then raises ``RuntimeCrashError`` or is
            worked around with a note in the report. The result is the same.

    Returns:
        The quantized model, its plan and its report.

    Raises:
        QuarkError: see ``quark_onnx.common.errors``; nothing is written.
    """
    for name, flag in (("verdict", verdict), ("isolate", isolate)):
        require(flag in (True, False), name, flag, "True or False")
    # ``crash_errors`` is outermost, since ``isolated`` raises an error when its process crashes.
    with crash_errors(model), isolated(isolate), showing(progress) as show:
        # Wrong arguments fail here, before the model is read.
        require(
            executor is None or callable(getattr(executor, "submit", None)),
            "executor",
            executor,
            "a concurrent.futures.Executor",
        )
        require(resume is None or _is_path(resume), "resume", resume, "a folder")
        check_task(task)
        refuse_overwritten_arguments(
            {
                "model": model,
                "data": data,
                "config": config,
                "ranges": ranges,
                "labels": labels,
            },
            {"output": output, "resume": resume},
        )
        job = Job.open(
            model,
            QConfig.of(config),
            output,
            external,
            None if resume is None else Path(resume),
            _ranges_of(ranges),
        )
        # ``close`` deletes the temporary files of a large model, whatever happens.
        try:
            scorer = None
            findings: tuple[Finding, ...] | None = None if verdict else ()
            if data is not None and (labels is not None or has_class_folders(data)):
                scorer = scorer_for(labels, data)
                if verdict:
                    # The labelled samples are checked here, and not again by ``run``.
                    reference = job.model.reference
                    findings = labelled_findings(reference, data, labels, task)
            job = replace(
                job, task=task, findings=findings, scorer=scorer, verdict=verdict
            )
            return run(job, data, executor, show)
        finally:
            job.close()


def _ranges_of(ranges: object) -> Calibration | GivenRanges | None:
    """Return the ranges of the argument ``ranges``: a Calibration, or the path of a file."""
    if ranges is None or isinstance(ranges, Calibration):
        return ranges
    require(_is_path(ranges), "ranges", ranges, "a Calibration or the path of a file")
    return load_ranges(str(ranges))


def calibrate(  # noqa: PLR0913
    model: str | Path | ModelProto,
    data: CalibrationData | None,
    output: str | Path | None = None,
    *,
    config: Config = "A8W8",
    format: str = "quark",
    executor: Executor | None = None,
    progress: Show = False,
    isolate: bool = False,
) -> Calibration:
    """Measure the ranges of a model's activations once, for many runs of ``quantize``.

    The statistics serve every calibrator except moving averages, and every configuration that
    quantizes the same tensors. A tensor is identified by its computation, so a tensor that an
    optimizer changes is measured again.

    Args:
        model: path of the float model, or a ModelProto, which is not changed.
        data: as for ``quantize_static``; every sample is measured.
        output: the file to write, for the argument ``ranges`` of ``quantize``; None only returns
            the statistics.
        config: selects the tensors to measure; its calibrator computes ranges for formats that
            store ranges only.
        format: format of the file: "quark", or the calibration caches "tensorrt" and
            "onnxruntime", with one range per tensor.
        executor: as for ``quantize_static``.
        progress: as for ``quantize_static``.
        isolate: as for ``quantize``.

    Returns:
        The measured statistics.

    Raises:
        QuarkError: see ``quark_onnx.common.errors``; nothing is written.

    >>> from onnx import parser
    >>> dense = parser.parse_model('''<ir_version: 8, opset_import: ["" : 17]>
    ...     g (float[N, 2] x) => (float[N, 2] y) <float[2, 2] w = {1, 2, 3, 4}> { y = MatMul (x, w) }''')
    >>> ranges = calibrate(dense, [{"x": [[0.5, -1.0]]}, {"x": [[0.25, 2.0]]}])
    >>> [entry.name for _, entry in ranges.entries()]
    ['x', 'y']
    >>> quantized = quantize(dense, None, "A8W8", ranges=ranges).model
    """  # noqa: E501
    require_known(format, FORMATS, "unknown format of ranges")
    refuse_overwritten_arguments(
        {"model": model, "data": data, "config": config}, {"output": output}
    )
    # Neither optimizers nor the search of scales change what is measured.
    settings = QConfig.of(config).with_(optimizers=(), search=0)
    if settings.activation is None or not settings.activation.measured:
        raise ConfigError(
            "config measures no activation, so there are no ranges; name a preset that"
            " does, such as A8W8",
        )
    with crash_errors(model), isolated(isolate), showing(progress) as show:
        # An empty calibration receives the measurements.
        job = Job.open(model, settings, None, False, ranges=Calibration(""))
        try:
            calibration = measure_ranges(job, data, executor, show)
        finally:
            job.close()
        if output is not None:
            calibrator = settings.activation.calibrator
            save_ranges(calibration, output, format, calibrator)
    return calibration


def _is_path(value: object) -> bool:
    return isinstance(value, str | Path) and value != "" and "\0" not in str(value)


@_accepting_onnxruntime_calls(is_dynamic_call, translate_dynamic)
def quantize_dynamic(
    model: str | Path | ModelProto,
    config: Config = "DYNAMIC",
    output: str | Path | None = None,
    *,
    progress: Show = False,
    isolate: bool = False,
) -> ModelProto:
    """Quantize weights now, and activations at runtime; no data is needed.

    The arguments of ``onnxruntime.quantization.quantize_dynamic`` are accepted as well, and
    translated.

    Args:
        model: path of the float model, or a ModelProto, which is not changed.
        config: its weights and overrides are used. Activations become uint8 with a scale
            computed at runtime, and products become MatMulInteger and ConvInteger, unless the
            config has dynamic activations of another form.
        output: the file to write; None only returns the model.
        progress: as for ``quantize_static``.
        isolate: as for ``quantize``.

    Returns:
        The quantized model, with the inputs and outputs of the float model.

    Raises:
        QuarkError: the model or a setting is wrong.

    >>> from onnx import parser
    >>> dense = parser.parse_model('''<ir_version: 8, opset_import: ["" : 17]>
    ...     g (float[N, 2] x) => (float[N, 2] y) <float[2, 2] w = {1, 2, 3, 4}> { y = MatMul (x, w) }''')
    >>> [node.op_type for node in quantize_dynamic(dense).graph.node]
    ['DynamicQuantizeLinear', 'MatMulInteger', 'Cast', 'Mul', 'Mul']
    """  # noqa: E501
    config, dynamic = QConfig.of(config), QConfig.of("DYNAMIC")
    # A preset for measured activations contributes only its weights.
    if not is_dynamic(config.activation):
        config = config.with_(activation=dynamic.activation, form=dynamic.form)
    result = quantize(model, None, config, output, progress=progress, isolate=isolate)
    return result.model


def quantize_weights(
    model: str | Path | ModelProto,
    config: Config = "W8",
    output: str | Path | None = None,
    *,
    progress: Show = False,
    isolate: bool = False,
) -> ModelProto:
    """Quantize the weights only; activations stay float, and no data is needed.

    Args:
        model: path of the float model, or a ModelProto, which is not changed.
        config: its weights and overrides are used.
        output: the file to write; None only returns the model.
        progress: as for ``quantize_static``.
        isolate: as for ``quantize``.

    Returns:
        The quantized model, with the inputs and outputs of the float model.

    Raises:
        QuarkError: the model or a setting is wrong.

    >>> from onnx import parser
    >>> dense = parser.parse_model('''<ir_version: 8, opset_import: ["" : 17]>
    ...     g (float[N, 2] x) => (float[N, 2] y) <float[2, 2] w = {1, 2, 3, 4}> { y = MatMul (x, w) }''')
    >>> [node.op_type for node in quantize_weights(dense).graph.node]
    ['DequantizeLinear', 'MatMul']
    """  # noqa: E501
    config = QConfig.of(config).with_(activation=None)
    result = quantize(model, None, config, output, progress=progress, isolate=isolate)
    return result.model


@_accepting_onnxruntime_calls(is_static_call, translate_static)
def quantize_static(  # noqa: PLR0913
    model: str | Path | ModelProto,
    data: CalibrationData | None,
    config: Config = "A8W8",
    output: str | Path | None = None,
    *,
    executor: Executor | None = None,
    progress: Show = False,
    external: bool = False,
    resume: str | Path | None = None,
    ranges: Calibration | str | Path | None = None,
    task: str = "auto",
    labels: str | Path | None = None,
    verdict: bool = True,
    isolate: bool = False,
) -> ModelProto:
    """Quantize a float model to integers with scales measured on calibration data.

    The arguments of ``onnxruntime.quantization.quantize_static`` are accepted as well, and
    translated.

    Args:
        model: path of the float model, or a ModelProto, which is not changed.
        data: calibration samples: an iterable or generator of ``{input name: array}`` or of
            (input, label), a data set of torch or Hugging Face, a torch ``DataLoader``, an
            onnxruntime ``CalibrationDataReader``, a .npz, .npy, .parquet or .arrow file or a folder
            of such files, or, with the options of
            ``calibrators.readers.open.open_reader``, ``partial(open_reader, "images/",
            images=ImageSpec(...))``.
        config: a preset's name, a YAML file, a dictionary, or a QConfig.
        output: the file to write; None only returns the model.
        executor: a ``concurrent.futures.Executor``; calibration is sharded over it, with equal
            results.
        progress: show a progress bar on stderr, in a notebook by tqdm; None shows it on a terminal
            or in a notebook only. A function replaces the bar: its arguments are the name of the
            work, the number of finished steps, and the number of all steps, None if unknown.
        external, resume, ranges, task, labels, verdict, isolate: as for ``quantize``.

    Returns:
        The quantized model, with the inputs and outputs of the float model.

    Raises:
        QuarkError: the model, the data or a setting is wrong, or the result misses
            ``config.min_sqnr``.
    """
    return quantize(
        model,
        data,
        config,
        output,
        executor=executor,
        progress=progress,
        external=external,
        resume=resume,
        ranges=ranges,
        task=task,
        labels=labels,
        verdict=verdict,
        isolate=isolate,
    ).model


def _quantize_onnxruntime_call(call: TranslatedCall, *, isolate: bool) -> ModelProto:
    """Quantize as requested through onnxruntime's API.

    Operators that the call names are quantized even if safety rules would keep them float, with
    a warning.
    """
    # Overrides of single tensors may hold all ranges that are needed.
    if call.data is None and call.config.measures and not call.config.tensors:
        raise CallError(
            "calibration_data_reader is None; a static range is measured on data, or"
            " read from a cache",
        )
    if not call.config.safe:
        # The difference of two plans, with and without safety rules, is the nodes that these rules
        # keep float.
        kept_by_default = plan_for(call.model, call.config.with_(safe=True)).kept
        kept = plan_for(call.model, call.config).kept
        quantized = [name for name in kept_by_default if name not in kept]
        if quantized:
            logger.warning(
                "%s quantized as requested by name, though float by default because 8"
                " bits degrade such nodes: %s",
                counted(len(quantized), "node is", "nodes are"),
                short(quantized),
            )
    model, external = call.model, call.external
    if _replaces_model(call):
        # Read into memory: in onnxruntime's API the output may replace the file of the model.
        external = external or has_external_data(Path(model))
        model = loaded(load(model))
    result = quantize(
        model,
        call.data,
        call.config,
        call.output,
        external=external,
        isolate=isolate,
    )
    inputs = "random inputs" if call.data is None else "the calibration data"
    _warn_of_damage(result, inputs)
    # From the quantized model, which has the final scales.
    if call.cache is not None:
        write_cache(
            call.cache, result.model, call.method, smooth=bool(call.config.optimizers)
        )
    return result.model


def _warn_of_damage(result: Result, inputs: str) -> None:
    """Warn of outputs with more error than signal, and of a result that was never compared.

    Args:
        result: the result, with the errors of its outputs.
        inputs: the inputs of the comparison, in words.
    """
    if result.report.quantized and not result.report.outputs:
        logger.warning(
            "the quantized model was not compared with the float model, which does not run"
            " on %s: compare both on your data (quark-onnx compare)",
            inputs,
        )
    for error in result.report.outputs:
        sqnr = error.sqnr_of_changes
        if error.random or sqnr is None or (sqnr >= _DAMAGED and not error.broken):
            continue
        logger.warning(
            "output %r has %.1f dB SQNR on %s: the quantized model is most likely not"
            " usable. Keep nodes float (nodes_to_exclude), or measure it on your data:"
            " quark-onnx compare",
            error.name,
            sqnr,
            inputs,
        )


def _replaces_model(call: TranslatedCall) -> bool:
    """Return whether the output of a call of onnxruntime is the file of its model."""
    if not (_is_path(call.model) and _is_path(call.output)):
        return False
    return same_file(Path(call.model), Path(call.output))


@contextmanager
def custom_op_libraries(
    *files: str | Path, session_options: Callable[[Any], object] | None = None
) -> Iterator[None]:
    """Register libraries of custom operators for all models that run inside the context.

    Nested contexts add their libraries. A library is native code, which is loaded at once.

    Args:
        *files: shared libraries with onnxruntime's ``RegisterCustomOps``.
        session_options: a function that changes the ``onnxruntime.SessionOptions`` of each session,
            such as one that registers operators from memory. Threads and optimizations are set
            before. With ``isolate`` or an executor, it must be a function of an importable module.

    Raises:
        ConfigError: a file does not exist or cannot be registered, or ``session_options`` is no
            function, or fails.
    """
    require(
        session_options is None or callable(session_options),
        "session_options",
        session_options,
        "a function of the onnxruntime.SessionOptions of a session, which it changes",
    )
    for file in files:
        if not Path(file).is_file():
            raise ConfigNotFoundError(
                f"there is no file {str(file)!r} with custom operators"
            )
    paths = dict.fromkeys(str(Path(file).absolute()) for file in files)
    entries: list[Library] = [*paths]
    if session_options is not None:
        entries.append(session_options)
    added = [entry for entry in entries if entry not in current_libraries()]
    with libraries([*current_libraries(), *added]):
        if added:
            try:
                open_session(parse_model(_IDENTITY), what="custom operators")
            except Exception as error:  # onnxruntime raises several unrelated types
                raise ConfigError(
                    f"the custom operators or session_options cannot be registered: {error}"
                ) from error
        yield


def plan_for(model: str | Path | ModelProto, config: Config = "A8W8") -> Plan:
    """Return the plan of a model, as far as known without data.

    Args:
        model: path of the float model, or a ModelProto.
        config: as for ``quantize_static``.
    """
    config = QConfig.of(config)
    # The steps of ``Job.open`` and ``prepare``, so that the plan equals that of a run.
    graph = Graph.of(upcast_to_float32(inlined(load(model)))[0])
    select(graph, config)  # check patterns against the user's graph
    gather_constants(graph, keep_inputs=config.keep_initializer_inputs)
    if config.prepare:
        graph, _ = clean(graph, CLEANING)
    return make_plan(graph, config, strict=False)
