"""Look-ups among many names find what a comparison with each of them finds."""

from __future__ import annotations

import itertools
import re
from fnmatch import fnmatch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quark_onnx.torch.models.names import NamesInTransformers
from quark_onnx.torch.validate.modules import Module
from quark_onnx.torch.validate.name_patterns import Expressions, NameParts, is_regular
from quark_onnx.torch.validate.native_fp8 import ExcludedInVllm
from quark_onnx.torch.validate.packed import SettingsInVllm
from quark_onnx.torch.validate.quark_config import QuarkConfig, overrides_in_vllm
from tests.quark_onnx.torch.validate.scaled import checkpoint_of, drafts

_PARTS = ("model", "layers", "0", "1", "11", "mlp", "experts", "up_proj", "up", "*", "")
_NAMES = [
    "model.layers.1",
    "model.layers.11.mlp.up_proj",
    "mlp.experts",
    "up",
    "lm_head",
]
names = st.one_of(
    st.sampled_from(_NAMES),
    st.lists(st.sampled_from(_PARTS[:-2]), min_size=1, max_size=4).map(".".join),
)
entries = st.lists(
    st.one_of(
        names,
        st.lists(st.sampled_from(_PARTS), max_size=4).map(".".join),
        names.map(lambda name: "re:.*" + re.escape(name)),
        st.text(alphabet="model.p_r", max_size=5),
    ),
    max_size=6,
    unique=True,
)


#: Parts of expressions, of which most match one text.
_EXPRESSIONS = (
    "a",
    "b",
    r"\.",
    ".",
    "\\\\",
    r"\-",
    "^",
    "$",
    r"\Z",
    "b*",
    "[ab]",
    "(a|b)",
    "|",
)
expressions = st.one_of(
    names,
    names.map(re.escape),
    names.map(lambda name: f"^{re.escape(name)}$"),
    st.lists(st.sampled_from(_EXPRESSIONS), max_size=4).map("".join),
    st.text(alphabet="ab.\\^$ZA1\n-", max_size=4),
)


def is_expression(text: str) -> bool:
    try:
        re.compile(text)
    except re.error:
        return False
    return True


@given(expressions)
def test_regular_expressions(text: str) -> None:
    assert is_regular(text) is is_expression(text)


@given(
    st.lists(expressions.filter(is_expression), max_size=6),
    st.one_of(names, st.text(alphabet="ab.\\^$ZA1\n-", max_size=4)),
)
def test_expressions(texts: list[str], name: str) -> None:
    """The first that ``re.match`` matches is found."""
    wanted = [text for text in texts if re.match(text, name)]
    found = Expressions(dict(zip(texts, texts, strict=True))).first(name)
    assert found == (wanted[0] if wanted else None)


def override_in_vllm(rules: dict[str, dict[str, int]], name: str) -> int | bool | None:
    """``get_dynamic_override`` in gptq_utils.py of vLLM 0.33, for the key "bits"."""
    for pattern, changes in rules.items():
        if pattern.startswith("-:"):
            if re.match(pattern.removeprefix("-:"), name):
                return False
        elif re.match(pattern.removeprefix("+:"), name):
            return changes.get("bits", 4)
    return 4


@given(
    st.dictionaries(
        st.tuples(st.sampled_from(["", "+:", "-:"]), expressions).map("".join),
        st.sampled_from([{}, {"bits": 8}, {"bits": 2}]),
        max_size=6,
    ),
    names,
)
def test_rules_of_gptq(rules: dict[str, dict[str, int]], name: str) -> None:
    """Those of ``dynamic``: the first that matches counts, and "-:" keeps layers float."""
    rules = {
        rule: changes
        for rule, changes in rules.items()
        if is_expression(rule.removeprefix("-:" if rule[:2] == "-:" else "+:"))
    }
    draft = drafts.gptq()
    draft.quantization["dynamic"] = rules
    settings = SettingsInVllm(checkpoint_of(draft)).of(Module(name, {}))
    found = False if settings is None else settings["bits"]
    assert found is override_in_vllm(rules, name)


@given(entries, names)
def test_overrides(patterns: list[str], name: str) -> None:
    """The first entry that matches counts, by the rules of amd-quark and of vLLM."""
    config = QuarkConfig(
        {
            "layer_quant_config": {
                pattern: {"number": number} for number, pattern in enumerate(patterns)
            },
            "global_quant_config": {"number": -1},
        }
    )
    by_shell = [number for number, p in enumerate(patterns) if fnmatch(name, p)]
    assert config.layer(name)["number"] == [*by_shell, -1][0]
    module = Module(name, {})
    # all experts of a block are looked up at once
    asked = module.experts or name
    in_vllm = [n for n, p in enumerate(patterns) if overrides_in_vllm(p, asked)]
    found = config.layer_in_vllm(module)
    assert found["number"] == [*in_vllm, -1][0]


@given(entries, names)
def test_exclusions(patterns: list[str], name: str) -> None:
    config = QuarkConfig({"exclude": patterns})
    expressions = [p[3:] for p in patterns if p.startswith("re:")]
    by_expression = any(re.match(expression, name) for expression in expressions)
    assert config.excludes(name) is (
        by_expression or any(fnmatch(name, pattern) for pattern in patterns)
    )
    assert config.excludes_fused(name) is (by_expression or name in patterns)


@given(entries, names)
def test_exclusions_of_experts(patterns: list[str], name: str) -> None:
    """An exclusion of a single expert excludes all experts."""
    experts = f"{name}.experts"
    module = Module(f"{experts}.3.up_proj", {})
    patterns = [*patterns, *(f"{pattern}.experts.0" for pattern in patterns)]
    config = QuarkConfig({"exclude": patterns})
    wanted = config.excludes_fused(experts) or any(
        pattern.startswith(f"{experts}.") for pattern in patterns
    )
    assert config.excludes_in_vllm(module, "") is wanted


@given(entries, names)
def test_native_fp8(patterns: list[str], name: str) -> None:
    draft = drafts.fp8()
    draft.quantization["ignored_layers"] = patterns
    excluded = ExcludedInVllm(checkpoint_of(draft))
    for inside in (name, f"{name}.experts.1.up_proj"):
        module = Module(inside, {})
        wanted = inside in patterns
        searched = module.experts or inside
        if "experts" in searched:
            wanted = wanted or any(searched in pattern for pattern in patterns)
        assert excluded.match(module) is wanted


@given(entries, names)
def test_parts(parts: list[str], name: str) -> None:
    assert NameParts(parts).match(name) is any(part in name for part in parts)


@given(entries, names)
def test_transformers(patterns: list[str], name: str) -> None:
    pytest.importorskip("transformers")
    from transformers.quantizers.quantizers_utils import should_convert_module

    patterns = [pattern.removeprefix("re:") for pattern in patterns]
    patterns = [pattern for pattern in patterns if not pattern.startswith("*")]
    for some in itertools.chain([patterns], ([pattern] for pattern in patterns)):
        found = NamesInTransformers(some).match(name)
        assert found is not should_convert_module(name, some), (some, name)
