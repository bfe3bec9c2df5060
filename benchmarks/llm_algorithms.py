"""Perplexity of language models with the algorithms for low bits, ours beside those of other tools
in the same run.

    QUARK_ONNX_DATA=... python benchmarks/llm_algorithms.py [--models stories260K mixtext]
        [--formats mxfp4 int8 ...] [--algorithms gptq awq ...] [--amd-quark-python PYTHON]
        [--llm-compressor-python PYTHON] [--gptqmodel-python PYTHON] [--again] [--busy]

All tools get the same windows of tokens: those that calibrate, and those that are scored
(llm/README.md of the data has the protocol: windows of 256 tokens, float32). Beside the perplexity
stands the divergence of the predictions from those of the float model, which chance plays less of a
part in; `llm_paired.py` tells whether a perplexity of ours that is above another tool's is chance.
Each run is a process of its own, so that its peak memory is its own; with an algorithm and a format
come ours and the others', one after the other. What was measured is kept in
results/llm_algorithms.json, and not measured again without --again; the tables are made of all of
it. The exit code is 1, with a line for each reason, where our best with a format is worse than
another's, or GPTQ than rounding to nearest (worse by more than a thousandth in perplexity, and in
divergence too), and where a perplexity is greater than the mark set for it, or not known.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from _data import root
from _results import Row, Store, add_arguments, table
from llm import MODELS, PEER, found_of, measured, windows_of

FORMATS = (
    "uint4_wo_per_channel",
    "uint4_wo_32",
    "uint4_wo_128",
    "uint3_wo_32",
    "uint2_wo_32",
    "uint2_wo_128",
    "int8",
    "uint4_int8",
    "mxfp4",
    "fp8+kv",
)
#: Ours, by what the table calls them.
ALGORITHMS = {
    "nearest": (),
    "gptq": ("gptq",),
    "gptaq": ("gptaq",),
    "qronos": ("qronos",),
    "awq": ("awq",),
    "smoothquant": ("autosmoothquant",),
    "autoround": ("autoround",),
    "rotation + gptaq": ("rotation:r1=false", "gptaq"),
    "smoothquant + gptaq": ("autosmoothquant", "gptaq"),
    "gptaq + autoround": ("gptaq", "autoround"),
    "smoothquant + autoround": ("autosmoothquant", "autoround"),
    "distill": ("distill",),
    "smoothquant + distill": (
        "autosmoothquant",
        "distill:steps=3000,lr=0.002,sequences=2500",
    ),
}


@dataclass(frozen=True)
class Peer:
    """Another tool.

    Attributes:
        script: what runs it.
        formats, algorithms: the arguments for those of ours that it has.
    """

    script: Path
    formats: Mapping[str, tuple[str, ...]]
    algorithms: Mapping[str, tuple[str, ...]]

    def command(
        self, python: Path, folder: str, file: str, format: str, name: str
    ) -> list[str]:
        """What measures it."""
        return [
            str(python),
            str(self.script),
            folder,
            file,
            *self.formats[format],
            *self.algorithms[name],
        ]


PEERS = {
    "amd-quark": Peer(
        PEER,
        {
            **{
                name: (name,)
                for name in (
                    "uint4_wo_per_channel",
                    "uint4_wo_32",
                    "uint4_wo_128",
                    "int8",
                    "mxfp4",
                )
            },
            "fp8+kv": ("fp8", "--kv"),
        },
        {
            "nearest": (),
            **{name: (name,) for name in ("gptq", "gptaq", "qronos", "awq")},
        },
    ),
    "llm-compressor": Peer(
        PEER.with_name("llm_compressor.py"),
        {name: (name,) for name in FORMATS if "_wo_" in name or name == "mxfp4"},
        {name: (name,) for name in ("nearest", "gptq", "awq")},
    ),
    "gptqmodel": Peer(
        PEER.with_name("gptq_model.py"),
        {name: (name,) for name in FORMATS if "_wo_" in name},
        {name: (name,) for name in ("gptq", "gptaq")},
    ),
}
#: Ours, and all.
TOOLS = ("ours", *PEERS)
TITLE = """# Perplexity with algorithms for low bits

