"""The ONNX standard's backend test models, each quantized, checked and run: one row per model.

Run from the repository root, ``python -m tests.endtoend.backend_models --config XINT8`` prints the
table.

A model may crash or hang the native code that it reaches, so models run in worker processes; a
worker that dies or takes too long costs its model a failed row and nothing else.
"""

from __future__ import annotations

import argparse
import faulthandler
import functools
import os
import pickle
import time
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import numpy as np
import onnx
from onnx import ModelProto, TensorProto, ValueInfoProto, numpy_helper

from calibrators.onnx_runtime.session import open_session

KINDS = ("node", "simple", "pytorch-converted", "pytorch-operator")
#: Seconds after which a model counts as hanging, on a machine that is busy.
TIMEOUT = 240.0

Status = Literal["pass", "fail", "not run in float"]
Feeds = dict[str, Any]
Config = Any  #: whatever quantize_static takes; it travels to another process


@dataclass(frozen=True)
class Row:
    """The outcome of one model.

    Attributes:
        model: kind and name of the test.
        status: "not run in float" models fail in onnxruntime, without our code.
        reason: class of the error.
        detail: its first line.
        quantized: number of quantized nodes.
        sqnr: of the worst float output in dB, None if there is none.
        seconds: that quantizing took.
    """

    model: str
    status: Status
    reason: str = ""
    detail: str = ""
    quantized: int = 0
    sqnr: float | None = None
    seconds: float = 0.0


@dataclass(frozen=True)
class Case:
    """A model and its own first set of test inputs."""

    name: str
    model: ModelProto
    feeds: Feeds


class Mismatch(Exception):
    """The quantized model is not a stand-in for the float model."""


# -- the models
# --------------------------------------------------------------------------------------


@functools.cache  # to generate them takes several seconds
def load_cases() -> dict[str, Any]:
    """Every test case of the kinds, by "kind/name", in a fixed order.

    Node cases are generated, others are files.
    """
    from onnx.backend.test.loader import load_model_tests

    with (
        warnings.catch_warnings()
    ):  # generating the expected outputs divides by zero on purpose
        warnings.simplefilter("ignore")
        cases = {
            f"{kind}/{case.name}": case
            for kind in KINDS
            for case in load_model_tests(kind=kind)
        }
    return dict(sorted(cases.items()))


def open_case(name: str, case: Any) -> Case:
    """The model of a test case with its inputs as onnxruntime takes them."""
    if case.model is not None:
        model, values = case.model, list(case.data_sets[0][0])
    else:
        folder = Path(case.model_dir)
        model = onnx.load(str(folder / "model.onnx"))
        values = _stored_inputs(model, folder / "test_data_set_0")
    fed = [
        value
        for value in model.graph.input
        if value.name not in {t.name for t in model.graph.initializer}
    ]
    names = [
        value.name for value in (fed if len(fed) == len(values) else model.graph.input)
    ]
    return Case(
        name,
        model,
        {name: _feed(value) for name, value in zip(names, values, strict=False)},
    )


def _stored_inputs(model: ModelProto, folder: Path) -> list[Any]:
    values: list[Any] = []
    for declared, path in zip(
        model.graph.input, sorted(folder.glob("input_*.pb"), key=_number), strict=False
    ):
        data = path.read_bytes()
        kind = declared.type.WhichOneof("value")
        if kind == "sequence_type":
            values.append(numpy_helper.to_list(onnx.SequenceProto.FromString(data)))
        elif kind == "optional_type":
            values.append(numpy_helper.to_optional(onnx.OptionalProto.FromString(data)))
        else:
            values.append(TensorProto.FromString(data))
    return values


def _number(path: Path) -> int:
    return int(path.stem.rpartition("_")[2])


def _feed(value: Any) -> Any:
    if isinstance(value, TensorProto):
        value = numpy_helper.to_array(value)
    if isinstance(value, list) or value is None:
        return value
    return np.asarray(value)


# -- one model
# --------------------------------------------------------------------------------------


def run_float(case: Case) -> Row | None:
    """Nothing if onnxruntime runs the float model on its input, else the reason."""
    return _float_outputs(case)[0]


def _float_outputs(case: Case) -> tuple[Row | None, list[Any]]:
    """The reason why the float model does not run, or nothing and its outputs."""
    try:
        return None, _run(case.model, case.feeds)
    except Exception as error:  # onnxruntime raises several unrelated types
        return Row(case.name, "not run in float", *_described(error)), []


