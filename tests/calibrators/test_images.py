"""Images against Pillow: decoding, resizing, framing, normalization.

And files that cannot be decoded.
"""

from __future__ import annotations

import io
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from calibrators.errors import (
    CalibrationError,
    DataError,
    EmptyReader,
    RuntimeCrash,
    SampleMismatch,
)
from calibrators.onnx_runtime.isolation import current, isolated
from calibrators.readers.images import ImageSpec, read_images
from calibrators.readers.open import InputSpec, open_reader

Image = pytest.importorskip("PIL.Image")
pytestmark = pytest.mark.images

PIXELS = {"scale": 1.0, "layout": "nhwc"}  # leaves the levels 0 to 255 to be compared


@pytest.fixture(scope="module")
def photo() -> Any:
    """A smooth RGB image, 90 wide and 130 high."""
    noise = np.random.default_rng(0).integers(0, 256, (12, 9, 3), dtype=np.uint8)
    return Image.fromarray(noise).resize((90, 130), Image.Resampling.BICUBIC)


def read(path: Path, size: tuple[int, int], **options: Any) -> NDArray[np.float32]:
    """The one image at a path, without its batch axis."""
    (image,) = read_images([path], ImageSpec(size, **options))
    return image.reshape(image.shape[1:])


def at_scale(photo: Any, scale: float, height: int, width: int) -> NDArray[np.uint8]:
    """Pillow's photo, resized by one scale for both axes and cut to whole pixels."""
    box = (0, 0, width / scale, height / scale)
    return np.asarray(photo.resize((width, height), Image.Resampling.BILINEAR, box=box))


def saved(image: Any, path: Path) -> Path:
    image.save(path)
    return path


def test_an_input_called_bytes_is_no_image() -> None:
    content = np.arange(8, dtype=np.int32)
    reader = open_reader(
        [{"bytes": content}], [InputSpec("bytes", np.dtype(np.int32), (8,))]
    )
    [sample] = reader
    np.testing.assert_array_equal(sample["bytes"], content)


def test_a_png_of_the_right_size_is_exact(photo: Any, tmp_path: Path) -> None:
    path = saved(photo, tmp_path / "фото.png")
    pixels = np.asarray(photo)
    np.testing.assert_array_equal(read(path, (130, 90), **PIXELS), pixels)
    np.testing.assert_array_equal(
        read(path, (130, 90), color="bgr", **PIXELS), pixels[..., ::-1]
    )
    np.testing.assert_array_equal(
        read(path, (130, 90), scale=1), pixels.transpose(2, 0, 1)
    )


def test_normalization_is_exact(photo: Any, tmp_path: Path) -> None:
    mean, std = (0.485, 0.456, 1e-5), (0.229, 0.224, 0.225)
    image = read(saved(photo, tmp_path / "a.png"), (130, 90), mean=mean, std=std)
    scaled = np.asarray(photo).astype(np.float32) * np.float32(1 / 255)
    want = (scaled - np.array(mean, np.float32)) / np.array(std, np.float32)
    np.testing.assert_array_equal(image, want.transpose(2, 0, 1))


@pytest.mark.parametrize("interpolation", ["linear", "cubic"])
@pytest.mark.parametrize("size", [(40, 40), (65, 45), (33, 120), (200, 300)])
def test_stretch(
    photo: Any, tmp_path: Path, size: tuple[int, int], interpolation: str
) -> None:
    """Both filter one axis at a time in fixed point; rounding may differ by one level."""
    image = read(
        saved(photo, tmp_path / "a.png"), size, interpolation=interpolation, **PIXELS
    )
    filters = {"linear": Image.Resampling.BILINEAR, "cubic": Image.Resampling.BICUBIC}
    np.testing.assert_allclose(
        image, np.asarray(photo.resize(size[::-1], filters[interpolation])), atol=1
    )


@pytest.mark.parametrize(
    ("size", "resize_to", "scale", "resized"),
    [
        ((50, 72), None, 72 / 90, (104, 72)),
        ((64, 61), 72, 72 / 90, (104, 72)),
        ((100, 50), None, 100 / 130, (100, 69)),
    ],
)
def test_crop(
    photo: Any, tmp_path: Path, size: Any, resize_to: Any, scale: float, resized: Any
) -> None:
    top, left = (resized[0] - size[0]) // 2, (resized[1] - size[1]) // 2
    want = at_scale(photo, scale, *resized)[top : top + size[0], left : left + size[1]]
    image = read(
        saved(photo, tmp_path / "a.png"),
        size,
        resize="crop",
        resize_to=resize_to,
        **PIXELS,
    )
    np.testing.assert_allclose(image, want, atol=1)


