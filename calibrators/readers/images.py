"""Read image files into model inputs, by a small ONNX model.

The model decodes with DecodeImage of onnxruntime-extensions, then resizes and normalizes with
standard operators. Resizing is antialiased, and within one of 256 levels of Pillow's results. The
orientation in the EXIF data is not applied.

Decoding runs in another process, always: the libjpeg of onnxruntime-extensions ends its process on
a damaged file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import zip_longest
from math import isfinite
from numbers import Integral, Real
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import numpy as np
from numpy.typing import NDArray

from calibrators.base import is_number
from calibrators.errors import CalibrationError, DataError, RuntimeCrash
from calibrators.limits import VARIABLE, tensor_limit
from calibrators.onnx_runtime.isolation import always_isolated
from calibrators.readers.encoded import encoded_size, read_encoded
from calibrators.readers.files import find_files

#: Suffixes of images. JPEG and PNG can be decoded on every system; others are refused, not skipped.
IMAGE_SUFFIXES = frozenset(
    {".jpg", ".jpeg", ".png", ".bmp", ".webp", ".gif", ".tif", ".tiff"}
)


def class_folders(path: Path) -> list[str]:
    """Return the names of the sub-folders with images, sorted, of a folder without images itself.

    Data sets have one such folder per class: ``train/<class>/*.jpg``.
    """
    if not path.is_dir() or find_files(path, IMAGE_SUFFIXES):
        return []
    folders = [folder for folder in path.iterdir() if folder.is_dir()]
    return sorted(
        folder.name for folder in folders if find_files(folder, IMAGE_SUFFIXES)
    )


def image_files(path: Path) -> list[Path]:
    """Return the images of a folder, sorted by name; or one of each class folder in turn.

    The first samples, which a limit keeps, are then of all classes.

    Args:
        path: a folder of images or of class folders, or a single file.
    """
    files = [find_files(path / name, IMAGE_SUFFIXES) for name in class_folders(path)]
    turns = zip_longest(*files) if files else [find_files(path, IMAGE_SUFFIXES)]
    return [file for turn in turns for file in turn if file is not None]


@dataclass(frozen=True)
class ImageSpec:
    """Preprocessing of an image file: decode, resize, then ``(pixel * scale - mean) / std``.

    Attributes:
        size: height and width to resize to, in pixels.
        mean: subtracted per channel after ``scale``, in the order of ``color``.
        std: divisor per channel.
        scale: factor of the pixel values, which are 0 to 255.
        layout: axis order that the model expects. It is ``"nchw"`` or ``"nhwc"``.
        color: channel order that the model expects. It is ``"rgb"`` or ``"bgr"``.
        resize: stretch, crop the centre, or pad (letterbox, corner). ``"stretch"`` to the size;
            ``"crop"`` the centre of an image that covers it; ``"letterbox"``: the whole image in
            its proportions, centred on ``pad_value``; ``"corner"``: likewise, in the upper left
            corner, as YOLOX has it.
        resize_to: shorter side before the crop, in pixels. None for the least that covers the size.
        pad_value: pixel value of the padding, 0 to 255.
        interpolation: resampling filter. It is ``"linear"`` or ``"cubic"``.

    >>> ImageSpec(size=(224, 224), resize="crop", resize_to=256).scale * 255
    1.0
    """

    size: tuple[int, int]
    mean: tuple[float, float, float] = (0.0, 0.0, 0.0)
    std: tuple[float, float, float] = (1.0, 1.0, 1.0)
    scale: float = 1 / 255
    layout: Literal["nchw", "nhwc"] = "nchw"
    color: Literal["rgb", "bgr"] = "rgb"
    resize: Literal["stretch", "crop", "letterbox", "corner"] = "stretch"
    resize_to: int | None = None
    pad_value: int = 114
    interpolation: Literal["linear", "cubic"] = "linear"

    def __post_init__(self) -> None:
        for name, hint in get_type_hints(type(self)).items():
            if get_origin(hint) is Literal:
                choices = get_args(hint)
                self._require(
                    getattr(self, name) in choices, name, f"one of {', '.join(choices)}"
                )
        for name, length in ("size", 2), ("mean", 3), ("std", 3):
            values = getattr(self, name)
            numbers = isinstance(values, Sequence | np.ndarray) and all(
                _is_finite(value) for value in values
            )
            self._require(numbers and len(values) == length, name, f"{length} numbers")
        for name in ("scale", "pad_value"):
            self._require(_is_finite(getattr(self, name)), name, "a number")
        self._require(
            all(is_number(n, Integral) and n > 0 for n in self.size),
            "size",
            "positive whole numbers",
        )
        self._require(all(self.std), "std", "other than zero")
        if self.resize_to is not None:
            self._require(
                is_number(self.resize_to, Integral), "resize_to", "a whole number"
            )
            self._require(
                self.resize == "crop", "resize_to", "left out unless resize is 'crop'"
            )
            self._require(
                self.resize_to >= max(self.size),
                "resize_to",
                f"at least {max(self.size)}",
            )

    def _require(self, holds: bool, name: str, what: str) -> None:
        if not holds:
            raise CalibrationError(
                f"ImageSpec.{name} is {getattr(self, name)!r}; it must be {what}",
            )


def _is_finite(value: object) -> bool:
    return is_number(value, Real) and isfinite(value)  # type: ignore[arg-type]


def read_images(
    files: Sequence[Path], spec: ImageSpec
) -> Iterator[NDArray[np.float32]]:
    """Yield images as arrays of shape (1, 3, height, width), or (1, height, width, 3).

    Args:
        files: JPEG or PNG files. Grey becomes three equal channels; transparency is dropped.
        spec: how to read them.

    Raises:
        DataError: a file cannot be read or decoded.
        CalibrationError: onnxruntime-extensions is not installed.
    """
    with image_decoder(spec) as decode:
        yield from map(decode, files)


@contextmanager
def image_decoder(
    spec: ImageSpec,
) -> Iterator[Callable[[Path | bytes], NDArray[np.float32]]]:
    """Open a function that decodes and preprocesses an image: a file, or the content of one.

    The function raises DataError for an image that cannot be read or decoded, and goes on working.

    Raises:
        CalibrationError: onnxruntime-extensions is not installed.
    """
    with always_isolated() as context:
        # One session for all files: the model has no fixed image size.
        session = context.run(_open_decoder, spec)

        def decode(file: Path | bytes) -> NDArray[np.float32]:
            encoded, name = _checked(file)
            try:
                (image,) = session.run(
                    None, {"encoded": np.frombuffer(encoded, np.uint8)}
                )
            # The check of the headers cannot find damaged pixels.
            except RuntimeCrash as crash:
                # Without the cause, which would be reported as a crash on the model.
                raise DataError(
                    f"{name} cannot be decoded, and is probably damaged: {crash}",
                ) from None
            except Exception as error:  # onnxruntime raises several unrelated types
                raise DataError(f"{name} cannot be decoded: {error}") from error
            return np.asarray(image)

        yield decode


def _open_decoder(spec: ImageSpec) -> Any:
    """Open a session that decodes and preprocesses image files."""
    try:
        from calibrators.onnx_runtime.session import open_session

        return open_session(image_model(spec), what="the decoder of images")
    except ImportError as error:
        if error.name != "onnxruntime_extensions":
            raise
        raise CalibrationError(
            "to read image files: pip install onnxruntime-extensions. Python 3.14 has no"
            " wheel of it: pass arrays (.npy, .npz) there",
        ) from error


def image_model(spec: ImageSpec) -> Any:
    """Return the ONNX model that decodes and preprocesses an image file.

    The model needs the operators of onnxruntime-extensions.
    """
    from onnx import parser

    return parser.parse_model(_pipeline(spec))


def _pipeline(spec: ImageSpec) -> str:
    """Return the ONNX text of the model: bytes of a file, shape (n), to an image.

    DecodeImage returns one channel for a grey JPEG, whose bytes it shuffles if BGR is requested.
    """
    # Values of Resize's keep_aspect_ratio_policy, from opset 18 on.
    policies = {"stretch": "stretch", "crop": "not_smaller"}
    policy = policies.get(spec.resize, "not_larger")
    framed = "framed = CenterCropPad <axes = [1, 2]> (lowered, size)"
    if spec.resize == "corner":
        framed = """side = Shape <start = 1, end = 3> (lowered)
    missing = Sub (size, side)
    pads = Concat <axis = 0> (before, missing, first)
    framed = Pad (lowered, pads)"""
    if spec.resize_to:
        # not_smaller with a square makes the shorter side as long as the square's.
        box = (spec.resize_to, spec.resize_to)
    else:
        box = spec.size
    return f"""
<ir_version: 8, opset_import: ["" : 18, "com.microsoft.extensions" : 1]>
read_image (uint8[n] encoded) => (float[1, d1, d2, d3] image)
<
    int64[1] first = {{0}}, int64[5] before = {{0, 0, 0, 0, 0}}, int64[3] three = {{1, 1, 3}},
    int64[3] order = {_list((0, 1, 2) if spec.color == "rgb" else (2, 1, 0))},
    int64[2] box = {_list(box)}, int64[2] size = {_list(spec.size)},
    float[1] pad = {_list([float(spec.pad_value)])}, float[1] scale = {_list([float(spec.scale)])},
    float[3] mean = {_list(map(float, spec.mean))}, float[3] std = {_list(map(float, spec.std))}
>
{{
    decoded = com.microsoft.extensions.DecodeImage <color_space = "rgb"> (encoded)
    rgb = Expand (decoded, three)
    pixels = Gather <axis = 2> (rgb, order)
    batch = Unsqueeze (pixels, first)
    resized = Resize <axes = [1, 2], mode = "{spec.interpolation}", antialias = 1, cubic_coeff_a = -0.5,
                      keep_aspect_ratio_policy = "{policy}"> (batch, , , box)
    values = Cast <to = 1> (resized)
    lowered = Sub (values, pad)
    {framed}
    raised = Add (framed, pad)
    scaled = Mul (raised, scale)
    centred = Sub (scaled, mean)
    normal = Div (centred, std)
    image = Transpose <perm = {[0, 3, 1, 2] if spec.layout == "nchw" else [0, 1, 2, 3]}> (normal)
}}"""  # noqa: E501


def _list(numbers: Iterable[float]) -> str:
    """Format a list in ONNX text: {1, 2}."""
    return f"{{{', '.join(map(str, numbers))}}}"


def _checked(file: Path | bytes) -> tuple[bytes, str]:
    """Return the bytes of an image that DecodeImage is safe with, and its name in messages."""
    try:
        if isinstance(file, Path):
            return read_encoded(file, tensor_limit()), str(file)
        encoded_size(file, "the image", tensor_limit())
    except OSError as error:
        raise DataError(f"{file!s} cannot be read: {error}") from error
    except ValueError as error:
        # ``encoded.py`` runs without this package and raises ValueError for all; a limit is named
        # in its text.
        if "allowed" in str(error):
            hint = f"; set {VARIABLE} if it is meant"
        else:
            hint = ""
        raise DataError(f"{error}{hint}") from error
    return file, "the image"
