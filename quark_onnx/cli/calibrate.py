"""quark-onnx calibrate: measure a model's ranges once for several quantizations."""

from __future__ import annotations

from argparse import Namespace
from time import perf_counter

from quark_onnx import api
from quark_onnx.cli.data import add_data_options, data_of
from quark_onnx.cli.engine import add_provider_option
from quark_onnx.cli.next_command import shell_line
from quark_onnx.cli.output import Answer
from quark_onnx.cli.parsing import (
    Parser,
    add_common_options,
    add_model_argument,
    input_name,
    output_file,
    progress_of,
)
from quark_onnx.cli.settings import OPTIONS, add_config_file_option, config_base
from quark_onnx.cli.workers import add_workers_option, workers
from quark_onnx.common.wording import counted
from quark_onnx.config import QConfig
from quark_onnx.measuring.range_files import FORMATS
from quark_onnx.page.blocks import Facts

NAME = "calibrate"
_PRESET = "A8W8"
SUMMARY = "measure the ranges of a model once, for many runs of quantize"
USAGE = "%(prog)s MODEL -o RANGES (--data PATH | --random-data [N]) [OPTION ...]"
EXAMPLE = """\
examples:
  quark-onnx calibrate model.onnx --data samples/ -o ranges.json
  quark-onnx quantize model.onnx -o model_int8.onnx --ranges ranges.json --calibrator percentile
  quark-onnx calibrate model.onnx --data samples/ -o model.cache --format tensorrt --calibrator entropy

exit codes: 0 done; 2 bad input; 3 internal error; 128 + N ended by signal N"""  # noqa: E501


def add_arguments(parser: Parser) -> None:
    add_model_argument(parser)
    parser.add_argument(
        "-o",
        "--output",
        metavar="RANGES",
        type=output_file,
        required=True,
        help="write the ranges here; an earlier file is replaced",
    )
    add_data_options(parser)
    group = parser.add_argument_group("ranges")
    base = group.add_mutually_exclusive_group()
    base.add_argument(
        "--preset",
        metavar="NAME",
        type=input_name,
        default=_PRESET,
        help="preset whose tensors are measured",
    )
    add_config_file_option(base)
    group.add_argument(
        "--format",
        choices=list(FORMATS),
        default="quark",
        help="file format; only quark serves every calibrator",
    )
    OPTIONS["--calibrator"].add(group, " for other formats; by default the preset's")
    add_workers_option(parser)
    add_provider_option(parser)
    add_common_options(parser)


def run(options: Namespace) -> Answer:
    # The preset decides which tensors are measured; formats of other programs need a calibrator,
    # too.
    config = QConfig.of(config_base(options))
    if options.calibrator is not None:
        config = config.with_(calibrator=options.calibrator)
    data = data_of(options)
    start = perf_counter()
    with workers(options.workers) as executor:
        ranges = api.calibrate(
            options.model,
            data,
            options.output,
            config=config,
            format=options.format,
            executor=executor,
            progress=progress_of(options),
        )
    seconds = perf_counter() - start
    tensors = counted(len(ranges), "tensor")
    lines = {
        "model": [f"{options.model} -> {options.output}, in {seconds:.1f} s"],
        "ranges": [f"{tensors}, {counted(ranges.samples, 'sample')}"],
    }
    # A file in another program's format is for that program.
    if options.format == "quark":
        lines["next"] = [shell_line(_next_words(options))]
    document = {
        "model": options.model,
        "output": options.output,
        "format": options.format,
        "seconds": round(seconds, 3),
        "samples": ranges.samples,
        "tensors": len(ranges),
    }
    return Answer([Facts((), lines)], document)


def _next_words(options: Namespace) -> list[str]:
    """Return the words of a command that quantizes the model with the ranges."""
    model = options.model
    output = model.with_name(f"{model.stem}_quantized.onnx")
    words = ["quark-onnx", "quantize", str(model), "-o", str(output)]
    words += ["--ranges", str(options.output)]
    # The settings that decided which tensors were measured.
    if options.config is not None:
        words += ["--config", str(options.config)]
    elif options.preset != _PRESET:
        words += ["--preset", options.preset]
    for library in options.custom_op_library:
        words += ["--custom-op-library", str(library)]
    return words