@pytest.mark.parametrize(
    ("size", "scale", "resized"),
    [
        ((65, 60), 1 / 2, (65, 45)),
        ((60, 30), 1 / 3, (43, 30)),
        ((260, 183), 2, (260, 180)),
    ],
)
@pytest.mark.parametrize("resize", ["letterbox", "corner"])
def test_padding(
    photo: Any, tmp_path: Path, size: Any, scale: float, resized: Any, resize: str
) -> None:
    top = left = 0
    if resize == "letterbox":
        top, left = (size[0] - resized[0]) // 2, (size[1] - resized[1]) // 2
    want = np.full((*size, 3), 114)
    want[top : top + resized[0], left : left + resized[1]] = at_scale(
        photo, scale, *resized
    )
    image = read(saved(photo, tmp_path / "a.png"), size, resize=resize, **PIXELS)
    np.testing.assert_allclose(image, want, atol=1)


@pytest.mark.parametrize(("suffix", "tolerance"), [(".png", 0), (".jpg", 1)])
def test_grey_becomes_three_equal_channels(
    photo: Any, tmp_path: Path, suffix: str, tolerance: int
) -> None:
    path = saved(photo.convert("L"), tmp_path / f"grey{suffix}")
    image = read(path, (130, 90), **PIXELS)
    want = np.asarray(Image.open(path))[..., None].repeat(3, axis=2)
    np.testing.assert_allclose(image, want, atol=tolerance)


def test_transparency_is_dropped(photo: Any, tmp_path: Path) -> None:
    clear = photo.convert("RGBA")
    clear.putalpha(7)
    np.testing.assert_array_equal(
        read(saved(clear, tmp_path / "a.png"), (130, 90), **PIXELS), np.asarray(photo)
    )


@pytest.mark.parametrize("progressive", [False, True])
def test_jpeg(photo: Any, tmp_path: Path, progressive: bool) -> None:
    """Without colour subsampling, decoders differ by the rounding of the inverse transform alone."""  # noqa: E501
    path = tmp_path / "a.jpeg"
    photo.save(path, subsampling=0, progressive=progressive)
    np.testing.assert_allclose(
        read(path, (130, 90), **PIXELS), np.asarray(Image.open(path)), atol=4
    )


def test_a_folder_of_images(photo: Any, tmp_path: Path) -> None:
    for level in (2, 0, 1):
        saved(Image.new("RGB", (8, 6), (level,) * 3), tmp_path / f"{level}.PNG")
    (tmp_path / "labels.txt").touch()
    spec = InputSpec("image", np.dtype(np.float32), (1, 3, 4, 6))
    reader = open_reader(tmp_path, [spec], images=ImageSpec(size=(4, 6), scale=1))
    assert reader.length == 3 and reader.restartable
    assert [sample["image"].max() for sample in reader] == [0, 1, 2]
    assert (
        len(
            list(open_reader(tmp_path / "1.PNG", [spec], images=ImageSpec(size=(4, 6))))
        )
        == 1
    )


def test_an_empty_folder(tmp_path: Path) -> None:
    spec = InputSpec("image", None, None)
    images = ImageSpec(size=(4, 6))
    with pytest.raises(DataError, match=f"{tmp_path.name} is empty"):
        open_reader(tmp_path, [spec], images=images)
    (tmp_path / "notes.txt").touch()
    with pytest.raises(EmptyReader, match="no image in"):
        open_reader(tmp_path, [spec], images=images).first()


def test_a_folder_above_those_of_images(tmp_path: Path) -> None:
    for split in ("test", "train"):
        (tmp_path / split / "cat").mkdir(parents=True)
        (tmp_path / split / "cat" / "a.png").touch()
    with pytest.raises(
        EmptyReader, match=r"images are in .*test and in .*train: name one"
    ):
        open_reader(tmp_path, [], images=ImageSpec(size=(4, 6)))


