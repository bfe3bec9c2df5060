"""search_schemes: find the best quantization of a language model within a budget.

Each candidate is a scheme with algorithms. It is quantized file to file into a scratch folder and
compared with the float model on held-out text (``verdict``). Results are stored in a journal, so
that a stopped search can continue.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from operator import attrgetter
from pathlib import Path
from typing import Any

from calibrators.json_file import Entry, read_json
from calibrators.scratch import ScratchFolder, written
from quark_onnx.common.errors import ConfigError, QuarkError
from quark_onnx.common.version import __version__
from quark_onnx.common.wording import counted
from quark_onnx.page.blocks import Block, Facts, Grid, Reasons
from quark_onnx.page.reported import Reported
from quark_onnx.torch.checkpoints.float_checkpoint import FloatCheckpoint
from quark_onnx.torch.checkpoints.layouts import layout_named
from quark_onnx.torch.config.language import config_for
from quark_onnx.torch.config.scheme_clients import (
    LAYOUT_NAMES,
    SCHEME_CLIENTS,
)
from quark_onnx.torch.page.pareto import Point, size_against_divergence
from quark_onnx.torch.pipelines.file_to_file import Writing
from quark_onnx.torch.pipelines.ptq import Text, ptq, text_windows, tokenizer_of
from quark_onnx.torch.pipelines.tensor_files import tensor_files
from quark_onnx.torch.pipelines.verdict import file_size, weights_of
from quark_onnx.torch.pipelines.written_size import written_bytes
from quark_onnx.torch.runtime.devices import device_named

#: Algorithms for weight-only schemes, by ascending runtime.
_WEIGHT_ONLY: tuple[tuple[str, ...], ...] = ((), ("gptq",), ("awq", "gptq"))
#: Algorithms for schemes that quantize activations.
_ACTIVATIONS: tuple[tuple[str, ...], ...] = ((), ("autosmoothquant",))


@dataclass(frozen=True)
class Candidate:
    """Scheme with algorithms and a layout.

    Attributes:
        scheme: as of ``config_for``.
        algorithms: as of ``config_for``.
        layout: the layout of the checkpoint.
    """

    scheme: str
    algorithms: tuple[str, ...] = ()
    layout: str = "quark"

    def __str__(self) -> str:
        words = " ".join([self.scheme, *self.algorithms])
        # the text identifies a trial in the journal
        return words if self.layout == "quark" else f"{words} ({self.layout})"


@dataclass(frozen=True)
class Trial:
    """Result of a candidate.

    Attributes:
        candidate: the candidate, in words.
        bits: bits of the checkpoint per weight of the model.
        bytes: size of the checkpoint.
        divergence: divergence from the float model, in nats per token; None after an error.
        seconds: runtime.
        error: the error message; empty on success.
    """

    candidate: str
    bits: float = 0.0
    bytes: int = 0
    divergence: float | None = None
    seconds: float = 0.0
    error: str = ""


@dataclass(frozen=True)
class Search(Reported):
    """Result of a search.

    Attributes:
        trials: the trials in the order of their runs.
        best: the candidate with the least divergence within the budget of bits; None if there is
            none.
        untried: candidates that the time budget did not reach.
        bits: the budget in bits per weight.
    """

    trials: tuple[Trial, ...]
    best: Candidate | None
    untried: tuple[Candidate, ...] = ()
    bits: float = math.inf

    @property
    def pareto(self) -> list[Trial]:
        """Return the Pareto-optimal trials by ascending size."""
        return pareto(self.trials)

    def blocks(self) -> list[Block]:
        """Return the best candidate, the front and the trials as blocks."""
        best = str(self.best or "none")
        tried = (
            f"{counted(len(self.trials), 'candidate')}, {len(self.untried)} not tried"
        )
        facts = [
            ("Best", best, f"within {self.bits:g} bits a weight"),
            ("Trials", str(len(self.trials)), f"{len(self.untried)} not tried"),
        ]
        front = [
            f"{each.candidate}: {each.bits:.2f} bits, {each.divergence:.4f} nats a token"
            for each in self.pareto
        ]
        # Candidates have one trial each.
        kinds = dict.fromkeys((each.candidate for each in self.pareto), "front")
        kinds[best] = "best"
        measured = [each for each in self.trials if each.divergence is not None]
        points = [
            Point(
                each.candidate,
                each.bits,
                each.divergence,
                kinds.get(each.candidate, ""),
            )
            for each in measured
            if each.divergence is not None
        ]
        rows = [
            (
                each.candidate,
                f"{each.bits:.2f}",
                file_size(each.bytes),
                f"{each.divergence:.4f}",
                f"{each.seconds:.0f}",
                kinds.get(each.candidate, ""),
            )
            for each in sorted(measured, key=lambda each: each.bytes)
        ]
        header = ("candidate", "bits", "size", "divergence", "seconds", "")
        failed = {each.candidate: each.error for each in self.trials if each.error}
        left = dict.fromkeys(map(str, self.untried), "did not fit into --budget")
        return [
            Facts(facts, {"tried": [tried], "front": front, "best": [best]}),
            size_against_divergence(points),
            Grid("Trials", header, rows),
            Reasons("Not measured", failed | left, "candidate", "candidates"),
        ]

    def to_dict(self) -> dict[str, Any]:
        """Return the search as plain values."""
        return {
            "best": None if self.best is None else str(self.best),
            "pareto": [trial.candidate for trial in self.pareto],
            "trials": list(map(asdict, self.trials)),
            "untried": list(map(str, self.untried)),
        }


def pareto(trials: Iterable[Trial]) -> list[Trial]:
    """Return the trials that are Pareto-optimal in size and divergence.

    >>> [t.candidate for t in pareto([Trial("a", 4, 1, 0.5), Trial("b", 5, 2, 0.6), Trial("c", 8, 3, 0.1)])]
    ['a', 'c']
    """  # noqa: E501
    found = list[Trial]()
    least = float("inf")
    known = [each for each in trials if each.divergence is not None]
    # by size, so that a trial is optimal if its divergence is less than all before
    for trial in sorted(known, key=lambda each: (each.bytes, each.divergence)):
        assert trial.divergence is not None
        if trial.divergence < least:
            found.append(trial)
            least = trial.divergence
    return found


def candidates_for(client: str) -> list[Candidate]:
    """Return the candidates for a client, those without algorithms first.

    Args:
        client: one of ``CLIENTS`` of ``scheme_clients``.

    >>> for candidate in candidates_for("onnxruntime-genai")[:3]:
    ...     print(candidate)
    int4_wo_32 (oga)
    int4_wo_64 (oga)
    int4_wo_128 (oga)
    """
    names = [name for name, clients in SCHEME_CLIENTS.items() if client in clients]
    found = list[Candidate]()
    # all schemes without algorithms first: a small time budget compares schemes before algorithms
    for stage in range(len(_WEIGHT_ONLY)):
        for name in names:
            only = config_for(name).default.weight_only
            ways = _WEIGHT_ONLY if only else _ACTIVATIONS
            if stage < len(ways):
                # the first layout in which the client reads the scheme
                form = SCHEME_CLIENTS[name][client][0]
                layout = form if form in LAYOUT_NAMES else "quark"
                found.append(Candidate(name, ways[stage], layout))
    return found


def search_schemes(  # noqa: PLR0913
    source: FloatCheckpoint,
    candidates: Sequence[Candidate],
    text: Text,
    journal: Path,
    *,
    bits: float,
    seconds: float | None = None,
    device: str = "cpu",
    tell: Callable[[Trial], object] | None = None,
) -> Search:
    """Try candidates in sequence within a time budget.

    Candidates whose checkpoint would have more bits are not tried: its size follows from shapes.

    Args:
        source: the float model.
        candidates: the candidates in the order of their trials.
        text: the calibration text; the windows after it are held out for the comparison.
        journal: a JSON file that stores the trials; a search with the same model and text
            continues.
        bits: the maximum of bits of the full checkpoint per weight of the model.
        seconds: time budget for new trials; None for no limit. A running trial is finished.
        device: see ``Writing``.
        tell: called with each new trial.

    Returns:
        The trials, the best candidate, and the untried candidates.

    Raises:
        ConfigError: the journal belongs to a different search, no candidate has few enough bits, or
            the device is not available.
        DataError: the text has no windows for the model.
    """
    # what is wrong for all candidates is an error here, and no trial in the journal
    device_named(device)
    text_windows(text, tokenizer_of(source.folder, source.trust_code), source.model)
    mark = _mark(source, text)
    trials = _read(journal, mark)
    fitting = _fitting(source, candidates, bits)
    # the clock of the system may be set back
    start = time.monotonic()
    done = set(map(attrgetter("candidate"), trials))
    untried = list[Candidate]()
    for candidate in fitting:
        # a candidate with an error counts as done, since it would fail again
        if str(candidate) in done:
            continue
        if seconds is not None and time.monotonic() - start >= seconds:
            # no break: candidates that the journal knows are not untried
            untried.append(candidate)
            continue
        # written after each trial, so that a stopped search loses one trial at most
        trials.append(_trial(source, candidate, text, journal, device))
        _write(journal, mark, trials)
        if tell is not None:
            tell(trials[-1])
    wanted = {str(each): each for each in candidates}
    # the journal may hold candidates of an earlier search with other bits
    own = [each for each in trials if each.candidate in wanted]
    within = [each for each in pareto(own) if each.bits <= bits]
    # the last on the front has the least divergence
    best = wanted[within[-1].candidate] if within else None
    return Search(tuple(own), best, tuple(untried), bits)


def _fitting(
    source: FloatCheckpoint, candidates: Sequence[Candidate], bits: float
) -> list[Candidate]:
    """Return the candidates whose checkpoint has at most ``bits`` bits per weight of the model.

    Candidates whose scheme or layout does not fit the model come last: their trial has the reason
    in the journal, and must not take the time of others.

    Raises:
        ConfigError: no candidate has few enough bits.
    """
    weights = weights_of(source.reader)
    # algorithms change no shape
    sizes = dict[tuple[str, str], float | None]()
    for each in candidates:
        if (each.scheme, each.layout) not in sizes:
            sizes[each.scheme, each.layout] = _predicted_bits(source, each, weights)
    known = {key: size for key, size in sizes.items() if size is not None}
    if known and min(known.values()) > bits:
        scheme, layout = min(known, key=lambda key: known[key])
        # rounded up, so that the number can be given
        least = math.ceil(100 * known[scheme, layout]) / 100
        raise ConfigError(
            f"no candidate has at most {bits:g} bits a weight: the smallest is"
            f" {Candidate(scheme, (), layout)} with {least:.2f}, as layers that stay float count,"
            f" too; give --bits {least:.2f} or more"
        )
    fitting, failing = list[Candidate](), list[Candidate]()
    for each in candidates:
        size = sizes[each.scheme, each.layout]
        if size is None:
            failing.append(each)
        elif size <= bits:
            fitting.append(each)
    return fitting + failing


def _predicted_bits(
    source: FloatCheckpoint, candidate: Candidate, weights: int
) -> float | None:
    """Return the bits per weight of a candidate's checkpoint; None if it cannot be written."""
    config = config_for(candidate.scheme, exclude=source.usually_float())
    try:
        size = written_bytes(source, config, layout_named(candidate.layout))
    except QuarkError:
        return None
    return 8 * size / weights


