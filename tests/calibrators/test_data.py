"""Every kind of calibration data, and what is said of data that does not fit."""

from __future__ import annotations

import gc
import io
import weakref
import zipfile
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from calibrators import errors
from calibrators.errors import (
    DataError,
    EmptyReader,
    NonFiniteSample,
    ReaderEndedEarly,
    SampleMismatch,
)
from calibrators.readers.open import (
    Allowed,
    ImageSpec,
    InputSpec,
    RandomData,
    open_reader,
)

F32, I64 = np.dtype(np.float32), np.dtype(np.int64)
X = InputSpec("x", F32, ("batch", 2))
IDS, MASK = (
    InputSpec("ids", I64, ("batch", None)),
    InputSpec("mask", np.dtype(bool), ("batch", None)),
)
IMAGE = InputSpec("image", F32, ("batch", 3, 4, 6))
ONE = InputSpec("image", F32, (1, 3, 4, 6))


def xs(*values: float) -> list[np.ndarray[Any, Any]]:
    """Arrays that enter X, recognizable by their value."""
    return [np.full((1, 2), value, np.float32) for value in values]


def seen(data: object, spec: InputSpec = X, **options: Any) -> list[float]:
    """The first value of each sample that a reader makes of the data."""
    return [
        sample[spec.name].flat[0].item()
        for sample in open_reader(data, [spec], **options)
    ]


class OrtReader:
    """What onnxruntime calls a CalibrationDataReader, without rewind."""

    def __init__(self, make: Callable[[], Iterator[Any]]) -> None:
        self.make, self.batches = make, make()

    def get_next(self) -> Any:
        return next(self.batches, None)


class RewindingReader(OrtReader):
    def rewind(self) -> None:
        self.batches = self.make()


class Tensor:
    """As much of a torch tensor as is used."""

    def __init__(self, array: np.ndarray[Any, Any]) -> None:
        self.array = array

    def detach(self) -> Tensor:
        return self

    cpu = detach

    def numpy(self) -> np.ndarray[Any, Any]:
        return self.array


class Loader(list[Any]):
    """As much of a torch DataLoader as is looked at."""

    dataset, batch_size = (), 1


# Kinds of data


@pytest.mark.parametrize(
    "data",
    [
        [{"x": a} for a in xs(1, 2)],
        xs(1, 2),
        ((a,) for a in xs(1, 2)),
        [[a] for a in xs(1, 2)],
        (Tensor(a) for a in xs(1, 2)),
        [{"x": a.tolist()} for a in xs(1, 2)],
        OrtReader(lambda: iter({"x": a} for a in xs(1, 2))),
        RewindingReader(lambda: iter(xs(1, 2))),
        Loader((Tensor(a), Tensor(np.array([7]))) for a in xs(1, 2)),
    ],
    ids=lambda data: type(data).__name__,
)
def test_kinds_of_data(data: object) -> None:
    assert seen(data) == [1, 2]


def test_one_batch_alone() -> None:
    (batch,) = xs(5)
    assert seen({"x": batch}) == seen(batch) == seen(Tensor(batch)) == [5]


def test_tuples_follow_the_order_of_the_inputs() -> None:
    (sample,) = open_reader(
        [(np.array([[3, 4]]), np.array([[True, False]]))], [IDS, MASK]
    )
    assert list(sample) == ["ids", "mask"] and sample["ids"].tolist() == [[3, 4]]


@pytest.mark.parametrize("wrap", [list, iter])
def test_rows_of_labelled_batches_are_samples(wrap: Callable[[Any], Any]) -> None:
    rows = np.arange(6, dtype=np.float32).reshape(3, 2)
    reader = open_reader(wrap([(rows, [5, 6, 7]), (rows[:1], [8])]), [X])
    assert reader.first()["x"].tolist() == [[0, 1]]
    assert reader.splits and reader.length is None
    assert len(list(reader)) == 4
    assert reader.labels == {"0": 5, "1": 6, "2": 7, "3": 8}
    assert reader.rows[3] == range(3, 4)


@pytest.mark.parametrize("label", ["dog", 0.5, np.eye(3, dtype=np.int64)[:1]])
def test_other_labels_than_classes_are_left_out(label: object) -> None:
    with pytest.warns(UserWarning, match="labels are integers"):
        assert len(list(open_reader([(xs(1)[0], label)], [X]))) == 1


def test_a_data_set_without_a_length() -> None:
    class Endless:
        def __getitem__(self, index: int) -> object:
            return xs(index)[0]

    with pytest.raises(
        DataError, match="got Endless as data, which has __getitem__ and nei"
    ):
        open_reader(Endless(), [X])


