"""quark-onnx llm oga: quantize a language model for onnxruntime-genai."""

from __future__ import annotations

from argparse import Namespace
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from calibrators.scratch import ScratchFolder
from quark_onnx.cli.llm_settings import (
    OPTIONS,
    add_folders,
    add_text_options,
    add_trust_option,
    check_files,
    text_of,
)
from quark_onnx.cli.next_command import shell_line
from quark_onnx.cli.output import Answer
from quark_onnx.cli.parsing import (
    PROGRAM,
    Parser,
    UsageError,
    count,
    progress_of,
)
from quark_onnx.cli.torch_side import torch_side
from quark_onnx.common.errors import ConfigError
from quark_onnx.config.checks import refuse_first
from quark_onnx.page.blocks import Facts
from quark_onnx.torch.config.algorithm_names import check_algorithm, learns_from_data
from quark_onnx.torch.config.language import config_for
from quark_onnx.torch.config.scheme_clients import SCHEME_CLIENTS
from quark_onnx.torch.config.schemes import scheme
from quark_onnx.torch.runtime.model_builder import require_builder
from quark_onnx.torch.validate.checkpoint import read
from quark_onnx.torch.validate.genai import SCHEME, check_readable


def oga_options(parser: Parser) -> None:
    add_folders(parser, "float model, or a checkpoint in the layout oga or awq")
    OPTIONS["--scheme"].add(
        parser, "; uint4 in the greatest groups that fit unless given", metavar="SCHEME"
    )
    OPTIONS["--algorithm"].add(parser, ", for a float model; as for 'llm ptq'")
    add_text_options(parser, "calibration data, as for 'llm ptq'")
    parser.add_argument(
        "--kv-cache",
        metavar="FORMAT",
        help="int8 or int4: quantize the KV cache; needs --data",
    )
    parser.add_argument(
        "--tokens",
        type=count,
        default=32,
        metavar="N",
        help="tokens to generate for each of four prompts",
    )
    add_trust_option(parser)


def oga(options: Namespace) -> Answer:
    # Names and data are checked before torch is imported, which takes seconds.
    if options.scheme is not None:
        _check_scheme(options.scheme)
    for text in options.algorithm:
        check_algorithm(text)
    _check_data(options)
    check_files(options)
    content = read(options.model)
    if content.method != "float":
        _check_quantized(options, content)
    require_builder()
    exports = torch_side("quark_onnx.torch.exports.oga")
    # Before the quantization, which may take hours.
    exports.check_oga(options.output)
    # The temporary checkpoint of a float model lives until the result is written.
    with ExitStack() as stack:
        checkpoint = _checkpoint(options, stack)
        built = exports.write_oga(
            checkpoint,
            options.output,
            new_tokens=options.tokens,
            kv_cache=options.kv_cache,
            text=text_of(options, options.data, options.samples),
            trust_code=options.trust_code,
        )
    facts = {
        "model": [f"{options.model} -> {built.folder}"],
        "size": [f"{built.bytes / 2**20:.1f} MiB"],
        "checked": [str(built)],
        "next": [
            f"to run it: onnxruntime_genai.Model({str(built.folder)!r})",
            (
                "for the NPU, or NPU and GPU, of Ryzen AI: the commands in"
                f" {built.folder / exports.FLOWS}, on Windows"
            ),
        ],
    }
    document = {
        "model": options.model,
        "output": options.output,
        "bytes": built.bytes,
        "tokens": built.tokens,
        "equal_tokens": built.equal,
        "logit_difference": built.difference,
        "kv_cache": built.kv_cache,
        "cache_difference": built.cache_difference,
        "float_cache_tokens": built.float_cache_tokens,
        "float_cache_equal_tokens": built.float_cache_equal,
    }
    return Answer([Facts((), facts)], document)


