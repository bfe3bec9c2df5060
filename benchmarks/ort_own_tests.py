"""Run onnxruntime's own quantization tests against ``quark_onnx.compat_onnxruntime``.

    python benchmarks/ort_own_tests.py path/to/onnxruntime [table.md]
    python benchmarks/ort_own_tests.py --names

The tests are those of a checkout of onnxruntime, which is not part of this project; its packages
lack them, and nothing is fetched. They run twice in a temporary folder: as they are, and with the
package name replaced.
Tests count that pass as they are and call a quantizer of this package (``_ort_reach``); others test
onnxruntime's helpers, which are handed through. Of those that count, the ones that fail must be in
``DIFFERENT``, with the reason; for these the accuracy of both results is printed, and written to a
table where one is named (``benchmarks/results/ort_own_tests.md`` is such a one). A result that is
less accurate than onnxruntime's must be in ``LESS_ACCURATE``, with what was measured besides.

``DIFFERENT`` and ``LESS_ACCURATE`` are what is known. The exit code is 1 where something else
differs, where a row of them passes, and where fewer tests than ``REACHED`` call a quantizer. The
goal, 285 of 309 tests, is met or missed in the output, and does not decide the exit code.

``--names`` counts the public names of onnxruntime's modules that are there, without a checkout.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections import defaultdict
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import _ort_reach  # noqa: E402

TESTS = "onnxruntime/test/python/quantization"
#: Least number of tests that call a quantizer: fewer show that the calls are not noted any more.
REACHED = 200
#: Share of the tests that pass with onnxruntime, which is to pass here.
GOAL = 285 / 309
#: Starts every Python process of the tests with noted quantizers.
_START = "from benchmarks import _ort_reach\n_ort_reach.install()\n"
#: How many decibels a result may be below onnxruntime's: symmetric codes of 7 bits are -63..63
#: here and -64..64 there, which are 0.14 dB.
MARGIN = 0.2
#: How often the accuracy is measured: many tests draw their models at random.
MODELS = 4

_CLIP_CODES = (
    "Clip reads and writes codes; onnxruntime dequantizes before and quantizes after it"
)
_CLIP_ZERO = (
    "the result of Clip was zero throughout calibration, so that its scale is 1 and its codes"
    " exceed the bound: without the Clip, which onnxruntime removes, other data pass it"
)
_WHERE = "Where has a form on codes here; onnxruntime has none, and raises an error"
_WHERE_MOVES = (
    "both values have one scale: Where moves the codes, which QLinearWhere would scale"
)
_EIGHT = (
    "float8 is scaled by the greatest value, onnxruntime's by the deviation, which clips; an"
    " Identity without a use is removed with its pair"
)
_PAD = "the padding value stays float, which onnxruntime's Pad on codes accepts"
_BLOCKS = (
    "weights of four axes have blocks here, and the result runs; onnxruntime has none"
)
_SECOND = (
    "an output of the model is the weight itself, which stays float: no DequantizeLinear"
    " rounds it"
)
_SHAPES = (
    "types that inference does not tell are taken for float; there is nothing to raise"
    " an error for"
)
_NAMES = (
    "the codes and the scale of a stored weight are kept under the names of its pair"
)
_READERS = (
    "scales of float16 models are float32, and those of a conversion have the name of the first"
    " reader in theirs"
)
_NO_READER = "a conversion of a result that no node reads would round it twice, and is not written"
_STACK = "a stack of matrices has one scale; onnxruntime has scales along axis 1, which counts them"
_BODY = (
    "bodies are quantized in both forms, and every calibrator runs on a model with"
    " bodies; the test expects an error"
)
_UNSQUEEZE = (
    "Unsqueeze restores the axes of a stack; the test counts the eleven operators that"
    " onnxruntime computes a shape with"
)
_VECTOR = "a vector times a stack of one matrix stays float: MatMulNBits takes matrices"

#: Tests that pass with onnxruntime and not with this package, by the end of their names, and why
#: that is right.
DIFFERENT: dict[str, str] = {
    "TestOpGemm.test_quantize_qdq_gemm_e4m3fn_p3": _EIGHT,
    "TestOpGemm.test_quantize_qdq_gemm_e4m3fn_same": _EIGHT,
    "TestOpMatMul.test_quantize_matmul_e4m3fn_p3": _EIGHT,
    "TestOpMatMul.test_quantize_matmul_e4m3fn_same": _EIGHT,
    "TestOpMatMul.test_quantize_matmul_s8s8": _CLIP_CODES,
    "TestOpMatMul.test_quantize_matmul_s8s8_distribution": _CLIP_CODES,
    "TestOpMatMul.test_quantize_matmul_s8s8_entropy": _CLIP_CODES,
    "TestOpMatMul.test_quantize_matmul_s8s8_percentile": _CLIP_CODES,
    "test_quantize_matmul_int4_3d_weight_1d_activation_preserves_shape": _VECTOR,
    "test_quantize_matmul_int4_3d_weight_default": _UNSQUEEZE,
    "test_quantize_matmul_int4_3d_weight_default_qdq": _UNSQUEEZE,
    "test_quantize_matmul_int4_3d_weight_hqq": _UNSQUEEZE,
    "test_quantize_matmul_int4_4d_weight_default": _UNSQUEEZE,
    "TestQDQPad.test_qdq_pad_qparams": _PAD,
    "TestWhereModel.test_quantize_where_u8u8": _WHERE_MOVES,
    "test_qdq_keep_removable_activations_option": _CLIP_ZERO,
    "TestQDQMixedPrecision.test_add_tensor_qdq_ops_case_1": _READERS,
    "TestQDQMixedPrecision.test_add_tensor_qdq_ops_case_2": _READERS,
    "TestQDQMixedPrecision.test_add_tensor_qdq_ops_case_3": _READERS,
    "TestQDQMixedPrecision.test_add_tensor_qdq_ops_case_4": _READERS,
    "TestQDQMixedPrecision.test_add_tensor_qdq_ops_case_5": _NO_READER,
    "TestQDQPrequantWeights.test_quantize_with_prequantized_input": _NAMES,
    "TestQDQPrequantWeights.test_quantize_with_prequantized_weights": _NAMES,
    "TestQDQBlockSize.test_block_size_rank4_weight_raises": _BLOCKS,
    "test_dynamic_quantize_per_channel_emits_axis_attribute": _SECOND,
    "TestQuantizerShapeInference.test_com_microsoft": _SHAPES,
    "TestIfGraph.test_calibration_method": _BODY,
    "TestIfGraph.test_enable_subgraph": _BODY,
    "TestMatMulConstB.test_per_channel_quant": _STACK,
    "TestWhere.test_quant_format": _WHERE,
}

#: Those whose result is less accurate than onnxruntime's on the data of the test, and what other
#: data show.
LESS_ACCURATE: dict[str, str] = {
    "TestOpMatMul.test_quantize_matmul_s8s8_entropy": (
        "entropy clips here; onnxruntime has as many bins as codes, and clips nothing. On the seven"
        " real tasks that both were measured on it is more accurate here"
        " (`benchmarks/results/accuracy.md`)"
    ),
    **dict.fromkeys(
        [
            f"TestQDQMixedPrecision.test_add_tensor_qdq_ops_case_{n}"
            for n in (1, 2, 3, 4)
        ],
        "one draw of six values. Over 24 other draws float32 models are equal within 0.2 dB, and"
        " float16 models lie between 0.4 dB below onnxruntime's and 0.3 dB above",
    ),
    "TestQDQPrequantWeights.test_quantize_with_prequantized_input": (
        "one draw of a fixed generator, as a float16 model; of four other draws three are more"
        " accurate here, and one is 0.4 dB less"
    ),
}


def run(
    folder: Path,
    files: Sequence[str] = (".",),
    notes: Path | None = None,
    seed: int = 0,
    reached: Path | None = None,
) -> dict[str, bool]:
    """Run tests of a folder, and return whether each passed with all its subtests.

    Those that were skipped are left out.

    Args:
        folder: the folder with the tests.
        files: the files to run.
        notes: receives the accuracy of what the tests quantize; None to measure none.
        seed: of the random numbers of every test.
        reached: receives the names of the tests that call a quantizer; None to note none.
    """
    report = folder / "report.xml"
    report.unlink(missing_ok=True)
    plugins = ["-p", "benchmarks._ort_seed"]
    if notes:
        plugins += ["-p", "benchmarks._ort_compare"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "ORT_SEED": str(seed)}
    environment |= {"ORT_COMPARE_NOTES": str(notes)} if notes else {}
    if reached:
        # In processes that tests start, too. The folder comes first, as a virtual environment may
        # have a module of the name.
        (folder / "sitecustomize.py").write_text(_START, encoding="utf-8")
        environment |= {
            "ORT_REACHED": str(reached),
            "PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)]),
        }
    (folder / "pytest.ini").write_text("[pytest]\n", encoding="utf-8")
    options = [
        "-q",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:xdist",
        *plugins,
        f"--junitxml={report}",
        *files,
    ]
    command = [sys.executable, "-m", "pytest", *options]
    done = subprocess.run(
        command,
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if not report.exists():
        raise RuntimeError(
            f"pytest ended with {done.returncode} and wrote no report:"
            f" {done.stdout}{done.stderr}"
        )
    found: dict[str, bool] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        name = f"{case.get('classname')}.{case.get('name')}"
        kinds = {child.tag for child in case}
        if "skipped" not in kinds:
            found[name] = found.get(name, True) and not kinds & {"failure", "error"}
    return found


def _dotted(test: str) -> str:
    """Return pytest's name of a test, file::class::method, with dots, as a report has it."""
    path, *names = test.split("::")
    return ".".join([path.removesuffix(".py"), *names])


