"""Where our best perplexity with a format is above another tool's: is it worse, or unlucky?

    QUARK_ONNX_DATA=... python benchmarks/llm_paired.py [--draws 3] [--amd-quark-python PYTHON]
        [--llm-compressor-python PYTHON] [--gptqmodel-python PYTHON]

For each such pair in `results/llm_algorithms.json` whose tool has an environment, both quantize
again, with the windows that calibrate there, and with as many others of the same text, of which no
two draws share one (a model whose calibration text has no more is measured once). They are compared
window by window of the text that is scored: what the other loses less ours, in 0.0001 nats for each
token, with the standard error of its mean over windows and draws. No time is taken, so the machine
may be busy. What was found is kept in results/llm_paired.json. The exit code is 1 where a pair was
not measured, or ours loses more: so much that chance alone would call one so in less than 5 % of
all cases, of all that might have looked worse: each format with each tool that has it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from _data import root
from _images import Array, Difference, difference, worse
from _results import Row, Store, add_arguments, table
from llm import measured, windows_of
from llm_algorithms import (
    PEERS,
    Peer,
    add_peers,
    best_of,
    by_model,
    command_of,
    formats_of,
    peers_of,
)
from peers.scored import losses_of

#: What differences are told in.
NATS = 1e-4
TITLE = "# Perplexities that are above another tool's, window by window"


@dataclass(frozen=True)
class Pair:
    """Our best with a format, and that of a tool which is below it, by the names of their
    algorithms.
    """

    model: str
    format: str
    ours: str
    tool: str
    theirs: str

    @property
    def key(self) -> str:
        return f"{self.model}/{self.format}/{self.tool}"

    @property
    def named(self) -> Row:
        """What a row that was found of it has to have."""
        return {"ours": self.ours, "theirs": self.theirs}


def pairs(rows: Mapping[str, Row]) -> tuple[list[Pair], int]:
    """Those where ours is above, and how many there are in all."""
    found, count = list[Pair](), 0
    for model, own in by_model(rows):
        for format in formats_of(own):
            name, ours = best_of(own, format, "ours")
            for tool in PEERS:
                other, theirs = best_of(own, format, tool)
                if ours and theirs:
                    count += 1
                    if ours["value"] > theirs["value"]:
                        found.append(Pair(model, format, name, tool, other))
    return found, count


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--draws",
        type=int,
        default=3,
        metavar="COUNT",
        help="of windows that calibrate, at most",
    )
    add_peers(parser)
    add_arguments(parser, "out")
    arguments = parser.parse_args()
    peers, store, missed = (
        peers_of(arguments),
        Store(arguments.out / "llm_paired.json"),
        list[str](),
    )
    looked_at, count = pairs(Store(arguments.out / "llm_algorithms.json").rows())
    for pair in looked_at:
        if pair.tool not in peers:
            continue
        try:
            ours, theirs = zip(*_losses(pair, peers, arguments.draws), strict=True)
        except RuntimeError as error:
            missed.append(f"{pair.key}: {error}")
            store.put(pair.key, {})
            continue
        gain = difference(theirs, ours, NATS)
        store.put(pair.key, pair.named | {"draws": len(ours)} | asdict(gain))
        print(pair.key, gain, file=sys.stderr, flush=True)
    known = store.rows()
    rows = {
        pair.key: row
        for pair in looked_at
        if pair.named.items() <= (row := known.get(pair.key, {})).items()
    }
    missed += [
        f"{pair.key}: not measured" for pair in looked_at if pair.key not in rows
    ]
    found = {
        key: Difference(row["mean"], row["error"], row["freedom"])
        for key, row in rows.items()
    }
    head = [
        "model, format, tool",
        "ours",
        "the tool's",
        "draws",
        "the tool loses more, 0.0001 nats",
        "chance",
    ]
    lines = [
        [
            key,
            row["ours"],
            row["theirs"],
            row["draws"],
            found[key],
            f"{found[key].chance():.2f}",
        ]
        for key, row in rows.items()
    ]
    text = f"{table(head, lines)}\n\n{len(looked_at)} of {count} are above."
    (arguments.out / "llm_paired.md").write_text(
        f"{TITLE}\n\n{text}\n", encoding="utf-8"
    )
    missed += [
        f"{key}: ours is worse by more than chance" for key in worse(found, count)
    ]
    print("\n".join([text, *missed]))
    return int(bool(missed))


def _losses(
    pair: Pair, peers: Mapping[str, tuple[Path, Peer]], draws: int
) -> Iterator[tuple[Array, Array]]:
    """What ours and the other lose on each window, draw by draw."""
    for draw in range(draws):
        windows = windows_of(pair.model, draw)
        if not len(windows["calibrate"]):
            return  # there are no others
        with TemporaryDirectory() as place:
            file = str(Path(place) / "windows.npz")
            np.savez(file, **windows)
            folder = str(root() / "llm" / pair.model)
            both = [("ours", pair.ours), (pair.tool, pair.theirs)]
            ours, theirs = (
                _lost(command_of(tool, peers, folder, file, pair.format, name), file)
                for tool, name in both
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
