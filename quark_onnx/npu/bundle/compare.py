"""Compare what this machine computes with what was recorded when the bundle was made: offloaded is
not yet correct.

    python compare.py [--device auto|npu|cpu] [--least 20]

For each output of each shipped sample: the signal-to-noise ratio in dB, the greatest deviation, and
whether the greatest value is at the same place. The exit code is 1 if any ratio is below --least,
and 2 if there are no samples.
"""

from __future__ import annotations

import argparse
import re
import sys

import numpy as np
from npu_session import HERE, arrays_of, open_session, printable


def sqnr(expected: np.ndarray, found: np.ndarray) -> float:
    """Signal-to-noise ratio in dB: infinite for equal arrays, minus infinity where one alone is no
    number.
    """
    if expected.dtype.kind not in "biuf" or found.dtype.kind not in "biuf":
        return float("inf") if (expected == found).all() else -float("inf")
    wanted, error = expected.astype(np.float64), deviation(expected, found)
    noise, signal = (
        float(np.square(error).sum()),
        float(np.square(wanted[np.isfinite(wanted)]).sum()),
    )
    if noise == 0:
        return float("inf")
    return (
        10 * float(np.log10(max(signal, 1e-300) / noise))
        if np.isfinite(noise)
        else -float("inf")
    )


def deviation(expected: np.ndarray, found: np.ndarray) -> np.ndarray:
    """The difference of found and expected values; 0 where both are NaN, or the same infinity."""
    wanted, got = expected.astype(np.float64), found.astype(np.float64)
    same = (wanted == got) | (np.isnan(wanted) & np.isnan(got))
    with np.errstate(invalid="ignore"):
        return np.where(
            same,
            0.0,
            np.where(np.isfinite(got) & np.isfinite(wanted), got - wanted, np.inf),
        )


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Compare this machine's outputs with the recorded ones.",
    )
    parser.add_argument("--device", choices=["auto", "npu", "cpu"], default="auto")
    parser.add_argument(
        "--least",
        type=float,
        default=20.0,
        help="least signal-to-noise ratio in dB (default: 20)",
    )
    options = parser.parse_args()
    session, where = open_session(options.device)
    names = [printable(value.name) for value in session.get_outputs()]
    worst = float("inf")
    files = sorted((HERE / "samples").glob("*.npz"))
    if not files:
        print(
            f"compare: {HERE / 'samples'} has no samples; copy the whole folder of the bundle",
            file=sys.stderr,
        )
        return 2
    for file in files:
        with np.load(file, allow_pickle=False) as arrays:
            sample = {value.name: arrays[value.name] for value in session.get_inputs()}
        with np.load(HERE / "outputs" / file.name, allow_pickle=False) as arrays:
            expected = dict(arrays)
        computed: dict[str, np.ndarray] = {}
        for place, value in enumerate(session.run(None, sample)):
            computed.update(arrays_of(f"output_{place}", value))
        for key in {**expected, **computed}:
            name = re.sub(r"^output_(\d+)", lambda found: names[int(found[1])], key)
            if key not in computed or key not in expected:
                side = "recorded" if key in expected else "computed"
                print(f"{file.name} {name}: {side} alone")
                worst = -float("inf")
                continue
            wanted, found = expected[key], computed[key]
            if wanted.shape != found.shape:
                print(
                    f"{file.name} {name}: shape {found.shape}, recorded {wanted.shape}",
                )
                worst = -float("inf")
                continue
            ratio = sqnr(wanted, found)
            more = ""
            if wanted.dtype.kind in "biuf" and wanted.size:
                same = "same" if np.argmax(found) == np.argmax(wanted) else "OTHER"
                greatest = np.abs(deviation(wanted, found)).max()
                more = f", greatest deviation {greatest:.3g}, {same} greatest value"
            print(f"{file.name} {name}: {ratio:.1f} dB{more}")
            worst = min(worst, ratio)
    count = f"{len(files)} sample" if len(files) == 1 else f"{len(files)} samples"
    print(f"on the {where.upper()}, {count}: worst {worst:.1f} dB")
    if worst < options.least:
        hint = (
            ""
            if where == "npu"
            else "; without VNNI a CPU's sums of 8-bit products saturate in onnxruntime"
        )
        print(
            f"compare: below {options.least:g} dB: this machine computes something else{hint}",
            file=sys.stderr,
        )
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
