"""Damaged files beside a model: ranges, labels, reports, configurations and journals.

Whatever is in such a file, the answer is an error of this package that names the file, or a result.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from calibrators import CALIBRATORS, CalibrationError, Grid, create
from quark_onnx import calibrate, npu, quantize
from quark_onnx.common.errors import ConfigError, QuarkError
from quark_onnx.config import QConfig, to_yaml
from quark_onnx.measuring.calibration import Calibration
from quark_onnx.measuring.range_files import FORMATS, load_ranges, save_ranges
from quark_onnx.onnxruntime_spelling import translate_static
from quark_onnx.report.verdict.labels import read_labels
from quark_onnx.search.space import ConfigCombination, Space
from quark_onnx.study.journal import StudyJournal
from quark_onnx.study.record import Record
from tests.models import conv_relu, samples

#: Mutations of each kind of file: 2,200 in total.
COUNT = 220
VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 3, 2**31, 2**63, 10**400, 0.5, -0.0, 1e308),
    *(float("nan"), float("inf"), "", "a", "1", "\n", "\x1b[31m", "é" * 300),
    *([], [0], [[]], [None, "a"], {}, {"a": 0}, {"data": []}, {"shape": [2**40]}),
)
MODEL = conv_relu()


def mutated(data: bytes, draw: random.Random) -> bytes:
    """A file with one to three faults, in its structure where it is JSON, or in its bytes."""
    for _ in range(draw.randint(1, 3)):
        structural = draw.random() < 0.7
        lines = data.split(b"\n")
        place = draw.randrange(len(lines))
        if structural:
            try:
                document = json.loads(data)
            except (ValueError, RecursionError):
                document = None
            if isinstance(document, dict | list):
                change(document, draw)
                data = json.dumps(document).encode()
                continue
            try:
                line = json.loads(lines[place])
            except (ValueError, RecursionError):
                line = None
            if isinstance(line, dict) and line:
                change(line, draw)
                lines[place] = json.dumps(line).encode()
                data = b"\n".join(lines)
                continue
        data = damaged(data, lines, place, draw)
    return data


def change(document: Any, draw: random.Random) -> None:
    """Replace, remove or add a value somewhere in a document."""
    while True:
        keys = list(document) if isinstance(document, dict) else range(len(document))
        if not keys:
            return
        key = draw.choice(list(keys))
        inner = document[key]
        if isinstance(inner, dict | list) and inner and draw.random() < 0.75:
            document = inner
            continue
        action = draw.random()
        if action < 0.15:
            del document[key]
        elif action < 0.3 and isinstance(document, dict):
            document[draw.choice(["a", "data", ""])] = document.pop(key)
        elif action < 0.3:
            document.append(document[key])
        else:
            document[key] = draw.choice(VALUES)
        return


def damaged(data: bytes, lines: list[bytes], place: int, draw: random.Random) -> bytes:
    """Damage bytes or lines."""
    at = draw.randrange(len(data) + 1)
    junk = draw.choice(
        [b"\0", b"\xff", b"'", b'"', b"[", b"{", b",", b":", b"-", b"\r"]
    )
    choices: list[Callable[[], bytes]] = [
        lambda: data[:at],
        lambda: data[:at] + junk + data[at:],
        lambda: data[:at] + junk + data[at + 1 :],
        lambda: data[:at] + b"[" * 100_000,
        lambda: b"[" * 100_000,
        lambda: b'{"a":' * 100_000,
        lambda: b"\n".join(lines[:place] + lines[place + 1 :]),
        lambda: b"\n".join([*lines[:place], lines[place], *lines[place:]]),
        lambda: data[:at] + b"9" * 5000 + data[at:],
    ]
    return draw.choice(choices)()


def ranges_of(kind: str, folder: Path) -> Path:
    path = folder / f"{kind}.ranges"
    calibration = calibrate(MODEL, samples(MODEL))
    save_ranges(calibration, path, kind, create("minmax"))
    return path


def use_ranges(path: Path, draw: random.Random) -> None:
    """Compute the range of every calibrator, and now and then quantize."""
    found = load_ranges(path)
    if isinstance(found, Calibration):
        for key, entry in found.entries():
            for name in CALIBRATORS:
                calibrator = create(name)
                statistic = found.find(key, entry.axis, calibrator.statistic())
                if statistic is not None and statistic.lo.size:
                    calibrator.range(statistic, Grid(0, 255, symmetric=False))
    if draw.random() < 0.2:
        quantize(MODEL, None, "A8W8", ranges=path)


def make_tables(folder: Path) -> Path:
    path = folder / "table.ranges"
    path.write_text("x 1.5\ny 2.5\nc 0.25\n", encoding="utf-8")
    return path


COCO = {
    "categories": [{"id": 1, "name": "a"}, {"id": 3, "name": "b"}],
    "images": [{"id": 7, "file_name": "a.jpg", "width": 64, "height": 32}],
    "annotations": [
        {"image_id": 7, "category_id": 3, "bbox": [1, 2, 3, 4]},
        {"image_id": 7, "category_id": 1, "bbox": [1, 2, 3, 4], "iscrowd": 1},
    ],
}
REPORT = {
    "deviceStat": [{"name": "NPU", "nodeNum": "3"}, {"name": "all", "nodeNum": 4}],
    "nodeStat": [{"output": ["y"], "device": "CPU"}],
    "subgraphStat": [{"device": "DPU", "count": 1}],
}


def json_file(folder: Path, name: str, document: object) -> Path:
    path = folder / name
    path.write_text(json.dumps(document), encoding="utf-8")
    return path


def make_csv(folder: Path) -> Path:
    path = folder / "labels.csv"
    path.write_text('name,label\na.png,1\n"b, c.png",0\n', encoding="utf-8")
    return path


def make_yaml(folder: Path) -> Path:
    path = folder / "config.yaml"
    path.write_text(
        to_yaml(QConfig.of("A8W8").with_(exclude=("first",), optimizers=("cle",))),
        encoding="utf-8",
    )
    return path


def make_journal(folder: Path) -> Path:
    path = folder / "search.journal"
    for _ in range(2):
        run_search(path)
    return path


SPACE = Space(presets=("A8W8", "S8S8"), calibrators=(), optimizers=())


def combination(choices: Mapping[str, str]) -> ConfigCombination:
    return SPACE.combination({axis: choices[axis] for axis in SPACE.axes})


def run_search(path: Path) -> None:
    """Read a journal as a search does, and add a trial."""
    axes = {axis: list(labels) for axis, labels in SPACE.axes.items()}
    # Another space, whose records are looked up by the key of the configuration.
    other = {**axes, "more": ["none", "all"]}
    StudyJournal(path, {"model": "a"}, other, combination).finished()
    journal = StudyJournal(path, {"model": "a"}, axes, combination)
    journal.finished()
    journal.running()
    journal.propose()
    journal.report(1.0, 8)
    journal.keep(Record(1.0, 0.5, 1000))
    journal.finished()


def make_cache(folder: Path) -> Path:
    document = {
        "CLS": "TensorsData",
        "data": {"x": {"CLS": "TensorData", "lowest": -1.0, "highest": 2.0}},
        "calibration_method": {
            "CLS": "CalibrationMethod",
            "value": "CalibrationMethod.MinMax",
        },
        "smooth_quant": False,
    }
    return json_file(folder, "cache.json", document)


def use_cache(path: Path, _: random.Random) -> None:
    """Read it as ``quantize_static`` of onnxruntime does."""
    arguments = (MODEL, str(path.with_suffix(".onnx")), None)
    translate_static(arguments, {"calibration_cache_path": str(path)})


Make = Callable[[Path], Path]
Use = Callable[[Path, random.Random], object]
#: How a sound file of each kind is made and used.
KINDS: dict[str, tuple[Make, Use]] = {
    **{
        kind: (lambda folder, kind=kind: ranges_of(kind, folder), use_ranges)
        for kind in FORMATS
    },
    "table": (make_tables, use_ranges),
    "labels.json": (
        lambda folder: json_file(folder, "labels.json", COCO),
        lambda path, _: read_labels(path),
    ),
    "labels.csv": (make_csv, lambda path, _: read_labels(path)),
    "report": (
        lambda folder: json_file(folder, "report.json", REPORT),
        lambda path, _: npu.read_report(path),
    ),
    "config": (make_yaml, lambda path, _: QConfig.of(path)),
    "journal": (make_journal, lambda path, _: run_search(path)),
    "cache": (make_cache, use_cache),
}


@pytest.mark.parametrize("kind", KINDS)
def test_damage_is_an_error_that_names_the_file(kind: str, tmp_path: Path) -> None:
    """No mutation of any kind of file is an internal error."""
    make, use = KINDS[kind]
    path = make(tmp_path)
    sound = path.read_bytes()
    use(path, random.Random(0))
    refused = 0
    for seed in range(COUNT):
        draw = random.Random(f"{kind} {seed}")
        path.write_bytes(mutated(sound, draw))
        try:
            use(path, draw)
        except (QuarkError, CalibrationError) as error:
            refused += 1
            text = str(error)
            # Ranges that were read may lack what the model needs, or not belong to it.
            assert path.name in text or "ranges" in text, (seed, text)
            assert len(text) < 1000, (seed, text)
        except Exception as error:
            raise AssertionError(f"mutation {seed}: {error!r}") from error
    assert refused > COUNT / 4


def test_messages_name_the_place_and_the_remedy(tmp_path: Path) -> None:
    """The key or the line, what was found, what it must be, and what to do."""
    path = ranges_of("quark", tmp_path)
    document = json.loads(path.read_text(encoding="utf-8"))
    statistic = document["tensors"][0]["statistics"][0]
    for change_, words in (
        (
            {"positive": [0]},
            r"tensors\[0\].statistics\[0\].positive\[0\] is 0, and must",
        ),
        ({"hi": 1}, r"statistics\[0\].hi is 1, and must be an object"),
        ({"exponent": "a"}, r"statistics\[0\].exponent is 'a', and must be an object"),
    ):
        document["tensors"][0]["statistics"][0] = {**statistic, **change_}
        path.write_text(json.dumps(document), encoding="utf-8")
        with pytest.raises(
            ConfigError, match=rf"quark.ranges: {words}|{words}"
        ) as found:
            load_ranges(path)
        assert "write it anew with quark-onnx calibrate" in str(found.value)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        ({"op_code": 99}, "op_code is 99, and must be a whole number from 0 to 10"),
        ({"trial_id": None}, "trial_id is None, and must be a whole number"),
    ],
)
def test_a_line_of_a_journal_is_named(
    tmp_path: Path, damage: dict[str, Any], words: str
) -> None:
    path = make_journal(tmp_path)
    lines = path.read_text(encoding="utf-8").splitlines()
    place = next(place for place, line in enumerate(lines) if '"op_code":5' in line)
    lines[place] = json.dumps({**json.loads(lines[place]), **damage})
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=f"journal, line {place + 1}: {words}"):
        run_search(path)


@pytest.mark.parametrize("code", [5, 8])
def test_a_trial_without_a_parameter_or_a_name_is_named(
    tmp_path: Path, code: int
) -> None:
    """A line that is gone leaves a trial without a choice, a key or a record."""
    path = make_journal(tmp_path)
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    for place, line in enumerate(lines):
        if f'"op_code":{code}' in line:
            path.write_text("".join(lines[:place] + lines[place + 1 :]), "utf-8")
            try:
                run_search(path)
            except ConfigError as error:
                assert "trial " in str(error) and "without the key" in str(error)
