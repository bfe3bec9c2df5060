"""Files that mean harm, given to the command line: one short line that a terminal shows as it is,
and exit code 2.
"""

from __future__ import annotations

import json
from pathlib import Path

import onnx
import pytest
from onnx import ModelProto

from quark_onnx import quantize
from tests.models import residual, samples
from tests.quark_onnx.cli.conftest import CommandLine

#: It would recolour the terminal, set its title, turn what follows around, and begin another line.
NAME = "a\x1b[31m\x1b]0;title\x07\u202eb\rc\nd"
SHOWN = r"a\x1b[31m\x1b]0;title\x07\u202eb\rc\nd"


def renamed() -> ModelProto:
    """A model with such names: of every node, tensor, weight, input, output and dimension."""
    model = residual()
    graph = model.graph
    for node in graph.node:
        node.name = f"{NAME}{node.name}"
        for names in (node.input, node.output):
            names[:] = [name and NAME + name for name in names]
    for value in (*graph.input, *graph.output, *graph.initializer, *graph.value_info):
        value.name = NAME + value.name
    for value in (*graph.input, *graph.output):
        for size in value.type.tensor_type.shape.dim:
            if size.dim_param:
                size.dim_param = NAME + size.dim_param
    graph.name = NAME
    return model


COMMANDS = {
    "quantize": "quantize m.onnx -o q.onnx --random-data --verbose",
    "weights": "quantize m.onnx -o q.onnx --preset W8",
    "gate": "quantize m.onnx -o q.onnx --random-data --min-sqnr 200",
    "explain": "explain m.onnx",
    "compare": "compare m.onnx int8.onnx --random-data",
    "missing": "compare m.onnx other.onnx --random-data",
    "analyze": "analyze m.onnx int8.onnx --random-data --top 20",
    "check": "npu check m.onnx",
    "preflight": "npu preflight m.onnx",
    "legalize": "npu legalize m.onnx -o l.onnx",
    "damaged": "explain broken.onnx",
    "excluded": "quantize m.onnx -o q.onnx --random-data --verbose --exclude *conv*",
    "kept": "quantize m.onnx -o q.onnx --random-data --verbose --op-types Add",
    "dynamic": "quantize m.onnx -o q.onnx --dynamic --verbose",
    "optimized": "quantize m.onnx -o q.onnx --random-data --optimize cle adaround -v",
    "mixed": "quantize m.onnx -o q.onnx --random-data --auto-mixed 60 --verbose",
    "accuracy": "quantize m.onnx -o q.onnx --random-data 8 --accuracy 20dB --verbose",
    "calibrate": "calibrate m.onnx -o r.json --random-data",
    "search": "search m.onnx --random-data 4 --preset A8W8 --calibrator none --trials 1",
    "float16": "convert m.onnx -o c.onnx --to float16 opset --opset 21",
    "shapes": "convert m.onnx -o c.onnx --to fixed-shapes",
    "fixed": "npu check int8.onnx --fix f.onnx",
    "cut": "npu cut m.onnx -o a.onnx b.onnx",
    "deploy": "npu deploy m.onnx -o bundle --random-data 2 --min-sqnr 0",
    "reported": "npu preflight m.onnx --ep-report report.json",
    "pattern": "quantize m.onnx -o q.onnx --random-data --exclude no-such-node",
    "shape": "convert m.onnx -o c.onnx --to fixed-shapes --shape none=1,3,8,8",
    "files": "compare file.onnx file.onnx --random-data 2",
    "refused": "quantize unknown.onnx -o q.onnx --random-data",
}


@pytest.mark.parametrize("command", COMMANDS)
def test_names_are_shown_as_text(cli: CommandLine, folder: Path, command: str) -> None:
    """Of whatever a name is, and whoever mentions it: a report, an error, or onnxruntime in an
    error of ours.
    """
    model = renamed()
    onnx.save(model, folder / "m.onnx")
    onnx.save(quantize(model, samples(model), "A8W8").model, folder / "int8.onnx")
    onnx.save(residual(), folder / "other.onnx")
    model.graph.node[2].op_type = NAME
    onnx.save(model, folder / "unknown.onnx")
    model.graph.node[2].op_type = ""
    onnx.save(model, folder / "broken.onnx")
    rows = [{"output": [NAME + "c"], "device": NAME}]
    (folder / "report.json").write_text(
        json.dumps({"deviceStat": [], "nodeStat": rows}), encoding="utf-8"
    )
    file = folder / f"{NAME.replace('/', '')}.onnx"
    file.write_bytes((folder / "other.onnx").read_bytes())
    words = COMMANDS[command].split()
    found = cli(*(file if word == "file.onnx" else word for word in words))
    assert found.code in (0, 1, 2)
    for text in (found.out, found.err):
        assert all(each.isprintable() or each == "\n" for each in text)
        assert "\nd" not in text
    # Spaces in the place of line ends would hide what a name is.
    assert "rc d" not in found.out + found.err
    if command in ("damaged", "refused"):
        assert SHOWN[:9] in found.error and found.code == 2


