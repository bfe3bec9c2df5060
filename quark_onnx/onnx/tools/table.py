"""Tools of AMD Quark for ONNX, and their counterparts in this package."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import numpy_helper
from onnx.helper import tensor_dtype_to_np_dtype

from calibrators.readers.open import RandomData
from quark_onnx.api import quantize
from quark_onnx.common.errors import ConfigError, DataError, QuarkError
from quark_onnx.common.wording import counted
from quark_onnx.config import QConfig as Native
from quark_onnx.convert import convert
from quark_onnx.files.io import load, staged
from quark_onnx.graph import Graph
from quark_onnx.onnx.layout import convert_nchw_to_nhwc
from quark_onnx.onnx.option_effects import input_shapes, parse_shapes
from quark_onnx.onnx.quantization.config.config import QConfig
from quark_onnx.onnx.run import run

#: Function that runs a tool with its options.
Action = Callable[[argparse.Namespace], None]


@dataclass(frozen=True)
class Tool:
    """A tool.

    Attributes:
        name: name of the module.
        action: function that runs the tool; None for a tool that does not exist here.
        instead: the alternative for a tool that does not exist.
        options: options besides the two models, with their defaults.
    """

    name: str
    action: Action | None
    instead: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)


def main(name: str, arguments: Sequence[str] | None = None) -> int:
    """Run a tool; return the exit code.

    Args:
        name: name of the tool.
        arguments: arguments of the command line; None for those of the process.
    """
    tool = TOOLS[name]
    # The exit code of argparse for a wrong call.
    if tool.action is None:
        print(f"{name} does not exist here: {tool.instead}", file=sys.stderr)
        return 2
    options = _parse(tool, arguments)
    try:
        tool.action(options)
    # A file that does not exist, or cannot be written.
    except (QuarkError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _parse(tool: Tool, arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the options.

    Models may be given by any of AMD's options, or as positional arguments.
    """
    parser = argparse.ArgumentParser(
        prog=f"python -m quark_onnx.onnx.tools.{tool.name}",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--input",
        "--input_model",
        "--input_model_path",
        dest="input",
        type=Path,
    )
    parser.add_argument(
        "--output",
        "--output_model",
        "--output_model_path",
        dest="output",
        type=Path,
    )
    parser.add_argument(
        "--quantized_model_path",
        dest="output",
        type=Path,
        help=argparse.SUPPRESS,
    )
    parser.add_argument(
        "--save_as_external_data",
        "--external_data",
        action="store_true",
        dest="external",
    )
    for name, default in tool.options.items():
        # Flags of AMD's tools have no value.
        if isinstance(default, bool):
            parser.add_argument(f"--{name}", action="store_true", default=default)
        else:
            parser.add_argument(f"--{name}", type=type(default), default=default)
    parser.add_argument("models", nargs="*")
    options = parser.parse_args(arguments)
    # Positional models fill what no option has named.
    models = list(options.models)
    if options.input is None and models:
        options.input = Path(models.pop(0))
    # AMD's order: INPUT OPSET OUTPUT.
    if tool.name == "convert_opset_version" and models and models[0].isdigit():
        options.target_opset = int(models.pop(0))
    if options.output is None and models:
        options.output = Path(models.pop(0))
    if models:
        parser.error(f"unexpected: {' '.join(models)}")
    return options


def _models(options: argparse.Namespace) -> tuple[Path, Path]:
    """Return the paths of the two models.

    Raises:
        ConfigError: a path is missing.
    """
    if options.input is None or options.output is None:
        raise ConfigError(
            "name the two models: INPUT OUTPUT, or --input INPUT --output OUTPUT",
        )
    return options.input, options.output


def _conversion(
    name: str, **settings: Callable[[argparse.Namespace], object]
) -> Action:
    """Return an action that runs a conversion.

    Args:
        settings: its settings, as functions of the options.
    """

    def action(options: argparse.Namespace) -> None:
        source, target = _models(options)
        values: dict[str, Any] = {key: read(options) for key, read in settings.items()}
        convert(source, name, target, external=options.external, **values)

    return action


def _shapes_of_inputs(options: argparse.Namespace) -> dict[str, tuple[int, ...]]:
    return input_shapes(parse_shapes(options.fix_shapes), options.input)


def _custom_names(options: argparse.Namespace) -> None:
    source, target = _models(options)
    names = "vitis-names" if options.reverse_conversion else "quark-names"
    convert(source, names, target)


def _channels_last(options: argparse.Namespace) -> None:
    source, target = _models(options)
    with staged(convert_nchw_to_nhwc(source), target, external=options.external):
        pass


def _bfloat16(options: argparse.Namespace) -> None:
    """Quantize to bfloat16 with casts, AMD's Q/DQ operators, or bfloat16 operators.

    Raises:
        ConfigError: the format is unknown.
    """
    source, target = _models(options)
    config = Native.of("BF16")
    # All three names are AMD's. Casts simulate bfloat16 in stock onnxruntime; vendor operators need
    # AMD's library.
    configs = {
        "with_cast": config,
        "simulate_bf16": config,
        "customqdq": config.with_(form="vendor"),
    }
    if options.format == "bf16":
        convert(source, "bfloat16", target, io=True, external=options.external)
    elif options.format in configs:
        config = configs[options.format]
        quantize(source, None, config, target, external=options.external)
    else:
        raise ConfigError(
            f"format is {options.format!r}; it must be one of:"
            f" {', '.join([*configs, 'bf16'])}",
        )


