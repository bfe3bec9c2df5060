"""compare: the error of a quantized model at each output, on the user's data."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

from onnx import ModelProto

from calibrators.onnx_runtime.isolation import isolated
from calibrators.onnx_runtime.tensors import model_bytes
from calibrators.readers.open import CalibrationData, Reader
from quark_onnx.analysis.reading import quantizes
from quark_onnx.check.inlined import inlined
from quark_onnx.common.errors import ModelError, crash_errors
from quark_onnx.common.progress import Progress, Show, showing
from quark_onnx.common.wording import counted
from quark_onnx.engines import EngineRun
from quark_onnx.files.io import load
from quark_onnx.graph import Graph
from quark_onnx.measuring.labelled import found_scorer, scorer_for
from quark_onnx.measuring.open_data import left_out_lines, reader_for
from quark_onnx.page.blocks import Block, Facts, Notes, Warnings
from quark_onnx.page.reported import Reported
from quark_onnx.report import decibels, size_change
from quark_onnx.report.blocks import (
    gallery_blocks,
    outputs_block,
    score_facts,
    size_fact,
    verdict_block,
)
from quark_onnx.report.measure import OutputError, least_sqnr
from quark_onnx.report.verdict import Exhibits, Score, Verdict, score_lines
from quark_onnx.running.function_bodies import with_bodies
from quark_onnx.search.checks import check_limit
from quark_onnx.trials.judge import judge_models
from quark_onnx.trials.latency import Latency, measure_latency


@dataclass(frozen=True, repr=False)
class Comparison(Reported):
    """Comparison of a model with its float original.

    Attributes:
        samples: number of samples.
        outputs: error of each output.
        bytes_before: size of the float model.
        bytes_after: size of the quantized model.
        verdict: quality in the terms of the task; None if no sample was run.
        warnings: signs of wrong preprocessing of the data.
        latency: latency of both models on this machine; None if not measured.
        scores: metrics of both models on the labels; empty without labels.
        labelled: number of samples with a label.
        exhibits: the samples that differ most, for a page.
        run: how the selected engine runs the quantized model; None without an engine.
    """

    samples: int
    outputs: list[OutputError]
    bytes_before: int
    bytes_after: int
    verdict: Verdict | None = None
    warnings: list[str] = field(default_factory=list)
    latency: Latency | None = None
    scores: list[Score] = field(default_factory=list)
    labelled: int = 0
    exhibits: Exhibits | None = field(default=None, compare=False, repr=False)
    run: EngineRun | None = None

    @property
    def sqnr(self) -> float:
        """Return the least SQNR of a float output in dB; infinite if there is none."""
        return least_sqnr(self.outputs, float("inf"))

    @property
    def score_lines(self) -> list[str]:
        """Return the scores on labels in words."""
        return score_lines(self.scores, self.labelled)

    def blocks(self) -> list[Block]:
        """Return the comparison as blocks."""
        facts = [size_fact(self.bytes_before, self.bytes_after)]
        facts.append(("SQNR", f"{decibels(self.sqnr)} dB", "of the worst output"))
        facts.append(("Samples", str(self.samples), "run by both models"))
        if self.latency is not None:
            ratio = f"{self.latency.ratio:.2f}×"
            where = self.latency.engine or "on this processor"
            facts.append(("Latency", ratio, f"relative to float, {where}"))
        if self.run is not None:
            facts.append(("Integer layers", self.run.counts, f"in {self.run.engine}"))
        facts += score_facts(self.scores)
        lines = {
            "size": [size_change(self.bytes_before, self.bytes_after)],
            "labels": self.score_lines,
        }
        if self.run is not None:
            counts = f"{self.run.engine}; layers on integers: {self.run.counts}"
            lines["engine"] = [counts, *self.run.remarks]
        blocks: list[Block] = [
            verdict_block(self.verdict),
            Facts(facts, lines),
            Warnings(lines=self.warnings),
            outputs_block(self.outputs, counted(self.samples, "sample")),
            *gallery_blocks(self.exhibits, self.verdict),
        ]
        if self.latency is not None:
            blocks.append(Notes("Latency", self.latency.lines, "time"))
        return blocks

    def to_dict(self) -> dict[str, Any]:
        """Return the comparison as plain values; numbers may be infinite."""
        return {
            "samples": self.samples,
            "bytes_before": self.bytes_before,
            "bytes_after": self.bytes_after,
            "worst_sqnr": self.sqnr,
            "outputs": [asdict(output) for output in self.outputs],
            "verdict": None if self.verdict is None else asdict(self.verdict),
            "warnings": self.warnings,
            "labelled": self.labelled,
            "scores": [asdict(score) for score in self.scores],
            "latency": None if self.latency is None else asdict(self.latency),
            "engine": None if self.run is None else asdict(self.run),
        }


def compare(  # noqa: PLR0913
    reference: str | Path | ModelProto,
    other: str | Path | ModelProto,
    data: CalibrationData | None,
    *,
    limit: int | None = None,
    task: str = "auto",
    labels: str | Path | None = None,
    time: bool = False,
    threads: int = 0,
    isolate: bool = False,
    preprocessing: bool = True,
    progress: Show = False,
) -> Comparison:
    """Compare the outputs of two models on common data.

    Args:
        reference: the float model, a path or a ModelProto.
        other: the quantized model, from this or any other tool, with the same outputs.
        data: samples, as for ``quantize_static``.
        limit: maximum number of samples; None for all samples.
        task: task of the models, as for ``quantize``.
        labels: a CSV file with the columns name and label, for classifiers; a JSON file in COCO's
            format or a folder of text files in YOLO's, for detectors; or a text file with the names
            of class folders in the model's order of classes. Both models are then scored on the
            labels. Class folders in the order of the classes, and integers that come with the
            samples, need no file.
        time: True to measure the latency of both models on the first sample.
        threads: number of threads for the latency; 0 for all cores.
        isolate: run onnxruntime in another process, as for ``quantize``.
        preprocessing: whether to check that the data is preprocessed as the reference expects,
            which may take hundreds of runs. False where ``quantize`` has checked the same data.
        progress: as for ``quantize_static``.

    Returns:
        Errors of the outputs, the verdict, and the requested measurements.

    Raises:
        ConfigError: the limit is no whole number of at least 1.
        ModelError: a model cannot be loaded or run, the outputs or their shapes do not match, or
            the models are swapped.
        DataError: the data does not fit the reference.
    """
    check_limit(limit)
    with crash_errors(reference, other), isolated(isolate), showing(progress) as show:
        before, after = load(reference), load(other)
        require_order(before, after)
        # Labels are read before any model runs, so that a wrong file costs no time.
        left_out = dict[str, str]()
        scorer = scorer_for(labels, data, left_out)
        reader = reader_for(Graph.of(before), data)
        if scorer is None:
            scorer = found_scorer(reader)
        else:
            scorer.rows = reader.rows
        known = [size for size in (reader.length, limit) if size is not None]
        total = None if reader.length is None else min(known)
        with Progress(show, total, "comparing", "sample") as bar:
            counter = _Counter(islice(iter(reader), limit), reader, left_out, bar)
            judged = judge_models(
                before,
                after,
                counter,
                task=task,
                random=reader.random,
                scorer=scorer,
                preprocessing=preprocessing,
            )
        comparison = Comparison(
            counter.count,
            judged.outputs,
            model_bytes(before),
            model_bytes(after),
            judged.verdict,
            [*map(str, judged.findings), *left_out_lines(left_out)],
            exhibits=judged.exhibits,
            run=judged.run,
        )
        if scorer is not None:
            comparison = replace(
                comparison, scores=scorer.scores(), labelled=scorer.count
            )
        if not time or counter.first is None:
            # The data may be empty; without a first sample there is nothing to time.
            return comparison
        latency = measure_latency(before, after, counter.first, threads=threads)
        return replace(comparison, latency=latency)


def require_order(before: ModelProto, after: ModelProto) -> None:
    """Raise a ModelError if the first model is quantized and the second is float."""
    if quantizes(inlined(with_bodies(before))) and not quantizes(
        inlined(with_bodies(after))
    ):
        raise ModelError(
            "the first model is quantized, and the second is not: the float model comes"
            " first; swap the two",
        )


class _Counter:
    """Samples, which are counted; names of images that are left out go into ``left_out``."""

    def __init__(
        self,
        samples: Iterator[Any],
        reader: Reader,
        left_out: dict[str, str],
        bar: Progress,
    ) -> None:
        self._samples, self._bar = samples, bar
        self._reader, self._left_out = reader, left_out
        self.count = 0
        self.first: Any = None

    def __iter__(self) -> Iterator[Any]:
        for sample in self._samples:
            self.count += 1
            self._left_out.update(self._reader.left_out)
            # The first sample is kept for the measurement of the latency; a reader may yield
            # samples only once.
            self.first = sample if self.first is None else self.first
            yield sample
            self._bar.update(self.count)
        self._left_out.update(self._reader.left_out)