def test_a_line_end_in_a_name_breaks_no_table(cli: CommandLine, folder: Path) -> None:
    model = renamed()
    onnx.save(model, folder / "m.onnx")
    onnx.save(quantize(model, samples(model), "A8W8").model, folder / "int8.onnx")
    found = cli("analyze", "m.onnx", "int8.onnx", "--random-data", "--top", "20")
    assert found.code == 0 and SHOWN in found.out


def test_error_lines_are_short(cli: CommandLine, folder: Path) -> None:
    """Whatever a file puts into them."""
    model = residual()
    model.graph.node[0].op_type = "x" * 100_000
    onnx.save(model, folder / "m.onnx")
    found = cli("quantize", "m.onnx", "-o", "q.onnx", "--random-data")
    assert found.code == 2 and 500 < len(found.error) <= 850
    whole = cli("quantize", "m.onnx", "-o", "q.onnx", "--random-data", "--json")
    assert len(whole.json["error"]["message"]) > 100_000
    # A list of names shows the first ones.
    model = residual()
    for place in range(300):
        model.graph.node.add(op_type="Relu", input=["x"], output=[f"u{place}"])
        model.graph.node[-1].name = f"unused{place}"
    onnx.save(model, folder / "m.onnx")
    found = cli("npu", "cut", "m.onnx", "-o", "a.onnx", "b.onnx", "--at", "none")
    assert found.code == 2 and len(found.error) <= 850


def test_pages_show_names_as_text(cli: CommandLine, folder: Path) -> None:
    """Invisible characters, and those that turn the text around, are escaped in HTML, too."""
    model = renamed()
    onnx.save(model, folder / "m.onnx")
    onnx.save(quantize(model, samples(model), "A8W8").model, folder / "int8.onnx")
    for command in ("analyze m.onnx int8.onnx --random-data", "npu preflight m.onnx"):
        assert cli(*command.split(), "--html", "p.html").code == 0
        page = (folder / "p.html").read_text(encoding="utf-8")
        assert "\u202e" not in page and "\x1b" not in page
        # The forecast names the nodes off the processor alone.
        assert r"\u202e" in page or "npu" in command


def test_aliases_that_make_much_of_little(cli: CommandLine, folder: Path) -> None:
    """800 bytes of YAML stand for billions of values; one that holds itself, for no end of them."""
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 10)]
    for text in ("\n".join(lines), "exclude: &a [*a]", "preset: &a {b: *a}"):
        (folder / "c.yaml").write_text(text, encoding="utf-8")
        found = cli("explain", "model.onnx", "--config", "c.yaml")
        assert (
            found.code == 2
            and "its aliases stand for more than 100,000 values" in found.error
        )
        assert len(found.error) < 300
    (folder / "c.yaml").write_text(
        "exclude: &a ['first']\nop_types: [Conv, Gemm]\nnodes: *a\n", encoding="utf-8"
    )
    assert cli("explain", "model.onnx", "--config", "c.yaml").code == 0


@pytest.mark.parametrize(
    "text",
    ["preset: [{0}]", "overrides: {{a: [{0}]}}", "{{a: [{0}]}}", "calibrator: [{0}]"],
)
def test_values_in_errors_are_short(cli: CommandLine, folder: Path, text: str) -> None:
    (folder / "c.yaml").write_text(
        text.format(", ".join(["'" + "x" * 100 + "'"] * 900)), encoding="utf-8"
    )
    found = cli("explain", "model.onnx", "--config", "c.yaml")
    assert found.code == 2 and len(found.error) < 600


@pytest.mark.skipif(
    not Path("/dev/zero").exists(), reason="there is no device that never ends"
)
@pytest.mark.parametrize(
    "command",
    [
        "explain /dev/zero",
        "quantize /dev/zero -o q.onnx --preset W8",
        "compare model.onnx /dev/zero --random-data",
        "explain model.onnx --config endless.yaml",
        "npu preflight model.onnx --ep-report /dev/zero",
        "quantize model.onnx -o q.onnx --data endless.npz",
        "quantize model.onnx -o q.onnx --data endless.png --image-size 8 8",
    ],
)
def test_a_device_that_never_ends(cli: CommandLine, folder: Path, command: str) -> None:
    """Models, data and settings are regular files."""
    for name in ("endless.yaml", "endless.npz", "endless.png"):
        (folder / name).symlink_to("/dev/zero")
    found = cli(*command.split())
    assert found.code == 2
    assert (
        sorted(path.name for path in folder.iterdir() if path.name.startswith("q"))
        == []
    )
