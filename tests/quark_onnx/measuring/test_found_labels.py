"""Labels that come with the data, YOLO's text files, damaged images and rows of files."""

from __future__ import annotations

import io
import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from calibrators.readers.images import ImageSpec
from calibrators.readers.open import InputSpec, open_reader
from quark_onnx import analyze, compare, quantize, quantize_to_accuracy
from quark_onnx.common.errors import ConfigError, DataError, ModelError
from quark_onnx.measuring.held_out import is_held_out
from quark_onnx.measuring.labelled import scorer_for
from quark_onnx.report.verdict.labels import read_box_files
from tests.models import parse

#: A classifier: the largest of three values.
LARGEST = "g (float[N,3] x) => (float[N,3] y) { m = MatMul (x, w) y = Softmax (m) }"
ROWS = np.random.default_rng(0).normal(size=(40, 3)).astype(np.float32)
#: The right class of each row, but for the first four.
CLASSES = ROWS.argmax(axis=1)
CLASSES[:4] = (CLASSES[:4] + 1) % 3


@pytest.fixture
def model() -> Any:
    return parse(LARGEST, w=np.eye(3, dtype=np.float32) * 4)


def pairs() -> Any:
    return ((row, int(label)) for row, label in zip(ROWS, CLASSES, strict=True))


def entries() -> Any:
    return [
        {"pixel_values": row.tolist(), "label": int(label), "id": "a"}
        for row, label in zip(ROWS, CLASSES, strict=True)
    ]


def loader() -> Any:
    torch = pytest.importorskip("torch")
    data = torch.utils.data.TensorDataset(
        torch.from_numpy(ROWS), torch.from_numpy(CLASSES)
    )
    return torch.utils.data.DataLoader(data, batch_size=16)


@pytest.mark.filterwarnings("ignore:the samples hold more")
@pytest.mark.parametrize("data", [pairs, entries, loader])
def test_labels_of_the_data_give_the_top_1_of_both_models(
    model: Any, data: Any
) -> None:
    found = compare(model, model, data())
    top1 = found.scores[0]
    assert (top1.name, found.labelled) == ("top1", 40)
    assert top1.reference == top1.other == 36 / 40
    # Of 40 samples in batches of 16, as of 40 single ones, four later ones are held out.
    report = quantize(model, data()).report
    assert (report.samples, report.held_out, report.labelled) == (36, 4, 4)
    assert report.scores[0].reference == 1.0
    assert "top-1: float 100.00 %" in str(report)


@pytest.mark.parametrize("sizes", [[8] * 5, [4, *[1] * 36], [1, 8, 3, 8, 8, 8, 4]])
@pytest.mark.parametrize("declared", [True, False])
def test_held_out_batches_have_the_labels_of_their_rows(
    sizes: list[int], declared: bool
) -> None:
    """Batches of any sizes, of a model whose batch is open: rows are held out.

    Of a model whose whole shape is open, batches are.
    """
    model = parse(LARGEST, w=np.eye(3, dtype=np.float32))
    if not declared:
        model.graph.input[0].type.tensor_type.ClearField("shape")
    sizes = [*sizes, *[1] * 16]  # enough samples for some to be held out
    rows = np.random.default_rng(1).normal(size=(sum(sizes), 3)).astype(np.float32)
    labels = np.random.default_rng(2).integers(0, 3, len(rows))
    right = rows.argmax(axis=1) == labels
    ends = np.cumsum(sizes)
    batches = [
        np.arange(end - size, end) for end, size in zip(ends, sizes, strict=True)
    ]
    data = [(rows[batch], labels[batch]) for batch in batches]
    found = compare(model, model, data)
    assert found.labelled == len(rows)
    assert found.scores[0].reference == right.mean()
    report = quantize(model, data).report
    samples = np.split(np.arange(len(rows)), len(rows)) if declared else batches
    held_out = [batch for index, batch in enumerate(samples) if is_held_out(index)]
    expected = np.concatenate([right[batch] for batch in held_out])
    assert report.labelled == len(expected)
    assert report.scores[0].reference == expected.mean()