def copy(source: Path, folder: Path, *, replace: bool) -> None:
    """Copy the tests, with the package name replaced or not."""
    folder.mkdir()
    for path in source.glob("*.py"):
        text = path.read_text(encoding="utf-8")
        if replace:
            text = re.sub(
                r"onnxruntime\.quantization", "quark_onnx.compat_onnxruntime", text
            )
            text = text.replace(
                "from onnxruntime import quantization",
                "from quark_onnx import compat_onnxruntime as quantization",
            )
        (folder / path.name).write_text(text, encoding="utf-8")


def mean_of(
    found: Sequence[dict[str, tuple[float, float]]],
) -> dict[str, tuple[float, float]]:
    """The mean accuracy of each test over several runs, of both packages, in decibels."""
    means = {}
    for test in {test for one in found for test in one}:
        pairs = [one[test] for one in found if test in one]
        ours, theirs = (sum(values) / len(pairs) for values in zip(*pairs, strict=True))
        means[test] = (ours, theirs)
    return means


def accuracy(notes: Path) -> dict[str, tuple[float, float]]:
    """The least accuracy of this package and of onnxruntime in each test, in decibels."""
    found = defaultdict(list)
    for line in (
        notes.read_text(encoding="utf-8").splitlines() if notes.exists() else ()
    ):
        entry = json.loads(line)
        found[_dotted(entry["test"])].append((entry["ours"], entry["theirs"]))
    return {name: min(pairs) for name, pairs in found.items()}


