"""Little that becomes much: what a model would compute is estimated before anything allocates it."""  # noqa: E501

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from onnx import ModelProto, NodeProto, SparseTensorProto, helper, numpy_helper

from calibrators.limits import VARIABLE
from quark_onnx import quantize
from quark_onnx.check.sizes import check_sizes
from quark_onnx.common.errors import ModelError
from quark_onnx.files.io import load
from tests.cases import loop_over
from tests.models import MODELS, parse

#: Elements: a tensor of 4 GB.
N = 2**30
TEXTS = {
    "ConstantOfShape": ("big = ConstantOfShape (n)", {"n": np.int64([N])}),
    "Expand": ("big = Expand (one, n)", {"n": np.int64([N]), "one": np.float32([1])}),
    "Expand of an input": ("big = Expand (x, n)", {"n": np.int64([N // 4, 4])}),
    "Tile": ("big = Tile (one, n)", {"n": np.int64([N]), "one": np.float32([1])}),
    "OneHot": (
        "big = OneHot (i, n, v)",
        {"n": np.int64(N), "i": np.int64([0, 1]), "v": np.float32([0, 1])},
    ),
    "Range": (
        "big = Range (a, n, b)",
        {"n": np.int64(N), "a": np.int64(0), "b": np.int64(1)},
    ),
    "Pad": ("big = Pad (x, n)", {"n": np.int64([0, 0, 0, N])}),
    "a computed shape": (
        "s = Mul (a, b) big = ConstantOfShape (s)",
        {"a": np.int64([2**20]), "b": np.int64([2**20])},
    ),
    "a shape that follows from one that is computed": (
        (
            "s = Mul (a, b) z = ConstantOfShape <value = int64[1] {1048576}> (s) p ="
            " ReduceProd (z) q = Unsqueeze (p, i) big = ConstantOfShape (q)"
        ),
        {"a": np.int64([2]), "b": np.int64([1]), "i": np.int64([0])},
    ),
    "a shape that follows from the input's": (
        "s = Shape (x) t = Mul (s, n) big = ConstantOfShape (t)",
        {"n": np.int64([1, N])},
    ),
    "the shape of a constant": (
        (
            "s = Shape (n) t = Mul (s, n) e = ConstantOfShape <value = int64[1] {1}>"
            " (t) big = Slice (e, i, j)"
        ),
        {"n": np.int64([2**40]), "i": np.int64([0]), "j": np.int64([1])},
    ),
    "many indices": (
        "s = NonZero (a) t = Shape (s) u = Mul (t, n) big = ConstantOfShape (u)",
        {"a": np.float32([1, 0, 2]), "n": np.int64([N])},
    ),
    "a vector that is taken for a shape": (
        "e = Expand (one, n) big = Slice (e, i, j)",
        {
            "n": np.int64([2**62]),
            "one": np.int64([1]),
            "i": np.int64([0]),
            "j": np.int64([1]),
        },
    ),
}


def model(case: str) -> ModelProto:
    """A model of some 600 bytes that reads the largest value of the large tensor."""
    text, constants = TEXTS[case]
    last = "m = ReduceMax <keepdims = 0> (h) y = Add (x, m)"
    return parse(
        f"g (float[N,4] x) => (float[N,4] y) {{ {text} h = Cast <to = 1> (big)"
        f" {last} }}",
        **constants,
    )


@pytest.mark.parametrize("case", TEXTS)
def test_a_tensor_above_the_limit_is_refused(case: str) -> None:
    """A size is estimated from shapes and constants before a session, or anything else, allocates
    the tensor.
    """
    hostile = model(case)
    assert hostile.ByteSize() < 1000
    with pytest.raises(
        ModelError,
        match=(
            rf"above the limit of 1,073,741,824 bytes: that is .* GB; set {VARIABLE}="
        ),
    ):
        quantize(hostile, None, "W8")


def test_sparse_tensors_are_counted_as_dense_ones() -> None:
    """Runtimes make them dense as they load a model."""
    sound = parse("g (float[N,4] x) => (float[N,4] y) { y = Relu (x) }")
    sound.graph.sparse_initializer.append(
        SparseTensorProto(
            dims=[2**20, 2**20],
            values=numpy_helper.from_array(np.float32([1]), "s"),
            indices=numpy_helper.from_array(np.int64([0]), "i"),
        )
    )
    with pytest.raises(
        ModelError, match=r"sparse tensor 's' has the shape .* above the limit"
    ):
        check_sizes(sound)


def test_inputs_and_bodies_are_counted() -> None:
    inner = helper.make_graph(
        [
            helper.make_node("ConstantOfShape", ["n"], ["much"]),
            helper.make_node("ReduceMax", ["much"], ["t"]),
        ],
        "body",
        [],
        [helper.make_tensor_value_info("t", 1, None)],
    )
    hostile = parse(
        "g (float[N,4] x, bool c) => (float[N,4] y) { y = Relu (x) }", n=np.int64([N])
    )
    hostile.graph.node.append(
        helper.make_node("If", ["c"], ["z"], then_branch=inner, else_branch=inner)
    )
    with pytest.raises(
        ModelError,
        match=r"tensor 'much' of node 'much' .ConstantOfShape. has the shape",
    ):
        check_sizes(hostile)
    with pytest.raises(ModelError, match="tensor 'x' has the shape"):
        check_sizes(parse(f"g (float[N,{N}] x) => (float[N,{N}] y) {{ y = Relu (x) }}"))


def functions(*made: tuple[str, list[NodeProto]], text: str) -> ModelProto:
    """A model whose functions have one input ``i`` and one output ``o`` each."""
    imports = [helper.make_opsetid("", 17), helper.make_opsetid("own", 1)]
    result = parse(text, n=np.int64([N]))
    result.opset_import.append(imports[1])
    result.ir_version = 8
    result.functions.extend(
        helper.make_function("own", name, ["i"], ["o"], nodes, imports)
        for name, nodes in made
    )
    return result


def test_tensors_inside_functions_are_counted() -> None:
    """A function computes what its nodes would compute in its place, however deep the calls are."""
    inner = [
        helper.make_node("ConstantOfShape", ["i"], ["much"]),
        helper.make_node("ReduceMax", ["much"], ["o"]),
    ]
    outer = [helper.make_node("Inner", ["i"], ["o"], domain="own")]
    hostile = functions(
        ("Inner", inner),
        ("Outer", outer),
        text="g (float[N,4] x) => (float[N,4] y) { m = own.Outer (n) y = Add (x, m) }",
    )
    with pytest.raises(
        ModelError, match=r"\(ConstantOfShape\) has the shape .* above the limit"
    ):
        check_sizes(hostile)


@pytest.mark.parametrize(("levels", "refused"), [(10, False), (60, True)])
def test_calls_that_multiply_are_refused(levels: int, refused: bool) -> None:
    """Nodes that functions stand for are counted before a native library writes them out, which no
    signal would end.
    """
    made = [("F0", [helper.make_node("Relu", ["i"], ["o"])])]
    for level in range(1, levels):
        pair = [("i", "t"), ("t", "o")]
        made.append(
            (
                f"F{level}",
                [
                    helper.make_node(f"F{level - 1}", [a], [b], domain="own")
                    for a, b in pair
                ],
            )
        )
    hostile = functions(
        *made,
        text=f"g (float[N,4] x) => (float[N,4] y) {{ y = own.F{levels - 1} (x) }}",
    )
    if not refused:
        load(hostile)
        return
    with pytest.raises(
        ModelError, match=r"function 'F\d+' stands for [\d,]+ nodes; at most 1,000,000"
    ):
        load(hostile)


def test_a_function_that_calls_itself_is_refused() -> None:
    made = [
        (a, [helper.make_node(b, ["i"], ["o"], domain="own")])
        for a, b in (("F", "G"), ("G", "F"))
    ]
    with pytest.raises(ModelError, match=r"function '[FG]' calls itself"):
        load(
            functions(
                *made, text="g (float[N,4] x) => (float[N,4] y) { y = own.F (x) }"
            )
        )


def test_the_limit_can_be_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "0.001")
    small = parse(
        "g (float[N,4] x) => (float[N,4] y) { m = ConstantOfShape (n) y = Add (x, m) }",
        n=np.int64([2**17, 4]),
    )
    with pytest.raises(ModelError, match="above the limit of 1,073,741 bytes"):
        check_sizes(small)
    monkeypatch.setenv(VARIABLE, "0.003")
    check_sizes(small)
    monkeypatch.setenv(VARIABLE, "much")
    with pytest.raises(
        ModelError,
        match=f"{VARIABLE} is 'much'; it must be a number of gigabytes above 0",
    ):
        check_sizes(small)


def test_a_large_model_may_compute_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is refused is much that comes of little: four times the weights are allowed."""
    monkeypatch.setenv(VARIABLE, "0.001")
    weights = np.zeros((2**17, 4), np.float32)
    check_sizes(
        parse(
            "g (float[131072,4] x) => (float[131072,4] y) { y = Add (x, w) }", w=weights
        )
    )


@loop_over("name", tuple(MODELS))
def test_sound_models_pass(name: str) -> None:
    check_sizes(MODELS[name]())


PEAK = """
import resource, sys
from quark_onnx.cli import main
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
codes = [main([*command.split(), sys.argv[1]]) for command in ("explain", "npu check", "npu preflight")]
codes.append(main(["quantize", sys.argv[1], "-o", sys.argv[1] + ".q.onnx", "--preset", "W8"]))
codes.append(main(["compare", sys.argv[1], sys.argv[1], "--random-data"]))
print(codes, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
"""  # noqa: E501


@pytest.mark.skipif(
    sys.platform != "linux", reason="ru_maxrss is in kilobytes there alone"
)
@pytest.mark.parametrize("case", ["Expand", "a vector that is taken for a shape"])
def test_no_command_takes_the_memory(case: str, tmp_path: Path) -> None:
    (tmp_path / "m.onnx").write_bytes(model(case).SerializeToString())
    done = subprocess.run(
        [sys.executable, "-c", PEAK, str(tmp_path / "m.onnx")],
        capture_output=True,
        text=True,
        check=True,
    )
    codes, megabytes = done.stdout.rsplit(maxsplit=1)
    assert codes == "[2, 2, 2, 2, 2]", done.stderr
    assert int(megabytes) < 300