def test_labels_of_another_task_are_no_classes(
    model: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        labels = [1, *[7] * 39]
        found = compare(model, model, list(zip(ROWS, labels, strict=True)))
    assert (found.scores, found.labelled) == ([], 0)
    assert "7 is one, and the model has 3 classes" in caplog.text


def test_a_model_that_takes_no_single_row(tmp_path: Path) -> None:
    window = parse(
        """g (float[N,4] x) => (float[3,4] y) {
            s = Reshape (x, shape)
            y = MatMul (s, w)
        }""",
        shape=np.int64([3, 4]),
        w=np.eye(4, dtype=np.float32),
    )
    for index in range(2):
        np.save(tmp_path / f"{index}.npy", np.ones((3, 4), np.float32))
    with pytest.raises(
        ModelError,
        match=r"one row of the data \(x \[1, 4\]\).*open_reader\(.*batch_axis=None",
    ):
        quantize(window, tmp_path)
    data = partial(open_reader, tmp_path, batch_axis=None)
    assert quantize(window, data).report.samples == 2


def test_an_output_named_like_another_format(model: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"another format.*name it o\.onnx"):
        quantize(model, pairs(), "A8W8", tmp_path / "o.tflite")


@pytest.fixture
def images(tmp_path: Path) -> Path:
    """Twenty-one images of 100 x 50 pixels, of which one is damaged, and one has two objects."""
    image_module = pytest.importorskip("PIL.Image")
    (tmp_path / "images").mkdir()
    (tmp_path / "labels").mkdir()
    for index in range(21):
        image_module.new("RGB", (100, 50)).save(tmp_path / "images" / f"{index:02}.png")
    (tmp_path / "images" / "03.png").write_bytes(b"junk")
    text = "2 0.5 0.5 0.2 0.4\n\n1 0.1 0.2 0.3 0.2 0.3 0.8\n"
    (tmp_path / "labels" / "07.txt").write_text(text, encoding="utf-8")
    return tmp_path


def test_text_files_of_yolo(images: Path) -> None:
    """Shares of width and height become pixels; a polygon becomes the box around it."""
    files = {
        "07.png": images / "images" / "07.png",
        "08.png": images / "images" / "08.png",
    }
    labels = read_box_files(images / "labels", files)
    expected = [[40, 15, 60, 35, 2], [10, 10, 30, 40, 1]]
    np.testing.assert_allclose(labels.images["07.png"].boxes, expected)
    assert labels.images["07.png"].size == (100, 50)
    assert labels.images["08.png"].boxes.shape == (0, 5)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0 0.5 0.5 0.2\n", "07.txt, line 1: .*four numbers"),
        ("0.5 0.5 0.5 0.2 0.1\n", "line 1: .*is not a class"),
        ("0 50 50 20 10\n", "outside of the image; numbers are shares"),
        ("nan 0.5 0.5 0.2 0.1\n", "line 1: .*is not a class"),
        ("inf 0.5 0.5 0.2 0.1\n", "line 1: .*is not a class"),
        ("cat 0.5 0.5 0.2 0.1\n", "'cat .* has a text that is no number"),
        ("", "no text file in it labels an image"),
    ],
)
def test_malformed_text_files(images: Path, text: str, message: str) -> None:
    (images / "labels" / "07.txt").write_text(text, encoding="utf-8")
    data = partial(open_reader, images / "images", images=ImageSpec((8, 8)))
    with pytest.raises(DataError, match=message):
        scorer_for(images / "labels", data)


def test_a_folder_of_classes_is_no_folder_of_labels(images: Path) -> None:
    files = {"images/07.png": images / "images" / "07.png"}
    with pytest.raises(
        DataError, match="sub-folders are the classes, leave out the labels"
    ):
        read_box_files(images, files)


def test_text_files_are_for_images(model: Any, images: Path) -> None:
    with pytest.raises(ConfigError, match="the data must be a folder of images"):
        compare(model, model, [{"x": ROWS}], labels=images / "labels")


def by_channel(batch: str = "N") -> Any:
    """A classifier of images by their brightest channel."""
    return parse(
        f"""g (float[{batch},3,8,8] x) => (float[{batch},3] y) {{
            m = GlobalAveragePool (x)
            f = Flatten (m)
            c = MatMul (f, w)
            y = Softmax (c)
        }}""",
        w=np.eye(3, dtype=np.float32) * 9,
    )


@pytest.mark.images
def test_a_damaged_image_moves_no_label(images: Path) -> None:
    """The damaged image is the fourth; the labels of the others stay theirs."""
    image_module = pytest.importorskip("PIL.Image")
    for index in range(21):
        if index != 3:
            color = [0, 0, 0]
            color[index % 3] = 255
            image = image_module.new("RGB", (8, 8), tuple(color))
            image.save(images / "images" / f"{index:02}.png")
    lines = [f"{index:02}.png,{index % 3}" for index in range(21)]
    labels = images / "labels.csv"
    labels.write_text("\n".join(["name,label", *lines, ""]), encoding="utf-8")
    channels = by_channel()
    data = partial(open_reader, images / "images", images=ImageSpec((8, 8)))
    with pytest.warns(UserWarning, match="03.png is neither"):
        found = compare(channels, channels, data, labels=labels)
    assert found.labelled == 20 and found.scores[0].reference == 1.0
    assert any("1 image is left out" in line for line in found.warnings)
    with pytest.warns(UserWarning, match="03.png is neither"):
        report = quantize(channels, data, labels=labels).report
    assert any("1 image is left out" in note for note in report.notes)


