"""quark-onnx convert: convert a model to other number formats, shapes or operators."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import asdict

import quark_onnx
from quark_onnx.cli.output import Answer
from quark_onnx.cli.parsing import (
    Parser,
    add_common_options,
    add_model_argument,
    add_output_option,
    add_shape_option,
    complete,
    count,
)
from quark_onnx.common.registry import CONVERSIONS
from quark_onnx.page.blocks import Block, Facts
from quark_onnx.report.blocks import outputs_block

NAME = "convert"
SUMMARY = "convert a model: float16, fixed shapes, opset, Q/DQ pairs, and more"
USAGE = "%(prog)s MODEL -o OUT --to WHAT [WHAT ...] [OPTION ...]"
EXAMPLE = """\
examples:
  quark-onnx convert model.onnx -o model_fp16.onnx --to float16
  quark-onnx convert model.onnx -o fixed.onnx --to fixed-shapes opset --shape image=1,3,224,224 --opset 17
  quark-onnx convert quark.onnx -o plain.onnx --to standard-qdq shared-initializers

Conversions that keep the function of a model are verified on random input; of the others the error is measured.

exit codes: 0 done; 1 the outputs changed; 2 bad input; 3 internal error; 128 + N ended by signal N"""  # noqa: E501


def add_arguments(parser: Parser) -> None:
    add_model_argument(parser, "an .onnx file from any tool; it is not changed")
    add_output_option(parser, "converted")
    wanted = parser.add_argument(
        "--to",
        metavar="WHAT",
        nargs="+",
        action="extend",
        required=True,
        help="conversions, in this order; see 'quark-onnx list conversions'",
    )
    complete(wanted, CONVERSIONS)
    add_shape_option(
        parser,
        "fixed-shapes: shape of an input; a batch without one becomes 1",
    )
    parser.add_argument(
        "--opset",
        metavar="N",
        type=count,
        help="opset: the version to convert to",
    )
    parser.add_argument(
        "--io",
        action="store_true",
        help="float16, bfloat16: convert inputs and outputs too",
    )
    add_common_options(parser)


def run(options: Namespace) -> Answer:
    result = quark_onnx.convert(
        options.model,
        options.to,
        options.output,
        shapes=dict(options.shape),
        opset=options.opset,
        io=options.io,
    )
    sizes = f"{result.bytes_before:,} -> {result.bytes_after:,} bytes"
    models = [f"{options.model} -> {options.output}"]
    body: list[Block] = [Facts((), {"model": models, "size": [sizes]})]
    # In the order of --to: each conversion works on the result of the one before.
    for step in result.steps:
        done = "; ".join(step.notes) or "there was nothing to convert"
        body.append(Facts((), {"converted": [f"{step.name}: {done}"]}))
        # Only conversions that change the function have an error to show.
        if step.outputs:
            body.append(outputs_block(step.outputs, "random input"))
    document = {
        "model": options.model,
        "output": options.output,
        "bytes_before": result.bytes_before,
        "bytes_after": result.bytes_after,
        "steps": [asdict(step) for step in result.steps],
    }
    return Answer(body, document)
