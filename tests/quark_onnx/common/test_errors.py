"""Test which of Python's exceptions the errors of the package are."""

from __future__ import annotations

import builtins
import pickle
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import pytest

from calibrators.readers.open import open_reader
from quark_onnx import QConfig, compare, custom_op_libraries, quantize
from quark_onnx.cli.parsing import UsageError
from quark_onnx.common.errors import (
    ModelNotFoundError,
    QuarkError,
    data_errors,
)
from quark_onnx.common.resume_folder import access_errors

PAGE = Path(__file__).parents[3] / "docs/howto/embedding.md"
#: Exceptions that all errors are.
BASES = {"BaseException", "Exception", "object"}


def subclasses(cls: type[QuarkError]) -> Iterator[type[QuarkError]]:
    for child in cls.__subclasses__():
        yield child
        yield from subclasses(child)


def of_python(cls: type[BaseException]) -> set[str]:
    """Return the names of Python's exceptions that a class derives from."""
    names = {base.__name__ for base in cls.__mro__ if hasattr(builtins, base.__name__)}
    return names - BASES


def stated() -> dict[str, set[str]]:
    """Return the exceptions of each class by the table of the page."""
    rows = re.findall(
        r"^\| (`\w*Error`.*|`MissingDependency`) \| (.*) \|$",
        PAGE.read_text("utf-8"),
        re.M,
    )
    return {
        name: set(re.findall(r"`(\w+)`", bases))
        for names, bases in rows
        for name in re.findall(r"`(\w+)`", names)
    }


def test_the_page_names_the_exceptions_of_every_public_class() -> None:
    public = [
        cls for cls in subclasses(QuarkError) if cls.__module__ == QuarkError.__module__
    ]
    # FileNotFoundError is an OSError, and no reader has to be told.
    found = {cls.__name__: of_python(cls) - {"OSError"} for cls in public}
    assert found == stated()


def test_every_subclass_of_an_error_means_what_its_base_means() -> None:
    assert UsageError in subclasses(QuarkError)
    for cls in subclasses(QuarkError):
        public = [base for base in cls.__mro__ if base.__name__ in stated()]
        assert public, cls
        for base in public:
            assert stated()[base.__name__] <= of_python(cls), cls


@pytest.mark.parametrize("cls", list(subclasses(QuarkError)))
def test_an_error_is_shown_and_sent_to_another_process(cls: type[QuarkError]) -> None:
    """OSError and ImportError have constructors and texts of their own."""
    error = cls("model 'a.onnx': wrong\x1b")
    assert str(error) == r"model 'a.onnx': wrong\x1b"
    sent = pickle.loads(pickle.dumps(error))
    assert type(sent) is cls
    assert "model 'a.onnx'" in str(sent)
    # dask.distributed restores errors of its workers by this, and by their attributes.
    assert type(cls.__new__(cls)) is cls


def test_a_file_that_does_not_exist(tmp_path: Path) -> None:
    """Models, their weights, data, labels and settings, each with its own class, too."""
    model = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["" : 17]>'
        " g (float[n, 2] x) => (float[n, 2] y) { y = Relu (x) }"
    )
    onnx.save(model, tmp_path / "model.onnx")
    path, data = tmp_path / "model.onnx", [np.ones((1, 2), np.float32)] * 4
    absent = tmp_path / "absent"
    calls = {
        "ModelNotFoundError": lambda: quantize(f"{absent}.onnx", data),
        "DataNotFoundError": lambda: quantize(path, absent),
        "ConfigNotFoundError": lambda: QConfig.of(f"{absent}.yaml"),
    }
    for name, call in calls.items():
        with pytest.raises(FileNotFoundError) as caught:
            call()
        assert (type(caught.value).__name__, "absent" in str(caught.value)) == (
            name,
            True,
        )
        assert isinstance(caught.value, QuarkError)
    with pytest.raises(FileNotFoundError, match="labels"):
        compare(path, path, data, labels=f"{absent}.csv")
    with pytest.raises(FileNotFoundError), custom_op_libraries(absent):
        pass
    with pytest.raises(FileNotFoundError), data_errors():
        open_reader(absent, [])


def test_a_file_that_is_there_and_damaged_is_no_missing_file(tmp_path: Path) -> None:
    (tmp_path / "model.onnx").write_bytes(b"no model")
    with pytest.raises(ValueError, match=r"model\.onnx") as caught:
        quantize(tmp_path / "model.onnx", [])
    assert not isinstance(caught.value, OSError)


def test_an_error_inside_is_not_reported_as_another() -> None:
    """``except ValueError`` around work of this package would rename its errors."""
    with pytest.raises(QuarkError, match=r"^unchanged$"), access_errors("journal"):
        raise ModelNotFoundError("unchanged")
