"""The judge: errors and verdict of a quantized model compared with its float model, on samples.

Every command that has both models as files judges here. ``quantize`` has them open, and passes the
outputs to the same ``VerdictCollector``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from numpy.typing import NDArray
from onnx import ModelProto

import calibrators
from calibrators.onnx_runtime.remembering import RememberingSession
from calibrators.onnx_runtime.session import open_session
from calibrators.onnx_runtime.worker import Session
from quark_onnx.common.errors import DataError, ModelError, QuarkError
from quark_onnx.engines import EngineRun, engine_title, open_quantized
from quark_onnx.graph.random_operators import may_be_random
from quark_onnx.preprocessing import Finding, PreprocessingCheck
from quark_onnx.report.measure import OutputError
from quark_onnx.report.shapes import require_same_shapes, sized_by_data
from quark_onnx.report.verdict import Exhibits, Scorer, Verdict, VerdictCollector
from quark_onnx.running.function_bodies import with_bodies
from quark_onnx.writing.run_settings import settings_of_model


@dataclass(frozen=True)
class Judged:
    """The judgement of a quantized model.

    Attributes:
        outputs: error of each output.
        verdict: the quality in the terms of the task; None if no sample was run.
        findings: signs of wrong preprocessing of the samples.
        exhibits: the samples that differ most.
        run: how the selected engine runs the quantized model; None without an engine.
    """

    outputs: list[OutputError]
    verdict: Verdict | None
    findings: tuple[Finding, ...] = ()
    exhibits: Exhibits | None = None
    run: EngineRun | None = None


def judge_models(  # noqa: PLR0913
    before: ModelProto,
    after: ModelProto,
    samples: Iterable[Mapping[str, NDArray[Any]]],
    *,
    task: str = "auto",
    random: bool = False,
    scorer: Scorer | None = None,
    preprocessing: bool = True,
) -> Judged:
    """Run a float and a quantized model on samples, and judge the outputs.

    The quantized model runs in the engine that ``on_engine`` selects.

    Args:
        before: the float model.
        after: the quantized model, with the outputs of the float model.
        samples: inputs by name, on which the quantized model was not calibrated.
        task: name of a task in ``report.verdict.TASKS``, or ``auto``.
        random: whether the samples are random numbers.
        scorer: scores both models on labels; None without labels.
        preprocessing: whether to check the preprocessing of the samples.

    Raises:
        ModelError: a model cannot be loaded or run, or outputs or their shapes do not match.
        DataError: the samples do not fit the float model.
    """
    collector = VerdictCollector(before, task)
    # Random numbers are preprocessed in no way.
    check = PreprocessingCheck(before, task) if preprocessing and not random else None
    # Sessions, and their memory, are shared by the measurement and the check of the preprocessing.
    opened, other = _opened(before, after)
    # Samples are compared once, so that no outputs are kept; those of two deterministic models do
    # not depend on the order of the runs.
    is_random = may_be_random(before) or may_be_random(after)
    reference = RememberingSession(opened, limit=0, may_be_random=is_random)

    def observe(
        feeds: Mapping[str, NDArray[Any]],
        expected: Mapping[str, Any],
        quantized: Mapping[str, Any],
    ) -> None:
        # One entry for each row of the batch; None for a row without a label.
        classes: list[int | None] = []
        if scorer is not None and collector.task is not None:
            classes = scorer.add(collector.task, expected, quantized, feeds)
        if check is not None:
            check.add(feeds, expected, classes)

    try:
        outputs = collector.run(reference, other, samples, observe)
    except QuarkError:  # of the labels
        raise
    except calibrators.CalibrationError as error:
        raise DataError(str(error)) from error
    except Exception as error:  # onnxruntime raises several unrelated types
        raise ModelError(
            f"the two models cannot be run on the same data: {error}",
        ) from error
    # Checked after the run: open dimensions are known from the data alone.
    require_same_shapes(outputs, partial(sized_by_data, before))
    verdict = collector.verdict(
        outputs,
        held_out=0,
        calibrated=False,
        random=random,
        settings=settings_of_model(after),
    )
    findings = () if check is None else tuple(check.findings(reference))
    # Agreement on wrongly preprocessed data says little about the model in use.
    if findings and verdict is not None:
        verdict = verdict.doubted(findings[0].doubt, findings[0].next_step)
    run = EngineRun.of(other, after)
    return Judged(outputs, verdict, findings, collector.exhibits, run)


def _opened(before: ModelProto, after: ModelProto) -> list[Session]:
    """Open sessions on both models; the second must have the first's outputs.

    Raises:
        ModelError: a model cannot be loaded, or the second lacks an output.
    """
    sessions = list[Session]()
    for name, model in (("reference", before), ("other", after)):
        # The float model is the same reference for every engine.
        opened = open_session if name == "reference" else open_quantized
        try:
            # with_bodies adds function bodies of AMD's operators, without which onnxruntime rejects
            # the model.
            sessions.append(opened(with_bodies(model), what=f"the {name} model"))
        except Exception as error:
            library = "onnxruntime" if name == "reference" else engine_title()
            raise ModelError(
                f"{library or 'onnxruntime'} cannot load the {name} model: {error}",
            ) from error
    outputs, other_outputs = (
        {value.name for value in session.get_outputs()} for session in sessions
    )
    if missing := outputs - other_outputs:
        raise ModelError(
            f"the other model lacks the output {min(missing)!r} of the reference",
        )
    return sessions
