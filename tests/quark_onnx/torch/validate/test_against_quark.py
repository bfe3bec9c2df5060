"""What is said of a configuration for transformers is what amd-quark makes of it, where that is
installed.
"""

from __future__ import annotations

import warnings
from copy import deepcopy
from pathlib import Path

import pytest

from quark_onnx.torch.validate import validate
from tests.quark_onnx.torch.validate import drafts
from tests.quark_onnx.torch.validate.drafts import Draft
from tests.quark_onnx.torch.validate.test_rules import CASES

RULES = {
    case.rule
    for case in CASES
    if case.rule.startswith("quark-") and "transformers" in case.clients
}
DRAFTS: list[tuple[str, Draft]] = [
    (scheme, drafts.quark(scheme)) for scheme in drafts.SCHEMES
]
for number, case in enumerate(CASES):
    if case.rule in RULES and "transformers" in case.clients:
        changed = case.whole()
        case.change(changed)
        DRAFTS.append((f"{case.rule} {number}", changed))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "draft"), DRAFTS, ids=[name for name, _ in DRAFTS])
def test_configurations(name: str, draft: Draft, tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip("quark.torch", exc_type=ImportError)
        from quark.torch.export.config.config import JsonExporterConfig
        from quark.torch.quantization.config.config import QConfig

        entries = deepcopy(draft.quantization)
        try:
            QConfig.from_dict(entries)
            JsonExporterConfig(**entries["export"])
            read = True
        except (KeyError, ValueError, TypeError, NotImplementedError):
            read = False
    verdict = validate(draft.write(tmp_path), "transformers")
    # what is wrong with a format of floats shows when the weights are loaded
    refused = {f.rule for f in verdict.findings if f.severity == "refused"} - {
        "quark-fake"
    }
    assert (not refused) is read, verdict.text()
