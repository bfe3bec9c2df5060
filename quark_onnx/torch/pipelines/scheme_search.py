"""search_schemes: find the best quantization of a language model within a budget.

Each candidate is a scheme with algorithms. It is quantized file to file into a scratch folder and
compared with the float model on held-out text (``verdict``). A ``StudyJournal`` stores the results,
so that a stopped search can continue.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any

from calibrators.scratch import ScratchFolder
from quark_onnx.common.errors import ConfigError, QuarkError
from quark_onnx.common.version import __version__
from quark_onnx.common.wording import counted
from quark_onnx.page.blocks import Action, Block, Facts, Judgement, Reasons, TitledTable
from quark_onnx.page.reported import Reported
from quark_onnx.report.verdict.verdict import THRESHOLDS
from quark_onnx.search.keys import document_key
from quark_onnx.study.journal import StudyJournal
from quark_onnx.study.record import Record, pareto_front
from quark_onnx.study.study import Study
from quark_onnx.torch.checkpoints.float_checkpoint import FloatCheckpoint
from quark_onnx.torch.checkpoints.layouts import layout_named
from quark_onnx.torch.checkpoints.safetensors_io import tensor_files
from quark_onnx.torch.config.language import config_for
from quark_onnx.torch.config.scheme_clients import (
    LAYOUT_NAMES,
    SCHEME_CLIENTS,
)
from quark_onnx.torch.page.pareto import Point, size_against_divergence
from quark_onnx.torch.pipelines.file_to_file import Writing
from quark_onnx.torch.pipelines.ptq import Text, ptq, text_windows, tokenizer_of
from quark_onnx.torch.pipelines.verdict import file_size, loss_text, weights_of
from quark_onnx.torch.pipelines.written_size import written_bytes
from quark_onnx.torch.runtime.devices import device_named

#: Algorithms for weight-only schemes, by ascending runtime.
_WEIGHT_ONLY: tuple[tuple[str, ...], ...] = ((), ("gptq",), ("awq", "gptq"))
#: Algorithms for schemes that quantize activations.
_ACTIVATIONS: tuple[tuple[str, ...], ...] = ((), ("autosmoothquant",))
#: Axes of the space.
_AXES = ("scheme", "algorithms", "layout")


@dataclass(frozen=True)
class SchemeCombination:
    """Scheme with algorithms and a layout: a candidate of the search.

    Attributes:
        scheme: as of ``config_for``.
        algorithms: as of ``config_for``.
        layout: the layout of the checkpoint.
    """

    scheme: str
    algorithms: tuple[str, ...] = ()
    layout: str = "quark"

    @classmethod
    def of(cls, choices: Mapping[str, str]) -> SchemeCombination:
        """Return the combination of a choice on each axis."""
        # No algorithm at all is the label "".
        algorithms = filter(None, choices["algorithms"].split(" + "))
        return cls(choices["scheme"], tuple(algorithms), choices["layout"])

    @property
    def name(self) -> str:
        """The name in tables."""
        words = " ".join([self.scheme, *self.algorithms])
        return words if self.layout == "quark" else f"{words} ({self.layout})"

    @property
    def choices(self) -> dict[str, str]:
        """The label of the choice on each axis."""
        return {**vars(self), "algorithms": " + ".join(self.algorithms)}

    @property
    def document(self) -> dict[str, str]:
        """The combination as plain values."""
        return self.choices

    @property
    def key(self) -> str:
        """The key of the combination."""
        return document_key(self.document)


@dataclass(frozen=True)
class TriedScheme:
    """Candidate with its measurements.

    Attributes:
        candidate: the candidate.
        record: the measurements; the score is the negative divergence from the float model.
        bits: bits of the checkpoint per weight of the model; 0 without a checkpoint.
    """

    candidate: SchemeCombination
    record: Record
    bits: float

    @property
    def divergence(self) -> float | None:
        """The divergence from the float model, in nats per token; None after an error."""
        return None if self.record.score is None else -self.record.score

    @property
    def name(self) -> str:
        """The name of the candidate."""
        return self.candidate.name

    def to_dict(self) -> dict[str, Any]:
        """Return the measurements as plain values."""
        return {
            "candidate": self.name,
            "bits": self.bits,
            "bytes": self.record.bytes or 0,
            "divergence": self.divergence,
            "seconds": self.record.seconds,
            "error": self.record.error,
        }


@dataclass(frozen=True, repr=False)
class SchemeSearchResult(Reported):
    """Result of a search.

    Attributes:
        trials: the tried candidates in the order of their runs.
        best: the candidate with the least divergence within the budget of bits; None if there is
            none.
        untried: candidates that the time budget did not reach.
        bits: the budget in bits per weight.
        leaves_out: whether the budget in bits leaves out candidates.
    """

    trials: tuple[TriedScheme, ...]
    best: SchemeCombination | None
    untried: tuple[SchemeCombination, ...] = ()
    bits: float = math.inf
    leaves_out: bool = False

    @property
    def measured(self) -> list[TriedScheme]:
        """Return the trials that did not fail."""
        return [trial for trial in self.trials if trial.divergence is not None]

    @property
    def failure(self) -> str:
        """Return the reason why no candidate is the best one; empty if one is."""
        if self.best is not None:
            return ""
        sizes = [trial.bits for trial in self.measured]
        if sizes:
            return (
                f"none of {counted(len(self.trials), 'trial')} has at most"
                f" {self.bits:g} bits a weight; the smallest has {min(sizes):.2f}."
                " Layers that stay float count, too"
            )
        if self.trials:
            return f"all trials failed; the first: {self.trials[0].record.error}"
        return "no candidate was tried within --budget"

    @property
    def front(self) -> list[TriedScheme]:
        """Return the Pareto front of divergence and size, by ascending size."""
        front = pareto_front(trial.record for trial in self.trials)
        on_front = [trial for trial in self.trials if trial.record in front]
        return sorted(on_front, key=lambda trial: trial.bits)

    def judgement(self) -> Judgement:
        """Return the verdict on the best candidate, and what to do next."""
        actions = list[Action]()
        if self.untried:
            left = counted(len(self.untried), "candidate was", "candidates were")
            again = "run the same command again with --overwrite"
            actions.append(Action(f"{again}: {left} not tried within --budget"))
        best = next(
            (trial for trial in self.trials if trial.candidate == self.best), None
        )
        if best is None or best.divergence is None:
            band = "poor" if self.measured else "unknown"
            return Judgement(band, self.failure, tuple(actions))
        band = THRESHOLDS["language"][0].band(best.divergence)
        if band != "good" and self.leaves_out:
            actions.append(Action("raise --bits: larger checkpoints lose less"))
        return Judgement(
            band,
            f"the best is {best.name}: {best.bits:.2f} bits per weight of all layers;"
            f" {loss_text(best.divergence)}",
            tuple(actions),
            "the text by which it was chosen",
        )

    def blocks(self) -> list[Block]:
        """Return the verdict, the best candidate, the front and the trials as blocks."""
        best = self.best.name if self.best else "none"
        tried = counted(len(self.trials), "candidate")
        facts = [
            ("Best", best, f"within {self.bits:g} bits a weight"),
            ("Trials", str(len(self.trials)), f"{len(self.untried)} not tried"),
        ]
        front = [
            f"{trial.name}: {trial.bits:.2f} bits, {trial.divergence:.4f} nats a token"
            for trial in self.front
        ]
        # Candidates have one trial each.
        kinds = {trial.name: "front" for trial in self.front} | {best: "best"}
        points = [
            Point(trial.name, trial.bits, trial.divergence, kinds.get(trial.name, ""))
            for trial in self.trials
            if trial.divergence is not None
        ]
        rows = [
            (
                trial.name,
                f"{trial.bits:.2f}",
                file_size(trial.record.bytes or 0),
                f"{trial.divergence:.4f}",
                f"{trial.record.seconds:.0f}",
                kinds.get(trial.name, ""),
            )
            for trial in sorted(self.measured, key=attrgetter("bits"))
        ]
        header = ("candidate", "bits", "size", "divergence", "seconds", "")
        failed = {
            trial.name: trial.record.error
            for trial in self.trials
            if trial.record.error
        }
        left = {
            candidate.name: "did not fit into --budget" for candidate in self.untried
        }
        return [
            self.judgement(),
            Facts(facts, {"tried": [tried], "front": front, "best": [best]}),
            size_against_divergence(points),
            TitledTable("Trials", header, rows),
            Reasons("Not measured", failed | left, "candidate", "candidates"),
        ]

    def to_dict(self) -> dict[str, Any]:
        """Return the search as plain values."""
        return {
            "verdict": asdict(self.judgement()),
            "best": None if self.best is None else self.best.name,
            "pareto": [trial.name for trial in self.front],
            "trials": [trial.to_dict() for trial in self.trials],
            "untried": [candidate.name for candidate in self.untried],
        }


def candidates_for(client: str) -> list[SchemeCombination]:
    """Return the candidates for a client, those without algorithms first.

    Args:
        client: one of ``CLIENTS`` of ``scheme_clients``.

    >>> for candidate in candidates_for("onnxruntime-genai")[:3]:
    ...     print(candidate.name)
    int4_wo_32 (oga)
    int4_wo_64 (oga)
    int4_wo_128 (oga)
    """
    names = [name for name, clients in SCHEME_CLIENTS.items() if client in clients]
    combinations = list[SchemeCombination]()
    # all schemes without algorithms first: a small time budget compares schemes before algorithms
    for stage in range(len(_WEIGHT_ONLY)):
        for name in names:
            only = config_for(name).default.weight_only
            ways = _WEIGHT_ONLY if only else _ACTIVATIONS
            if stage < len(ways):
                # the first layout in which the client reads the scheme
                form = SCHEME_CLIENTS[name][client][0]
                layout = form if form in LAYOUT_NAMES else "quark"
                combinations.append(SchemeCombination(name, ways[stage], layout))
    return combinations


def search_schemes(  # noqa: PLR0913
    source: FloatCheckpoint,
    candidates: Sequence[SchemeCombination],
    text: Text,
    journal: Path,
    *,
    bits: float,
    seconds: float | None = None,
    device: str = "cpu",
    tell: Callable[[TriedScheme], object] | None = None,
) -> SchemeSearchResult:
    """Try candidates in sequence within a time budget.

    Candidates whose checkpoint would have more bits are not tried: its size follows from shapes.

    Args:
        source: the float model.
        candidates: the candidates in the order of their trials.
        text: the calibration text; the windows after it are held out for the comparison.
        journal: path of the study's file, as for ``search``: a repeated search with the same model
            and text continues, any other one is another study in the file.
        bits: the maximum of bits of the full checkpoint per weight of the model.
        seconds: time budget for new trials; None for no limit. A running trial is finished.
        device: see ``Writing``.
        tell: called with each new trial.

    Returns:
        The trials, the best candidate, and the untried candidates.

    Raises:
        ConfigError: the file is no journal, no candidate has few enough bits, or the device is not
            available.
        DataError: the text has no windows for the model.
        MissingDependency: Optuna is not installed.
    """
    # what is wrong for all candidates is an error here, and no trial in the journal
    device_named(device)
    text_windows(text, tokenizer_of(source.folder, source.trust_code), source.model)
    weights = weights_of(source.reader)
    fitting = _fitting(source, candidates, bits, weights)
    records = StudyJournal(
        journal,
        _identity(source, text),
        {axis: _labels(candidates, axis) for axis in _AXES},
        SchemeCombination.of,
    )
    # the clock of the system may be set back
    start = time.monotonic()
    # A candidate with an error counts as tried, since it would fail again.
    study = Study(
        lambda candidate: _measure(source, candidate, text, journal.parent, device),
        records,
        fits=lambda *_: seconds is None or time.monotonic() - start < seconds,
    )
    for candidate, record in study.run(fitting):
        if tell is not None:
            tell(_tried(candidate, record, weights))
    # The study may hold candidates of an earlier search with other bits.
    tried = {
        candidate: _tried(candidate, record, weights)
        for candidate, record in study.finished()
        if candidate in candidates
    }
    trials = list(tried.values())
    compared = [trial for trial in trials if trial.divergence is not None]
    within = [trial for trial in compared if trial.bits <= bits]
    # of equal divergence, the smallest
    best = min(within, key=attrgetter("divergence", "bits"), default=None)
    return SchemeSearchResult(
        tuple(trials),
        best.candidate if best else None,
        tuple(study.untried),
        bits,
        len(fitting) < len(candidates),
    )


def _labels(candidates: Sequence[SchemeCombination], axis: str) -> list[str]:
    """Return the labels of the choices on an axis, in the order of the candidates."""
    return list(dict.fromkeys(candidate.choices[axis] for candidate in candidates))


def _tried(candidate: SchemeCombination, record: Record, weights: int) -> TriedScheme:
    return TriedScheme(candidate, record, 8 * (record.bytes or 0) / max(weights, 1))


def _fitting(
    source: FloatCheckpoint,
    candidates: Sequence[SchemeCombination],
    bits: float,
    weights: int,
) -> list[SchemeCombination]:
    """Return the candidates whose checkpoint has at most ``bits`` bits per weight of the model.

    Candidates whose scheme or layout does not fit the model come last: their trial has the reason
    in the journal, and must not take the time of others.

    Raises:
        ConfigError: no candidate has few enough bits.
    """
    # algorithms change no shape
    sizes = dict[tuple[str, str], float | None]()
    for candidate in candidates:
        if (candidate.scheme, candidate.layout) not in sizes:
            sizes[candidate.scheme, candidate.layout] = _predicted_bits(
                source, candidate, weights
            )
    predicted = {key: size for key, size in sizes.items() if size is not None}
    if predicted and min(predicted.values()) > bits:
        scheme, layout = min(predicted, key=lambda key: predicted[key])
        smallest = SchemeCombination(scheme, (), layout)
        # rounded up, so that the number can be given
        least = math.ceil(100 * predicted[scheme, layout]) / 100
        raise ConfigError(
            f"no candidate has at most {bits:g} bits a weight: the smallest is"
            f" {smallest.name} with {least:.2f}, as layers that stay float count,"
            f" too; give --bits {least:.2f} or more"
        )
    fitting, failing = list[SchemeCombination](), list[SchemeCombination]()
    for candidate in candidates:
        size = sizes[candidate.scheme, candidate.layout]
        if size is None:
            failing.append(candidate)
        elif size <= bits:
            fitting.append(candidate)
    return fitting + failing


def _predicted_bits(
    source: FloatCheckpoint, candidate: SchemeCombination, weights: int
) -> float | None:
    """Return the bits per weight of a candidate's checkpoint; None if it cannot be written."""
    config = config_for(candidate.scheme, exclude=source.usually_float())
    try:
        size = written_bytes(source, config, layout_named(candidate.layout))
    except QuarkError:
        return None
    return 8 * size / weights


