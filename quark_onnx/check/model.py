"""Check a model once, before anything is planned.

``quark_onnx.files.io.load``, which opens every model from a file or in memory, calls
``check_model``. Sizes are checked again only where more is known of them: on a sample
(``measuring.open_data``), and with shapes that a user fixes (``static_shapes``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from onnx import ModelProto

from quark_onnx.check.declared_shapes import contradicted_shapes, correct_shapes
from quark_onnx.check.fields import check_fields
from quark_onnx.check.loops import check_loops
from quark_onnx.check.sizes import check_sizes
from quark_onnx.check.variadic import check_variadic
from quark_onnx.common.errors import ModelError


class CheckedModel(NamedTuple):
    """A model that passed all checks.

    Attributes:
        model: the model; a model in memory is copied if its declared shapes were corrected.
        notes: the corrections of declared shapes, for the report.
    """

    model: ModelProto
    notes: list[str]


def check_model(
    model: ModelProto,
    read_values: Callable[[ModelProto], ModelProto],
    file: Path | None = None,
) -> CheckedModel:
    """Check a model, and correct declared shapes that contradict the operators.

    The order matters: fields are checked before the values of external tensors are read by them,
    and the checks of sizes and loops need these values.

    Args:
        model: the model; changed in place only if it was read from a file.
        read_values: returns the model with the values of its external tensors.
        file: the file that the model was read from, for messages; None for a model in memory.

    Raises:
        ModelError: a check failed; the message names the tensor, node or operator set, and the
            file.
    """
    check_stored(model, file)
    complete = read_values(model)
    with _naming(file, "model file {}: "):
        check_sizes(complete)
        check_loops(complete)
    inferred = contradicted_shapes(complete)
    if not inferred:
        return CheckedModel(complete, [])
    if file is None:
        complete = ModelProto()
        complete.CopyFrom(model)
    return CheckedModel(complete, correct_shapes(complete, inferred))


def check_stored(model: ModelProto, file: Path | None = None) -> None:
    """Check the fields of a model, without the values of external tensors.

    Args:
        model: the model.
        file: as for ``check_model``.

    Raises:
        ModelError: a name or a field has an invalid value.
    """
    with _naming(file, "model file {} is not valid: "):
        check_variadic(model)
    with _naming(file, "model file {} is damaged: "):
        check_fields(model)


@contextmanager
def _naming(file: Path | None, prefix: str) -> Iterator[None]:
    """Begin the message of a ModelError with a prefix, in which {} is the file, if there is one."""
    try:
        yield
    except ModelError as error:
        if file is None:
            raise
        raise ModelError(f"{prefix.format(file)}{error}") from error
