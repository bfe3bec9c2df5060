"""ptq: quantize a float model into a checkpoint and compute its perplexity."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from quark_onnx.common.errors import DataError
from quark_onnx.common.wording import counted
from quark_onnx.page.blocks import Block, Facts
from quark_onnx.page.reported import Reported
from quark_onnx.torch.calibration.perplexity import perplexity
from quark_onnx.torch.calibration.text import read_windows
from quark_onnx.torch.checkpoints.float_checkpoint import FloatCheckpoint
from quark_onnx.torch.checkpoints.layouts import check_config
from quark_onnx.torch.checkpoints.load import load_checkpoint
from quark_onnx.torch.config.language import config_for as config_for
from quark_onnx.torch.config.torch_config import TorchConfig, require_config
from quark_onnx.torch.models.forward_trace import further_inputs
from quark_onnx.torch.models.structure import positions_of, vocabulary_of
from quark_onnx.torch.pipelines.estimate import (
    BATCH_TOKENS,
    Estimate,
    check_room,
    estimate,
    size,
)
from quark_onnx.torch.pipelines.file_to_file import Writing, quantize_checkpoint
from quark_onnx.torch.pipelines.in_memory import chosen_layers
from quark_onnx.torch.pipelines.mixture import Mixture
from quark_onnx.torch.pipelines.report import TorchReport
from quark_onnx.torch.pipelines.verdict import (
    HELD_OUT,
    CheckpointVerdict,
    judge,
    split_held_out,
)
from quark_onnx.torch.pipelines.written_size import written_bytes
from quark_onnx.torch.runtime import distributed

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

#: Files of a tokenizer, of which a folder has one or more.
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
)


@dataclass(frozen=True)
class Text:
    """Text, or token ids, cut into windows.

    Attributes:
        source: a file, a folder, or the name of a data set.
        count: the maximum number of windows; None for all.
        length: tokens of a window.
    """

    source: str
    count: int | None = 128
    length: int = 512


@dataclass(frozen=True, repr=False)
class PtqResult(Reported):
    """Result of ``ptq``.

    Attributes:
        report: the report on the layers.
        estimate: the estimated resources.
        before: perplexity of the float model; None without evaluation.
        after: perplexity of the checkpoint; None without evaluation.
        verdict: comparison of the checkpoint with the float model; None if it was not requested.
        mixture: result of a mixed-precision search, for the page; None for a single scheme.
    """

    report: TorchReport
    estimate: Estimate
    before: float | None = None
    after: float | None = None
    verdict: CheckpointVerdict | None = None
    mixture: Mixture | None = None

    def blocks(self) -> list[Block]:
        """Return the verdict and the report on the layers as blocks."""
        facts = self.report.facts()
        rows, lines = list(facts.rows), dict(facts.lines)
        if self.before is not None and self.after is not None:
            change = f"{100 * (self.after / self.before - 1):+.2f} %"
            more = f"{change} from {self.before:.4f}"
            rows.append(("Perplexity", f"{self.after:.4f}", more))
            text = f"perplexity {self.before:.4f} float, {self.after:.4f} quantized"
            lines["text"] = [f"{text}, on all of the text to evaluate"]
        mixed = list[Block]()
        if self.mixture is not None:
            groups = counted(len(self.mixture.groups), "group")
            bits = f"{self.mixture.bits:.3f}"
            rows.append(("Bits per weight", bits, f"{groups} of layers"))
            lines["mixture"] = [self.mixture.line()]
            mixed.append(self.mixture.drawing())
        # Nothing was compared with the float model, so sizes are estimates.
        expected = ("Size", size(self.estimate.disk), "of the checkpoint, as estimated")
        rows += [expected] if self.verdict is None else self.verdict.facts()
        verdict = list[Block]()
        if self.verdict is not None:
            shown = self.verdict
            if self.before is not None:
                # one perplexity of a text: that of all of it, and not of the first windows
                shown = replace(shown, perplexity_before=None, perplexity_after=None)
            verdict.append(shown.judgement())
        notes, errors, *sections = self.report.sections()
        return [*verdict, Facts(rows, lines), notes, errors, *mixed, *sections]

    def to_dict(self) -> dict[str, Any]:
        """Return the result as plain values."""
        return {
            **self.report.to_dict(),
            "perplexity": {"before": self.before, "after": self.after},
            "verdict": None if self.verdict is None else self.verdict.to_dict(),
            "estimate": {
                "memory": self.estimate.memory,
                "disk": self.estimate.disk,
            },
        }


def write_page(
    result: PtqResult,
    path: Path,
    name: str = "model",
    mixture: Mixture | None = None,
) -> None:
    """Write the page of a result atomically.

    Args:
        result: the result of ``ptq``.
        path: the file.
        name: the name of the model.
        mixture: the result of a mixed-precision search, if there was one.

    Raises:
        OSError: the folder cannot be written to.
    """
    result = replace(result, mixture=mixture or result.mixture)
    result.write_page(path, "Quantization report", name)


def ptq(  # noqa: PLR0913
    source: FloatCheckpoint | Path | str,
    text: Text | None,
    config: TorchConfig,
    output: Path | str,
    *,
    evaluate: Text | None = None,
    writing: Writing | None = None,
    progress: bool | None = None,
    announce: Callable[[Estimate], object] | None = None,
    verdict: bool = False,
) -> PtqResult:
    """Quantize a checkpoint, and compare its perplexity with that of the float model.

    If torch.distributed is initialized, the processes share the calibration windows; the first one
    writes and evaluates.

    Args:
        source: a Hugging Face folder, or an opened checkpoint.
        text: the calibration text; None for a configuration that needs no data.
        config: the quantization configuration.
        output: the output folder; may exist only if it is empty.
        evaluate: the text for evaluation after the result is written; None for no evaluation.
        writing: settings for writing; the defaults if None.
        progress: whether to show progress bars; None shows them if stderr is a terminal.
        announce: called with the estimate before the run starts.
        verdict: compare the result with the float model on held-out windows. These are the windows
            of ``evaluate``, or else the windows of ``text`` after those for calibration, or else
            the last eighth of the calibration windows. Both models must fit into memory; otherwise
            the verdict says so.

    Returns:
        The report, the estimate, the perplexities and the verdict.

    Raises:
        QuarkError: the model, the data or a setting is wrong; nothing is written.
    """
    # everything that can be wrong is checked before the weights are read, which takes minutes
    require_config(config)
    writing = writing or Writing()
    check_config(writing.form, config)
    source = FloatCheckpoint.of(source, writing.trust_code)
    windows = list[Any]()
    tokenizer = tokenizer_of(source.folder, source.trust_code)
    if evaluate is not None and evaluate.length < 2:
        raise DataError(
            f"windows of {evaluate.length} token have nothing to foresee; evaluate with"
            " a greater length",
        )
    held_out, judges, where = list[Any](), list[Any](), ""
    if text is not None and (config.needs_data or verdict):
        # windows of the same text that calibration does not see
        spare = HELD_OUT if verdict else 0
        windows = text_windows(text, tokenizer, source.model, spare)
        if verdict:
            # without a count all windows are calibration windows, and the last ones are held out of
            # them
            windows, held_out = split_held_out(windows, text.count or len(windows))
            where = f"of {text.source} that are held out"
        # windows that were read for the verdict alone
        windows = windows if config.needs_data else []
    if evaluate is not None:
        judges = text_windows(evaluate, tokenizer, source.model)
        held_out, where = judges, f"of {evaluate.source}"
    expected = _estimate(
        source,
        config,
        # the share of one process, as ``distributed.own_part`` divides them
        windows[:: distributed.count()],
        writing,
    )
    if announce is not None:
        announce(expected)
    # the values of a file are copied once, behind its header
    check_room(Path(output), expected.disk + min(expected.disk, writing.max_shard))
    report = quantize_checkpoint(
        source,
        _batched(windows) if windows else None,
        config,
        output,
        writing=writing,
        progress=progress,
    )
    # the other processes have written nothing, and would only repeat the evaluation
    if not distributed.is_first():
        return PtqResult(report, expected)
    judged = None
    if verdict:
        judged = judge(
            source,
            output,
            config,
            held_out[:HELD_OUT],
            where,
            progress=progress,
            layout=writing.form,
        )
    if not judges:
        return PtqResult(report, expected, verdict=judged)
    # one model after the other, so that only one is in memory
    before = perplexity(source.load(), judges, progress=progress)
    quantized = load_checkpoint(output, trust_code=source.trust_code)
    after = perplexity(quantized, judges, progress=progress)
    return PtqResult(report, expected, before, after, judged)


def _estimate(
    source: FloatCheckpoint,
    config: TorchConfig,
    windows: Sequence[Any],
    writing: Writing,
) -> Estimate:
    """Estimate the memory and the disk space of a run on calibration windows."""
    return estimate(
        source,
        chosen_layers(source.model, config, source.reader)[0],
        sum(map(len, windows)),
        disk=written_bytes(source, config, writing.form),
        spilled=writing.spill is not None,
        samples=len(windows),
        algorithms=config.algorithms,
    )


def text_windows(
    text: Text,
    tokenizer: PreTrainedTokenizerBase | None,
    model: nn.Module,
    spare: int = 0,
) -> list[torch.Tensor]:
    """Read windows of token ids.

    Args:
        text: the text.
        tokenizer: a transformers tokenizer; None for token ids.
        model: the model whose vocabulary has the token ids.
        spare: the maximum number of further windows after those of ``text``.

    Returns:
        int64 tensors of shape (length,).

    Raises:
        DataError: the model does not run on token ids alone, a token id is outside of its
            vocabulary, or a window is longer than its table of positions.
    """
    if needed := further_inputs(model):
        model_type = getattr(model.config, "model_type", type(model).__name__)
        raise DataError(
            f"{text.source} is text, and a model of type {model_type} needs"
            f" {' and '.join(needed)}. In Python, give quantize_checkpoint batches as"
            " dictionaries with these keys; without data, choose a weight-only scheme"
            " without an algorithm and --no-verdict",
        )
    positions = positions_of(model)
    if positions is not None and text.length > positions:
        raise DataError(
            f"windows of {text.length} tokens, and the model has positions for"
            f" {positions}; choose a length of at most {positions}",
        )
    windows = read_windows(text.source, tokenizer, text.length, text.count, spare)
    # an index beyond the embedding would stop the run with torch's "index out of range in self"
    count = vocabulary_of(model)
    for window in windows:
        for end in (int(window.min()), int(window.max())):
            if not 0 <= end < count:
                raise DataError(
                    f"{text.source} has the token id {end}, but those of the model are 0"
                    f" to {count - 1}; give token ids of its own tokenizer",
                )
    return windows


def _batched(windows: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Stack windows into batches of shape (windows, length).

    Larger products are faster.
    """
    # all windows have the same length
    return list(
        torch.stack(list(windows)).split(max(1, BATCH_TOKENS // len(windows[0])))
    )


def tokenizer_of(
    folder: Path, trust_code: bool = False
) -> PreTrainedTokenizerBase | None:
    """Return the tokenizer of a checkpoint, or None.

    A tokenizer whose files are there and cannot be read is named in a warning.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(
            str(folder), trust_remote_code=trust_code
        )
        # transformers 5 makes a tokenizer of no vocabulary where its files are missing: text gives
        # no tokens, or unknown ones.
        names = set(getattr(tokenizer, "vocab_files_names", {}).values())
        if names and not any((folder / name).is_file() for name in names):
            raise FileNotFoundError(f"there is none of {', '.join(sorted(names))}")
        return tokenizer
    except Exception as error:  # transformers raises several unrelated types
        files = [name for name in _TOKENIZER_FILES if (folder / name).is_file()]
        # without files it is a model of token ids
        if files:
            # the first line: errors of transformers have pages of hints
            reason = f"{type(error).__name__}: {error}".partition("\n")[0]
            logger.warning(
                "transformers cannot read the tokenizer of %s (%s): %s",
                folder,
                ", ".join(files),
                reason,
            )
        return None