def test_batches_are_split_on_request() -> None:
    batch = np.zeros((3, 2), np.float32)
    assert len(list(open_reader([batch, batch], [X]))) == 2
    assert len(list(open_reader([batch, batch], [X], batches=True))) == 6
    assert len(list(open_reader([batch, batch], [X], batches=True, limit=4))) == 4


def test_a_torch_loader() -> None:
    torch = pytest.importorskip("torch")
    data = torch.utils.data.TensorDataset(
        torch.arange(6.0).reshape(3, 2), torch.arange(3)
    )
    reader = open_reader(torch.utils.data.DataLoader(data, batch_size=2), [X])
    assert [sample["x"].tolist() for sample in reader] == [[[0, 1]], [[2, 3]], [[4, 5]]]
    # Its rows are the samples, whose number is not known before they are read.
    assert reader.length is None
    assert reader.labels == {"0": 0, "1": 1, "2": 2}
    entries = open_reader(data, [X])
    assert [sample["x"].tolist() for sample in entries] == [
        [[0, 1]],
        [[2, 3]],
        [[4, 5]],
    ]
    assert entries.length == 3 and entries.labels == reader.labels


class Entries:
    """As much of a torch Dataset as is used: no __iter__, and no IndexError at the end."""

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"pixel_values": [index, 0.5], "label": 3 * index, "text": "a cat"}


def test_what_the_model_does_not_read_is_left_out_with_one_warning() -> None:
    with pytest.warns(UserWarning, match=r"left out: \['text \(str\)'\]") as caught:
        reader = open_reader(Entries(), [X])
        assert [sample["x"].tolist() for sample in reader] == [[[0, 0.5]], [[1, 0.5]]]
    assert len(caught) == 1
    assert reader.length == 2 and reader.labels == {"0": 0, "1": 3}


@pytest.mark.parametrize(
    ("label", "labels"),
    [
        (7, {"0": 7}),
        (np.int64(7), {"0": 7}),
        (Tensor(np.array([7])), {"0": 7}),
        (-100, {}),
        (0.5, {}),
        (True, {}),
        ([1, 2], {}),
        ("cat", {}),
        (None, {}),
    ],
)
@pytest.mark.filterwarnings("ignore:the samples hold more")
def test_integers_after_the_inputs_are_labels(
    label: object, labels: dict[str, int]
) -> None:
    for entry in ((xs(1)[0], label), {"x": xs(1)[0], "labels": label}):
        reader = open_reader([entry], [X])
        assert list(reader) and reader.labels == labels


def test_two_arrays_for_one_input_are_no_label() -> None:
    with pytest.raises(SampleMismatch, match="the number of arrays is 2"):
        seen([[xs(1)[0], xs(2)[0]]])


@pytest.mark.parametrize("suffix", ["npy", "npz"])
def test_frames_are_no_samples(tmp_path: Path, suffix: str) -> None:
    """A model of frames takes a file at once: by the name of its axis, or where it is said."""
    for index, frames in enumerate((3, 5)):
        array = np.full((frames, 2), index, np.float32)
        if suffix == "npy":
            np.save(tmp_path / f"{index}.npy", array)
        else:
            np.savez(tmp_path / f"{index}.npz", x=array)

    def lengths(axis_name: str, **options: Any) -> list[int]:
        spec = InputSpec("x", F32, (axis_name, 2))
        reader = open_reader(tmp_path, [spec], **options)
        return [len(sample["x"]) for sample in reader]

    assert lengths("time") == [3, 5]
    assert lengths("n", batch_axis=None) == [3, 5]
    assert lengths("time", batch_axis=0) == [1] * 8
    with pytest.warns(UserWarning, match=r"3 of 0\.np., 5 of 1\.np.*batch_axis=None"):
        assert lengths("n") == [1] * 8
    with pytest.raises(DataError, match="batch_axis is -1"):
        lengths("n", batch_axis=-1)


def test_a_batch_axis_behind_the_first(tmp_path: Path) -> None:
    """Recurrent layers of ONNX have [time, batch, features]."""
    array = np.arange(12, dtype=np.float32).reshape(3, 2, 2)
    np.save(tmp_path / "x.npy", array)
    spec = InputSpec("x", F32, ("steps", "n", 2))
    samples = [sample["x"] for sample in open_reader(tmp_path, [spec], batch_axis=1)]
    assert [sample.shape for sample in samples] == [(3, 1, 2)] * 2
    np.testing.assert_array_equal(np.concatenate(samples, axis=1), array)


