"""Check one sample of calibration data against the inputs of a model."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, permutations
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from calibrators.errors import NonFiniteSample, SampleMismatch, nearest
from calibrators.names import names_of

Array = NDArray[Any]
Sample = dict[str, Array]
Layout = Literal["nhwc"]
#: Non-finite values that a float input accepts: none, minus infinity as in masks, or all.
Allowed = Literal["finite", "-inf", "anything"]
#: Key of an image, as image processors of transformers return it.
IMAGE_KEY = "pixel_values"
#: Keys of the classes of samples, in data sets of Hugging Face.
LABEL_KEYS = ("label", "labels")
#: Names of a first dimension that counts steps in time, and no samples.
_STEPS = frozenset(
    {"t", "time", "times", "frames", "num_frames", "seq", "seq_len", "seq_length"}
    | {"sequence", "sequence_length", "length", "time_steps", "timesteps", "steps"}
)


@dataclass(frozen=True)
class InputSpec:
    """Name, type, shape and values of one input of a model.

    Attributes:
        name: name in the model.
        dtype: element type; ``object`` for strings, None to leave the type unchecked.
        shape: dimensions: a number is fixed, a symbol or None accepts any size; None instead of a
            tuple leaves the rank open.
        values: non-finite values that a float input accepts, or a function that finds them when
            the first such value comes.
        tensor: False for a sequence, an optional or a map, which is passed on unchecked.
    """

    name: str
    dtype: np.dtype[Any] | None
    shape: tuple[int | str | None, ...] | None
    values: Allowed | Callable[[], Allowed] = "finite"
    tensor: bool = True

    @property
    def allowed(self) -> Allowed:
        """Non-finite values that a float input accepts."""
        return self.values() if callable(self.values) else self.values

    def fits(self, shape: Sequence[int]) -> bool:
        """Return whether the input accepts an array of this shape.

        >>> InputSpec("image", np.dtype("float32"), ("batch", 3, 8, 8)).fits((5, 3, 8, 8))
        True
        """
        if self.shape is None:
            return True
        if len(shape) != len(self.shape):
            return False
        for want, got in zip(self.shape, shape, strict=True):
            if isinstance(want, int) and want != got:
                return False
        return True


class SampleRows(Mapping[int, range]):
    """The rows of each sample of a data set, in 8 bytes a sample.

    >>> rows = SampleRows()
    >>> rows.put(0, 4), rows.put(1, 2)
    (None, None)
    >>> dict(rows)
    {0: range(0, 4), 1: range(4, 6)}
    """

    def __init__(self) -> None:
        self._stops = array("q")

    def start(self, sample: int) -> int:
        """Return the first row of a sample, of which the one before is known."""
        return self._stops[sample - 1] if sample else 0

    def put(self, sample: int, count: int) -> None:
        """Set the number of rows of the next sample; or again, in another pass over the data."""
        stop = self.start(sample) + count
        if sample < len(self._stops):
            self._stops[sample] = stop
        else:
            self._stops.append(stop)

    def __getitem__(self, sample: int) -> range:
        if not 0 <= sample < len(self._stops):
            raise KeyError(sample)
        return range(self.start(sample), self._stops[sample])

    def __iter__(self) -> Iterator[int]:
        return iter(range(len(self._stops)))

    def __len__(self) -> int:
        return len(self._stops)


def sample_name(index: int) -> str:
    """Return the name of an entry of a data set, which has no file name."""
    return f"sample {index}"


def is_array(value: object) -> bool:
    """Return whether ``value`` is an array or a tensor, rather than a container of arrays."""
    return hasattr(value, "__array__") or hasattr(value, "detach")


def is_empty(shape: Sequence[int], spec: InputSpec) -> bool:
    """Return whether an array of this shape is a batch of no samples.

    Not so for an input that requires an empty batch. Another dimension may well be 0, such as the
    past of a decoder's first step.

    >>> ids = InputSpec("ids", np.dtype("int64"), ("batch", "length"))
    >>> is_empty((0, 7), ids), is_empty((1, 0), ids)
    (True, False)
    """
    return (
        len(shape) > 1
        and shape[0] == 0
        and not (spec.shape is not None and spec.shape[:1] == (0,))
    )


def separate(
    batch: object, inputs: Sequence[InputSpec], constants: Collection[str] = ()
) -> tuple[object, dict[str, Any]]:
    """Separate the arrays of the inputs from labels, texts and the like in a batch.

    Args:
        batch: as for ``name_arrays``, with further keys, or further elements after the inputs.
        inputs: the model's inputs.
        constants: as for ``name_arrays``; their keys are not separated.

    Returns:
        The batch of the inputs, and the other entries: by key, or as ``element N`` of a tuple.

    >>> ids = InputSpec("ids", np.dtype("int64"), ("batch",))
    >>> separate({"ids": [1, 2], "label": 3}, [ids])
    ({'ids': [1, 2]}, {'label': 3})
    >>> separate(([1, 2], 3), [ids])
    (([1, 2],), {'element 1': 3})
    """
    names = names_of(inputs)
    if isinstance(batch, Mapping):
        arrays = dict(batch)
        # The name of transformers' image processors for the only input of a vision model.
        if len(names) == 1 and names[0] not in arrays and IMAGE_KEY in arrays:
            arrays[names[0]] = arrays.pop(IMAGE_KEY)
        # Where an input is missing, one of the keys may be its name misspelt.
        if not arrays.keys() >= set(names):
            return batch, {}
        left = arrays.keys() - set(names) - set(constants)
        others = {str(key): arrays.pop(key) for key in batch if key in left}
        return arrays, others
    if isinstance(batch, tuple | list) and len(batch) > len(names):
        others = {}
        for position in range(len(names), len(batch)):
            # A second array for the input is no label: the samples are not what they seem.
            if _is_alike(batch[position], batch[0]):
                return batch, {}
            others[f"element {position}"] = batch[position]
        return batch[: len(names)], others
    return batch, {}


def _is_alike(value: object, array: object) -> bool:
    """Return whether a value is an array of the shape and type of another one."""
    if not is_array(value) or not is_array(array):
        return False
    shapes = [getattr(item, "shape", ()) for item in (value, array)]
    types = [str(getattr(item, "dtype", "")) for item in (value, array)]
    return len(shapes[0]) > 1 and shapes[0] == shapes[1] and types[0] == types[1]


def classes_in(others: Mapping[str, Any], rows: int) -> dict[str, list[int]]:
    """Return the classes of the rows of a batch, by the entry that holds them; {} for none.

    Args:
        others: entries of the batch besides the inputs, from ``separate``.
        rows: number of rows of the batch.

    >>> classes_in({"text": "a cat", "label": 3}, rows=1)
    {'label': [3]}
    """
    for key, value in others.items():
        if key not in LABEL_KEYS and not key.startswith("element "):
            continue
        if isinstance(value, str | bytes | Mapping) or value is None:
            continue
        try:
            array = _to_numpy(value, key)
        except SampleMismatch:
            continue
        if array.dtype.kind in "iu" and array.ndim <= 2 and array.size == rows:
            return {key: array.reshape(-1).tolist()}
    return {}


def name_arrays(
    batch: object,
    inputs: Sequence[InputSpec],
    index: int,
    *,
    constants: Collection[str] = (),
) -> Sample:
    """Return a batch of a source as one array per input, in the order of the inputs.

    Args:
        batch: {input name: array}; a tuple or list of arrays in the order of the inputs; or, for a
            model with one input, the array itself. Objects with torch's ``detach().cpu().numpy()``
            count as arrays.
        inputs: the model's inputs.
        index: position of the sample in the data, for messages.
        constants: names of initializers of the model, which must not be fed.

    Raises:
        SampleMismatch: the batch is of another kind, or its names or their number are not the
            model's.

    >>> name_arrays([[1, 2]], [InputSpec("ids", np.dtype("int64"), ("batch",))], index=0)
    {'ids': array([1, 2])}
    """
    names = names_of(inputs)
    arrays: Mapping[Any, Any]
    # Also the encodings that tokenizers of transformers return.
    if isinstance(batch, Mapping):
        arrays = batch
    elif is_array(batch) and len(names) == 1:
        arrays = {names[0]: batch}
    elif isinstance(batch, tuple | list):
        if len(batch) != len(names):
            raise SampleMismatch(
                f"sample {index}: the number of arrays is {len(batch)}, the model's inputs are"
                f" {names}",
            )
        arrays = dict(zip(names, batch, strict=True))
    else:
        raise SampleMismatch(
            f"sample {index}: got {type(batch).__name__}, expected {{name: array}} for"
            f" the inputs {names}",
        )

    # Unknown names come first: a misspelt name is both unknown and missing.
    for name in arrays:
        # An initializer that is an input as well has a default value, and may be fed.
        if name in constants and name not in names:
            raise SampleMismatch(
                f"sample {index}: {name!r} is an initializer of the model, which is"
                " calibrated with the value stored there; leave it out of the samples,"
                " or store another value",
            )
        if name not in names:
            raise SampleMismatch(
                f"sample {index}: the model has no input {name!r}{nearest(name, names)}"
            )
    for name in names:
        if name not in arrays:
            raise SampleMismatch(
                f"sample {index}: no array for input {name!r}, only for {list(arrays)}",
            )
    return {spec.name: _named_array(arrays[spec.name], spec, index) for spec in inputs}


def _named_array(value: Any, spec: InputSpec, index: int) -> Any:
    """Return the value of an input: tensors as arrays, sequences and optionals unchanged."""
    if not spec.tensor:
        return value
    return _to_numpy(value, _place(index, spec.name))


def batch_axis_of(inputs: Sequence[InputSpec]) -> int | None:
    """Return the axis of the inputs that counts samples: 0, or None where it counts time steps.

    >>> batch_axis_of([InputSpec("frames", np.dtype("float32"), ("time", 80))])
    """
    for spec in inputs:
        if spec.shape and str(spec.shape[0]).lower() in _STEPS:
            return None
    return 0


def splittable(
    inputs: Sequence[InputSpec], *, stacked: bool = False, axis: int | None = 0
) -> bool:
    """Return whether the batch size of every input is 1, so that larger batches are split.

    ``stacked`` data is split, too, if the model leaves the batch size open: the arrays hold all
    samples. ``axis`` is the axis that counts samples, None for none.
    """
    if axis is None:
        return False
    for spec in inputs:
        # 0 keeps inputs without a batch axis, scalars and vectors, from being split.
        batch_size: int | str | None = 0
        shape = spec.shape or ()
        if len(shape) > axis and (shape[axis] == 1 or len(shape) > 1):
            batch_size = shape[axis]
        open_size = not isinstance(batch_size, int)
        if batch_size != 1 and not (stacked and open_size):
            return False
    return True


def split(
    sample: Sample,
    inputs: Sequence[InputSpec],
    *,
    stacked: bool = False,
    axis: int | None = 0,
) -> Iterator[Sample]:
    """Yield the N samples of a batch of N, if splittable; otherwise the sample unchanged."""
    count = 1
    if axis is not None and splittable(inputs, stacked=stacked, axis=axis):
        count = batch_size(sample, inputs, axis)
    if count > 1:
        before = (slice(None),) * (axis or 0)
        for row in range(count):
            rows = (*before, slice(row, row + 1))
            yield {name: array[rows] for name, array in sample.items()}
    else:
        yield sample


def batch_size(sample: Sample, inputs: Sequence[InputSpec], axis: int | None) -> int:
    """Return the length of the batch axis of all arrays; 1 for arrays that cannot be split.

    Lengths that differ, or ranks other than those of the inputs, keep a batch whole.
    """
    sizes = set[int]()
    for spec in inputs:
        if not spec.tensor:
            return 1
        shape = np.shape(sample[spec.name])
        # An array with a dimension more is reported by ``conform``, with a hint.
        if spec.shape is not None and len(spec.shape) != len(shape):
            return 1
        if axis is None or len(shape) <= axis:
            return 1
        sizes.add(shape[axis])
    return sizes.pop() if len(sizes) == 1 else 1


def conform(
    sample: Sample,
    inputs: Sequence[InputSpec],
    index: int,
    layout: Layout | None = None,
) -> Sample:
    """Check a sample against the inputs, and convert the element types.

    The given arrays are never changed. Types widen silently within their kind (int32 to int64), and
    floats narrow to float32, since Python's floats are float64. Other conversions would hide
    mistakes, such as pixels that were never normalized.

    Args:
        sample: one array per input, from `name_arrays`.
        inputs: the model's inputs.
        index: position of the sample in the data, for messages.
        layout: ``"nhwc"`` transposes 4-D float arrays from NHWC to NCHW.

    Raises:
        SampleMismatch: a type, a rank or a fixed dimension differs, or a batch is empty.
        NonFiniteSample: a float array holds NaN or infinity that its input does not accept.
    """
    conformed: Sample = {}
    for spec in inputs:
        value = sample[spec.name]
        source = _place(index, spec.name)
        if spec.tensor:
            conformed[spec.name] = _conform(value, spec, source, layout)
        else:
            conformed[spec.name] = _conform_items(value, spec, source)
    return conformed


def _conform(
    array: Array, spec: InputSpec, source: str, layout: Layout | None
) -> Array:
    """Check the array of one input, and convert its type and layout; see ``conform``."""
    array = _with_batch_axis(_cast(array, spec.dtype, source), spec, layout)
    given = array
    if layout == "nhwc" and array.ndim == 4 and array.dtype.kind == "f":
        # onnxruntime copies arrays that are not contiguous, at every run.
        array = np.ascontiguousarray(array.transpose(0, 3, 1, 2))
    if spec.shape is not None and not spec.fits(array.shape):
        # The array is in the layout of the model already.
        if spec.fits(given.shape):
            hint = "; leave out layout='nhwc'"
        else:
            hint = _axes_hint(array, spec)
        raise SampleMismatch(
            f"{source}: got shape {_dims(array.shape)}, expected"
            f" {_dims(spec.shape)}{hint}",
        )
    if is_empty(array.shape, spec):
        raise SampleMismatch(
            f"{source}: got shape {_dims(array.shape)}, a batch of nothing; leave it out"
        )
    _check_values(array, spec, source)
    return array


def _with_batch_axis(array: Array, spec: InputSpec, layout: Layout | None) -> Array:
    """Return a single sample, as data sets hold it, as a batch of one; other arrays unchanged."""
    shape = array.shape
    if layout == "nhwc" and array.ndim == 3 and array.dtype.kind == "f":
        shape = (shape[2], *shape[:2])
    if spec.shape is not None and len(spec.shape) > 1 and spec.fits((1, *shape)):
        return array[np.newaxis]
    return array


def _conform_items(value: Any, spec: InputSpec, source: str) -> Any:
    """Check the arrays in a sequence; other values pass unchanged."""
    for position, item in enumerate(
        value if isinstance(value, list | tuple) else [value],
    ):
        if isinstance(item, np.ndarray):
            _check_values(item, spec, f"{source}, element {position}")
    return value


def _check_values(array: Array, spec: InputSpec, source: str) -> None:
    """Raise NonFiniteSample for NaN and infinity that an input does not accept."""
    if array.dtype.kind not in "fc":
        return
    valid = np.isfinite(array)
    # ``allowed`` may look at the graph, which only data with non-finite values has to pay for.
    if valid.all() or spec.allowed == "anything":
        return
    # Attention masks hold minus infinity on purpose.
    valid |= (array == -np.inf) & (spec.allowed == "-inf")
    if valid.all():
        return
    first = np.argwhere(~valid)[0].tolist()
    bad = (
        f"{array.size - np.count_nonzero(valid)} of {array.size} values are NaN"
        " or infinite"
    )
    raise NonFiniteSample(
        f"{source}: {bad}, the first at {first} ({array[tuple(first)]})",
    )


def _place(index: int, name: str) -> str:
    return f"sample {index}, input {name!r}"


def _to_numpy(value: Any, source: str) -> Array:
    if _is_masked(value):
        raise SampleMismatch(
            f"{source}: some values are masked, which a model cannot see; use"
            " array.filled(...)",
        )
    try:
        return np.asarray(
            value.detach().cpu().numpy() if hasattr(value, "detach") else value,
        )
    except Exception as error:
        # torch raises several unrelated types, over a tensor without data for instance
        raise SampleMismatch(
            f"{source}: a {type(value).__name__} that is no array: {error}",
        ) from error


def _is_masked(value: Any) -> bool:
    """Return whether an array of numpy.ma has masked values."""
    # A masked array is of a subclass. numpy imports its module for masks on first use, which takes
    # as long as a small model.
    if type(value) is np.ndarray or not isinstance(value, np.ndarray):
        return False
    return isinstance(value, np.ma.MaskedArray) and bool(np.ma.is_masked(value))


def _cast(array: Array, want: np.dtype[Any] | None, source: str) -> Array:
    """Return an array in the element type of an input.

    Args:
        want: the type of the input; None leaves the type unchecked.
        source: names sample and input in messages.

    Raises:
        SampleMismatch: the conversion would hide a mistake.
    """
    got = array.dtype
    if want is not None and want.kind == "O":
        return _text(array, source)
    if want is None or got == want:
        return array
    # ml_dtypes' bfloat16 has no float kind in numpy.
    if got.name == "bfloat16" and want.kind == "f":
        return array.astype(want)
    # Kinds are "i", "u", "f", "b" and so on: uint8 to int64 would pass can_cast, and is refused
    # here.
    if got.kind == want.kind and (np.can_cast(got, want) or want == np.float32):
        # An overflow becomes infinite, and is reported as such.
        with np.errstate(over="ignore"):
            return array.astype(want)
    raise SampleMismatch(
        f"{source}: got {got}, expected {want}; {_conversion(got, want)}",
    )


def _conversion(got: np.dtype[Any], want: np.dtype[Any]) -> str:
    """Return how to convert an array of another type, for a message."""
    change = f"convert it with .astype(np.{want.name})"
    if got == np.uint8 and want.kind == "f":
        return f"pixels are scaled and normalized as in training; then {change}"
    return change


def _text(array: Array, source: str) -> Array:
    """Return strings as onnxruntime takes them: Python's own, decoded from UTF-8.

    onnxruntime would convert other types by str(), bytes to "b'...'".
    """
    try:
        if array.dtype.kind == "S":
            array = np.strings.decode(array, "utf-8")
        array = array.astype(object, copy=False)
    except UnicodeDecodeError as error:
        raise SampleMismatch(
            f"{source}: got bytes that are no UTF-8 text: {error}",
        ) from error
    for item in array.flat:
        if not isinstance(item, str):
            raise SampleMismatch(
                f"{source}: got {item!r} of type {type(item).__name__}, expected strings"
            )
    return array


def _axes_hint(array: Array, spec: InputSpec) -> str:
    """Return the end of a message about a shape: the change to make, if known."""
    shape = array.shape
    # A single sample, as data sets hold it.
    if spec.shape is not None and len(spec.shape) == array.ndim + 1:
        shape = (1, *shape)
    rank = len(shape)
    if not 3 <= rank <= 5:
        return ""
    space = {3: "L", 4: "HW", 5: "DHW"}[rank]
    usual = {
        (0, *range(2, rank), 1): f"looks like NC{space} data for an N{space}C input",
        (
            0,
            rank - 1,
            *range(1, rank - 1),
        ): f"looks like N{space}C data for an NC{space} input",
    }
    # At most 120 orders of five axes; the usual layouts are tried first, and named.
    for axes in chain(usual, permutations(range(rank))):
        if spec.fits([shape[axis] for axis in axes]):
            remedy = f"np.transpose(array, {axes})"
            if rank > array.ndim:
                # The batch axis is not there, and keeps its place in the usual orders.
                if axes[0]:
                    continue
                own = tuple(axis - 1 for axis in axes[1:])
                remedy = f"np.transpose(array, {own})"
            if axes == (0, 3, 1, 2) and array.dtype.kind == "f":
                remedy = "open_reader(..., layout='nhwc')"
            return (
                f"; {usual.get(axes, 'its axes fit in another order')}; transpose it"
                f" with {remedy}"
            )
    return ""


def _dims(shape: Sequence[int | str | None]) -> str:
    return f"[{', '.join('?' if dim is None else str(dim) for dim in shape)}]"
