"""quark-onnx quantize: what it writes, prints and refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from quark_onnx import AutoMixedPrecision, QConfig, api
from quark_onnx.config import from_dict
from tests.models import kinds, only_integers, parse, weight

MODEL = ("quantize", "model.onnx", "-o", "out.onnx", "--data", "data")


@pytest.fixture
def config_of(cli: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The QConfig that arguments end up as."""

    def run(*arguments: object) -> QConfig:
        finished = cli(*MODEL, "--json", *arguments)
        assert finished.code == 0, finished.err
        return from_dict(finished.json["config"])

    return run


def test_report_and_model(cli: Any) -> None:
    finished = cli(*MODEL)
    assert (finished.code, finished.err) == (0, "")
    assert "model.onnx -> out.onnx" in finished.out
    assert "activation: uint8 asymmetric" in finished.out
    assert "quantized 5 of 5 nodes" in finished.out
    (row,) = [
        line for line in finished.out.splitlines() if line.startswith("  scores ")
    ]
    assert float(row.split()[1]) > 20
    assert "DequantizeLinear" in kinds(onnx.load("out.onnx"))


def test_the_verdict_can_be_left_out(cli: Any) -> None:
    cli(*MODEL)
    judged = Path("out.onnx").read_bytes()
    finished = cli(*MODEL, "--overwrite", "--no-verdict", "--json")
    assert finished.code == 0
    assert finished.json["verdict"] is None and finished.json["worst_sqnr"] > 20
    assert Path("out.onnx").read_bytes() == judged


@pytest.mark.images
def test_json_is_all_there_is_on_stdout(cli: Any) -> None:
    document = cli(*MODEL, "--json").json
    assert list(document) == [
        "schema",
        "command",
        "model",
        "output",
        "seconds",
        "worst_sqnr",
        "quantized_nodes",
        "config",
        "samples",
        "held_out",
        "bytes_before",
        "bytes_after",
        "operators",
        "kept_nodes",
        "kept_tensors",
        "notes",
        "outputs",
        "layers",
        "verdict",
        "kept_types",
        "warnings",
        "clipping",
        "scores",
        "labelled",
        "latency",
    ]
    assert (document["schema"], document["command"], document["samples"]) == (
        1,
        "quantize",
        19,
    )
    assert document["held_out"] == 1
    (output,) = document["outputs"]
    assert list(output) == [
        "name",
        "sqnr",
        "cosine",
        "max_error",
        "agreement",
        "random",
        "broken",
        "shapes",
        "steps",
        "spread",
        "varying",
    ]
    assert document["worst_sqnr"] == output["sqnr"] > 20


def test_json_file_leaves_the_text_on_stdout(cli: Any) -> None:
    finished = cli(*MODEL, "--json", "report.json")
    assert "quantized 5 of 5 nodes" in finished.out
    assert (
        json.loads(Path("report.json").read_text(encoding="utf-8"))["command"]
        == "quantize"
    )


def test_infinities_are_strings(cli: Any) -> None:
    onnx.save(parse("g (float[2,2] x) => (float y) { y = Det (x) }"), "det.onnx")
    assert (
        cli("quantize", "det.onnx", "-o", "o.onnx", "--random-data", "--json").json[
            "worst_sqnr"
        ]
        == "inf"
    )


def test_quiet_and_verbose(cli: Any) -> None:
    assert cli(*MODEL, "--quiet").out == ""
    excluded = ("--exclude", "head", "first")
    found = cli(*MODEL, "--verbose", *excluded).out
    assert "\nfloat     first: excluded\n          head: excluded\n" in found
    shortened = cli(*MODEL, *excluded).out
    assert "\nfloat     2 nodes (1 Conv, 1 Gemm): excluded\n" in shortened


