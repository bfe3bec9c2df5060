"""Labels: what is read, and the metrics against values worked out by hand."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from calibrators.readers.images import ImageSpec
from calibrators.readers.open import open_reader
from quark_onnx import compare
from quark_onnx.common.errors import ConfigError, DataError
from quark_onnx.measuring.labelled import placed, scorer_for
from quark_onnx.report.verdict import Scorer, read_labels
from quark_onnx.report.verdict.boxes import detector_layout
from quark_onnx.report.verdict.labels import mean_average_precision
from quark_onnx.report.verdict.task import Task
from tests.models import parse

COCO = {
    "images": [{"id": 7, "file_name": "a.jpg", "width": 100, "height": 50}],
    "annotations": [
        {"image_id": 7, "category_id": 90, "bbox": [10, 10, 20, 20]},
        {"image_id": 7, "category_id": 3, "bbox": [0, 0, 5, 5], "iscrowd": 1},
    ],
    "categories": [{"id": 90, "name": "b"}, {"id": 3, "name": "a"}],
}


def written(path: Path, content: Any) -> Path:
    text = content if isinstance(content, str) else json.dumps(content)
    path.write_text(text, encoding="utf-8")
    return path


def test_classes_of_a_csv_file(tmp_path: Path) -> None:
    file = written(tmp_path / "l.csv", "file,label,note\na.jpg,3,x\nb.jpg,0,\n")
    assert dict(read_labels(file).classes) == {"a.jpg": 3, "b.jpg": 0}


def test_boxes_of_a_coco_file(tmp_path: Path) -> None:
    image = read_labels(written(tmp_path / "l.json", COCO)).images["a.jpg"]
    assert image.size == (100, 50)
    assert image.boxes.tolist() == [[10, 10, 30, 30, 1]], "the second of two classes"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("l.csv", "image,label\na,1\n", "must be name and label"),
        ("l.csv", "name,label\na,cat\n", "line 2: label 'cat' is not the index"),
        (
            "l.csv",
            "name,label\na,1\nb,1\na,2\n",
            "line 4: 'a' has the label 2, and 1 in",
        ),
        ("l.csv", "name,label\n", "there is no label in it"),
        ("l.csv", "", "the columns are none"),
        ("l.json", "{", "is no JSON: line 1, column 2"),
        ("l.json", "[]", "the document is an array, and must be an object with"),
        ("l.json", {**COCO, "categories": []}, r"\[0\].category_id is 90, and must be"),
    ],
)
def test_faults_are_named(
    tmp_path: Path, name: str, content: Any, message: str
) -> None:
    with pytest.raises(DataError, match=message):
        read_labels(written(tmp_path / name, content))


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cannot be read"):
        read_labels(tmp_path / "none.csv")


def test_top_1_and_top_5(tmp_path: Path) -> None:
    model = parse(
        "g (float[N, 3, 4, 4] x) => (float scores) { a = Flatten (x)  scores = MatMul (a, w) }",
        w=np.eye(48, 8, dtype=np.float32),
    )
    x = np.zeros((3, 3, 4, 4), np.float32)
    x.reshape(3, -1)[:, :8] = [range(8), range(8, 0, -1), [0, 0, 9, 8, 7, 6, 5, 4]]
    file = written(tmp_path / "l.csv", "name,label\n0,7\n1,4\n2,7\n9,1\n")
    found = compare(model, model, [{"x": x}], labels=file)
    assert found.labelled == 3
    by_name = {score.name: (score.reference, score.other) for score in found.scores}
    assert by_name["top1"] == pytest.approx((1 / 3, 1 / 3))
    assert by_name["top5"] == pytest.approx((2 / 3, 2 / 3))


@pytest.mark.parametrize("label", [8, -1])
def test_a_label_that_is_no_class_of_the_model(tmp_path: Path, label: int) -> None:
    """Labels that are counted from 1 would otherwise be a top-1 of nearly 0 %."""
    text = "g (float[N, 8] x) => (float scores) { scores = Mul (x, w) }"
    model = parse(text, w=np.ones(8, np.float32))
    file = written(tmp_path / "l.csv", f"name,label\n0,7\n1,{label}\n")
    x = np.tile(np.arange(8, dtype=np.float32), (2, 1))
    message = f"'1' has the label {label}, and the model has 8 classes, counted from 0"
    with pytest.raises(DataError, match=message):
        compare(model, model, [{"x": x}], labels=file, task="classifier")


def test_of_equal_scores_the_first_class_is_chosen(tmp_path: Path) -> None:
    """As argmax does: coarse scores are often equal."""
    text = "g (float[N, 8] x) => (float scores) { scores = Mul (x, w) }"
    model = parse(text, w=np.ones(8, np.float32))
    x = np.array([[1, 3, 3, 3, 0, 0, 0, 0]], np.float32).repeat(3, axis=0)
    file = written(tmp_path / "l.csv", "name,label\n0,1\n1,2\n2,5\n")
    found = compare(model, model, [{"x": x}], labels=file, task="classifier")
    scores = {score.name: score.reference for score in found.scores}
    hits = [
        int(np.argmax(row)) == label for row, label in zip(x, (1, 2, 5), strict=True)
    ]
    assert hits == [True, False, False]
    # Class 5 is the sixth: after 1, 2, 3, 0 and 4.
    assert scores == pytest.approx({"top1": np.mean(hits), "top5": 2 / 3})


@pytest.mark.parametrize("keep", [0, 1])
def test_a_model_that_returns_classes_has_no_top_5(tmp_path: Path, keep: int) -> None:
    """Nothing tells which class it would have chosen next, whatever the label's index."""
    text = (
        "g (float[N, 8] x) => (int64 classes)"
        f" {{ classes = ArgMax <axis = 1, keepdims = {keep}> (x) }}"
    )
    other = text.replace("(x) }", "(n) }").replace("{ c", "{ n = Neg (x) c")
    x = np.eye(8, dtype=np.float32)[[7, 6, 5, 3]]
    # A small index, a right one, one beyond all classes, and a negative one.
    file = written(tmp_path / "l.csv", "name,label\n0,1\n1,6\n2,900\n3,-1\n")
    found = compare(parse(text), parse(other), [{"x": x}], labels=file)
    assert found.labelled == 4
    scores = {score.name: (score.reference, score.other) for score in found.scores}
    # The least value of every row but the last is that of class 0.
    assert scores == {"top1": (1 / 4, 0.0)}