def check(case: Case, config: Config) -> Row:
    """Quantize a model on its own input, and compare what comes out with the float model."""
    from quark_onnx import QConfig, QuarkError, quantize

    config = QConfig.of(config).with_(
        keep_existing=True
    )  # among the models are those of QuantizeLinear itself
    unfit, expected = _float_outputs(case)
    started = time.perf_counter()
    try:
        result = quantize(case.model, [case.feeds], config)
        seconds = time.perf_counter() - started
        if unfit:
            return unfit
        _check_protobuf(case.model, result.model)
        _compare_interfaces(case.model, result.model)
        found = _run(result.model, case.feeds)
        _compare_outputs(expected, found)
    except Exception as error:  # every failure is a row
        if unfit and isinstance(error, QuarkError):
            return unfit
        return Row(
            case.name, "fail", *_described(error), seconds=time.perf_counter() - started
        )
    random = {output.name for output in result.report.outputs if output.random}
    steady = [value.name not in random for value in case.model.graph.output]
    errors = [
        _sqnr(a, b)
        for a, b, counts in zip(expected, found, steady, strict=True)
        if counts
    ]
    sqnr = min((error for error in errors if error is not None), default=None)
    return Row(
        case.name, "pass", quantized=result.report.quantized, sqnr=sqnr, seconds=seconds
    )


def _check_protobuf(before: ModelProto, after: ModelProto) -> None:
    """The full check, where the float model passes it: of some models onnx cannot infer the shapes."""  # noqa: E501
    try:
        onnx.checker.check_model(before, full_check=True)
    except Exception:  # the checker and shape inference raise unrelated types
        onnx.checker.check_model(after)
    else:
        onnx.checker.check_model(after, full_check=True)


def _run(model: ModelProto, feeds: Feeds) -> list[Any]:
    values: list[Any] = open_session(model, threads=1).run(None, feeds)
    return values


def _compare_interfaces(before: ModelProto, after: ModelProto) -> None:
    """Names, types and declared shapes, in their order.

    An initializer listed as an input is nobody's input.
    """
    for part in ("input", "output"):
        old, new = _values(before, part), _values(after, part)
        if [value.name for value in old] != [value.name for value in new]:
            raise Mismatch(
                f"{part} names {[v.name for v in old]} became {[v.name for v in new]}"
            )
        for a, b in zip(old, new, strict=True):
            if a.type != b.type:
                raise Mismatch(
                    f"declared type of {part} changed: {str(a.type).split()} became"
                    f" {str(b.type).split()}"
                )


def _values(model: ModelProto, part: str) -> list[ValueInfoProto]:
    """The inputs or outputs.

    Up to IR version 3 every initializer stands among the inputs, although nobody feeds it.
    """
    values = list(getattr(model.graph, part))
    constants = {tensor.name for tensor in model.graph.initializer}
    if part == "output" or model.ir_version >= 4:
        return values
    return [value for value in values if value.name not in constants]


def _compare_outputs(expected: Any, found: Any) -> None:
    """Types and shapes of what came out, inside sequences too."""
    if type(expected) is not type(found):
        raise Mismatch(
            f"an output was {type(expected).__name__} and became {type(found).__name__}"
        )
    if isinstance(expected, np.ndarray):
        if expected.dtype != found.dtype or expected.shape != found.shape:
            raise Mismatch(
                f"an output was {expected.dtype}{expected.shape} and became"
                f" {found.dtype}{found.shape}"
            )
    elif isinstance(expected, list):
        if len(expected) != len(found):
            raise Mismatch(
                f"an output had {len(expected)} elements and has {len(found)}"
            )
        for a, b in zip(expected, found, strict=True):
            _compare_outputs(a, b)


def _sqnr(expected: Any, found: Any) -> float | None:
    from quark_onnx.report.measure import decibels

    if (
        not isinstance(expected, np.ndarray)
        or expected.dtype.kind != "f"
        or not expected.size
    ):
        return None
    a, b = expected.astype(np.float64), found.astype(np.float64)
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    with np.errstate(all="ignore"):
        error = np.where(same, 0.0, a - b)
        signal = np.where(np.isfinite(a), a, 0.0)
    return decibels(
        float(np.sum(signal**2)), float(np.sum(np.nan_to_num(error, nan=np.inf) ** 2))
    )


def _described(error: BaseException) -> tuple[str, str]:
    text = str(error).strip()
    return type(error).__name__, text.splitlines()[0][:300] if text else ""


# -- all models, in worker processes
# ---------------------------------------------------------------------------------


