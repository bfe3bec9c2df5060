"""quark-onnx check: the rules of a processor or an engine that a model breaks."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence

from quark_onnx.cli.output import Answer
from quark_onnx.cli.parsing import (
    Parser,
    add_common_options,
    add_model_argument,
    complete,
)
from quark_onnx.common.errors import ConstraintError
from quark_onnx.common.registry import TARGETS
from quark_onnx.common.wording import counted
from quark_onnx.page.blocks import Notes
from quark_onnx.targets.check import Check, check

NAME = "check"
SUMMARY = "list the rules of a processor or an engine that a model breaks"
USAGE = "%(prog)s MODEL --target NAME [OPTION ...]"
EXAMPLE = """\
example:
  quark-onnx check model_int8.onnx --target tensorrt

'quark-onnx list targets' has the names. The exit code is 1 if a rule is broken."""


def add_arguments(parser: Parser) -> None:
    add_model_argument(parser, "an .onnx file, float or quantized by any tool")
    target = parser.add_argument(
        "--target",
        metavar="NAME",
        required=True,
        help="processor or engine; see 'quark-onnx list targets'",
    )
    complete(target, TARGETS)
    add_common_options(parser)


def run(options: Namespace) -> Answer:
    found = check(options.model, options.target)
    document = {"model": options.model, **found.to_dict()}
    return answer_of(found, document)


def answer_of(
    found: Check, document: dict[str, object], repairs: Sequence[str] = ()
) -> Answer:
    """Return the answer of a check, a failure if rules are broken.

    Args:
        found: the result of the check.
        document: the JSON document.
        repairs: what was repaired in the model before the check.
    """
    # Warnings do not fail a check; the command has an exit code for scripts.
    failure = None
    if found.errors:
        rules = counted(found.errors, "rule")
        failure = ConstraintError(f"the model breaks {rules} of {found.target.name}")
    repaired = Notes("Repaired", tuple(repairs), "repaired")
    return Answer([repaired, *found.blocks()], document, failure)