In brackets: the divergence from the float model's predictions, in 0.0001 nats for each token."""
BEST = "best"
#: The most that perplexities may be, by model, format and algorithm.
MARKS = {
    ("stories260K", "uint4_wo_per_channel", "gptq"): 4.69,
    ("stories260K", "uint4_wo_per_channel", BEST): 4.58,
    ("stories260K", "uint3_wo_32", BEST): 6.0,
    ("stories260K", "int8", BEST): 4.39,
    ("stories260K", "mxfp4", BEST): 5.3,
    ("mixtext", "uint2_wo_128", BEST): 43.0,
}
#: What measures ours, but for its arguments.
OWN = [sys.executable, __file__, "--child"]
#: Ours may be so much worse.
_SLACK = 1e-3


def child(folder: str, windows: str, row: str, *algorithms: str) -> None:
    """Quantize and score in this process, and print what was found."""
    from quark_onnx.torch.pipelines.ptq import config_for

    config, (name, _, cache) = None, row.partition("+")
    if name != "float":
        config = config_for(name, kv_cache="fp8" if cache else None).with_(
            algorithms=algorithms
        )
    print(json.dumps(found_of(folder, windows, config, at_once=8, keep=config is None)))


def add_peers(parser: argparse.ArgumentParser) -> None:
    """Options for the environments of other tools."""
    for tool in PEERS:
        parser.add_argument(
            f"--{tool}-python",
            type=Path,
            help=f"the Python of an environment with {tool}",
        )


def peers_of(arguments: argparse.Namespace) -> dict[str, tuple[Path, Peer]]:
    """The tools that have an environment, each with its Python."""
    pythons = {
        tool: vars(arguments)[f"{tool.replace('-', '_')}_python"] for tool in PEERS
    }
    return {tool: (python, PEERS[tool]) for tool, python in pythons.items() if python}


def command_of(
    tool: str,
    peers: Mapping[str, tuple[Path, Peer]],
    folder: str,
    file: str,
    format: str,
    name: str,
) -> list[str]:
    """What measures an algorithm of ours, or of another tool, with a format."""
    if tool == "ours":
        return [*OWN, folder, file, format, *ALGORITHMS[name]]
    python, peer = peers[tool]
    return peer.command(python, folder, file, format, name)


def main() -> int:
    if sys.argv[1:2] == ["--child"]:
        child(*sys.argv[2:])
        return 0
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--models", nargs="+", choices=MODELS, default=list(MODELS), metavar="MODEL"
    )
    parser.add_argument(
        "--formats", nargs="+", choices=FORMATS, default=list(FORMATS), metavar="FORMAT"
    )
    parser.add_argument(
        "--algorithms",
        nargs="+",
        choices=ALGORITHMS,
        default=list(ALGORITHMS),
        metavar="NAME",
    )
    add_peers(parser)
    add_arguments(parser, "again", "busy", "out")
    arguments = parser.parse_args()
    store = Store(arguments.out / "llm_algorithms.json")
    for model in arguments.models:
        with TemporaryDirectory() as place:
            file = str(Path(place) / "windows.npz")
            np.savez(file, **windows_of(model))
            for key, command in _runs(
                model, str(root() / "llm" / model), file, arguments
            ):
                if (
                    arguments.again
                    or key not in store.rows()
                    or key.endswith("/float/ours")
                ):  # it leaves predictions
                    found = measured(command)
                    if arguments.busy:
                        found.pop("seconds", None)
                    store.put(key, found)
                    print(key, store.rows()[key], file=sys.stderr, flush=True)
    text = _tables(store.rows())
    missed = list(_complaints(store.rows()))
    (arguments.out / "llm_algorithms.md").write_text(
        f"{TITLE}\n\n{text}\n", encoding="utf-8"
    )
    print("\n".join([text, *missed]))
    return int(bool(missed))


def _runs(
    model: str, folder: str, file: str, arguments: argparse.Namespace
) -> Iterator[tuple[str, list[str]]]:
    """What is measured, by its key, and the command that does it."""
    peers = peers_of(arguments)
    yield f"{model}/float/ours", [*OWN, folder, file, "float"]
    for format in arguments.formats:
        for name in arguments.algorithms:
            for tool in ("ours", *peers):
                if tool == "ours" or (
                    format in PEERS[tool].formats and name in PEERS[tool].algorithms
                ):
                    command = command_of(tool, peers, folder, file, format, name)
                    yield f"{model}/{format}/{name}/{tool}", command