def test_names_in_quotes_may_contain_ends_of_lines(tmp_path: Path) -> None:
    text = 'name,label\n"a\u2028b.jpg",3\n"c\nd.jpg",0\n'
    labels = read_labels(written(tmp_path / "l.csv", text))
    assert dict(labels.classes) == {"a\u2028b.jpg": 3, "c\nd.jpg": 0}


def test_scores_of_nan_are_never_right(tmp_path: Path) -> None:
    text = "g (float[N, 8] x) => (float scores) { scores = Mul (x, w) }"
    model = parse(text, w=np.ones(8, np.float32))
    broken = parse(text, w=np.full(8, np.nan, np.float32))
    file = written(tmp_path / "l.csv", "name,label\n0,7\n1,7\n")
    x = np.tile(np.arange(8, dtype=np.float32), (2, 1))
    found = compare(model, broken, [{"x": x}], labels=file, task="classifier")
    scores = {score.name: (score.reference, score.other) for score in found.scores}
    assert scores == {"top1": (1.0, 0.0), "top5": (1.0, 0.0)}


def test_labels_of_another_task(tmp_path: Path) -> None:
    model = parse("g (float[N, 4] x) => (float y) { y = Relu (x) }")
    file = written(tmp_path / "l.csv", "name,label\n0,1\n")
    with pytest.raises(ConfigError, match="say --task classifier"):
        compare(model, model, {"x": np.ones((2, 4), np.float32)}, labels=file)
    boxes = written(tmp_path / "l.json", COCO)
    with pytest.raises(ConfigError, match="must be a folder of images"):
        compare(model, model, {"x": np.ones((2, 4), np.float32)}, labels=boxes)