def test_what_is_no_data() -> None:
    with pytest.raises(DataError, match="got int as data; pass an iterable"):
        open_reader(3, [X])


# Passes


def test_a_list_restarts_and_a_generator_does_not() -> None:
    reader = open_reader(xs(1, 2), [X])
    assert reader.restartable and len(list(reader)) == len(list(reader)) == 2
    reader = open_reader(iter(xs(1, 2)), [X])
    assert not reader.restartable and len(list(reader)) == 2
    with pytest.raises(EmptyReader, match="read already"):
        list(reader)


def test_a_rewind_starts_each_pass() -> None:
    reader = open_reader(RewindingReader(lambda: iter(xs(1, 2))), [X])
    assert reader.restartable and len(list(reader)) == len(list(reader)) == 2
    assert not open_reader(OrtReader(lambda: iter(xs(1, 2))), [X]).restartable


def test_get_next_ends_with_none() -> None:
    class Reader:
        def get_next(self) -> Any:
            return next(iter([]))

    with pytest.raises(
        DataError,
        match=(
            r"get_next\(\) raised StopIteration; at the end of the data it has to"
            r" return None"
        ),
    ):
        seen(Reader())


def test_a_list_that_is_filled_again_is_copied() -> None:
    class Refilled(list[Any]):
        def __iter__(self) -> Iterator[Any]:
            buffer = np.zeros((1, 2), np.float32)
            for value in super().__iter__():
                buffer[:] = value
                yield buffer

    samples = list(open_reader(Refilled([1, 2]), [X]))
    assert [sample["x"].flat[0] for sample in samples] == [1, 2]


@pytest.mark.parametrize(
    "wrap", [iter, list, lambda data: OrtReader(lambda: iter(data))]
)
def test_first_takes_nothing_from_the_pass(wrap: Callable[[Any], Any]) -> None:
    reader = open_reader(wrap(xs(1, 2, 3)), [X])
    assert reader.first()["x"].flat[0] == reader.first()["x"].flat[0] == 1
    assert [sample["x"].flat[0] for sample in reader] == [1, 2, 3]


