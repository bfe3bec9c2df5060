"""quark-onnx analyze: accuracy losses of a quantized model, and their fixes."""

from __future__ import annotations

import math
from argparse import Namespace
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from time import perf_counter

from calibrators.shown import printable
from quark_onnx import analysis
from quark_onnx.analysis import Analysis
from quark_onnx.analysis.advise import fixes
from quark_onnx.analysis.findings import TensorError, Unmatched
from quark_onnx.cli.advice import add_advice_options, check_advice_options
from quark_onnx.cli.data import add_data_options, data_of
from quark_onnx.cli.output import Answer, cell, columns, entry
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
from quark_onnx.common.wording import counted, first_of
from quark_onnx.report import (
    OutputError,
    decibels,
    percentage,
    size_change,
    verdict_lines,
)

NAME = "analyze"
SUMMARY = "find where a quantized model, from any tool, loses accuracy, and why"
USAGE = (
    "%(prog)s FLOAT QUANT (--data PATH | --random-data [N]) [--html FILE] [OPTION ...]"
)
EXAMPLE = """\
example:
  quark-onnx analyze model.onnx model_int8.onnx --data samples/ --limit 20 --html analysis.html

exit codes: 0 done; 2 bad input; 3 internal error; 128 + N ended by signal N"""

#: Default of --top, number of outputs shown in a line, and number of causes of each tensor.
_TOP = 10
_SHOWN = 8
_CAUSES = 3


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
        default=_TOP,
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
    if options.html is not None:
        names = f"{options.reference.name} → {options.other.name}"
        result.write_page(options.html, "Quantization analysis", names)
    lines = [
        entry("models", [f"{options.reference}, {options.other}"]),
        entry("size", [size_change(result.bytes_before, result.bytes_after)]),
        entry("error", [f"on {counted(result.samples, 'sample')}; {_outputs(result)}"]),
        *_steps(result),
        entry("compared", _compared(result, verbose=options.verbose)),
        *_ranking(result, options.top),
    ]
    if options.html is not None:
        lines.append(entry("page", [str(options.html)]))
    if result.warnings:
        lines.append(entry("warning", result.warnings))
    if result.verdict is not None:
        lines += verdict_lines(result.verdict)
    document = {
        "command": NAME,
        "reference": options.reference,
        "other": options.other,
        **result.to_dict(),
    }
    return Answer("\n".join(lines), document)


def _outputs(result: Analysis) -> str:
    shown = first_of([_output(output) for output in result.outputs], _SHOWN)
    return f"output{'s' * (len(result.outputs) > 1)} {shown}"


def _output(output: OutputError) -> str:
    if output.sqnr is None:
        return f"{output.name} {percentage(output.agreement or 0.0)} equal"
    return f"{output.name} {decibels(output.sqnr)} dB"


def _steps(result: Analysis) -> Iterator[str]:
    """Yield steps and errors of outputs in their own units, such as pixels of a box."""
    # The range of values tells whether a step is coarse: 4 pixels are much for a box of 20.
    ranges = {
        tensor.name: f", values from {tensor.lo:.4g} to {tensor.hi:.4g}"
        for tensor in result.tensors
    }
    lines = list[str]()
    for output in result.outputs:
        if output.max_error is not None:
            step = result.steps.get(output.name)
            # An output without a uniform grid has no step.
            form = cell(step, "steps of {:.3g}", "float")
            lines.append(
                f"{output.name} {form}, errors up to"
                f" {output.max_error:.3g}{ranges.get(output.name, '')}",
            )
    if len(lines) > _SHOWN:
        lines[_SHOWN:] = [f"and {len(lines) - _SHOWN} more"]
    if lines:
        yield entry("in units", lines)


def _compared(result: Analysis, *, verbose: bool) -> Iterator[str]:
    how = Counter(tensor.matched_by for tensor in result.tensors)
    words = ", ".join(f"{number} by {name}" for name, number in how.items())
    roles = Counter(weight.role for weight in result.weights)
    # For example "12 quantized weights, 12 quantized biases".
    constants = ", ".join(
        counted(number, f"quantized {role}") for role, number in roles.items()
    )
    tensors = (
        f"{counted(len(result.tensors), 'tensor')} ({words})" if words else "no tensor"
    )
    yield ", ".join(filter(None, (tensors, constants)))
    # Booleans count as 0 and 1.
    if rescaled := sum(tensor.rescaled for tensor in result.tensors):
        yield (
            f"{counted(rescaled, 'of them has', 'of them have')} channels on other scales,"
            " as equalization leaves them; these were taken out"
        )
    if result.unmatched:
        yield f"not compared: {len(result.unmatched)}"
        yield from _uncompared(result.unmatched, verbose=verbose)


def _uncompared(unmatched: Sequence[Unmatched], *, verbose: bool) -> Iterator[str]:
    """Yield tensors without a comparison, with the reasons; the first three unless verbose."""
    shown = unmatched if verbose else unmatched[:3]
    for tensor in shown:
        yield f"  {tensor.name}: {tensor.reason}"
    more = len(unmatched) - len(shown)
    if more:
        yield f"  ... and {more} more; --verbose has them all"


def _ranking(result: Analysis, top: int) -> Iterator[str]:
    worst = result.ranking[:top]
    if not worst:
        yield entry("worst", ["no tensor differs from the float model's"])
        return
    order = "by the noise that they add; 'alone' is the error if all before them were float:"
    yield entry("worst", [order])
    # All rows are aligned together, then split, to put the causes between them.
    header = ("#", "tensor", "operator", "SQNR dB", "inputs", "alone", "format")
    rows = [_row(rank, tensor) for rank, tensor in enumerate(worst, 1)]
    table = columns([header, *rows]).splitlines()
    yield table[0]
    for line, tensor in zip(table[1:], worst, strict=True):
        yield line
        for cause in tensor.causes[:_CAUSES]:
            yield printable(f"       {cause.text}")
            yield printable(f"         -> {cause.remedy}")


def _row(rank: int, tensor: TensorError) -> tuple[str, ...]:
    ratios = (tensor.sqnr, tensor.sqnr_inputs, tensor.sqnr_local)
    return (
        str(rank),
        tensor.name,
        tensor.op_type,
        *map(_decibels, ratios),
        tensor.format or "float",
    )


def _decibels(ratio: float | None) -> str:
    # Exact tensors and unknown ratios have no number.
    if ratio is None or math.isinf(ratio):
        return "-"
    return f"{ratio:.1f}"
