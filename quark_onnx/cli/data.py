"""Options for the source of samples, and the reader of the samples."""

from __future__ import annotations

import re
from argparse import Namespace
from functools import partial
from typing import Any

from calibrators.readers.files import ARRAY_SUFFIXES, find_files
from calibrators.readers.images import ImageSpec, image_files
from calibrators.readers.open import RandomData, Reader, open_reader
from quark_onnx.cli.field_options import FieldOption
from quark_onnx.cli.parsing import (
    Parser,
    UsageError,
    batch_axis,
    count,
    dimension,
    image_size,
    number,
    sample_path,
)
from quark_onnx.config.checks import refuse_first


def _image_option(name: str, note: str = "", **arguments: Any) -> FieldOption:
    """Return the option of an attribute of ImageSpec, with the default of the library."""
    # "size" has no default.
    arguments = {"default": getattr(ImageSpec, name, None), **arguments}
    dest = f"image_{name}"
    return FieldOption(_flag(name), ImageSpec, name, note, dest=dest, **arguments)


def _flag(name: str) -> str:
    """Return the option for an attribute of ImageSpec.

    >>> _flag("size"), _flag("resize_to")
    ('--image-size', '--resize-to')
    """
    if name == "size":
        return "--image-size"
    return "--" + name.replace("_", "-")


#: Options of the attributes of ImageSpec.
IMAGE_OPTIONS = (
    _image_option("size", "; for a folder of images", metavar="H[xW]", type=image_size),
    _image_option("mean", nargs=3, metavar=("R", "G", "B"), type=number),
    _image_option("std", nargs=3, metavar=("R", "G", "B"), type=number),
    # As a text, which the help shows.
    _image_option("scale", default="1/255"),
    _image_option("color"),
    _image_option("layout"),
    _image_option("resize"),
    _image_option("resize_to"),
    _image_option("pad_value", type=int),
    _image_option("interpolation"),
)
#: Attributes of the options that select the data.
DATA_DESTINATIONS = (
    *("data", "random_data", "dim", "limit", "input_layout", "batch_axis"),
    *(option.dest for option in IMAGE_OPTIONS),
)


def add_data_options(parser: Parser) -> None:
    group = parser.add_argument_group("data", "About 100 samples as in deployment.")
    source = group.add_mutually_exclusive_group()
    source.add_argument(
        "--data",
        metavar="PATH",
        type=sample_path,
        help=".npz, .npy, .parquet or .arrow file, a folder of them, or of images",
    )
    source.add_argument(
        "--random-data",
        metavar="N",
        nargs="?",
        const=RandomData().samples,
        type=count,
        help=f"N random samples, for a first try only ({RandomData().samples} without N)",
    )
    group.add_argument(
        "--dim",
        metavar="NAME=N",
        type=dimension,
        action="append",
        help="size of a symbolic dimension for --random-data; 1 unless given",
    )
    group.add_argument(
        "--limit",
        metavar="N",
        type=count,
        help="use only the first N samples",
    )
    group.add_argument(
        "--input-layout",
        choices=["nhwc"],
        help="array data is NHWC and the model expects NCHW",
    )
    group.add_argument(
        "--batch-axis",
        metavar="none|N",
        type=batch_axis,
        default="auto",
        help="axis of the inputs that counts samples; none: a file is one sample",
    )
    images = parser.add_argument_group(
        "images",
        "input = (pixel * scale - mean) / std, after resizing.",
    )
    for option in IMAGE_OPTIONS:
        option.add(images)


