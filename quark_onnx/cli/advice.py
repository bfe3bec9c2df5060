"""Advice of the commands: changes that are tried before they are printed."""

from __future__ import annotations

import argparse
import logging
from argparse import Namespace
from collections.abc import Callable
from functools import partial
from typing import Any

from quark_onnx.analysis.advise import BUDGET, TrialSettings, advise_refused
from quark_onnx.cli.next_command import changes_data, step_words
from quark_onnx.cli.parsing import UsageError, duration, progress_of
from quark_onnx.cli.settings import add_advice_option
from quark_onnx.common.errors import AccuracyError
from quark_onnx.config import QConfig
from quark_onnx.report.verdict import NextStep, Verdict

logger = logging.getLogger(__name__)

#: A function that tries changes, and returns those to print.
Attempt = Callable[[TrialSettings], tuple[NextStep, ...]]
#: A function from the options of a command to its recipe and its configuration.
Configuration = Callable[[Namespace], tuple[object, QConfig]]


def add_advice_options(parser: argparse._ActionsContainer) -> None:
    """Add --advice and --budget to a command without --accuracy."""
    add_advice_option(parser)
    parser.add_argument(
        "--budget",
        metavar="TIME",
        type=duration,
        help="time for trying changes, such as 90s; as the run took, at most 30s",
    )


def check_advice_options(options: Namespace, purpose: str = "trying advice") -> None:
    """Raise UsageError for options that contradict each other.

    Args:
        options: the options of the command.
        purpose: what --budget is for.
    """
    # Silently ignoring the limit would be worse.
    if options.budget is not None and options.advice in ("none", "list"):
        raise UsageError(
            f"--budget is for {purpose}; --advice {options.advice} tries nothing"
        )


def trying_of(
    options: Namespace,
    seconds: float,
    configure: Configuration,
    again: Namespace | None = None,
) -> TrialSettings:
    """Return how a command tries changes.

    Args:
        options: the options of the command.
        seconds: runtime of the command so far, the default budget.
        configure: function from the options of the command that makes a change to its
            configuration.
        again: the options that the change is made to, with their ``words`` and ``parser``.
    """
    return TrialSettings(
        task=getattr(options, "task", "auto"),
        budget=options.budget or min(BUDGET, seconds),
        timed=getattr(options, "time", True),
        progress=progress_of(options),
        ranges=getattr(options, "ranges", None),
        configure=partial(
            _config_of_step, configure=configure, options=again or options
        ),
    )


def _config_of_step(
    step: NextStep, configure: Configuration, options: Namespace
) -> QConfig | None:
    """Return the configuration of the command that makes a change; None for other changes."""
    words = step_words(step, options)
    if words is None:
        return None
    # The words begin with the name of the command, which the parser does not take.
    names = len(options.parser.prog.split()) - 1
    return configure(options.parser.parse_args(words[names:]))[1]


def advised(
    verdict: Verdict,
    options: Namespace,
    trial_settings: TrialSettings,
    attempt: Attempt,
) -> tuple[NextStep, ...]:
    """Return the advice that --advice asks for after a verdict.

    Args:
        verdict: the verdict, with changes that were not tried.
        options: the options of the command.
        trial_settings: how to try changes.
        attempt: tries them.
    """
    if options.advice == "none":
        return ()
    is_wanted = options.advice == "try" or (
        options.advice is None and verdict.band in ("risky", "poor")
    )
    # Random data judges nothing, and other settings do not make up for wrong preprocessing.
    is_useful = options.data is not None and not any(
        map(changes_data, verdict.next_steps)
    )
    if not is_wanted or not is_useful:
        return verdict.next_steps
    return _uninterrupted(trial_settings, attempt, verdict.next_steps)


def refused(
    error: AccuracyError,
    options: Namespace,
    data: Any,
    config: QConfig,
    trial_settings: TrialSettings,
) -> AccuracyError:
    """Return the error of a missed gate with the advice that --advice asks for.

    Args:
        error: the error, with changes that were not tried.
        options: the options of the command.
        data: the calibration data; None for none.
        config: the configuration, with the gate.
        trial_settings: how to try changes.
    """
    steps = error.next_steps
    if options.advice == "none":
        steps = ()
    elif options.advice != "list" and options.data is not None:
        model = options.model if error.model is None else error.model
        attempt = partial(advise_refused, model, data, error, config)
        steps = _uninterrupted(trial_settings, attempt, steps)
    return AccuracyError(error.reason, steps)


def _uninterrupted(
    trial_settings: TrialSettings, attempt: Attempt, untried: tuple[NextStep, ...]
) -> tuple[NextStep, ...]:
    """Return tried changes; after an interrupt, the untried ones."""
    try:
        return attempt(trial_settings)
    # The result is there: an end of the trials must not take its report away.
    except KeyboardInterrupt:
        logger.warning("interrupted: the changes below were not tried to the end")
        return untried
