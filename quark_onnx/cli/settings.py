"""The options that make a QConfig: a preset or a file, and what is changed of it."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

from quark_onnx.cli.parsing import Parser, count, number
from quark_onnx.config import QConfig
from quark_onnx.optimizers import AutoMixedPrecision
from quark_onnx.registry import TARGETS
from quark_onnx.report.verdict import TASKS


def add_config_options(parser: Parser) -> None:
    group = parser.add_argument_group(
        "settings",
        "What is not given stays as the preset or the file has it.",
    )
    group.add_argument(
        "--config",
        metavar="PRESET|FILE.yaml",
        default="A8W8",
        help="a preset, see 'quark-onnx list presets', or a YAML file (default: A8W8)",
    )
    group.add_argument(
        "--calibrator",
        metavar="NAME[:SETTING=VALUE,...]",
        help=(
            "how the ranges of activations are found, for instance"
            " percentile:percentile=99.9; see 'quark-onnx list calibrators'"
        ),
    )
    what = group.add_mutually_exclusive_group()
    what.add_argument(
        "--weights-only",
        action="store_true",
        help="activations stay float; no data is needed",
    )
    what.add_argument(
        "--dynamic",
        action="store_true",
        help=(
            "activations become uint8 with scales that each run computes; no data is"
            " needed"
        ),
    )
    granularity = group.add_mutually_exclusive_group()
    granularity.add_argument(
        "--per-channel",
        action="store_true",
        default=None,
        help="one scale for each output channel of a weight: more accurate",
    )
    granularity.add_argument(
        "--per-tensor",
        dest="per_channel",
        action="store_false",
        default=None,
        help="one scale for a whole weight",
    )
    group.add_argument(
        "--exclude",
        metavar="PATTERN",
        nargs="+",
        action="extend",
        help=(
            "nodes that stay float: names, globs ('/head/*') or regular expressions"
            " ('re:^/head/'); added to those of a file"
        ),
    )
    group.add_argument(
        "--op-types",
        metavar="TYPE",
        nargs="+",
        action="extend",
        help="quantize these operators only: Conv MatMul",
    )
    group.add_argument(
        "--nodes",
        metavar="PATTERN",
        nargs="+",
        action="extend",
        help="quantize these nodes only; patterns as above",
    )
    group.add_argument(
        "--optimize",
        metavar="NAME[:SETTING=VALUE,...]",
        nargs="+",
        action="extend",
        help=(
            "optimizers that make the result better, in this order; see 'quark-onnx"
            " list optimizers'"
        ),
    )
    group.add_argument(
        "--unsafe",
        action="store_true",
        help=(
            "quantize also what few bits are known to ruin, and what is left float"
            " otherwise: the decoding of detectors, whose coordinates need more bits,"
            " joins of very different ranges, and the residual stream around layer"
            " normalizations"
        ),
    )
    _add_graph_options(parser)


def _add_graph_options(parser: Parser) -> None:
    group = parser.add_argument_group(
        "graph",
        "What is done to the graph, and how the result is written.",
    )
    group.add_argument(
        "--keep-existing",
        action="store_true",
        help=(
            "go on with a model that is quantized in part, and leave that part as it is"
        ),
    )
    group.add_argument(
        "--keep-initializer-inputs",
        action="store_true",
        help=(
            "initializers that are also inputs stay inputs, and float (default: they"
            " become constants)"
        ),
    )
    group.add_argument(
        "--form",
        metavar="FORM",
        help=(
            "how the result is written: qdq, Q/DQ pairs; operators, those that compute"
            " on codes, where there are any; or vendor, AMD's own pairs"
        ),
    )
    group.add_argument(
        "--max-opset",
        metavar="N",
        type=count,
        help="do not raise the model's opset beyond this one (default: no limit)",
    )
    group.add_argument(
        "--target",
        metavar="NAME",
        help=(
            f"what the result is for: {', '.join(TARGETS)}; XINT8 scales then meet its"
            " rules (default: any runtime)"
        ),
    )
    group.add_argument(
        "--keep-sizes",
        action="store_true",
        help=(
            "with --target, a batch of any size stays one (default: it becomes 1, as"
            " the target's compiler wants)"
        ),
    )
    group.add_argument(
        "--accuracy-level",
        metavar="N",
        type=count,
        help=(
            "the lowest precision that MatMulNBits may compute in: 1 float32, 2"
            " float16, 3 bfloat16, 4 int8 (default: onnxruntime chooses)"
        ),
    )
    group.add_argument(
        "--no-functions",
        action="store_true",
        help=(
            "nodes of a vendor's domain carry no body of standard operators, for"
            " targets that refuse one; such a model runs only where the vendor's"
            " operators are known"
        ),
    )
    group.add_argument(
        "--no-prepare",
        action="store_true",
        help=(
            "leave the float graph as it is: no constant folding, no BatchNormalization"
            " into Conv"
        ),
    )


def add_mixing_options(parser: Parser) -> None:
    group = parser.add_argument_group(
        "mixed precision",
        "As few nodes as possible are quantized less, so that every output has at least"
        " DB dB of SQNR.",
    )
    either = group.add_mutually_exclusive_group()
    for flag, kind, what in (
        ("--auto-exclude", "float", "stay float"),
        ("--auto-mixed", "16bit", "get 16 bits"),
    ):
        either.add_argument(
            flag,
            metavar="DB",
            type=number,
            help=(
                f"the nodes that few bits serve worst {what}; short for --optimize "
                f"auto_mixed_precision:target=DB,to={kind} in front of other optimizers"
            ),
        )


def add_gate_option(parser: Parser, consequence: str) -> None:
    parser.add_argument(
        "--min-sqnr",
        metavar="DB",
        type=number,
        help=(
            "the least signal-to-noise ratio of any output, in dB; below it"
            f" {consequence} and the exit code is 1"
        ),
    )


def add_task_option(parser: Parser) -> None:
    parser.add_argument(
        "--task",
        choices=["auto", *TASKS],
        default="auto",
        help="task of the model, for the verdict (default: auto, found from the outputs)",
    )


def config_of(options: Namespace) -> QConfig:  # noqa: C901
    """The effective configuration.

    Raises:
        ConfigError: a name is unknown or a setting is wrong.
    """
    config = QConfig.of(options.config)
    changes: dict[str, Any] = {
        name: value
        for name in (
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
        if (value := getattr(options, name, None)) is not None
    }
    if options.exclude:
        changes["exclude"] = (*config.exclude, *options.exclude)
    mixing = tuple(
        AutoMixedPrecision(target=target, to=kind)
        for name, kind in (("auto_exclude", "float"), ("auto_mixed", "16bit"))
        if (target := getattr(options, name, None)) is not None
    )
    if mixing or options.optimize:
        changes["optimizers"] = (*mixing, *config.optimizers, *(options.optimize or ()))
    if options.unsafe:
        changes["safe"] = False
    if options.weights_only:
        changes |= {"activation": None, "form": options.form or "operators"}
    if options.dynamic:
        changes |= {
            "activation": QConfig.of("DYNAMIC").activation,
            "form": options.form or "operators",
        }
    if options.keep_existing:
        changes["keep_existing"] = True
    if options.keep_initializer_inputs:
        changes["keep_initializer_inputs"] = True
    if options.keep_sizes:
        changes["fix_sizes"] = False
    if options.no_functions:
        changes["functions"] = False
    if options.no_prepare:
        changes["prepare"] = False
    return config.with_(**changes)
