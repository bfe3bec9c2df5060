"""Options of a QConfig: a preset or a file, and changes to it."""

from __future__ import annotations

import argparse
import warnings
from argparse import ArgumentTypeError, Namespace
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from calibrators import CALIBRATORS
from quark_onnx.cli.field_options import CALL, FieldOption
from quark_onnx.cli.parsing import (
    Parser,
    complete,
    input_name,
    input_path,
    number,
)
from quark_onnx.common.errors import ConfigError
from quark_onnx.common.registry import (
    OPTIMIZERS,
    PRESETS,
    RECIPES,
    TARGETS,
    Registry,
)
from quark_onnx.config import QConfig, QuantizationSpec, TensorOverride
from quark_onnx.config.tensors import tensor_calibrator
from quark_onnx.optimizers import AutoMixedPrecision
from quark_onnx.recipes import Choice, choose
from quark_onnx.report.verdict import TASKS

#: Value of --recipe for an automatic choice.
AUTO = "auto"
#: Preset without --preset, --config, --recipe and --target.
PRESET = "A8W8"


def _tensor_calibrator(text: str) -> TensorOverride:
    try:
        return tensor_calibrator(text)
    except ConfigError as error:
        raise ArgumentTypeError(str(error)) from error


_OPTIONS = (
    FieldOption(
        "--calibrator",
        QuantizationSpec,
        "calibrator",
        " for activations; see 'quark-onnx list calibrators'",
        names=CALIBRATORS,
        metavar=CALL,
    ),
    FieldOption(
        "--tensor-calibrator",
        TensorOverride,
        "calibrator",
        ", for tensors by name or glob",
        dest="tensors",
        metavar=f"TENSOR={CALL}",
        type=_tensor_calibrator,
        nargs="+",
        action="extend",
    ),
    FieldOption("--per-channel", QuantizationSpec, "per_channel", const=True),
    FieldOption("--per-tensor", QuantizationSpec, "per_channel", const=False),
    FieldOption("--exclude", QConfig, "exclude", metavar="PATTERN"),
    FieldOption("--op-types", QConfig, "op_types", metavar="TYPE"),
    FieldOption("--nodes", QConfig, "nodes", metavar="PATTERN"),
    FieldOption(
        "--optimize",
        QConfig,
        "optimizers",
        "; see 'quark-onnx list optimizers'",
        names=OPTIMIZERS,
        dest="optimizers",
        metavar=CALL,
    ),
    FieldOption("--no-equalize", QConfig, "equalize", const=False),
    FieldOption("--unsafe", QConfig, "safe", const=False),
    FieldOption("--keep-existing", QConfig, "keep_existing", const=True),
    FieldOption(
        "--keep-initializer-inputs", QConfig, "keep_initializer_inputs", const=True
    ),
    FieldOption("--form", QConfig, "form", metavar="FORM"),
    FieldOption("--max-opset", QConfig, "max_opset", "; no limit unless given"),
    FieldOption("--target", QConfig, "target", names=TARGETS, metavar="NAME"),
    FieldOption("--keep-sizes", QConfig, "fix_sizes", const=False),
    FieldOption("--accuracy-level", QConfig, "accuracy_level"),
    FieldOption("--no-functions", QConfig, "functions", const=False),
    FieldOption("--no-prepare", QConfig, "prepare", const=False),
    FieldOption("--min-sqnr", QConfig, "min_sqnr", metavar="DB"),
)
#: Options that set fields of a QConfig, by name. The destination of an option is the setting that
#: ``QConfig.with_`` takes.
OPTIONS = {option.flag: option for option in _OPTIONS}
#: Settings whose values are added to those of the preset or the file; others replace them.
_ADDED = ("tensors", "exclude", "optimizers")


def add_config_options(
    parser: Parser,
    note: str = f"; {PRESET}, or the first of --target",
    recipes: Iterable[str] = (),
) -> None:
    """Add the options of a configuration.

    Args:
        parser: the parser of the command.
        note: text after the help of --preset.
        recipes: names for --recipe besides "auto"; without names the option does not exist.
    """
    group = parser.add_argument_group(
        "settings",
        "What is not given stays as in the preset or the file.",
    )
    base = group.add_mutually_exclusive_group()
    named = base.add_argument(
        "--preset",
        metavar="NAME",
        type=input_name,
        help=f"preset, see 'quark-onnx list presets'{note}",
    )
    complete(named, PRESETS)
    add_config_file_option(base)
    if recipes:
        base.add_argument(
            "--recipe",
            choices=[AUTO, *recipes],
            metavar="NAME",
            help="settings by model type (auto detects it), see 'quark-onnx list recipes'",
        )
    _add(group, "--calibrator", "--tensor-calibrator")
    activations = group.add_mutually_exclusive_group()
    activations.add_argument(
        "--weights-only",
        action="store_true",
        help="activations stay float; needs no data",
    )
    activations.add_argument(
        "--dynamic",
        action="store_true",
        help="activation scales are computed at run time; needs no data",
    )
    granularity = group.add_mutually_exclusive_group()
    _add(granularity, "--per-channel", "--per-tensor")
    _add(group, "--exclude", "--op-types", "--nodes", "--optimize")
    _add(group, "--no-equalize", "--unsafe")
    group = parser.add_argument_group("graph", "Rewrites, and the form of the result.")
    _add(group, "--keep-existing", "--keep-initializer-inputs", "--form", "--max-opset")
    add_target_option(group)
    _add(group, "--keep-sizes", "--accuracy-level", "--no-functions", "--no-prepare")


