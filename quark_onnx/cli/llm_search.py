"""quark-onnx llm search: try schemes and algorithms in a budget of bits and time."""

from __future__ import annotations

import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

from quark_onnx.cli.llm_settings import (
    add_device_option,
    add_folders,
    add_text_options,
    check_files,
    text_of,
)
from quark_onnx.cli.output import Answer, say
from quark_onnx.cli.parsing import (
    OutputPath,
    Parser,
    duration,
    number,
    path,
)
from quark_onnx.cli.torch_side import torch_side
from quark_onnx.common.errors import AccuracyError, ConfigError
from quark_onnx.page.blocks import Facts
from quark_onnx.torch.config.language import config_for
from quark_onnx.torch.config.scheme_clients import CLIENTS, SCHEME_CLIENTS


def search_options(parser: Parser) -> None:
    add_folders(parser, "folder of a float model", "best result")
    parser.add_argument(
        "--for",
        dest="client",
        choices=CLIENTS,
        required=True,
        help="program that will load the checkpoint",
    )
    parser.add_argument(
        "--bits",
        type=number,
        required=True,
        metavar="X",
        help="largest average bits per weight of the checkpoint",
    )
    add_text_options(
        parser,
        "calibration data; a part is held out for judging",
        samples=32,
        required=True,
    )
    parser.add_argument(
        "--budget",
        type=duration,
        metavar="TIME",
        help="total time, such as 90s, 10m or 1.5h; no limit unless given",
    )
    parser.add_argument(
        "--journal",
        metavar="DIR",
        type=OutputPath(path, files=("search.journal", "search.html")),
        required=True,
        help="folder of measurements, to resume or share; gets the page search.html",
    )
    add_device_option(parser)


def search(options: Namespace) -> Answer:
    check_files(options)
    module = torch_side("quark_onnx.torch.pipelines.scheme_search")
    flow = torch_side("quark_onnx.torch.pipelines.ptq")
    checkpoints = torch_side("quark_onnx.torch.checkpoints.float_checkpoint")
    source = checkpoints.FloatCheckpoint(options.model)
    _refuse_earlier(options.journal / "search.json")
    options.journal.mkdir(parents=True, exist_ok=True)
    result = module.search_schemes(
        source,
        module.candidates_for(options.client),
        text_of(options, options.data, options.samples),
        options.journal / "search.journal",
        bits=options.bits,
        seconds=options.budget,
        device=options.device,
        tell=None if options.quiet else _tell,
    )
    # Written before the verdict: the page also shows a search that found nothing.
    names = f"{options.model} for {options.client}"
    result.write_page(options.journal / "search.html", "Search", names)
    return _answer(options, result, source, flow)


def _refuse_earlier(path: Path) -> None:
    if path.exists():
        raise ConfigError(
            f"{path} is the journal of an earlier version, which this version cannot continue;"
            " name another folder with --journal, or remove the file to search anew"
        )


def _tell(trial: Any) -> None:
    say(f"quark-onnx: {trial.candidate.name}: {_figures(trial)}", sys.stderr)


def _figures(trial: Any) -> str:
    if trial.record.error:
        return str(trial.record.error)
    return f"{trial.bits:.2f} bits, {trial.divergence:.4f} nats a token"


def _answer(options: Namespace, result: Any, source: Any, flow: Any) -> Answer:
    """Return the answer of ``llm search``, and write the best checkpoint."""
    facts = {"page": [str(options.journal / "search.html")]}
    document = {
        "model": options.model,
        "output": options.output,
        **result.to_dict(),
    }
    if result.best is None:
        if result.trials and not result.measured:
            raise ConfigError(result.failure)
        # The measurements are shown, and no checkpoint is written.
        failure = AccuracyError(result.failure)
        return Answer([*result.blocks(), Facts((), facts)], document, failure)
    _write_best(options, result.best, source, flow)
    facts["written"] = [f"{options.output}: {result.best.name}"]
    return Answer([*result.blocks(), Facts((), facts)], document)


def _write_best(options: Namespace, best: Any, source: Any, flow: Any) -> None:
    """Quantize again by the best candidate, in the client's layout."""
    # The first layout that the client loads the scheme from.
    form = SCHEME_CLIENTS[best.scheme][options.client][0]
    # GGUF and ONNX are files of their own; all other layouts are checkpoints.
    kinds = [form] if form in ("gguf", "onnx") else ["hf_format"]
    config = config_for(best.scheme, exclude=source.usually_float())
    config = config.with_(algorithms=best.algorithms)
    exported = torch_side("quark_onnx.torch.exports.kinds").exported
    with exported(kinds, source, config, options.output, list[str]()) as folder:
        flow.ptq(
            source,
            text_of(options, options.data, options.samples),
            config,
            folder,
            writing=flow.Writing(layout=best.layout, device=options.device),
            progress=False,
            verdict=True,  # hold out the same windows as in the trial
        )