def _measure(
    source: FloatCheckpoint,
    candidate: SchemeCombination,
    text: Text,
    folder: Path,
    device: str,
) -> Record:
    """Quantize into a scratch folder, and compare with the float model.

    Args:
        candidate: scheme, algorithms and layout.
        text: the calibration text; the windows after it are held out for the comparison.
        folder: folder of the journal, in which the scratch folder is created.
        device: see ``Writing``.

    Returns:
        The record; without a score if the run failed or was not compared.
    """
    start = time.monotonic()
    config = config_for(candidate.scheme, exclude=source.usually_float())
    # next to the journal, where the user expects space to be used
    with ScratchFolder(folder, "trial") as scratch:
        try:
            verdict = ptq(
                source,
                text,
                config.with_(algorithms=candidate.algorithms),
                scratch / "checkpoint",
                writing=Writing(
                    layout=candidate.layout,
                    device=device,
                    trust_code=source.trust_code,
                ),
                progress=False,
                verdict=True,
            ).verdict
        except QuarkError as error:
            return Record(None, time.monotonic() - start, None, str(error))
    assert verdict is not None
    seconds = time.monotonic() - start
    if verdict.divergence is None:
        return Record(None, seconds, verdict.bytes_after, verdict.skipped)
    if not math.isfinite(verdict.divergence):
        reason = f"the divergence is {verdict.divergence}"
        return Record(None, seconds, verdict.bytes_after, reason)
    return Record(-verdict.divergence, seconds, verdict.bytes_after)


def _identity(source: FloatCheckpoint, text: Text) -> dict[str, object]:
    """Return what the records depend on besides the candidate."""
    files = tensor_files(source.reader)
    # size instead of content, which would take minutes to read
    sizes = sorted((path.name, path.stat().st_size) for path in files)
    return {
        "version": __version__,
        "model": list(map(list, sizes)),
        "text": [text.source, text.count, text.length],
        "score": "divergence",
    }
