"""Perplexity of language models with the algorithms for low bits, ours beside those of other tools in the same run.

    QUARK_ONNX_DATA=... python benchmarks/llm_algorithms.py [--models stories260K mixtext] [--rows uint4 mxfp4 ...]
        [--algorithms gptq awq ...] [--amd-quark-python PYTHON] [--busy]

All tools get the same windows of tokens: those that calibrate, and those that are scored (llm/README.md of the data
has the protocol: windows of 256 tokens, float32). Each run is a process of its own, so that its peak memory is its own.
What an algorithm gives is ours first, then theirs; the last columns hold the best of each. A star marks a row where our
best is worse than theirs by more than a thousandth, or GPTQ worse than rounding to nearest; the exit code is then 1.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from _data import root
from _results import table
from llm import MODELS, PEER, measured, windows_of

#: Rows: ours, and what amd-quark calls the same.
ROWS = {
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
}
#: Those of amd-quark that have a name of ours.
THEIRS = ("nearest", "gptq", "gptaq", "qronos", "awq")
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
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS), metavar="ROW")
    parser.add_argument("--algorithms", nargs="+", choices=ALGORITHMS, default=list(ALGORITHMS), metavar="NAME")
    parser.add_argument("--amd-quark-python", type=Path, help="the Python of an environment with amd-quark")
    parser.add_argument("--busy", action="store_true", help="the machine does other work, too: keep no seconds")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    arguments = parser.parse_args()
    parts, worse = list[str](), 0
    for model in arguments.models:
        folder = str(root() / "llm" / model)
        with TemporaryDirectory() as place:
            file = str(Path(place) / "windows.npz")
            np.savez(file, **windows_of(model))
            own = measured([sys.executable, __file__, "--child", folder, file, "float"])
            rows = []
            for row in arguments.rows:
                found = _row(folder, file, row, arguments)
                rows.append(_cells(row, found, arguments.busy))
                worse += str(rows[-1][-1]).endswith("*")
                print(*rows[-1], sep=" | ", file=sys.stderr, flush=True)
        names = [*(f"ours: {name}" for name in arguments.algorithms), *(f"amd-quark: {name}" for name in THEIRS)]
        head = ["row", *names, "our best", "their best"]
        parts.append(f"## {model} (float {own['value']:.4f})\n\n{table(head, rows)}")
    text = "\n\n".join(parts)
    print(text)
    if (arguments.models, arguments.rows, arguments.algorithms) == (list(MODELS), list(ROWS), list(ALGORITHMS)):
        title = "# Perplexity with algorithms for low bits\n\nIn brackets: seconds, and the peak of memory in MB."
        (arguments.out / "llm_algorithms.md").write_text(f"{title}\n\n{text}\n", encoding="utf-8")
    return int(worse > 0)


Found = dict[str, float | str]


def _row(folder: str, file: str, row: str, arguments: argparse.Namespace) -> tuple[dict[str, Found], dict[str, Found]]:
    """What each algorithm gives, ours and theirs."""
    ours, theirs = dict[str, Found](), dict[str, Found]()
    for name in arguments.algorithms:
        ours[name] = measured([sys.executable, __file__, "--child", folder, file, row, *ALGORITHMS[name]])
    for name in THEIRS:
        theirs[name] = {}
        if arguments.amd_quark_python and ROWS[row]:
            own = [] if name == "nearest" else [name]
            cache = ["--kv"] if row.endswith("+kv") else []
            theirs[name] = measured([str(arguments.amd_quark_python), str(PEER), folder, file, ROWS[row], *own, *cache])
    return ours, theirs


def _cells(row: str, found: tuple[dict[str, Found], dict[str, Found]], busy: bool) -> list[object]:
    ours, theirs = found
    best, other = (
        min((float(each["value"]) for each in part.values() if "value" in each), default=None) for part in found
    )
    late = best is not None and other is not None and best > other * (1 + _SLACK)
    if {"nearest", "gptq"} <= set(ours) and "value" in ours["gptq"]:
        late |= float(ours["gptq"]["value"]) > float(ours["nearest"]["value"]) * (1 + _SLACK)
    cells = [_cell(each, busy) for part in (ours, theirs) for each in part.values()]
    return [row, *cells, _number(best) + "*" * late, _number(other)]


def _cell(found: Found, busy: bool) -> str:
    if "value" not in found:
        return f"refused: {str(found['error'])[:60]}" if "error" in found else ""
    seconds = "" if busy else f"{float(found['seconds']):.1f} s, "
    return f"{float(found['value']):.4f} ({seconds}{float(found['peak_mb']):.0f})"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"


if __name__ == "__main__":
    sys.exit(main())