def run_all(
    config: Config = "A8W8",
    *,
    workers: int | None = None,
    only: str = "",
    part: tuple[int, int] = (0, 1),
) -> list[Row]:
    """A row for each model whose name contains ``only``, in the order of the names.

    ``part`` (i, n) is every n-th.
    """
    cases, count = load_cases(), workers or os.cpu_count() or 1
    names = [name for name in cases if only in name][part[0] :: part[1]]
    with TemporaryDirectory() as folder, ThreadPoolExecutor(count) as lanes:
        file = Path(folder) / "cases"
        file.write_bytes(pickle.dumps({name: cases[name] for name in names}))
        rows = lanes.map(
            lambda lane: _lane(names[lane::count], config, file), range(count)
        )
        return sorted((row for part in rows for row in part), key=lambda row: row.model)


def _lane(names: Sequence[str], config: Config, file: Path) -> list[Row]:
    """The rows of some models, from a worker process that is replaced when it is lost."""
    rows, pool = [], _worker(file)
    try:
        for name in names:
            try:
                rows.append(pool.submit(_guarded, check, name, config).result())
                continue
            except BrokenProcessPool:
                pool = _worker(file)
            try:  # was it the quantizer, or does the float model do that too?
                row = pool.submit(_guarded, run_float, name).result()
                rows.append(
                    row
                    or Row(
                        name,
                        "fail",
                        "Crash",
                        f"native crash, or no end after {TIMEOUT:g} s",
                    )
                )
            except BrokenProcessPool:
                rows.append(
                    Row(
                        name,
                        "not run in float",
                        "Crash",
                        f"native crash, or no end after {TIMEOUT:g} s",
                    )
                )
                pool = _worker(file)
    finally:
        pool.shutdown()
    return rows


def _worker(file: Path) -> ProcessPoolExecutor:
    return ProcessPoolExecutor(
        1, get_context("spawn"), initializer=_load, initargs=(file,)
    )


_CASES: dict[str, Any] = {}


def _load(file: Path) -> None:
    warnings.simplefilter("ignore")
    _CASES.update(pickle.loads(file.read_bytes()))


def _guarded(function: Callable[..., Any], name: str, *arguments: Any) -> Any:
    """In a worker: call the function on a model.

    The worker ends itself when that takes too long.
    """
    with open(os.devnull, "w") as nowhere:  # noqa: PTH123
        faulthandler.dump_traceback_later(TIMEOUT, exit=True, file=nowhere)
        try:
            return function(open_case(name, _CASES[name]), *arguments)
        finally:
            faulthandler.cancel_dump_traceback_later()


# -- the table
# --------------------------------------------------------------------------------------


def table(rows: Sequence[Row], config: str) -> str:
    """Counts, and the reasons with the models that have them."""
    counts = Counter(row.status for row in rows)
    touched, seconds = (
        sum(row.quantized > 0 for row in rows),
        sum(row.seconds for row in rows),
    )
    lines = [
        f"{config}: {counts['pass']} of {counts['pass'] + counts['fail']} models pass,"
        f" {touched} with quantized nodes, quantized in {seconds:.0f} s;"
        f" {counts['not run in float']} of {len(rows)} are not run in float by"
        " onnxruntime"
    ]
    for status in ("not run in float", "fail"):
        reasons = Counter(row.reason for row in rows if row.status == status)
        lines += [f"{status}:"] if reasons else []
        lines += [f"  {count:5d}  {reason}" for reason, count in reasons.most_common()]
    lines += [
        f"    {row.model}: {row.reason}: {row.detail}"
        for row in rows
        if row.status == "fail"
    ]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--config",
        default="A8W8",
        help="a preset, as A8W8, XINT8, INT4, DYNAMIC, BF16, MXFP8E4M3",
    )
    parser.add_argument("--only", default="", help="models whose name contains this")
    parser.add_argument("--workers", type=int, help="worker processes")
    parser.add_argument(
        "--below",
        type=float,
        help="also list the models whose worst output has less SQNR, in dB",
    )
    arguments = parser.parse_args()
    rows = run_all(arguments.config, workers=arguments.workers, only=arguments.only)
    print(table(rows, arguments.config))
    if arguments.below is not None:
        worst = sorted(
            (row.sqnr, row.model)
            for row in rows
            if row.sqnr is not None and row.sqnr < arguments.below
        )
        print(f"{len(worst)} models below {arguments.below:g} dB:")
        print("\n".join(f"  {sqnr:8.2f}  {model}" for sqnr, model in worst))
    return int(any(row.status == "fail" for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
