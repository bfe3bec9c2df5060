"""Options for the source of samples, and the reader of the samples."""

from __future__ import annotations

import re
from argparse import Namespace
from dataclasses import fields
from functools import partial
from typing import Any, get_args, get_origin, get_type_hints

from calibrators.readers.files import ARRAY_SUFFIXES, find_files
from calibrators.readers.images import ImageSpec, image_files
from calibrators.readers.open import RandomData, Reader, open_reader
from quark_onnx.cli.parsing import (
    Parser,
    UsageError,
    count,
    dimension,
    image_size,
    number,
    sample_path,
)
from quark_onnx.config.checks import refuse_first

# The defaults of the library are the defaults of the options; "size" has none.
_DEFAULTS = {field.name: field.default for field in fields(ImageSpec)}
#: Attribute of ImageSpec -> arguments and help of its option; attributes with choices pass them on.
_IMAGE: dict[str, tuple[dict[str, Any], str]] = {
    "size": (
        {"metavar": "H[xW]", "type": image_size},
        "--data is a folder of images; resize them to H x W pixels",
    ),
    "mean": (
        {"nargs": 3, "metavar": ("R", "G", "B"), "type": number},
        "subtracted per channel after --scale, in the order of --color",
    ),
    "std": (
        {"nargs": 3, "metavar": ("R", "G", "B"), "type": number},
        "divisor per channel",
    ),
    "scale": (
        {"metavar": "X", "type": number, "default": "1/255"},
        "factor of the pixel values, which are 0 to 255",
    ),
    "color": ({}, "channel order that the model expects"),
    "layout": ({}, "axis order that the model expects"),
    "resize": ({}, "stretch, crop the centre, or letterbox (pad)"),
    "resize_to": (
        {"metavar": "N", "type": count},
        "shorter side before the crop, in pixels",
    ),
    "pad_value": (
        {"metavar": "N", "type": int},
        "pixel value of the letterbox, 0 to 255",
    ),
    "interpolation": ({}, "resampling filter"),
}


#: Attributes of the options that select the data.
DATA_DESTINATIONS = (
    *("data", "random_data", "dim", "limit", "input_layout"),
    *(f"image_{name}" for name in _IMAGE),
)


def add_data_options(parser: Parser) -> None:
    group = parser.add_argument_group("data", "About 100 samples as in deployment.")
    source = group.add_mutually_exclusive_group()
    source.add_argument(
        "--data",
        metavar="PATH",
        type=sample_path,
        help=".npz or .npy file, or a folder of them, or of images",
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
    images = parser.add_argument_group(
        "images",
        "input = (pixel * scale - mean) / std, after resizing.",
    )
    hints = get_type_hints(ImageSpec)
    for name, (settings, text) in _IMAGE.items():
        # Literal types of ImageSpec are the choices of the option: one list for Python and for the
        # shell.
        if (
            get_origin(hints[name]) is not None
            and (choices := get_args(hints[name]))
            and not settings
        ):
            settings = {"choices": choices}
        if name != "size":
            settings = {"default": _DEFAULTS[name], **settings}
        images.add_argument(_flag(name), dest=f"image_{name}", help=text, **settings)


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
    # Options that differ from their defaults. An option given with its default value is as good as
    # omitted.
    given: dict[str, Any] = {
        name: _frozen(value)
        for name in _IMAGE
        if (value := getattr(options, f"image_{name}")) is not None
        and _frozen(value) != _DEFAULTS[name]
    }
    if options.data is None and options.random_data is None:
        # Image options without data are a mistake, even where no data is needed.
        if needed or given:
            raise UsageError("one of the arguments --data --random-data is required")
        return None
    _check(options, given)
    if options.data is None:
        # A function, and not a reader: the inputs of the model are known only after it is loaded.
        random = RandomData(options.random_data, dims=dict(options.dim or ()))
        return partial(open_reader, random)
    images = None
    if given:
        images = ImageSpec(**given)
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
    )


def _frozen(value: Any) -> Any:
    # argparse collects several values in a list; ImageSpec holds tuples.
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
            "pad_value" in images and resize != "letterbox",
            f"{_flag('pad_value')} needs --resize letterbox",
        ),
    )
    refuse_first(contradictions, UsageError)


def in_flags(message: str, options: Namespace) -> str:
    """Translate a reader's message from Python names to options.

    Args:
        message: the message.
        options: the options of the command.
    """
    message = re.sub(r"ImageSpec\.(\w+)", lambda match: _flag(match[1]), message)
    # Errors are translated for all commands; some have no image options.
    if getattr(options, "image_size", None):
        # The hint of the readers is to transpose; for images, the other layout does it.
        other = "nchw" if options.image_layout == "nhwc" else "nhwc"
        return re.sub(
            r"transpose it with (layout='nhwc'|np\.transpose\(.*\))",
            f"use --layout {other}",
            message,
        )
    return message.replace(
        "transpose it with layout='nhwc'",
        "add --input-layout nhwc",
    ).replace("leave out layout='nhwc'", "leave out --input-layout nhwc")


def _flag(name: str) -> str:
    """Return the option for an attribute of ImageSpec.

    >>> _flag("size"), _flag("resize_to")
    ('--image-size', '--resize-to')
    """
    if name == "size":
        return "--image-size"
    return "--" + name.replace("_", "-")
