"""Open data sets of Hugging Face in files, and find the image in an entry of any data set."""

from __future__ import annotations

import io
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from calibrators.errors import CalibrationError, DataError, SampleMismatch
from calibrators.readers.files import find_files

#: Loader of Hugging Face's ``datasets`` for each suffix.
_LOADERS = {".parquet": "parquet", ".arrow": "arrow"}
DATASET_SUFFIXES = frozenset(_LOADERS)
#: Files of ``Dataset.save_to_disk`` and of ``DatasetDict.save_to_disk``.
_SAVED, _SPLITS = "dataset_info.json", "dataset_dict.json"


def is_dataset(path: Path) -> bool:
    """Return whether a path is a data set of Hugging Face: a file, or a folder of such files."""
    if (path / _SAVED).is_file() or (path / _SPLITS).is_file():
        return True
    return bool(find_files(path, DATASET_SUFFIXES))


def load_dataset(path: Path) -> Any:
    """Return the data set in a file or folder; images stay encoded.

    Args:
        path: a parquet or arrow file, a folder of either, or a folder of ``save_to_disk``.

    Raises:
        CalibrationError: ``datasets`` is not installed.
        DataError: the files cannot be read, or hold several splits.
    """
    try:
        import datasets
    except ImportError as error:
        raise CalibrationError(
            f"to read {path}: pip install datasets; or save the arrays as .npz files"
        ) from error
    if (path / _SPLITS).is_file():
        splits = sorted(folder.name for folder in path.iterdir() if folder.is_dir())
        raise DataError(
            f"{path} holds splits; name the folder of one: {', '.join(splits)}"
        )
    try:
        if (path / _SAVED).is_file():
            loaded = datasets.load_from_disk(str(path))
        else:
            files = find_files(path, DATASET_SUFFIXES)
            loader = _LOADERS[files[0].suffix.lower()]
            loaded = datasets.load_dataset(
                loader, data_files=[str(file) for file in files], split="train"
            )
    except Exception as error:  # datasets and pyarrow raise many unrelated types
        raise DataError(f"{path} cannot be read as a data set: {error}") from error
    return undecoded(loaded)


def undecoded(data: Any) -> Any:
    """Return a data set of Hugging Face whose images stay encoded; other data unchanged.

    Iterating over decoded images ends at the first damaged one. A data set with a format or a
    transform of its user is unchanged, too.
    """
    # A data set in memory has its package imported.
    datasets: Any = sys.modules.get("datasets")
    kind: Any = getattr(datasets, "Dataset", ())
    if not isinstance(data, kind) or data.format["type"] is not None:
        return data
    for name, feature in data.features.items():
        if isinstance(feature, datasets.Image):
            data = data.cast_column(name, datasets.Image(decode=False))
    return data


def separate_image(entry: Any, index: int) -> tuple[Path | bytes, dict[str, Any]]:
    """Return the encoded image in an entry, and the other values by name.

    Args:
        entry: an image; or a dictionary, tuple or list with one. An image is one of Pillow's, the
            content of a file, or a dictionary of Hugging Face with ``bytes`` and ``path``.
        index: position of the entry, for messages.

    Raises:
        SampleMismatch: the entry holds no image.
        DataError: Pillow cannot decode the image.
    """
    if isinstance(entry, tuple | list):
        names = ["image", "label", *(f"element {n}" for n in range(2, len(entry)))]
        values = dict(zip(names, entry, strict=False))
    elif isinstance(entry, Mapping) and "bytes" not in entry:
        values = dict(entry)
    else:
        values = {"image": entry}
    for key, value in values.items():
        image = _encoded(value)
        if image is not None:
            del values[key]
            return image, values
    raise SampleMismatch(
        f"sample {index}: there is no image in it, and images= says how to read one; an image is"
        " one of Pillow's, or the content of a JPEG or PNG file"
    )


def holds_image(entry: Any) -> bool:
    """Return whether an entry holds an image of Pillow or of Hugging Face, and no array of it."""
    if isinstance(entry, tuple | list):
        values = [*entry]
    else:
        values = [*entry.values()] if isinstance(entry, Mapping) else [entry]
    # A model may read strings, which are bytes, too.
    return any(
        not isinstance(value, bytes) and _encoded(value) is not None
        for value in [entry, *values]
    )


def _encoded(value: Any) -> Path | bytes | None:
    """Return the content or the file of an image; None for another value."""
    if isinstance(value, bytes):
        return value
    # Hugging Face's form of an image. A sample of a model may have an input called "bytes", too.
    if isinstance(value, Mapping) and "bytes" in value:
        content = value["bytes"]
        if isinstance(content, bytes | bytearray) and content:
            return bytes(content)
        if content is None or isinstance(content, bytes | bytearray):
            return Path(value["path"]) if value.get("path") else None
    # Pillow is not imported to recognize one of its images.
    if hasattr(value, "save") and hasattr(value, "getbands"):
        file = io.BytesIO()
        try:
            value.convert("RGB").save(file, "PNG")
        except (
            Exception
        ) as error:  # Pillow decodes here, and raises several unrelated types
            raise DataError(f"the image cannot be decoded: {error}") from error
        return file.getvalue()
    return None
