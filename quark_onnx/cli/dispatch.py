"""main: parse the command line, run a command, print its answer.

Each kind of failure has an exit code and a line on stderr.

0    done
1    the gate was missed: the model is less accurate than requested
2    bad input: the command line, the model, the data or a setting
3    internal error: a defect of this package
129  the terminal was closed (SIGHUP)
130  interrupted (SIGINT)
141  no process reads stdout any more (SIGPIPE)
143  asked to end (SIGTERM)
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import traceback
import warnings
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

from calibrators import CalibrationError
from calibrators.onnx_runtime.isolation import isolated
from calibrators.scratch import written
from calibrators.shown import printable, shortened
from quark_onnx import __version__, custom_op_libraries, on_engine
from quark_onnx.cli import (
    analyze,
    calibrate,
    check,
    compare,
    convert,
    explain,
    listing,
    llm,
    npu,
    quantize,
    search,
)
from quark_onnx.cli.data import in_flags
from quark_onnx.cli.next_command import with_commands
from quark_onnx.cli.output import Answer, error_document, say
from quark_onnx.cli.parsing import (
    PROGRAM,
    STDOUT,
    Parser,
    UsageError,
    check_paths,
    in_words,
    rename_options,
)
from quark_onnx.cli.terminal import complain, show
from quark_onnx.common.errors import (
    AccuracyError,
    ConstraintError,
    PlanError,
    QuarkError,
    crash_errors,
    nearest,
)
from quark_onnx.common.progress_bars import plain_progress
from quark_onnx.common.reported import to_json
from quark_onnx.common.warnings_once import WarningsOnce
from quark_onnx.page.blocks import Facts
from quark_onnx.page.terminal import render
from quark_onnx.report.verdict import NextStep

#: Commands: modules with NAME, SUMMARY, USAGE, EXAMPLE, add_arguments(parser) and run(options) ->
#: Answer.
COMMANDS = (
    quantize,
    calibrate,
    search,
    explain,
    compare,
    analyze,
    convert,
    check,
    npu,
    llm,
    listing,
)

OK, GATE, BAD_INPUT, INTERNAL, INTERRUPTED, BROKEN_PIPE = 0, 1, 2, 3, 130, 141


#: Options that name the command in its document.
_NAMES = ("command", "action")


class Stopped(BaseException):
    """A signal asked the process to end.

    An exception lets workers and temporary files be cleaned up.
    """


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code; never raise an exception.

    Args:
        argv: the arguments; None for those of the process.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    arguments, deprecated = rename_options(arguments, _renamed(arguments))
    # Before parsing, because an error of the parser has to be JSON as well.
    wants_json = any(argument.partition("=")[0] == "--json" for argument in arguments)
    command = next(
        (module.NAME for module in COMMANDS if arguments[:1] == [module.NAME]),
        None,
    )
    # Errors of the parser are reported by these, until they are parsed.
    json = STDOUT if wants_json else None
    options = Namespace(json=json, verbose=False, command=command)
    # Before any file is opened, which would take the number of a closed stream.
    _occupy_standard_streams()
    for warning in deprecated:
        _complain(f"warning: {warning}")
    try:
        with _signals_raise():
            parsed = parse(arguments)
            # Before the file of --json is known, as the error must not be written into an input.
            check_paths(parsed, parsed.parser)
            options = parsed
            # The names of the models' attributes differ by command; a crash is reported with the
            # file.
            models = (
                getattr(options, name, None) for name in ("model", "reference", "other")
            )
            with (
                _diagnostics(options),
                crash_errors(*models),
                # In another process, a native crash of onnxruntime is an error message, and not the
                # end.
                isolated(options.isolation),
                custom_op_libraries(*getattr(options, "custom_op_library", [])),
                on_engine(
                    getattr(options, "engine", None) or "",
                    getattr(options, "provider", None) or "",
                ),
                plain_progress(),
            ):
                answer: Answer = options.run(options)
            return _publish(answer, options)
    except SystemExit as done:  # --help and --version
        return int(done.code or OK)
    except KeyboardInterrupt:
        _complain("interrupted")
        return INTERRUPTED
    except Stopped as stopped:
        (number,) = stopped.args
        _complain(f"ended by {signal.Signals(number).name}")
        # The convention of shells for a process that ended by a signal.
        return 128 + int(number)
    except BrokenPipeError:  # as in: quark-onnx list | head
        # Python flushes stdout at its end, which would fail once more.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    except Exception as error:
        return _fail(error, options)


def _renamed(arguments: list[str]) -> dict[str, str]:
    """Return the deprecated option names of a command or its action."""
    tables = {module.NAME: getattr(module, "RENAMED", {}) for module in COMMANDS}
    # Values are new names, or, for commands with actions, tables by action.
    table: dict[str, Any] = tables.get("".join(arguments[:1]), {})
    names = {name: new for name, new in table.items() if isinstance(new, str)}
    action: dict[str, str] = table.get("".join(arguments[1:2]), {})
    return names | action


def build_parser() -> tuple[Parser, dict[str, Parser]]:
    """Return the parser of the command line, and its commands' parsers by name."""
    parser = Parser(
        PROGRAM,
        "Quantize ONNX models: a float model and calibration data in, a measured and"
        " verified integer model out.",
        epilog=(
            "example:\n  quark-onnx quantize model.onnx -o model_int8.onnx --data"
            " samples/\n\n'quark-onnx COMMAND --help' has the options of a command."
        ),
    )
    parser.add_argument(
        "--version",
        action="version",
        version=f"{PROGRAM} {__version__}",
    )
    commands = parser.add_subparsers(
        dest="command",
        metavar="COMMAND",
        required=True,
        parser_class=Parser,
    )
    parsers = dict[str, Parser]()
    for module in COMMANDS:
        summary = module.SUMMARY
        command = commands.add_parser(
            module.NAME,
            help=summary,
            description=f"{summary[0].upper()}{summary[1:]}.",
            epilog=module.EXAMPLE,
            usage=module.USAGE,
        )
        module.add_arguments(command)
        command.set_defaults(run=module.run, parser=command)
        parsers[module.NAME] = command
    return parser, parsers