def _tables(rows: Mapping[str, Row]) -> str:
    """Tables for each model."""
    parts = []
    for model, own in by_model(rows):
        formats = formats_of(own)
        best = [
            [
                f"{tool}: {BEST}",
                *(_quality(best_of(own, each, tool)[1]) for each in formats),
            ]
            for tool in TOOLS
        ]
        quality = _table(formats, [*_lines(own, formats, _quality), *best])
        parts.append(
            f"## {model} (float {own['float/ours']['value']:.4f})\n\n{quality}"
        )
        if timed := _table(formats, _lines(own, formats, _effort)):
            parts.append(
                "Seconds, where nothing else ran; in brackets the peak of memory in"
                f" MB:\n\n{timed}"
            )
    return "\n\n".join(parts)


def _complaints(rows: Mapping[str, Row]) -> Iterator[str]:
    """What is not as it should be."""
    models = dict(by_model(rows))
    for model, own in models.items():
        for each in formats_of(own):
            nearest, gptq = (
                own.get(f"{each}/{name}/ours", {}) for name in ("nearest", "gptq")
            )
            if _worse(gptq, nearest):
                yield f"{model}, {each}: gptq is worse than rounding to nearest"
            for tool in PEERS:
                if _worse(best_of(own, each, "ours")[1], best_of(own, each, tool)[1]):
                    yield f"{model}, {each}: our best is worse than that of {tool}"
    for (model, format, name), most in MARKS.items():
        own = models.get(model, {})
        found = (
            best_of(own, format, "ours")[1]
            if name == BEST
            else own.get(f"{format}/{name}/ours", {})
        )
        if found.get("value") is None or found["value"] > most:
            yield (
                f"{model}, {format}, {name}: {_quality(found) or 'not known'}, and not"
                f" at most {most}"
            )


def by_model(rows: Mapping[str, Row]) -> Iterator[tuple[str, dict[str, Row]]]:
    """Each model that was measured, with its rows by the rest of their keys."""
    for model in MODELS:
        own = {
            key.removeprefix(f"{model}/"): row
            for key, row in rows.items()
            if key.startswith(f"{model}/")
        }
        if "float/ours" in own:
            yield model, own


def formats_of(rows: Mapping[str, Row]) -> list[str]:
    return [each for each in FORMATS if any(key.startswith(f"{each}/") for key in rows)]


def _lines(
    rows: Mapping[str, Row], formats: list[str], cell: Callable[[Row], str]
) -> Iterator[list[str]]:
    for tool in TOOLS:
        for name in ALGORITHMS:
            yield [
                f"{tool}: {name}",
                *(cell(rows.get(f"{each}/{name}/{tool}", {})) for each in formats),
            ]


def _table(formats: list[str], lines: Iterable[list[str]]) -> str:
    """Without lines that are empty; nothing where all are."""
    filled = [line for line in lines if any(line[1:])]
    return table(["", *formats], filled) if filled else ""


def _worse(one: Row, other: Row) -> bool:
    """Whether both are known, and one predicts worse."""
    return all(
        one.get(name) and other.get(name) and one[name] > other[name] * (1 + _SLACK)
        for name in ("value", "divergence")
    )


def best_of(rows: Mapping[str, Row], format: str, tool: str) -> tuple[str, Row]:
    """The algorithm of a tool with the least perplexity, and what was found of it.

    Empty where nothing is known.
    """
    found = ((name, rows.get(f"{format}/{name}/{tool}", {})) for name in ALGORITHMS)
    known = {
        name: row for name, row in found if row.get("value") is not None
    }  # None stands for what is no number
    name = min(known, key=lambda name: float(known[name]["value"]), default="")
    return name, known.get(name, {})


def _quality(found: Row) -> str:
    if "value" not in found:
        return f"refused: {str(found['error'])[:40]}" if found else ""
    if found["value"] is None:
        return "no number"
    return f"{found['value']:.4f}" + (
        f" ({found['divergence'] * 1e4:.1f})" if "divergence" in found else ""
    )


def _effort(found: Row) -> str:
    return (
        f"{found['seconds']:.1f} ({found['peak_mb']:.0f})" if "seconds" in found else ""
    )


if __name__ == "__main__":
    sys.exit(main())
