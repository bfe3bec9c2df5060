"""ONNX's own test models, made for a target: no rule is broken, or the graph itself
breaks some and is refused."""

from __future__ import annotations

import re

import pytest

from quark_onnx import QConfig, QuarkError, npu, quantize
from quark_onnx.common.errors import ConstraintError
from tests.endtoend.backend_models import load_cases, open_case, run_float

#: A fixed batch, sequences, operators that end the compiler, types and opsets that others need, and
#: shapes that depend on data: quantizing cannot fix them.
OF_THE_GRAPH = {"G1", "G2", "G8", "G10", "G11", "G12"}
STEP, PARTS = 8, 4


@pytest.mark.parametrize("part", range(PARTS))
def test_standard_models_for_a_target(part: int) -> None:
    made = refused = 0
    for name, case in list(load_cases().items())[STEP * part :: STEP * PARTS]:
        opened = open_case(name, case)
        if run_float(opened) is not None:
            continue
        try:
            result = quantize(
                opened.model,
                [opened.feeds],
                QConfig.of("XINT8").with_(target="stx", search=0),
            ).model
        except ConstraintError as error:
            # What the graph itself breaks is found before the work begins.
            assert "nothing was quantized" in str(error), name
            assert set(re.findall(r"^error (\w+)", str(error), re.M)) <= OF_THE_GRAPH, (
                name
            )
            refused += 1
            continue
        except QuarkError as error:
            assert "quantized already" in str(error), name
            continue
        made += 1
        findings = npu.check(result, "stx", kind="XINT8").findings
        assert [
            str(finding) for finding in findings if finding.rule not in OF_THE_GRAPH
        ] == [], name
    assert made + refused > 40 and made > 10