def _add(group: argparse._ActionsContainer, *flags: str) -> None:
    for flag in flags:
        OPTIONS[flag].add(group)


def add_config_file_option(group: argparse._ActionsContainer) -> None:
    group.add_argument(
        "--config",
        metavar="FILE.yaml",
        type=input_name,
        help="YAML file with all settings, in place of a preset",
    )


def add_target_option(group: argparse._ActionsContainer) -> None:
    OPTIONS["--target"].add(group, note=": see 'quark-onnx list targets'")


def add_mixing_options(parser: Parser) -> None:
    group = parser.add_argument_group(
        "mixed precision",
        "Raise every output to DB dB of SQNR by changing as few nodes as possible.\n"
        "Where the target is missed, a model is made for each node and for up to about 40 choices.",
    )
    either = group.add_mutually_exclusive_group()
    for flag, what in (
        ("--auto-exclude", "keep the most sensitive nodes in float"),
        ("--auto-mixed", "give the most sensitive nodes 16 bits"),
    ):
        either.add_argument(flag, metavar="DB", type=number, help=what)


def add_gate_option(parser: Parser, consequence: str) -> None:
    OPTIONS["--min-sqnr"].add(parser, note=f"; below, {consequence}")


def add_task_option(parser: Parser) -> None:
    parser.add_argument(
        "--task",
        metavar="TASK",
        choices=["auto", *TASKS],
        default="auto",
        help="task for the verdict, such as classifier or signal; auto: from the outputs",
    )


def add_advice_option(parser: argparse._ActionsContainer) -> None:
    parser.add_argument(
        "--advice",
        choices=["none", "list", "try"],
        metavar="HOW",
        help="none, list or try changes that may help; try unless the verdict is good",
    )


def config_base(options: Namespace) -> str:
    """Return the name of the preset or the file that other settings change.

    A target has its own default, as it may not take that of other runtimes.

    Raises:
        ConfigError: the target is unknown.
    """
    if options.config is None:
        if options.preset is None and options.target is not None:
            return str(TARGETS[options.target].presets[0])
        return str(options.preset or PRESET)
    # An earlier version took names of presets here.
    if not Path(options.config).suffix:
        warnings.warn(
            f"--config takes a YAML file; write --preset {options.config}",
            stacklevel=2,
        )
    return str(options.config)


def add_labels_option(parser: Parser) -> None:
    parser.add_argument(
        "--labels",
        metavar="PATH",
        type=input_path,
        help="labels: CSV (name,label), COCO JSON, folder of YOLO .txt, or class names (.txt)",
    )


#: Formats of the nodes that mixed precision changes, by option.
_MIXED = {"auto_exclude": "float", "auto_mixed": "16bit"}


def given_options(options: Namespace) -> Iterator[FieldOption]:
    """Yield the options of ``OPTIONS`` that were given."""
    for option in OPTIONS.values():
        value = getattr(options, option.dest, None)
        # Two switches of one field have one destination.
        if value is not None and value == option.arguments.get("const", value):
            yield option


def config_of(options: Namespace, base: QConfig | None = None) -> QConfig:
    """Return the effective configuration.

    Args:
        options: the options of the command.
        base: configuration that the options change; None for --preset or --config.

    Raises:
        ConfigError: a name is unknown or a setting is wrong.
    """
    # A recipe is a base of its own, in place of --preset and --config.
    config = QConfig.of(config_base(options)) if base is None else base
    changes = dict[str, Any]()
    for option in given_options(options):
        value = getattr(options, option.dest)
        if option.dest in _ADDED:
            value = (*getattr(config, option.dest), *value)
        changes[option.dest] = value
    # A command may lack the options of mixed precision.
    mixing = [
        AutoMixedPrecision(target=bound, to=kind)
        for name, kind in _MIXED.items()
        if (bound := getattr(options, name, None)) is not None
    ]
    if mixing:
        optimizers = changes.get("optimizers", config.optimizers)
        changes["optimizers"] = (*mixing, *optimizers)
    if options.weights_only or options.dynamic:
        dynamic = QConfig.of("DYNAMIC").activation
        changes["activation"] = dynamic if options.dynamic else None
        changes.setdefault("form", "operators")
    return config.with_(**changes)


def configured(
    options: Namespace,
    target: str = "",
    recipes: Registry[Any] = RECIPES,
    choosing: Callable[[Path, str], Choice] = choose,
) -> tuple[Choice | None, QConfig]:
    """Return the requested recipe, and the configuration of a command with --recipe.

    Args:
        options: the options of the command.
        target: the target; that of the options unless given.
        recipes: the recipes by name.
        choosing: returns the recipe for a model and a target.
    """
    target = target or options.target or ""
    choice = None
    if options.recipe == AUTO:
        choice = choosing(options.model, target)
    elif options.recipe is not None:
        recipe = recipes[options.recipe]
        # The user chose the recipe; only another preset has a reason.
        choice = Choice(recipe, recipe.config_for(target), recipe.instead(target))
    return choice, config_of(options, None if choice is None else choice.config)