@pytest.mark.images
@pytest.mark.parametrize("keys", ["names", "indices", "folders"])
@pytest.mark.parametrize("opened", [True, False])
def test_a_damaged_image_moves_no_label_of_any_kind(
    images: Path, keys: str, opened: bool
) -> None:
    """Labels by name, by index or by folder, of a reader or of its partial."""
    image_module = pytest.importorskip("PIL.Image")
    for index in range(30):
        image = image_module.new("RGB", (8, 8), "black")
        image.putdata([tuple(255 * (each == index % 3) for each in range(3))] * 64)
        file = images / "classes" / f"{index % 3}" / f"{index // 3:02}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        image.save(file)
    (images / "classes" / "1" / "01.png").write_bytes(b"damaged")
    files = [f"{index % 3}/{index // 3:02}.png" for index in range(30)]
    name = dict(zip(files, range(30), strict=True)) if keys == "indices" else {}
    lines = [f"{name.get(file, file)},{file[0]}" for file in files]
    labels = images / "labels.csv"
    labels.write_text("\n".join(["name,label", *lines, ""]), encoding="utf-8")
    data: Any = partial(open_reader, images / "classes", images=ImageSpec((8, 8)))
    if opened:
        data = data([InputSpec("x", np.dtype("float32"), ("N", 3, 8, 8))])
    given = None if keys == "folders" else labels
    with pytest.warns(UserWarning, match=r"left out: .*01\.png"):
        found = compare(by_channel(), by_channel(), data, labels=given)
    assert found.labelled == 29 and found.scores[0].reference == 1.0
    with pytest.warns(UserWarning, match=r"left out: .*01\.png"):
        report = quantize(by_channel(), data, labels=given).report
    assert (report.held_out, report.labelled) == (2, 2)
    assert report.scores[0].reference == 1.0
    assert "on 2 labelled held-out samples" in str(report)


@pytest.mark.images
def test_folders_of_other_classes_are_no_labels(
    images: Path, caplog: pytest.LogCaptureFixture
) -> None:
    image_module = pytest.importorskip("PIL.Image")
    for index in range(24):
        file = images / "classes" / f"{index % 2}" / f"{index:02}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        image_module.new("RGB", (8, 8), (10 * index, 0, 200)).save(file)
    data = partial(open_reader, images / "classes", images=ImageSpec((8, 8)))
    with caplog.at_level(logging.WARNING):
        report = quantize(by_channel(), data).report
    assert (report.scores, report.labelled) == ([], 0)
    assert "2 folders in" in caplog.text and "the model has 3 classes" in caplog.text


#: Several rows for each sample: the scores of three crops.
CROPS = "g (float[N,3,3] x) => (float[N,3,3] y) { y = Softmax (x) }"


