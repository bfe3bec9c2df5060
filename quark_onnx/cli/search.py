"""quark-onnx search: find the best configuration for a model by trial."""

from __future__ import annotations

import warnings
from argparse import ArgumentTypeError, Namespace
from dataclasses import replace
from typing import Any

from quark_onnx.cli.data import add_data_options, data_of
from quark_onnx.cli.engine import add_engine_options
from quark_onnx.cli.field_options import CALL
from quark_onnx.cli.next_command import next_command
from quark_onnx.cli.output import Answer
from quark_onnx.cli.parsing import (
    Parser,
    UsageError,
    add_common_options,
    add_html_option,
    add_model_argument,
    count,
    duration,
    input_name,
    number,
    output_file,
    progress_of,
)
from quark_onnx.cli.settings import OPTIONS, add_target_option, add_task_option
from quark_onnx.common.errors import AccuracyError, ConfigError
from quark_onnx.engines import engine_title
from quark_onnx.page.blocks import Action, Facts, Judgement
from quark_onnx.page.browser import write_page
from quark_onnx.report import decibels
from quark_onnx.search.result import SearchResult
from quark_onnx.search.search import TRIALS, Search
from quark_onnx.search.space import Space
from quark_onnx.writing.destination import destination, keeps_weights_beside

NAME = "search"
SUMMARY = "try configurations on a model, and rank them by error and size"
USAGE = "%(prog)s MODEL (--data PATH | --random-data [N]) [-o BEST] [OPTION ...]"
EXAMPLE = """\
examples:
  quark-onnx search model.onnx --data samples/ --budget 10m -o model_int8.onnx
  quark-onnx search model.onnx --data samples/ --preset A8W8 XINT8 --optimize cle cle+adaquant --min-sqnr 25 \\
      --journal search.jsonl

exit codes: 0 done; 1 --min-sqnr missed; 2 bad input; 3 internal error; 128 + N ended by signal N"""  # noqa: E501


#: Deprecated names of options.
RENAMED = {
    "--presets": "--preset",
    "--calibrators": "--calibrator",
    "--optimizers": "--optimize",
    "--device": "--target",
}


def add_arguments(parser: Parser) -> None:
    add_model_argument(parser)
    parser.add_argument(
        "-o",
        "--output",
        metavar="BEST",
        type=output_file,
        help="write the best model here, even below --min-sqnr; replaces an earlier file",
    )
    add_data_options(parser)
    add_task_option(parser)
    default = Space()
    group = parser.add_argument_group(
        "space",
        "Each choice is tried alone, then the best are combined. Unless given, every list"
        f" has\nentries; 'none' empties a list. Presets: {' '.join(default.presets or ())}.\n"
        f"Calibrators: {' '.join(default.calibrators)}.\n"
        f"Optimizers: {' '.join(default.optimizers)}.",
    )
    # extend: a list may be continued by a second option of the same name.
    for name, (flag, metavar, what) in _AXES.items():
        group.add_argument(
            flag,
            dest=name,
            metavar=metavar,
            type=input_name if name == "presets" else str,
            nargs="*",
            action="extend",
            help=what,
        )
    group.add_argument(
        "--granularity",
        choices=list(_GRANULARITIES),
        nargs="+",
        action="extend",
        help="weight granularities to try, besides the preset's own",
    )
    add_target_option(group)
    add_engine_options(group)
    group = parser.add_argument_group("end")
    group.add_argument(
        "--budget",
        metavar="TIME",
        type=duration,
        help="total time, such as 90s, 10m or 1.5h; no limit unless given",
    )
    group.add_argument(
        "--trials",
        metavar="N",
        type=count,
        default=TRIALS,
        help="most configurations to try",
    )
    OPTIONS["--min-sqnr"].add(group, "; ends the search, or exit code 1")
    group.add_argument(
        "--journal",
        metavar="FILE",
        type=output_file,
        help="file of measurements, to resume, or to share between processes",
    )
    add_html_option(parser, "write a page with the candidates and plots")
    add_common_options(parser)


