"""Perplexity of language models at each scheme, ours beside amd-quark's in the same run.

    QUARK_ONNX_DATA=... python benchmarks/llm.py [--models stories260K mixtext] [--schemes fp8 ...]
        [--amd-quark-python VENV/bin/python] [--busy]

Both tools get the same windows of tokens: those that calibrate, and those that are scored
(llm/README.md of the data has the protocol: windows of 256 tokens, float32). Each run is a process
of its own, so that its peak memory is its own. A star marks a row where ours is worse than
amd-quark's by more than a ten-thousandth; the exit code is then 1.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from _data import root
from _results import add_arguments, table

LENGTH = 256
MODELS = ("stories260K", "mixtext")
SCHEMES = (
    "fp8",
    "ptpc_fp8",
    "int8",
    "uint4_wo_per_channel",
    "uint4_wo_32",
    "uint4_wo_128",
    "int4_wo_128",
    "mxfp4_weight_only",
    "mxfp4",
    "mxfp6_e2m3",
    "mxfp4_fp8",
    "nvfp4",
)
PEER = Path(__file__).parent / "peers" / "amd_quark_llm.py"


def windows_of(model: str, draw: int = 0) -> dict[str, np.ndarray]:
    """Token ids of shape (windows, length) that calibrate, and that are scored.

    Args:
        model: its name.
        draw: which windows of the calibration text: 0 is the first ones, as the protocol has it;
            another is as many of the others, in an order that chance makes. No two draws share one;
            those that there are none for are empty.
    """
    calibrate, score, count = _all_windows(model)
    if draw:
        others = np.random.default_rng(0).permutation(calibrate[count:])
        calibrate = others[: len(others) // count * count][(draw - 1) * count :]
    return {"calibrate": calibrate[:count], "score": score}


@cache
def _all_windows(model: str) -> tuple[np.ndarray, np.ndarray, int]:
    """All windows of the calibration text, those that are scored, and how many calibrate."""
    folder = root() / "llm"
    if model == "stories260K":
        with np.load(folder / "eval_tokens_stories260K.npz") as loaded:
            rows = loaded["ids"][loaded["len"] >= LENGTH][:, :LENGTH].astype(np.int64)
        return rows[:40], rows[40:], 40
    from quark_onnx.torch.calibration.text import read_windows
    from quark_onnx.torch.pipelines.ptq import tokenizer_of

    tokenizer = tokenizer_of(folder / model)
    texts = (f"{model}_calib.txt", f"{model}_eval_wikitext.txt")
    calibrate, score = (
        np.stack(read_windows(folder / text, tokenizer, LENGTH)) for text in texts
    )
    return calibrate, score, 64


def child(folder: str, windows: str, scheme: str) -> None:
    """Quantize and score in this process, and print what was found."""
    from quark_onnx.torch.pipelines.ptq import config_for

    print(
        json.dumps(
            found_of(folder, windows, None if scheme == "float" else config_for(scheme))
        )
    )


def found_of(
    folder: str, windows: str, config: Any, at_once: int = 1, *, keep: bool = False
) -> dict[str, float]:
    """What quantizing a model takes, and how well it predicts then.

    Args:
        config: how; None for the float model.
        at_once: windows of a sample that calibrates.
        keep: whether what is predicted stays for others to be compared with.
    """
    import torch
    from peers.amd_quark import peak_mb
    from peers.scored import keep_floats, scored
    from transformers import AutoModelForCausalLM

    from quark_onnx.torch.pipelines.in_memory import quantize_model

    with np.load(windows) as loaded:
        calibrate, score = (
            torch.from_numpy(loaded[name]) for name in ("calibrate", "score")
        )
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    start = time.perf_counter()
    if config is not None:
        quantize_model(model, calibrate.split(at_once), config, progress=False)
    found = {"seconds": time.perf_counter() - start, "peak_mb": peak_mb()}
    if keep:
        keep_floats(model, score, windows)
    return found | scored(model, score, windows)


def measured(command: list[str]) -> dict[str, float | str]:
    """The last line of a process, which is JSON."""
    done = subprocess.run(command, capture_output=True, text=True)
    try:
        found = json.loads(done.stdout.strip().splitlines()[-1])
    except (IndexError, ValueError):
        found = None
    if isinstance(found, dict):
        return found
    return {
        "error": (done.stderr.strip() or f"exit code {done.returncode}").splitlines()[
            -1
        ][-300:]
    }  # it ended before


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
        "--schemes", nargs="+", choices=SCHEMES, default=list(SCHEMES), metavar="SCHEME"
    )
    add_arguments(parser, "amd-quark-python", "busy", "out")
    arguments = parser.parse_args()
    parts, worse = list[str](), 0
    for model in arguments.models:
        folder, rows = str(root() / "llm" / model), list[list[object]]()
        with TemporaryDirectory() as place:
            file = str(Path(place) / "windows.npz")
            np.savez(file, **windows_of(model))
            for scheme in ("float", *arguments.schemes):
                ours = measured(
                    [sys.executable, __file__, "--child", folder, file, scheme]
                )
                theirs: dict[str, float | str] = {}
                if arguments.amd_quark_python and scheme != "float":
                    theirs = measured(
                        [
                            str(arguments.amd_quark_python),
                            str(PEER),
                            folder,
                            file,
                            scheme,
                        ]
                    )
                late = (
                    "value" in theirs
                    and "value" in ours
                    and float(ours["value"]) > float(theirs["value"]) * (1 + 1e-4)
                )
                worse += late
                rows.append(
                    [
                        scheme,
                        *_cells(ours, arguments.busy, late),
                        *_cells(theirs, arguments.busy),
                    ]
                )
                print(*rows[-1], file=sys.stderr, flush=True)
        head = [
            "scheme",
            "ours",
            "seconds",
            "peak MB",
            "amd-quark",
            "seconds",
            "peak MB",
        ]
        parts.append(f"## {model}\n\n{table(head, rows)}")
    text = "\n\n".join(parts)
    print(text)
    if arguments.models == list(MODELS) and arguments.schemes == list(SCHEMES):
        (arguments.out / "llm.md").write_text(
            f"# Perplexity of language models\n\n{text}\n", encoding="utf-8"
        )
    return int(worse > 0)


def _cells(
    found: dict[str, float | str], busy: bool, late: bool = False
) -> list[object]:
    if "value" not in found:
        return [
            f"refused: {str(found['error'])[:80]}" if "error" in found else "",
            "",
            "",
        ]
    seconds = "" if busy else f"{float(found['seconds']):.1f}"
    return [
        f"{float(found['value']):.4f}{'*' * late}",
        seconds,
        f"{float(found['peak_mb']):.0f}",
    ]


if __name__ == "__main__":
    sys.exit(main())
