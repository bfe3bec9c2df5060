"""quark-onnx npu: what a Ryzen AI processor makes of a model."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from quark_onnx import npu
from quark_onnx.cli.output import Answer
from quark_onnx.cli.parsing import Parser, add_common_options, path, shape
from quark_onnx.errors import ConstraintError
from quark_onnx.npu.page import write_page
from quark_onnx.npu.support import KINDS, RELEASE
from quark_onnx.registry import TARGETS

NAME = "npu"
SUMMARY = "see what a Ryzen AI processor would make of a model, why, and bring the model into a form that it takes"
USAGE = "%(prog)s {check,legalize,preflight} MODEL [OPTION ...]"
EXAMPLE = """\
examples:
  quark-onnx npu legalize model.onnx -o legal.onnx --shape input=1,3,224,224
  quark-onnx npu preflight model.onnx --target stx --kind XINT8 --page forecast.html
  quark-onnx npu check quantized.onnx --target phx

'quark-onnx npu ACTION --help' has the options of an action. No processor is needed."""

_FORMAT = "float, or quantized by any tool"


def add_arguments(parser: Parser) -> None:
    actions = parser.add_subparsers(
        dest="action", metavar="{check,legalize,preflight}", required=True, parser_class=Parser
    )
    for name, summary, usage, add, perform in _ACTIONS:
        action = actions.add_parser(
            name, help=summary, description=f"{summary[0].upper()}{summary[1:]}.", epilog="", usage=usage
        )
        action.add_argument("model", metavar="MODEL", type=path, help=f"an .onnx file, {_FORMAT}")
        rows = ", ".join(f"{each}: {TARGETS[each].summary}" for each in TARGETS)
        action.add_argument("--target", default="npu", help=f"what it is for; {rows} (default: npu)")
        add(action)
        add_common_options(action)
        action.set_defaults(perform=perform)


def run(options: Namespace) -> Answer:
    answer: Answer = options.perform(options)
    document = {"command": NAME, "action": options.action, "model": options.model, **answer.document}
    return Answer(answer.text, document, answer.failure)


def _check_options(parser: Parser) -> None:
    parser.add_argument("--fix", metavar="OUT.onnx", type=path, help="mend what can be mended, and check the result")


def _check(options: Namespace) -> Answer:
    model, notes = options.model, tuple[str, ...]()
    if options.fix is not None:
        model, notes = options.fix, npu.legalize(options.model, options.target, output=options.fix).notes
    found = npu.check(model, options.target)
    document = {
        "target": found.target.name,
        "kind": found.kind,
        "errors": found.errors,
        "mended": list(notes),
        "findings": [
            {**asdict(finding), "severity": finding.severity, **asdict(npu.RULES[finding.rule])}
            for finding in found.findings
        ],
    }
    failure = ConstraintError(f"{found.errors} rules of {found.target.name} are broken") if found.errors else None
    return Answer("\n".join([*(f"mended: {note}" for note in notes), str(found)]), document, failure)


def _legalize_options(parser: Parser) -> None:
    parser.add_argument("-o", "--output", metavar="OUT.onnx", type=path, required=True, help="where the result goes")
    parser.add_argument(
        "--shape",
        metavar="NAME=1,3,224,224",
        type=shape,
        nargs="+",
        action="extend",
        default=[],
        help="sizes of an input whose shape is dynamic; a batch without one becomes 1",
    )


def _legalize(options: Namespace) -> Answer:
    found = npu.legalize(options.model, options.target, shapes=dict(options.shape), output=options.output)
    return Answer(str(found), {"output": options.output, "notes": list(found.notes)})


def _preflight_options(parser: Parser) -> None:
    parser.add_argument("--kind", choices=list(KINDS), help="what a float model will be quantized to")
    parser.add_argument("--release", default=RELEASE, help=f"of Ryzen AI (default: {RELEASE})")
    parser.add_argument("--page", metavar="FILE.html", type=path, help="draw the model in pieces, on a page of its own")
    parser.add_argument(
        "--report", metavar="vitisai_ep_report.json", type=path, help="what the processor itself reported, beside it"
    )


def _preflight(options: Namespace) -> Answer:
    found = npu.preflight(options.model, options.target, kind=options.kind or "", release=options.release)
    text, document = str(found), _forecast(found)
    if options.report is not None:
        scored = npu.score(found, npu.read_report(options.report))
        text, document = f"{text}\n{scored}", {**document, "reported": asdict(scored)}
    if options.page is not None:
        write_page(found, options.page, options.model.name)
    return Answer(text, document)


def _forecast(found: npu.Preflight) -> dict[str, Any]:
    rows = zip(found.verdicts, found.operations, found.pieces, strict=True)
    return {
        "target": found.target.name,
        "kind": found.kind,
        "release": found.release,
        "counts": found.counts,
        "subgraphs": found.subgraphs,
        "share": found.share,
        "nodes": [{**asdict(verdict), "operations": count, "piece": piece} for verdict, count, piece in rows],
    }


_Action = tuple[str, str, str, Callable[[Parser], None], Callable[[Namespace], Answer]]
_ACTIONS: tuple[_Action, ...] = (
    ("check", "see which rules a model breaks", "%(prog)s MODEL [OPTION ...]", _check_options, _check),
    (
        "legalize",
        "rewrite a model in the words that the compiler takes, without changing what it computes",
        "%(prog)s MODEL -o OUT.onnx [OPTION ...]",
        _legalize_options,
        _legalize,
    ),
    (
        "preflight",
        "forecast which nodes the processor runs, in how many pieces, and why not the others",
        "%(prog)s MODEL [OPTION ...]",
        _preflight_options,
        _preflight,
    ),
)