@pytest.mark.parametrize(
    ("arguments", "change"),
    [
        (["--preset", "xint8"], None),
        (
            ["--calibrator", "percentile:percentile=99.5"],
            {"calibrator": "percentile:percentile=99.5"},
        ),
        (["--per-channel"], {"per_channel": True}),
        (["--per-tensor"], {"per_channel": False}),
        (
            ["--exclude", "head", "--exclude", "re:^po", "fl*"],
            {"exclude": ("head", "re:^po", "fl*")},
        ),
        (["--op-types", "Conv", "Gemm"], {"op_types": ("Conv", "Gemm")}),
        (["--nodes", "first"], {"nodes": ("first",)}),
        (
            ["--unsafe", "--no-prepare", "--min-sqnr", "5"],
            {"safe": False, "prepare": False, "min_sqnr": 5},
        ),
    ],
)
def test_settings(
    config_of: Any, arguments: list[str], change: dict[str, Any] | None
) -> None:
    expected = (
        QConfig.of("XINT8") if change is None else QConfig.of("A8W8").with_(**change)
    )
    assert config_of(*arguments) == expected


def test_yaml_with_additions(config_of: Any) -> None:
    Path("mine.yaml").write_text(
        "preset: S8S8\nexclude: [head]\nsafe: false\n", encoding="utf-8"
    )
    expected = QConfig.of("S8S8").with_(safe=False, exclude=("head", "pool"))
    assert config_of("--config", "mine.yaml", "--exclude", "pool") == expected


@pytest.mark.parametrize("keeps_last", [False, True])
def test_the_last_override_of_a_yaml_file_decides(cli: Any, keeps_last: bool) -> None:
    """A layer is float or quantized as a whole, and the report counts it so."""
    rules = [
        "  - {nodes: [head], keep: true}\n",
        "  - {op_types: [Gemm], activation: uint16}\n",
    ]
    rules = rules[::-1] if keeps_last else rules
    Path("mine.yaml").write_text(f"overrides:\n{''.join(rules)}", encoding="utf-8")
    finished = cli(*MODEL, "--config", "mine.yaml", "--json")
    assert finished.json["quantized_nodes"] == 5 - keeps_last
    names = {tensor.name for tensor in onnx.load("out.onnx").graph.initializer}
    assert ("v" in names) is keeps_last  # the float weight


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--preset", "XINT9"], ["XINT9", "did you mean 'XINT8'"]),
        (["--config", "missing.yaml"], ["missing.yaml", "cannot be read"]),
        (["--calibrator", "percentil"], ["percentil", "did you mean 'percentile'"]),
        (
            ["--calibrator", "percentile:percentage=9"],
            ["percentage", "did you mean 'percentile'"],
        ),
        (
            ["--calibrator", "percentile:percentile=high"],
            ["percentile=high", "'high' is neither a number"],
        ),
        (["--op-types", "Conf"], ["operator 'Conf'", "did you mean 'Conv'"]),
        (["--exclude", "heat"], ["'heat'", "did you mean 'head'"]),
        (["--nodes", "re:("], ["re:(", "regular expression"]),
        (["--per-channel", "--per-tensor"], ["--per-channel", "--per-tensor"]),
        (["--quiet", "--verbose"], ["--quiet", "--verbose"]),
        (["--min-sqnr", "nan"], ["--min-sqnr", "'nan' is not a number"]),
        (["--no-verdict", "--advice", "try"], ["--advice", "--no-verdict"]),
        (["--no-verdict", "--accuracy", "1%"], ["--accuracy", "--no-verdict"]),
        (["--workers", "0"], ["--workers", "'0' is not a whole number"]),
        (["--json", "model.onnx"], ["--json", "'model.onnx' is not named *.json"]),
        (["--json", "nowhere/report.json"], ["--json", "'nowhere'"]),
    ],
)
def test_wrong_settings(cli: Any, arguments: list[str], words: list[str]) -> None:
    finished = cli(*MODEL, *arguments)
    assert finished.code == 2
    for word in words:
        assert word in finished.error
    assert not Path("out.onnx").exists()


def bytes_of(kind: str) -> bytes:
    model = Path("model.onnx").read_bytes()
    return {
        "text": b"hello, world\n",
        "truncated": model[: len(model) // 2],
        "zip": b"PK\x03\x04 ...",
        "empty": b"",
    }[kind]


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("text", "not an ONNX model"),
        ("truncated", "truncated or not an ONNX model"),
        ("zip", "is a zip archive"),
        ("empty", "holds no graph"),
    ],
)
def test_files_that_are_no_model(cli: Any, kind: str, words: str) -> None:
    Path("odd.onnx").write_bytes(bytes_of(kind))
    finished = cli("quantize", "odd.onnx", "-o", "out.onnx", "--data", "data")
    assert finished.code == 2
    assert "odd.onnx" in finished.error
    assert words in finished.error


