"""The straight line from a float model to a quantized one, for each strategy."""

from __future__ import annotations

import inspect
import logging
from concurrent.futures import Executor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, overload

from onnx import ModelProto

from calibrators.session import model_bytes
from calibrators.spool import Spool
from quark_onnx.config import QConfig
from quark_onnx.errors import ConfigError, ModelError, nearest
from quark_onnx.graph import Graph, Narrowing, inlined, store_for, widened
from quark_onnx.graph.io import check_text, external_files, read
from quark_onnx.onnxruntime_spelling import is_onnxruntime_call, translate
from quark_onnx.optimizers import Samples
from quark_onnx.passes import CLEANING
from quark_onnx.plan import Plan, Quantize, select
from quark_onnx.progress import Progress
from quark_onnx.report import OutputError, Report, summarize
from quark_onnx.steps import (
    HoldOut,
    Inside,
    Ranges,
    Reference,
    Sample,
    all_plans,
    calibrate,
    clean,
    define_functions,
    destination,
    finish,
    first_sample,
    fuse,
    give_up_late,
    guard,
    insert,
    keeps_weights_beside,
    make_plan,
    optimize_float,
    plan_insides,
    prepare,
    probe,
    quantize_insides,
    raise_opset_for,
    reader_for,
    refine,
    search,
    share_transposed,
    solve,
    solve_biases,
    wanted,
)

logger = logging.getLogger(__name__)

#: What a user may write for a configuration.
Config = QConfig | str | Path | dict[str, Any]


@dataclass(frozen=True)
class Result:
    """A quantized model, how it came about, and how good it is."""

    model: ModelProto
    plan: Plan
    report: Report


def quantize(
    model: str | Path | ModelProto,
    data: Any,
    config: Config = "A8W8",
    output: str | Path | None = None,
    *,
    executor: Executor | None = None,
    progress: bool | None = False,
    external: bool = False,
) -> Result:
    """Quantize a model and say what was done; ``quantize_static`` and its neighbours return the model alone.

    Args:
        data: as for ``quantize_static``; None where the config leaves nothing to be measured: activations that stay
            float, have a dynamic scale, or need none.
        external: keep large tensors in a file beside the output, also where one file would hold them.

    Raises:
        QuarkError: see ``quark_onnx.errors``; nothing is written.
    """
    if executor is not None and not callable(getattr(executor, "submit", None)):
        raise ConfigError(f"executor is {executor!r}; it must be a concurrent.futures.Executor")
    if progress not in (True, False, None):
        raise ConfigError(f"progress is {progress!r}; it must be True, False, or None for a terminal only")
    job = _Job.open(model, QConfig.of(config), output, external)
    try:
        return _quantize(job, data, executor, progress)
    finally:
        job.close()


def _quantize(job: _Job, data: Any, executor: Executor | None, progress: bool | None) -> Result:
    if data is None and not job.config.measures:
        sample = probe(job.graph, job.reference)
        graph, plan, insides, notes = job.plan(sample)
        return job.finish(graph, plan, {}, notes, insides, [sample] if sample else [], progress)
    reader = reader_for(job.graph, data, job.config)
    first = first_sample(reader)
    held = HoldOut(reader, remember=job.config.search)
    with Spool() as spool:
        if job.config.rereads:
            with Progress(progress, reader.length, "reading", "sample") as bar:
                for count, sample in enumerate(held, 1):
                    spool.append(sample)
                    bar.update(count)
        graph, plan, insides, notes = job.plan(first, spool)
        with Progress(progress, reader.length, "calibrating", "sample") as bar:
            samples = spool if job.config.rereads else held
            ranges = calibrate(graph, plan, samples, insides, executor=executor, progress=bar.update)
        return job.finish(graph, plan, ranges, notes, insides, [first], progress, held, spool)


