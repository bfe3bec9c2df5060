"""Perplexity of language models with the algorithms for low bits, ours beside those of other tools in the same run.

    QUARK_ONNX_DATA=... python benchmarks/llm_algorithms.py [--models stories260K mixtext] [--formats mxfp4 int8 ...]
        [--algorithms gptq awq ...] [--amd-quark-python PYTHON] [--again] [--busy]

All tools get the same windows of tokens: those that calibrate, and those that are scored (llm/README.md of the data
has the protocol: windows of 256 tokens, float32). Each run is a process of its own, so that its peak memory is its own;
with an algorithm and a format come ours and amd-quark's, one after the other. What was measured is kept in
results/llm_algorithms.json, and not measured again without --again; the tables are made of all of it. The exit code is
1 where our best with a format is worse than theirs by more than a thousandth, or GPTQ than rounding to nearest.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from _data import root
from _results import Row, Store, table
from llm import MODELS, PEER, measured, windows_of

#: Ours, and what amd-quark calls the same.
FORMATS = {
    "uint4_wo_per_channel": "uint4_wo_per_channel",
    "uint4_wo_32": "uint4_wo_32",
    "uint4_wo_128": "uint4_wo_128",
    "uint3_wo_32": None,
    "uint2_wo_32": None,
    "uint2_wo_128": None,
    "int8": "int8",
    "uint4_int8": None,
    "mxfp4": "mxfp4",
    "fp8+kv": "fp8",
}
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
    "gptaq + autoround": ("gptaq", "autoround"),
    "smoothquant + autoround": ("autosmoothquant", "autoround"),
    "distill": ("distill",),
    "gptaq + distill": ("gptaq", "distill"),
}
#: Those of amd-quark that have a name of ours.
THEIRS = ("nearest", "gptq", "gptaq", "qronos", "awq")
TITLE = """# Perplexity with algorithms for low bits

In brackets: seconds, where nothing else ran; and the peak of memory in MB."""
#: Ours may be so much worse.
_SLACK = 1e-3


def child(folder: str, windows: str, row: str, *algorithms: str) -> None:
    """Quantize and score in this process, and print what was found."""
    import torch
    from peers.amd_quark import peak_mb
    from transformers import AutoModelForCausalLM

    from quark_onnx.torch.perplexity import perplexity
    from quark_onnx.torch.ptq import config_for
    from quark_onnx.torch.quantize import quantize_model

    with np.load(windows) as loaded:
        calibrate, score = (torch.from_numpy(loaded[name]) for name in ("calibrate", "score"))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    start = time.perf_counter()
    if row != "float":
        name, _, cache = row.partition("+")
        config = config_for(name, kv_cache="fp8" if cache else None).with_(algorithms=algorithms)
        quantize_model(model, config, calibrate.split(8), progress=False)
    seconds = time.perf_counter() - start
    value = perplexity(model, list(score), progress=False)
    print(json.dumps({"value": value, "seconds": seconds, "peak_mb": peak_mb()}))


def main() -> int:
    if sys.argv[1:2] == ["--child"]:
        child(*sys.argv[2:])
        return 0
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS), metavar="MODEL")
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=list(FORMATS), metavar="FORMAT")
    parser.add_argument("--algorithms", nargs="+", choices=ALGORITHMS, default=list(ALGORITHMS), metavar="NAME")
    parser.add_argument("--amd-quark-python", type=Path, help="the Python of an environment with amd-quark")
    parser.add_argument("--again", action="store_true", help="measure what was measured before, too")
    parser.add_argument("--busy", action="store_true", help="the machine does other work, too: keep no seconds")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    arguments = parser.parse_args()
    store = Store(arguments.out / "llm_algorithms.json")
    for model in arguments.models:
        with TemporaryDirectory() as place:
            file = str(Path(place) / "windows.npz")
            np.savez(file, **windows_of(model))
            for key, command in _runs(model, str(root() / "llm" / model), file, arguments):
                if arguments.again or key not in store.rows():
                    found = measured(command)
                    if arguments.busy:
                        found.pop("seconds", None)
                    store.put(key, found)
                    print(key, store.rows()[key], file=sys.stderr, flush=True)
    text, worse = _tables(store.rows())
    (arguments.out / "llm_algorithms.md").write_text(f"{TITLE}\n\n{text}\n", encoding="utf-8")
    print(text)
    return int(worse)


def _runs(model: str, folder: str, file: str, arguments: argparse.Namespace) -> Iterator[tuple[str, list[str]]]:
    """What is measured, by its key, and the command that does it."""
    own, peer = [sys.executable, __file__, "--child", folder, file], arguments.amd_quark_python
    yield f"{model}/float/ours", [*own, "float"]
    for format in arguments.formats:
        for name in arguments.algorithms:
            yield f"{model}/{format}/{name}/ours", [*own, format, *ALGORITHMS[name]]
            if peer and name in THEIRS and (theirs := FORMATS[format]):
                settings = [*([] if name == "nearest" else [name]), *(["--kv"] if format.endswith("+kv") else [])]
                yield f"{model}/{format}/{name}/amd-quark", [str(peer), str(PEER), folder, file, theirs, *settings]


def _tables(rows: Mapping[str, Row]) -> tuple[str, bool]:
    """A table for each model, and whether ours is worse somewhere."""
    parts, worse = [], False
    for model in MODELS:
        if f"{model}/float/ours" not in rows:
            continue
        own = {key.removeprefix(f"{model}/"): row for key, row in rows.items() if key.startswith(f"{model}/")}
        formats = [each for each in FORMATS if any(key.startswith(f"{each}/") for key in own)]
        lines = [
            [f"{tool}: {name}", *(_cell(own.get(f"{each}/{name}/{tool}")) for each in formats)]
            for tool, names in (("ours", ALGORITHMS), ("amd-quark", THEIRS))
            for name in names
        ]
        best = {tool: [_best(own, each, tool) for each in formats] for tool in ("ours", "amd-quark")}
        lines += [[f"{tool}: best", *("" if each is None else f"{each:.4f}" for each in best[tool])] for tool in best]
        worse |= any(a and b and a > b * (1 + _SLACK) for a, b in zip(*best.values(), strict=True))
        for each in formats:
            nearest, gptq = (own.get(f"{each}/{name}/ours", {}).get("value") for name in ("nearest", "gptq"))
            worse |= bool(nearest and gptq and gptq > nearest * (1 + _SLACK))
        lines = [line for line in lines if any(line[1:])]
        parts.append(f"## {model} (float {own['float/ours']['value']:.4f})\n\n{table(['', *formats], lines)}")
    return "\n\n".join(parts), worse


def _best(rows: Mapping[str, Row], format: str, tool: str) -> float | None:
    found = (row.get("value") for key, row in rows.items() if key.startswith(f"{format}/") and key.endswith(f"/{tool}"))
    return min((each for each in found if each), default=None)


def _cell(found: Row | None) -> str:
    if found is None:
        return ""
    if "value" not in found:
        return f"refused: {str(found.get('error'))[:40]}"
    seconds = f"{found['seconds']:.1f} s, " if "seconds" in found else ""
    return f"{found['value']:.4f} ({seconds}{found['peak_mb']:.0f})"


if __name__ == "__main__":
    sys.exit(main())
