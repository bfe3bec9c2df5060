"""Options of a TorchConfig, and others that several actions of ``quark-onnx llm`` have."""

from __future__ import annotations

import re
from argparse import ArgumentTypeError, Namespace
from pathlib import Path
from typing import Any

from quark_onnx.cli.field_options import CALL, FieldOption
from quark_onnx.cli.parsing import (
    Parser,
    add_model_argument,
    count,
    input_name,
    output_folder,
)
from quark_onnx.cli.torch_side import torch_side
from quark_onnx.common.errors import ModelError
from quark_onnx.config import QuantizationSpec
from quark_onnx.torch.config.language import ATTENTIONS
from quark_onnx.torch.config.torch_config import KVCache, TorchConfig
from quark_onnx.torch.runtime.checkpoint_folder import check_free
from quark_onnx.torch.runtime.text_source import check_source

#: Name of a model on the Hugging Face Hub.
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w-]*/[A-Za-z0-9][\w.-]*")
#: Sources of text, for the help of options.
TEXT = "text or .jsonl file, folder, token ids, or data set name"


def _pair(text: str) -> tuple[str, str]:
    # The first "=": names of schemes have none.
    glob, equals, name = text.partition("=")
    if not (glob and equals and name):
        raise ArgumentTypeError(f"{text!r} is not of the form GLOB=SCHEME")
    return glob, name


_OPTIONS = (
    FieldOption(
        "--scheme",
        TorchConfig,
        "default",
        "; see 'quark-onnx list schemes'; several need --bits",
        metavar="SCHEME[+SCHEME...]",
    ),
    FieldOption(
        "--group-size",
        QuantizationSpec,
        "block_size",
        ", for schemes without a fixed group size",
    ),
    FieldOption(
        "--kv-cache",
        TorchConfig,
        "kv_cache",
        ": fp8; fp8-rope: keys after RoPE",
        metavar="FORMAT",
    ),
    FieldOption("--min-kv-scale", KVCache, "least", default=KVCache.least),
    FieldOption("--attention", TorchConfig, "attention", choices=ATTENTIONS),
    # One glob after each, as the folder of the model may follow.
    FieldOption(
        "--layer",
        TorchConfig,
        "layers",
        metavar="GLOB=SCHEME",
        type=_pair,
        nargs=None,
        action="append",
        default=[],
    ),
    FieldOption(
        "--exclude",
        TorchConfig,
        "exclude",
        ", besides heads and vision or audio parts",
        metavar="GLOB",
        nargs=None,
        action="append",
        default=[],
    ),
    FieldOption(
        "--algorithm",
        TorchConfig,
        "algorithms",
        "; see 'quark-onnx list algorithms'",
        metavar=CALL,
        default=[],
    ),
)
#: Options that set fields of a TorchConfig, by name.
OPTIONS = {option.flag: option for option in _OPTIONS}


def add_folders(parser: Parser, model: str, result: str = "result") -> None:
    """Add the folders of the model and of the result.

    Args:
        parser: the parser of the action.
        model: help of the model.
        result: name of the result in the help.
    """
    add_model_argument(parser, model, "DIR")
    parser.add_argument(
        "-o",
        "--output",
        metavar="OUT",
        type=output_folder,
        required=True,
        help=f"folder of the {result}; an earlier result needs --overwrite",
    )


def add_text_options(
    parser: Parser, data: str, samples: int = 128, *, required: bool = False
) -> None:
    """Add the options of the calibration data.

    Args:
        parser: the parser of the action.
        data: help of --data.
        samples: default of --samples.
        required: whether the action needs data in any case.
    """
    parser.add_argument(
        "--data", metavar="TEXT", type=input_name, required=required, help=data
    )
    for flag, default, text in (
        ("--samples", samples, "calibration samples"),
        ("--length", 512, "tokens per sample"),
    ):
        parser.add_argument(flag, metavar="N", type=count, default=default, help=text)


def text_of(options: Namespace, source: str | None, samples: int | None) -> Any:
    """Return a text for the pipelines; None without a source.

    Args:
        options: the options of the command, with ``length``.
        source: the text or its file.
        samples: number of samples; None for all.
    """
    if source is None:
        return None
    module = torch_side("quark_onnx.torch.pipelines.ptq")
    return module.Text(source, samples, options.length)


def check_files(options: Namespace) -> None:
    """Raise errors of names and files that are known before torch is imported.

    Raises:
        ConfigError: the output exists.
        DataError: a text is missing or empty, or the model has no tokenizer for it.
        ModelError: the model is no folder of a Hugging Face model.
    """
    model: Path = options.model
    if not model.is_dir():
        name, hint = model.as_posix(), ""
        # A name of the Hub, which other tools download.
        if _HUB_NAME.fullmatch(name) and not model.parent.exists():
            hint = f"; download it first: hf download {name} --local-dir {model.name}"
        raise ModelError(
            f"{model} is no folder of a Hugging Face model, with config.json and"
            f" safetensors{hint}",
        )
    if options.output.suffix != ".gguf":
        check_free(options.output)
    # Folders and names of data sets are looked up later.
    for name in ("data", "evaluate"):
        source = getattr(options, name, None)
        if source is not None:
            check_source(source, model)


def add_device_option(parser: Parser) -> None:
    parser.add_argument(
        "--device",
        metavar="NAME",
        default="cpu",
        help="device: cpu, cuda, cuda:N or auto",
    )


def add_trust_option(parser: Parser) -> None:
    parser.add_argument(
        "--trust-code",
        action="store_true",
        help="run Python code that comes with the model",
    )