def _complete(parser: Parser) -> None:
    """Answer a shell's request for completions and exit, given argcomplete."""
    # The variable is set by the shell's completion; a plain run must not import argcomplete.
    if "_ARGCOMPLETE" not in os.environ:
        return
    try:
        import argcomplete
    except ImportError:
        return
    argcomplete.autocomplete(parser)


def parse(arguments: list[str]) -> Namespace:
    """Parse the options of a command, including its ``run``.

    Raises:
        UsageError: an option or a command is unknown, malformed or missing.
    """
    parser, parsers = build_parser()
    _complete(parser)
    if not arguments:
        say(parser.format_help(), sys.stderr)
        raise SystemExit(BAD_INPUT)
    word = arguments[0]
    # argparse would list all commands; this message names the nearest one.
    if not word.startswith("-") and word not in parsers:
        raise UsageError(f"unknown command {word!r}{nearest(word, parsers)}")
    words = in_words(arguments)
    # parse_args would end with its own message about the rest, without a hint.
    options, unknown = parser.parse_known_args(words)
    # Commands that are printed as advice repeat these words.
    options.words = words
    if unknown:
        name = unknown[0].partition("=")[0]
        # The parser of the action, for a command with actions.
        if name.startswith("--"):
            flags = [flag for flag in options.parser.options if flag.startswith("--")]
            raise UsageError(f"unknown option {name!r}{nearest(name, flags)}")
        what = "unknown option" if name.startswith("-") else "unexpected argument"
        raise UsageError(f"{what} {unknown[0]!r}; see {options.parser.prog} --help")
    return options


def _publish(answer: Answer, options: Namespace) -> int:
    """Print an answer, and an error if a gate was missed."""
    failure = answer.failure
    names = {key: value for key, value in vars(options).items() if key in _NAMES}
    document = {**names, **answer.document}
    reason, steps = "", list[NextStep]()
    if failure is not None:
        reason, steps = _reason_and_steps(failure, options)
        # The result was computed and is worth having: the document holds both, result and error.
        document = {
            **document,
            **error_document(type(failure).__name__, reason, steps),
        }
    # JSON first: a terminal that was closed must not keep the file from being written.
    _deliver(document, options.json)
    # stdout holds either JSON or text, so that it can be piped into a program.
    # A gate that kept the model from being written leaves nothing to show.
    if answer.body and options.json != STDOUT and not options.quiet:
        body = list(answer.body)
        # Commands without a page have no such option.
        if getattr(options, "html", None) is not None:
            body.append(Facts((), {"page": [str(options.html)]}))
        show(render(body, options.verbose), sys.stdout)
    if failure is None:
        return OK
    _complain_with_steps(reason, steps)
    return GATE


def _reason_and_steps(
    error: QuarkError, options: Namespace
) -> tuple[str, list[NextStep]]:
    """Return the message of an error, and the commands to try."""
    if not isinstance(error, AccuracyError):
        return str(error), []
    return error.reason, with_commands(error.next_steps, options)


def _complain_with_steps(
    message: str, steps: Sequence[NextStep], findings: Sequence[str] = ()
) -> None:
    _complain(f"error: {message}")
    for finding in findings:
        _complain(finding)
    for step in steps:
        first, *others = step.action.lines()
        lines = [f"try: {first}", *others]
        with suppress(OSError):
            # Commands are pasted, and never shortened.
            complain(f"{PROGRAM}: " + "\n  ".join(map(printable, lines)))


def _deliver(document: dict[str, Any], target: str | None) -> None:
    """Print JSON or write a file, if requested."""
    if target == STDOUT:
        say(to_json(document), sys.stdout)
    elif target is not None:
        with written(Path(target)) as file:
            file.write(to_json(document).encode() + b"\n")


