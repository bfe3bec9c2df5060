"""Blocks that the pages of several results have: the verdict, the outputs, settings."""

from __future__ import annotations

from collections.abc import Iterable

from quark_onnx.common.wording import byte_size
from quark_onnx.page.blocks import Grid, Judgement
from quark_onnx.page.verdict import Action
from quark_onnx.report.figures import decibels, percentage
from quark_onnx.report.measure import OutputError
from quark_onnx.report.verdict.verdict import Verdict


def verdict_block(verdict: Verdict | None) -> Judgement:
    """Return a verdict with its next steps."""
    if verdict is None:
        return Judgement("unknown", "no sample was run")
    steps = [
        Action(f"{step.text}:", step.command or step.options or step.call)
        for step in verdict.next_steps
    ]
    sentence = f"{verdict.sentence}, on {verdict.measured_on}"
    return Judgement(verdict.band, sentence, tuple(steps))


def size_fact(before: int, after: int) -> tuple[str, str, str]:
    """Return the size of a quantized model as a fact, with the change."""
    ratio = before / max(1, after)
    change = f"{ratio:.2f}× smaller than {byte_size(before)}"
    return (
        "Size",
        byte_size(after),
        change if ratio > 1 else f"{byte_size(before)} before",
    )


def outputs_block(outputs: Iterable[OutputError]) -> Grid:
    """Return the errors of the outputs as a table."""
    rows = list[tuple[str, ...]]()
    for output in outputs:
        spread = ""
        if output.spread is not None:
            spread = " / ".join(f"{value:.1f}" for value in output.spread)
        if output.random:
            rows.append((output.name, "", "", "", "random in the float model"))
        elif output.sqnr is None:
            equal = f"{percentage(output.agreement or 0.0)} of the values are equal"
            rows.append((output.name, "", "", "", equal))
        else:
            largest = "" if output.max_error is None else f"{output.max_error:.4g}"
            rows.append(
                (
                    output.name,
                    decibels(output.sqnr),
                    spread,
                    f"{output.cosine:.6f}",
                    largest,
                )
            )
    header = (
        "output",
        "SQNR, dB",
        "least / median / greatest of a sample",
        "cosine",
        "largest error",
    )
    return Grid("Outputs", header, rows)