@dataclass(frozen=True)
class _Job:
    """What a run starts from: the settings, where the result goes, and the float model."""

    config: QConfig
    target: Path | None
    external: bool
    original: ModelProto
    graph: Graph
    reference: Reference
    narrowing: Narrowing

    @classmethod
    def open(cls, model: str | Path | ModelProto, config: QConfig, output: str | Path | None, external: bool) -> _Job:
        target = destination(model, output)
        original = load(model)
        external |= keeps_weights_beside(model, target)
        narrow = inlined(original)
        graph = Graph.of(narrow)
        select(graph, config)  # patterns are held against the graph that the user knows
        store = store_for(original, target)
        plain, narrowing = widened(narrow, store)
        graph = graph if plain is narrow else Graph.of(plain)
        graph.store = store
        reference = Reference(plain, Path(model) if plain is original and isinstance(model, str | Path) else None)
        return cls(config, target, external, original, graph, reference, narrowing)

    def close(self) -> None:
        """Remove what was taken out of memory."""
        if self.graph.store is not None:
            self.graph.store.close()

    def plan(self, sample: Sample | None, samples: Samples = ()) -> tuple[Graph, Plan, list[Inside], list[str]]:
        """The prepared graph, what becomes of its tensors and of those in bodies, and notes for the report."""
        graph, notes = prepare(self.graph, self.config, self.reference, sample)
        graph, improved = optimize_float(graph, self.config, self.reference, sample, samples)
        notes += improved
        plan = make_plan(graph, self.config, strict=False)
        insides = plan_insides(graph, self.config)
        graph, raised = raise_opset_for(graph, plan, self.config, self.reference, sample, wanted(insides))
        if raised:
            plan, insides = make_plan(graph, self.config, strict=False), plan_insides(graph, self.config)
        give_up_late(insides, vendor=self.config.form == "vendor")
        if graph.store is not None:
            notes.append("a large model: it is verified without onnxruntime's graph optimizations, to save memory")
        return graph, plan, insides, [*notes, *raised]

    def finish(
        self,
        graph: Graph,
        plan: Plan,
        ranges: Ranges,
        notes: list[str],
        insides: list[Inside],
        samples: list[Sample],
        progress: bool | None,
        held: HoldOut | None = None,
        samples_again: Samples = (),
    ) -> Result:
        """Scales, nodes, file and report; measured on what was held out, or on ``samples``."""
        config = self.config
        found = guard(graph, plan, ranges) if config.safe else []
        params = solve(graph, plan, ranges)
        count = search(graph, plan, params, held.first if held else [], progress)
        moved = [f"{count} power-of-two scales moved by the error at the outputs"] if count else []
        layerwise = [optimizer for optimizer in config.optimizers if optimizer.stage == "layer"]
        if layerwise and len(samples_again):
            refined = refine(graph, plan, params, layerwise, samples_again, show=progress)
            moved += refined.notes
        solve_biases(graph, plan, params)
        result, fused = insert(graph, plan, params, vendor=config.form == "vendor"), list[str]()
        raised = params.notes
        del params  # of a large model they are large
        inside = quantize_insides(result, insides, config)
        define_functions(result)
        if config.form == "operators":
            result, fused = fuse(result, samples)
        fused += share_transposed(result)
        narrowing = self.narrowing
        narrowing.store_constants(result)
        held_out = held.samples if held else []
        if not inside and not any(isinstance(entry, Quantize) for entry in plan.entries.values()):
            result, narrowing, samples, held_out = Graph.of(self.original), Narrowing(), [], []
            fused = ["nothing was quantized: the result is the float model"]
            config = config.with_(min_sqnr=None)  # which it meets
        quantized, errors = finish(
            result,
            self.reference,
            held_out or samples,
            self.target,
            min_sqnr=config.min_sqnr,
            external=self.external,
            narrowing=narrowing,
            functions=config.functions,
        )
        notes = [*notes, *found, *moved, *raised, *inside, *fused]
        plans, count = [plan, *all_plans(insides)], held.count if held else 0
        return Result(quantized, plan, self._report(plans, quantized, errors, notes, count, held_out))

    def _report(
        self,
        plans: list[Plan],
        quantized: ModelProto,
        errors: list[OutputError],
        notes: list[str],
        count: int,
        held_out: list[Sample],
    ) -> Report:
        operators, kept_nodes, kept_tensors = summarize(*plans)
        before, after = model_bytes(self.original), model_bytes(quantized)
        if after > before:
            notes.append(
                "the result is larger than the float model: weights stay float, or are small, or are stored more than "
                "once"
            )
        report = Report(
            config=str(self.config),
            samples=count,
            held_out=len(held_out),
            bytes_before=before,
            bytes_after=after,
            operators=operators,
            kept_nodes=kept_nodes,
            kept_tensors=kept_tensors,
            notes=notes,
            outputs=errors,
        )
        logger.debug("%s", report)
        return report


