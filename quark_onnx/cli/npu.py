"""quark-onnx npu check: what stands between a model and a Ryzen AI processor."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import asdict

from quark_onnx import npu
from quark_onnx.cli.output import Answer
from quark_onnx.cli.parsing import Parser, add_common_options, path
from quark_onnx.errors import ConstraintError
from quark_onnx.registry import TARGETS

NAME = "npu"
SUMMARY = "see what a Ryzen AI processor would not take of a model, and why"
USAGE = "%(prog)s check MODEL [OPTION ...]"
EXAMPLE = """\
example:
  quark-onnx npu check quantized.onnx --target phx

Each finding names the node, the rule, what was found, what to do, and the source of the rule. Rules on which sources do
not agree are warnings. The exit code is 1 if there are errors. No processor is needed."""


def add_arguments(parser: Parser) -> None:
    parser.add_argument("action", metavar="check", choices=["check"], help="what to do")
    parser.add_argument("model", metavar="MODEL", type=path, help="an .onnx file, quantized by any tool, or float")
    rows = ", ".join(f"{name}: {TARGETS[name].summary}" for name in TARGETS)
    parser.add_argument("--target", default="npu", help=f"what it is for; {rows} (default: npu)")
    add_common_options(parser)


def run(options: Namespace) -> Answer:
    found = npu.check(options.model, options.target)
    document = {
        "command": NAME,
        "action": options.action,
        "model": options.model,
        "target": found.target.name,
        "kind": found.kind,
        "errors": found.errors,
        "findings": [
            {**asdict(finding), "severity": finding.severity, **asdict(npu.RULES[finding.rule])}
            for finding in found.findings
        ],
    }
    failure = ConstraintError(f"{found.errors} rules of {found.target.name} are broken") if found.errors else None
    return Answer(str(found), document, failure)