def _trial(
    source: FloatCheckpoint,
    candidate: Candidate,
    text: Text,
    journal: Path,
    device: str,
) -> Trial:
    """Quantize into a scratch folder, and compare with the float model.

    Args:
        source: the float model.
        candidate: scheme, algorithms and layout.
        text: the calibration text; the windows after it are held out for the comparison.
        journal: path of the journal, next to which the scratch folder is created.
        device: see ``Writing``.

    Returns:
        The trial; with an error in place of figures if the run failed or was not compared.
    """
    start = time.monotonic()
    trial = Trial(str(candidate))
    config = config_for(candidate.scheme, exclude=source.usually_float())
    # next to the journal, where the user expects space to be used
    with ScratchFolder(journal.parent, "trial") as place:
        try:
            found = ptq(
                source,
                text,
                config.with_(algorithms=candidate.algorithms),
                place / "checkpoint",
                writing=Writing(
                    layout=candidate.layout,
                    device=device,
                    trust_code=source.trust_code,
                ),
                progress=False,
                verdict=True,
            ).verdict
        except QuarkError as error:
            return replace(
                trial,
                error=str(error),
                seconds=time.monotonic() - start,
            )
    assert found is not None
    return replace(
        trial,
        bits=found.bits,
        bytes=found.bytes_after,
        divergence=found.divergence,
        seconds=time.monotonic() - start,
        error=found.skipped,
    )


