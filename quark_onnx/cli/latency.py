"""Latency of the float and the quantized model, as commands measure and print it."""

from __future__ import annotations

import logging
import warnings
from argparse import Namespace
from dataclasses import asdict
from typing import Any

from quark_onnx.analysis import Latency, measure_latency
from quark_onnx.cli.parsing import Parser, count
from quark_onnx.common.errors import DataError, ModelError
from quark_onnx.files.io import load
from quark_onnx.graph import Graph
from quark_onnx.measuring.open_data import first_sample, reader_for

logger = logging.getLogger(__name__)


def add_time_options(parser: Parser) -> None:
    """Add the options for the latency after quantization."""
    either = parser.add_mutually_exclusive_group()
    # Both options set one attribute; --time repeats the default, for scripts that name it.
    either.add_argument(
        "--time",
        action="store_true",
        default=True,
        help="measure the latency of both models on this machine; on unless --no-time",
    )
    either.add_argument(
        "--no-time",
        dest="time",
        action="store_false",
        help="do not measure the latency of both models after quantization",
    )
    add_threads_option(parser)


def add_threads_option(parser: Parser) -> None:
    """Add the option for the threads of the measurement."""
    parser.add_argument(
        "--threads",
        metavar="N",
        type=count,
        default=0,
        help="threads for --time; 0: all cores",
    )


def quantized_latency(options: Namespace, data: Any) -> Latency | None:
    """Return the latency of both models; None without data or after a failure."""
    if data is None or not options.time:
        return None
    try:
        with warnings.catch_warnings():
            # The data is opened once more for its first sample.
            warnings.simplefilter("ignore")  # warnings about the data were shown before
            sample = first_sample(reader_for(Graph.of(load(options.model)), data))
        return measure_latency(
            options.model, options.output, sample, threads=options.threads
        )
    # The model is written; that it cannot be timed is no failure of the command. Data that does not
    # fit was not read until now, as nothing in the model can be quantized.
    except DataError as error:
        logger.warning("the latency was not measured: %s", error)
        return None
    except ModelError as error:
        logger.debug("%s", error)
        return None


def latency_document(latency: Latency | None) -> dict[str, Any] | None:
    """Return a latency as part of a JSON document; None for a missing latency."""
    if latency is None:
        return None
    return asdict(latency)
