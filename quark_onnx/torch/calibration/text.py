"""Windows of tokens for calibration and evaluation."""

from __future__ import annotations

import logging
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from calibrators.json_file import parse_json
from calibrators.limits import regular_size
from quark_onnx.common.errors import DataError, MissingDependency, reading_error
from quark_onnx.torch.calibration.perplexity import windows_of
from quark_onnx.torch.runtime.text_source import (
    DATASETS,
    TEXT,
    TOKENS,
    check_source,
    local_source,
)

logger = logging.getLogger(__name__)

#: Data sets by the names in AMD Quark's scripts: repository, split and column.
NAMED = {
    "pileval": ("mit-han-lab/pile-val-backup", None, "validation", "text"),
    "wikitext": ("Salesforce/wikitext", "wikitext-2-raw-v1", "train", "text"),
    "wikitext_test": ("Salesforce/wikitext", "wikitext-2-raw-v1", "test", "text"),
    "cnn_dailymail": ("abisee/cnn_dailymail", "3.0.0", "validation", "article"),
}


def read_windows(
    source: Path | str,
    tokenizer: Callable[..., Any] | None,
    length: int,
    count: int | None = None,
    spare: int = 0,
) -> list[torch.Tensor]:
    """Read text or token ids as windows of tokens without overlap.

    Args:
        source: a text file (.txt, .md), .json or .jsonl with texts or objects with the key "text",
            a folder of such files, token ids (.npy of shape (windows, at least length); .npz with
            ``ids`` and optionally ``len``), or the name of a data set. The name is looked up in the
            folder of ``QUARK_ONNX_DATASETS``, and then by the ``datasets`` package.
        tokenizer: a transformers tokenizer; None for token ids.
        length: tokens of a window.
        count: the maximum number of windows; all if None.
        spare: the maximum number of further windows after these.

    Returns:
        int64 tensors of shape (length,).

    Raises:
        DataError: the file cannot be read, or has not enough text for a window.
        MissingDependency: a data set is named, and ``datasets`` is not installed.
    """
    check_source(source)
    source = local_source(source)
    path = Path(source)
    if path.suffix in TOKENS and path.is_file():
        windows = list(_token_rows(path, length))
    else:
        if tokenizer is None:
            raise DataError(
                f"{source} is text, and the model has no tokenizer; give token ids as"
                " .npy or .npz",
            )
        # Tokenizing stops as soon as all windows are filled: a data set may be far larger.
        enough = None if count is None else (count + spare) * length
        windows = windows_of(_tokens(_texts(source), tokenizer, enough), length)
    if not windows:
        raise DataError(
            f"{source} has not enough for one window of {length} tokens; give more, or"
            " a smaller length",
        )
    # Fewer windows are no error: a short text still calibrates.
    if count is not None and len(windows) < count:
        logger.warning(
            "%s has %d windows of %d tokens; %d were asked for",
            source,
            len(windows),
            length,
            count,
        )
    return windows if count is None else windows[: count + spare]


def sampled(model: Any, starts: torch.Tensor, length: int) -> torch.Tensor:
    """Return token ids that a model of transformers draws from its own predictions.

    Args:
        model: the model.
        starts: (sequences, tokens), the first tokens of each sequence.
        length: tokens of a sequence.

    Returns:
        int64 of shape (sequences, length).
    """
    from transformers import GenerationConfig

    settings = GenerationConfig(
        # Greedy text repeats itself, and all sequences would be alike.
        do_sample=True,
        # 0: tokens are drawn from the whole distribution.
        top_k=0,
        max_length=length,
        # No end before the full length, as sequences are stacked.
        min_length=length,
        pad_token_id=0,
    )
    tokens: torch.Tensor = model.generate(
        starts, attention_mask=torch.ones_like(starts), generation_config=settings
    )
    return tokens[:, :length]


def _tokens(texts: Iterator[str], tokenizer: Any, enough: int | None) -> torch.Tensor:
    """Return the concatenated tokens of texts, without special tokens."""
    ids = list[int]()
    for text in texts:
        # Special tokens would end up in the middle of windows, since texts are concatenated.
        ids += tokenizer(text, add_special_tokens=False)["input_ids"]
        if enough is not None and len(ids) >= enough:
            break
    return torch.tensor(ids, dtype=torch.int64)