def test_limit_draws_no_more_than_it_needs() -> None:
    data = iter(xs(1, 2, 3))
    assert seen(data, limit=2) == [1, 2]
    assert next(data).flat[0] == 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"limit": 0}, "limit is 0; it must be a whole number of at least 1"),
        ({"limit": "x"}, "limit is 'x'; it must be a whole number"),
        ({"limit": 2.5}, "limit is 2.5; it must be a whole number"),
        ({"expected": "x"}, "expected is 'x'; it must be a whole number"),
        ({"images": (16, 16)}, r"images is \(16, 16\); it must be an ImageSpec"),
    ],
)
def test_options_of_the_wrong_kind(options: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        open_reader(xs(1), [X], **options)


@pytest.mark.parametrize(
    ("data", "spec", "limit", "length"),
    [
        (xs(1, 2, 3), X, None, 3),
        (xs(1, 2, 3), X, 2, 2),
        (iter(xs(1)), X, 2, None),
        ([np.zeros((1, 3, 4, 6))], ONE, None, None),  # may yet be split
    ],
)
def test_length(
    data: object, spec: InputSpec, limit: int | None, length: int | None
) -> None:
    assert open_reader(data, [spec], limit=limit).length == length


@pytest.mark.parametrize("peek", [False, True])
@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize(
    "wrap", [lambda batches: batches, lambda batches: OrtReader(lambda: batches)]
)
def test_one_batch_is_alive(wrap: Callable[[Any], Any], size: int, peek: bool) -> None:
    made: list[weakref.ref[Any]] = []

    def make() -> np.ndarray[Any, Any]:
        array = np.zeros((size, 2), np.float32)
        made.append(weakref.ref(array))
        return array

    def batches() -> Iterator[Any]:
        for _ in range(4):
            assert not any(ref() is not None for ref in made), (
                "a batch is held while the next one is made"
            )
            yield {"x": make()}

    gc.disable()  # so that only reference counts free a batch
    try:
        reader = open_reader(wrap(batches()), [InputSpec("x", F32, (1, 2))])
        if peek:
            reader.first()
        samples = iter(reader)
        taken = 0
        while next(samples, None) is not None:
            taken += 1
    finally:
        gc.enable()
    assert taken == 4 * size


# Checks


def test_every_error_is_its_own_and_names_the_sample() -> None:
    good, bad = xs(1)[0], np.array([[1, np.nan]], np.float32)
    faults: dict[type[DataError], tuple[Any, dict[str, Any]]] = {
        EmptyReader: ([], {}),
        ReaderEndedEarly: ([good], {"expected": 3}),
        NonFiniteSample: ([good, bad], {}),
        SampleMismatch: ([good, "text"], {}),
    }
    for error, (data, options) in faults.items():
        where = "holds no sample" if error is EmptyReader else r"sample 1\b"
        with pytest.raises(DataError, match=where) as caught:
            seen(data, **options)
        assert type(caught.value) is error
    # A path that does not exist has no samples.
    assert set(DataError.__subclasses__()) == {*faults, errors.DataNotFound}
    assert issubclass(DataError, errors.CalibrationError)


def test_the_data_ends_early() -> None:
    with pytest.raises(
        ReaderEndedEarly, match="ended before sample 2; 5 were expected"
    ):
        seen(xs(1, 2), expected=5)
    assert seen(xs(1, 2), expected=2) == [1, 2]
    assert seen(xs(1, 2, 3), limit=2, expected=3) == [1, 2]


@pytest.mark.parametrize(
    ("data", "hint"),
    [
        ([], "holds no sample"),
        (iter([]), "nothing left"),
        (OrtReader(lambda: iter([])), r"get_next\(\) returned None at once.*rewind"),
        (RewindingReader(lambda: iter([])), r"get_next\(\) returned None at once"),
    ],
)
def test_no_sample(data: object, hint: str) -> None:
    with pytest.raises(EmptyReader, match=f"^(the .*)?{hint}"):
        open_reader(data, [X]).first()


@pytest.mark.parametrize(
    ("sample", "message"),
    [
        (
            {"idz": 0, "mask": 0},
            r"sample 0: the model has no input 'idz'; did you mean 'ids'\?",
        ),
        ({"ids": 0, "y": 0}, "no input 'y'; known: ids, mask"),
        ({"mask": 0}, r"sample 0: no array for input 'ids', only for \['mask'\]"),
        (
            (0,),
            r"sample 0: the number of arrays is 1, the model's inputs are \['ids', 'mask'\]",
        ),
        (
            np.zeros(2),
            (
                r"sample 0: got ndarray, expected {name: array} for the inputs \['ids',"
                r" 'mask'\]"
            ),
        ),
        ("text", "sample 0: got str, expected {name: array}"),
        (
            {"ids": [[1], [2, 3]], "mask": 0},
            "sample 0, input 'ids': a list that is no array",
        ),
    ],
)
def test_names(sample: object, message: str) -> None:
    with pytest.raises(SampleMismatch, match=message):
        open_reader([sample], [IDS, MASK]).first()


@pytest.mark.parametrize(
    ("given", "want"),
    [
        ("f8", "f4"),
        ("f2", "f4"),
        (">f4", "f4"),
        ("i4", "i8"),
        ("u1", "u2"),
        ("U3", "O"),
        ("i2", None),
    ],
)
def test_types_that_convert(given: str, want: str | None) -> None:
    array = np.ones(2, given)
    spec = InputSpec("x", None if want is None else np.dtype(want), (2,))
    (sample,) = open_reader([{"x": array}], [spec])
    assert sample["x"].dtype == (want or given) and array.dtype == given
    np.testing.assert_array_equal(sample["x"], array.astype(want or given))


@pytest.mark.parametrize(
    ("given", "want"),
    [("u1", "f4"), ("i8", "i4"), ("f4", "f2"), ("f4", "i8"), ("?", "f4"), ("O", "f4")],
)
def test_types_that_do_not(given: str, want: str) -> None:
    message = (
        rf"'x': got {np.dtype(given)}, expected {np.dtype(want)};"
        rf" .*astype\(np.{np.dtype(want).name}\)"
    )
    with pytest.raises(SampleMismatch, match=message):
        open_reader([np.ones(2, given)], [InputSpec("x", np.dtype(want), None)]).first()


def test_fitting_arrays_are_not_copied() -> None:
    (array,) = xs(1)
    assert open_reader([array], [X]).first()["x"] is array


@pytest.mark.parametrize(
    ("want", "got", "hint"),
    [
        (("n", 2), (5, 3), r"got shape \[5, 3\], expected \[n, 2\]$"),
        ((None, 2), (5,), r"got shape \[5\], expected \[\?, 2\]$"),
        (
            ("n", 3, 4, 6),
            (5, 4, 6, 3),
            "looks like NHWC data for an NCHW input; "
            r"transpose it with open_reader\(\.\.\., layout='nhwc'\)$",
        ),
        (
            ("n", 3, 4, 6),
            (4, 6, 3),
            r"NHWC data for an NCHW input; transpose it with open_reader\(.*layout='nhwc'\)$",
        ),
        (
            ("n", 4, 6, 3),
            (3, 4, 6),
            r"NCHW data for an NHWC input; .*np.transpose\(array, \(1, 2, 0\)\)$",
        ),
        (
            ("n", 4, 6, 3),
            (5, 3, 4, 6),
            r"NCHW data for an NHWC input; .*np.transpose\(array, \(0, 2, 3, 1\)\)$",
        ),
        (
            ("n", 3, 9),
            (5, 9, 3),
            r"NLC data for an NCL input; .*np.transpose\(array, \(0, 2, 1\)\)$",
        ),
        (("n", 3, 7, 8, 9), (5, 7, 8, 9, 3), "NDHWC data for an NCDHW input"),
        (
            ("n", 3, 4, 6),
            (5, 3, 6, 4),
            r"another order; transpose it with np.transpose\(array, \(0, 1, 3, 2\)\)$",
        ),
        (("n", 3, 4, 6), (5, 3, 4, 7), r"expected \[n, 3, 4, 6\]$"),
    ],
)
def test_shapes(want: tuple[Any, ...], got: tuple[int, ...], hint: str) -> None:
    with pytest.raises(SampleMismatch, match=f"sample 0, input 'x': .*{hint}"):
        open_reader([np.zeros(got, np.float32)], [InputSpec("x", F32, want)]).first()


def test_a_sample_without_the_batch_axis_is_a_batch_of_one() -> None:
    image = np.arange(72, dtype=np.float32).reshape(3, 4, 6)
    sample = open_reader([image], [IMAGE]).first()
    np.testing.assert_array_equal(sample["image"], image[np.newaxis])
    turned = open_reader([image.transpose(1, 2, 0)], [IMAGE], layout="nhwc").first()
    np.testing.assert_array_equal(turned["image"], image[np.newaxis])


def test_later_samples_are_checked_too() -> None:
    samples = iter(open_reader([*xs(1, 2), np.zeros((1, 3), np.float32)], [X]))
    assert next(samples) and next(samples)
    with pytest.raises(SampleMismatch, match="sample 2, input 'x'"):
        next(samples)


def test_layout_nhwc_transposes() -> None:
    nhwc = np.arange(2 * 4 * 6 * 3, dtype=np.float32).reshape(2, 4, 6, 3)
    sample = open_reader([nhwc], [IMAGE], layout="nhwc").first()
    np.testing.assert_array_equal(sample["image"], nhwc.transpose(0, 3, 1, 2))
    with pytest.raises(SampleMismatch, match="leave out layout='nhwc'"):
        open_reader([sample["image"]], [IMAGE], layout="nhwc").first()
    with pytest.raises(DataError, match=r"unknown layout 'NHWC'.*nhwc"):
        open_reader([nhwc], [IMAGE], layout="NHWC")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("value", "shown"), [(np.nan, "nan"), (-np.inf, "-inf"), (1e300, "inf")]
)
def test_values_that_are_not_finite(value: float, shown: str) -> None:
    array = np.zeros((3, 2))
    array[1, 1] = array[2, 0] = value
    message = (
        r"sample 1, input 'x': 2 of 6 values are NaN or infinite, the first at \[1,"
        rf" 1\] \({shown}\)"
    )
    with pytest.raises(NonFiniteSample, match=message):
        seen([*xs(0), array])


