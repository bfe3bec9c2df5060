"""Image files that onnxruntime-extensions decodes safely; needs Python alone, to be shipped with a model."""

from __future__ import annotations

from pathlib import Path


def read_encoded(file: Path) -> bytes:
    """The bytes of a JPEG or PNG file, if DecodeImage is safe with them.

    Its libjpeg ends the process over anything else, and may never return from a JPEG cut short.

    Raises:
        OSError: it cannot be read.
        ValueError: it is another file, or damaged.
    """
    encoded = file.read_bytes()
    if encoded.startswith(b"\x89PNG\r\n\x1a\n"):
        usable = b"IEND" in encoded
    elif encoded.startswith(b"\xff\xd8"):
        usable = _is_usable_jpeg(encoded)
    else:
        raise ValueError(f"{file} is neither JPEG nor PNG, whatever its name; convert it to one of them")
    if not usable:
        raise ValueError(f"{file} is cut short, damaged, or neither RGB nor grey")
    return encoded


def _is_usable_jpeg(encoded: bytes) -> bool:
    """Whether its segments hold an RGB or grey frame, then a scan, then the end (ITU-T T.81, annex B)."""
    at, framed = 2, False
    while encoded[at : at + 1] == b"\xff":
        marker, length = encoded[at + 1 : at + 2], encoded[at + 2 : at + 4]
        if marker == b"\xff":  # fill
            at += 1
            continue
        if marker == b"\xda":  # start of scan: its data escapes 0xFF
            return framed and encoded.find(b"\xff\xd9", at) > 0
        if marker in (b"\xc0", b"\xc1", b"\xc2"):  # baseline, extended and progressive frames
            framed = encoded[at + 9 : at + 10] in (b"\x01", b"\x03")
        at += 2 + int.from_bytes(length, "big")
    return False