def data_of(options: Namespace, *, needed: bool = True) -> partial[Reader] | None:
    """Return a function that opens the data for a model's inputs.

    Args:
        options: the options of the command.
        needed: True if the command requires data.

    Returns:
        The function; None if no data is given and none is needed.

    Raises:
        UsageError: options contradict each other; the message names both.
    """
    # An option given with its default value is as good as omitted.
    image_settings: dict[str, Any] = {
        option.field: value
        for option in IMAGE_OPTIONS
        if (value := _frozen(getattr(options, option.dest)))
        != getattr(ImageSpec, option.field, None)
    }
    if options.data is None and options.random_data is None:
        # Image options without data are a mistake, even where no data is needed.
        if needed or image_settings:
            raise UsageError(_no_data(options))
        return None
    _check(options, image_settings)
    if options.data is None:
        # A function, and not a reader: the inputs of the model are known only after it is loaded.
        random = RandomData(options.random_data, dims=dict(options.dim or ()))
        return partial(open_reader, random)
    images = None
    if image_settings:
        images = ImageSpec(**image_settings)
    # A folder that holds arrays, too, is read as arrays.
    elif image_files(options.data) and not find_files(
        options.data,
        ARRAY_SUFFIXES,
    ):
        raise UsageError(
            f"{options.data} holds images; say how to read them: --image-size 224, and"
            " --mean, --std, --scale, --color, --resize and --layout where the model"
            " was trained with others than their defaults",
        )
    return partial(
        open_reader,
        options.data,
        limit=options.limit,
        layout=options.input_layout,
        images=images,
        batch_axis=options.batch_axis,
    )


def _no_data(options: Namespace) -> str:
    """Return the message with the ways to give data, and the options that need no data."""
    ways = "give samples with --data PATH, or --random-data for a first try"
    if hasattr(options, "ranges"):
        ways = f"{ways}, or known ranges with --ranges FILE"
    if hasattr(options, "weights_only"):
        ways = f"{ways}; --weights-only and --dynamic need no data"
    return f"there is no data: {ways}"


def _frozen(value: Any) -> Any:
    # argparse collects several values in a list; ImageSpec has tuples.
    return tuple(value) if isinstance(value, list) else value


def _check(options: Namespace, images: dict[str, Any]) -> None:
    given = {
        **{_flag(name): True for name in images},
        "--limit": options.limit,
        "--input-layout": options.input_layout,
    }
    # The first given option stands for all in the messages.
    first_flag = next((flag for flag, value in given.items() if value), "")
    # The default way of resizing is not among the given options, and needs none of the two.
    resize = images.get("resize")
    contradictions = (
        (
            options.data is None and first_flag,
            f"{first_flag} does not go with --random-data",
        ),
        (
            options.data is None and options.batch_axis != "auto",
            "--batch-axis is for files of arrays and does not go with --random-data",
        ),
        (
            images and options.batch_axis != "auto",
            "--batch-axis is for files of arrays and does not go with --image-size",
        ),
        (
            options.data is not None and options.dim,
            "--dim does not go with --data; it is for --random-data",
        ),
        (
            images and "size" not in images,
            f"{first_flag} needs --image-size, which is what makes --data a folder of images",
        ),
        (
            images and options.input_layout,
            "--input-layout is for arrays and does not go with --image-size; for images"
            " there is --layout",
        ),
        (
            "resize_to" in images and resize != "crop",
            f"{_flag('resize_to')} needs --resize crop",
        ),
        (
            "pad_value" in images and resize not in ("letterbox", "corner"),
            f"{_flag('pad_value')} needs --resize letterbox or corner",
        ),
    )
    refuse_first(contradictions, UsageError)


def in_flags(message: str, options: Namespace) -> str:
    """Translate a reader's message from Python names to options."""
    # Python names the function that has the option.
    message = re.sub(r"open_reader\(\.\.\., ([^)]+)\)", r"\1", message)
    message = message.replace("batch_axis=None", "--batch-axis none")
    message = re.sub(r"batch_axis=(\d+)", r"--batch-axis \1", message)
    message = re.sub(r"ImageSpec\.(\w+)", lambda match: _flag(match[1]), message)
    # Errors are translated for all commands; some have no image options.
    if getattr(options, "image_size", None):
        # The hint of the readers is to transpose; for images, the other layout does it.
        other = "nchw" if options.image_layout == "nhwc" else "nhwc"
        size = r"(expected \[[^,]+, \d+, (\d+), (\d+)\])$"
        message = re.sub(size, r"\1; use --image-size \2x\3", message)
        return re.sub(
            r"transpose it with (layout='nhwc'|np\.transpose\(.*\))",
            f"use --layout {other}",
            message,
        )
    return message.replace(
        "transpose it with layout='nhwc'",
        "add --input-layout nhwc",
    ).replace("leave out layout='nhwc'", "leave out --input-layout nhwc")
