"""Commands that quantize a model again, for advice after a comparison."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from quark_onnx.cli.data import add_data_options
from quark_onnx.cli.next_command import (
    analysis_step,
    changes_data,
    data_words,
    with_commands,
)
from quark_onnx.cli.parsing import Parser, add_output_option
from quark_onnx.cli.settings import add_config_options, add_mixing_options
from quark_onnx.common.errors import QuarkError
from quark_onnx.common.registry import PRESETS, RECIPES
from quark_onnx.config import QConfig
from quark_onnx.config.spec import format_calibrator
from quark_onnx.config.text import format_call
from quark_onnx.files.io import load
from quark_onnx.report.verdict import NextStep, Settings, Verdict
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
#: Number of samples to calibrate on, if the comparison has no limit.
_SAMPLES = "100"


def compared_with_commands(
    verdict: Verdict | None, options: Namespace
) -> Verdict | None:
    """Return the verdict of a comparison with complete command lines.

    Changes of the data belong to ``compare``, changes of the quantization to ``quantize``. The last
    step is the analysis.

    Args:
        verdict: the verdict; None for none.
        options: the options of ``compare``.
    """
    # Good figures need no advice, also of an unclear verdict, and random data gives none.
    if verdict is None or verdict.band in ("good", "unknown"):
        return verdict
    if verdict.band == "unclear" and not verdict.next_steps:
        return verdict
    step = analysis_step(options.reference, options.other, options)
    steps = requantized(verdict, options).next_steps
    return replace(verdict, next_steps=(*steps, step))


def requantized(verdict: Verdict, options: Namespace) -> Verdict:
    """Return a verdict with complete command lines for the data, or for another quantization.

    Args:
        verdict: the verdict on a quantized model.
        options: the options of a command with a float and a quantized model.
    """
    data_steps = [step for step in verdict.next_steps if changes_data(step)]
    commands = with_commands(data_steps, options)
    steps = (*commands, *_quantize_steps(verdict, options))
    return replace(verdict, next_steps=steps)


def _quantize_steps(verdict: Verdict, options: Namespace) -> Iterator[NextStep]:
    """Yield changes of the quantization, as commands with the data of the comparison."""
    steps = [step for step in verdict.next_steps if not changes_data(step)]
    # Without real data there is nothing to calibrate on: the steps stay words.
    words = _words(options) if steps and options.data is not None else None
    if words is None:
        yield from steps
        return
    # The options of quantize, to split its command line; compare's parser lacks most of them.
    parser = Parser("quark-onnx quantize", "")
    parser.add_argument("model")
    add_output_option(parser, "quantized")
    add_data_options(parser)
    add_config_options(parser, recipes=RECIPES)
    add_mixing_options(parser)
    # The values of the options of data are compare's own.
    run = Namespace(**{**vars(options), "words": words, "parser": parser})
    for step in with_commands(steps, run):
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
        words += ["--limit", _SAMPLES]
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


def _preset(settings: Settings | None) -> str:
    if settings is None:
        return ""
    return _PRESETS.get((settings.activation, settings.weight), "")
