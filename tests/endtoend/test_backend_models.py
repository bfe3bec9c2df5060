"""Every backend test model of the ONNX standard that onnxruntime runs in float is quantized, checked and run."""

from __future__ import annotations

import pytest

from tests.endtoend.backend_models import run_all, table

#: Models that pass with onnx 1.23 and onnxruntime 1.31; with versions that run fewer models, all of those.
MARK = 1520

#: A rule with a wrong axis, a wrong sharing or a wrong range shows as an SQNR below this number of dB.
POOR = 15.0
#: Values up to 1000, which a mask hides in the end, share a scale with values below one.
HIDDEN = "node/test_attention_4d_softcap_neginf_mask_poison_expanded"
#: A softmax over 128 classes uses little of [0, 1], which a symmetric power of two cannot follow.
FLAT = "pytorch-converted/test_softmax_lastdim"


@pytest.mark.slow
@pytest.mark.parametrize(("config", "known"), [("A8W8", {HIDDEN}), ("XINT8", {HIDDEN, FLAT})])
def test_models_pass_and_keep_their_function(config: str, known: set[str], capsys: pytest.CaptureFixture[str]) -> None:
    rows = run_all(config)
    text = table(rows, config)
    with capsys.disabled():
        print("\n" + text)
    passed, failed = (sum(row.status == status for row in rows) for status in ("pass", "fail"))
    assert passed >= min(MARK, passed + failed), text
    poor = {row.model: row.sqnr for row in rows if row.sqnr is not None and row.sqnr < POOR}
    assert poor.keys() <= known, poor
