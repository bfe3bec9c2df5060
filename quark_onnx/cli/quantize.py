"""quark-onnx quantize: quantize a float model with data, and measure the result."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import replace
from time import perf_counter
from typing import Any

from quark_onnx import api
from quark_onnx.analysis.advise import TrialSettings, advise_report
from quark_onnx.cli.accuracy import add_accuracy_options, run_to_accuracy
from quark_onnx.cli.advice import (
    advised,
    check_advice_options,
    refused,
    trying_of,
)
from quark_onnx.cli.data import add_data_options, data_of
from quark_onnx.cli.engine import add_engine_options
from quark_onnx.cli.latency import (
    add_time_options,
    latency_document,
    quantized_latency,
)
from quark_onnx.cli.next_command import report_with_commands
from quark_onnx.cli.output import Answer
from quark_onnx.cli.parsing import (
    OutputPath,
    Parser,
    UsageError,
    add_common_options,
    add_html_option,
    add_model_argument,
    add_output_option,
    input_path,
    path,
    progress_of,
)
from quark_onnx.cli.settings import (
    add_advice_option,
    add_config_options,
    add_gate_option,
    add_labels_option,
    add_mixing_options,
    add_task_option,
    configured,
)
from quark_onnx.cli.workers import add_workers_option, workers
from quark_onnx.common.errors import AccuracyError
from quark_onnx.common.registry import RECIPES
from quark_onnx.config import QConfig, to_dict
from quark_onnx.job import Result
from quark_onnx.page.blocks import Facts, Notes
from quark_onnx.page.browser import write_page
from quark_onnx.report import Report
from quark_onnx.report.verdict import NextStep

NAME = "quantize"
SUMMARY = "quantize a model with calibration data, and measure its error"
USAGE = (
    "%(prog)s MODEL -o OUT (--data PATH | --random-data [N] | --ranges FILE |"
    " --weights-only | --dynamic) [OPTION ...]"
)
EXAMPLE = """\
examples:
  quark-onnx quantize model.onnx -o model_int8.onnx --data samples/
  quark-onnx quantize model.onnx -o model_int8.onnx --data samples/ --recipe auto
  quark-onnx quantize model.onnx -o model_int8.onnx --data samples/ --accuracy 1% --budget 10m
  quark-onnx quantize llm.onnx -o llm_int4.onnx --preset INT4
  quark-onnx quantize bert.onnx -o bert_int8.onnx --dynamic
  quark-onnx quantize resnet.onnx -o resnet_int8.onnx --data images/ --image-size 224 --resize crop \\
      --resize-to 256 --mean 0.485 0.456 0.406 --std 0.229 0.224 0.225 --per-channel --min-sqnr 20

exit codes: 0 done; 1 --min-sqnr or --accuracy missed; 2 bad input; 3 internal error; 128 + N ended by signal N"""  # noqa: E501


def add_arguments(parser: Parser) -> None:
    add_model_argument(parser)
    add_output_option(parser, "quantized")
    add_data_options(parser)
    add_config_options(parser, recipes=RECIPES)
    add_mixing_options(parser)
    add_gate_option(parser, "nothing is written")
    add_task_option(parser)
    add_labels_option(parser)
    add_time_options(parser)
    add_engine_options(parser)
    add_accuracy_options(parser)
    add_advice_option(parser)
    parser.add_argument(
        "--no-verdict",
        action="store_true",
        help="skip the verdict and the check of the preprocessing, which take time",
    )
    add_html_option(
        parser, "write a page with the report, and the samples that differ most"
    )
    parser.add_argument(
        "--ranges",
        metavar="FILE",
        type=input_path,
        help="file of 'quark-onnx calibrate', or a TensorRT or onnxruntime cache",
    )
    add_workers_option(parser)
    parser.add_argument(
        "--resume",
        metavar="DIR",
        type=OutputPath(path, files=("*.npz",)),
        help="folder for finished layers; the same command continues from it",
    )
    add_common_options(parser)


def run(options: Namespace) -> Answer:
    if options.no_verdict and (options.accuracy is not None or options.advice):
        raise UsageError(
            "--accuracy and --advice need the verdict: leave out --no-verdict"
        )
    if options.accuracy is not None:
        return run_to_accuracy(options)
    check_advice_options(options, "--accuracy and for trying advice")
    choice, config = configured(options)
    # Ranges of an earlier calibration stand for data; weight-only configurations need none.
    data = data_of(options, needed=config.measures and options.ranges is None)
    if data is None and options.advice == "try":
        raise UsageError("--advice try needs data to try changes on: give --data")
    start = perf_counter()
    try:
        with workers(options.workers) as executor:
            result = api.quantize(
                options.model,
                data,
                config,
                options.output,
                executor=executor,
                progress=progress_of(options),
                resume=options.resume,
                ranges=options.ranges,
                task=options.task,
                labels=options.labels,
                verdict=not options.no_verdict,
            )
    except AccuracyError as error:
        trial_settings = trying_of(options, perf_counter() - start, configured)
        failure = refused(error, options, data, config, trial_settings)
        return Answer([], {}, failure)
    seconds = perf_counter() - start
    report = _advised(options, data, result, config, seconds)
    # Steps become command lines of this command.
    report = report_with_commands(report, options)
    # After `seconds`, which are those of the quantization.
    latency = quantized_latency(options, data)
    page = report.blocks()
    if latency is not None:
        page.append(Notes("Latency", latency.lines))
    names = f"{options.model.name} → {options.output.name}"
    write_page(options.html, "Quantization", names, page)
    lines = {"model": [f"{options.model} -> {options.output}, in {seconds:.1f} s"]}
    if choice is not None:
        lines["recipe"] = [choice.described]
    lines["config"] = str(config).splitlines()
    if latency is not None:
        lines["time"] = latency.lines
    if options.labels is not None and not report.scores:
        lines["labels"] = [
            "none of the held-out samples has a label: score the result with"
            " 'quark-onnx compare --labels'"
        ]
    document = {
        "model": options.model,
        "output": options.output,
        "seconds": round(seconds, 3),
        "worst_sqnr": report.worst_sqnr,
        **report.to_dict(),
        "config": to_dict(config),
        "latency": latency_document(latency),
    }
    if choice is not None:
        document["recipe"] = choice.recipe.name
    return Answer([Facts((), lines), *report.blocks()], document)


def _advised(
    options: Namespace, data: Any, result: Result, config: QConfig, seconds: float
) -> Report:
    """Return the report with the advice that --advice asks for.

    Args:
        data: the calibration data; None for none.
        seconds: runtime of the run, the default budget.
    """
    report = result.report
    if report.verdict is None:
        return report

    def attempt(trial_settings: TrialSettings) -> tuple[NextStep, ...]:
        return advise_report(
            options.model, result.model, data, report, config, trial_settings
        )

    trial_settings = trying_of(options, seconds, configured)
    steps = advised(report.verdict, options, trial_settings, attempt)
    return replace(report, verdict=replace(report.verdict, next_steps=steps))
