"""Open calibration data as a stream of checked samples."""

from __future__ import annotations

import math
import os
import sys
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, count, islice
from numbers import Integral
from pathlib import Path
from typing import Any, Literal, Protocol, get_args

import numpy as np

from calibrators.base import is_number
from calibrators.errors import (
    DataError,
    DataNotFound,
    EmptyReader,
    ReaderEndedEarly,
    SampleMismatch,
    nearest,
)
from calibrators.limits import raise_it, tensor_limit
from calibrators.names import names_of
from calibrators.readers.datasets import (
    holds_image,
    is_dataset,
    load_dataset,
    separate_image,
    undecoded,
)
from calibrators.readers.files import (
    ARRAY_SUFFIXES,
    find_files,
    read_arrays,
    row_counts,
)
from calibrators.readers.images import ImageSpec, image_decoder, image_files
from calibrators.readers.samples import (
    IMAGE_KEY,
    LABEL_KEYS,
    Allowed,
    Array,
    InputSpec,
    Layout,
    Sample,
    SampleRows,
    batch_axis_of,
    batch_size,
    classes_in,
    conform,
    is_array,
    name_arrays,
    sample_name,
    separate,
    split,
    splittable,
)
from calibrators.shown import short

#: Entries besides the inputs that may be a label: those by name, and the second of a pair.
_LABEL_ENTRIES = (*LABEL_KEYS, "element 1")
#: One image of so many may be damaged.
_SPARED = 20

__all__ = [
    "Allowed",
    "CalibrationData",
    "CalibrationReader",
    "ImageSpec",
    "InputSpec",
    "RandomData",
    "Reader",
    "Sample",
    "open_reader",
]


