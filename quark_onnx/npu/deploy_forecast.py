"""deploy_forecast: the device of each node, before and after legalization."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onnx import ModelProto

from quark_onnx.common.errors import QuarkError
from quark_onnx.files.io import load
from quark_onnx.npu.legalize import legalize
from quark_onnx.npu.preflight import Preflight, preflight
from quark_onnx.npu.support import RELEASE
from quark_onnx.page.blocks import Block, Notes, Warnings
from quark_onnx.page.reported import Reported


@dataclass(frozen=True)
class DeployForecast(Reported):
    """Forecasts of a model, without and with the legalization in ``deploy``.

    Attributes:
        as_is: forecast of the model as given.
        legalized: forecast of the legalized model; None for a quantized model, which ``deploy``
            does not accept, and if legalization failed.
        notes: rewrites of the legalization.
        problem: reason why legalization failed; empty if it succeeded.
    """

    as_is: Preflight
    legalized: Preflight | None
    notes: tuple[str, ...] = ()
    problem: str = ""

    @property
    def best(self) -> Preflight:
        """Return the forecast of the model that ``deploy`` quantizes."""
        return self.as_is if self.legalized is None else self.legalized

    def blocks(self) -> list[Block]:
        """Return the forecast of the model that ``deploy`` quantizes as blocks."""
        blocks = self.best.blocks()
        if self.legalized is not None and self.legalized.counts != self.as_is.counts:
            before = [
                f"the forecast is for 'quark-onnx npu deploy', which legalizes the model;"
                f" the file as it is: {self.as_is.sentence}"
            ]
            blocks.insert(1, Notes("Legalization", before, "legalized"))
        if self.problem:
            reason = f"the model cannot be legalized: {self.problem}"
            blocks.insert(1, Warnings(lines=[reason]))
        return blocks

    def to_dict(self) -> dict[str, Any]:
        """Return both forecasts as plain values."""
        document = {**self.as_is.to_dict(), "problem": self.problem or None}
        if self.legalized is not None:
            document["legalized"] = {**self.legalized.to_dict(), "notes": self.notes}
        return document


def deploy_forecast(
    model: str | Path | ModelProto,
    target: str = "stx",
    *,
    kind: str = "",
    release: str = RELEASE,
    shapes: Mapping[str, Sequence[int]] | None = None,
) -> DeployForecast:
    """Forecast where the nodes of a model run, before and after legalization.

    Args:
        model: as for ``preflight``.
        target: as for ``preflight``.
        kind: as for ``preflight``.
        release: as for ``preflight``.
        shapes: sizes of dynamic dimensions, by the name of an input, as for ``legalize``.

    Returns:
        Both forecasts, and the rewrites.

    Raises:
        ConfigError: the device, number format, release or input is unknown.
        ModelError: the model cannot be read.
    """
    loaded = load(model)
    as_is = preflight(loaded, target, kind=kind, release=release)
    # ``deploy`` quantizes float models alone.
    if as_is.quantized:
        return DeployForecast(as_is, None)
    try:
        legal = legalize(loaded, target, shapes=shapes)
    except QuarkError as error:
        # With shapes of the user the error is about them; without any, a forecast is still
        # possible.
        if shapes:
            raise
        return DeployForecast(as_is, None, problem=str(error))
    forecast = preflight(legal.model, target, kind=kind, release=release)
    return DeployForecast(as_is, forecast, legal.notes)
