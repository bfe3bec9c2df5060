"""quark-onnx search: which configuration serves a model best, found by trying."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator
from typing import Any

from quark_onnx.analysis import TRIALS, Candidate, Search, SearchResult, Space
from quark_onnx.cli.data import add_data_options, data_of
from quark_onnx.cli.output import Answer, columns, entry
from quark_onnx.cli.parsing import (
    Parser,
    UsageError,
    add_common_options,
    count,
    duration,
    number,
    path,
)
from quark_onnx.errors import AccuracyError, ConfigError
from quark_onnx.registry import TARGETS
from quark_onnx.report import decibels
from quark_onnx.steps import destination, keeps_weights_beside

NAME = "search"
SUMMARY = "try configurations on a model, and rank them by error and size"
USAGE = "%(prog)s MODEL (--data PATH | --random-data [N]) [-o BEST] [OPTION ...]"
EXAMPLE = """\
examples:
  quark-onnx search model.onnx --data samples/ --budget 10m -o model_int8.onnx
  quark-onnx search model.onnx --data samples/ --presets A8W8 XINT8 --optimizers cle cle+adaquant --target 25 \\
      --journal search.jsonl

exit codes: 0 done; 1 --target missed; 2 bad input; 3 internal error; 128 + N ended by signal N"""  # noqa: E501


def add_arguments(parser: Parser) -> None:
    parser.add_argument(
        "model",
        metavar="MODEL",
        type=path,
        help="the float model, an .onnx file; it is not changed",
    )
    parser.add_argument(
        "-o",
        "--output",
        metavar="BEST",
        type=path,
        help="write the best model, also where it misses --target",
    )
    add_data_options(parser)
    default = Space()
    group = parser.add_argument_group(
        "space",
        "Each choice is tried alone, the cheap and the promising first; then those that"
        " served best are combined.",
    )
    for name, metavar, what in (
        ("presets", "PRESET|FILE.yaml", "presets and YAML files"),
        (
            "calibrators",
            "NAME[:SETTING=VALUE,...]",
            "calibrators of activations, beside that of the preset",
        ),
        (
            "optimizers",
            "NAME[+NAME ...]",
            "optimizers, several in a row with a plus between them",
        ),
    ):
        shown = " ".join(getattr(default, name))
        group.add_argument(
            f"--{name}",
            metavar=metavar,
            nargs="*",
            action="extend",
            help=f"{what} (default: {shown}); none for none",
        )
    group.add_argument(
        "--granularity",
        choices=list(_GRANULARITIES),
        nargs="+",
        action="extend",
        help=(
            "scales of weights to try, beside that of the preset (default: none other)"
        ),
    )
    group.add_argument(
        "--device",
        metavar="NAME",
        help=(
            f"what the result is for: {', '.join(TARGETS)}; the presets are those that"
            " it takes (default: any runtime)"
        ),
    )
    group = parser.add_argument_group("end")
    group.add_argument(
        "--budget",
        metavar="TIME",
        type=duration,
        help=(
            "begin nothing that would not end within this time, of which a candidate"
            " may take a quarter: 90s, 10m, 1.5h (default: no limit)"
        ),
    )
    group.add_argument(
        "--trials",
        metavar="N",
        type=count,
        default=TRIALS,
        help=f"try so many candidates at most (default: {TRIALS})",
    )
    group.add_argument(
        "--target",
        metavar="DB",
        type=number,
        help=(
            "stop as soon as the worst output has so many dB; the exit code is 1 if"
            " none does"
        ),
    )
    group.add_argument(
        "--journal",
        metavar="FILE",
        type=path,
        help=(
            "keep what was measured in a file, and go on from it when run again;"
            " processes with the same file share the work"
        ),
    )
    add_common_options(parser)


_GRANULARITIES = {"tensor": False, "channel": True}
#: So many names of candidates that did not fit are printed; --json has all.
_SHOWN = 12


def run(options: Namespace) -> Answer:
    space = _space_of(options)
    data = data_of(options)
    _check_files(options)
    with Search(
        options.model,
        data,
        space=space,
        target=options.target,
        budget=options.budget,
        trials=options.trials,
        journal=options.journal,
        progress=False if options.quiet else None,
    ) as running:
        found = running.run()
        if options.output is not None:
            running.write(found.best, options.output)
    failed = [each for each in found.candidates if each.error]
    lines = [
        entry(
            "model",
            [str(options.model) + (f" -> {options.output}" if options.output else "")],
        ),
        entry(
            "samples",
            [f"{found.calibrated} to calibrate on, {found.judged} to judge by"],
        ),
        entry(
            "tried",
            [f"{len(found.candidates)} of {found.total} configurations"],
        ),
        columns([("configuration", "SQNR dB", "seconds", "bytes", ""), *_rows(found)]),
        entry("front", ["* none of the others is both smaller and better"]),
        *_left_out(found),
        *(
            [entry("failed", [f"{each.name}: {each.error}" for each in failed])]
            if failed
            else []
        ),
        entry("best", [found.best.name, *str(found.best.config).splitlines()]),
    ]
    document = {
        "command": NAME,
        "model": options.model,
        "output": options.output,
        **found.to_dict(),
    }
    return Answer("\n".join(lines), document, _missed(found, options.target))


def _space_of(options: Namespace) -> Space:
    settings: dict[str, Any] = {"target": options.device or ""}
    for name in ("presets", "calibrators", "optimizers"):
        words = getattr(options, name)
        if words is not None:
            settings[name] = () if words == ["none"] else words
    if options.granularity:
        settings["per_channel"] = [_GRANULARITIES[word] for word in options.granularity]
    try:
        return Space(**settings)
    except ConfigError as error:
        text = str(error)
        if text.startswith("unknown target"):
            text = f"device: {text}"
        raise UsageError(f"--{text}") from error  # it begins with the setting


def _check_files(options: Namespace) -> None:
    """Whether what is asked for can be written, before hours are spent on it."""
    if options.output is None:
        return
    keeps_weights_beside(options.model, destination(options.model, options.output))
    if (
        options.journal is not None
        and options.journal.resolve() == options.output.resolve()
    ):
        raise UsageError(f"--journal and --output are the same file, {options.output}")


def _rows(found: SearchResult) -> Iterator[tuple[str, str, str, str, str]]:
    front = found.front
    for each in found.candidates:
        yield (
            each.name,
            _score(each),
            f"{each.seconds:.1f}",
            _size(each),
            _remark(each, front),
        )


def _remark(candidate: Candidate, front: list[Candidate]) -> str:
    if candidate.pruned:
        return f"ended early, after {candidate.judged} samples"
    return "*" if candidate in front else ""


def _left_out(found: SearchResult) -> Iterator[str]:
    """Return what did not fit into the budget, by name."""
    if not found.left:
        return
    count = len(found.left)
    names = "candidate" if count == 1 else "candidates"
    shown = [f"{count} {names} did not fit into --budget:", *found.left[:_SHOWN]]
    if count > _SHOWN:
        shown.append(f"and {count - _SHOWN} more")
    yield entry("left", shown)


def _score(candidate: Candidate) -> str:
    return "failed" if candidate.score is None else f"{candidate.score:.2f}"


def _size(candidate: Candidate) -> str:
    return "-" if candidate.bytes is None else f"{candidate.bytes:,}"


def _missed(found: SearchResult, target: float | None) -> AccuracyError | None:
    if found.reached or target is None:
        return None
    score = decibels(found.best.score or 0.0, below=target)
    return AccuracyError(
        f"the best candidate, {found.best.name}, has {score} dB: below --target"
        f" {target:g}",
    )
