"""Time and peak memory of GPTQ and AWQ on language models, beside other tools in the same run, and
the floor.

    python benchmarks/llm_peers.py --amd-quark-python PYTHON --llm-compressor-python PYTHON
        --gptqmodel-python PYTHON [--layers N --hidden 1024] [--algorithms gptq awq] [--repeats 3]
        [--folder DIR] [--busy]

The model is a Llama with random weights in float32, made in a temporary folder, with fewer blocks
for AWQ; 2,048 random tokens calibrate. Each run is a process of its own; tools take turns, and
medians over the repeats are reported. CPU seconds are of ours and of llm-compressor. Ours goes from
file to file and writes the checkpoint, with its defaults and once more with one sweep and ranges
from least to greatest value, which is what the others do; the others quantize a model that they
have loaded, and neither loading nor writing is timed. The floor is what no run can do without, at
the rate of a matrix product of this machine: one pass of each token through the blocks, the
products of inputs, and, for GPTQ, a third of the cube of the inputs for their inverse and their
square, for each output, for its sweep. The exit code is 1 where ours, at the same work, is not
twice as fast as each other tool, or takes more than half the memory; what its defaults take is
shown, and not judged. Memory includes imports: torch and transformers take 335 MB in every tool, so
that on much smaller models than those by default no tool can take half of another.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import numpy as np
from _llm_shapes import small_llama, write
from _memory import peak_mb
from _results import Row, Store, add_arguments, table
from llm import measured
from llm_algorithms import PEERS, add_peers, peers_of
from llm_large import product_rate

FORMAT = "uint4_wo_128"
#: Ours, by what the table calls it: with its defaults, and last with what the others do and no
#: more.
ALGORITHMS = {
    "gptq": {
        "ours": "gptq",
        "ours, one sweep": "gptq:search_scales=false,coordinate_descent_passes=0",
    },
    "awq": {"ours": "awq"},
}
HIDDEN, VOCABULARY = 1024, 8000
#: Blocks of the model; fewer where others take minutes for each.
LAYERS = {"gptq": 16, "awq": 2}
WINDOWS, LENGTH = 8, 256
#: How often as fast, and what share of the memory.
FASTER, LESS = 2.0, 0.5


def child(folder: str, tokens: str, name: str) -> None:
    """Quantize in this process, and print what it took."""
    import transformers.models.llama.modeling_llama  # noqa: F401  - imports are not timed

    from quark_onnx.torch.pipelines.ptq import Text, config_for, ptq

    config = config_for(FORMAT).with_(algorithms=(name,))
    start, cpu = time.perf_counter(), time.process_time()
    with TemporaryDirectory(dir=Path(folder).parent) as place:
        ptq(
            folder,
            Text(tokens, WINDOWS, LENGTH),
            config,
            Path(place) / "result",
            progress=False,
        )
        found = {
            "seconds": time.perf_counter() - start,
            "cpu_seconds": time.process_time() - cpu,
            "peak_mb": peak_mb(),
        }
        print(json.dumps(found))


def floor(name: str, layers: int, hidden: int) -> float:
    """Seconds."""
    wide, tokens = hidden * 11 // 4, WINDOWS * LENGTH
    small = hidden // 64 // 8 * 64 or 64  # of keys, and of values
    shapes = [
        (hidden, (hidden + 2 * small, hidden)),
        (hidden, (wide, wide)),
        (wide, (hidden,)),
    ]
    operations = 0.0
    for inputs, outputs in shapes:
        operations += 2 * tokens * inputs * sum(outputs)
        if name == "gptq":
            operations += (
                2 * tokens * inputs**2 + 2 * inputs**3 / 3 + inputs**2 * sum(outputs)
            )
    return layers * operations / 2 / product_rate(wide, hidden, "float32")


def main() -> int:
    if sys.argv[1:2] == ["--child"]:
        child(*sys.argv[2:])
        return 0
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_peers(parser)
    parser.add_argument(
        "--algorithms",
        nargs="+",
        choices=ALGORITHMS,
        default=list(ALGORITHMS),
        metavar="NAME",
    )
    parser.add_argument(
        "--repeats",
        type=int,
        default=3,
        metavar="COUNT",
        help="measure all so often, in turn",
    )
    parser.add_argument("--layers", type=int, help="blocks")
    parser.add_argument("--hidden", type=int, default=HIDDEN, help="a multiple of 512")
    parser.add_argument("--folder", type=Path, help="place of the temporary models")
    parser.add_argument(
        "--busy", action="store_true", help="judge no times: other programs run"
    )
    add_arguments(parser, "out")
    arguments = parser.parse_args()
    store, missed = Store(arguments.out / "llm_peers.json"), list[str]()
    for name in arguments.algorithms:
        runs, layers = dict[str, list[Row]](), arguments.layers or LAYERS[name]
        for tool, row in _measured(name, layers, arguments):
            runs.setdefault(tool, []).append(row)
            print(
                *_cells(name, tool, layers, row, runs["ours"][-1]),
                file=sys.stderr,
                flush=True,
            )
        found = {tool: _median(rows) for tool, rows in runs.items()}
        for tool in (
            *ALGORITHMS[name],
            *PEERS,
        ):  # what is told of one run stands together
            store.put(_key(name, layers, arguments.hidden, tool), found.get(tool, {}))
        missed += _complaints(name, found, arguments.busy)
    head = [
        "algorithm",
        "blocks",
        "tool",
        "seconds",
        "times ours",
        "CPU seconds",
        "peak MB",
        "times ours",
        "floor, seconds",
    ]
    text = table(head, list(_lines(store.rows())))
    print("\n".join([text, *missed]))
    title = f"# GPTQ and AWQ at {FORMAT} on Llamas with {HIDDEN} channels"
    (arguments.out / "llm_peers.md").write_text(
        f"{title}\n\n{text}\n", encoding="utf-8"
    )
    return int(bool(missed))


def _measured(
    name: str, layers: int, arguments: argparse.Namespace
) -> Iterator[tuple[str, Row]]:
    """What each tool takes for an algorithm, ours first; over and over."""
    least = floor(name, layers, arguments.hidden)
    with TemporaryDirectory(dir=arguments.folder) as place:
        source, windows, calibrating = (
            Path(place) / each for each in ("model", "windows.npz", "tokens.npy")
        )
        size = small_llama(layers, arguments.hidden, VOCABULARY)
        write(source, size.config("float32"))
        tokens = np.random.default_rng(0).integers(0, VOCABULARY, (WINDOWS + 1, LENGTH))
        np.savez(windows, calibrate=tokens[:-1], score=tokens[-1:])
        np.save(calibrating, tokens[:-1])
        own = [sys.executable, __file__, "--child", str(source), str(calibrating)]
        commands = {
            tool: [*own, settings] for tool, settings in ALGORITHMS[name].items()
        }
        for tool, (python, peer) in peers_of(arguments).items():
            if name in peer.algorithms:
                commands[tool] = peer.command(
                    python, str(source), str(windows), FORMAT, name
                )
        for _ in range(arguments.repeats):
            for tool, command in commands.items():
                yield tool, measured(command) | {"floor": least}


def _median(runs: list[Row]) -> Row:
    """Of each number, all else as in the first run, and how many there are.

    A failure once is a failure.
    """
    failed = next((run for run in runs if "seconds" not in run), None)
    numbers = {
        name: median(float(run[name]) for run in runs)
        for name, value in runs[0].items()
        if isinstance(value, int | float)
    }
    return failed or runs[0] | numbers | {"runs": len(runs)}


def _key(name: str, layers: int, hidden: int, tool: str) -> str:
    return f"{layers} × {hidden}/{name}/{tool}"


def _lines(rows: Mapping[str, Row]) -> Iterator[list[str]]:
    """Of the models that are made without further words."""
    for name, layers in LAYERS.items():
        tools = [*ALGORITHMS[name], *PEERS]
        found = {
            tool: row
            for tool in tools
            if (row := rows.get(_key(name, layers, HIDDEN, tool)))
        }
        yield from (
            _cells(name, tool, layers, row, found["ours"])
            for tool, row in found.items()
        )


def _cells(name: str, tool: str, layers: int, found: Row, ours: Row) -> list[str]:
    head, last = [name, str(layers), tool], f"{found['floor']:.1f}"
    if "seconds" not in found:
        return [*head, f"refused: {str(found['error'])[:60]}", *[""] * 4, last]
    times, share = (
        f"{found[each] / ours[each]:.2f}" if each in ours else ""
        for each in ("seconds", "peak_mb")
    )
    return [
        *head,
        f"{found['seconds']:.1f}",
        times,
        f"{found['cpu_seconds']:.1f}" if "cpu_seconds" in found else "",
        f"{found['peak_mb']:.0f}",
        share,
        last,
    ]


def _complaints(name: str, found: Mapping[str, Row], busy: bool) -> Iterator[str]:
    """What is not as it should be."""
    own = list(ALGORITHMS[name])
    same = found[own[-1]]
    yield from (
        f"{tool}: {found[tool]['error']}"
        for tool in own
        if "seconds" not in found[tool]
    )
    if "seconds" not in same:
        return
    for tool, other in found.items():
        if tool in own or "seconds" not in other:
            continue
        if not busy and (faster := other["seconds"] / same["seconds"]) < FASTER:
            yield f"{own[-1]}: {faster:.1f} times as fast as {tool}"
        if (less := same["peak_mb"] / other["peak_mb"]) > LESS:
            yield f"{own[-1]}: {less:.2f} of the memory of {tool}"


if __name__ == "__main__":
    sys.exit(main())
