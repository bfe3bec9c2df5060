"""Names of texts and token ids, checked without torch and without a tokenizer."""

from __future__ import annotations

import os
from itertools import product
from pathlib import Path

from quark_onnx.common.errors import DataError

#: The environment variable with the folder of data sets, stored as files or folders by name.
DATASETS = "QUARK_ONNX_DATASETS"
#: File name suffixes of text and of token ids.
TEXT = (".txt", ".md", ".json", ".jsonl")
TOKENS = (".npy", ".npz")
#: Suffixes of data set names in AMD Quark's scripts that choose a way to cut windows; they are
#: ignored here.
_USES = ("_for_awq_benchmark", "_for_gptq_benchmark")
#: Files of the tokenizers of all families, as globs.
_TOKENIZERS = ("*token*", "*vocab*", "*spiece*", "*sentencepiece*", "merges.txt")


def check_source(source: Path | str, model: Path | None = None) -> None:
    """Raise DataError for data that cannot be read, whatever the model computes.

    Args:
        source: a file, a folder, or the name of a data set.
        model: folder of the model, which must have a tokenizer for text; None if that is unknown.
    """
    path = Path(local_source(source))
    if path.suffix in (".pkl", ".pickle"):
        raise DataError(
            f"{path} is a pickle, which may run code; save token ids as .npy or .npz",
        )
    if path.suffix in (*TEXT, *TOKENS) and not path.exists():
        raise DataError(f"{path} is not there")
    if path.is_file() and not path.stat().st_size:
        raise DataError(f"{path} is empty")
    if path.suffix not in TOKENS and model is not None and not has_tokenizer(model):
        raise DataError(
            f"{source} is text, and the model has no tokenizer; give token ids as .npy or"
            " .npz",
        )


def has_tokenizer(model: Path) -> bool:
    """Return whether the folder of a model has a file of a tokenizer."""
    return any(any(model.glob(pattern)) for pattern in _TOKENIZERS)


def local_source(source: Path | str) -> Path | str:
    """Return the local file or folder of a data set, or else its name.

    Args:
        source: an existing path, which is returned unchanged, or the name of a data set. The name
            may have an owner, and a suffix of AMD Quark's scripts for the use of the set.

    >>> local_source("pileval_for_awq_benchmark")
    'pileval'
    """
    # A file of the user has priority over a data set of that name.
    if Path(source).exists():
        return source
    name = str(source)
    for use in _USES:
        name = name.removesuffix(use)
    folder = os.environ.get(DATASETS)
    if folder:
        # "owner/name" is looked up as a path of two parts, and then without the owner.
        names = (name, name.rpartition("/")[2])
        for own_name, ending in product(names, ("", *TEXT, *TOKENS)):
            path = Path(folder, own_name + ending)
            if path.exists():
                return path
    return name if isinstance(source, str) else source