@pytest.mark.parametrize(
    "data", [[np.zeros((0, 2), np.float32)], np.zeros((0, 2), np.float32)]
)
def test_a_batch_of_nothing(data: object) -> None:
    with pytest.raises(
        SampleMismatch,
        match=(
            r"sample 0, input 'x': got shape \[0, 2\], a batch of nothing; leave it out"
        ),
    ):
        seen(data)


@pytest.mark.parametrize(
    ("want", "shape"), [((0, 2), (0, 2)), (("batch", "past"), (1, 0)), (("n",), (0,))]
)
def test_a_dimension_of_zero_that_is_meant(want: Any, shape: tuple[int, ...]) -> None:
    (sample,) = open_reader([np.zeros(shape, np.float32)], [InputSpec("x", F32, want)])
    assert sample["x"].shape == shape


def test_allowed_values_are_looked_for_when_a_sample_has_such_values() -> None:
    looked = []

    def allowed() -> Allowed:
        looked.append("x")
        return "-inf"

    masks = [np.zeros((1, 2), np.float32), np.array([[0, -np.inf]], np.float32)]
    reader = iter(open_reader(masks, [InputSpec("x", F32, (1, 2), allowed)]))
    next(reader)
    assert not looked
    next(reader)
    assert looked


def test_masked_values() -> None:
    masked = np.ma.masked_array(np.ones((1, 2), np.float32), [[True, False]])
    with pytest.raises(
        SampleMismatch,
        match=r"sample 0, input 'x': some values are masked.*array\.filled",
    ):
        seen([masked])
    assert seen([np.ma.masked_array(np.ones((1, 2), np.float32), False)]) == [1]