@pytest.mark.parametrize(
    ("model", "output", "words"),
    [
        ("absent.onnx", "out.onnx", ["absent.onnx", "No such file"]),
        ("data", "out.onnx", ["data is a folder"]),
        ("model.onnx", "model.onnx", ["--output model.onnx is the input MODEL itself"]),
        ("model.onnx", "data/../model.onnx", ["is the input MODEL itself"]),
        ("model.onnx", "link.onnx", ["--output link.onnx is the input MODEL itself"]),
        ("model.onnx", "data", ["--output data is the input --data itself"]),
        ("model.onnx", "folder", ["output folder is a folder"]),
        (
            "model.onnx",
            "notes.txt/sub/out.onnx",
            ["notes.txt/sub/out.onnx", "notes.txt is no folder"],
        ),
        ("", "out.onnx", ["MODEL", "the path is empty"]),
    ],
)
def test_paths(
    cli: Any, folder: Path, model: str, output: str, words: list[str]
) -> None:
    before = Path("model.onnx").read_bytes()
    Path("notes.txt").write_text("a file", encoding="utf-8")
    Path("link.onnx").hardlink_to("model.onnx")
    Path("folder").mkdir()
    files = sorted(folder.iterdir())
    finished = cli("quantize", model, "-o", output, "--data", "data")
    assert finished.code == 2
    for word in words:
        assert word in finished.error
    assert Path("model.onnx").read_bytes() == before
    assert sorted(folder.iterdir()) == files


def test_paths_in_other_scripts(cli: Any) -> None:
    source, target = Path("модель 模型.onnx"), Path("новая папка/量化 (1).onnx")
    Path("model.onnx").rename(source)
    Path("data").rename("данные")
    finished = cli("quantize", source, "-o", target, "--data", "данные")
    assert (finished.code, finished.err) == (0, "")
    assert f"{source} -> {target}" in finished.out
    onnx.checker.check_model(onnx.load(target), full_check=True)


def test_gate(cli: Any, folder: Path) -> None:
    files = sorted(folder.iterdir())
    # listed: how many changes can be tried depends on the time
    finished = cli(*MODEL, "--min-sqnr", "200", "--advice", "list", "--json")
    assert finished.code == 1
    assert "the minimum is 200 dB (change with --min-sqnr)" in finished.error
    assert "Nothing was written. This looks like a classifier. To see" in finished.error
    error = finished.json["error"]
    assert error["kind"] == "AccuracyError"
    options = [step["options"] for step in error["next_steps"]]
    assert options == ["--recipe classifier", "--preset A16W8", "--auto-exclude 200"]
    assert sorted(folder.iterdir()) == files
    assert cli(*MODEL, "--min-sqnr", "20").code == 0


def test_workers_get_the_same_model(cli: Any) -> None:
    assert cli(*MODEL).code == 0
    alone = Path("out.onnx").read_bytes()
    assert cli(*MODEL, "--workers", "2").code == 0
    assert Path("out.onnx").read_bytes() == alone


def test_a_crash_is_told_from_bad_input(
    cli: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api, "quantize", lambda *_, **__: {}["lost"])
    finished = cli(*MODEL, "--json")
    assert finished.code == 3
    assert finished.error == (
        "internal error: KeyError: 'lost'; this is a defect; run with --verbose for the traceback"
    )
    error = {"kind": "KeyError", "message": finished.error}
    assert finished.json == {"schema": 1, "command": "quantize", "error": error}
    verbose = cli(*MODEL, "--verbose")
    assert verbose.code == 3
    assert "Traceback (most recent call last)" in verbose.err
    assert (
        verbose.err.splitlines()[-1]
        == "quark-onnx: error: internal error: KeyError: 'lost'"
    )


