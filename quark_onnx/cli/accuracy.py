"""quantize --accuracy: the cheapest configuration that reaches a given accuracy."""

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import Iterator, Sequence
from time import perf_counter
from typing import Any

from quark_onnx.analysis import AccuracyResult, quantize_to_accuracy
from quark_onnx.analysis.accuracy import AccuracyTarget
from quark_onnx.cli.data import data_of
from quark_onnx.cli.latency import latency_document, quantized_latency
from quark_onnx.cli.next_command import analysis_step, with_commands
from quark_onnx.cli.output import Answer
from quark_onnx.cli.parsing import Parser, UsageError, duration, progress_of
from quark_onnx.cli.requantize import advised_on_file, requantize_options
from quark_onnx.cli.settings import given_options
from quark_onnx.common.errors import AccuracyError, ConfigError
from quark_onnx.common.wording import counted
from quark_onnx.config import to_dict
from quark_onnx.page.blocks import Facts, Notes
from quark_onnx.page.browser import write_page
from quark_onnx.report.verdict import NextStep

#: Options besides the fields of a configuration that belong to a single one, by their attribute.
_CHOSEN = (
    "preset",
    "config",
    "weights_only",
    "dynamic",
    "auto_exclude",
    "auto_mixed",
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

    Raises:
        UsageError: another option names a configuration.
    """
    try:
        AccuracyTarget.of(options.accuracy)
    except ConfigError as error:
        # The message of Target begins with "accuracy is ...", the name of the option.
        raise UsageError(f"--{error}") from error
    # None and False are the defaults of these options, so that anything else was given.
    flags = [
        f"--{name.replace('_', '-')}"
        for name in _CHOSEN
        if getattr(options, name) not in (None, False)
    ]
    flags += [option.flag for option in given_options(options)]
    if flags:
        raise UsageError(f"--accuracy chooses the configuration; leave out {flags[0]}")
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
    # The measurement is no part of the seconds of the run.
    latency = quantized_latency(options, data)
    blocks = result.blocks()
    if latency is not None:
        blocks.append(Notes("Latency", latency.lines, "time"))
    names = f"{options.model.name} → {options.output.name}"
    write_page(options.html, "Quantization", names, blocks)
    written = f"{options.model} -> {options.output}, in {seconds:.1f} s"
    report = result.report
    # Keys of a plain quantize run, so that programs read both alike; "accuracy" holds the attempts.
    document = {
        "model": options.model,
        "output": options.output,
        "seconds": round(seconds, 3),
        "accuracy": result.to_dict(),
        "worst_sqnr": report.worst_sqnr,
        **report.to_dict(),
        "config": to_dict(result.best.config),
        "latency": latency_document(latency),
    }
    failure = None
    if not result.reached:
        failure = _missed(result, options, _changes(result, options, data, seconds))
    return Answer([Facts((), {"model": [written]}), *blocks], document, failure)


def _changes(
    result: AccuracyResult, options: Namespace, data: Any, seconds: float
) -> tuple[NextStep, ...]:
    """Return changes of the model that was written, tried on the data; none for random data."""
    verdict = result.result.report.verdict
    if options.data is None or verdict is None:
        return ()
    written = {"reference": options.model, "other": options.output}
    # --budget is that of the configurations, which are tried already.
    compared = Namespace(
        **{**vars(options), **written, "advice": "try", "budget": None}
    )
    again = requantize_options(verdict, compared)
    if again is None:
        return ()
    gate = None if result.target.percent else result.target.value
    steps = advised_on_file(verdict, compared, again, data, seconds, gate=gate)
    return tuple(with_commands(steps, again))


def _missed(
    result: AccuracyResult, options: Namespace, changes: Sequence[NextStep]
) -> AccuracyError:
    best = result.best
    reached = f"{best.sqnr:.2f} dB"
    # The unit of the target.
    if result.target.percent and best.loss is not None:
        reached = f"a loss of {best.loss:.2f} %"
    analysis = analysis_step(options.model, options.output, options)
    return AccuracyError(
        f"no configuration reaches {result.target}; the nearest, {best.name}, has"
        f" {reached} and was written",
        [*_more_time(result, options), *changes, analysis],
    )


def _more_time(result: AccuracyResult, options: Namespace) -> Iterator[NextStep]:
    if result.left and options.budget is not None:
        # Later configurations take longer than those that filled the budget.
        more = counted(len(result.left), "configuration was", "configurations were")
        budget = f"{math.ceil(4 * options.budget)}s"
        yield NextStep(
            f"--budget {budget}",
            f"{more} not tried to the end",
            f"budget={budget.removesuffix('s')}",
        )
