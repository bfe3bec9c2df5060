"""Blocks that the pages of several results have: the verdict, the outputs, settings."""

from __future__ import annotations

from collections.abc import Sequence

from quark_onnx.common.wording import byte_size, counted
from quark_onnx.page.blocks import Gallery, Grid, Judgement
from quark_onnx.page.terminal import text_of
from quark_onnx.report.figures import decibels, percentage
from quark_onnx.report.measure import OutputError
from quark_onnx.report.verdict.exhibits import Exhibits
from quark_onnx.report.verdict.verdict import Verdict


def verdict_block(verdict: Verdict | None) -> Judgement:
    """Return a verdict with its next steps."""
    if verdict is None:
        return Judgement("unknown", "no sample was run")
    actions = tuple(step.action for step in verdict.next_steps)
    return Judgement(verdict.band, verdict.sentence, actions, verdict.measured_on)


def verdict_lines(verdict: Verdict) -> list[str]:
    """Return a verdict with its next steps as lines of a report."""
    return text_of(verdict_block(verdict))


def gallery_blocks(exhibits: Exhibits | None, verdict: Verdict | None) -> list[Gallery]:
    """Return the samples that differ most; empty for random data, on which they say nothing."""
    if exhibits is None or verdict is None or verdict.band == "unknown":
        return []
    return [exhibits.gallery]


def size_fact(before: int, after: int) -> tuple[str, str, str]:
    """Return the size of a quantized model as a fact, with the change."""
    ratio = before / max(1, after)
    change = f"{ratio:.2f}× smaller than {byte_size(before)}"
    return (
        "Size",
        byte_size(after),
        change if ratio > 1 else f"{byte_size(before)} before",
    )


def outputs_block(outputs: Sequence[OutputError], measured_on: str) -> Grid:
    """Return the errors of the outputs as a table, with the samples in words."""
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
    lines = list(map(output_line, outputs))
    return Grid("Outputs", header, rows, f"on {measured_on}", "error", lines)


def output_line(output: OutputError) -> str:
    """Return the error of an output as a line of text.

    Args:
        output: the error of an output, of single runs or of consecutive samples.
    """
    name = output.name
    if output.random:
        return f"{name}: random, another value each time the float model runs"
    if output.sqnr is None:
        return f"{name}: {percentage(output.agreement or 0.0)} of the values agree"
    text = name
    if output.steps:
        text += f" after {counted(output.steps, 'sample')} with its own state"
    text += f": SQNR {decibels(output.sqnr)} dB"
    if output.spread is not None:
        least, median, greatest = (f"{sqnr:.1f}" for sqnr in output.spread)
        text += f" (samples {least} to {greatest}, median {median})"
    text += f", cosine {output.cosine:.6f}, largest error {output.max_error:.4g}"
    if output.broken:
        values = counted(output.broken, "value is", "values are")
        text += f", {values} finite in one of the models alone"
    return text