def test_interrupt(cli: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(api, "quantize", interrupt)
    finished = cli(*MODEL, "--json")
    assert (finished.code, finished.out, finished.err) == (
        130,
        "",
        "quark-onnx: interrupted\n",
    )


def test_random_data_is_loud(cli: Any) -> None:
    finished = cli(
        "quantize",
        "model.onnx",
        "-o",
        "out.onnx",
        "--random-data",
        "3",
        "--dim",
        "N=2",
        "--json",
        "--quiet",
    )
    assert finished.code == 0
    assert finished.err.startswith(
        "quark-onnx: warning: random data: the ranges are meaningless"
    )
    assert finished.json["samples"] == 3


def test_limit(cli: Any) -> None:
    assert cli(*MODEL, "--limit", "4", "--json").json["samples"] == 4


def test_the_input_is_not_touched(cli: Any) -> None:
    before = Path("model.onnx").read_bytes()
    assert cli(*MODEL).code == 0
    assert Path("model.onnx").read_bytes() == before
    assert not [path for path in Path().iterdir() if path.name.startswith(".")]


@pytest.mark.images
def test_images_become_samples(cli: Any) -> None:
    image = pytest.importorskip("PIL.Image")
    Path("photos").mkdir()
    for index in range(3):
        pixels = np.random.default_rng(index).integers(
            0, 256, (12, 20, 3), dtype=np.uint8
        )
        image.fromarray(pixels).save(f"photos/{index}.png")
    command = ("quantize", "model.onnx", "-o", "out.onnx", "--data", "photos", "--json")
    options = (
        "--resize",
        "crop",
        "--resize-to",
        "9",
        "--mean",
        "0.5",
        "0.5",
        "0.5",
        "--std",
        "1",
        "1",
        "1",
    )
    finished = cli(
        *command,
        "--image-size",
        "8",
        "8",
        *options,
        "--scale",
        "1/255",
        "--color",
        "bgr",
    )
    assert finished.code == 0, finished.err
    assert finished.json["samples"] == 3

    finished = cli(*command, "--image-size", "8", "8", "--layout", "nhwc")
    assert finished.code == 2
    assert finished.error.endswith(
        "looks like NHWC data for an NCHW input; use --layout nchw"
    )
    finished = cli(*command)
    assert finished.code == 2
    assert (
        "photos holds images; say how to read them: --image-size 224" in finished.error
    )


@pytest.mark.images
def test_a_damaged_image_is_warned_of_once(cli: Any) -> None:
    """Both passes over the images, for the ranges and for the labels, leave it out."""
    image_module = pytest.importorskip("PIL.Image")
    for index in range(24):
        image = image_module.new("RGB", (8, 8), (10 * index, 0, 9 * index))
        file = Path("classes", f"{index % 2}", f"{index:02}.png")
        file.parent.mkdir(parents=True, exist_ok=True)
        image.save(file)
    Path("classes", "1", "bad.png").write_bytes(b"damaged")
    model = parse(
        """g (float[N,3,8,8] x) => (float[N,2] y) {
            m = GlobalAveragePool (x)
            f = Flatten (m)
            y = MatMul (f, w)
        }""",
        w=weight(3, 2),
    )
    onnx.save(model, "images.onnx")
    size = ["--image-size", "8", "8"]
    finished = cli(
        "quantize", "images.onnx", "-o", "o.onnx", "--data", "classes", *size
    )
    assert finished.code == 0, finished.err
    assert finished.err.count("warning: an image is left out: classes/1/bad.png") == 1


def test_nodes_are_left_float_until_a_target_is_met(cli: Any, config_of: Any) -> None:
    plain = cli(*MODEL, "--preset", "S8S8", "--json").json
    target = plain["worst_sqnr"] + 5
    document = cli(
        *MODEL, "--preset", "S8S8", "--auto-exclude", f"{target:.2f}", "--json"
    ).json
    assert len(plain["kept_nodes"]) < len(document["kept_nodes"]) < 5
    assert document["worst_sqnr"] > plain["worst_sqnr"] + 3
    # a further note may name the runtime, which is measured
    note, decided = [
        note for note in document["notes"] if note.startswith("auto_mixed_precision: ")
    ][:2]
    assert "nodes float" in note and "missed" not in note
    assert "samples that nothing was decided by" in note
    assert "that decided between" in decided
    # A target that is met already changes nothing, which the report says.
    met = cli(*MODEL, "--preset", "S8S8", "--auto-exclude", "5", "--json").json
    assert met["kept_nodes"] == plain["kept_nodes"]
    assert met["worst_sqnr"] == plain["worst_sqnr"]
    unchanged = "auto_mixed_precision: nothing is raised, as the target is met without"
    assert unchanged in met["notes"]
    assert unchanged not in document["notes"]
    first, second = config_of("--auto-exclude", "30", "--optimize", "cle").optimizers
    assert (first, second.name) == (AutoMixedPrecision(target=30.0, to="float"), "cle")


def test_nodes_get_16_bits_until_a_target_is_met(cli: Any, config_of: Any) -> None:
    plain = cli(*MODEL, "--preset", "S8S8", "--json").json
    document = cli(
        *MODEL, "--preset", "S8S8", "--auto-mixed", plain["worst_sqnr"] + 15, "--json"
    ).json
    assert document["worst_sqnr"] > plain["worst_sqnr"] + 3
    assert document["kept_nodes"] == plain["kept_nodes"]
    assert any("nodes 16 bits" in note for note in document["notes"])
    assert config_of("--auto-mixed=-3").optimizers == (
        AutoMixedPrecision(target=-3.0, to="16bit"),
    )


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ["--auto-exclude", "30", "--auto-mixed", "30"],
            ["--auto-mixed", "not allowed with", "--auto-exclude"],
        ),
        (["--auto-exclude", "high"], ["--auto-exclude", "'high' is not a number"]),
        (
            ["--auto-mixed", "30", "--optimize", "auto_mixed_precision"],
            ["auto_mixed_precision is given twice"],
        ),
        (["--auto-exlude", "30"], ["did you mean '--auto-exclude'"]),
    ],
)
def test_mixed_precision_that_cannot_be(
    cli: Any, arguments: list[str], words: list[str]
) -> None:
    finished = cli(*MODEL, *arguments)
    assert finished.code == 2 and not Path("out.onnx").exists()
    for word in words:
        assert word in finished.error


