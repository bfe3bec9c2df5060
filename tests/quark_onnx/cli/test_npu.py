"""quark-onnx npu check: findings as text and JSON, and the exit code."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from tests.models import depthwise_layers, normal, parse, weight


def test_a_model_with_errors(cli: Any) -> None:
    finished = cli("npu", "check", "model.onnx", "--target", "stx")
    assert finished.code == 1 and finished.error.endswith("rules of stx")
    lines = finished.out.splitlines()
    assert lines[-1].startswith("verdict   poor: float model for stx: 2 errors, 0 ")
    place = lines.index("error     G3: attributes of convolutions are written out")
    assert (
        lines[place + 1].strip().startswith("first: ") and "strides" in lines[place + 1]
    )
    assert lines[place + 2] == "          fix: quark-onnx npu legalize"
    assert lines[place + 3].startswith("          from: onnxsim")
    place = lines.index("error     G1: shapes are static")
    assert lines[place + 1].strip() == "input 'image' has the shape ['N', 3, 8, 8]"


def test_json(cli: Any) -> None:
    document = cli("npu", "check", "model.onnx", "--json").json
    assert (
        document["command"],
        document["action"],
        document["target"],
        document["kind"],
    ) == (
        "npu",
        "check",
        "npu",
        "float",
    )
    assert (
        document["errors"]
        == sum(each["severity"] == "error" for each in document["findings"])
        > 0
    )
    assert {tuple(each) for each in document["findings"]} == {
        ("rule", "node", "figures", "severity", "title", "source", "sure", "fix")
    }


def test_what_quantize_makes_for_a_target_passes(cli: Any) -> None:
    made = cli(
        "quantize",
        "model.onnx",
        "-o",
        "out.onnx",
        "--preset",
        "XINT8",
        "--target",
        "stx",
        "--random-data",
        "4",
    )
    assert made.code == 0, made.err
    finished = cli("npu", "check", "out.onnx", "--target", "stx")
    assert finished.out == "verdict   good: XINT8 model for stx: 0 errors, 0 warnings\n"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("npu", "check", "nothing.onnx"), "nothing.onnx"),
        (
            ("npu", "check", "model.onnx", "--target", "stz"),
            "unknown target 'stz'; did you mean 'stx'",
        ),
        (("npu", "mend", "model.onnx"), "mend"),
        (("npu",), "check"),
        (
            (
                "quantize",
                "model.onnx",
                "-o",
                "o.onnx",
                "--data",
                "data",
                "--target",
                "pentium",
            ),
            "unknown target 'pentium'",
        ),
    ],
)
def test_bad_input(cli: Any, arguments: tuple[str, ...], words: str) -> None:
    finished = cli(*arguments)
    assert (
        finished.code == 2 and words in finished.err and "Traceback" not in finished.err
    )


def test_a_model_that_passes(cli: Any) -> None:
    onnx.save(parse("g (float[1,2] x) => (float[1,2] y) { y = Relu (x) }"), "relu.onnx")
    finished = cli("npu", "check", "relu.onnx")
    assert (finished.code, finished.err, finished.out) == (
        0,
        "",
        "verdict   good: float model for npu: 0 errors, 0 warnings\n",
    )


def test_legalize_and_check_what_comes_out(cli: Any) -> None:
    finished = cli("npu", "legalize", "model.onnx", "-o", "legal.onnx")
    assert (
        finished.code == 0
        and "input 'image' has the shape [1, 3, 8, 8]" in finished.out
    )
    assert cli("npu", "check", "legal.onnx").code == 0
    document = cli(
        "npu",
        "legalize",
        "model.onnx",
        "-o",
        "legal.onnx",
        "--shape",
        "image=1,3,8,8",
        "--json",
    ).json
    assert document["output"] == "legal.onnx" and any(
        "write_attributes" in note for note in document["notes"]
    )


def test_check_repairs_what_it_can(cli: Any) -> None:
    before = Path("model.onnx").read_bytes()
    finished = cli(
        "npu", "check", "model.onnx", "--target", "stx", "--fix", "repaired.onnx"
    )
    assert finished.code == 0 and "          write_attributes: 1" in finished.out
    assert (
        Path("model.onnx").read_bytes() == before
        and cli("npu", "check", "repaired.onnx").code == 0
    )


def test_preflight(cli: Any) -> None:
    cli("npu", "legalize", "model.onnx", "-o", "legal.onnx")
    finished = cli(
        "npu",
        "preflight",
        "legal.onnx",
        "--target",
        "stx",
        "--preset",
        "A8W8",
        "--html",
        "page.html",
    )
    assert finished.code == 0
    assert "verdict   good: forecast for stx (A8W8, Ryzen AI 1.8): " in finished.out
    assert "What the NPU will run" in Path("page.html").read_text(encoding="utf-8")
    document = cli("npu", "preflight", "legal.onnx", "--target", "stx", "--json").json
    assert document["subgraphs"] >= 1 and 0 < document["share"] <= 1
    assert {
        "node",
        "op_type",
        "device",
        "reason",
        "source",
        "confidence",
        "piece",
    } <= set(document["nodes"][0])


def test_preflight_by_the_recipe_of_deploy(cli: Any) -> None:
    """CLE replaces the Clip, so that the forecast without a recipe is of other nodes."""
    onnx.save(
        parse(
            """g (float[1,3,8,8] x) => (float[1,8,8,8] y) {
                a = Conv <pads = [1,1,1,1]> (x, w) b = Clip (a, l, h) c = Conv (b, v)
                y = Clip (c, l, h) }""",
            w=weight(8, 3, 3, 3),
            v=weight(8, 8, 1, 1, seed=1),
            l=np.array(0.0, np.float32),
            h=np.array(6.0, np.float32),
        ),
        "bounded.onnx",
    )
    plain = cli("npu", "preflight", "bounded.onnx", "--json").json
    chosen = ("--target", "stx", "--recipe", "auto", "--random-data", "8")
    found = cli("npu", "preflight", "bounded.onnx", *chosen, "--json").json
    assert found["recipe"] == "classifier"
    kinds = {node["op_type"] for node in found["legalized"]["nodes"]}
    assert (kinds, {node["op_type"] for node in plain["legalized"]["nodes"]}) == (
        {"Conv", "Relu"},
        {"Conv", "Clip"},
    )
    gate = ("--min-sqnr", "-99", "--advice", "none")
    made = cli("npu", "deploy", "bounded.onnx", "-o", "b", *chosen, *gate, "--json")
    assert made.json["counts"] == found["legalized"]["counts"]
    text = cli("npu", "preflight", "bounded.onnx", *chosen).out
    assert text.startswith("recipe    classifier: 2 convolutions, 0 of them depthwise")
    unfit = cli("npu", "preflight", "bounded.onnx", "--data", "data")
    assert unfit.code == 2 and "image" in unfit.err
    coded = cli("npu", "preflight", "b/model.onnx", "--recipe", "classifier")
    assert coded.code == 2 and "--recipe has no effect" in coded.err
    both = cli("npu", "preflight", "bounded.onnx", *chosen, "--preset", "A8W8")
    assert both.code == 2 and "--recipe and --preset" in both.err


def test_preflight_beside_a_report(cli: Any) -> None:
    Path("report.json").write_text(
        '{"deviceStat": [{"name": "CPU", "nodeNum": 3}]}', encoding="utf-8"
    )
    finished = cli("npu", "preflight", "model.onnx", "--ep-report", "report.json")
    assert (
        finished.code == 0 and "CPU: " in finished.out and "3 reported" in finished.out
    )
    assert cli("npu", "preflight", "model.onnx", "--ep-report", "none.json").code == 2


def test_cut(cli: Any) -> None:
    finished = cli("npu", "cut", "model.onnx", "-o", "first.onnx", "second.onnx")
    assert finished.code in (0, 2) and "Traceback" not in finished.err
    document = cli(
        "npu",
        "cut",
        "model.onnx",
        "-o",
        "first.onnx",
        "second.onnx",
        "--at",
        first_result(),
        "--json",
    ).json
    assert document["verified"] and document["tensors"] == [first_result()]
    assert {"first.onnx", "second.onnx"} <= {path.name for path in Path().iterdir()}


def first_result() -> str:
    return str(onnx.load("model.onnx").graph.node[0].output[0])


def test_deploy(cli: Any) -> None:
    finished = cli(
        "npu",
        "deploy",
        "model.onnx",
        "-o",
        "bundle",
        "--random-data",
        "16",
        "--min-sqnr",
        "0",
    )
    assert finished.code == 0, finished.err
    assert (
        finished.out.startswith("bundle    XINT8 model for stx in ")
        and Path("bundle/model.onnx").is_file()
    )
    chosen = cli(
        "npu",
        "deploy",
        "model.onnx",
        "-o",
        "chosen",
        "--random-data",
        "16",
        "--recipe",
        "auto",
        "--json",
    )
    assert (
        chosen.json["recipe"] == "classifier"
        and "1 convolution," in chosen.json["reason"]
    )
    both = cli(
        "npu",
        "deploy",
        "model.onnx",
        "-o",
        "b",
        "--random-data",
        "4",
        "--recipe",
        "classifier",
        "--preset",
        "A8W8",
    )
    assert (
        both.code == 2
        and "--recipe and --preset" in both.err
        and not Path("b").exists()
    )


@pytest.mark.parametrize("place", ["model.onnx", "report.json", "data"])
def test_a_page_goes_to_html_files_alone(cli: Any, place: str) -> None:
    before = Path("model.onnx").read_bytes()
    finished = cli("npu", "preflight", "model.onnx", "--html", place)
    assert (
        finished.code == 2
        and "is not named *.html" in finished.err
        and Path("model.onnx").read_bytes() == before
    )


def test_deploy_ends_with_the_command_for_fewer_subgraphs(cli: Any) -> None:
    """It replaces the recipe, which names a configuration, too, and it runs."""
    onnx.save(depthwise_layers(), "deep.onnx")
    Path("samples").mkdir()
    for place in range(12):
        np.savez(f"samples/{place}.npz", x=normal(1, 3, 8, 8, seed=place))
    words = ("npu", "deploy", "deep.onnx", "-o", "out", "--data", "samples")
    more = ("--min-sqnr", "-99", "--budget", "100s")
    finished = cli(*words, "--recipe", "classifier", *more)
    assert finished.code == 0, finished.err
    lines = finished.out.splitlines()
    assert sum(line.startswith("verdict ") for line in lines) == 1
    (place,) = [place for place, line in enumerate(lines) if "a better part" in line]
    # Its accuracy was measured, and no other format is proposed besides.
    assert re.match(r"try +[+-]\d+\.\d dB \(", lines[place])
    assert "quantize to A16W8" not in "".join(lines[place - 4 :])
    command = lines[place + 1].strip()
    assert command.startswith("quark-onnx npu deploy deep.onnx")
    assert "--recipe" not in command and command.endswith("--preset A8W8")
    again = cli(*shlex.split(command)[1:], "--overwrite", "--json")
    assert again.code == 0 and again.json["subgraphs"] == 1
    assert again.json["next_steps"] == []


def test_after_bf16_the_command_for_another_format_asks_for_data(cli: Any) -> None:
    """BF16 needs no data, and every other format does."""
    convolution = "kernel_shape = [3,3], pads = [1,1,1,1]"
    model = parse(
        f"""g (float[1,4,8,8] x) => (float[1,4,8,8] y) {{
            a = Conv <{convolution}> (x, w) b = HardSigmoid (a) c = Conv <{convolution}> (b, w)
            d = HardSigmoid (c) e = Conv <{convolution}> (d, w) f = HardSigmoid (e)
            y = Conv <{convolution}> (f, w) }}""",
        w=normal(4, 4, 3, 3),
    )
    onnx.save(model, "gates.onnx")
    finished = cli("npu", "deploy", "gates.onnx", "-o", "out", "--preset", "BF16")
    assert finished.code == 0, finished.err
    command = finished.out.splitlines()[-1].strip()
    assert command.endswith("--preset A8W8 --data PATH")


def test_bf16_is_measured_with_data_and_refused_below_the_gate(cli: Any) -> None:
    onnx.save(gates_of_sigmoid(), "silu.onnx")
    words = ["npu", "deploy", "silu.onnx", "-o", "out", "--preset", "BF16"]
    missed = cli(*words, "--random-data", "4", "--min-sqnr", "90")
    assert missed.code == 1 and "the minimum is 90 dB" in missed.err
    assert not Path("out").exists()
    made = cli(*words, "--random-data", "4", "--advice", "none", "--json")
    assert made.code == 0 and 30 < made.json["worst_sqnr"] < 60
    assert made.json["next_steps"] == []


def test_the_compiler_of_an_option_and_the_preset_of_a_recipe(cli: Any) -> None:
    """What is printed is for X1, and says that the detector's A8W8 is not for it."""
    onnx.save(gates_of_sigmoid(), "silu.onnx")
    words = ["npu", "deploy", "silu.onnx", "-o", "out", "--random-data", "4"]
    options = ["--ep-option", "target=X1", "--recipe", "detector", "--min-sqnr", "-99"]
    made = cli(*words, *options, "--advice", "list")
    assert made.code == 0, made.err
    assert "stx-x1 does not take A8W8, so it is XINT8" in made.out
    assert "(XINT8, Ryzen AI 1.8)" in made.out and "in 1 subgraph" in made.out
    assert "--preset A" not in made.out