def _fail(error: Exception, options: Namespace) -> int:
    reason, findings = str(error), tuple[str, ...]()
    if isinstance(error, ConstraintError):
        reason, findings = error.reason, error.findings
    kind, message = type(error).__name__, printable(" ".join(reason.split()))
    steps = list[NextStep]()
    is_bad_input = isinstance(error, QuarkError | CalibrationError)
    if isinstance(error, AccuracyError):
        reason, steps = _reason_and_steps(error, options)
        # An accuracy error without a result: the gate refused to write.
        code, message = GATE, printable(" ".join(reason.split()))
    # A PlanError is an inconsistency inside this package, and no bad input.
    elif is_bad_input and not isinstance(error, PlanError):
        code, message = BAD_INPUT, in_flags(message, options)
    # numpy's MemoryError names the size that it could not allocate.
    elif isinstance(error, MemoryError):
        code = BAD_INPUT
        message = f"the memory does not suffice: {message}".removesuffix(": ")
    elif isinstance(error, OSError):
        code = BAD_INPUT
        # str(OSError) begins with "[Errno 2]", which says nothing to most readers.
        message = error.strerror or message
        if error.filename:
            message = f"{error.filename}: {message}"
    else:
        code, message = INTERNAL, f"internal error: {kind}: {message}"
        if options.verbose:
            say("".join(traceback.format_exception(error)).rstrip(), sys.stderr)
        else:
            message += "; this is a defect; run with --verbose for the traceback"
    _complain_with_steps(message, steps, findings)
    try:
        document = error_document(kind, "\n".join([message, *findings]), steps)
        _deliver({"command": options.command, **document}, options.json)
    # The file for JSON may be what could not be written.
    except OSError as unwritable:
        _complain(f"error: {options.json}: {unwritable.strerror}")
    return code


def _complain(text: str) -> None:
    with suppress(OSError):  # ignore a closed stderr
        complain(f"{PROGRAM}: {shortened(printable(text))}")


def _occupy_standard_streams() -> None:
    """Open closed standard streams on the null device.

    Otherwise the next file would get the stream's number, and C++ would write messages into it.
    """
    # stdin, stdout, stderr.
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            # The new file gets this number, the least free one.
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)


@contextmanager
def _signals_raise() -> Iterator[None]:
    """Raise Stopped once on SIGTERM and SIGHUP, to clean up workers and files.

    An exception raised by a signal inside native code may come out as another exception. It is
    raised again, and so is KeyboardInterrupt.
    """
    # A list, because the handlers have to write to it; the first signal counts.
    received = list[BaseException]()

    def stop(number: int, _: FrameType | None) -> None:
        # Further signals do not interrupt the clean-up that follows.
        for handled in taken:
            signal.signal(handled, signal.SIG_IGN)
        received.append(Stopped(number))
        raise received[0]

    def interrupt(*_: object) -> None:
        received.append(KeyboardInterrupt())
        raise received[0]

    # Windows has no SIGHUP.
    every = [
        getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)
    ]
    # Only the main thread may set handlers.
    free = threading.current_thread() is threading.main_thread()
    # A handler that the caller has set (a service, a test runner) stays.
    taken = [
        available
        for available in every
        if free and signal.getsignal(available) is signal.SIG_DFL
    ]
    interruptible = (
        free and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    )
    for handled in taken:
        signal.signal(handled, stop)
    if interruptible:
        signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    except Exception as error:
        # onnxruntime and numpy may turn the exception of the handler into one of their own.
        if received:
            raise received[0] from error
        raise
    finally:
        for handled in taken:
            signal.signal(handled, signal.SIG_DFL)
        if interruptible:
            signal.signal(signal.SIGINT, signal.default_int_handler)


@contextmanager
def _diagnostics(options: Namespace) -> Iterator[None]:
    """Send warnings and log messages of the library to stderr, formatted as errors."""
    # The library logs, and configures no handlers; the command line shows the messages.
    handler = _ToStderr(logging.INFO if options.verbose else logging.WARNING)
    loggers = [logging.getLogger(name) for name in ("quark_onnx", "calibrators")]
    levels = [logger.level for logger in loggers]
    warned = set[str]()

    def complain_once(message: Warning | str, *_: Any, **__: Any) -> None:
        text = f"warning: {in_flags(str(message), options)}"
        if text not in warned:
            warned.add(text)
            _complain(text)

    for logger in loggers:
        logger.addHandler(handler)
        logger.setLevel(handler.level)
    try:
        # Each of several trials, or passes over the data, would repeat them.
        with WarningsOnce(), warnings.catch_warnings():
            # Deprecations of dependencies are nothing that a user could change.
            warnings.simplefilter("ignore")
            warnings.simplefilter("always", UserWarning)
            warnings.showwarning = complain_once
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            # main() may run many times in a process, as in tests.
            logger.removeHandler(handler)
            logger.setLevel(level)


class _ToStderr(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        _complain(f"{record.levelname.lower()}: {record.getMessage()}")
