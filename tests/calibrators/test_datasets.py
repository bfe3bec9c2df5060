"""Data sets of Hugging Face in files, read with the package ``datasets``."""

from __future__ import annotations

import io
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from calibrators.errors import CalibrationError, DataError
from calibrators.readers.images import ImageSpec
from calibrators.readers.open import InputSpec, open_reader

IDS = InputSpec("input_ids", np.dtype(np.int64), ("batch", "length"))
MASK = InputSpec("attention_mask", np.dtype(np.int64), ("batch", "length"))
ROWS = {
    "input_ids": [[1, 2, 3], [4, 5, 6], [7, 8, 9]],
    "attention_mask": [[1, 1, 1], [1, 1, 0], [1, 0, 0]],
    "label": [0, 1, 1],
}


@pytest.fixture
def datasets() -> Any:
    return pytest.importorskip("datasets")


@pytest.mark.skipif(find_spec("datasets") is not None, reason="datasets is installed")
def test_without_the_package(tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    with pytest.raises(CalibrationError, match="pip install datasets"):
        open_reader(tmp_path / "a.parquet", [IDS])


@pytest.mark.parametrize("kind", ["parquet", "folder of parquet", "saved", "arrow"])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_files(datasets: Any, tmp_path: Path, kind: str) -> None:
    """Each way to store a data set gives its rows as samples, and its labels."""
    data = datasets.Dataset.from_dict(ROWS)
    path = tmp_path
    if "parquet" in kind:
        data.to_parquet(str(tmp_path / "a.parquet"))
        path = tmp_path if "folder" in kind else tmp_path / "a.parquet"
    else:
        data.save_to_disk(str(tmp_path / "saved"))
        path = tmp_path / "saved"
        if kind == "arrow":
            (path,) = path.glob("*.arrow")
    for source in (path, data):
        reader = open_reader(source, [IDS, MASK])
        samples = list(reader)
        assert reader.length == 3 and reader.labels == {"0": 0, "1": 1, "2": 1}
        for name in ("input_ids", "attention_mask"):
            found = np.concatenate([sample[name] for sample in samples])
            np.testing.assert_array_equal(found, ROWS[name])


def test_several_splits(datasets: Any, tmp_path: Path) -> None:
    part = datasets.Dataset.from_dict(ROWS)
    splits = datasets.DatasetDict({"train": part, "test": part})
    splits.save_to_disk(str(tmp_path / "saved"))
    with pytest.raises(DataError, match=r"holds splits; .*: test, train"):
        open_reader(tmp_path / "saved", [IDS, MASK])
    with pytest.raises(DataError, match=r"a DatasetDict; give one .*: data\['train'\]"):
        open_reader(splits, [IDS, MASK])


@pytest.mark.images
def test_images_in_parquet(datasets: Any, tmp_path: Path) -> None:
    """The last of twenty images is damaged, and left out, with its label."""
    image_module = pytest.importorskip("PIL.Image")
    images = []
    levels = [index % 2 * 255 for index in range(19)]
    for level in levels:
        file = io.BytesIO()
        image_module.new("RGB", (8, 8), (level,) * 3).save(file, "PNG")
        images.append({"bytes": file.getvalue(), "path": None})
    images.append({"bytes": b"junk", "path": None})
    data = datasets.Dataset.from_dict({"image": images, "label": [*levels, 9]})
    data = data.cast_column("image", datasets.Image())
    data.to_parquet(str(tmp_path / "a.parquet"))
    spec = InputSpec("x", np.dtype(np.float32), ("n", 3, 4, 4))
    for source in (tmp_path / "a.parquet", data):
        reader = open_reader(source, [spec], images=ImageSpec((4, 4)))
        with pytest.warns(UserWarning, match="left out: sample 19"):
            means = [sample["x"].mean() * 255 for sample in reader]
        assert means == levels == list(reader.labels.values())
        with pytest.raises(DataError, match="hold images; say how to read them"):
            open_reader(source, [spec]).first()