def _block_floats(options: argparse.Namespace) -> None:
    source, target = _models(options)
    quantize(source, None, "BFP16", target, external=options.external)


def _to_text(options: argparse.Namespace) -> None:
    source, target = _models(options)
    onnx.save(onnx.load(source), target, format="textproto")


def _from_text(options: argparse.Namespace) -> None:
    source, target = _models(options)
    onnx.save(onnx.load(source, format="textproto"), target)


def _random(options: argparse.Namespace) -> None:
    """Quantize by a preset, with random data."""
    source, target = _models(options)
    config = QConfig.get_default_config(options.config)
    draft = config.global_quant_config.draft()
    # Appended to those of the preset.
    draft.exclude += [
        name.strip() for name in options.exclude_nodes.split(";") if name.strip()
    ]
    draft.exclude += _subgraphs(options.exclude_subgraphs)
    draft.external = options.external
    run(draft, source, RandomData(), target)


def _subgraphs(text: str) -> list[Any]:
    """Parse pairs of start and end nodes, as in ``"[a,b],[c];[d],[e]"``.

    >>> _subgraphs("[a,b],[c];[d],[e]")
    [(['a', 'b'], ['c']), (['d'], ['e'])]
    """
    pairs: list[Any] = []
    # Semicolons separate subgraphs, commas separate nodes.
    for subgraph in filter(None, text.split(";")):
        ends = [
            [name.strip() for name in end.split(",")]
            for end in subgraph.strip().strip("[]").split("],[")
        ]
        if len(ends) != 2:
            raise ConfigError(
                f"{subgraph!r} is no subgraph; write [start nodes],[end nodes]",
            )
        pairs.append((ends[0], ends[1]))
    return pairs


def _without_initializers(options: argparse.Namespace) -> None:
    """Remove initializers from the inputs."""
    source, target = _models(options)
    model = onnx.load(source)
    constants = {tensor.name for tensor in model.graph.initializer}
    kept = [
        value_info
        for value_info in model.graph.input
        if value_info.name not in constants
    ]
    del model.graph.input[:]
    model.graph.input.extend(kept)
    # Before IR version 4, every initializer had to be an input.
    model.ir_version = max(model.ir_version, 4)
    onnx.save(model, target)


def _finite_weights(options: argparse.Namespace) -> None:
    """Replace infinite values of float initializers."""
    source, target = _models(options)
    model = onnx.load(source)
    count = 0
    for tensor in model.graph.initializer:
        array = numpy_helper.to_array(tensor)
        # Masks hold infinity on purpose, but a scale that covers infinity does not exist.
        if array.dtype.kind == "f" and np.isinf(array).any():
            limit = options.replace_inf_value
            array = np.clip(array, -limit, limit).astype(array.dtype)
            tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))
            count += 1
    onnx.save(model, target)
    print(f"{counted(count, 'initializer')} had infinite values")


def _print_widths(options: argparse.Namespace) -> None:
    """List nodes by the widths of their activations and weights."""
    if options.input is None:
        raise ConfigError("name the model")
    names_by_format: dict[str, list[str]] = {"A16W8": [], "A8W8": []}
    graph = Graph.of(load(options.input))
    for node in graph.nodes:
        if node.op_type not in ("Conv", "ConvTranspose", "Gemm", "MatMul"):
            continue
        bits = [_bits(graph, name) for name in node.inputs[:2]]
        # Activations first, then weights: the names of AMD's formats.
        if bits[1] == 8 and bits[0] in (8, 16):
            names_by_format[f"A{bits[0]}W8"].append(node.name)
    for name, nodes in names_by_format.items():
        print(f"{name}: {len(nodes)} nodes")
        for node_name in nodes:
            print(f"  {node_name}")


def _bits(graph: Graph, tensor: str) -> int:
    """Return the code width of a dequantized tensor; 0 for other tensors."""
    # A dequantized tensor: its codes, one node up, have the type.
    node = graph.producer(tensor)
    if node is None or node.op_type != "DequantizeLinear":
        return 0
    kind = graph.elem_type(node.inputs[0])
    if not kind:
        return 0
    # numpy stores a 4-bit code in a byte.
    if kind in (onnx.TensorProto.INT4, onnx.TensorProto.UINT4):
        return 4
    return 8 * tensor_dtype_to_np_dtype(kind).itemsize