def test_no_sample_has_a_label(tmp_path: Path) -> None:
    model = parse(
        "g (float[N, 4, 4, 4] x) => (float scores) { scores = GlobalAveragePool (x) }",
    )
    file = written(tmp_path / "l.csv", "name,label\na.jpg,1\n")
    with pytest.raises(DataError, match=r"named like '0', labels like 'a.jpg'"):
        compare(model, model, [{"x": np.ones((1, 4, 4, 4), np.float32)}], labels=file)


def test_average_precision_by_hand() -> None:
    """Two objects; the best box is right, the second one is not, the third one is right."""
    truth = np.array([[0, 0, 10, 10, 0], [20, 20, 30, 30, 0]], float)
    found = np.array(
        [
            [0, 0, 10, 10, 0.9, 0],
            [50, 50, 60, 60, 0.8, 0],
            [20, 20, 30, 30, 0.7, 0],
        ],
    )
    # precision 1 up to a recall of 0.5, of which there are 51 points, then 2 / 3 at 50 points
    expected = (51 + 50 * 2 / 3) / 101
    assert mean_average_precision([truth], [found]) == pytest.approx(
        (expected, expected)
    )
    assert mean_average_precision([truth], [found[:0]]) == (0, 0)
    half = truth[:1].copy()
    moved = np.array(
        [[0, 0, 10, 7.6, 0.9, 0]]
    )  # an overlap of 0.76: right at 6 of 10 thresholds
    assert mean_average_precision([half], [moved]) == pytest.approx((0.6, 1.0))


def test_a_second_box_on_one_object_is_wrong() -> None:
    truth = np.array([[0, 0, 10, 10, 0], [20, 20, 30, 30, 0]], float)
    twice = np.array([[0, 0, 10, 10, 0.9, 0], [0, 0, 10, 9.9, 0.8, 0]])
    assert mean_average_precision([truth], [twice])[1] == pytest.approx(51 / 101)


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        (ImageSpec(size=(64, 64)), [6.4, 12.8, 64, 64]),
        (ImageSpec(size=(64, 64), resize="letterbox"), [6.4, 22.4, 64, 48]),
        (ImageSpec(size=(64, 64), resize="corner"), [6.4, 6.4, 64, 32]),
        (ImageSpec(size=(50, 50), resize="crop"), [0, 10, 50, 50]),
        (ImageSpec(size=(50, 50), resize="crop", resize_to=100), [0, 0, 50, 50]),
    ],
)
def test_boxes_follow_the_image(spec: ImageSpec, expected: list[float]) -> None:
    box = np.array([[10.0, 10, 100, 50]])
    assert placed(spec, (100, 50), box)[0].tolist() == pytest.approx(expected)


def test_images_are_named_by_their_files(tmp_path: Path) -> None:
    folder = tmp_path / "images"
    folder.mkdir()
    for name in "b.jpg", "a.jpg":
        (folder / name).write_bytes(b"")
    file = written(tmp_path / "l.csv", "name,label\na.jpg,1\n")
    scorer = scorer_for(
        file, partial(open_reader, folder, images=ImageSpec(size=(8, 8)))
    )
    task = Task.of("classifier", "y", {"y": np.zeros((1, 3), np.float32)})
    for scores in ([[0, 1, 0]], [[1, 0, 0]]):
        outputs = {"y": np.float32(scores)}
        scorer.add(task, outputs, outputs)
    assert scorer.count == 1 and scorer.scores()[0].reference == 1.0


def test_boxes_are_scored_in_the_input(tmp_path: Path) -> None:
    """A letterboxed image of 100 x 50 in 100 x 100: the object is 25 pixels lower."""
    labels = read_labels(written(tmp_path / "l.json", COCO))
    spec = ImageSpec(size=(100, 100), resize="letterbox")
    scorer = Scorer(labels, ["a.jpg"], partial(placed, spec))
    boxes = np.float32([[[10, 35, 30, 55]]])
    outputs = {"boxes": boxes, "scores": np.float32([[[0.1, 0.9]]])}
    shifted = {**outputs, "boxes": boxes + np.float32(50)}
    layout = detector_layout(outputs, {"x": np.zeros((1, 3, 100, 100), np.float32)})
    scorer.add(Task.of("detector", "boxes", outputs, layout), outputs, shifted)
    first = scorer.scores()[0]
    assert (first.name, first.reference, first.other) == ("map", 1.0, 0.0)
