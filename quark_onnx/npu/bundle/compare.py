"""Compare what this machine computes with what was recorded when the bundle was made: offloaded is not yet correct.

    python compare.py [--device auto|npu|cpu] [--least 20]

For each output of each shipped sample: the signal-to-noise ratio in dB, the greatest deviation, and whether the
greatest value is at the same place. The exit code is 1 if any ratio is below --least.
"""

from __future__ import annotations

import argparse
import sys

import numpy as np
from npu_session import HERE, open_session


def sqnr(expected: np.ndarray, found: np.ndarray) -> float:
    """Signal-to-noise ratio in dB; infinite for equal arrays."""
    wanted, error = expected.astype(np.float64), found.astype(np.float64) - expected.astype(np.float64)
    noise = float(np.square(error).sum())
    signal = float(np.square(wanted).sum())
    return float("inf") if noise == 0 else 10 * float(np.log10(max(signal, 1e-300) / noise))


def main() -> int:
    parser = argparse.ArgumentParser(description="Compare this machine's outputs with the recorded ones.")
    parser.add_argument("--device", choices=["auto", "npu", "cpu"], default="auto")
    parser.add_argument("--least", type=float, default=20.0, help="least signal-to-noise ratio in dB (default: 20)")
    options = parser.parse_args()
    session, where = open_session(options.device)
    names = [value.name for value in session.get_outputs()]
    worst = float("inf")
    files = sorted((HERE / "samples").glob("*.npz"))
    for file in files:
        with np.load(file, allow_pickle=False) as arrays:
            sample = {value.name: arrays[value.name] for value in session.get_inputs()}
        with np.load(HERE / "outputs" / file.name, allow_pickle=False) as arrays:
            expected = [arrays[f"output_{place}"] for place in range(len(names))]
        for name, wanted, found in zip(names, expected, session.run(None, sample), strict=True):
            if wanted.shape != found.shape:
                print(f"{file.name} {name}: shape {found.shape}, recorded {wanted.shape}")
                worst = -float("inf")
                continue
            ratio, greatest = sqnr(wanted, found), float(np.abs(found - wanted).max(initial=0))
            same = "same" if np.argmax(found) == np.argmax(wanted) else "OTHER"
            print(f"{file.name} {name}: {ratio:.1f} dB, greatest deviation {greatest:.3g}, {same} greatest value")
            worst = min(worst, ratio)
    print(f"on the {where.upper()}, {len(files)} samples: worst {worst:.1f} dB")
    if worst < options.least:
        print(f"compare: below {options.least:g} dB: this machine computes something else", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