@pytest.mark.parametrize(("bad", "total"), [(1, 20), (2, 40), (1, 19), (2, 39)])
def test_a_damaged_image_of_many_is_left_out(
    photo: Any, tmp_path: Path, bad: int, total: int
) -> None:
    for index in range(total):
        saved(photo, tmp_path / f"{index:02}.jpg")
    for index in range(bad):
        (tmp_path / f"{index:02}.jpg").write_bytes(b"junk")
    images = ImageSpec(size=(4, 6))
    reader = open_reader(tmp_path, [InputSpec("image", None, None)], images=images)
    if bad * 20 > total:
        warned = pytest.warns(UserWarning) if bad > 1 else nullcontext()
        with warned, pytest.raises(DataError, match="neither JPEG nor PNG"):
            list(reader)
        return
    with pytest.warns(UserWarning, match=r"left out: .*jpg is neither"):
        assert len(list(reader)) == total - bad
    assert list(reader.left_out) == [f"{index:02}.jpg" for index in range(bad)]


@pytest.mark.filterwarnings("ignore:the samples hold more")
def test_images_in_entries_of_a_data_set(photo: Any, tmp_path: Path) -> None:
    """Images of Pillow, encoded images, and rows of Hugging Face, with and without labels."""
    file = saved(photo, tmp_path / "a.png")
    spec, images = InputSpec("image", None, None), ImageSpec(size=(4, 6))
    expected = read(file, (4, 6))[np.newaxis]
    row = {"bytes": file.read_bytes(), "path": None}
    for entry, labels in (
        (photo, {}),
        (file.read_bytes(), {}),
        (row, {}),
        ((photo, 3), {"0": 3}),
        ({"text": "a", "img": row, "label": 3}, {"0": 3}),
        ({"img": {"bytes": None, "path": str(file)}}, {}),
    ):
        reader = open_reader([entry], [spec], images=images)
        np.testing.assert_array_equal(reader.first()["image"], expected)
        assert reader.labels == labels
    with pytest.raises(SampleMismatch, match="sample 0: there is no image in it"):
        open_reader([{"x": 1}], [spec], images=images).first()


def encoded(photo: Any, kind: str, mode: str = "RGB") -> bytes:
    file = io.BytesIO()
    photo.convert(mode).save(file, kind)
    return file.getvalue()


def test_files_that_cannot_be_decoded(photo: Any, tmp_path: Path) -> None:
    jpeg, png = encoded(photo, "JPEG"), encoded(photo, "PNG")
    scan = jpeg.index(b"\xff\xda")
    faults = {
        b"": "neither JPEG nor PNG",
        encoded(photo, "BMP"): "neither JPEG nor PNG, whatever its name; convert it",
        jpeg[:3]: "cut short",
        jpeg[:scan]: "cut short",
        jpeg[: scan + 100]: "cut short",
        jpeg[:2] + jpeg[scan:]: "damaged",
        jpeg[:20] + b"junk" + jpeg[20:]: "damaged",
        encoded(photo, "JPEG", "CMYK"): "neither RGB nor grey",
        png[:99]: "cut short",
        png[:50] + b"junk" + png[54:]: "cannot be decoded",
    }
    path = tmp_path / "bad.jpg"
    for content, message in faults.items():
        path.write_bytes(content)
        with pytest.raises(DataError, match=rf"bad\.jpg .*{message}"):
            read(path, (4, 6))
    with pytest.raises(DataError, match=r"none\.png cannot be read"):
        read(tmp_path / "none.png", (4, 6))


