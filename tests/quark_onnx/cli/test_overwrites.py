"""No output of a command replaces one of its inputs, or another of its outputs.

The commands, their inputs and their outputs are read from the parser: a new option is covered.
"""

from __future__ import annotations

import argparse
import os
from itertools import combinations
from pathlib import Path
from typing import Any

import onnx
import pytest

from quark_onnx import calibrate, quantize, quantize_static
from quark_onnx.analysis import quantize_to_accuracy
from quark_onnx.cli import parsing
from quark_onnx.cli.data import batch_axis
from quark_onnx.cli.dispatch import build_parser
from quark_onnx.cli.parsing import InputPath, OutputPath, Parser
from quark_onnx.cli.workers import parse_workers
from quark_onnx.common.errors import ConfigError
from quark_onnx.files import overwrites
from quark_onnx.files.overwrites import Input, Output, refuse_overwrites
from tests.quark_onnx.cli.conftest import CommandLine


def parsers() -> dict[str, Parser]:
    """Every command and action by its words."""
    every = dict(build_parser()[1])
    for name in ("npu", "llm"):
        (actions,) = [
            each for each in every.pop(name).arguments if each.dest == "action"
        ]
        assert isinstance(actions.choices, dict)
        every |= {f"{name} {action}": each for action, each in actions.choices.items()}
    return every


PARSERS = parsers()

#: Names of values that are no paths.
WORDS = {
    "FORM",
    "FORMAT",
    "GLOB",
    "GLOB=SCHEME",
    "KEY=VALUE",
    "LOSS%|DB",
    "NAME",
    "NAME[+NAME ...]",
    "NAME[:SETTING=VALUE,...]",
    "PATTERN",
    "SCHEME",
    "SCHEME[+SCHEME...]",
    "TENSOR",
    "TYPE",
    "TENSOR=NAME[:SETTING=VALUE,...]",
    "VERSION",
    "WHAT",
    "A,B",
}
#: Parsers of values that are no paths.
PARSED = {
    *(parsing.count, parsing.number, parsing.duration, parsing.dimension),
    *(parsing.shape, parsing.image_size, batch_axis, parse_workers, int),
}


@pytest.mark.parametrize("command", PARSERS)
def test_every_path_is_declared_as_an_input_or_an_output(command: str) -> None:
    """An option takes a choice, a value of a kind that is no path, or a declared path."""
    for action in PARSERS[command].arguments:
        declared = (
            action.nargs == 0
            or action.choices is not None
            or isinstance(action.type, InputPath | OutputPath)
            or action.type in PARSED
            or str(action.metavar) in WORDS
        )
        assert declared, f"{command} {action.dest}: declare its type as in cli/parsing"


def paths(kind: type[Any]) -> dict[str, list[argparse.Action]]:
    return {
        command: [
            action for action in parser.arguments if isinstance(action.type, kind)
        ]
        for command, parser in PARSERS.items()
    }


INPUTS, OUTPUTS = paths(InputPath), paths(OutputPath)
PAIRS = [
    (command, read.dest, written.dest)
    for command in PARSERS
    for read in INPUTS[command]
    for written in OUTPUTS[command]
]
TWO_OUTPUTS = [
    (command, first.dest, second.dest)
    for command in PARSERS
    for first, second in combinations(OUTPUTS[command], 2)
    # Folders of unfinished work receive files of names of their own, and may be one.
    if not (first.type.files and second.type.files)  # type: ignore[union-attr]
    and not any("*" in name for name in (*first.type.files, *second.type.files))  # type: ignore[union-attr]
]


def named(command: str, destination: str) -> argparse.Action:
    parser = PARSERS[command]
    return next(
        each
        for each in parser.with_destination(destination)
        if isinstance(each.type, InputPath | OutputPath)
    )


def words(command: str, values: dict[str, Path]) -> list[str]:
    """A command line with the given paths, and something for whatever else it requires."""
    line = command.split()
    options, positional = list[str](), list[str]()
    for place, action in enumerate(PARSERS[command].arguments):
        path = values.get(action.dest)
        if path is not None and not isinstance(action.type, InputPath | OutputPath):
            path = None
        if path is None and not action.required:
            continue
        number = action.nargs if isinstance(action.nargs, int) else 1
        if path is None and action.choices is not None:
            texts = [next(iter(action.choices))]
        elif path is None and isinstance(action.type, InputPath | OutputPath):
            texts = [f"unused{place}-{index}" for index in range(number)]
        elif path is None:
            texts = ["4"]
        else:
            # Two paths: the other one is a file of its own.
            texts = [str(path), *(f"another{index}" for index in range(1, number))]
        if action.option_strings:
            options += [action.option_strings[-1], *texts]
        else:
            positional += texts
    return [*line, *positional, *options]