def _mark(source: FloatCheckpoint, text: Text) -> dict[str, object]:
    """Return the values that identify a search."""
    files = tensor_files(source.reader)
    # size instead of content, which would take minutes to read
    sizes = sorted((path.name, path.stat().st_size) for path in files)
    return {
        "version": __version__,
        "model": list(map(list, sizes)),
        "text": [text.source, text.count, text.length],
    }


def _read(journal: Path, mark: dict[str, object]) -> list[Trial]:
    """Return the trials of a journal; empty without a journal.

    Args:
        journal: path of the JSON file, which may be missing.
        mark: the values that identify the search, which must equal those in the file.

    Raises:
        ConfigError: the file is no journal, or that of another search.
    """
    if not journal.exists():
        return []
    remedy = "name another folder, or remove the file to search anew"
    document = read_json(journal, "journal of a search", ConfigError, remedy)
    trials = list(map(_stored_trial, document["trials"].array()))
    for key, value in mark.items():
        if document[key].value != value:
            raise ConfigError(
                f"{journal} holds another search: its {key} differs; name another folder",
            )
    return trials


def _stored_trial(entry: Entry) -> Trial:
    """Return a trial of a journal."""
    divergence = entry["divergence"]
    return Trial(
        entry["candidate"].text(),
        entry["bits"].number(),
        entry["bytes"].integer(),
        None if divergence.value is None else divergence.number(),
        entry["seconds"].number(),
        entry["error"].text(),
    )


def _write(journal: Path, mark: dict[str, object], trials: Sequence[Trial]) -> None:
    """Write a journal, atomically."""
    document = {**mark, "trials": list(map(asdict, trials))}
    with written(journal) as file:
        file.write(json.dumps(document, indent=1).encode())
