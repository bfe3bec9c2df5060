"""quark-onnx analyze: accuracy losses of a quantized model, and their fixes."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import replace
from time import perf_counter

from quark_onnx import analysis
from quark_onnx.analysis.advise import fixes
from quark_onnx.analysis.result import TOP
from quark_onnx.cli.advice import add_advice_options, check_advice_options
from quark_onnx.cli.data import add_data_options, data_of
from quark_onnx.cli.output import Answer
from quark_onnx.cli.parsing import (
    Parser,
    add_common_options,
    add_html_option,
    count,
    input_path,
)
from quark_onnx.cli.requantize import (
    advised_on_file,
    requantize_options,
    requantized,
)
from quark_onnx.cli.settings import add_task_option
from quark_onnx.page.blocks import Facts
from quark_onnx.page.browser import write_page

NAME = "analyze"
SUMMARY = "find where a quantized model, from any tool, loses accuracy, and why"
USAGE = (
    "%(prog)s FLOAT QUANT (--data PATH | --random-data [N]) [--html FILE] [OPTION ...]"
)
EXAMPLE = """\
example:
  quark-onnx analyze model.onnx model_int8.onnx --data samples/ --limit 20 --html analysis.html

exit codes: 0 done; 2 bad input; 3 internal error; 128 + N ended by signal N"""


def add_arguments(parser: Parser) -> None:
    parser.add_argument(
        "reference", metavar="FLOAT", type=input_path, help="float model"
    )
    parser.add_argument(
        "other",
        metavar="QUANT",
        type=input_path,
        help="quantized model with the same inputs and outputs",
    )
    add_data_options(parser)
    add_task_option(parser)
    group = parser.add_argument_group("findings")
    add_html_option(group, "write a page with plots")
    add_advice_options(group)
    group.add_argument(
        "--top",
        metavar="N",
        type=count,
        default=TOP,
        help="number of tensors to rank",
    )
    add_common_options(parser)


def run(options: Namespace) -> Answer:
    check_advice_options(options)
    start, data = perf_counter(), data_of(options)
    result = analysis.analyze(options.reference, options.other, data, task=options.task)
    seconds = perf_counter() - start
    if result.verdict is not None:
        again = requantize_options(result.verdict, options)
        steps = advised_on_file(
            result.verdict, options, again, data, seconds, fixes(result)
        )
        verdict = replace(result.verdict, next_steps=steps)
        result = replace(result, verdict=requantized(verdict, options, again))
    blocks = result.blocks(options.top)
    names = f"{options.reference.name} → {options.other.name}"
    write_page(options.html, "Quantization analysis", names, blocks)
    models = Facts((), {"models": [f"{options.reference}, {options.other}"]})
    document = {
        "reference": options.reference,
        "other": options.other,
        **result.to_dict(),
    }
    return Answer([models, *blocks], document)
