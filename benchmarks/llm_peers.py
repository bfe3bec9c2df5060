"""Time and peak memory of GPTQ on one language model, beside other tools in the same run, and the floor.

    python benchmarks/llm_peers.py --amd-quark-python PYTHON --llm-compressor-python PYTHON --gptqmodel-python PYTHON
        [--layers 16 --hidden 1024] [--algorithms gptq awq] [--folder DIR] [--busy]

The model is a Llama with random weights in float32, made in a temporary folder; 2,048 random tokens calibrate. Each run
is a process of its own. Ours goes from file to file and writes the checkpoint, with its defaults and once more with
one sweep and ranges from least to greatest value, which is what the others do; the others quantize a model that they
have loaded, and neither loading nor writing is timed. The floor is what no run can do without, at the rate of a matrix
product of this machine: one pass of each token through the blocks, the products of inputs, and, for GPTQ, a third of
the cube of the inputs for their inverse and their square, for each output, for its sweep.
The exit code is 1 where ours is not twice as fast as each other tool, or takes more than half the memory.
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
from _memory import peak_mb
from _results import Row, Store, table
from llm import measured
from llm_algorithms import add_peers, peers_of
from llm_large import add_arguments, config_of, product_rate, write

FORMAT = "uint4_wo_128"
#: Ours, by what the table calls it: with its defaults, and with what the others do and no more.
ALGORITHMS = {
    "gptq": {"ours": "gptq", "ours, one sweep": "gptq:fit=false,polish=0"},
    "awq": {"ours": "awq"},
}
LAYERS, HIDDEN, VOCABULARY = 16, 1024, 8000
WINDOWS, LENGTH = 8, 256
#: How often as fast, and what share of the memory.
FASTER, LESS = 2.0, 0.5


def child(folder: str, tokens: str, name: str) -> None:
    """Quantize in this process, and print what it took."""
    import transformers.models.llama.modeling_llama  # noqa: F401 - imports are not timed

    from quark_onnx.torch.ptq import Text, config_for, ptq

    config = config_for(FORMAT).with_(algorithms=(name,))
    start = time.perf_counter()
    with TemporaryDirectory(dir=Path(folder).parent) as place:
        ptq(folder, Path(place) / "result", config, text=Text(tokens, WINDOWS, LENGTH), progress=False)
        print(json.dumps({"seconds": time.perf_counter() - start, "peak_mb": peak_mb()}))


def floor(name: str, layers: int, hidden: int) -> float:
    """Seconds."""
    wide, tokens = hidden * 11 // 4, WINDOWS * LENGTH
    small = hidden // 64 // 8 * 64 or 64  # of keys, and of values
    shapes = [(hidden, (hidden + 2 * small, hidden)), (hidden, (wide, wide)), (wide, (hidden,))]
    operations = 0.0
    for inputs, outputs in shapes:
        operations += 2 * tokens * inputs * sum(outputs)
        if name == "gptq":
            operations += 2 * tokens * inputs**2 + 2 * inputs**3 / 3 + inputs**2 * sum(outputs)
    return layers * operations / product_rate(hidden, "float32")


def main() -> int:
    if sys.argv[1:2] == ["--child"]:
        child(*sys.argv[2:])
        return 0
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_peers(parser)
    parser.add_argument("--algorithms", nargs="+", choices=ALGORITHMS, default=["gptq"], metavar="NAME")
    add_arguments(parser, LAYERS, HIDDEN)
    arguments = parser.parse_args()
    store, rows, missed = Store(arguments.out / "llm_peers.json"), list[list[object]](), list[str]()
    with TemporaryDirectory(dir=arguments.folder) as place:
        source, windows = Path(place) / "model", Path(place) / "windows.npz"
        config = config_of(arguments.layers, arguments.hidden, VOCABULARY, "float32")
        write(source, config)
        tokens = np.random.default_rng(0).integers(0, VOCABULARY, (WINDOWS + 1, LENGTH))
        np.savez(windows, calibrate=tokens[:-1], score=tokens[-1:])
        np.save(Path(place) / "tokens.npy", tokens[:-1])
        for name in arguments.algorithms:
            own = [sys.executable, __file__, "--child", str(source), str(Path(place) / "tokens.npy")]
            commands = {tool: [*own, settings] for tool, settings in ALGORITHMS[name].items()}
            for tool, (python, peer) in peers_of(arguments).items():
                if name in peer.algorithms:
                    commands[tool] = peer.command(python, str(source), str(windows), FORMAT, name)
            least, found = floor(name, arguments.layers, arguments.hidden), dict[str, Row]()
            for tool, command in commands.items():
                found[tool] = measured(command) | {"floor": least}
                store.put(f"{arguments.layers} × {arguments.hidden}/{name}/{tool}", found[tool])
                rows.append([name, tool, *_cells(found[tool], found["ours"]), f"{least:.1f}"])
                print(*rows[-1], file=sys.stderr, flush=True)
            missed += _complaints(name, found, arguments.busy)
    head = ["algorithm", "tool", "seconds", "times ours", "peak MB", "times ours", "floor, seconds"]
    text = table(head, rows)
    print("\n".join([text, *missed]))
    if arguments.layers == LAYERS and arguments.hidden == HIDDEN and arguments.algorithms == ["gptq"]:
        title = f"# GPTQ at {FORMAT} on a Llama with {LAYERS} blocks of {HIDDEN} channels"
        (arguments.out / "llm_peers.md").write_text(f"{title}\n\n{text}\n", encoding="utf-8")
    return int(bool(missed))


def _cells(found: Row, ours: Row) -> list[str]:
    if "seconds" not in found:
        return [f"refused: {str(found['error'])[:60]}", "", "", ""]
    return [
        *(f"{found['seconds']:.1f}", f"{found['seconds'] / ours['seconds']:.1f}"),
        *(f"{found['peak_mb']:.0f}", f"{found['peak_mb'] / ours['peak_mb']:.1f}"),
    ]


def _complaints(name: str, found: Mapping[str, Row], busy: bool) -> Iterator[str]:
    """What is not as it should be."""
    own = {tool: row for tool, row in found.items() if tool in ALGORITHMS[name]}
    yield from (f"{tool}: {row['error']}" for tool, row in own.items() if "seconds" not in row)
    for tool, other in found.items():
        if tool in own or "seconds" not in other:
            continue
        for ours, row in own.items():
            if "seconds" in row and (faster := other["seconds"] / row["seconds"]) < FASTER and not busy:
                yield f"{ours}: {faster:.1f} times as fast as {tool}"
            if "seconds" in row and (less := row["peak_mb"] / other["peak_mb"]) > LESS:
                yield f"{ours}: {less:.2f} of the memory of {tool}"


if __name__ == "__main__":
    sys.exit(main())