def main(arguments: list[str]) -> int:
    """Compare; the exit status is 1 where something differs that is not known."""
    if arguments == ["--names"]:
        return print_names()
    source = Path(arguments[0], TESTS) if arguments else None
    if source is None or not source.is_dir():
        print(
            f"skipped: give the path of a checkout of onnxruntime, with {TESTS} in it"
        )
        return 0
    if own := _ort_reach.handed_through():
        print(
            f"onnxruntime's own quantizers under this package's name: {', '.join(own)}"
        )
        return 1
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        copy(source, folder / "theirs", replace=False)
        copy(source, folder / "ours", replace=True)
        before = run(folder / "theirs")
        noted = folder / "reached.txt"
        noted.touch()
        after = run(folder / "ours", reached=noted)
        reached = {_dotted(test) for test in noted.read_text("utf-8").splitlines()}
        usable = sorted(test for test, passed in before.items() if passed)
        # One that fails before it calls a quantizer counts, too.
        passing = [test for test in usable if test in reached or not after.get(test)]
        kept = [test for test in passing if after.get(test)]
        files = sorted(
            {f"{test.partition('.')[0]}.py" for test in passing if not after.get(test)}
        )
        each_model = []
        for seed in range(MODELS):
            # apart: what is done for the numbers may disturb a test
            notes = folder / f"notes{seed}.jsonl"
            run(folder / "ours", files, notes, seed)
            each_model.append(accuracy(notes))
        measured = mean_of(each_model)
    through = len(usable) - len(passing)
    passed = (len(kept) + through) / len(usable)
    lines = [
        f"{len(kept)} of {len(passing)} tests pass that pass with onnxruntime itself and"
        " call a quantizer of this package",
        f"{through} tests call none: they test what is handed through",
        f"together {passed:.1%}; the goal, 285 of 309 ({GOAL:.1%}), is"
        f" {'met' if passed >= GOAL else 'missed'}",
    ]
    rows = list[str]()
    unknown = False
    for test in (test for test in passing if not after.get(test)):
        pair = measured.get(test)
        reason = reason_for(DIFFERENT, test) or "NOT IN THE LIST"
        unknown |= not reason_for(DIFFERENT, test)
        if pair is not None and pair[0] < pair[1] - MARGIN:
            why = reason_for(LESS_ACCURATE, test)
            reason += f". Less accurate: {why or 'NOT IN THE LIST'}"
            unknown |= not why
        rows.append(_row(test, reason, pair))
    stale = [end for end in DIFFERENT if not _fails(end, passing, after)]
    rows += [f"| {end} | IN THE LIST, AND PASSES | | |" for end in stale]
    report = _report(lines, rows)
    print(report)
    if len(arguments) > 1:
        Path(arguments[1]).write_text(report, encoding="utf-8")
    if len(passing) < REACHED:
        print(f"only {len(passing)} tests call a quantizer, and {REACHED} did")
    return 1 if unknown or stale or len(passing) < REACHED else 0


