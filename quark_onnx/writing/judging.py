"""Judge a run: collect the outputs of both models while they are compared, and give a verdict."""

from __future__ import annotations

import logging

from onnx import ModelProto

from quark_onnx.config import QConfig
from quark_onnx.measuring.held_out import samples_for
from quark_onnx.measuring.run_data import RunData
from quark_onnx.preprocessing import Finding, PreprocessingCheck
from quark_onnx.report.verdict import Scorer, Verdict, VerdictCollector
from quark_onnx.running.run import Reference
from quark_onnx.writing.finish import Finished, Judging
from quark_onnx.writing.run_settings import settings_of_config

logger = logging.getLogger(__name__)


def judging_of(  # noqa: PLR0913
    reference: Reference,
    config: QConfig,
    data: RunData,
    task: str,
    trained: ModelProto | None,
    findings: tuple[Finding, ...] | None,
    scorer: Scorer | None,
) -> Judging:
    """Return the receivers of both models' outputs.

    Args:
        reference: the float model.
        config: settings of the run, for the advice after a bad verdict.
        data: the data of the run.
        task: task of the model; ``auto`` detects it.
        trained: the model before rewrites of the caller; None if it is the reference.
        findings: signs of wrong preprocessing that are known; None to look for them.
        scorer: a scorer of the data by given labels; None for those that come with the data.
    """
    check = None
    if not data.random and findings is None:
        check = PreprocessingCheck(trained or reference.model, task)
    return Judging(
        VerdictCollector(reference.model, task),
        check,
        settings_of_config(config, data.count),
        data.further,
        findings or (),
        data.held_out_scorer(scorer),
    )


def verdict_of(
    judging: Judging, finished: Finished, data: RunData, reference: Reference
) -> tuple[Verdict | None, list[str]]:
    """Return the verdict on a result, and signs of wrong preprocessing; new ones are logged.

    Args:
        judging: the receivers of both models' outputs.
        finished: the result, with the errors of its outputs.
        data: the data of the run.
        reference: the float model.
    """
    verdict = judging.collector.verdict(
        finished.errors,
        held_out=len(data.held_out),
        random=data.random,
        settings=judging.advice,
        samples_for=samples_for,
    )
    findings = [*judging.findings]
    if judging.check is not None:
        findings = judging.check.findings(reference.remembering)
        for finding in findings:
            logger.warning("%s", finding)
    if findings and verdict is not None:
        verdict = verdict.doubted(findings[0].doubt, findings[0].next_step)
    return verdict, [*map(str, findings)]