@dataclass(frozen=True)
class RandomData:
    """Random samples, to try out a model without data: the ranges are meaningless.

    Floats are uniform in [0, 1), integers 0 or 1; each pass repeats the same values.

    Attributes:
        samples: number of samples.
        seed: seed of the generator.
        dims: sizes of symbolic dimensions, by name; others are 1.
        shapes: shapes of inputs, by name, where the model leaves sizes open.
        ranges: (least, greatest) of inputs, by name: floats are uniform in [least, greatest),
            integers in [least, greatest].
    """

    samples: int = 8
    seed: int = 0
    dims: Mapping[str, int] = field(default_factory=dict)
    shapes: Mapping[str, Sequence[int]] = field(default_factory=dict)
    ranges: Mapping[str, tuple[float, float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _check_count("RandomData.samples", self.samples, 1)
        _check_count("RandomData.seed", self.seed, 0)
        if not isinstance(self.dims, Mapping):
            raise DataError(
                f"RandomData.dims is {self.dims!r}; it must be sizes by name, such as"
                " {'batch': 4}",
            )
        for name, size in self.dims.items():
            _check_count(f"RandomData.dims[{name!r}]", size, 0)
        for name, shape in self.shapes.items():
            for size in shape:
                _check_count(f"a size of RandomData.shapes[{name!r}]", size, 0)
        for name, ends in self.ranges.items():
            if not _is_interval(ends):
                raise DataError(
                    f"RandomData.ranges[{name!r}] is {ends!r}; it must be (least,"
                    " greatest)",
                )

    def draw(self, inputs: Sequence[InputSpec]) -> Iterator[Sample]:
        """Yield the samples for the inputs."""
        # Checked before the first sample: a misspelt dimension would get the size 1.
        symbols = list[str]()
        for spec in inputs:
            symbols += [dim for dim in spec.shape or () if isinstance(dim, str)]
        for name in self.dims:
            if name not in symbols:
                raise SampleMismatch(
                    f"no input has a dimension {name!r}{nearest(name, symbols)}",
                )
        known = names_of(inputs)
        for name in (*self.shapes, *self.ranges):
            if name not in known:
                raise SampleMismatch(
                    f"the model has no input {name!r}{nearest(name, known)}",
                )
        # A generator per pass, so that each pass repeats the same values.
        generator = np.random.default_rng(self.seed)
        for _ in range(self.samples):
            yield {spec.name: self._draw(spec, generator) for spec in inputs}

    def _draw(self, spec: InputSpec, generator: np.random.Generator) -> Array:
        if spec.dtype is None:
            dtype = np.dtype(np.float32)
        else:
            dtype = spec.dtype
        if spec.shape is None or not spec.tensor or dtype.kind not in "fiub":
            raise SampleMismatch(
                f"input {spec.name!r}: no random data for {dtype} of shape {spec.shape}"
            )
        shape = list(self.shapes.get(spec.name, ()))
        if not shape:
            for dim in spec.shape:
                # A dimension without a name is None; "" is no name of ``dims``.
                shape.append(
                    dim if isinstance(dim, int) else self.dims.get(dim or "", 1)
                )
        elif not spec.fits(shape):
            raise SampleMismatch(
                f"RandomData.shapes[{spec.name!r}] is {shape}; the model says"
                f" {list(spec.shape)}",
            )
        size = math.prod(shape) * dtype.itemsize
        described = f"input {spec.name!r}: {math.prod(shape):,} values of shape {shape}"
        if size > tensor_limit():
            raise DataError(
                f"{described} are too many; choose smaller dims: {raise_it(size)}",
            )
        try:
            least, greatest = self.ranges.get(spec.name, (0, 1))
            # Operations on arrays of rank 0 return scalars, which onnxruntime does not take.
            if dtype.kind == "f":
                values = least + (greatest - least) * generator.random(shape)
                return np.asarray(values, dtype)
            # By default 0 or 1, which token ids and masks accept whatever the vocabulary is.
            whole = generator.integers(int(least), int(greatest), shape, endpoint=True)
            return np.asarray(whole, dtype)
        except (MemoryError, ValueError) as error:
            # numpy raises ValueError for a size that no array can have.
            raise DataError(
                f"{described} do not fit into memory; choose smaller dims",
            ) from error


def _is_interval(ends: Any) -> bool:
    """Return whether a value is a pair of numbers in rising order; NaN has no order."""
    if not isinstance(ends, Sequence | np.ndarray) or len(ends) != 2:
        return False
    return all(is_number(end) for end in ends) and bool(ends[0] <= ends[1])


def _check_count(name: str, value: Any, least: int) -> None:
    if not is_number(value, Integral) or value < least:
        raise DataError(
            f"{name} is {value!r}; it must be a whole number of at least {least}",
        )


class CalibrationReader(Protocol):
    """The method of onnxruntime's ``CalibrationDataReader``."""

    def get_next(self) -> Mapping[str, Any] | None:
        """Return the next sample; None after the last one."""


@dataclass(frozen=True)
class _Source:
    """Raw, unchecked batches.

    Attributes:
        open: starts a pass over the batches.
        length: number of samples, None if unknown.
        restartable: a second pass is possible.
        stacked: a batch is a stack of samples, rather than an input of the model.
        refilled: the source may overwrite the arrays of a batch, so that samples must be copies.
        if_empty: reason for an empty pass, for the message.
        random: the batches are random numbers.
        left_out: reasons why entries are left out, by name; filled as they are read.
        images: path of the image files, and how they are read; None for other entries.
    """

    open: Callable[[], Iterator[object]]
    length: int | None = None
    restartable: bool = True
    stacked: bool = False
    refilled: bool = False
    if_empty: str = "the calibration data holds no sample"
    random: bool = False
    left_out: dict[str, str] = field(default_factory=dict)
    images: tuple[Path, ImageSpec] | None = None


class Reader:
    """Checked samples, {input name: array} in the model's types; created by `open_reader`.

    Each iteration is a pass over the data; samples are read on demand and not kept. Invalid data
    raises a `DataError` when it is reached.

    Attributes:
        restartable: several passes are possible; not for a generator.
        length: number of samples in a pass, None if unknown.
        random: the samples are random numbers, as those of `RandomData`.
        labels: class of each row that was read, by the index of the row as text, where integer
            labels come with the data.
        rows: indices of the rows of each sample that was read, by the index of the sample.
        labelled: whether the samples that were read came with classes, ignored ones included.
        left_out: reasons why damaged images were left out, by name.
        images: path of the image files, and how they are read; None for other data.
        splits: batches may be split into samples.
    """

    def __init__(  # noqa: PLR0913  private: open_reader is the way to create one
        self,
        source: _Source,
        inputs: Sequence[InputSpec],
        limit: int | None,
        expected: int | None,
        layout: Layout | None,
        constants: Collection[str] = (),
        axis: int | None = 0,
    ) -> None:
        self._source = source
        self._inputs = tuple(inputs)
        self._layout = layout
        self._constants = constants
        self._axis = axis
        self._others = set[str]()
        self.labels: dict[str, int] = {}
        self.labelled = False
        self.rows = SampleRows()
        self.left_out: Mapping[str, str] = source.left_out
        self.images = source.images
        self.splits = splittable(inputs, stacked=source.stacked, axis=axis)
        self._limit = limit
        self._expected = expected
        self._started: tuple[list[Sample], Iterator[Sample]] | None = None
        self.restartable = source.restartable
        self.random = source.random
        known = source.length
        # The limit alone is no length: the data may end before.
        if known is None or limit is None:
            self.length = known
        else:
            self.length = min(known, limit)

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of the inputs that a sample has."""
        return tuple(names_of(self._inputs))

    def first(self) -> Sample:
        """Return the first sample, without taking it from the next pass.

        For checks before any work is done.
        """
        if self._started is None:
            # The started pass is kept, as a generator cannot give its first sample twice.
            samples = self._samples()
            self._started = [next(samples)], samples
        return self._started[0][0]

    def __iter__(self) -> Iterator[Sample]:
        if self._started is None:
            return self._samples()
        head, samples = self._started
        self._started = None
        # chain keeps its arguments; an iterator as argument releases the first sample in time.
        return chain(iter(head), samples)

    def _samples(self) -> Iterator[Sample]:
        # A batch must be freed before the next is read: no loop variable may hold it, nor zip or
        # enumerate.
        # The number of samples in a batch is known only after it is split.
        indices = count()
        samples = chain.from_iterable(
            map(partial(self._fit, indices), self._source.open()),
        )
        yield from islice(samples, self._limit)
        # islice has stopped: the next index is the number of samples.
        count_read = next(indices)
        if not count_read:
            raise EmptyReader(self._source.if_empty)
        if (
            self._expected is not None
            and count_read < self._expected
            and count_read != self._limit
        ):
            raise ReaderEndedEarly(
                f"the data ended before sample {count_read}; {self._expected} were"
                " expected",
            )

    def _fit(self, indices: Iterator[int], batch: object) -> Iterator[Sample]:
        """Yield the samples in a raw batch, each with the next index."""
        index = next(indices)
        if index == 0 and holds_image(batch):
            raise DataError(
                "the samples hold images; say how to read them: partial(open_reader, data,"
                " images=ImageSpec(size=(height, width))) as data (--image-size)"
            )
        batch, others = separate(batch, self._inputs, self._constants)
        sample = name_arrays(batch, self._inputs, index, constants=self._constants)
        del batch
        # Some readers fill the same arrays again for each batch, and samples may be prefetched.
        if self._source.refilled:
            sample = deepcopy(sample)
        first = self.rows.start(index)
        size = batch_size(sample, self._inputs, self._axis)
        has_classes = self._note_labels(others, range(first, first + size))
        # A class for each row says that rows are samples.
        stacked = self._source.stacked or (has_classes and size > 1)
        self.splits = splittable(self._inputs, stacked=stacked, axis=self._axis)
        if self.splits and size > 1:
            # The source has counted its entries.
            self.length = None
        parts = split(sample, self._inputs, stacked=stacked, axis=self._axis)
        del sample
        self.rows.put(index, 1 if self.splits else size)
        yield conform(next(parts), self._inputs, index, self._layout)
        for part in parts:
            index = next(indices)
            self.rows.put(index, 1)
            yield conform(part, self._inputs, index, self._layout)

    def _note_labels(self, others: Mapping[str, Any], rows: range) -> bool:
        """Keep the classes of the rows of a batch, and warn once of what else is left out.

        Returns:
            Whether the batch has a class for each row.
        """
        classes = classes_in(others, len(rows))
        labels = next(iter(classes.values()), [])
        self.labelled = self.labelled or bool(classes)
        for row, label in zip(rows, labels, strict=False):
            # Negative classes are those that a loss ignores.
            if label >= 0:
                self.labels[str(row)] = label
        left_out = [
            f"{key} ({type(value).__name__})"
            for key, value in others.items()
            if key not in classes and key not in self._others
        ]
        self._others |= set(others)
        if left_out:
            names = ", ".join(names_of(self._inputs))
            no_classes = (others.keys() - classes.keys()).intersection(_LABEL_ENTRIES)
            hint = (
                "; labels are integers, an index of a class each" if no_classes else ""
            )
            warnings.warn(
                f"the samples hold more than the inputs of the model ({names}), which is left"
                f" out: {short(left_out)}{hint}",
                stacklevel=2,
            )
        return bool(classes)


#: Calibration data, see `open_reader`; a ``partial`` of `open_reader` lacks only the inputs.
CalibrationData = (
    Iterable[Any]
    | CalibrationReader
    | RandomData
    | str
    | os.PathLike[str]
    | partial[Reader]
)


def open_reader(  # noqa: PLR0913  one call carries all options of a reader
    data: object,
    inputs: Sequence[InputSpec],
    *,
    limit: int | None = None,
    expected: int | None = None,
    layout: Layout | None = None,
    images: ImageSpec | None = None,
    constants: Collection[str] = (),
    batch_axis: int | Literal["auto"] | None = "auto",
    batches: bool = False,
) -> Reader:
    """Return a reader over calibration data.

    The data is one of these kinds:

    - an iterable of batches: each {input name: array}, or a tuple or list of arrays in the order of
      the inputs, or the bare array for a model with one input; arrays may be torch tensors, and
      samples without the batch axis are batches of one
    - a data set of Hugging Face or torch: the same, a sample an entry
    - a torch DataLoader, or any object with ``dataset`` and ``batch_size``: the same, a batch an
      entry, whose rows become samples
    - an onnxruntime CalibrationDataReader: ``get_next()`` until None, after ``rewind()`` if present
    - one stack of samples: {input name: array}, or the bare array
    - a path to .npz or .npy files, see `calibrators.readers.files.read_arrays`
    - a path to a parquet or arrow file, or to a folder of Hugging Face's ``save_to_disk``
    - with ``images``, a path to an image, to a folder of images, taken by name, or to a folder with
      a sub-folder of images for each class, of which one image is taken in turn; or an iterable or
      file of the kinds above whose entries hold an image each
    - `RandomData`

    Further keys, and elements after the inputs, are left out with one warning. Integers among them
    are labels: the second of a pair, or the key ``label`` or ``labels``. The key ``pixel_values``
    stands for the input of a model with one input.

    A batch of N for a model whose batch is fixed to 1 becomes N samples. Where the model leaves the
    batch open, so does a stack, an array file, a batch of a DataLoader, and a batch with N labels;
    any other entry is one sample, unless ``batches`` says otherwise.

    An image that cannot be decoded is left out with a warning, up to one in twenty.

    Args:
        data: the data.
        inputs: the model's inputs.
        limit: read at most so many samples.
        expected: raise `ReaderEndedEarly` for fewer samples, unless ``limit`` ends the pass.
        layout: ``"nhwc"`` transposes 4-D float arrays from NHWC to NCHW.
        images: preprocessing of image files.
        constants: names of initializers: a sample that feeds one is refused with the reason.
        batch_axis: axis of the inputs that counts samples; None for a model that takes one sample
            at a time, whose files are not cut into rows. ``"auto"`` is 0, and None where the model
            calls its first axis by a name of time, such as ``time`` or ``frames``.
        batches: the rows of an entry are samples, as those of a DataLoader.

    Raises:
        DataError: the data is of another kind, or an option is wrong or does not apply. The samples
            themselves are checked when they are read.

    >>> image = InputSpec("image", np.dtype("float32"), ("batch", 2))
    >>> reader = open_reader([np.zeros((4, 2)), np.ones((4, 2))], [image])
    >>> reader.length, [sample["image"].mean().item() for sample in reader]
    (2, [0.0, 1.0])
    """
    for name, value in ("limit", limit), ("expected", expected):
        if value is not None:
            _check_count(name, value, 1)
    if not isinstance(images, ImageSpec | None):
        raise DataError(
            f"images is {images!r}; it must be an ImageSpec, such as"
            " ImageSpec(size=(224, 224))",
        )
    if layout is not None and layout not in get_args(Layout):
        raise DataError(f"unknown layout {layout!r}{nearest(layout, get_args(Layout))}")
    if batch_axis is not None and batch_axis != "auto":
        _check_count("batch_axis", batch_axis, 0)
        _check_axis(batch_axis, inputs)
    axis = batch_axis_of(inputs) if batch_axis == "auto" else batch_axis
    if isinstance(data, str | os.PathLike):
        source = _from_path(
            Path(data), inputs, images, axis, asked=batch_axis != "auto"
        )
    else:
        entries = data if images is None else undecoded(data)
        source = _from_object(entries, inputs, axis, images)
        if batches:
            source = replace(source, stacked=True)
        if images is not None:
            source = _decoding(source, images)
    return Reader(source, inputs, limit, expected, layout, constants, axis)


def _check_axis(axis: int, inputs: Sequence[InputSpec]) -> None:
    """Raise DataError if no input can have the axis that counts samples."""
    ranks = [math.inf if spec.shape is None else len(spec.shape) for spec in inputs]
    # The default is right for scalars, too, which no file of several samples holds.
    if axis and axis >= max(ranks, default=math.inf):
        raise DataError(
            f"batch_axis={axis}: the inputs of the model have at most {max(ranks)} axes, counted"
            " from 0"
        )


def _from_path(
    path: Path,
    inputs: Sequence[InputSpec],
    images: ImageSpec | None,
    axis: int | None,
    *,
    asked: bool,
) -> _Source:
    """Return the source of a path.

    Args:
        path: a file or folder.
        inputs: the model's inputs.
        axis: axis of the inputs that counts samples.
        asked: the axis is the user's choice.
    """
    if not path.exists():
        raise DataNotFound(f"{path} does not exist")
    if path.is_dir() and not any(path.iterdir()):
        raise DataError(f"{path} is empty: there is no file in it")
    pictures = image_files(path)
    arrays = find_files(path, ARRAY_SUFFIXES)
    if not pictures and not arrays and is_dataset(path):
        source = _from_object(load_dataset(path), inputs, axis, images)
        return source if images is None else _decoding(source, images)
    if images is not None:
        if not pictures:
            raise EmptyReader(f"no image in {path}{_deeper(path)}")
        source = _Source(partial(iter, pictures), len(pictures))
        decoding = _decoding(source, images, path if path.is_dir() else path.parent)
        return replace(decoding, images=(path, images))
    if pictures and not arrays:
        raise DataError(
            f"{path}: to read images, say how: partial(open_reader, {str(path)!r},"
            " images=ImageSpec(size=(height, width))) as data (--image-size)",
        )
    if axis == 0 and not asked and splittable(inputs, stacked=True):
        _warn_of_lengths(row_counts(arrays, inputs))
    return _Source(partial(read_arrays, path, inputs, axis=axis), stacked=True)


def _deeper(path: Path) -> str:
    """Return the end of a message about a folder without images: sub-folders that have some."""
    if not path.is_dir():
        return ""
    folders = [f"{folder}" for folder in sorted(path.iterdir()) if image_files(folder)]
    return (
        f"; images are in {' and in '.join(folders[:3])}: name one" if folders else ""
    )


def _warn_of_lengths(counts: Mapping[Path, int]) -> None:
    """Warn if files of different lengths are cut into rows: each may be one sample."""
    if len(set(counts.values())) < 2 or min(counts.values()) < 2:
        return
    (file, rows), (other, more) = list(counts.items())[:2]
    warnings.warn(
        f"each row of a file is a sample: {rows} of {file.name}, {more} of {other.name}, and so"
        " on; if a file is one sample, give open_reader(..., batch_axis=None), and otherwise"
        " batch_axis=0",
        stacklevel=4,
    )


def _decoding(source: _Source, spec: ImageSpec, folder: Path | None = None) -> _Source:
    """Return a source whose entries are images to decode.

    Args:
        source: the entries: image files, or entries of a data set with an image.
        spec: how to read the images.
        folder: names of images are relative to it; None for entries of a data set.
    """
    left_out = dict[str, str]()
    return replace(
        source,
        open=partial(_decoded, source, spec, folder, left_out),
        stacked=False,
        refilled=False,
        left_out=left_out,
    )


def _decoded(
    source: _Source, spec: ImageSpec, folder: Path | None, left_out: dict[str, str]
) -> Iterator[object]:
    """Yield the images that can be decoded, with the other values of their entries.

    Args:
        source, spec, folder: as for ``_decoding``.
        left_out: receives the reasons for the other images, by name.

    Raises:
        DataError: more than one image in twenty cannot be decoded.
    """
    left_out.clear()
    with image_decoder(spec) as decode:
        for index, entry in enumerate(source.open()):
            others: dict[str, Any] = {}
            name = sample_name(index)
            try:
                if folder is None:
                    image, others = separate_image(entry, index)
                else:
                    assert isinstance(entry, Path)
                    image, name = entry, entry.relative_to(folder).as_posix()
                decoded = decode(image)
            except SampleMismatch:  # no image, rather than a damaged one
                raise
            except DataError as error:
                # The message names a file, but not an entry of a data set.
                reason = f"{name}: {error}" if folder is None else str(error)
                left_out[name] = reason
                _leave_out(reason, len(left_out), source.length or index + 1)
                continue
            yield {IMAGE_KEY: decoded, **others} if others else decoded
            # Freed before the next one is decoded.
            del decoded


def _leave_out(reason: str, count: int, total: int) -> None:
    """Warn of an image that is left out.

    Args:
        reason: the reason, which names the image.
        count: number of images that are left out.
        total: number of images; of a stream, of those so far.

    Raises:
        DataError: more than one image in twenty is left out.
    """
    if count * _SPARED <= total:
        warnings.warn(f"an image is left out: {reason}", stacklevel=2)
    elif count == 1:
        raise DataError(reason)
    else:
        raise DataError(
            f"{count} of {total} images cannot be decoded, more than one in {_SPARED}; the last:"
            f" {reason}"
        )


def _from_object(
    data: Any, inputs: Sequence[InputSpec], axis: int | None, images: ImageSpec | None
) -> _Source:
    _refuse_splits(data)
    if isinstance(data, RandomData):
        warnings.warn(
            "random data: the ranges are meaningless, do not ship the model",
            stacklevel=3,
        )
        return _Source(partial(data.draw, inputs), data.samples, random=True)
    # Before Iterable, as both of them are iterable.
    if isinstance(data, Mapping) or is_array(data):
        return _Source(partial(iter, [data]), stacked=True)
    # Before Iterator: onnxruntime's CalibrationDataReader also has __iter__ and __next__.
    if callable(getattr(data, "get_next", None)):
        hint = (
            "get_next() returned None at once; a reader that was read before needs a"
            " rewind()"
        )
        if hasattr(data, "rewind"):
            return _Source(partial(_rewound, data), refilled=True, if_empty=hint)
        return _Source(
            _once(_pull(data)), restartable=False, refilled=True, if_empty=hint
        )
    if isinstance(data, Iterator):
        hint = "the iterator has nothing left to give"
        return _Source(_once(data), restartable=False, refilled=True, if_empty=hint)
    # The attributes of a torch DataLoader; torch is not imported to recognize one.
    batched = hasattr(data, "dataset") and hasattr(data, "batch_size")
    # If batches may have to be split, the number of samples is not known ahead; an image is not.
    length = None
    if images is not None or not splittable(inputs, stacked=batched, axis=axis):
        length = _length(data)
    # Lists and tuples keep their batches; iterating a subclass may refill them.
    refilled = type(data) not in (list, tuple)
    if isinstance(data, Iterable):
        entries = partial(iter, data)
    elif hasattr(data, "__getitem__") and hasattr(data, "__len__"):
        # A data set of torch: __iter__ is missing, and IndexError does not end it.
        entries = partial(_entries, data)
        length = _length(data)
    else:
        what = f"got {type(data).__name__} as data"
        if hasattr(data, "__getitem__"):
            what += ", which has __getitem__ and neither __len__ nor __iter__"
        raise DataError(f"{what}; pass an iterable of {{input name: array}}")
    return _Source(entries, length, stacked=batched, refilled=refilled)


def _refuse_splits(data: Any) -> None:
    """Raise DataError for several data sets of Hugging Face in place of one."""
    # A data set in memory has its package imported.
    splits = getattr(sys.modules.get("datasets"), "DatasetDict", ())
    if isinstance(data, splits):
        raise DataError(
            f"the data is a DatasetDict; give one of its splits: data[{next(iter(data), '')!r}]"
        )


def _pull(reader: Any) -> Iterator[object]:
    try:
        while (batch := reader.get_next()) is not None:
            yield batch
            # Freed before the next one is read.
            del batch
    except StopIteration as error:
        raise DataError(
            "get_next() raised StopIteration; at the end of the data it has to return"
            " None",
        ) from error


def _rewound(reader: Any) -> Iterator[object]:
    reader.rewind()
    return _pull(reader)


def _once(batches: Iterator[object]) -> Callable[[], Iterator[object]]:
    """Return a function that starts the only pass; a second call raises EmptyReader."""
    unread = [batches]

    def open_once() -> Iterator[object]:
        if not unread:
            raise EmptyReader(
                "the data was read already; for another pass, use a list or a rewind()",
            )
        return unread.pop()

    return open_once


def _entries(data: Any) -> Iterator[object]:
    """Yield the entries of a data set that is read by index."""
    for index in range(len(data)):
        yield data[index]


def _length(data: Any) -> int | None:
    try:
        return len(data)
    except (TypeError, NotImplementedError):
        # onnxruntime's readers raise the latter.
        return None
