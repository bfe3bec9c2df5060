"""Another number format for a deployed model, where the forecast or the accuracy asks for one."""

from __future__ import annotations

from onnx import ModelProto

from quark_onnx.graph import Graph
from quark_onnx.npu.preflight import Preflight, preflight
from quark_onnx.passes import hard_swish_to_gate
from quark_onnx.planning.prepare import passes_for
from quark_onnx.report.verdict import NextStep, Verdict

#: The format with the smallest error of activations on integers.
_WIDE = "A16W8"


def format_steps(
    model: ModelProto, present: Preflight, verdict: Verdict | None
) -> tuple[NextStep, ...]:
    """Return the number format to try next, with the forecast for it.

    A forecast needs no calibration, so each format of the device gets one.

    Args:
        model: the legalized float model.
        present: the forecast of the deployed model.
        verdict: the verdict on the deployed model; None for BF16.

    Returns:
        One step at most: a format with a better partition where the forecast is not good, else
        16-bit activations where the verdict is risky or poor.
    """
    poor = verdict is not None and verdict.band in ("risky", "poor")
    if present.band == "good" and not poor:
        return ()
    graph = Graph.of(model)
    gated = graph.to_model() if hard_swish_to_gate(graph) else model
    usable = dict[str, Preflight]()
    for kind in present.target.presets:
        if kind == present.kind:
            continue
        # Of HardSwish, the legalization for this format may make a gate.
        form = (
            gated if passes_for(present.target, kind, [hard_swish_to_gate]) else model
        )
        forecast = preflight(
            form, present.target.name, kind=kind, release=present.release
        )
        # A format at which the compiler crashes is no advice.
        if not forecast.aborts:
            usable[kind] = forecast
    better = [forecast for forecast in usable.values() if _is_better(forecast, present)]
    if better and present.band != "good":
        # Each subgraph costs two transfers; among equal counts the larger share wins.
        best = min(better, key=lambda forecast: (forecast.subgraphs, -forecast.share))
        return (
            _step(best, present, "a better partition", "an accuracy to be measured"),
        )
    wide = usable.get(_WIDE)
    # 16 bits help the accuracy, but must not move work to the CPU.
    if poor and wide is not None and wide.share >= present.share:
        effect = "16-bit activations, which leave the error of the weights"
        return (_step(wide, present, effect, "often 10 dB or more"),)
    return ()


def _is_better(forecast: Preflight, present: Preflight) -> bool:
    """Return whether a forecast has fewer subgraphs without a smaller share, or avoids a crash."""
    # Any format without a crash is better than one with a crash.
    if present.aborts:
        return True
    return forecast.subgraphs < present.subgraphs and forecast.share >= present.share


def _step(
    forecast: Preflight, present: Preflight, effect: str, expected: str
) -> NextStep:
    """Return a step to another format, with the forecast for it and the present one."""
    return NextStep(
        f"--preset {forecast.kind}",
        f"{effect}; forecast: {forecast.sentence} (now {present.sentence})",
        f"deploy(model, data, folder, config={forecast.kind!r})",
        expected=expected,
    )
