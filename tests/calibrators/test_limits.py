"""Data files that stand for far more than they hold: headers are checked before anything is
allocated.
"""

from __future__ import annotations

import io
import subprocess
import sys
import zipfile
import zlib
from pathlib import Path

import numpy as np
import pytest

from calibrators.errors import CalibrationError, DataError
from calibrators.limits import DEFAULT, VARIABLE, read_text, regular_size, tensor_limit
from calibrators.readers.images import ImageSpec
from calibrators.readers.open import InputSpec, open_reader

IMAGE = InputSpec("x", np.dtype(np.float32), ("N", 3, 8, 8))
FIXED = InputSpec("x", np.dtype(np.float32), (1, 3, 8, 8))


def zeros(path: Path, shape: tuple[int, ...], *, fortran: bool = False) -> None:
    """A compressed .npz of zeros, made without holding them."""
    archive = zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=9)
    with archive, archive.open("x.npy", "w", force_zip64=True) as file:
        header = {"descr": "<f4", "fortran_order": fortran, "shape": shape}
        np.lib.format.write_array_header_1_0(file, header)
        left = int(np.prod(shape)) * 4
        while left:
            left -= file.write(bytes(min(left, 1 << 22)))


def png(width: int, height: int) -> bytes:
    """A black image, a few bytes for each row."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return (
            len(data).to_bytes(4, "big")
            + kind
            + data
            + zlib.crc32(kind + data).to_bytes(4, "big")
        )

    size = width.to_bytes(4, "big") + height.to_bytes(4, "big")
    packer = zlib.compressobj(9)
    row = bytes(1 + width * 3)
    data = b"".join(packer.compress(row) for _ in range(height)) + packer.flush()
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", size + bytes([8, 2, 0, 0, 0]))
        + chunk(b"IDAT", data)
        + chunk(b"IEND", b"")
    )


PEAK = """
import resource, sys
import numpy as np
from calibrators.readers.open import InputSpec, open_reader
shape = tuple(None if each == "N" else int(each) for each in sys.argv[2].split(","))
reader = open_reader(sys.argv[1], [InputSpec("x", np.dtype(np.float32), shape)], limit=8)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
shapes = [sample["x"].shape for sample in reader]
print(len(shapes), shapes[0], (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
"""


@pytest.mark.skipif(
    sys.platform != "linux", reason="ru_maxrss is in kilobytes there alone"
)
@pytest.mark.parametrize(
    "shape", [(300_000, 3, 8, 8), (300_000, 1, 3, 8, 8)], ids=["a batch", "batches"]
)
@pytest.mark.parametrize("spec", ["N,3,8,8", "1,3,8,8"])
def test_a_limit_of_samples_is_a_limit_of_memory(
    shape: tuple[int, ...], spec: str, tmp_path: Path
) -> None:
    """An archive of 230 KB stands for 230 MB: rows are taken off the stream as samples are asked
    for.
    """
    zeros(tmp_path / "x.npz", shape)
    assert (tmp_path / "x.npz").stat().st_size < 400_000
    run = [sys.executable, "-c", PEAK, str(tmp_path / "x.npz"), spec]
    done = subprocess.run(run, capture_output=True, text=True, check=True)
    count, *dims, megabytes = (
        done.stdout.replace("(", "").replace(")", "").replace(",", "").split()
    )
    assert count == "8" and dims == ["1", "3", "8", "8"]
    assert int(megabytes) < 60


@pytest.mark.parametrize("stacked", [False, True])
def test_rows_off_the_stream_are_those_of_the_whole(
    stacked: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arrays = (
        np.random.default_rng(0)
        .normal(size=(7, 1, 3, 8, 8) if stacked else (7, 3, 8, 8))
        .astype(np.float32)
    )
    np.savez_compressed(tmp_path / "x.npz", x=arrays)
    whole = [sample["x"] for sample in open_reader(tmp_path / "x.npz", [IMAGE])]
    monkeypatch.setattr("calibrators.readers.files.LOADED_AT_ONCE", 0)
    rows = [sample["x"] for sample in open_reader(tmp_path / "x.npz", [IMAGE])]
    np.testing.assert_array_equal(np.concatenate(whole), arrays.reshape(7, 3, 8, 8))
    np.testing.assert_array_equal(np.concatenate(rows), np.concatenate(whole))
    assert all(row.flags.writeable for row in rows)


def test_an_array_that_is_read_at_once_is_measured_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An array cannot be read by row if it is one sample, or in Fortran order."""
    monkeypatch.setenv(VARIABLE, "0.05")
    wide = InputSpec("x", np.dtype(np.float32), (1, None))
    for path, shape, fortran, spec in (
        ("flat.npz", (1, 20_000_000), False, wide),
        (
            "turned.npz",
            (20_000_000, 1),
            True,
            InputSpec("x", np.dtype(np.float32), (None, 1)),
        ),
        ("other.npz", (20_000_000,), False, wide),
    ):
        zeros(tmp_path / path, shape, fortran=fortran)
        with pytest.raises(
            DataError,
            match=rf"{path}: 'x' has the shape .*: that is 0.1 GB; set {VARIABLE}=1",
        ):
            open_reader(tmp_path / path, [spec]).first()


def test_an_archive_that_ends_early(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The size that the archive itself notes is a lie, too."""
    monkeypatch.setattr("calibrators.readers.files.LOADED_AT_ONCE", 0)
    content = io.BytesIO()
    np.save(content, np.zeros((4, 3, 8, 8), np.float32))
    with zipfile.ZipFile(tmp_path / "x.npz", "w") as archive:
        archive.writestr("x.npy", content.getvalue())
    data = (tmp_path / "x.npz").read_bytes()
    (tmp_path / "x.npz").write_bytes(
        data[:-600].replace(b"(4, 3, 8, 8)", b"(9, 3, 8, 8)") + data[-600:]
    )
    with pytest.raises(DataError, match="cannot be read as a NumPy file"):
        list(open_reader(tmp_path / "x.npz", [FIXED]))


@pytest.mark.images
def test_an_image_is_measured_by_its_header(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """30,000 x 30,000 pixels take 5 GB to decode, and 2.6 MB of a file."""
    large = png(4, 4)[:16] + (30_000).to_bytes(4, "big") * 2 + png(4, 4)[24:]
    (tmp_path / "x.png").write_bytes(large)
    spec = ImageSpec(size=(8, 8))
    with pytest.raises(
        DataError,
        match=rf"holds 30000 x 30000 pixels; 178,956,970 pixels are allowed; set {VARIABLE}",
    ):
        open_reader(tmp_path, [IMAGE], images=spec).first()
    (tmp_path / "x.png").write_bytes(png(200, 100))
    assert open_reader(tmp_path, [IMAGE], images=spec).first()["x"].shape == (
        1,
        3,
        8,
        8,
    )
    monkeypatch.setenv(VARIABLE, "0.0001")
    with pytest.raises(DataError, match="holds 200 x 100 pixels"):
        open_reader(tmp_path, [IMAGE], images=spec).first()


@pytest.mark.images
def test_the_frame_of_a_jpeg_is_measured(tmp_path: Path) -> None:
    pillow = pytest.importorskip("PIL.Image")
    pillow.new("RGB", (64, 48)).save(tmp_path / "x.jpg")
    data = bytearray((tmp_path / "x.jpg").read_bytes())
    place = data.index(b"\xff\xc0") + 5
    assert data[place : place + 4] == b"\x00\x30\x00\x40"
    data[place : place + 4] = b"\xff\xff\xff\xff"
    (tmp_path / "x.jpg").write_bytes(data)
    with pytest.raises(DataError, match="holds 65535 x 65535 pixels"):
        open_reader(tmp_path, [IMAGE], images=ImageSpec(size=(8, 8))).first()


def test_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    assert tensor_limit() == DEFAULT
    monkeypatch.setenv(VARIABLE, "2.5")
    assert tensor_limit() == 2.5 * (1 << 30)
    for wrong in ("0", "-1", "nan", "inf", "1e300", "two"):
        monkeypatch.setenv(VARIABLE, wrong)
        with pytest.raises(CalibrationError, match=f"{VARIABLE} is '{wrong}'"):
            tensor_limit()


@pytest.mark.skipif(
    not Path("/dev/zero").exists(), reason="there is no device that never ends"
)
def test_regular_files_alone(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="it is no regular file"):
        regular_size(Path("/dev/zero"))
    (tmp_path / "long").write_bytes(bytes(100))
    with pytest.raises(OSError, match="it has 100 bytes; 99 are allowed"):
        read_text(tmp_path / "long", 99)