def test_without_the_extensions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime_extensions", None)
    with pytest.raises(CalibrationError, match="pip install onnxruntime-extensions"):
        read(Path("a.png"), (4, 6))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"size": (0, 4)}, r"ImageSpec.size is \(0, 4\); it must be positive"),
        ({"size": (4,)}, "ImageSpec.size .* 2 numbers"),
        ({"std": (1.0, 0.0, 1.0)}, "ImageSpec.std .* other than zero"),
        ({"size": 5}, "ImageSpec.size is 5; it must be 2 numbers"),
        ({"size": (8.5, 8)}, "ImageSpec.size .* positive whole numbers"),
        ({"mean": (0.5,)}, "ImageSpec.mean .* 3 numbers"),
        ({"mean": 0.5}, "ImageSpec.mean is 0.5; it must be 3 numbers"),
        ({"mean": "abc"}, "ImageSpec.mean is 'abc'; it must be 3 numbers"),
        ({"mean": (0.5, 0.5, float("nan"))}, "ImageSpec.mean .* 3 numbers"),
        ({"scale": "x"}, "ImageSpec.scale is 'x'; it must be a number"),
        ({"pad_value": "x"}, "ImageSpec.pad_value is 'x'; it must be a number"),
        (
            {"resize": "crop", "resize_to": "x"},
            "ImageSpec.resize_to is 'x'; it must be a whole number",
        ),
        (
            {"layout": "NCHW"},
            "ImageSpec.layout is 'NCHW'; it must be one of nchw, nhwc",
        ),
        (
            {"resize_to": 9},
            "ImageSpec.resize_to is 9; it must be left out unless resize is 'crop'",
        ),
        (
            {"resize": "crop", "resize_to": 5},
            "ImageSpec.resize_to is 5; it must be at least 6",
        ),
    ],
)
def test_a_spec_checks_itself(options: dict[str, Any], message: str) -> None:
    with pytest.raises(CalibrationError, match=message):
        ImageSpec(**{"size": (4, 6), **options})


def segment(jpeg: bytes, marker: int) -> int:
    """The position behind the length of a segment."""
    return jpeg.index(bytes([0xFF, marker])) + 4


#: Damages of a JPEG by name: the segment, an offset into it, and the new bytes. libjpeg ends its
#: process on each of them, and the check of the headers finds none.
DAMAGES = {
    "Huffman table with 255 codes of each length": (0xC4, 1, b"\xff" * 16),
    "index of a Huffman table": (0xC4, 0, b"\x0f"),
    "index of a quantization table": (0xDB, 0, b"\x0f"),
    "sampling factor of zero": (0xC0, 7, b"\x00"),
    "precision of twelve bits": (0xC0, 0, b"\x0c"),
    "scan of an unknown component": (0xDA, 1, b"\x63"),
    "scan of too many components": (0xDA, 0, b"\x09"),
    "width of zero": (0xC0, 3, b"\x00\x00"),
}


def damaged(photo: Any, damage: str) -> bytes:
    jpeg = bytearray(encoded(photo, "JPEG"))
    marker, offset, content = DAMAGES[damage]
    place = segment(jpeg, marker) + offset
    jpeg[place : place + len(content)] = content
    return bytes(jpeg)


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_an_error_with_its_name(
    photo: Any, tmp_path: Path, damage: str
) -> None:
    """Native code on untrusted bytes never runs unprotected: this process goes on."""
    path = tmp_path / "damaged.jpg"
    path.write_bytes(damaged(photo, damage))
    with pytest.raises(DataError, match=r"damaged\.jpg cannot be decoded") as caught:
        read(path, (4, 6))
    assert caught.value.__cause__ is None or not isinstance(
        caught.value.__cause__, RuntimeCrash
    )


def test_images_and_models_share_an_isolated_process(
    photo: Any, tmp_path: Path
) -> None:
    """Files before a damaged one are read, and the process is there for what follows."""
    good, bad = saved(photo, tmp_path / "a.jpg"), tmp_path / "b.jpg"
    bad.write_bytes(damaged(photo, next(iter(DAMAGES))))
    with isolated():
        images = read_images([good, bad, good], ImageSpec((4, 6)))
        before = next(images)
        with pytest.raises(DataError, match=r"b\.jpg cannot be decoded"):
            next(images)
        (after,) = read_images([good], ImageSpec((4, 6)))
    (plain,) = read_images([good], ImageSpec((4, 6)))
    np.testing.assert_array_equal(before, after)
    np.testing.assert_array_equal(before, plain)
    assert current() is None


BEGUN = """
import sys
from contextlib import nullcontext
from pathlib import Path
from calibrators.onnx_runtime.isolation import current
from calibrators.readers.images import ImageSpec, read_images
images = read_images([Path(sys.argv[1])] * 2, ImageSpec((4, 6)))
print(next(images).shape, current())
"""


def test_reading_that_was_begun_does_not_keep_the_process_alive(
    photo: Any, tmp_path: Path
) -> None:
    """A generator in a global variable is closed when the interpreter ends."""
    path = saved(photo, tmp_path / "a.jpg")
    done = subprocess.run(
        [sys.executable, "-c", BEGUN, str(path)],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    assert done.stdout == "(1, 3, 4, 6) None\n" and not done.stderr