#: Setting of ``Space`` -> name, metavariable and help of its option.
_AXES = {
    "presets": ("--preset", "NAME|FILE.yaml", "presets and YAML files to try"),
    "calibrators": (
        "--calibrator",
        CALL,
        "calibrators to try, besides the preset's own",
    ),
    "optimizers": (
        "--optimize",
        "NAME[+NAME ...]",
        "optimizers to try; a plus runs several in a row",
    ),
}
_GRANULARITIES = {"tensor": False, "channel": True}


def run(options: Namespace) -> Answer:
    # First: --target was a number in earlier versions.
    _take_decibels(options)
    space = _space_of(options)
    data = data_of(options)
    # Before the search, which may take hours, and for the errors alone: the output must replace
    # neither the input nor its weights.
    if options.output is not None:
        keeps_weights_beside(options.model, destination(options.model, options.output))
    with Search(
        options.model,
        data,
        space=space,
        target=options.min_sqnr,
        budget=options.budget,
        trials=options.trials,
        journal=options.journal,
        task=options.task,
        progress=progress_of(options),
    ) as running:
        result = running.run()
        # Inside the context: the samples, which a repeated quantization reads, are deleted at its
        # end.
        if options.output is not None:
            running.write(result.best, options.output)
    judgement, *details = result.blocks()
    if options.output is None and isinstance(judgement, Judgement):
        words = ["--output", "best.onnx"]
        command = next_command(options.words, options.parser, words)
        write = Action("write the best model", command)
        judgement = replace(judgement, actions=(write, *judgement.actions))
    blocks = [judgement, *details]
    title = "Search for a configuration"
    write_page(options.html, title, options.model.name, blocks)
    models = str(options.model)
    if options.output:
        models += f" -> {options.output}"
    facts = {"model": [models]}
    if title := engine_title():
        facts["engine"] = [title]
    body = [Facts((), facts), *blocks]
    document = {
        "model": options.model,
        "output": options.output,
        **result.to_dict(),
    }
    return Answer(body, document, _missed(result, options.min_sqnr))


def _take_decibels(options: Namespace) -> None:
    """Interpret a number in --target, formerly a bound in dB, as --min-sqnr."""
    try:
        # An empty text is no number, like the name of a device.
        bound = number(options.target or "")
    except ArgumentTypeError:
        return
    warnings.warn(
        f"--target names a device; write --min-sqnr {options.target}",
        stacklevel=2,
    )
    options.min_sqnr, options.target = bound, None


def _space_of(options: Namespace) -> Space:
    settings: dict[str, Any] = {"target": options.target or ""}
    for name in _AXES:
        words = getattr(options, name)
        if words is not None:
            # None keeps the default of Space; () is an empty axis.
            settings[name] = () if words == ["none"] else words
    if options.granularity:
        settings["per_channel"] = [
            _GRANULARITIES[granularity] for granularity in options.granularity
        ]
    try:
        return Space(**settings)
    except ConfigError as error:
        raise UsageError(_in_options(str(error))) from error


def _in_options(message: str) -> str:
    """Translate a message of ``Space`` from setting names to options."""
    # All other messages of Space begin with the name of the setting.
    if message.startswith("unknown target"):
        return f"--target: {message}"
    setting, colon, text = message.partition(":")
    flag = _AXES[setting][0] if setting in _AXES else f"--{setting}"
    return f"{flag}{colon}{text}"


def _missed(result: SearchResult, target: float | None) -> AccuracyError | None:
    if result.reached or target is None:
        return None
    # Does not round up to the bound that was missed.
    score = decibels(result.best.score or 0.0, below=target)
    return AccuracyError(
        f"the best candidate, {result.best.name}, has {score} dB: below --min-sqnr"
        f" {target:g}",
    )
