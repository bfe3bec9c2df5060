"""A target's rules without its fixed sizes, and MatMulNBits with a level of accuracy."""

from __future__ import annotations

import numpy as np
import pytest

from calibrators.readers.open import InputSpec, open_reader
from quark_onnx import QConfig, quantize
from quark_onnx.common.errors import ConfigError, DataError
from quark_onnx.npu import check
from tests.models import normal, parse, run, weight

CNN = """g (float[N,4,8,8] x) => (float[N,6] y) {
    [conv] c = Conv <pads = [1,1,1,1]> (x, k)
    [relu] r = Relu (c)
    [pool] p = GlobalAveragePool (r)
    [flat] f = Flatten (p)
    [fc] y = MatMul (f, w)
}"""


@pytest.mark.parametrize("fixed", [True, False])
def test_a_target_fixes_sizes_unless_told_otherwise(fixed: bool) -> None:
    model = parse(CNN, k=weight(8, 4, 3, 3), w=weight(6, 8).T.copy())
    data = [{"x": normal(1, 4, 8, 8, seed=seed)} for seed in range(4)]
    config = QConfig.of("XINT8").with_(target="stx", fix_sizes=fixed)
    result = quantize(model, data, config).model
    batch = result.graph.input[0].type.tensor_type.shape.dim[0]
    assert batch.dim_value == int(fixed)
    assert not [
        finding
        for finding in check(result, "stx").findings
        if finding.rule.startswith("C")
    ]
    if not fixed:
        x = normal(3, 4, 8, 8, seed=9)
        [together] = run(result, {"x": x})
        one_by_one = np.concatenate(
            [run(result, {"x": x[i : i + 1]})[0] for i in range(3)]
        )
        np.testing.assert_array_equal(together, one_by_one)


@pytest.mark.parametrize("level", [0, 1, 4])
def test_products_of_blocks_have_the_level_that_is_asked_for(level: int) -> None:
    """In a body of If as in the graph around it."""
    model = parse(
        """g (float[N,64] x, bool c) => (float[N,64] y) {
            [first] h = MatMul (x, w)
            [if] y = If (c) <
                then_branch = t () => (float[N,64] a) { [inner] a = MatMul (h, v) },
                else_branch = e () => (float[N,64] b) { b = Identity (h) }>
        }""",
        w=weight(64, 64),
        v=weight(64, 64, seed=1),
    )
    result = quantize(model, None, QConfig.of("INT4").with_(accuracy_level=level)).model
    bodies = [
        attribute.g
        for node in result.graph.node
        for attribute in node.attribute
        if attribute.HasField("g")
    ]
    nodes = [*result.graph.node, *(node for body in bodies for node in body.node)]
    products = [node for node in nodes if node.op_type == "MatMulNBits"]
    assert len(products) == 2
    for node in products:
        levels = [
            attribute.i
            for attribute in node.attribute
            if attribute.name == "accuracy_level"
        ]
        assert levels == [level] * bool(level)


def test_a_level_that_does_not_exist_is_refused() -> None:
    with pytest.raises(
        ConfigError, match="accuracy_level is 5; it must be a whole number from 0 to 4"
    ):
        QConfig(accuracy_level=5)
    with pytest.raises(ConfigError, match="fix_sizes is 1; it must be true or false"):
        QConfig(fix_sizes=1)  # type: ignore[arg-type]


def test_a_reader_that_was_opened_for_other_inputs_is_an_error() -> None:
    model = parse(CNN, k=weight(8, 4, 3, 3), w=weight(6, 8).T.copy())
    data = [{"image": normal(1, 4, 8, 8)}]
    reader = open_reader(data, [InputSpec("image", np.dtype("float32"), (1, 4, 8, 8))])
    with pytest.raises(
        DataError, match=r"for inputs \['image'\]; the model has \['x'\]"
    ):
        quantize(model, reader, "A8W8")
    data = [{"x": normal(1, 4, 8, 8)}]
    reader = open_reader(data, [InputSpec("x", np.dtype("float32"), (1, 4, 8, 8))])
    assert quantize(model, reader, "A8W8").report.worst_sqnr > 20