def test_an_interrupted_run_is_resumed(cli: Any) -> None:
    arguments = (*MODEL, "--optimize", "gptq", "--resume", "done/so far")
    first = cli(*arguments)
    assert first.code == 0, first.err
    kept = {path.name: path.read_bytes() for path in Path("done/so far").iterdir()}
    written = Path("out.onnx").read_bytes()
    results = {name for name in kept if name.endswith(".npz")}
    assert results and set(kept) == results | {f"{name}.crc32" for name in results}
    assert cli(*arguments).code == 0
    assert {
        path.name: path.read_bytes() for path in Path("done/so far").iterdir()
    } == kept
    assert Path("out.onnx").read_bytes() == written
    refused = cli(*MODEL, "--optimize", "gptq", "--resume", "model.onnx")
    assert (
        refused.code == 2
        and "resume folder model.onnx cannot be read and written" in refused.err
    )


def test_the_latency_of_both_models(cli: Any) -> None:
    lines = cli(*MODEL, "--time", "--threads", "1").out.splitlines()
    (time,) = [line for line in lines if line.startswith("time ")]
    assert "float " in time and "median and quartiles of" in time and "1 thread" in time
    latency = cli(*MODEL, "--json").json["latency"]
    assert latency["reference_ms"] > 0 and latency["other_ms"] > 0
    assert isinstance(latency["reasons"], list)
    assert cli(*MODEL, "--no-time", "--json").json["latency"] is None


def test_data_that_does_not_fit_is_no_failure_after_the_model_is_written(
    cli: Any, folder: Path
) -> None:
    """Nothing in the model can be quantized, so that the data is read for the latency alone."""
    onnx.save(only_integers(), folder / "integers.onnx")
    words = ("quantize", "integers.onnx", "-o", "out.onnx", "--data", "data")
    finished = cli(*words)
    assert finished.code == 0 and (folder / "out.onnx").exists()
    assert "the latency was not measured" in finished.err
    assert "nothing in this model could be quantized" in finished.out


@pytest.mark.usefixtures("folder")
def test_labels_of_other_samples_are_found_before_the_run(cli: Any) -> None:
    Path("labels.csv").write_text("name,label\na.jpg,1\n", encoding="utf-8")
    words = ("model.onnx", "-o", "q.onnx", "--data", "data", "--labels", "labels.csv")
    finished = cli("quantize", *words)
    assert finished.code == 2
    assert "samples are named like '0', labels like 'a.jpg'" in finished.err
    assert not Path("q.onnx").exists()
