"""A model without anything to quantize is known by its graph: nothing is opened, run or copied.

The result is the float model with a note, as for every model in which nothing is quantized.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import ModelProto, TensorProto, helper

from quark_onnx import (
    QConfig,
    analyze,
    calibrate,
    quantize,
    quantize_to_accuracy,
    search,
)
from quark_onnx.common.errors import ModelError
from quark_onnx.graph import Graph
from quark_onnx.npu import preflight
from quark_onnx.passes import CLEANING
from quark_onnx.plan import Quantize
from quark_onnx.planning.make_plan import make_plan
from quark_onnx.planning.nothing_to_quantize import has_nothing_to_quantize
from quark_onnx.planning.prepare import clean
from tests.cases import loop_over
from tests.models import MODELS, parse, weight


def trees(count: int = 10) -> ModelProto:
    """A classifier of some stumps, with a map of probabilities, as LightGBM exports it."""
    random = np.random.default_rng(0)
    nodes = [(tree, node) for tree in range(count) for node in range(3)]
    leaves = [(tree, node) for tree, node in nodes if node]
    branch = [node == 0 for _, node in nodes]
    classifier = helper.make_node(
        "TreeEnsembleClassifier",
        ["x"],
        ["label", "p"],
        domain="ai.onnx.ml",
        nodes_treeids=[tree for tree, _ in nodes],
        nodes_nodeids=[node for _, node in nodes],
        nodes_featureids=random.integers(0, 4, len(nodes)).tolist(),
        nodes_modes=["BRANCH_LEQ" if is_branch else "LEAF" for is_branch in branch],
        nodes_values=random.normal(size=len(nodes)).tolist(),
        nodes_truenodeids=[1 if is_branch else 0 for is_branch in branch],
        nodes_falsenodeids=[2 if is_branch else 0 for is_branch in branch],
        class_treeids=[tree for tree, _ in leaves],
        class_nodeids=[node for _, node in leaves],
        class_ids=[0] * len(leaves),
        class_weights=random.normal(size=len(leaves)).tolist(),
        classlabels_int64s=[0, 1],
        post_transform="LOGISTIC",
    )
    names = helper.make_node(
        "ZipMap",
        ["p"],
        ["probabilities"],
        domain="ai.onnx.ml",
        classlabels_int64s=[0, 1],
    )
    number = helper.make_tensor_type_proto(TensorProto.FLOAT, [])
    table = helper.make_map_type_proto(TensorProto.INT64, number)
    graph = helper.make_graph(
        [classifier, names],
        "trees",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", 4])],
        [
            helper.make_tensor_value_info("label", TensorProto.INT64, ["N"]),
            helper.make_value_info(
                "probabilities", helper.make_sequence_type_proto(table)
            ),
        ],
    )
    imports = [helper.make_opsetid("", 17), helper.make_opsetid("ai.onnx.ml", 1)]
    return helper.make_model(graph, opset_imports=imports, ir_version=8)


NOTHING: dict[str, Callable[[], ModelProto]] = {
    "trees": trees,
    "identity": lambda: parse(
        "g (float[N,4] x) => (float[N,4] y) { y = Identity (x) }"
    ),
    "moving": lambda: parse(
        "g (float[N,4] x) => (float[4,N] y) { y = Transpose <perm = [1, 0]> (x) }"
    ),
    "shapes": lambda: parse(
        "g (float[N,4] x) => (int64[2] y) { s = Shape (x) y = Add (s, s) }"
    ),
    "integers": lambda: parse(
        "g (int64[N,4] x) => (int64[N,4] y) { a = Add (x, x) y = Mul (a, x) }"
    ),
    "texts": lambda: parse(
        "g (string[4] x) => (string[M] y) { y = StringNormalizer (x) }"
    ),
}
PRESETS = ["A8W8", "A16W8", "XINT8", "W8", "INT4", "DYNAMIC", "BFP16", "BF16"]


@pytest.fixture
def no_session(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forbid sessions of onnxruntime."""

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a session was opened")

    monkeypatch.setattr(onnxruntime, "InferenceSession", refuse)


class Unread:
    """Data that nobody reads."""

    def __iter__(self) -> Iterator[dict[str, Any]]:
        raise AssertionError("data was read")


@pytest.mark.usefixtures("no_session")
@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("case", NOTHING)
def test_the_float_model_is_handed_back_without_a_session(
    case: str, preset: str, tmp_path: Path
) -> None:
    onnx.save(NOTHING[case](), tmp_path / "m.onnx")
    result = quantize(tmp_path / "m.onnx", Unread(), preset, tmp_path / "o.onnx")
    assert (tmp_path / "o.onnx").read_bytes() == (tmp_path / "m.onnx").read_bytes()
    assert result.model == NOTHING[case]()
    assert "nothing was quantized: the result is the float model" in result.report.notes


@pytest.mark.usefixtures("no_session")
@pytest.mark.parametrize("case", NOTHING)
def test_a_search_ends_before_it_begins(case: str) -> None:
    model = NOTHING[case]()
    for call in (
        lambda: search(model, Unread()),
        lambda: quantize_to_accuracy(model, Unread(), "1%"),
    ):
        with pytest.raises(ModelError, match="there is nothing to quantize"):
            call()
    with pytest.raises(ModelError, match="it is not quantized"):
        analyze(model, model, Unread())
    assert len(calibrate(model, Unread())) == 0
    assert not preflight(model).quantized


@loop_over("name", tuple(MODELS))
def test_what_is_decided_early_is_what_a_run_finds(name: str) -> None:
    """A model is handed back early only if the plan of its cleaned graph quantizes nothing."""
    graph = Graph.of(MODELS[name]())
    if not has_nothing_to_quantize(graph, QConfig()):
        return
    cleaned, _ = clean(graph, CLEANING)
    for preset in PRESETS:
        entries = make_plan(cleaned, QConfig.of(preset)).entries.values()
        assert not any(isinstance(entry, Quantize) for entry in entries)


@pytest.mark.parametrize(
    "text",
    [
        "g (float[N,4] x) => (float[N,4] y) { y = MatMul (x, w) }",
        "g (float[N,4] x) => (float[N,4] y) { t = Transpose (w) y = MatMul (x, t) }",
        "g (int64[N] x) => (float[N,4] y) { y = Gather (w, x) }",
        "g (float[N,4] x) => (float[N,4] y) { y = Add (x, x) }",
    ],
)
def test_a_float_operator_with_a_rule_is_something(text: str) -> None:
    graph = Graph.of(parse(text, w=weight(4, 4)))
    assert not has_nothing_to_quantize(graph, QConfig())


PEAK = """
import re, sys
import onnx
import quark_onnx
def peak():  # of this program alone, unlike ru_maxrss
    return int(re.search(r"VmHWM:\\s+([0-9]+)", open("/proc/self/status").read())[1])
before = peak()
if sys.argv[2] == "read":
    onnx.ModelProto().ParseFromString(open(sys.argv[1], "rb").read())
else:
    quark_onnx.quantize(sys.argv[1], None, "W8", sys.argv[1] + ".q.onnx")
print(peak() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the peak is in a file of Linux")
def test_memory_is_that_of_reading_the_file(tmp_path: Path) -> None:
    """protobuf takes some times the file for the numbers of trees; no second copy is made."""
    onnx.save(trees(100_000), tmp_path / "m.onnx")
    read, quantized = (
        int(
            subprocess.run(
                [sys.executable, "-c", PEAK, str(tmp_path / "m.onnx"), action],
                capture_output=True,
                text=True,
                check=True,
            ).stdout
        )
        for action in ("read", "quantize")
    )
    assert quantized < 1.5 * read
