"""Spool: what went in comes out, from memory and from files, as often as one likes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from calibrators.errors import DataError
from calibrators.readers.spool import Spool

SAMPLES: list[dict[str, Any]] = [
    {
        "x": np.arange(6, dtype=np.float32).reshape(2, 3),
        "strange / name": np.int64([1]),
    },
    {"x": np.zeros((0, 3), np.float16), "flag": np.array(True)},
    {},
    {"arr_0": np.float64([1, 2]), "allow_pickle": np.uint8([3]), "file": np.int8([4])},
    {"x": np.asfortranarray(np.arange(6.0).reshape(2, 3)), "z": np.complex64([1j])},
]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


def check_same(found: dict[str, Any], given: dict[str, Any]) -> None:
    assert list(found) == list(given)
    for name, value in given.items():
        assert found[name].dtype == value.dtype and found[name].shape == value.shape
        np.testing.assert_array_equal(found[name], value)


@pytest.mark.parametrize("memory", [0, 30, 10**6])
def test_samples_come_back_in_order_and_as_often_as_one_likes(
    memory: int, folder: Path
) -> None:
    with Spool(SAMPLES, memory=memory) as spool:
        assert len(spool) == len(SAMPLES)
        for _ in range(2):
            for found, given in zip(spool, SAMPLES, strict=True):
                check_same(found, given)
        check_same(spool[3], SAMPLES[3])
        check_same(spool[-1], SAMPLES[-1])
        for index, given in enumerate(SAMPLES):
            check_same({name: spool.value(index, name) for name in given}, given)
        assert bool(list(folder.iterdir())) == (memory < 10**6)
    assert not list(folder.iterdir()), "the files are gone"
    assert len(spool) == 0


def test_the_limit_of_memory_is_kept(folder: Path) -> None:
    spool = Spool(memory=100)
    for _ in range(6):
        spool.append({"x": np.ones(5)})  # 40 bytes
    files = list(folder.rglob("*.npz"))
    assert len(files) == 4
    spool.close()
    spool.close()


def test_what_files_cannot_hold_stays_in_memory(folder: Path) -> None:
    words = np.array(["a", "bc"], dtype=object)
    with Spool([{"s": words}, {"q": [np.ones(2), np.zeros(3)]}], memory=0) as spool:
        assert spool[0]["s"] is words and len(spool[1]["q"]) == 2
        assert not list(folder.iterdir())


def test_a_type_that_numpy_does_not_know_comes_back_as_itself() -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    value = np.arange(4).astype(ml_dtypes.bfloat16)
    with Spool([{"x": value}], memory=0) as spool:
        check_same(spool[0], {"x": value})


def test_the_files_go_with_the_spool(folder: Path) -> None:
    spool = Spool(SAMPLES, memory=0)
    del spool
    assert not list(folder.iterdir())


def test_a_full_disk_names_the_temporary_folder(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which the user can move, by TMPDIR; not a file in it."""

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "savez", full)
    with (
        Spool(memory=0) as spool,
        pytest.raises(
            DataError, match=r"folder .* \(see TMPDIR\): No space left on device"
        ),
    ):
        spool.append({"x": np.ones(5)})
    assert list(folder.iterdir()) == []