def test_tensors_without_data() -> None:
    torch = pytest.importorskip("torch")
    with pytest.raises(
        SampleMismatch, match="sample 0, input 'x': a Tensor that is no array"
    ):
        seen([torch.zeros(1, 2, device="meta")])


TEXT = InputSpec("x", np.dtype(object), (2,))


@pytest.mark.parametrize(
    "array",
    [
        np.array(["a", "é"]),
        np.array(["a", "é"], object),
        np.array([b"a", "é".encode()]),
    ],
)
def test_strings_are_pythons(array: np.ndarray[Any, Any]) -> None:
    (sample,) = open_reader([array], [TEXT])
    assert sample["x"].tolist() == ["a", "é"] and sample["x"].dtype == object


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.array(["a", None], object), "got None of type NoneType, expected strings"),
        (np.array([b"a", b"b"], object), "got b'a' of type bytes, expected strings"),
        (np.array([1, 2]), "got 1 of type int, expected strings"),
        (np.array([b"a", b"\xff"]), "got bytes that are no UTF-8 text"),
    ],
)
def test_what_is_no_string(array: np.ndarray[Any, Any], message: str) -> None:
    with pytest.raises(SampleMismatch, match=f"sample 0, input 'x': {message}"):
        open_reader([array], [TEXT]).first()


def test_values_in_a_sequence_are_checked() -> None:
    spec = InputSpec("x", F32, None, tensor=False)
    fine = [*xs(1, 2)]
    assert open_reader([{"x": fine}], [spec]).first()["x"] is fine
    with pytest.raises(
        NonFiniteSample, match="sample 0, input 'x', element 1: 2 of 2 values are NaN"
    ):
        open_reader([{"x": xs(1, float("nan"))}], [spec]).first()


def test_a_batch_for_a_model_of_batch_one_is_split() -> None:
    batches = [
        np.arange(n, dtype=np.float32)[:, None, None, None] + np.zeros((n, 3, 4, 6))
        for n in (3, 1, 2)
    ]
    assert seen(batches, ONE) == [0, 1, 2, 0, 0, 1]
    assert seen(batches, ONE, limit=2, expected=6) == [0, 1]
    batches[2][1, 0, 0, 0] = np.nan
    with pytest.raises(NonFiniteSample, match="sample 5"):
        seen(batches, ONE)


def test_inputs_are_split_together_or_not_at_all() -> None:
    specs = [InputSpec("a", F32, (1, 2)), InputSpec("b", F32, (1,))]
    a, b = np.arange(6, dtype=np.float32).reshape(3, 2), np.arange(3, dtype=np.float32)
    parts = list(open_reader({"a": a, "b": b}, specs))
    assert [(part["a"].tolist(), part["b"].tolist()) for part in parts] == [
        ([[0, 1]], [0]),
        ([[2, 3]], [1]),
        ([[4, 5]], [2]),
    ]
    with pytest.raises(SampleMismatch, match=r"'a': got shape \[3, 2\]"):
        open_reader({"a": a, "b": b[:2]}, specs).first()


# Random data


@pytest.mark.parametrize("dtype", ["float32", "int64", "bool"])
def test_random_scalars_are_arrays(dtype: str) -> None:
    """Onnxruntime takes no scalars of numpy for inputs of rank 0."""
    spec = InputSpec("x", np.dtype(dtype), ())
    value = next(RandomData().draw([spec]))["x"]
    assert isinstance(value, np.ndarray) and value.shape == () and value.dtype == dtype


