"""Options of a QConfig: a preset or a file, and changes to it."""

from __future__ import annotations

import warnings
from argparse import ArgumentTypeError, Namespace
from collections.abc import Iterable
from pathlib import Path

from calibrators import CALIBRATORS
from quark_onnx.cli.parsing import (
    Parser,
    complete,
    count,
    input_name,
    input_path,
    number,
)
from quark_onnx.common.errors import ConfigError
from quark_onnx.common.registry import OPTIMIZERS, PRESETS, TARGETS
from quark_onnx.config import QConfig, TensorOverride
from quark_onnx.config.tensors import tensor_calibrator
from quark_onnx.optimizers import AutoMixedPrecision
from quark_onnx.report.verdict import TASKS

#: Value of --recipe for an automatic choice.
AUTO = "auto"
#: Preset without --preset, --config, --recipe and --target.
PRESET = "A8W8"


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
    base.add_argument(
        "--config",
        metavar="FILE.yaml",
        type=input_name,
        help="YAML file with all settings, in place of a preset",
    )
    if recipes:
        base.add_argument(
            "--recipe",
            choices=[AUTO, *recipes],
            metavar="NAME",
            help="settings by model type (auto detects it), see 'quark-onnx list recipes'",
        )
    calibrator = group.add_argument(
        "--calibrator",
        metavar="NAME[:SETTING=VALUE,...]",
        help="how activation ranges are found, see 'quark-onnx list calibrators'",
    )
    complete(calibrator, CALIBRATORS)
    group.add_argument(
        "--tensor-calibrator",
        metavar="TENSOR=NAME[:SETTING=VALUE,...]",
        type=_tensor_calibrator,
        nargs="+",
        action="extend",
        help="calibrator of single tensors: names or globs",
    )
    what = group.add_mutually_exclusive_group()
    what.add_argument(
        "--weights-only",
        action="store_true",
        help="activations stay float; needs no data",
    )
    what.add_argument(
        "--dynamic",
        action="store_true",
        help="activation scales are computed at run time; needs no data",
    )
    granularity = group.add_mutually_exclusive_group()
    granularity.add_argument(
        "--per-channel",
        action="store_true",
        # None: neither option was given, and the preset decides.
        default=None,
        help="one scale per output channel of a weight (more accurate)",
    )
    granularity.add_argument(
        "--per-tensor",
        dest="per_channel",
        action="store_false",
        default=None,
        help="one scale per weight tensor",
    )
    group.add_argument(
        "--exclude",
        metavar="PATTERN",
        nargs="+",
        action="extend",
        help="nodes that stay float: names, globs ('/head/*') or 're:REGEX'",
    )
    group.add_argument(
        "--op-types",
        metavar="TYPE",
        nargs="+",
        action="extend",
        help="quantize only these operator types, such as Conv MatMul",
    )
    group.add_argument(
        "--nodes",
        metavar="PATTERN",
        nargs="+",
        action="extend",
        help="quantize only these nodes; patterns as for --exclude",
    )
    optimize = group.add_argument(
        "--optimize",
        metavar="NAME[:SETTING=VALUE,...]",
        nargs="+",
        action="extend",
        help="accuracy optimizers, in this order; see 'quark-onnx list optimizers'",
    )
    complete(optimize, OPTIMIZERS)
    group.add_argument(
        "--no-equalize",
        action="store_true",
        help="leave out cle, which runs by default where the structure calls for it",
    )
    group.add_argument(
        "--unsafe",
        action="store_true",
        help="also quantize what 8 bits degrade: box decoding, unequal Concats, residuals",
    )
    _add_graph_options(parser)


def _add_graph_options(parser: Parser) -> None:
    group = parser.add_argument_group("graph", "Rewrites, and the form of the result.")
    group.add_argument(
        "--keep-existing",
        action="store_true",
        help="accept a partly quantized model and keep its Q/DQ pairs",
    )
    group.add_argument(
        "--keep-initializer-inputs",
        action="store_true",
        help="initializers that are also inputs stay inputs, in float",
    )
    group.add_argument(
        "--form",
        metavar="FORM",
        help="qdq (Q/DQ pairs), operators (integer operators) or vendor (AMD's pairs)",
    )
    group.add_argument(
        "--max-opset",
        metavar="N",
        type=count,
        help="highest opset of the result; no limit unless given",
    )
    target = group.add_argument(
        "--target",
        metavar="NAME",
        help=f"NPU whose rules the result meets: {', '.join(TARGETS)}",
    )
    complete(target, TARGETS)
    group.add_argument(
        "--keep-sizes",
        action="store_true",
        help="with --target: keep a dynamic batch; broken rules are then no errors",
    )
    group.add_argument(
        "--accuracy-level",
        metavar="N",
        type=count,
        help="least MatMulNBits precision: 1 float32, 2 float16, 3 bfloat16, 4 int8",
    )
    group.add_argument(
        "--no-functions",
        action="store_true",
        help="vendor operators carry no ONNX function body",
    )
    group.add_argument(
        "--no-prepare",
        action="store_true",
        help="no constant folding and no BatchNormalization folding",
    )


