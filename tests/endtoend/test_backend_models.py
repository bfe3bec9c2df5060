"""Every backend test model of the ONNX standard that onnxruntime runs in float is quantized,
checked and run.

The presets share the models: each takes every eighth, and together they have all. Every night,
presets of integer activations take all of them, and the others, whose sessions take many times as
long to open, share them. ``python -m tests.endtoend.backend_models`` takes all for any.
"""

from __future__ import annotations

from collections import Counter

import pytest

from tests.endtoend.backend_models import run_all, table
from tests.settings import NIGHTLY

#: Fewer models than onnx 1.23 and onnxruntime 1.31 run: a suite that lost its models does not pass.
LEAST_MODELS = 1520
#: Presets whose sessions take long to open, and those that share the models.
LONG = ("INT4", "DYNAMIC", "BF16", "BFP16", "MXFP8E4M3")
SHARING = LONG if NIGHTLY else (*LONG, "A8W8", "A16W8", "XINT8")

#: Why a model is further from float than its bits account for.
HIDDEN = {
    "node/test_attention_4d_softcap_neginf_mask_poison_expanded": (
        "values up to 1000, which a mask hides in the end, "
        "share a scale with values below one"
    )
}
LARGE = dict.fromkeys(
    ("node/test_softmax_large_number", "node/test_softmax_large_number_expanded"),
    "values up to 10,000, of which the last few digits decide",
) | {"node/test_softmax_large_number_expanded_ver18": "the same"}


@pytest.mark.timeout(3600)  # a model that hangs has a limit of its own
@pytest.mark.parametrize(
    ("preset", "least", "known"),
    [
        ("A8W8", 20, HIDDEN),
        ("XINT8", 15, HIDDEN),
        pytest.param("A16W8", 35, LARGE, marks=pytest.mark.slow),
        *(pytest.param(preset, None, {}, marks=pytest.mark.slow) for preset in LONG),
    ],
)
def test_models_pass_and_keep_their_function(
    preset: str,
    least: float | None,
    known: dict[str, str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Every model that the installed onnxruntime runs in float is quantized; none of them fails.

    Args:
        least: the SQNR in dB below which a rule with a wrong axis, sharing or range would show.
    """
    part = (SHARING.index(preset), len(SHARING)) if preset in SHARING else (0, 1)
    rows = run_all(preset, part=part)
    text = table(rows, preset)
    poor = {
        row.model: row.sqnr
        for row in rows
        if least is not None and row.sqnr is not None and row.sqnr < least
    }
    lines = [
        f"  {sqnr:6.2f} dB  {model}: {known.get(model, 'NOT KNOWN')}"
        for model, sqnr in sorted(poor.items())
    ]
    with capsys.disabled():
        print(
            "\n" + "\n".join([text, *([f"below {least} dB:", *lines] if lines else [])])
        )
    counts = Counter(row.status for row in rows)
    assert counts["fail"] == 0, text
    assert counts["pass"] >= LEAST_MODELS // part[1], text
    assert poor.keys() <= known.keys(), poor