def _check_scheme(name: str) -> None:
    """Check that onnxruntime-genai's model builder supports a scheme.

    Raises:
        ConfigError: the scheme is unknown or not supported.
    """
    scheme(name)
    schemes = [
        scheme_name
        for scheme_name, clients in SCHEME_CLIENTS.items()
        # Client -> layouts in which it loads the scheme.
        if "oga" in clients.get("onnxruntime-genai", ())
    ]
    if name not in schemes:
        raise ConfigError(
            f"--scheme {name}: the model builder of onnxruntime-genai reads"
            f" {', '.join(schemes)}",
        )


def _check_data(options: Namespace) -> None:
    """Raise UsageError if data is needed and missing."""
    if options.data is not None:
        return
    needs = (
        (
            options.kv_cache is not None,
            f"--kv-cache {options.kv_cache} has scales that only data can tell",
        ),
        (
            any(map(learns_from_data, options.algorithm)),
            f"--algorithm {' '.join(options.algorithm)} learns from data",
        ),
    )
    refuse_first(((need, f"{why}; give --data") for need, why in needs), UsageError)


def _check_quantized(options: Namespace, content: Any) -> None:
    """Raise an error for a checkpoint that the model builder does not read, or other options."""
    check_readable(content)
    # The KV cache of a quantized checkpoint may still need data.
    unused_data = options.data and options.kv_cache is None
    if options.scheme or options.algorithm or unused_data:
        raise UsageError(
            f"{options.model} is quantized already; leave out --scheme, --algorithm and"
            " --data",
        )


def _checkpoint(options: Namespace, stack: ExitStack) -> Path:
    """Return the folder of the quantized checkpoint, temporary for a float model."""
    model: Path = options.model
    if read(model).method != "float":
        return model
    flow = torch_side("quark_onnx.torch.pipelines.ptq")
    checkpoints = torch_side("quark_onnx.torch.checkpoints.float_checkpoint")
    source = checkpoints.FloatCheckpoint(model, trust_code=options.trust_code)
    config = config_for(options.scheme or SCHEME, exclude=source.usually_float())
    if options.scheme is None:
        # None fits: the layout names the layers
        fitting = torch_side("quark_onnx.torch.pipelines.group_choice").fitting_schemes
        options.scheme = next(iter(fitting(source, config)), SCHEME)
        config = config.with_(default=scheme(options.scheme))
    config = config.with_(algorithms=tuple(options.algorithm))
    layouts = torch_side("quark_onnx.torch.checkpoints.layouts")
    # Before the work, and without the advice below: a scheme that fits is an option of 'llm oga'.
    torch_side("quark_onnx.torch.pipelines.written_size").check_groups(
        source, config, layouts.layout_named("oga")
    )
    # The temporary folder lies beside the output, on the same disk.
    options.output.parent.mkdir(parents=True, exist_ok=True)
    scratch = stack.enter_context(
        ScratchFolder(options.output.parent, f"{options.output.name}-checkpoint"),
    )
    try:
        flow.ptq(
            source,
            text_of(options, options.data, options.samples),
            config,
            # ptq() makes the folder itself.
            scratch / "checkpoint",
            writing=flow.Writing(layout="oga", trust_code=options.trust_code),
            progress=progress_of(options),
        )
    except ConfigError as error:
        # The advice may be an option of 'llm ptq', such as to exclude a layer.
        raise ConfigError(
            f"{error}. With further options, quantize by '{ptq_command(options)}', and"
            " give its output to 'llm oga'",
        ) from error
    return scratch / "checkpoint"


def ptq_command(options: Namespace) -> str:
    """Return the command that writes the checkpoint of a float model in the layout oga."""
    output: Path = options.output
    words = [PROGRAM, "llm", "ptq", str(options.model)]
    words += ["-o", str(output.with_name(f"{output.name}-checkpoint"))]
    words += ["--scheme", options.scheme or SCHEME, "--layout", "oga"]
    if options.algorithm:
        words += ["--algorithm", *options.algorithm]
    if options.data is not None:
        words += ["--data", str(options.data)]
        words += ["--samples", str(options.samples), "--length", str(options.length)]
    if options.trust_code:
        words.append("--trust-code")
    return shell_line(words)
