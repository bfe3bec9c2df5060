"""Commands that quantize a model again, for advice after a comparison."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from calibrators.readers.open import CalibrationData
from quark_onnx.analysis.advise import SAMPLES, TrialSettings, advise_file
from quark_onnx.cli.advice import advised, trying_of
from quark_onnx.cli.data import add_data_options
from quark_onnx.cli.engine import add_engine_options, engine_words
from quark_onnx.cli.next_command import (
    analysis_step,
    changes_data,
    data_words,
    with_commands,
)
from quark_onnx.cli.parsing import Parser, add_output_option
from quark_onnx.cli.settings import (
    add_config_options,
    add_mixing_options,
    add_task_option,
    configured,
)
from quark_onnx.common.errors import QuarkError
from quark_onnx.common.registry import PRESETS, RECIPES
from quark_onnx.config import QConfig
from quark_onnx.config.spec import format_calibrator
from quark_onnx.config.text import format_call
from quark_onnx.files.io import load
from quark_onnx.report.verdict import AdvisedSettings, NextStep, Verdict
from quark_onnx.writing.provenance import preset_of
from quark_onnx.writing.run_settings import settings_of_model

#: Presets by bits of activations and of weights, for models without metadata.
#: Models of other tools have no metadata of a preset; their bits are read from the graph.
_PRESETS: dict[tuple[int | None, int | None], str] = {
    (8, 8): "A8W8",
    (16, 8): "A16W8",
    (None, 8): "W8",
    (None, 4): "INT4",
}


def compared_with_commands(
    verdict: Verdict, options: Namespace, again: Namespace | None
) -> Verdict:
    """Return the verdict of a comparison with complete command lines.

    Changes of the data belong to ``compare``, changes of the quantization to ``quantize``. The last
    step is the analysis.

    Args:
        verdict: the verdict.
        options: the options of ``compare``.
        again: the options of ``requantize_options``.
    """
    steps = requantized(verdict, options, again).next_steps
    # Good figures need no analysis, also of an unclear verdict, and random data gives none.
    is_good = verdict.band in ("good", "unknown") or (
        verdict.band == "unclear" and not verdict.next_steps
    )
    if not is_good and options.advice != "none":
        step = analysis_step(options.reference, options.other, options)
        steps = (*steps, step)
    return replace(verdict, next_steps=steps)


def requantized(
    verdict: Verdict, options: Namespace, again: Namespace | None
) -> Verdict:
    """Return a verdict with complete command lines for the data, or for another quantization.

    Args:
        verdict: the verdict on a quantized model.
        options: the options of a command with a float and a quantized model.
        again: the options of ``requantize_options``.
    """
    data_steps = [step for step in verdict.next_steps if changes_data(step)]
    commands = with_commands(data_steps, options)
    others = [step for step in verdict.next_steps if not changes_data(step)]
    steps = (*commands, *_quantize_steps(others, again))
    return replace(verdict, next_steps=steps)


def requantize_options(verdict: Verdict, options: Namespace) -> Namespace | None:
    """Return the options of a command that quantizes the compared model again.

    None if there is nothing to change, without real data to calibrate on, or if the format of the
    model has no preset.

    Args:
        verdict: the verdict, with changes that were not tried.
        options: the options of a command with a float and a quantized model.
    """
    has_changes = bool(verdict.next_steps) or options.advice == "try"
    words = _words(options) if has_changes and options.data is not None else None
    if words is None:
        return None
    # The options of quantize, to split its command line; compare's parser lacks most of them.
    parser = Parser("quark-onnx quantize", "")
    parser.add_argument("model")
    add_output_option(parser, "quantized")
    add_data_options(parser)
    add_config_options(parser, recipes=RECIPES)
    add_mixing_options(parser)
    add_task_option(parser)
    add_engine_options(parser)
    # The values of the options of data are compare's own.
    return Namespace(**{**vars(options), "words": words, "parser": parser})


def advised_on_file(  # noqa: PLR0913  a verdict, and the run that a trial repeats
    verdict: Verdict,
    options: Namespace,
    again: Namespace | None,
    data: CalibrationData | None,
    seconds: float,
    further: Sequence[NextStep] = (),
    gate: float | None = None,
) -> tuple[NextStep, ...]:
    """Return the advice that --advice asks for after a verdict on a quantized file.

    Args:
        verdict: the verdict, with changes that were not tried.
        options: the options of a command with a float and a quantized model.
        again: the options of ``requantize_options``.
        data: the data of the command; None for none, on which nothing is tried.
        seconds: runtime of the command so far.
        further: changes to try besides those that the settings of the model propose.
        gate: minimum SQNR in dB that the model misses; None without one.
    """

    def attempt(trial_settings: TrialSettings) -> tuple[NextStep, ...]:
        return advise_file(
            options.reference,
            options.other,
            data,
            verdict,
            # Without a command there is nothing to try.
            None if again is None else trial_settings,
            further,
            limit=SAMPLES if options.limit is None else None,
        )

    trial_settings = trying_of(options, seconds, configured, again)
    return advised(verdict, options, replace(trial_settings, gate=gate), attempt)


def _quantize_steps(
    steps: Iterable[NextStep], again: Namespace | None
) -> Iterator[NextStep]:
    """Yield changes of the quantization, as commands with the data of the comparison."""
    for step in steps if again is None else with_commands(steps, again):
        if not step.command:  # the step stays words
            yield step
            continue
        # The data judges here; calibrated on it, the next comparison would be optimistic.
        note = "; calibrate on other samples of the same kind where there are some"
        yield replace(step, effect=step.effect + note)


def _words(options: Namespace) -> list[str] | None:
    """Return the words of a command that quantizes like the compared model was quantized.

    None if the format of the model has no preset.
    """
    try:
        model = load(options.other)
    # The model was compared before, so that this is rare; advice must not fail the command.
    except QuarkError:
        return None
    settings = settings_of_model(model)
    config = None if settings is None else settings.config
    preset = _preset(settings) if config is None else preset_of(config)
    if preset not in PRESETS:
        return None
    other = Path(options.other)
    # Beside the compared model, which stays.
    output = other.with_name(f"{other.stem}_next{other.suffix}")
    words = ["quantize", str(options.reference), "-o", str(output)]
    words += data_words(options)
    if options.limit is None:
        words += ["--limit", str(SAMPLES)]
    if options.task != "auto":
        words += ["--task", options.task]
    words += engine_words(options)
    words += ["--preset", preset]
    return words if config is None else [*words, *_changes(config, preset)]


def _changes(config: QConfig, preset: str) -> Iterator[str]:
    """Yield the options that make a configuration of its preset."""
    usual = QConfig.of(preset)
    if config.target:
        yield from ("--target", config.target)
    optimizers = [
        optimizer
        for optimizer in config.optimizers
        if optimizer not in usual.optimizers
    ]
    if optimizers:
        yield from ("--optimize", *map(format_call, optimizers))
    activation, weight = config.activation, config.weight
    if activation is not None and activation != usual.activation:
        yield from ("--calibrator", format_calibrator(activation.calibrator))
    if weight is not None and weight != usual.weight:
        yield "--per-channel" if weight.per_channel else "--per-tensor"
    for name in ("exclude", "op_types", "nodes"):
        if patterns := getattr(config, name):
            yield from (f"--{name.replace('_', '-')}", *patterns)


def _preset(settings: AdvisedSettings | None) -> str:
    if settings is None:
        return ""
    return _PRESETS.get((settings.activation, settings.weight), "")
