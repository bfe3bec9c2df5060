"""Checks and measurements of the quantized model before writing."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from onnx import ModelProto

from calibrators.errors import RuntimeCrash
from calibrators.onnx_runtime.cpu_features import ADVICE, BETTER, SATURATION, saturates
from calibrators.onnx_runtime.freed_memory import return_freed_memory
from calibrators.onnx_runtime.isolation import release
from calibrators.onnx_runtime.session import PROTOBUF_LIMIT, is_defined, open_session
from calibrators.onnx_runtime.tensors import estimate_bytes, loaded, tensor_bytes
from calibrators.onnx_runtime.worker import Session
from quark_onnx.check.declared_shapes import open_contradicted
from quark_onnx.common.errors import AccuracyError, ModelError
from quark_onnx.common.progress import Progress
from quark_onnx.common.registry import TARGETS
from quark_onnx.common.wording import counted
from quark_onnx.engines import EngineRun, Selected, selected
from quark_onnx.files.half_precision import OriginalDtypes
from quark_onnx.files.io import EXTERNAL_DATA_LIMIT, external_files, read_stored, staged
from quark_onnx.files.unchanged import NO_FILES, ModelFiles
from quark_onnx.functions.float4 import as_standard
from quark_onnx.graph import Graph
from quark_onnx.graph.native import run_onnx_check
from quark_onnx.graph.node import QUANTIZE
from quark_onnx.graph.shapes import open_invented_sizes
from quark_onnx.graph.states import State, states
from quark_onnx.graph.traces import drop_traces
from quark_onnx.measuring.run_data import LabelledSample
from quark_onnx.preprocessing import Finding, PreprocessingCheck
from quark_onnx.report.figures import decibels, percent
from quark_onnx.report.loop import measure_with_states
from quark_onnx.report.measure import Observe, OutputError, measure
from quark_onnx.report.shapes import require_same_shapes, sized_by_data
from quark_onnx.report.verdict import (
    DESCRIPTIONS,
    AdvisedSettings,
    NextStep,
    Scorer,
    Verdict,
    VerdictCollector,
    next_steps,
)
from quark_onnx.running.run import Reference, Sample
from quark_onnx.targets import check_loaded, require_rules
from quark_onnx.writing.fusion_barriers import drop_barriers
from quark_onnx.writing.unsigned_codes import in_unsigned_codes

logger = logging.getLogger(__name__)

#: Reported losses on this processor: dB of a float output, share of different values otherwise.
_WORSE, _OTHER = 1.0, 0.01
#: Differences between two models with so many dB more than their error do not show in the error:
#: they change it by 0.04 dB.
_FAR_LESS = 20.0


#: The error of every output, and notes on this processor's arithmetic.
Measured = tuple[list[OutputError], list[str]]


class Finished(NamedTuple):
    """The result of `finish`.

    Attributes:
        model: the model, checked, loaded by onnxruntime and run. Tensors may be stored.
        errors: the error of every output on the samples.
        notes: remarks on this processor's arithmetic.
    """

    model: ModelProto
    errors: list[OutputError]
    notes: list[str]


def finish(  # noqa: PLR0913
    graph: Graph,
    reference: Reference,
    samples: Sequence[Sample],
    output: Path | None,
    *,
    min_sqnr: float | None = None,
    external: bool = False,
    files: ModelFiles = NO_FILES,
    narrowing: OriginalDtypes | None = None,
    functions: bool = True,
    judging: Judging | None = None,
    target: str = "",
    frugal: bool = False,
    progress: bool | None = False,
) -> Finished:
    """Return the final model with output errors, after a check and a run.

    A model with recurrent states is also run over all samples with its own states. With an
    ``output``, the temporary file is checked and run before it is renamed.

    Args:
        graph: the quantized graph.
        reference: the float model.
        samples: samples for the measurement.
        output: the file to write; None for none.
        min_sqnr: minimum SQNR of every output, in dB; None for no minimum.
        external: store large tensors as external data even below protobuf's limit.
        files: the files of the float model, which must not have changed.
        narrowing: original types of inputs and outputs, restored after the measurement.
        functions: keep function bodies of operators that onnxruntime does not know; without
            them, the model is measured before the bodies are removed, and runs only where the
            operators are known.
        judging: receives the outputs of both models.
        target: name of the target whose rules the model must keep; empty for none.
        frugal: run the model in little memory: weights are neither packed nor dequantized before
            they are needed.
        progress: as for ``quantize_static``.

    Raises:
        AccuracyError: an output is below ``min_sqnr``; nothing is written.
        ConstraintError: the model breaks rules of the target; nothing is written.
        ModelError: the file cannot be written; or the model fails the check or does not run,
            which is a defect of this package. No file is left over.
    """
    opened = list[str]()
    if samples:
        opened = open_contradicted(graph.outputs, reference.outputs(samples[0]))
    # The peak comes while the result is written and read again, with two copies of it.
    return_freed_memory(sum(map(tensor_bytes, graph.initializers.values())))
    graph.infer()
    model = graph.to_model()
    # The constants of the graph are those of the model from here on, without a copy of them.
    graph.initializers = {tensor.name: tensor for tensor in model.graph.initializer}
    traced = drop_traces(model)
    open_invented_sizes(model.graph)
    lean = graph.store is not None
    codes = any(
        node.op_type in QUANTIZE | {"DynamicQuantizeLinear"} for node in graph.nodes
    )
    gate = Gate(
        reference,
        samples,
        min_sqnr,
        lean,
        codes,
        states(graph),
        judging,
        faster=None if lean else _faster(graph),
        frugal=frugal,
        progress=progress,
    )
    measured, model = _for_target(graph, model, gate, target)
    bare = bool(model.functions) and not functions
    runs = not bare and not reference.unknown_operator
    # The model under test has float32 inputs and all functions; the written one has not, or is no
    # file.
    if measured is None and (narrowing or bare or output is None):
        measured = gate.passed(model)
    if narrowing:
        model = narrowing.restore_interface(model)
    if bare:
        del model.functions[:]
        as_standard(model)
        check(model, reference.model)
    if target:
        require_rules(check_loaded(model, target), "nothing was written")
    if output is None:
        files.require_unchanged()
        # The restored interface has not been loaded yet. Without its functions, the model may not
        # run here.
        if narrowing and runs:
            _load(model, lean=lean)
        return _finished(model, measured, traced, opened)
    with staged(model, output, external=external, lean=lean) as path:
        if measured is None:
            measured = gate.passed(path)
        elif runs:
            _load(path, lean=lean)
        files.require_unchanged()
        release()  # Windows cannot rename a memory-mapped file
    return _finished(model, measured, traced, opened)


def _for_target(
    graph: Graph, model: ModelProto, gate: Gate, target: str
) -> tuple[Measured | None, ModelProto]:
    """Return the model without the barriers that its target does not need.

    onnxruntime needs them, and measures the model before they are removed from ``graph``. The
    measurements are None if the model keeps its barriers.
    """
    if not target or TARGETS[target].keeps_barriers:
        return None, model
    measured = gate.passed(model)
    if drop_barriers(graph):
        model = graph.to_model()
        drop_traces(model)
        open_invented_sizes(model.graph)
    return measured, model


def _faster(graph: Graph) -> ModelProto | None:
    """Return an equivalent model that onnxruntime computes faster; None if there is none."""
    unsigned = in_unsigned_codes(graph)
    if unsigned is None:
        return None
    model = unsigned.to_model()
    open_invented_sizes(model.graph)
    return model


def _finished(
    model: ModelProto,
    measured: Measured | None,
    traced: int,
    opened: Sequence[str],
) -> Finished:
    """Return the final model with the measurements.

    Args:
        measured: output errors and notes of the gate; None if nothing was measured.
        traced: bytes of dropped exporter metadata; 0 for no note.
        opened: notes on outputs that were declared with other shapes.
    """
    return_freed_memory(estimate_bytes(model))
    errors, notes = measured or ([], [])
    notes = [*notes]
    if traced:
        notes.append(
            f"{traced:,} bytes of stack traces and names of torch's exporter were"
            " dropped (pkg.torch.*)"
        )
    return Finished(model, errors, [*notes, *opened])


def hand_back(  # noqa: PLR0913
    model: ModelProto,
    reference: Reference | None,
    source: Path | None,
    output: Path | None,
    *,
    files: ModelFiles = NO_FILES,
    external: bool = False,
) -> Finished:
    """Return and write a copy of the float model, because no tensor was quantized.

    Args:
        model: the float model.
        reference: the float model as a session; None if the model need not be loaded, as its
            graph has nothing to quantize.
        source: the source file, copied byte by byte unless ``external``.
        output: the file to write; None for none.
        files: the files of the model, which must not have changed.
        external: store large tensors as external data.

    Raises:
        ModelError: the file cannot be written, or onnxruntime cannot load the model for another
            reason than an unknown custom operator.
    """
    note = "nothing was quantized: the result is the float model"
    # What is written has been loaded, also where nothing was measured.
    if reference is not None and (unknown := reference.unknown_operator):
        note += f", which was not loaded: {unknown}"
    if output is not None:
        with staged(model, output, external=external, source=source):
            files.require_unchanged()
        separate = external or estimate_bytes(model) > EXTERNAL_DATA_LIMIT
        # Only then the file is read once more, which takes memory.
        if separate and (beside := external_files(read_stored(output))):
            note += f"; its weights are in {sorted(beside)[0]!r}"
        elif external:
            note += "; its weights are in the file itself"
    if source is not None:  # the model was read for this run
        return Finished(loaded(model), [], [note])
    result = ModelProto()
    result.CopyFrom(loaded(model))
    return Finished(result, [], [note])


@dataclass(frozen=True)
class Judging:
    """Receivers of the outputs of both models, in addition to the accuracy gate.

    Attributes:
        collector: collects the verdict.
        check: detects wrong preprocessing; None for random data, and if ``findings`` are known.
        advice: settings of the run, from which an error message proposes the next step.
        samples: further samples for the check.
        findings: signs of wrong preprocessing that are known before the run.
    """

    collector: VerdictCollector
    check: PreprocessingCheck | None
    advice: AdvisedSettings
    samples: Sequence[LabelledSample] = ()
    findings: Sequence[Finding] = ()
    scorer: Scorer | None = None

    def add(
        self,
        feeds: Mapping[str, Any],
        expected: Mapping[str, Any],
        found: Mapping[str, Any],
    ) -> None:
        """Add a sample with the outputs of the float and the quantized model.

        Args:
            feeds: the sample.
            expected: outputs of the float model by name.
            found: outputs of the quantized model by name.
        """
        self.collector.add(feeds, expected, found)
        classes: list[int | None] = []
        if self.scorer is not None and self.collector.task is not None:
            classes = self.scorer.add(self.collector.task, expected, found, feeds)
        if self.check is not None:
            self.check.add(feeds, expected, classes)

    def findings_after_failure(self, session: Session) -> list[Finding]:
        """Return signs of wrong preprocessing, of samples that were not run, too.

        Args:
            session: session on the float model.
        """
        if self.check is None:
            return [*self.findings]
        for sample in self.samples:
            self.check.remember(*sample)
        return self.check.findings(session)


@dataclass(frozen=True)
class Gate:
    """The accuracy gate, with the arguments of `finish`.

    Attributes:
        faster: an equivalent of the quantized model that is computed faster; it is measured in
            place of the model if the results are equal.
        frugal: as for `finish`.
        progress: as for `finish`.
    """

    reference: Reference
    samples: Sequence[Sample]
    min_sqnr: float | None
    lean: bool
    codes: bool  # activations are quantized, so sums of 8-bit products may occur
    states: Sequence[State] = ()
    judging: Judging | None = None
    faster: ModelProto | None = None
    frugal: bool = False
    progress: bool | None = False

    def passed(self, model: ModelProto | Path) -> tuple[list[OutputError], list[str]]:
        """Return output errors without saturating sums, and notes on the processor.

        Args:
            model: the quantized model, or its file.

        Raises:
            AccuracyError: an output is below the minimum SQNR.
            ModelError: the model fails the check, does not run, or has outputs of other shapes.
        """
        check(model, self.reference.model)
        if unknown := self.reference.unknown_operator:
            self._require([])
            unverified = f"the result was neither loaded nor run: {unknown}"
            logger.warning("%s", unverified)
            return [], [unverified]
        session = _load(model, lean=self.lean, frugal=self.frugal)
        engine, run = selected(), None
        if engine is None:
            session = self._fastest(session)
        else:
            session = _load_in_engine(model, engine)
            run = EngineRun.of(session, model)
        judging = self.judging
        errors = self._measured(session, judging.add if judging is not None else None)
        self._require(errors)
        if judging is not None and judging.check is not None:
            for sample in judging.samples:
                judging.check.remember(*sample)
        if run is not None:
            measured = f"measured in {run.engine}; layers on integers: {run.counts}"
            return errors, [measured, *run.remarks]
        if not self.codes or not saturates():
            return errors, []
        notes = _unmeasured() if self.lean else self._saturated(model, session, errors)
        for note in notes:
            logger.warning(note)
        return errors, notes

    def _fastest(self, session: Any) -> Any:
        """Return a session on the faster model if it has the results of the given session.

        Both are run on the first sample.

        Args:
            session: a session on the quantized model.

        Returns:
            The session on ``faster``; the given one without it, without samples, or if it does not
            run or its results differ.
        """
        if self.faster is None or not self.samples:
            return session
        sample = self.samples[:1]
        with self._measuring():
            errors = measure(self.reference.remembering, session, sample)
            try:
                faster = open_session(self.faster, what="the model in unsigned codes")
                differences = measure(session, faster, sample)
            except RuntimeCrash:
                raise
            except Exception as error:  # onnxruntime raises several unrelated types
                logger.debug("the model in unsigned codes does not run: %s", error)
                return session
        equal = all(
            _is_negligible(difference, error)
            for difference, error in zip(differences, errors, strict=True)
        )
        return faster if equal else session

    def _saturated(
        self, model: ModelProto | Path, session: Any, errors: list[OutputError]
    ) -> list[str]:
        """Return notes on a processor whose integer sums saturate.

        Args:
            model: the quantized model, or its file.
            session: the session that was measured, without saturating sums.
            errors: the output errors measured with it.

        Returns:
            A note with the greatest loss; empty if no output loses noticeably.
        """
        # With the saturating kernels that an application on this processor would use.
        saturated = self._measured(_load(model, integers=True))
        losses = sorted(
            loss
            for pair in zip(errors, saturated, strict=True)
            if (loss := _Loss.of(*pair)) is not None
        )
        if not losses:
            return []
        worst = losses[-1].text
        # Other effects of unfused operators are unknown.
        if is_defined(session):
            return [
                f"{SATURATION}, and others may differ, too: {worst} without fused"
                f" kernels; {ADVICE}"
            ]
        return [f"{SATURATION}: {worst}; {BETTER}"]

    def _measured(
        self, session: Any, observe: Observe | None = None
    ) -> list[OutputError]:
        """Return the output errors of a session, with those of a run with its own states.

        Args:
            session: a session on the quantized model.
            observe: called with the outputs of both models on each sample; None for none.

        Raises:
            ModelError: a model does not run, or an output has another shape than the float one.
        """
        done = 0
        total = len(self.samples)
        with Progress(self.progress, total, "measuring", "sample") as bar:

            def show(*run: Any) -> None:
                nonlocal done
                if observe is not None:
                    observe(*run)
                done += 1
                bar.update(done)

            with self._measuring():
                errors = measure_with_states(
                    self.reference.remembering, session, self.samples, self.states, show
                )
        require_same_shapes(errors, partial(sized_by_data, self.reference.model))
        return errors

    @staticmethod
    @contextmanager
    def _measuring() -> Iterator[None]:
        """Turn any error of a measurement into a ModelError."""
        try:
            yield
        except Exception as error:  # onnxruntime raises several unrelated types
            raise ModelError(
                f"the quantized model cannot be measured against the float one: {error}"
            ) from error

    def _require(self, errors: list[OutputError]) -> None:
        """Raise an error if an output is below the minimum SQNR.

        Args:
            errors: the output errors; those without float values are ignored.

        Raises:
            AccuracyError: an output is below the minimum, or no output has float values.
        """
        if self.min_sqnr is None:
            return
        # The least tuple: among equal SQNRs, the first name, so that the message is deterministic.
        measured = [(e.sqnr, e.name, e.steps) for e in errors if e.sqnr is not None]
        if not measured:
            raise AccuracyError(
                f"no output has float values to measure the {self.min_sqnr:g} dB asked"
                " for on; nothing was written",
            )
        worst, name, runs = min(measured)
        if worst < self.min_sqnr:
            reached = decibels(worst, below=self.min_sqnr)
            causes, steps, verdict = self._explained(errors)
            raise AccuracyError(
                f"accuracy gate: output {name!r} reaches {reached} dB"
                f" SQNR{_in_loop(runs)}, the minimum is {self.min_sqnr:g} dB (change"
                f" with --min-sqnr). Nothing was written.{causes}",
                steps,
                errors,
                verdict,
            )

    def _explained(
        self, errors: list[OutputError]
    ) -> tuple[str, list[NextStep], Verdict | None]:
        """Return likely causes of a missed gate as sentences, changes to try, and the verdict.

        There is no verdict where the preprocessing looks wrong: changes are not tried on such data.
        """
        judging = self.judging
        if judging is None or judging.collector.task is None:
            return "", [], None
        task = judging.collector.task.name
        sentences = list[str]()
        if task in DESCRIPTIONS:
            sentences.append(f"This looks like {DESCRIPTIONS[task]}.")
        steps = list(next_steps(self.reference.model, judging.advice, task))
        findings = judging.findings_after_failure(self.reference.session)
        for finding in findings[:1]:
            sentences.append(f"Likely cause: {finding.cause_and_evidence}.")
            # Wrong inputs come first, because no setting makes up for them.
            steps.insert(0, finding.next_step)
        sentences.append(
            "To see where accuracy is lost, write the model with a lower --min-sqnr and"
            " run quark-onnx analyze.",
        )
        verdict = None
        if not findings:
            verdict = judging.collector.verdict(errors, held_out=0, calibrated=False)
        return " " + " ".join(sentences), steps, verdict


def _in_loop(steps: int) -> str:
    if not steps:
        return ""
    return f" after {counted(steps, 'sample')} with its own state"


def _is_negligible(difference: OutputError, error: OutputError) -> bool:
    """Return whether two models differ far less than one of them from the float model."""
    if difference.sqnr is None or error.sqnr is None:
        return difference.agreement == 1.0
    return difference.sqnr >= error.sqnr + _FAR_LESS


class _Loss(NamedTuple):
    """The loss of an output on the local processor, in words; greater is worse."""

    share: float
    text: str

    @classmethod
    def of(cls, exact: OutputError, here: OutputError) -> _Loss | None:
        """Return the loss of an output; None if negligible, or if it has no common measure.

        Args:
            exact: the error without saturating sums.
            here: the error with the kernels of this processor.
        """
        if exact.sqnr is not None and here.sqnr is not None:
            # Two infinite SQNRs would differ by NaN.
            lost = exact.sqnr - here.sqnr if exact.sqnr != here.sqnr else 0.0
            text = (
                f"output {exact.name!r} has {here.sqnr:.1f} dB there, {exact.sqnr:.1f}"
                " dB elsewhere"
            )
            if lost >= _WORSE:
                return cls(lost / _WORSE, text)
            return None
        if exact.agreement is not None and here.agreement is not None:
            lost = exact.agreement - here.agreement
            shares = percent(here.agreement, 1), percent(exact.agreement, 1)
            text = (
                f"output {exact.name!r} agrees in {shares[0]}% there, in {shares[1]}%"
                " elsewhere"
            )
            if lost >= _OTHER:
                return cls(lost / _OTHER, text)
            return None
        return None


def _unmeasured() -> list[str]:
    return [
        f"{SATURATION}; what that makes of a model of this size was not measured;"
        f" {ADVICE}"
    ]


def _load(
    model: ModelProto | Path,
    *,
    lean: bool = False,
    frugal: bool = False,
    integers: bool | None = None,
) -> Any:
    """Open a session on the model.

    Args:
        model: the quantized model, or its file.
        lean: leave weights in files, without the optimizations that would copy them.
        frugal: as for `finish`, with the optimizations.
        integers: as in ``open_session``; None for its default.

    Raises:
        ModelError: onnxruntime cannot load the model.
    """
    try:  # the optimizer would copy the weights of a large model
        return open_session(
            model,
            lean=lean or frugal,
            optimize=not lean,
            integers=integers,
            what="the quantized model",
        )
    except Exception as error:  # onnxruntime raises several unrelated types
        hint = ""
        if _loads_plainly(model):
            hint = (
                "; it loads without onnxruntime's graph optimizations, so that one of them"
                " is at fault: leave out the node that the message names with exclude, or"
                " choose a preset with uint8 activations"
            )
        raise ModelError(
            f"onnxruntime cannot load the quantized model: {error}{hint}",
        ) from error


def _load_in_engine(model: ModelProto | Path, engine: Selected) -> Any:
    """Open the model in an engine.

    Raises:
        ModelError: the engine cannot load the model.
    """
    try:
        return engine.open(model, what="the quantized model")
    except Exception as error:  # engines raise several unrelated types
        raise ModelError(
            f"{engine.title} cannot load the quantized model: {error}"
        ) from error


def _loads_plainly(model: ModelProto | Path) -> bool:
    try:
        open_session(model, optimize=False, what="the quantized model")
    except Exception:  # onnxruntime raises several unrelated types
        return False
    return True


def check(
    model: ModelProto | Path, original: ModelProto, name: str = "quantized"
) -> None:
    """Run the strictest onnx check passed by the original model.

    The full check comes first. If the original fails it, possibly only with the shapes that
    runtimes compute, the check without shape inference is used, or none.

    Args:
        model: the model to check, or its file.
        original: the model before the rewrite.
        name: word for ``model`` in the message.

    Raises:
        ModelError: the model fails the check; the message calls it ``name``.
    """
    for full in (True, False):
        error = _objection(model, full=full)
        if error is None:
            return
        # A model that fails already, as it was or as this package reads it, is no defect of a
        # rewrite.
        if any(
            _objection(unchanged, full=full) is not None
            for unchanged in (original, Graph.of(original).to_model())
        ):
            continue
        raise ModelError(
            f"the {name} model does not pass onnx's check: {error}",
        ) from error


def _objection(model: ModelProto | Path, *, full: bool) -> Exception | None:
    """Return the error of onnx's check; None if a model passes, or is too large for it."""
    if isinstance(model, ModelProto) and estimate_bytes(model) > PROTOBUF_LIMIT:
        return None  # the checker needs a file
    try:
        run_onnx_check(model, full=full)
    except RuntimeCrash:
        raise
    except Exception as error:  # checker and shape inference raise unrelated types
        return error
    return None
