"""quantize --accuracy: the cheapest configuration that reaches a given accuracy."""

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import replace
from time import perf_counter

from quark_onnx.analysis import AccuracyResult, quantize_to_accuracy
from quark_onnx.analysis.accuracy import Target
from quark_onnx.cli.data import data_of
from quark_onnx.cli.latency import latency_document, latency_lines, quantized_latency
from quark_onnx.cli.next_command import analysis_step
from quark_onnx.cli.output import Answer, cell, columns, entry
from quark_onnx.cli.parsing import Parser, UsageError, duration, progress_of
from quark_onnx.cli.settings import SWITCHES
from quark_onnx.common.errors import AccuracyError, ConfigError
from quark_onnx.common.wording import counted
from quark_onnx.config import to_dict
from quark_onnx.report import Report
from quark_onnx.report.verdict import NextStep

#: Settings of a single configuration, which --accuracy chooses.
#: Attributes of the options; the option of an attribute has hyphens.
_CHOSEN = (
    "preset",
    "config",
    "calibrator",
    "tensor_calibrator",
    "optimize",
    "weights_only",
    "dynamic",
    "exclude",
    "op_types",
    "nodes",
    "auto_exclude",
    "auto_mixed",
    "min_sqnr",
    "target",
    "form",
    "max_opset",
    "accuracy_level",
    "ranges",
    "resume",
)


def add_accuracy_options(parser: Parser) -> None:
    group = parser.add_argument_group(
        "accuracy",
        "Configurations are tried, those with the fastest results first, until one is"
        " accurate enough.",
    )
    group.add_argument(
        "--accuracy",
        metavar="LOSS%|DB",
        help="accepted loss, such as 1%%, or least SQNR, such as 25dB",
    )
    group.add_argument(
        "--budget",
        metavar="TIME",
        type=duration,
        help="time for --accuracy or --advice, such as 10m; advice: at most 30s",
    )


def run_to_accuracy(options: Namespace) -> Answer:
    """Quantize to the accuracy in ``--accuracy``.

    Args:
        options: the options of the command.

    Raises:
        UsageError: another option names a configuration.
    """
    try:
        Target.of(options.accuracy)
    except ConfigError as error:
        # The message of Target begins with "accuracy is ...", the name of the option.
        raise UsageError(f"--{error}") from error
    # None and False are the defaults of these options, so that anything else was given.
    chosen = (*_CHOSEN, *SWITCHES)
    given = [name for name in chosen if getattr(options, name) not in (None, False)]
    if options.per_channel is not None:
        given.append("per_channel" if options.per_channel else "per_tensor")
    if given:
        flag = given[0].replace("_", "-")
        raise UsageError(f"--accuracy chooses the configuration; leave out --{flag}")
    if options.labels is not None:
        raise UsageError(
            "--labels does not go with --accuracy; score the result with 'quark-onnx"
            " compare --labels'",
        )
    if options.advice is not None:
        raise UsageError("--accuracy tries configurations itself; leave out --advice")
    start = perf_counter()
    data = data_of(options)
    result = quantize_to_accuracy(
        options.model,
        data,
        options.accuracy,
        options.output,
        recipe=options.recipe or "auto",
        task=options.task,
        budget=options.budget,
        progress=progress_of(options),
    )
    seconds = perf_counter() - start
    # Commands of next steps would change one configuration, while --accuracy has tried several.
    report = _without_steps(result.result.report)
    if options.html is not None:
        names = f"{options.model.name} → {options.output.name}"
        report.write_page(options.html, "Quantization", names)
    # The measurement is no part of the seconds of the run.
    latency = quantized_latency(options, data)
    lines = [
        entry("model", [f"{options.model} -> {options.output}, in {seconds:.1f} s"]),
        entry("target", [str(result.target)]),
        entry("samples", [_samples(result)]),
        entry("recipe", [f"{result.choice.recipe.name}: {result.choice.reason}"]),
        columns([("tried", "SQNR dB", "loss", "seconds", ""), *_rows(result)]),
    ]
    if result.left:
        lines.append(entry("left", ["did not fit into --budget:", *result.left]))
    lines += [
        entry("config", [result.best.name, *str(result.best.config).splitlines()]),
        *latency_lines(latency),
        str(report),
    ]
    # Keys of a plain quantize run, so that programs read both alike; "accuracy" holds the attempts.
    document = {
        "command": "quantize",
        "model": options.model,
        "output": options.output,
        "seconds": round(seconds, 3),
        "accuracy": result.to_dict(),
        "worst_sqnr": report.worst_sqnr,
        **report.to_dict(),
        "config": to_dict(result.best.config),
        "latency": latency_document(latency),
    }
    return Answer("\n".join(lines), document, _missed(result, options))


def _samples(result: AccuracyResult) -> str:
    text = f"{result.judged} judge, and calibrate nothing"
    # 64 samples cannot tell a loss of 1 % from none: a single sample is 1.6 %.
    if result.target.percent and result.resolution > result.target.value:
        text += f"; they resolve losses of {result.resolution:.2g} % at best"
    return text


def _rows(result: AccuracyResult) -> Iterator[tuple[str, str, str, str, str]]:
    for attempt in result.attempts:
        yield (
            attempt.name,
            cell(attempt.sqnr, "{:.2f}", "failed"),
            cell(attempt.loss, "{:.2f} %"),
            f"{attempt.seconds:.1f}",
            attempt.error or ("met" if attempt.met else "missed"),
        )


def _without_steps(report: Report) -> Report:
    """Return a report without next steps, which change a single configuration."""
    if report.verdict is None:
        return report
    return replace(report, verdict=replace(report.verdict, next_steps=()))


def _missed(result: AccuracyResult, options: Namespace) -> AccuracyError | None:
    if result.reached:
        return None
    best = result.best
    reached = f"{best.sqnr:.2f} dB"
    # The unit of the target.
    if result.target.percent and best.loss is not None:
        reached = f"a loss of {best.loss:.2f} %"
    analysis = analysis_step(options.model, options.output, options)
    return AccuracyError(
        f"no configuration reaches {result.target}; the nearest, {best.name}, has"
        f" {reached} and was written",
        [*_more_time(result, options), analysis],
    )


def _more_time(result: AccuracyResult, options: Namespace) -> Iterator[NextStep]:
    if result.left and options.budget is not None:
        # Later configurations take longer than those that filled the budget.
        more = counted(
            len(result.left), "more configuration is", "more configurations are"
        )
        budget = f"{math.ceil(4 * options.budget)}s"
        yield NextStep(
            f"--budget {budget}",
            f"{more} tried",
            f"budget={budget.removesuffix('s')}",
        )