def test_legalization_knows_the_format(cli: Any) -> None:
    model = parse(
        """g (float[1,4,8,8] x) => (float[1,4,8,8] y) {
            a = Conv (x, w) b = HardSwish (a) y = Conv (b, w) }""",
        w=normal(4, 4, 1, 1),
    )
    onnx.save(model, "swish.onnx")
    for preset, kept in (("XINT8", True), ("A8W8", False)):
        words = ["-o", f"{preset}.onnx", "--target", "stx", "--preset", preset]
        done = cli("npu", "legalize", "swish.onnx", *words)
        assert done.code == 0, done.err
        kinds = {node.op_type for node in onnx.load(f"{preset}.onnx").graph.node}
        assert ("HardSwish" in kinds) == kept


def gates_of_sigmoid() -> onnx.ModelProto:
    """A SiLU between two convolutions, whose Sigmoid X2 runs on the CPU in XINT8."""
    return parse(
        """g (float[1,3,8,8] x) => (float[1,4,6,6] y) {
            c = Conv <pads = [1,1,1,1]> (x, w) s = Sigmoid (c) m = Mul (c, s) y = Conv (m, v) }""",
        w=normal(8, 3, 3, 3),
        v=normal(4, 8, 3, 3),
    )


def test_a_quantized_model_is_deployed_without_data(cli: Any) -> None:
    onnx.save(depthwise_layers(), "deep.onnx")
    Path("samples").mkdir()
    for place in range(4):
        np.savez(f"samples/{place}.npz", x=normal(1, 3, 8, 8, seed=place))
    words = ("--data", "samples", "--preset", "A8W8", "--target", "stx")
    assert cli("quantize", "deep.onnx", "-o", "codes.onnx", *words).code == 0
    made = cli("npu", "deploy", "codes.onnx", "-o", "out")
    assert made.code == 0, made.err
    assert "unclear: the accuracy was not measured; forecast for stx (A8W8" in made.out
    command = made.out.splitlines()[-1].strip()
    assert command.endswith("--float-model FLOAT.onnx --data PATH")
    command = command.replace("FLOAT", "deep").replace("PATH", "samples --overwrite")
    again = cli(*shlex.split(command)[1:], "--json")
    assert again.code == 0 and again.json["worst_sqnr"] > 20
    refused = cli("npu", "deploy", "codes.onnx", "-o", "b", "--preset", "A8W8")
    assert refused.code == 2 and "--preset has no effect" in refused.err
    refused = cli("npu", "deploy", "deep.onnx", "-o", "b", "--float-model", "deep.onnx")
    assert refused.code == 2 and "leave out --float-model" in refused.err
    assert not Path("b").exists()
