"""Values passed between the stages of a run: samples, the planned graph and its ranges."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from calibrators.onnx_runtime.runner import Receive
from calibrators.readers.open import CalibrationData
from calibrators.readers.spool import Spool
from quark_onnx.common.errors import ModelError, data_errors
from quark_onnx.common.progress import Progress
from quark_onnx.common.wording import counted
from quark_onnx.config import QConfig
from quark_onnx.graph import Graph
from quark_onnx.graph.states import states
from quark_onnx.measuring.calibrate import Calibrated, Ranges
from quark_onnx.measuring.calibration import Calibration, GraphCalibration
from quark_onnx.measuring.held_out import HoldOut, consecutive_positions
from quark_onnx.measuring.labelled import scorer_of
from quark_onnx.measuring.open_data import first_sample, left_out_lines, reader_for
from quark_onnx.optimizers import Samples
from quark_onnx.plan import Plan
from quark_onnx.planning.subgraph_plans import SubgraphPlan
from quark_onnx.report.verdict import Scorer
from quark_onnx.running.run import Sample

#: Number of further samples that are not equal by chance.
_MANY = 7


class LabelledSample(NamedTuple):
    """A sample with the classes of its rows.

    Attributes:
        feeds: the sample.
        labels: the class of each row, None for an unknown one; empty without labels.
    """

    feeds: Sample
    labels: Sequence[int | None]


@dataclass(frozen=True)
class RunData:
    """The data of a run.

    Attributes:
        sample: the first sample, or a synthetic one; None if the model runs on none.
        hold_out: holds out the samples that the result is measured on; None without data.
        rereadable: calibration samples that may be read repeatedly; empty if no step needs them.
        receive: keeps outputs of the float model for later steps, called with the position of a
            calibration sample and the outputs on it; None if no later step needs them.
        random: the samples are random numbers, without information on real data.
        input_means: channel means of the inputs of layers over the first samples, by tensor and
            whether its channels are axis 1; empty if unknown.
        calibration: earlier statistics that the run uses; None without any.
        stream: the calibration samples, read once.
        length: number of samples that calibrate; None if unknown.
        labels: class of each row of the data, by its index as text, where labels come with it.
        rows: indices of the rows of each sample, by the index of the sample.
        left_out: reasons why images were left out, by name.
        is_cut: batches and files may have been cut into rows.
    """

    sample: Sample | None = None
    hold_out: HoldOut | None = None
    rereadable: Samples = ()
    random: bool = False
    receive: Receive | None = None
    input_means: dict[tuple[str, bool], NDArray[np.float64]] = field(
        default_factory=dict
    )
    calibration: Calibration | None = None
    stream: Iterable[Sample] = ()
    length: int | None = None
    labels: Mapping[str, int] = field(default_factory=dict)
    rows: Mapping[int, range] = field(default_factory=dict)
    left_out: Mapping[str, str] = field(default_factory=dict)
    is_cut: bool = False

    @classmethod
    def open(  # noqa: PLR0913
        cls,
        graph: Graph,
        data: CalibrationData | None,
        config: QConfig,
        spool: Spool,
        progress: bool | None,
        *,
        most: int,
        calibration: Calibration | None = None,
    ) -> RunData:
        """Open calibration data, of which some samples are held out.

        Args:
            graph: the float graph.
            data: as for ``quantize_static``.
            config: the settings.
            spool: receives all samples if steps of the run read them again, since a generator can
                be read only once.
            progress: as for ``quantize_static``.
            most: as for ``HoldOut``.
            calibration: earlier statistics that the run uses; None without any.

        Raises:
            DataError: the data cannot be read, or does not fit the model.
        """
        reader = reader_for(graph, data, config)
        # Read before anything else, so that unusable data fails early.
        sample = first_sample(reader)
        # An entry may be a batch, so the number of entries is a lower bound.
        least = len(data) if isinstance(data, list | tuple) else None
        # Recurrent models are measured over consecutive samples, since each step reads the state
        # of the last.
        consecutive = range(0)
        if states(graph):
            consecutive = consecutive_positions(reader.length or least)
        hold_out = HoldOut(
            reader,
            remember=config.search,
            consecutive=consecutive,
            verdict=not reader.random,
            most=most,
        )
        stream: Iterable[Sample] = hold_out
        if config.rereads:
            stream = spool
            with (
                Progress(progress, reader.length, "reading", "sample") as bar,
                data_errors(),
            ):
                for count, sample_to_keep in enumerate(hold_out, 1):
                    spool.append(sample_to_keep)
                    bar.update(count)
        # Calibration computes the float outputs, too; the verdict uses them unless a rewrite
        # changes the function of the model.
        shares_outputs = not reader.random and config.keeps_function
        return cls(
            sample,
            hold_out,
            spool,
            receive=hold_out.receive if shares_outputs else None,
            random=reader.random,
            calibration=calibration,
            stream=stream,
            length=hold_out.calibrating_of(reader.length),
            labels=reader.labels,
            rows=reader.rows,
            left_out=reader.left_out,
            is_cut=reader.splits and not reader.random,
        )

    @property
    def test_samples(self) -> list[Sample]:
        """Return the held-out samples, or the first sample if there are none."""
        if self.hold_out is not None and self.hold_out.samples:
            return self.held_out or self.hold_out.samples
        return [self.sample] if self.sample else []

    @property
    def held_out(self) -> list[Sample]:
        """Return the samples that no range was measured on, now or in an earlier calibration."""
        if self.hold_out is None:
            return []
        calibration = self.calibration
        if calibration is None:
            return self.hold_out.samples
        return [
            sample
            for sample in self.hold_out.samples
            if not calibration.has_seen(sample)
        ]

    def on_a_row(self, error: ModelError) -> ModelError:
        """Return the error of a run on a sample that is a row of a file or batch."""
        shapes = ", ".join(
            f"{name} {list(np.shape(value))}"
            for name, value in (self.sample or {}).items()
        )
        return ModelError(
            f"{error}; the sample is one row of the data ({shapes}): if the model takes a file at"
            " once, say open_reader(..., batch_axis=None)"
        )

    def held_out_scorer(self, scorer: Scorer | None) -> Scorer | None:
        """Return a scorer of the held-out samples; None without any, or without their labels.

        Args:
            scorer: a scorer of the data by given labels; None for labels that come with the data.
        """
        if self.hold_out is None or not self.held_out:
            return None
        left_out: Collection[str] = self.left_out
        if scorer is None and self.labels:
            # The reader counts only the samples that it returns.
            scorer, left_out = scorer_of(self.labels, self.rows), ()
        if scorer is None:
            return None
        positions = dict(
            zip(map(id, self.hold_out.samples), self.hold_out.positions, strict=True)
        )
        rows = [self.rows[positions[id(sample)]] for sample in self.compared]
        return scorer.only(rows, left_out)

    @property
    def notes(self) -> list[str]:
        """Return notes on images that were left out, and on samples that ranges have seen."""
        return [*left_out_lines(self.left_out), *self._repeated, *self._seen]

    @property
    def _repeated(self) -> list[str]:
        """Return a note if all kept samples are equal."""
        further = [sample.feeds for sample in self.further]
        first, *others = [*self.compared, *further] or [{}]
        if self.random or len(others) < _MANY:
            return []
        for sample in others:
            if not all(np.array_equal(first[name], sample[name]) for name in first):
                return []
        return [
            "all samples are equal: ranges and figures are those of a single one, and other data"
            " may have larger errors"
        ]

    @property
    def _seen(self) -> list[str]:
        """Return the note that earlier ranges have seen samples of this run."""
        total = len(self.hold_out.samples) if self.hold_out else 0
        seen = total - len(self.held_out)
        if not seen or self.calibration is None:
            return []
        source = f"the ranges {self.calibration.source}".strip()
        if seen == total:
            return [
                f"{source} were measured on all of these samples: nothing is held out,"
                " and new data may have larger errors"
            ]
        return [
            f"{source} were measured on {seen} of {counted(total, 'held-out sample')}:"
            " the errors are those of the others"
        ]

    @property
    def first(self) -> list[Sample]:
        """Return the first calibration samples; empty if no step needs them in memory."""
        return self.hold_out.first if self.hold_out else []

    @property
    def deciding_samples(self) -> list[Sample]:
        """Return a few of the held-out samples, for decisions between settings."""
        return self.hold_out.deciding_samples if self.hold_out else []

    @property
    def untouched(self) -> list[Sample]:
        """Return the held-out samples that no decision between settings is made on either."""
        deciding = set(map(id, self.deciding_samples))
        return [sample for sample in self.held_out if id(sample) not in deciding]

    @property
    def compared(self) -> list[Sample]:
        """Return the samples to compare both models on: held-out samples if there are any."""
        if (
            self.hold_out is not None
            and not self.hold_out.samples
            and self.hold_out.calibrated
        ):
            return self.hold_out.calibrated
        return self.test_samples

    @property
    def further(self) -> list[LabelledSample]:
        """Return the calibration samples if the comparison of both models uses other samples."""
        if self.hold_out is None or not self.hold_out.samples:
            return []
        labelled = []
        for sample, position in zip(
            self.hold_out.calibrated, self.hold_out.calibrated_positions, strict=True
        ):
            labels = [
                self.labels.get(str(row)) for row in self.rows.get(position, range(0))
            ]
            labelled.append(LabelledSample(sample, labels if self.labels else []))
        return labelled

    @property
    def count(self) -> int:
        """Return the number of calibration samples."""
        return self.hold_out.count if self.hold_out else 0


@dataclass(frozen=True)
class Prepared:
    """The float graph after all rewrites, to be planned.

    Attributes:
        graph: the graph.
        notes: notes on the model and on rewrites of its graph.
        keyed: earlier statistics with the keys of the graph's tensors; None without any.
        partial: statistics of the first samples alone; None without any.
    """

    graph: Graph
    notes: list[str]
    keyed: GraphCalibration | None
    partial: Calibration | None


@dataclass(frozen=True)
class Planned:
    """The prepared graph with the plans of the graph and of its bodies.

    Attributes:
        config: the settings, with an override for each node that an optimizer has raised.
        graph: the graph at the opset of the result.
        plan: the plan of the graph.
        body_plans: the plans of bodies.
        notes: notes of all stages so far.
        keyed: as for ``Prepared``.
        partial: statistics of the first samples alone, with the keys of the graph's tensors; None
            without any.
    """

    config: QConfig
    graph: Graph
    plan: Plan
    body_plans: list[SubgraphPlan]
    notes: list[str]
    keyed: GraphCalibration | None = None
    partial: GraphCalibration | None = None

    def measured(self, calibrated: Calibrated, data: RunData) -> MeasuredPlan:
        """Return the plan with ranges; tensors whose values are unfit for a scale are float.

        Args:
            calibrated: plans and ranges.
            data: the data that the ranges were measured on.
        """
        planned = replace(self, plan=calibrated.plan, body_plans=calibrated.body_plans)
        return MeasuredPlan(planned, calibrated.ranges, data)


@dataclass(frozen=True)
class MeasuredPlan:
    """A plan whose ranges are measured.

    Attributes:
        planned: the plan.
        ranges: the ranges of the graph's tensors; those of bodies are in their plans.
        data: the data of the run.
    """

    planned: Planned
    ranges: Ranges
    data: RunData
