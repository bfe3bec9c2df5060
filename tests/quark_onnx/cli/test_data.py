"""The options about data: what contradicts what, and data that does not fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.models import normal

SIZE = ("--image-size", "8", "8")
MEAN = ("--mean", "1", "2", "3")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], ["--data", "--random-data", "--ranges", "--weights-only"]),
        (["--data", "data", "--random-data"], ["--data", "--random-data"]),
        (["--random-data", "many"], ["--random-data", "'many' is not a whole number"]),
        (["--random-data", "--limit", "5"], ["--limit", "--random-data"]),
        (
            ["--random-data", "--input-layout", "nhwc"],
            ["--input-layout", "--random-data"],
        ),
        (["--random-data", "--batch-axis", "1"], ["--batch-axis", "--random-data"]),
        (
            ["--data", "data", "--batch-axis", "x"],
            ["--batch-axis", "'x' is not an axis"],
        ),
        (["--random-data", *SIZE], ["--image-size", "--random-data"]),
        (["--random-data", "--dim", "N"], ["--dim", "'N' is not of the form NAME=N"]),
        (
            ["--random-data", "--dim", "N=99999999999"],
            ["input 'image'", "are too many; choose smaller dims"],
        ),
        (
            ["--random-data", "--dim", "M=2"],
            ["no input has a dimension 'M'", "known: N"],
        ),
        (["--data", "data", "--dim", "N=2"], ["--dim", "--data"]),
        (["--data", "data", *MEAN], ["--mean", "--image-size"]),
        (
            ["--data", "data", *SIZE, "--input-layout", "nhwc"],
            ["--input-layout", "--image-size"],
        ),
        (
            ["--data", "data", *SIZE, "--resize-to", "9"],
            ["--resize-to", "--resize crop"],
        ),
        (
            ["--data", "data", *SIZE, "--resize", "crop", "--resize-to", "4"],
            ["--resize-to is 4", "at least 8"],
        ),
        (
            ["--data", "data", *SIZE, "--resize", "crop", "--pad-value", "9"],
            ["--pad-value", "--resize letterbox"],
        ),
        (
            ["--data", "data", *SIZE, "--std", "1", "0", "1"],
            ["--std", "other than zero"],
        ),
        (["--data", "data", *SIZE, "--mean", "1", "2"], ["--mean", "3 arguments"]),
        (
            ["--data", "data", *SIZE, "--scale", "1/0"],
            ["--scale", "'1/0' is not a number"],
        ),
        (["--data", "data", *SIZE, "--color", "grey"], ["--color", "grey"]),
        pytest.param(
            ["--data", "data", *SIZE], ["no image in data"], marks=pytest.mark.images
        ),
        (
            ["--data", "data", "--limit", "0"],
            ["--limit", "'0' is not a whole number of at least 1"],
        ),
        (
            ["--data", "data", "--batch-axis", "7"],
            ["--batch-axis 7: the inputs of the model have at most 4 axes"],
        ),
        (
            ["--data", "data", *SIZE, "--batch-axis", "0"],
            ["--batch-axis", "does not go with --image-size"],
        ),
        (["--data", "nowhere"], ["nowhere does not exist"]),
        (["--data", ""], ["--data", "the path is empty"]),
    ],
)
def test_options_that_make_no_sense(
    cli: Any, arguments: list[str], words: list[str]
) -> None:
    finished = cli("quantize", "model.onnx", "-o", "out.onnx", *arguments)
    assert finished.code == 2
    for word in words:
        assert word in finished.error
    assert not Path("out.onnx").exists()


@pytest.fixture(params=["quantize", "compare"])
def refusal(request: pytest.FixtureRequest, cli: Any) -> Any:
    """The error of a command that reads one bad sample."""

    def run(array: Any, *options: str, name: str = "image") -> str:
        np.savez("bad.npz", **{name: array})
        second = ["-o", "out.onnx"] if request.param == "quantize" else ["model.onnx"]
        finished = cli(
            request.param, "model.onnx", *second, "--data", "bad.npz", *options
        )
        assert finished.code == 2
        return str(finished.error)

    return run


def test_samples_that_do_not_fit(refusal: Any) -> None:
    sample = normal(2, 3, 8, 8)
    assert (
        refusal(sample, name="imag")
        == "sample 0: the model has no input 'imag'; did you mean 'image'?"
    )
    assert (
        "sample 0, input 'image': got shape [1, 3, 8, 7], expected [N, 3, 8, 8]"
        in refusal(sample[..., :7])
    )
    assert refusal(np.zeros((2, 8, 8, 3), np.float32)).endswith(
        "add --input-layout nhwc"
    )
    assert refusal(sample, "--input-layout", "nhwc").endswith(
        "leave out --input-layout nhwc"
    )
    assert "got uint8, expected float32" in refusal(np.zeros((2, 3, 8, 8), np.uint8))
    sample[1, 0, 0, 0] = np.nan
    assert (
        "sample 1, input 'image': 1 of 192 values are NaN or infinite, the first at [0, 0, 0, 0]"
        in refusal(sample)
    )


def test_files_that_are_no_data(cli: Any) -> None:
    Path("empty").mkdir()
    Path("texts").mkdir()
    Path("texts", "a.txt").touch()
    command = ("quantize", "model.onnx", "-o", "out.onnx", "--data")
    finished = cli(*command, "empty")
    assert finished.code == 2
    assert "empty is empty" in finished.error
    assert "texts has no .npz or .npy file" in cli(*command, "texts").error
    Path("broken.npz").write_bytes(b"no archive")
    finished = cli(*command, "broken.npz")
    assert finished.code == 2
    assert "broken.npz cannot be read as a NumPy file" in finished.error


@pytest.mark.parametrize(("axis", "samples"), [("auto", 20), ("0", 20), ("none", 10)])
def test_rows_of_a_file_are_samples_or_not(cli: Any, axis: str, samples: int) -> None:
    """Ten files have two rows each."""
    finished = cli(
        *("quantize", "model.onnx", "-o", "out.onnx", "--data", "data"),
        *("--batch-axis", axis, "--json"),
    )
    document = finished.json
    assert document["samples"] + document["held_out"] == samples


def test_files_of_several_lengths_are_a_warning(cli: Any) -> None:
    """The warning has the options of the command line, as errors have."""
    Path("lengths").mkdir()
    for rows in (2, 3):
        np.savez(f"lengths/{rows}.npz", image=normal(rows, 3, 8, 8))
    finished = cli("quantize", "model.onnx", "-o", "out.onnx", "--data", "lengths")
    assert "give --batch-axis none, and otherwise --batch-axis 0" in finished.err


def test_nhwc_arrays_with_the_option(cli: Any) -> None:
    np.savez("nhwc.npz", image=normal(2, 8, 8, 3))
    options = ("--data", "nhwc.npz", "--input-layout", "nhwc")
    assert cli("quantize", "model.onnx", "-o", "out.onnx", *options).code == 0
    assert cli("compare", "model.onnx", "out.onnx", *options).code == 0


def test_a_bad_sample_in_the_middle_is_named(cli: Any) -> None:
    np.savez("data/3.npz", image=np.full((2, 3, 8, 8), np.inf, np.float32))
    finished = cli(
        "quantize", "model.onnx", "-o", "out.onnx", "--data", "data", "--json"
    )
    assert finished.code == 2
    assert (
        "sample 6, input 'image'" in finished.error
    )  # the first of the fourth file's two
    error = {"kind": "DataError", "message": finished.error}
    assert finished.json == {"schema": 1, "command": "quantize", "error": error}
    assert not Path("out.onnx").exists()
