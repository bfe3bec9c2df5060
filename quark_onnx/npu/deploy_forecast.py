"""deploy_forecast: the device of each node, in the model as it is and in the one deploy writes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from onnx import ModelProto

from calibrators.readers.open import CalibrationData
from quark_onnx.common.errors import (
    ConfigError,
    ConstraintError,
    DataError,
    ModelError,
    QuarkError,
)
from quark_onnx.config import QConfig
from quark_onnx.files.half_precision import upcast_to_float32
from quark_onnx.files.io import load
from quark_onnx.graph import Graph
from quark_onnx.job import Job, run
from quark_onnx.measuring.random_sample import random_sample
from quark_onnx.npu.deploy import Given
from quark_onnx.npu.legalize import legalize
from quark_onnx.npu.preflight import Preflight, preflight
from quark_onnx.npu.support import KINDS, RELEASE
from quark_onnx.page.blocks import Block, Judgement, Notes, Warnings
from quark_onnx.page.reported import Reported
from quark_onnx.running.run import Reference
from quark_onnx.targets import check, format_of, require_rules


@dataclass(frozen=True, repr=False)
class DeployForecast(Reported):
    """Forecasts of a model, without and with the legalization in ``deploy``.

    Attributes:
        as_is: forecast of the model as given.
        legalized: forecast of the file that ``deploy`` writes; None where it refuses the model.
        notes: rewrites of the legalization.
        problem: reason why ``deploy`` refuses the model; empty if it takes it.
    """

    as_is: Preflight
    legalized: Preflight | None
    notes: tuple[str, ...] = ()
    problem: str = ""

    @property
    def best(self) -> Preflight:
        """Return the forecast of the file that ``deploy`` would write."""
        return self.as_is if self.legalized is None else self.legalized

    def blocks(self) -> list[Block]:
        """Return the forecast of the file that ``deploy`` writes as blocks."""
        blocks = self.best.blocks()
        if self.legalized is not None and self.legalized.counts != self.as_is.counts:
            steps = "legalizes" if self.as_is.quantized else "legalizes and quantizes"
            before = [
                f"the forecast is for the file of 'quark-onnx npu deploy', which {steps} the"
                f" model; the file as it is: {self.as_is.sentence}"
            ]
            blocks.insert(1, Notes("Legalization", before, "legalized"))
        if self.problem:
            # No share of a model that cannot be deployed is a good one.
            blocks = [
                replace(block, band="poor") if isinstance(block, Judgement) else block
                for block in blocks
            ]
            reason = f"'quark-onnx npu deploy' refuses the model: {self.problem}"
            blocks.insert(1, Warnings(lines=reason.splitlines()))
        return blocks

    def to_dict(self) -> dict[str, Any]:
        """Return both forecasts as plain values."""
        document = {**self.as_is.to_dict(), "problem": self.problem or None}
        if self.legalized is not None:
            document["legalized"] = {**self.legalized.to_dict(), "notes": self.notes}
        return document


def deploy_forecast(  # noqa: PLR0913
    model: str | Path | ModelProto,
    target: str = "stx",
    *,
    kind: str = "",
    config: QConfig | str | Path | dict[str, Any] | None = None,
    release: str = RELEASE,
    shapes: Mapping[str, Sequence[int]] | None = None,
    data: CalibrationData | None = None,
) -> DeployForecast:
    """Forecast where the nodes of a model run, in the file as it is and as ``deploy`` writes it.

    A float model is legalized and quantized, and a quantized one legalized, so that the nodes are
    those of the file that ``deploy`` would write. What changes no node is left out: the search of
    scales, optimizers of layers, and the accuracy.

    Args:
        model: as for ``preflight``.
        target: as for ``preflight``.
        kind: as for ``preflight``.
        config: configuration of the deployment, as for ``deploy``; None for that of ``kind``. That
            of a recipe is ``choose(model, target).config``.
        release: as for ``preflight``.
        shapes: sizes of dynamic dimensions, by the name of an input, as for ``legalize``.
        data: calibration data, as for ``deploy``; None for a random sample. Ranges and errors
            decide about some nodes, such as those that an equalization adds, so that a random
            sample may give other nodes than the data of the deployment.

    Returns:
        Both forecasts, and the rewrites.

    Raises:
        ConfigError: the device, number format, configuration, release or input is unknown, or both
            ``kind`` and ``config`` are given.
        DataError: the data cannot be read, or does not fit the model.
        ModelError: the model cannot be read.
    """
    if kind and config is not None:
        raise ConfigError("kind and config both name a number format; give one of them")
    loaded = load(model)
    if config is not None:
        config = QConfig.of(config)
        # A format of no target is refused below.
        kind = format_of(config) if format_of(config) in KINDS else ""
    as_is = preflight(loaded, target, kind=kind, release=release)
    try:
        given = Given.of(loaded, target, config or QConfig.of(as_is.kind), {}, None)
    except ConfigError as error:
        return DeployForecast(as_is, None, problem=str(error))
    try:
        legal = legalize(loaded, target, shapes=shapes, kind=given.kind)
        written = legal.model
        if given.kind != "BF16" and not given.coded:
            written = _quantized(written, given.config, data)
        require_rules(check(written, target), "nothing would be written")
    except QuarkError as error:
        # With shapes of the user the error is about them, and one of data about their data;
        # without any, a forecast is still possible.
        if shapes and not isinstance(error, ConstraintError):
            raise
        if data is not None and isinstance(error, DataError):
            raise
        return DeployForecast(as_is, None, problem=str(error))
    forecast = preflight(written, target, kind=given.kind, release=release)
    return DeployForecast(as_is, forecast, legal.notes)


def _quantized(
    legal: ModelProto, config: QConfig, data: CalibrationData | None
) -> ModelProto:
    """Quantize a legalized model, without what changes no node."""
    if data is None:
        wide, _ = upcast_to_float32(legal)
        sample = random_sample(Graph.of(wide), Reference(wide))
        if sample is None:
            raise ModelError("the model runs on no random input; give it data")
        data = [sample]
    job = Job.open(legal, config.with_(min_sqnr=None), None, external=False)
    try:
        # No finding on the preprocessing: the data may be random.
        job = replace(job, findings=(), nodes_only=True)
        return run(job, data, None, False).model
    finally:
        job.close()