def _load_ids(path: Path) -> tuple[Any, Any]:
    """Return the token ids of an .npy or .npz file, and the lengths of rows or None."""
    try:
        # Pickles run code; a NumPy file with objects is refused.
        loaded = np.load(path, allow_pickle=False)
        if isinstance(loaded, np.ndarray):
            return loaded, None
        with loaded:
            return loaded["ids"], loaded.get("len")
    # EOFError: an empty file.
    except (OSError, EOFError, ValueError, KeyError, zipfile.BadZipFile) as error:
        raise DataError(f"{path} cannot be read as token ids: {error}") from error


def _token_rows(path: Path, length: int) -> Iterator[torch.Tensor]:
    """Yield the first ``length`` token ids, (length,) int64, of each row that has so many.

    Raises:
        DataError: the file holds no ids of shape (windows, length), or lengths of another shape.
    """
    ids, lengths = _load_ids(path)
    if ids.ndim != 2 or ids.dtype.kind not in "iu":
        raise DataError(
            f"{path} holds {ids.dtype} of shape {ids.shape}; token ids are integers of"
            " shape (windows, length)",
        )
    if lengths is not None and (
        lengths.shape != ids.shape[:1] or lengths.dtype.kind not in "iu"
    ):
        raise DataError(
            f"{path} has {lengths.dtype} of shape {lengths.shape} as len; it must have"
            f" an integer for each of the {len(ids)} rows of ids",
        )
    width = ids.shape[1]
    if lengths is None:
        lengths = np.full(len(ids), width)
    # Shorter rows are dropped, as windows have one length and padding is no text. A stated length
    # beyond the width counts as the width.
    for row in ids[np.minimum(lengths, width) >= length]:
        yield torch.from_numpy(row[:length].astype(np.int64))


def _texts(source: Path | str) -> Iterator[str]:
    """Yield the texts of a file, of all files of a folder, or of a data set."""
    path = Path(source)
    if path.is_dir():
        # Sorted: the order of a folder depends on the file system.
        files = sorted(file for file in path.rglob("*") if file.suffix in TEXT)
        if not files:
            raise DataError(f"{path} holds no .txt, .md, .json or .jsonl file")
        for file in files:
            yield from _texts(file)
    elif path.is_file():
        yield from _texts_of_file(path)
    else:
        yield from _data_set(str(source))


def _texts_of_file(path: Path) -> Iterator[str]:
    """Yield the text of a file, or the texts of the rows of a .json or .jsonl file.

    A row is a text, or has a text under "text".
    """
    try:
        # Before reading: a device or a pipe would never end.
        regular_size(path)
        content = path.read_text(encoding="utf-8")
        if path.suffix not in (".json", ".jsonl"):
            yield content
            return
        rows: Any
        # One JSON value per line; blank lines are allowed.
        if path.suffix == ".jsonl":
            # Not splitlines(), which also ends lines at U+2028 and others that strings may contain.
            lines = content.split("\n")
            rows = [
                parse_json(line, f"{path}, line {number},", DataError).value
                for number, line in enumerate(lines, 1)
                if line.strip()
            ]
        else:
            rows = parse_json(content, str(path), DataError).value
    except DataError:  # a ValueError, too
        raise
    except (OSError, ValueError) as error:
        raise reading_error(
            DataError, f"{path} cannot be read as text: {error}", error
        ) from error
    for row in rows if isinstance(rows, list) else [rows]:
        text = row.get("text") if isinstance(row, dict) else row
        if not isinstance(text, str):
            raise DataError(f"{path} has a row without a text: {str(row)[:60]}")
        yield text


def _data_set(name: str) -> Iterator[str]:
    """Yield the rows of a text column of a data set, by the ``datasets`` package.

    The name is in ``NAMED``, or is the name of a repository.
    """
    try:
        import datasets
    except ImportError as error:
        raise MissingDependency(
            f"{name!r} is no file; to load a data set of that name: pip install"
            f" datasets, or put {name}.txt into the folder that {DATASETS} names",
        ) from error
    # Unknown names are repositories, with the usual split and column.
    repository, subset, split, column = NAMED.get(name, (name, None, "train", "text"))
    try:
        rows = datasets.load_dataset(repository, subset, split=split)
    except Exception as error:
        raise DataError(
            f"{name!r} is no file, and cannot be loaded as a data set: {error}",
        ) from error
    for row in rows:
        yield row[column]