def test_random_data() -> None:
    specs = [X, IDS, MASK, InputSpec("h", np.dtype(np.float16), (3,))]
    with pytest.warns(
        UserWarning, match="random data: the ranges are meaningless, do not ship"
    ):
        reader = open_reader(RandomData(samples=3, dims={"batch": 4}), specs)
    assert reader.length == 3 and reader.restartable
    first, again = list(reader), list(reader)
    assert [array.shape for array in first[0].values()] == [
        (4, 2),
        (4, 1),
        (4, 1),
        (3,),
    ]
    assert all(
        array.min() >= 0 and array.max() <= 1
        for sample in first
        for array in sample.values()
    )
    assert not np.array_equal(first[0]["x"], first[1]["x"])
    for one, other in zip(first, again, strict=True):
        np.testing.assert_equal(one, other)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (
            InputSpec("x", F32, ("batch",)),
            "no input has a dimension 'bach'; did you mean 'batch'",
        ),
        (InputSpec("x", F32, None), "'x': no random data for float32 of shape None"),
        (InputSpec("x", np.dtype(object), ("bach",)), "'x': no random data for object"),
    ],
)
def test_random_data_needs_types_and_shapes(spec: InputSpec, message: str) -> None:
    data = RandomData(dims={} if spec.shape is None else {"bach": 2})
    with pytest.warns(UserWarning), pytest.raises(SampleMismatch, match=message):
        open_reader(data, [spec]).first()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"samples": "x"},
            "RandomData.samples is 'x'; it must be a whole number of at least 1",
        ),
        (
            {"seed": -1},
            "RandomData.seed is -1; it must be a whole number of at least 0",
        ),
        ({"dims": 5}, "RandomData.dims is 5; it must be sizes by name"),
        (
            {"dims": {"N": -1}},
            r"RandomData.dims\['N'\] is -1; it must be a whole number of at least 0",
        ),
    ],
)
def test_random_data_checks_itself(options: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        RandomData(**options)


@pytest.mark.parametrize("size", [10**15, 10**30])
def test_random_data_that_no_memory_holds(size: int) -> None:
    with (
        pytest.warns(UserWarning),
        pytest.raises(
            DataError, match=r"input 'x': .* are too many; choose smaller dims: that is"
        ),
    ):
        open_reader(RandomData(dims={"batch": size}), [X]).first()


# Files


def test_one_npz_is_a_stack(tmp_path: Path) -> None:
    path = tmp_path / "données.npz"
    np.savez(path, ids=np.zeros((5, 3), np.int64), mask=np.ones((5, 3), bool))
    assert [sample["ids"].shape for sample in open_reader(path, [IDS, MASK])] == [
        (1, 3)
    ] * 5
    np.savez_compressed(
        path, ids=np.arange(30).reshape(5, 2, 3), mask=np.ones((5, 2, 3), bool)
    )
    ids = [sample["ids"].flat[0] for sample in open_reader(str(path), [IDS, MASK])]
    assert ids == list(range(0, 30, 3))
    np.savez(path, ids=np.zeros((5, 2, 3), np.int64), mask=np.ones((4, 2, 3), bool))
    with pytest.raises(
        SampleMismatch, match=r"données.npz: .* not stacks of equally many samples"
    ):
        open_reader(path, [IDS, MASK]).first()
    np.savez(path, idz=np.zeros((5, 3), np.int64))
    with pytest.raises(SampleMismatch, match="no input 'idz'; did you mean 'ids'"):
        open_reader(path, [IDS, MASK]).first()


def test_one_npy_is_a_stack(tmp_path: Path) -> None:
    path = tmp_path / "x.npy"
    np.save(path, np.arange(8.0).reshape(4, 2))
    assert seen(path) == [0, 2, 4, 6]
    np.save(path, np.arange(6.0).reshape(3, 1, 2))
    assert seen(path) == [0, 2, 4]
    with pytest.raises(
        SampleMismatch, match=r"x.npy holds one array, the model has 2 inputs; use .npz"
    ):
        open_reader(path, [IDS, MASK]).first()


@pytest.mark.parametrize("suffix", [".npy", ".NPZ"])
def test_a_folder_is_read_by_name(tmp_path: Path, suffix: str) -> None:
    for value in (2, 0, 1):
        with (tmp_path / f"s{value}{suffix}").open("wb") as file:
            array = np.full((1, 2), value, np.float32)
            np.save(file, array) if suffix == ".npy" else np.savez(file, x=array)
    (tmp_path / "readme.txt").write_text("not data")
    reader = open_reader(tmp_path, [X])
    assert [sample["x"].flat[0] for sample in reader] == [
        0,
        1,
        2,
    ] and reader.restartable


def test_a_folder_per_input(tmp_path: Path) -> None:
    for name, array in (
        ("ids", np.zeros((1, 3), np.int64)),
        ("mask", np.ones((1, 3), bool)),
    ):
        (tmp_path / name).mkdir()
        for number in range(2):
            np.save(
                tmp_path / name / f"{number}.npy",
                array + number if name == "ids" else array,
            )
    assert [sample["ids"].flat[0] for sample in open_reader(tmp_path, [IDS, MASK])] == [
        0,
        1,
    ]
    (tmp_path / "mask" / "1.npy").rename(tmp_path / "mask" / "9.npy")
    with pytest.raises(
        SampleMismatch,
        match=r"1.npy is not there for every input \(2 for 'ids', 2 for 'mask'\)",
    ):
        open_reader(tmp_path, [IDS, MASK]).first()
    with pytest.raises(DataError, match="nor a sub-folder 'x'"):
        open_reader(tmp_path, [X]).first()


def test_no_file_is_open_between_samples(tmp_path: Path) -> None:
    path = tmp_path / "x.npy"
    np.save(path, np.zeros((3, 1, 2)))
    samples = iter(open_reader(path, [X]))
    next(samples)
    path.rename(
        tmp_path / "y.npy"
    )  # what Windows refuses while the file is open or mapped
    with pytest.raises(DataError, match=r"x.npy cannot be read"):
        next(samples)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="nowhere does not exist"):
        open_reader(tmp_path / "nowhere", [X])
    (tmp_path / "x.npz").write_bytes(b"PK\x03\x04 and then nothing")
    with pytest.raises(DataError, match=r"x.npz cannot be read as a NumPy file"):
        open_reader(tmp_path, [X]).first()
    (tmp_path / "x.npz").write_bytes(b"anything")
    with pytest.raises(DataError, match=r"x.npz cannot be read as a NumPy file"):
        open_reader(tmp_path, [X]).first()
    (tmp_path / "x.npz").unlink()
    (tmp_path / "x.csv").write_text("1,2")
    with pytest.raises(DataError, match=r"x.csv has no .npz or .npy file"):
        open_reader(tmp_path / "x.csv", [X]).first()