@pytest.mark.parametrize("given", [True, False])
def test_rows_that_are_no_samples_have_no_labels(
    tmp_path: Path, given: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Otherwise the second row would have the label of the second sample."""
    model, crops = parse(CROPS), ROWS[:36].reshape(12, 1, 3, 3)
    file = tmp_path / "labels.csv"
    file.write_text("name,label\n0,1\n1,2\n", encoding="utf-8")
    if given:
        with pytest.raises(ConfigError, match="'y' has 3 rows for 1 sample"):
            compare(
                model,
                model,
                [{"x": crop} for crop in crops],
                labels=file,
                task="classifier",
            )
        return
    data = [(crop, int(label)) for crop, label in zip(crops, CLASSES, strict=False)]
    with caplog.at_level(logging.WARNING):
        found = compare(model, model, data, task="classifier")
    assert (found.scores, found.labelled) == ([], 0)
    assert "'y' has 3 rows for 1 sample" in caplog.text


def test_labels_that_a_loss_ignores_in_the_first_batch(model: Any) -> None:
    """Classes of -1 have no score, and those of later batches have one."""
    classes = np.where(np.arange(40) < 16, -1, CLASSES)
    batches = [
        (ROWS[start : start + 8], classes[start : start + 8])
        for start in range(0, 40, 8)
    ]
    found = compare(model, model, batches)
    assert found.labelled == 24 and found.scores[0].reference == 1.0
    # All are ignored.
    nothing = compare(model, model, batches[:2])
    assert (nothing.labelled, nothing.scores) == (0, [])


@pytest.mark.images
@pytest.mark.parametrize("kind", ["file", "Pillow"])
@pytest.mark.parametrize("batch", ["N", "1"])
def test_a_damaged_entry_of_a_data_set_moves_no_label(
    images: Path, batch: str, kind: str
) -> None:
    """Labels of a file count all entries; those that come with the entries stay theirs."""
    image_module = pytest.importorskip("PIL.Image")
    entries: list[dict[str, Any]] = []
    for index in range(40):
        file = io.BytesIO()
        color = np.zeros((64, 64, 3), np.uint8)
        color[..., index % 3] = np.random.default_rng(index).integers(
            200, 255, (64, 64)
        )
        image_module.fromarray(color).save(file, "PNG")
        encoded = file.getvalue()[: 600 if index == 3 else None]
        image = image_module.open(io.BytesIO(encoded)) if kind == "Pillow" else encoded
        entries.append({"image": image, "label": index % 3})
    labels = images / "labels.csv"
    lines = [f"{index},{index % 3}" for index in range(40)]
    labels.write_text("\n".join(["name,label", *lines, ""]), encoding="utf-8")
    channels = by_channel(batch)
    data = partial(open_reader, entries, images=ImageSpec((8, 8)))
    for file_of_labels in (labels, None):
        with pytest.warns(UserWarning, match="left out: sample 3: the image"):
            found = compare(channels, channels, data, labels=file_of_labels)
        assert found.labelled == 39 and found.scores[0].reference == 1.0


def test_a_result_is_five_lines_and_a_page(model: Any) -> None:
    calls = list[str]()

    def progress(name: str, done: float, total: int | None) -> None:
        calls.append(name)

    with pytest.warns(UserWarning, match="left out: ..id"):
        result = quantize(model, entries(), progress=progress)
    lines = repr(result).splitlines()
    assert len(lines) == 5
    assert lines[0] == "Result: 2 of 2 nodes quantized"
    assert "36 for calibration, 4 held out" in lines[1]
    assert result.report.verdict is not None
    assert lines[4] == f"  verdict {result.report.verdict}"
    assert repr(result.report).startswith(
        f"Report: verdict {result.report.verdict.band}"
    )
    assert "\n" not in repr(result.report)
    assert result._repr_html_().startswith("<iframe")
    assert calls
    with pytest.raises(ConfigError, match="progress is 'loud'"):
        quantize(model, entries(), progress="loud")  # type: ignore[arg-type]
    with pytest.raises(
        ConfigError, match=r"function\(name, done, total\), and takes \(x\)"
    ):
        quantize(model, entries(), progress=lambda x: None)  # type: ignore[arg-type,misc]


def test_progress_of_all_measurements_reaches_a_function(
    model: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    names = dict[str, tuple[float, int | None]]()

    def progress(name: str, done: float, total: int | None) -> None:
        names[name] = done, total

    data = list(ROWS)
    quantized = quantize(model, data, progress=progress).model
    # Of 40 samples, four are held out from calibration.
    assert names["calibrating"] == (36, 36)
    compare(model, quantized, data, progress=progress)
    analyze(model, quantized, data, progress=progress)
    quantize_to_accuracy(model, data, "10dB", progress=progress)
    assert {"comparing", "analyzing", "reading", "trying"} <= names.keys()
    assert capsys.readouterr().err == ""
    for call in (compare, analyze):
        with pytest.raises(ConfigError, match="progress is 'loud'"):
            call(model, quantized, data, progress="loud")  # type: ignore[operator]


@pytest.mark.parametrize("call", [compare, analyze])
def test_an_exception_of_the_function_ends_a_comparison(
    model: Any, call: Callable[..., Any]
) -> None:
    quantized = quantize(model, list(ROWS)).model

    def progress(name: str, done: float, total: int | None) -> None:
        if done:
            raise RuntimeError("enough")

    with pytest.raises(RuntimeError, match=r"^enough$"):
        call(model, quantized, list(ROWS), progress=progress)


@pytest.mark.parametrize("equal", [True, False])
def test_equal_samples_are_noted(model: Any, equal: bool) -> None:
    rows = np.ones_like(ROWS) if equal else ROWS
    notes = quantize(model, list(rows)).report.notes
    assert any("all samples are equal" in note for note in notes) is equal


@pytest.mark.parametrize("stage", ["calibrating", "measuring"])
def test_an_exception_of_the_progress_function_cancels(
    model: Any, tmp_path: Path, stage: str
) -> None:
    class Cancelled(Exception):
        pass

    def progress(name: str, done: float, total: int | None) -> None:
        if name == stage and done > 3:
            raise Cancelled

    with pytest.raises(Cancelled):
        quantize(model, list(ROWS), "A8W8", tmp_path / "q.onnx", progress=progress)
    assert not list(tmp_path.iterdir())


def test_the_name_of_the_package_of_calibrators() -> None:
    """Both names lead to the same objects."""
    import calibrators as plain
    from quark_onnx import calibrators as ours

    assert ours.register is plain.register and ours.open_reader is open_reader
    assert set(plain.__all__) < set(ours.__all__)