def suffix_of(action: argparse.Action) -> str:
    return {"json": ".json", "html": ".html"}.get(action.dest, ".onnx")


def content(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


@pytest.mark.parametrize(("command", "read", "written"), PAIRS)
def test_an_output_is_no_input(
    cli: CommandLine, folder: Path, command: str, read: str, written: str
) -> None:
    """Not the file itself, a link to it, a file in a folder that is read, or its folder."""
    output = named(command, written)
    assert isinstance(output.type, OutputPath)
    source = folder / "source"
    source.mkdir()
    cases = list[tuple[Path, Path]]()
    if output.type.replaced:
        (source / "inner").write_bytes(b"input")
        cases += [(source, source), (source / "inner", source)]
    elif output.type.files:
        file = source / output.type.files[0].replace("*", "x")
        file.write_bytes(b"input")
        cases.append((source, source))
        if "*" not in output.type.files[0]:
            cases.append((file, source))
    else:
        file = folder / f"file{suffix_of(output)}"
        file.write_bytes(b"input")
        hard = folder / f"hard{suffix_of(output)}"
        hard.hardlink_to(file)
        soft = folder / f"soft{suffix_of(output)}"
        soft.symlink_to(file)
        cases += [(file, file), (file, hard), (file, soft), (soft, file)]
    before = content(folder)
    for given, target in cases:
        found = cli(*words(command, {read: given, written: target}))
        assert found.code == 2 and "unknown" not in found.error
        for action in (named(command, read), output):
            name = max([*action.option_strings, ""], key=len) or str(action.metavar)
            assert name in found.error, (found.error, given, target)
        assert any(
            phrase in found.error
            for phrase in ("never overwritten", "would change the files", "replaced")
        )
    assert content(folder) == before


@pytest.mark.parametrize(("command", "first", "second"), TWO_OUTPUTS)
def test_two_outputs_are_two_files(
    cli: CommandLine, folder: Path, command: str, first: str, second: str
) -> None:
    """Not one file by two names, nor a file in a folder that another output replaces."""
    result = folder / "result"
    result.mkdir()
    values = dict[str, Path]()
    # The folders first: the file is one of those that they receive.
    names = sorted((first, second), key=lambda name: not receives(command, name))
    for name in names:
        kind = named(command, name).type
        assert isinstance(kind, OutputPath)
        if kind.replaced or kind.files:
            values[name] = result
            for inside in kind.files[:1]:
                (result / inside).write_bytes(b"earlier")
            continue
        values[name] = result / f"file{suffix_of(named(command, name))}"
        earlier = list(result.iterdir())
        if not earlier:
            values[name].write_bytes(b"earlier")
        elif not values[name].exists():
            values[name].hardlink_to(earlier[0])
    found = cli(*words(command, values))
    assert found.code == 2
    assert "are the same file" in found.error or "lies in" in found.error


def receives(command: str, name: str) -> bool:
    """Whether an output is a folder."""
    kind = named(command, name).type
    return isinstance(kind, OutputPath) and (kind.replaced or bool(kind.files))


COMMANDS = {
    "calibrate": "calibrate model.onnx -o d.npz --data d.npz",
    "another model": "compare model.onnx other.onnx --random-data --json o.json",
    "ranges": "quantize model.onnx -o q.onnx --ranges r.json --json r.json",
    "labels": "compare model.onnx other.onnx --data data --labels r.json --json r.json",
    "report": "npu preflight model.onnx --ep-report r.json --json r.json",
    "checkpoint": "llm ptq hf -o q --scheme fp8 --json hf/config.json",
    "hub cache": "llm ptq hf -o q --scheme fp8 --json blob.json",
    "weights": "npu check model.onnx --fix weights.onnx",
    "data folder": "calibrate model.onnx -o data/0.npz --data data",
    "preset": "search model.onnx --random-data --preset r.json --html r.html -o q.onnx",
    "two models": "npu cut model.onnx -o q.onnx ./q.onnx",
    "bundle": "npu deploy bundle/model.onnx -o bundle --random-data",
}


@pytest.mark.parametrize("name", COMMANDS)
def test_commands_that_replaced_an_input(
    cli: CommandLine, folder: Path, name: str
) -> None:
    """Earlier, each command exited with 0 or after the work, and had replaced its input."""
    weights = onnx.load("model.onnx")
    onnx.save(
        weights,
        "model.onnx",
        save_as_external_data=True,
        location="weights.onnx",
        size_threshold=0,
    )
    for file in ("other.onnx", "d.npz", "r.json", "hf/config.json", "hf/model.bin"):
        Path(file).parent.mkdir(exist_ok=True)
        Path(file).write_bytes(b"input")
    Path("bundle").mkdir()
    Path("bundle/model.onnx").write_bytes(b"input")
    Path("blob.json").write_bytes(b"input")
    Path("hf/generation_config.json").symlink_to(Path("blob.json").absolute())
    Path("r.html").hardlink_to("r.json")
    Path("o.json").symlink_to("other.onnx")
    before = content(folder)
    found = cli(*COMMANDS[name].split())
    assert found.code == 2 and content(folder) == before


def test_outputs_beside_inputs_are_no_fault(cli: CommandLine, folder: Path) -> None:
    """In the folder of the model or of the samples, again and again, and through links."""
    Path("data/link.onnx").symlink_to("real.onnx")
    for output in ("data/q.onnx", "q.onnx", "data/link.onnx"):
        for _ in range(2):
            command = f"quantize model.onnx -o {output} --data data --json data/r.json"
            assert cli(*command.split()).code == 0
    assert Path("data/link.onnx").is_symlink()
    onnx.load("data/real.onnx")


@pytest.mark.parametrize(
    ("command", "link", "target"),
    [
        ("quantize model.onnx -o link.onnx --preset W8", "link.onnx", "real.onnx"),
        ("npu legalize model.onnx -o link.onnx", "link.onnx", "real.onnx"),
        ("npu cut model.onnx -o link.onnx b.onnx --at c", "link.onnx", "real.onnx"),
        ("calibrate model.onnx -o link --data data", "link", "real"),
        ("explain model.onnx --json link.json", "link.json", "real.json"),
        ("npu preflight model.onnx --html link.html", "link.html", "real.html"),
        ("npu deploy model.onnx -o link --random-data 2 --min-sqnr 0", "link", "real"),
    ],
)
def test_a_link_stays_and_its_file_is_written(
    cli: CommandLine, folder: Path, command: str, link: str, target: str
) -> None:
    """As by every other program; the rename that replaces a file would replace the link."""
    (folder / "elsewhere").mkdir()
    Path(link).symlink_to(folder / "elsewhere" / target)
    for _ in range(2):
        assert cli(*command.split()).code == 0
    assert Path(link).is_symlink() and (folder / "elsewhere" / target).exists()


def test_calls_check_their_arguments(folder: Path) -> None:
    """As the command line does, with names of arguments."""
    data = Path("data/0.npz")
    labels = Path("labels.csv")
    labels.write_bytes(b"name,label")
    before = content(folder)
    with pytest.raises(ConfigError, match="is the input data itself"):
        calibrate("model.onnx", data, data)
    with pytest.raises(ConfigError, match=r"output data/1.npz would change the files"):
        calibrate("model.onnx", "data", "data/1.npz")
    with pytest.raises(ConfigError, match="resume data would change the files of data"):
        quantize("model.onnx", "data", resume="data")
    with pytest.raises(ConfigError, match="is the input labels itself"):
        quantize("model.onnx", "data", output=labels, labels=labels)
    with pytest.raises(ConfigError, match="is the input data itself"):
        quantize_static("model.onnx", "data", "A8W8", "data")
    with pytest.raises(ConfigError, match="is the input model itself"):
        quantize_to_accuracy("model.onnx", "data", "1%", "model.onnx")
    assert content(folder) == before


def test_names_that_differ_in_case(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Names of a new file are one where the file system ignores case."""
    outputs = [Output("a", tmp_path / "New.json"), Output("b", tmp_path / "new.json")]
    refuse_overwrites([], outputs)
    monkeypatch.setattr(overwrites, "ignores_case", lambda _: True)
    with pytest.raises(ConfigError, match="a and b are the same file"):
        refuse_overwrites([], outputs)


@pytest.mark.skipif(not Path(os.devnull).is_char_device(), reason="no device files")
def test_a_device_is_no_file(tmp_path: Path) -> None:
    device = Path(os.devnull)
    refuse_overwrites([Input("a", device)], [Output("b", device), Output("c", device)])