def named(path: Path, save: Callable[..., None], *arrays: Any, **options: Any) -> None:
    """Save under any name: np.save and np.savez add theirs."""
    with path.open("wb") as file:
        save(file, *arrays, **options)


def damaged(path: Path) -> None:
    """A header that is no Python literal."""
    named(path, np.save, np.zeros((1, 2)))
    path.write_bytes(path.read_bytes().replace(b"'shape': (", b"'shape': [("))


def with_text(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("x", "no array")


def forged(path: Path) -> None:
    """A shape that no memory holds."""
    content = io.BytesIO()
    np.save(content, np.zeros((1, 2)))
    header = content.getvalue().replace(
        b"(1, 2), }" + b" " * 14, b"(100000000000000, 2), }"
    )
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("x.npy", header)


@pytest.mark.parametrize(
    ("name", "write", "message"),
    [
        (
            "x.npz",
            lambda path: named(path, np.save, np.zeros((1, 2))),
            "is a .npy file that is named .npz; rename it",
        ),
        (
            "x.npy",
            lambda path: named(path, np.savez, x=np.zeros((1, 2))),
            "is a .npz file that is named .npy",
        ),
        ("x.npz", with_text, "what it holds as 'x' is no array"),
        ("x.npy", damaged, "cannot be read as a NumPy file"),
        (
            "x.npz",
            forged,
            (
                "cannot be read as a NumPy file: 'x' of shape .* needs"
                " 1,600,000,000,000,000 bytes, and has"
            ),
        ),
    ],
)
def test_files_that_are_not_what_they_seem(
    tmp_path: Path, name: str, write: Callable[[Path], None], message: str
) -> None:
    write(tmp_path / name)
    with pytest.raises(DataError, match=rf"{name}:? {message}"):
        open_reader(tmp_path / name, [X]).first()


@pytest.mark.parametrize("shape", [(0, 2), (0, 1, 2)])
def test_files_without_a_row(tmp_path: Path, shape: tuple[int, ...]) -> None:
    np.save(tmp_path / "x.npy", np.zeros(shape, np.float32))
    with pytest.raises(EmptyReader, match="holds no sample"):
        open_reader(tmp_path / "x.npy", [X]).first()


def test_image_folders_need_a_spec_and_only_they_do(tmp_path: Path) -> None:
    (tmp_path / "a.JPG").touch()
    with pytest.raises(
        DataError, match=r"partial\(open_reader, .*images=ImageSpec\(size="
    ):
        open_reader(tmp_path, [IMAGE])
    if find_spec("onnxruntime_extensions") is not None:
        with pytest.raises(DataError, match="no image in it, and images= says how"):
            open_reader(xs(1), [X], images=ImageSpec(size=(4, 6))).first()
