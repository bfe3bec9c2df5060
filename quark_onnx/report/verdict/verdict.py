"""The verdict: the quality of a quantized model in the terms of its task."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from quark_onnx.common.wording import counted
from quark_onnx.page.blocks import Action
from quark_onnx.report.figures import near_limits

Band = Literal["good", "risky", "poor", "unclear", "unknown"]
BANDS: tuple[Band, ...] = ("good", "risky", "poor")
#: A ratio of latencies above which a model is slower.
SLOWER = 1.05


@dataclass(frozen=True)
class MeasuredValue:
    """One measured value.

    Attributes:
        name: a stable key, such as ``agreement``.
        value: a share, a ratio, dB or nats; NaN where it could not be measured.
        text: the value in words, with its unit.
        least: lower bound of the value at a confidence of 95 %; None if unknown.
    """

    name: str
    value: float
    text: str
    least: float | None = None


@dataclass(frozen=True)
class Gain:
    """Effect of a change of the configuration, on the samples that judge the run.

    Attributes:
        sqnr: SQNR of the worst output in dB: of the run, and with the change.
        figure: the figure that decides the band, of the run and with the change, as text; empty
            where the SQNR decides.
        runtime: latency relative to the model of the run; None if not measured.
        float_runtime: latency relative to the float model; None if not measured.
        samples: number of samples that judge; 0 if unknown.
        gate: minimum SQNR in dB that the run missed; None without one.
    """

    sqnr: tuple[float, float]
    figure: str = ""
    runtime: float | None = None
    float_runtime: float | None = None
    samples: int = 0
    gate: float | None = None

    @property
    def meets_gate(self) -> bool:
        """Return whether the change meets the gate that the run missed; False without one."""
        return self.gate is not None and self.sqnr[1] >= self.gate

    @property
    def decibels(self) -> float:
        """Return the difference of the SQNR in dB."""
        before, after = self.sqnr
        return 0.0 if before == after else after - before

    def __str__(self) -> str:
        before, after = self.sqnr
        reached = near_limits(after, [] if self.gate is None else [self.gate], 1)
        parts = [f"{self.decibels:+.1f} dB ({before:.1f} -> {reached})"]
        if self.gate is not None:
            parts.append("meets the gate" if self.meets_gate else "below the gate")
        if self.figure:
            parts.append(self.figure)
        if self.samples:
            parts[-1] += f" on {counted(self.samples, 'held-out sample')}"
        if self.runtime is not None:
            parts.append(f"{self.runtime:.2f} times the runtime")
        if self.float_runtime is not None and self.float_runtime > SLOWER:
            parts.append(
                f"slower than the float model ({self.float_runtime:.2f} times)"
            )
        return ", ".join(parts)


@dataclass(frozen=True)
class NextStep:
    """A change to try, and its effect.

    Attributes:
        options: options that change the ``quark-onnx`` command of the run; empty if the data
            must change. ``--color swapped`` stands for the other channel order.
        effect: what the change does.
        call: the change in Python, as a call with the model, the data and the configuration
            of the run as ``model``, ``data`` and ``config``; or words if no call can make it.
        command: the complete command line, which the command line fills in; else empty.
        expected: the usual gain of a change that a trial can measure; else empty.
        gain: the measured gain; None if the change was not tried.
    """

    options: str
    effect: str
    call: str
    command: str = ""
    expected: str = ""
    gain: Gain | None = None

    @property
    def text(self) -> str:
        """Return the effect with the measured gain, or with the expected one."""
        if self.gain is not None:
            return f"{self.gain}: {self.effect}"
        if self.expected:
            return f"{self.effect} (not tried; {self.expected})"
        return self.effect

    @property
    def action(self) -> Action:
        """Return the step with its command; without a command, with the call in Python."""
        return Action(self.text, self.command or self.call)


@dataclass(frozen=True)
class Verdict:
    """The quality of a quantized model compared with its float model.

    Attributes:
        task: name of a task in ``TASKS``.
        band: ``good``, ``risky`` or ``poor``; ``unclear`` for too few held-out samples, and
            ``unknown`` for random data.
        sentence: the verdict in one sentence, without the band.
        figures: the measured values; those in ``THRESHOLDS`` decide the band.
        samples: number of samples that were run.
        held_out: number of samples not used for calibration.
        measured_on: the samples in words, and their bias if calibration used them.
        next_steps: commands to try, the most promising first; empty for good figures.
    """

    task: str
    band: Band
    sentence: str
    figures: tuple[MeasuredValue, ...]
    samples: int
    held_out: int
    measured_on: str
    next_steps: tuple[NextStep, ...] = ()

    def __str__(self) -> str:
        return f"{self.band}: {self.sentence}"

    @property
    def sqnr(self) -> float | None:
        """Return the SQNR of the worst output in dB; None without one."""
        return sqnr_of(self.figures)

    def doubted(self, doubt: str, step: NextStep) -> Verdict:
        """Return the verdict for untrustworthy data: risky at best.

        Args:
            doubt: what is wrong with the data, as a sentence.
            step: the change that the data needs.
        """
        # A poor verdict stays poor, an unclear one unclear, and an unknown one unknown.
        band: Band = "risky" if self.band == "good" else self.band
        return replace(
            self,
            band=band,
            sentence=f"{doubt}; {self.sentence}",
            # Other settings were measured on the wrong inputs, too.
            next_steps=(step,),
        )


@dataclass(frozen=True)
class Threshold:
    """The least (or greatest) value of a figure for the bands good and risky.

    Attributes:
        figure: name of the figure.
        good: bound of the band good.
        risky: bound of the band risky; beyond it, the band is poor.
        rising: whether greater values are better.
    """

    figure: str
    good: float
    risky: float
    rising: bool = True

    def band(self, value: float) -> Band:
        """Return the band of a value; ``unknown`` for NaN.

        >>> Threshold("agreement", 0.95, 0.85).band(0.9)
        'risky'
        """
        if math.isnan(value):
            return "unknown"
        # With negated values, less is more: one comparison serves both directions.
        sign = 1 if self.rising else -1
        if sign * value >= sign * self.good:
            return "good"
        return "risky" if sign * value >= sign * self.risky else "poor"


#: Thresholds of outputs that are compared by SQNR, or value by value.
_SIGNAL_THRESHOLDS = (Threshold("sqnr", 20.0, 10.0), Threshold("equal", 0.99, 0.90))
#: Thresholds by task. Every row of a task must hold for a band. docs/accuracy.md has the same
#: table.
THRESHOLDS: dict[str, tuple[Threshold, ...]] = {
    "classifier": (Threshold("agreement", 0.95, 0.85),),
    # In event detection most decisions are "no": F1 judges the "yes" decisions by themselves.
    "decisions": (Threshold("agreement", 0.95, 0.85), Threshold("f1", 0.90, 0.70)),
    "segmentation": (Threshold("agreement", 0.97, 0.90),),
    "mask": (Threshold("iou", 0.90, 0.70),),
    "detector": (Threshold("f1", 0.90, 0.70), Threshold("iou", 0.85, 0.70)),
    "embedding": (Threshold("cosine", 0.98, 0.93), Threshold("rank", 0.95, 0.85)),
    "language": (Threshold("divergence", 0.05, 0.20, rising=False),),
    "image": (Threshold("psnr", 38.0, 30.0),),
    "regression": _SIGNAL_THRESHOLDS,
    "series": _SIGNAL_THRESHOLDS,
    "signal": _SIGNAL_THRESHOLDS,
}
TASKS = tuple(THRESHOLDS)


def limits_of(task: str, figure: str) -> tuple[float, ...]:
    """Return the thresholds of a figure, for texts that do not round across them.

    >>> limits_of("classifier", "agreement"), limits_of("language", "agreement")
    ((0.95, 0.85), ())
    """
    for threshold in THRESHOLDS[task]:
        if threshold.figure == figure:
            return threshold.good, threshold.risky
    return ()


def sqnr_of(figures: Iterable[MeasuredValue]) -> float | None:
    """Return the SQNR among figures in dB; None without one."""
    return next((figure.value for figure in figures if figure.name == "sqnr"), None)


#: The name of a model by task; a signal may be any tensor.
DESCRIPTIONS = {
    "classifier": "a classifier",
    "decisions": "a model of independent decisions",
    "segmentation": "a segmentation model",
    "mask": "a model of masks",
    "detector": "a detector",
    "embedding": "an embedding model",
    "language": "a language model",
    "image": "an image-to-image model",
}


def worst_band(bands: Sequence[Band]) -> Band:
    """Return the worst band; ``unknown`` is ignored unless every band is unknown.

    >>> worst_band(["good", "unknown", "risky"]), worst_band([])
    ('risky', 'unknown')
    """
    measured = [band for band in bands if band != "unknown"]
    if not measured:
        return "unknown"
    # BANDS is ordered from good to poor.
    return max(measured, key=BANDS.index)
