"""quark-onnx compare: error of a quantized model's outputs on data."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import replace
from time import perf_counter

from quark_onnx import analysis
from quark_onnx.cli.advice import add_advice_options, check_advice_options
from quark_onnx.cli.data import add_data_options, data_of
from quark_onnx.cli.engine import add_engine_options
from quark_onnx.cli.latency import add_threads_option
from quark_onnx.cli.next_command import analysis_step
from quark_onnx.cli.output import Answer
from quark_onnx.cli.parsing import (
    Parser,
    add_common_options,
    add_html_option,
    input_path,
    progress_of,
)
from quark_onnx.cli.requantize import (
    advised_on_file,
    compared_with_commands,
    requantize_options,
)
from quark_onnx.cli.settings import (
    add_gate_option,
    add_labels_option,
    add_task_option,
)
from quark_onnx.common.errors import AccuracyError
from quark_onnx.page.blocks import Facts
from quark_onnx.report import OutputError, decibels

NAME = "compare"
SUMMARY = "compare a quantized model, from any tool, with its float original"
USAGE = "%(prog)s FLOAT QUANT (--data PATH | --random-data [N]) [OPTION ...]"
EXAMPLE = """\
example:
  quark-onnx compare model.onnx model_int8.onnx --data samples/ --limit 50 --min-sqnr 20

exit codes: 0 done; 1 --min-sqnr missed; 2 bad input; 3 internal error; 128 + N ended by signal N"""


def add_arguments(parser: Parser) -> None:
    parser.add_argument(
        "reference", metavar="FLOAT", type=input_path, help="float model"
    )
    parser.add_argument(
        "other",
        metavar="QUANT",
        type=input_path,
        help="quantized model with the same outputs",
    )
    add_data_options(parser)
    add_task_option(parser)
    add_labels_option(parser)
    parser.add_argument(
        "--time",
        action="store_true",
        help="measure the median latency of both models on this machine",
    )
    add_threads_option(parser)
    add_engine_options(parser)
    add_html_option(parser, "write a page with the samples that differ most")
    add_gate_option(parser, "an error names it")
    add_advice_options(parser)
    add_common_options(parser)


def run(options: Namespace) -> Answer:
    check_advice_options(options)
    start, data = perf_counter(), data_of(options)
    comparison = analysis.compare(
        options.reference,
        options.other,
        data,
        task=options.task,
        labels=options.labels,
        time=options.time,
        threads=options.threads,
        progress=progress_of(options),
    )
    seconds = perf_counter() - start
    verdict = comparison.verdict
    if verdict is not None:
        again = requantize_options(verdict, options)
        steps = advised_on_file(verdict, options, again, data, seconds)
        # The verdict proposes changes in general terms; the commands repeat this model and data.
        verdict = compared_with_commands(
            replace(verdict, next_steps=steps), options, again
        )
        comparison = replace(comparison, verdict=verdict)
    if options.html is not None:
        names = f"{options.reference.name} → {options.other.name}"
        comparison.write_page(options.html, "Comparison", names)
    models = Facts((), {"models": [f"{options.reference}, {options.other}"]})
    document = {
        "reference": options.reference,
        "other": options.other,
        **comparison.to_dict(),
    }
    failure = _missed(comparison.outputs, options)
    return Answer([models, *comparison.blocks()], document, failure)


def _missed(outputs: list[OutputError], options: Namespace) -> AccuracyError | None:
    bound = options.min_sqnr
    if bound is None:
        return None
    missed = list[str]()
    for output in outputs:
        # Outputs without an SQNR (integers, random) do not miss a gate in dB.
        if output.sqnr is not None and output.sqnr < bound:
            # With the bound as a limit, 19.999 dB does not round to the 20 dB that were missed.
            shown = decibels(output.sqnr, bound)
            missed.append(f"output {output.name!r} has {shown} dB SQNR")
    if not missed:
        return None
    step = analysis_step(options.reference, options.other, options)
    return AccuracyError(f"{'; '.join(missed)}: below --min-sqnr {bound:g}", [step])