def _evaluate(options: argparse.Namespace) -> None:
    """Compare two folders of arrays by cosine similarity, L2 distance and PSNR."""
    baseline = Path(options.baseline_results_folder)
    quantized = Path(options.quantized_results_folder)
    names = sorted(path.name for path in baseline.glob("*.npy"))
    if not names:
        raise DataError(f"{baseline}: there is no .npy file")
    for name in names:
        if not (quantized / name).exists():
            raise DataError(f"{quantized}: there is no {name}")
        a, b = (
            np.load(folder / name, allow_pickle=False).astype(np.float64).ravel()
            for folder in (baseline, quantized)
        )
        # float64, and flat: only values count, not shapes.
        norms = np.linalg.norm(a) * np.linalg.norm(b)
        error = np.linalg.norm(a - b)
        if error:
            # PSNR = 20 log10(peak / RMSE), with RMSE = L2 / sqrt(n).
            peak = 20 * np.log10(np.abs(a).max() * np.sqrt(a.size) / error)
        else:
            peak = np.inf
        print(
            f"{name}: cosine {a @ b / norms if norms else 1.0:.6f}, L2 {error:.6g},"
            f" PSNR {peak:.2f} dB",
        )


_EXCLUDE = "leave the nodes out: exclude, or Override(keep=True)"
_ROWS = (
    Tool("convert_bias_int32_to_int16", _conversion("int16-biases")),
    Tool("convert_custom_ops", _custom_names, options={"reverse_conversion": False}),
    Tool("convert_customqdq_to_qdq", _conversion("standard-qdq")),
    *(
        Tool(
            name,
            _conversion("fixed-shapes", shapes=_shapes_of_inputs),
            options={"fix_shapes": ""},
        )
        for name in ("convert_dynamic_to_fixed", "fix_shapes")
    ),
    *(
        Tool(name, _bfloat16, options={"format": "with_cast"})
        for name in ("convert_fp16_to_bf16", "convert_fp32_to_bf16")
    ),
    Tool("convert_fp16_to_bfp16", _block_floats),
    Tool("convert_fp32_to_bfp16", _block_floats),
    Tool("convert_fp16_to_fp32", _conversion("float32")),
    Tool(
        "convert_fp32_to_fp16",
        _conversion("float16", io=lambda options: not options.keep_io_types),
        options={
            "keep_io_types": False,
            "disable_shape_infer": False,
            "all_tensors_to_one_file": False,
            "not_simplify": False,
        },
    ),
    Tool("convert_nchw_to_nhwc", _channels_last),
    Tool("convert_onnx_to_onnxtxt", _to_text),
    Tool("convert_onnxtxt_to_onnx", _from_text),
    Tool(
        "convert_opset_version",
        _conversion("opset", opset=attrgetter("target_opset")),
        options={"target_opset": 20},
    ),
    Tool("convert_qdq_to_qop", _conversion("qdq-to-qoperator")),
    Tool("convert_quant_to_float", _conversion("without-qdq")),
    Tool("remove_qdq", _conversion("without-qdq")),
    Tool("convert_s8s8_to_u8s8", _conversion("u8s8")),
    Tool("convert_u16s8_to_s16s8", _conversion("s16s8")),
    Tool(
        "convert_shared_initializer_to_unique",
        _conversion("unique-initializers"),
        options={"op_types": ""},
    ),
    Tool(
        "evaluate",
        _evaluate,
        options={"baseline_results_folder": "", "quantized_results_folder": ""},
    ),
    Tool("print_a16w8_a8w8_nodes", _print_widths),
    Tool(
        "random_quantize",
        _random,
        options={"config": "XINT8", "exclude_nodes": "", "exclude_subgraphs": ""},
    ),
    Tool("remove_initializer_from_input", _without_initializers),
    Tool(
        "replace_inf_weights",
        _finite_weights,
        options={"replace_inf_value": 10000.0},
    ),
    Tool(
        "convert_a8w8_npu_to_a8w8_cpu",
        None,
        "quantize the float model again, without a target",
    ),
    Tool(
        "convert_lstm_to_customlstm",
        None,
        "an LSTM stays one of ONNX's own, which every runtime reads",
    ),
    Tool(
        "convert_resize_fs_to_pof2s",
        None,
        "quantize with power-of-two scales: the preset XINT8",
    ),
    Tool(
        "convert_u16u8_to_u8u8",
        None,
        "quantize the float model again, with the preset U8U8",
    ),
    Tool(
        "insert_clip_bfloat16_qdq",
        None,
        "casts to bfloat16 do not overflow where float32 is in range",
    ),
    Tool(
        "remove_bf16_cast",
        None,
        "give the provider the float32 model; it makes bfloat16 itself",
    ),
    Tool("remove_qdq_between_ops", None, _EXCLUDE),
    Tool("remove_qdq_mul_add", None, _EXCLUDE),
    Tool("replace_bfloat16_qdq_cast", None, "bfloat16 is written as Cast"),
    Tool(
        "save_tensor_hist",
        None,
        "use `quark-onnx analyze FLOAT QUANTIZED --html PAGE`",
    ),
    Tool(
        "save_weights_hist",
        None,
        "use `quark-onnx analyze FLOAT QUANTIZED --html PAGE`",
    ),
)

#: The tools by name.
TOOLS = {tool.name: tool for tool in _ROWS}
