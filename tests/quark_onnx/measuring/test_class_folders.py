"""Images in a sub-folder for each class: the order of the samples, and labels from the folders."""

from __future__ import annotations

import logging
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from calibrators.readers.images import ImageSpec, class_folders, image_files
from calibrators.readers.open import InputSpec, open_reader
from quark_onnx import compare
from quark_onnx.common.errors import ConfigError, DataError
from tests.models import parse

Image = pytest.importorskip("PIL.Image")
pytestmark = pytest.mark.images

COLORS = {"blue": (0, 0, 255), "green": (0, 255, 0), "red": (255, 0, 0)}
#: Scores of a classifier: the means of the channels, in the order red, green, blue.
BY_CHANNEL = """g (float[N,3,8,8] x) => (float[N,3] y) {
    m = GlobalAveragePool (x)
    scaled = Mul (m, ten)
    flat = Flatten (scaled)
    y = Softmax (flat)
}"""


@pytest.fixture
def model() -> Any:
    return parse(BY_CHANNEL, ten=np.float32([10.0]).reshape(1))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two images of each color, in folders that are called like it."""
    for name, color in COLORS.items():
        (tmp_path / "data" / name).mkdir(parents=True)
        for index in range(2):
            image = Image.new("RGB", (8, 8), color)
            image.save(tmp_path / "data" / name / f"{index}.png")
    return tmp_path / "data"


def data_in(folder: Path) -> Any:
    return partial(open_reader, folder, images=ImageSpec((8, 8)))


def test_one_image_of_each_class_in_turn(folder: Path) -> None:
    """The first three samples, which a limit keeps, are of three classes."""
    assert class_folders(folder) == ["blue", "green", "red"]
    names = [file.relative_to(folder).as_posix() for file in image_files(folder)]
    assert names[:4] == ["blue/0.png", "green/0.png", "red/0.png", "blue/1.png"]
    reader = open_reader(
        folder,
        [InputSpec("x", None, (1, 3, 8, 8))],
        images=ImageSpec((8, 8)),
        limit=3,
    )
    means = [sample["x"].mean(axis=(0, 2, 3)).argmax() for sample in reader]
    assert means == [2, 1, 0]


def test_images_beside_folders_are_the_data(folder: Path) -> None:
    Image.new("RGB", (8, 8)).save(folder / "a.png")
    assert class_folders(folder) == []
    assert image_files(folder) == [folder / "a.png"]


def test_names_in_the_order_of_the_model(model: Any, folder: Path) -> None:
    """The model's order is red, green, blue; by the sorted folders only green is right."""
    names = folder.parent / "names.txt"
    names.write_text("red\ngreen\nblue\n", encoding="utf-8")
    found = compare(model, model, data_in(folder), labels=names)
    assert [score.reference for score in found.scores] == [1.0, 1.0]
    assert found.labelled == 6
    assert compare(model, model, data_in(folder)).scores[0].reference == 1 / 3


def test_folders_are_labels_without_a_file(model: Any, folder: Path) -> None:
    for before, after in ("red", "0"), ("green", "1"), ("blue", "2"):
        (folder / before).rename(folder / after)
    found = compare(model, model, data_in(folder))
    assert found.scores[0].name == "top1" and found.scores[0].reference == 1.0


def test_an_order_by_chance_raises_doubt(model: Any, folder: Path) -> None:
    for name in "red", "green", "blue":
        for number in 2, 3:
            shutil.copy(folder / name / "0.png", folder / name / f"{number}.png")
    found = compare(model, model, data_in(folder))
    (warning,) = found.warnings
    assert "33 % of 12 labelled inputs, little more than by chance" in warning
    assert "--labels NAMES.txt" in warning
    assert found.verdict is not None and found.verdict.band == "risky"


def test_other_numbers_of_classes_are_no_labels(
    model: Any, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for file in (folder / "red").iterdir():
        file.unlink()
    with caplog.at_level(logging.WARNING):
        found = compare(model, model, data_in(folder))
    assert found.scores == [] and found.labelled == 0
    assert f"2 folders in {folder}, and the model has 3 classes" in caplog.text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no name of a class"),
        ("red\nred\n", "the class 'red' is there twice"),
        (
            "red\ngren\nblue\n",
            "no class is called like the folder 'green'; did you mean",
        ),
    ],
)
def test_wrong_names(model: Any, folder: Path, text: str, message: str) -> None:
    names = folder.parent / "names.txt"
    names.write_text(text, encoding="utf-8")
    with pytest.raises((ConfigError, DataError), match=message):
        compare(model, model, data_in(folder), labels=names)


def test_names_are_for_folders(model: Any, tmp_path: Path) -> None:
    names = tmp_path / "names.txt"
    names.write_text("red\ngreen\nblue\n", encoding="utf-8")
    with pytest.raises(ConfigError, match="the data has no such folders"):
        compare(model, model, [{"x": np.ones((1, 3, 8, 8), np.float32)}], labels=names)
