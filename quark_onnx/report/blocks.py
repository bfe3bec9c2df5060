"""Blocks that the pages of several results have: the verdict, the outputs, settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from quark_onnx.common.wording import byte_size, counted
from quark_onnx.page.blocks import Gallery, Judgement, TitledTable
from quark_onnx.report.figures import decibels, percent, percentage
from quark_onnx.report.measure import OutputError
from quark_onnx.report.verdict.exhibits import Exhibits
from quark_onnx.report.verdict.labels import Score
from quark_onnx.report.verdict.verdict import Verdict


def verdict_block(
    verdict: Verdict | None, missing: str = "no sample was run"
) -> Judgement:
    """Return a verdict with its next steps; without one, the reason ``missing``."""
    if verdict is None:
        return Judgement("unknown", missing)
    actions = tuple(step.action for step in verdict.next_steps)
    return Judgement(verdict.band, verdict.sentence, actions, verdict.measured_on)


def gallery_blocks(exhibits: Exhibits | None, verdict: Verdict | None) -> list[Gallery]:
    """Return the samples that differ most; empty for random data, where samples have no meaning."""
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


def score_facts(scores: Sequence[Score]) -> list[tuple[str, str, str]]:
    """Return scores on labels as facts, with those of the float model."""
    return [
        (
            score.title,
            f"{percent(score.other)} %",
            f"{percent(score.reference)} % in float",
        )
        for score in scores
    ]


def outputs_block(
    outputs: Sequence[OutputError],
    measured_on: str,
    more: Mapping[str, Mapping[str, str]] | None = None,
) -> TitledTable:
    """Return the errors of the outputs as a table.

    Args:
        outputs: the errors, of single runs or of consecutive samples.
        measured_on: the samples in words.
        more: title of each further column, with its cells by the name of the output.
    """
    more = more or {}
    header = (
        "output",
        "SQNR, dB",
        "min / median / max of a sample",
        "cosine",
        "largest error",
        *more,
        "",
    )
    rows = list[tuple[str, ...]]()
    for output in outputs:
        further = [cells.get(output.name, "") for cells in more.values()]
        rows.append((output.name, *_figures(output), *further, _remark(output)))
    grid = TitledTable("Outputs", header, rows, f"on {measured_on}", "error")
    return grid.without_empty_columns()


def _figures(output: OutputError) -> tuple[str, str, str, str]:
    # An error against a random reference means nothing, so no number is shown.
    if output.random or output.sqnr is None:
        return "", "", "", ""
    spread = ""
    if output.spread is not None:
        spread = " / ".join(f"{value:.1f}" for value in output.spread)
    largest = "" if output.max_error is None else f"{output.max_error:.4g}"
    return decibels(output.sqnr), spread, f"{output.cosine:.6f}", largest


def _remark(output: OutputError) -> str:
    """Return what the figures of an output do not say."""
    if output.random:
        return "random: another value each time the float model runs"
    if output.sqnr is None:
        return f"{percentage(output.agreement or 0.0)} of the values agree"
    remarks = list[str]()
    if output.steps:
        remarks.append(f"after {counted(output.steps, 'sample')} with its own state")
    if output.broken:
        values = counted(output.broken, "value is", "values are")
        remarks.append(f"{values} finite in one of the models alone")
    return ", ".join(remarks)