def _tensor_calibrator(text: str) -> TensorOverride:
    try:
        return tensor_calibrator(text)
    except ConfigError as error:
        raise ArgumentTypeError(str(error)) from error


def add_mixing_options(parser: Parser) -> None:
    group = parser.add_argument_group(
        "mixed precision",
        "Raise every output to DB dB of SQNR by changing as few nodes as possible.",
    )
    either = group.add_mutually_exclusive_group()
    for flag, what in (
        ("--auto-exclude", "keep the most sensitive nodes in float"),
        ("--auto-mixed", "give the most sensitive nodes 16 bits"),
    ):
        either.add_argument(flag, metavar="DB", type=number, help=what)


def add_gate_option(
    parser: Parser,
    consequence: str,
    default: float | None = None,
) -> None:
    parser.add_argument(
        "--min-sqnr",
        metavar="DB",
        type=number,
        default=default,
        help=f"minimum SQNR of any output in dB; below, {consequence}",
    )


def add_task_option(parser: Parser) -> None:
    parser.add_argument(
        "--task",
        metavar="TASK",
        choices=["auto", *TASKS],
        default="auto",
        help="task for the verdict, such as classifier or signal; auto: from the outputs",
    )


def add_advice_option(parser: Parser) -> None:
    parser.add_argument(
        "--advice",
        choices=["none", "list", "try"],
        metavar="HOW",
        help="none, list or try changes that may help; try unless the verdict is good",
    )


def config_base(options: Namespace) -> str:
    """Return the name of the preset or the file that other settings change.

    A target has its own default, as it may not take that of other runtimes.

    Args:
        options: the options of the command.

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
        metavar="FILE",
        type=input_path,
        help="labels: CSV (name,label), COCO JSON, or class names (.txt) in the model's order",
    )


#: Options with the name and the value of a setting.
_VALUES = (
    "calibrator",
    "per_channel",
    "op_types",
    "nodes",
    "form",
    "target",
    "accuracy_level",
    "max_opset",
    "min_sqnr",
)
#: Settings and their values by the option that chooses the value.
SWITCHES = {
    "no_equalize": ("equalize", False),
    "unsafe": ("safe", False),
    "keep_existing": ("keep_existing", True),
    "keep_initializer_inputs": ("keep_initializer_inputs", True),
    "keep_sizes": ("fix_sizes", False),
    "no_functions": ("functions", False),
    "no_prepare": ("prepare", False),
}


#: Formats of the nodes that mixed precision changes, by option.
_MIXED = {"auto_exclude": "float", "auto_mixed": "16bit"}


def _mixing(options: Namespace) -> list[AutoMixedPrecision]:
    """Return the optimizers that ``add_mixing_options`` asks for; a command may lack these."""
    optimizers = list[AutoMixedPrecision]()
    for name, kind in _MIXED.items():
        target = getattr(options, name, None)
        if target is not None:
            optimizers.append(AutoMixedPrecision(target=target, to=kind))
    return optimizers


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
    # None stands for options that were not given, or that the command lacks.
    given = {name: getattr(options, name, None) for name in _VALUES}
    changes = {name: value for name, value in given.items() if value is not None}
    # Every command with these options has all of them.
    for name, (setting, value) in SWITCHES.items():
        if getattr(options, name):
            changes[setting] = value
    if options.tensor_calibrator:
        changes["tensors"] = (*config.tensors, *options.tensor_calibrator)
    if options.exclude:
        # Patterns are added to those of the preset; other values replace the preset's.
        changes["exclude"] = (*config.exclude, *options.exclude)
    mixing = _mixing(options)
    if mixing or options.optimize:
        changes["optimizers"] = (*mixing, *config.optimizers, *(options.optimize or ()))
    if options.weights_only:
        changes |= {"activation": None, "form": options.form or "operators"}
    if options.dynamic:
        changes |= {
            "activation": QConfig.of("DYNAMIC").activation,
            "form": options.form or "operators",
        }
    return config.with_(**changes)
