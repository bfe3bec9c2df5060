"""The options of the engine that quantized models are judged and timed on."""

from __future__ import annotations

from argparse import Namespace, _ActionsContainer

from quark_onnx.cli.parsing import complete
from quark_onnx.common.registry import ENGINES


def add_engine_options(parser: _ActionsContainer) -> None:
    """Add --engine and --provider."""
    engine = parser.add_argument(
        "--engine",
        metavar="NAME",
        help="engine to measure errors, latency and integer layers on, such as openvino",
    )
    complete(engine, ENGINES)
    add_provider_option(parser)


def add_provider_option(parser: _ActionsContainer) -> None:
    """Add --provider."""
    parser.add_argument(
        "--provider",
        metavar="NAME",
        help="provider of onnxruntime to run all models on, such as CUDA; CPU unless given",
    )


def engine_words(options: Namespace) -> list[str]:
    """Return the words of a command line that select the engine of this command."""
    words = list[str]()
    for name in ("engine", "provider"):
        if value := getattr(options, name, None):
            words += [f"--{name}", value]
    return words
