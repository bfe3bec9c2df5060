"""Where our best perplexity with a format is above another tool's: is it worse, or unlucky?

    QUARK_ONNX_DATA=... python benchmarks/llm_paired.py [--draws 5] [--amd-quark-python PYTHON]
        [--llm-compressor-python PYTHON] [--gptqmodel-python PYTHON]

For each such pair in `results/llm_algorithms.json`, both tools quantize again, with the windows that calibrate there,
and with as many others of the same text, drawn by seeds (a model whose calibration text has no more is measured once).
They are compared window by window of the text that is scored: what the other loses less ours, in 0.0001 nats for each
token, with the standard error of its mean over windows and draws. No time is taken, so the machine may be busy.
The exit code is 1 where ours loses more and chance alone would call one of all pairs so in less than 5 % of all cases,
or where a run fails.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from _data import root
from _images import Array, Difference, difference, worse
from _results import Row, Store, table
from llm import measured, windows_of
from llm_algorithms import PEERS, Peer, add_peers, best_of, by_model, command_of, formats_of, peers_of
from peers.scored import losses_of

#: What differences are told in.
NATS = 1e-4
TITLE = "# Perplexities that are above another tool's, window by window"


@dataclass(frozen=True)
class Pair:
    """Our best with a format, and that of a tool which is below it, by the names of their algorithms."""

    model: str
    format: str
    ours: str
    tool: str
    theirs: str

    @property
    def key(self) -> str:
        return f"{self.model}/{self.format}/{self.tool}"


def pairs(rows: Mapping[str, Row], tools: Sequence[str]) -> Iterator[Pair]:
    """What is to be looked at."""
    for model, own in by_model(rows):
        for format in formats_of(own):
            name, ours = best_of(own, format, "ours")
            for tool in tools:
                other, theirs = best_of(own, format, tool)
                if ours and theirs and ours["value"] > theirs["value"]:
                    yield Pair(model, format, name, tool, other)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=5, metavar="COUNT", help="of windows that calibrate")
    add_peers(parser)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    arguments = parser.parse_args()
    if not (peers := peers_of(arguments)):
        parser.error(f"name the environment of a tool: {', '.join(f'--{tool}-python' for tool in PEERS)}")
    store, failed = Store(arguments.out / "llm_paired.json"), list[str]()
    looked_at = list(pairs(Store(arguments.out / "llm_algorithms.json").rows(), list(peers)))
    for pair in looked_at:
        try:
            ours, theirs = zip(*_losses(pair, peers, arguments.draws), strict=True)
        except RuntimeError as error:
            failed.append(f"{pair.key}: {error}")
            continue
        gain = difference(theirs, ours, NATS)
        store.put(pair.key, {"ours": pair.ours, "theirs": pair.theirs, "draws": len(ours)} | asdict(gain))
        print(pair.key, gain, file=sys.stderr, flush=True)
    rows = {pair.key: row for pair in looked_at if (row := store.rows().get(pair.key))}
    found = {key: Difference(row["mean"], row["error"], row["freedom"]) for key, row in rows.items()}
    head = ["model, format, tool", "ours", "the tool's", "draws", "the tool loses more, 0.0001 nats", "chance"]
    lines = [
        [key, row["ours"], row["theirs"], row["draws"], found[key], f"{found[key].chance():.2f}"]
        for key, row in rows.items()
    ]
    text = table(head, lines)
    (arguments.out / "llm_paired.md").write_text(f"{TITLE}\n\n{text}\n", encoding="utf-8")
    late = worse(found)
    print("\n".join([text, *failed, *(f"{key}: ours is worse by more than chance" for key in late)]))
    return int(bool(failed or late))


def _losses(pair: Pair, peers: Mapping[str, tuple[Path, Peer]], draws: int) -> Iterator[tuple[Array, Array]]:
    """What ours and the other lose on each window, draw by draw."""
    before: Array | None = None
    for draw in (None, *range(1, draws)):
        windows = windows_of(pair.model, draw)
        if before is not None and np.array_equal(before, windows["calibrate"]):
            return  # there are no others
        before = windows["calibrate"]
        with TemporaryDirectory() as place:
            file = str(Path(place) / "windows.npz")
            np.savez(file, **windows)
            folder = str(root() / "llm" / pair.model)
            both = [("ours", pair.ours), (pair.tool, pair.theirs)]
            ours, theirs = (
                _lost(command_of(tool, peers, folder, file, pair.format, name), file) for tool, name in both
            )
        yield ours, theirs


def _lost(command: list[str], file: str) -> Array:
    found = measured(command)
    if "value" not in found:
        raise RuntimeError(str(found.get("error")))
    losses: Array = np.load(losses_of(file))
    return losses


if __name__ == "__main__":
    sys.exit(main())
