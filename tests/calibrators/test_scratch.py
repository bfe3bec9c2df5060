"""What a killed process leaves behind is removed at the next start, and nothing that a living one
uses.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from calibrators.scratch import ScratchFolder, sweep_files, sweep_folders, written

HOLD = """
import sys
from pathlib import Path
from calibrators.scratch import ScratchFolder, written
folder = Path(sys.argv[1])
scratch = ScratchFolder(folder, "q.onnx")
(scratch.path / "q.onnx").write_bytes(b"half")
with written(folder / "kept.npz") as file:
    file.write(b"half")
    file.flush()
    print("ready", flush=True)
    sys.stdin.read()
"""


@contextmanager
def holding(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that works in the folder."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def names(folder: Path) -> list[str]:
    return sorted(
        path.name.rpartition(".")[0] if path.is_dir() else path.name
        for path in folder.iterdir()
    )


def test_a_killed_process_and_a_living_one(tmp_path: Path) -> None:
    """The lock of a folder or a file goes with the process that holds it, however that ends."""
    with holding(tmp_path) as process:
        before = sorted(tmp_path.iterdir())
        assert len(before) == 2
        time.sleep(1.1)  # a file that was made just now may not be locked yet
        sweep_folders(tmp_path, "q.onnx")
        sweep_files(tmp_path, "kept.npz")
        assert sorted(tmp_path.iterdir()) == before, "the process lives"
        process.kill()
        process.wait()
        assert sorted(tmp_path.iterdir()) == before, (
            "nothing runs in a process that is killed"
        )
        with ScratchFolder(tmp_path, "q.onnx") as folder:
            assert [path for path in tmp_path.iterdir() if path.is_dir()] == [folder]
        with written(tmp_path / "kept.npz") as file:
            file.write(b"whole")
    assert names(tmp_path) == ["kept.npz"]
    assert (tmp_path / "kept.npz").read_bytes() == b"whole"


def test_what_is_not_ours_stays(tmp_path: Path) -> None:
    """Folders and files of other names, links, and folders without a lock that are not a day old."""  # noqa: E501
    for name in (
        ".q.onnx.12345678",
        ".q.onnx.nothex_but_long",
        "q.onnx.12345678",
        ".other.12345678",
    ):
        (tmp_path / name).mkdir()
    (tmp_path / "notes.tmp").write_text("mine")
    os.utime(tmp_path / ".other.12345678", (0, 0))
    before = sorted(tmp_path.iterdir())
    sweep_folders(tmp_path, "q.onnx")
    sweep_files(tmp_path, "kept.npz")
    assert sorted(tmp_path.iterdir()) == before
    os.utime(tmp_path / ".q.onnx.12345678", (0, 0))
    sweep_folders(tmp_path, "q.onnx")
    assert sorted(tmp_path.iterdir()) == [
        path for path in before if path.name != ".q.onnx.12345678"
    ]


@pytest.mark.skipif(os.name != "posix", reason="there is no umask")
@pytest.mark.parametrize("mask", [0o022, 0o077, 0o002])
def test_a_file_gets_the_permissions_that_the_umask_leaves(
    mask: int, tmp_path: Path
) -> None:
    """The oracle is a file that is opened as any other."""
    before = os.umask(mask)
    try:
        with written(tmp_path / "page.html") as file:
            file.write(b"x")
        (tmp_path / "other.html").write_bytes(b"x")
    finally:
        os.umask(before)
    modes = {(tmp_path / name).stat().st_mode for name in ("page.html", "other.html")}
    assert len(modes) == 1


def test_a_body_that_fails_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"before")
    with pytest.raises(ValueError, match="stop"), written(tmp_path / "x") as file:
        file.write(b"half")
        raise ValueError("stop")
    assert names(tmp_path) == ["x"] and (tmp_path / "x").read_bytes() == b"before"


FULL = """
import resource, signal, sys
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
from quark_onnx.cli import main
from quark_onnx.graph import store
import calibrators.readers.spool
store.LARGE_MODEL, store.LEAST = 1000, 1000
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]), int(sys.argv[1])))
sys.exit(main(sys.argv[2:]))
"""


@pytest.mark.skipif(
    not hasattr(signal, "SIGXFSZ"),
    reason="no limit of a file's size stands for a full disk",
)
@pytest.mark.parametrize(
    ("room", "arguments", "named"),
    [
        (
            2000,
            (
                "quantize",
                "m.onnx",
                "-o",
                "out/q.onnx",
                "--preset",
                "A16W8",
                "--random-data",
                "--no-isolation",
            ),
            "out/q.onnx cannot be",
        ),
        (500, ("convert", "m.onnx", "-o", "q.onnx", "--to", "float16"), "q.onnx"),
        (
            2000,
            ("npu", "legalize", "m.onnx", "-o", "q.onnx"),
            "q.onnx cannot be written: File too large",
        ),
        (
            100,
            (
                "analyze",
                "m.onnx",
                "s.onnx",
                "--random-data",
                "--html",
                "page.html",
                "--no-isolation",
            ),
            "page.html: File too large",
        ),
        (
            100,
            ("explain", "m.onnx", "--json", "plan.json"),
            "plan.json: File too large",
        ),
    ],
)
def test_a_full_disk_names_what_the_user_named(
    room: int, arguments: tuple[str, ...], named: str, tmp_path: Path
) -> None:
    """No temporary folder, whose name means nothing to anybody and which is gone by then.

    The limit of a file's size concerns the temporary folder as well, where an isolated run puts its
    models.
    """
    import onnx

    from quark_onnx import quantize
    from tests.models import residual, samples

    onnx.save(residual(), tmp_path / "m.onnx")
    onnx.save(
        quantize(residual(), samples(residual()), "A8W8").model, tmp_path / "s.onnx"
    )
    run = [sys.executable, "-c", FULL, str(room), *arguments]
    done = subprocess.run(
        run, capture_output=True, text=True, cwd=tmp_path, check=False
    )
    errors = sorted(
        {line for line in done.stderr.splitlines() if "error" in line}
    )  # JSON would have said it, too
    assert done.returncode == 2 and len(errors) == 1, done.stderr
    assert named in errors[0]
    assert "/." not in errors[0] and str(tmp_path / ".") not in errors[0].replace(
        str(tmp_path / "out"), ""
    )
    assert {path.name for path in tmp_path.iterdir()} <= {"m.onnx", "s.onnx", "out"}
