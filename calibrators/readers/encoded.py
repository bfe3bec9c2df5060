"""Read image files after a check for safe decoding.

Needs Python alone, to be shipped with a model.
"""

from __future__ import annotations

from pathlib import Path

#: Bytes per pixel while an image is decoded and resized.
PIXEL = 6
#: Default limit of the bytes for decoding an image: 178 million pixels.
MOST = 1 << 30


def read_encoded(file: Path, most: int = MOST) -> bytes:
    """Return the bytes of a JPEG or PNG file, if DecodeImage is safe with them.

    The libjpeg of onnxruntime-extensions ends the process on any other file, and may never return
    from a JPEG cut short. A file of 3 MB can hold an image of 30,000 times 30,000 pixels.

    Args:
        file: the file.
        most: most bytes for decoding it.

    Raises:
        OSError: the file cannot be read.
        ValueError: the file is of another kind or damaged, or its image is too large.
    """
    if not file.is_file() and file.exists():
        raise ValueError(f"{file} is no regular file")
    if file.stat().st_size > most:
        raise ValueError(
            f"{file} has {file.stat().st_size:,} bytes; {most:,} are allowed",
        )
    encoded = file.read_bytes()
    encoded_size(encoded, file, most)
    return encoded


def encoded_size(encoded: bytes, name: object, most: int = MOST) -> tuple[int, int]:
    """Return width and height of an image that DecodeImage is safe with, before its orientation.

    Args:
        encoded: the content of a JPEG or PNG file.
        name: names the image in messages.
        most: most bytes for decoding it.

    Raises:
        ValueError: the content is of another kind or damaged, or the image is too large.
    """
    if encoded.startswith(b"\x89PNG\r\n\x1a\n"):
        # Sides times bytes per pixel bound the memory for decoding, before any pixel is decoded.
        size = _png_size(encoded)
    elif encoded.startswith(b"\xff\xd8"):
        size = _jpeg_size(encoded)
    else:
        raise ValueError(
            f"{name} is neither JPEG nor PNG, whatever its name; convert it to one of them",
        )
    if size is None:
        raise ValueError(f"{name} is cut short, damaged, or neither RGB nor grey")
    if size[0] * size[1] * PIXEL > most:
        raise ValueError(
            f"{name} holds {size[0]} x {size[1]} pixels; {most // PIXEL:,} pixels are allowed",
        )
    return size


def _png_size(encoded: bytes) -> tuple[int, int] | None:
    """Return width and height (ISO/IEC 15948, 11.2.2); None for a file without an end."""
    if b"IEND" not in encoded or encoded[12:16] != b"IHDR":
        return None
    return int.from_bytes(encoded[16:20], "big"), int.from_bytes(encoded[20:24], "big")


def _jpeg_size(encoded: bytes) -> tuple[int, int] | None:
    """Return width and height of a complete RGB or grey JPEG; otherwise None.

    The segments must hold a frame, a scan, and the end (ITU-T T.81, annex B).
    """
    # Behind the marker of the start (SOI), which has no length.
    at = 2
    size = None
    while encoded[at : at + 1] == b"\xff":
        marker = encoded[at + 1 : at + 2]
        length = encoded[at + 2 : at + 4]
        if marker == b"\xff":  # fill
            at += 1
            continue
        if marker == b"\xda":  # start of scan: its data escapes 0xFF
            return size if encoded.find(b"\xff\xd9", at) > 0 else None
        # baseline, extended and progressive frames
        if marker in (b"\xc0", b"\xc1", b"\xc2"):
            sides = encoded[at + 5 : at + 7], encoded[at + 7 : at + 9]
            height, width = (int.from_bytes(side, "big") for side in sides)
            if encoded[at + 9 : at + 10] in (b"\x01", b"\x03"):
                size = (width, height)
            else:
                size = None
        # The length counts its own two bytes, but not the marker.
        at += 2 + int.from_bytes(length, "big")
    return None