def reason_for(reasons: dict[str, str], test: str) -> str:
    """Return what is known of a test; empty if nothing is."""
    return next((why for end, why in reasons.items() if test.endswith(end)), "")


def print_names() -> int:
    """Print the numbers of names by module; the exit status is 1 where one is missing."""
    absent = list[str]()
    print("| module | names | onnxruntime's own | this package's | missing |")
    print("| --- | --- | --- | --- | --- |")
    for module, count, own, missing in _ort_reach.names():
        handed = count - own - len(missing)
        print(f"| {module} | {count} | {handed} | {own} | {len(missing)} |")
        absent += [f"{module}.{name}" for name in missing]
    print(f"missing: {', '.join(absent) or 'none'}")
    return 1 if absent else 0


def _fails(end: str, passing: Sequence[str], after: dict[str, bool]) -> bool:
    """Whether a test whose name ends so passes with onnxruntime and fails here, or is not there."""
    found = [test for test in passing if test.endswith(end)]
    return not found or any(not after.get(test) for test in found)


def _row(test: str, reason: str, pair: tuple[float, float] | None) -> str:
    """One line of the table; without numbers where a test compares no outputs."""
    numbers = ["-", "-"] if pair is None else [f"{value:.2f}" for value in pair]
    name = test.partition(".")[2]
    return f"| {name} | {reason} | {' | '.join(numbers)} |"


def _report(lines: Sequence[str], rows: Sequence[str]) -> str:
    """The counts and the table, in Markdown."""
    head = [
        "# onnxruntime's own quantization tests with the package name replaced",
        "",
        "`python benchmarks/ort_own_tests.py path/to/onnxruntime"
        " benchmarks/results/ort_own_tests.md`, with onnxruntime"
        f" {version('onnxruntime')}",
        "",
        *(f"- {line}" for line in lines),
        "",
        "Those that differ, with the SQNR in dB of the worst output on the calibration data,"
        f" or on random inputs without any (mean over {MODELS} models, where a test draws its"
        ' model at random); 150 where they do not differ; "-" where a test looks at names or'
        " errors, or its model does not run on such inputs.",
        "",
        "| test | why it differs | here | onnxruntime |",
        "| --- | --- | --- | --- |",
    ]
    return "\n".join([*head, *rows]) + "\n"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