def quantize_dynamic(
    model: str | Path | ModelProto,
    config: Config = "DYNAMIC",
    output: str | Path | None = None,
    *,
    progress: bool | None = False,
) -> ModelProto:
    """Quantize weights now, and what they are multiplied by as the model runs. No data is needed.

    Args:
        config: its weights and overrides count; activations become uint8 with a scale that each run computes, and
            products are written as MatMulInteger and ConvInteger, unless the config has dynamic activations and says
            otherwise.

    Returns:
        The quantized model. Its inputs and outputs are those of the float model.

    Raises:
        QuarkError: the model or a setting is wrong.

    >>> from onnx import parser
    >>> dense = parser.parse_model('''<ir_version: 8, opset_import: ["" : 17]>
    ...     g (float[N, 2] x) => (float[N, 2] y) <float[2, 2] w = {1, 2, 3, 4}> { y = MatMul (x, w) }''')
    >>> [node.op_type for node in quantize_dynamic(dense).graph.node]
    ['DynamicQuantizeLinear', 'MatMulInteger', 'Cast', 'Mul', 'Mul']
    """
    config, dynamic = QConfig.of(config), QConfig.of("DYNAMIC")
    if config.activation is None or not config.activation.dynamic:
        config = config.with_(activation=dynamic.activation, form=dynamic.form)
    return quantize(model, None, config, output, progress=progress).model


def quantize_weights(
    model: str | Path | ModelProto,
    config: Config = "W8",
    output: str | Path | None = None,
    *,
    progress: bool | None = False,
) -> ModelProto:
    """Quantize the weights alone; activations stay float. No data is needed.

    Args:
        config: its weights and overrides count.

    Returns:
        The quantized model. Its inputs and outputs are those of the float model.

    Raises:
        QuarkError: the model or a setting is wrong.

    >>> from onnx import parser
    >>> dense = parser.parse_model('''<ir_version: 8, opset_import: ["" : 17]>
    ...     g (float[N, 2] x) => (float[N, 2] y) <float[2, 2] w = {1, 2, 3, 4}> { y = MatMul (x, w) }''')
    >>> [node.op_type for node in quantize_weights(dense).graph.node]
    ['DequantizeLinear', 'MatMul']
    """
    return quantize(model, None, QConfig.of(config).with_(activation=None), output, progress=progress).model


@overload
def quantize_static(
    model: str | Path | ModelProto,
    data: Any,
    config: Config = "A8W8",
    output: str | Path | None = None,
    *,
    executor: Executor | None = None,
    progress: bool | None = False,
    external: bool = False,
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
        theirs = translate(arguments, keywords)
        return quantize(theirs.model, theirs.data, theirs.config, theirs.output, external=theirs.external).model
    try:
        call = inspect.signature(quantize).bind(*arguments, **keywords)
    except TypeError as error:
        odd = next((name for name in keywords if name not in inspect.signature(quantize).parameters), "")
        hint = nearest(odd, inspect.signature(quantize).parameters) if odd else ""
        raise ConfigError(f"quantize_static(model, data, config, output): {error}{hint}") from error
    return quantize(*call.args, **call.kwargs).model


def plan_for(model: str | Path | ModelProto, config: Config = "A8W8") -> Plan:
    """What would become of each tensor, as far as that is known without data."""
    config = QConfig.of(config)
    graph = Graph.of(widened(inlined(load(model)))[0])
    select(graph, config)  # patterns are held against the graph that the user knows
    return make_plan(clean(graph, CLEANING)[0] if config.prepare else graph, config, strict=False)


def load(model: str | Path | ModelProto) -> ModelProto:
    """A model from a path, or the model itself, which is never changed."""
    if isinstance(model, ModelProto):
        if files := external_files(model):
            raise ModelError(f"the weights of the model are not loaded, they lie in {sorted(files)}; pass its path")
        check_text(model)
        return model
    if isinstance(model, str | Path):
        return read(Path(model))
    raise ModelError(f"model is a {type(model).__name__}; it must be a path or a ModelProto")
