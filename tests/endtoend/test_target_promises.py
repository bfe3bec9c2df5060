"""A target's promise holds at the end of every path: 0 errors of its checker, or a refusal.

Refusals come before optimizers and calibration, and name the target and the way out.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import ModelProto

from quark_onnx import QConfig, npu, quantize
from quark_onnx.common.errors import ConfigError, ConstraintError
from quark_onnx.common.registry import NPU_RECIPES, OPTIMIZERS, RECIPES, TARGETS
from quark_onnx.search.space import Space
from quark_onnx.targets.target import npu_names
from tests.models import Factory, Feeds, parse, samples, weight


def classifier() -> ModelProto:
    """Convolutions, a pool and a product."""
    return parse(
        """g (float[N,3,8,8] x) => (float[N,5] y) {
            a = Conv <pads = [1,1,1,1]> (x, w)
            r = Relu (a)
            p = MaxPool <kernel_shape = [2,2], strides = [2,2]> (r)
            c = Conv <auto_pad = "SAME_UPPER"> (p, v)
            s = Add (p, c)
            g = ReduceMean <axes = [2,3], keepdims = 0> (s)
            y = Gemm (g, u, b)
        }""",
        w=weight(4, 3, 3, 3),
        v=weight(4, 4, 3, 3, seed=1),
        u=weight(4, 5, seed=2),
        b=weight(5),
    )


def depthwise() -> ModelProto:
    """SiLU behind convolutions, one of them depthwise: factors of cle pass it as new nodes."""
    return parse(
        """g (float[N,3,8,8] x) => (float[N,4,8,8] y) {
            a = Conv (x, w)
            s = Sigmoid (a)
            b = Mul (a, s)
            c = Conv <pads = [1,1,1,1], group = 4> (b, v)
            t = Sigmoid (c)
            d = Mul (c, t)
            y = Conv (d, u)
        }""",
        w=weight(4, 3, 1, 1),
        v=weight(4, 1, 3, 3, seed=1),
        u=weight(4, 4, 1, 1, seed=2),
    )


def detector() -> ModelProto:
    """Three heads on features of two sizes."""
    return parse(
        """g (float[N,3,8,8] x) => (float[N,2,8,8] p, float[N,4,8,8] q, float[N,1,4,4] r) {
            a = Conv <pads = [1,1,1,1]> (x, w)
            s = Sigmoid (a)
            b = Mul (a, s)
            c = Conv <pads = [1,1,1,1], strides = [2,2]> (b, v)
            d = Clip (c, zero, six)
            e = Resize <mode = "nearest", coordinate_transformation_mode = "asymmetric"> (d, , scales)
            f = Concat <axis = 1> (e, b)
            p = Conv (f, u)
            q = Conv (f, t)
            h = Conv (d, o)
            r = Sigmoid (h)
        }""",  # noqa: E501
        w=weight(4, 3, 3, 3),
        v=weight(4, 4, 3, 3, seed=1),
        u=weight(2, 8, 1, 1, seed=2),
        t=weight(4, 8, 1, 1, seed=3),
        o=weight(1, 4, 1, 1, seed=4),
        zero=np.float32(0),
        six=np.float32(6),
        scales=np.float32([1, 1, 2, 2]),
    )


def transformer() -> ModelProto:
    """Attention of one head over patches, with decomposed layer normalization and Gelu."""
    return parse(
        """g (float[N,3,8,8] x) => (float[N,4,8] y)
        <int64[3] shape = {0, 8, -1}> {
            a = Conv <kernel_shape = [4,4], strides = [4,4]> (x, w)
            b = Reshape (a, shape)
            c = Transpose <perm = [0,2,1]> (b)
            n = LayerNormalization (c, one, zero)
            q = MatMul (n, wq)
            k = MatMul (n, wk)
            v = MatMul (n, wv)
            kt = Transpose <perm = [0,2,1]> (k)
            qk = MatMul (q, kt)
            s = Softmax <axis = -1> (qk)
            o = MatMul (s, v)
            r = Add (c, o)
            h = MatMul (r, wh)
            e = Erf (h)
            m = Mul (h, e)
            y = MatMul (m, wo)
        }""",
        w=weight(8, 3, 4, 4),
        one=np.ones(8, np.float32),
        zero=np.zeros(8, np.float32),
        **{
            f"w{name}": weight(8, 8, seed=number) for number, name in enumerate("qkvho")
        },
    )


def recurrent() -> ModelProto:
    """An LSTM, which ends the compiler's process."""
    return parse(
        """g (float[1,1,3] x) => (float[1,1,1,4] y) {
            y, h, c = LSTM <hidden_size = 4> (x, w, r)
        }""",
        w=weight(1, 16, 3),
        r=weight(1, 16, 4, seed=1),
    )


def segmentation() -> ModelProto:
    """Down by a convolution, up by a ConvTranspose."""
    return parse(
        """g (float[N,3,8,8] x) => (float[N,2,8,8] y) {
            a = Conv <pads = [1,1,1,1], strides = [2,2]> (x, w)
            r = LeakyRelu (a)
            b = Conv <pads = [1,1,1,1]> (r, v)
            c = BatchNormalization (b, one, zero, zero, one)
            y = ConvTranspose <strides = [2,2]> (c, u)
        }""",
        w=weight(4, 3, 3, 3),
        v=weight(4, 4, 3, 3, seed=1),
        u=weight(4, 2, 2, 2, seed=2),
        one=np.ones(4, np.float32),
        zero=np.zeros(4, np.float32),
    )


NETS: dict[str, Factory] = {
    each.__name__: each
    for each in (classifier, depthwise, detector, transformer, recurrent, segmentation)
}

#: One target of each kind: the others of the kind have the same rules.
KINDS = {"phx": ("npu", "phx", "hpt", "stx-x1", "krk-x1"), "stx": ("stx", "krk")}
#: Settings that make an optimizer fast.
FAST = {
    "adaquant": "adaquant:iterations=2",
    "adaround": "adaround:iterations=2",
    "auto_mixed_precision": "auto_mixed_precision:samples=1,to=float,share=0.5",
    "cle": "cle:silu=scale,relu6=bound",
}


def fast(optimizer: Any) -> Any:
    """Return an optimizer with fewer iterations."""
    if hasattr(optimizer, "iterations"):
        return replace(optimizer, iterations=2)
    return optimizer


def recipes(target: str) -> dict[str, QConfig]:
    """Return the distinct configurations of all recipes for a target, by their names."""
    configs: dict[str, QConfig] = {}
    for registry in (RECIPES, NPU_RECIPES):
        for name in registry:
            config = registry[name].config_for(target)
            config = config.with_(optimizers=tuple(map(fast, config.optimizers)))
            if config not in configs.values():
                configs[f"{name}, {config.optimizers}"] = config
    return configs


def optimizers(target: str) -> dict[str, QConfig]:
    """Return a configuration with each optimizer alone, by its name."""
    preset = {"phx": "XINT8", "stx": "A8W8"}[target]
    return {
        name: QConfig.of(preset).with_(optimizers=FAST.get(name, name))
        for name in OPTIMIZERS
    }


def broken(
    model: ModelProto, data: list[Feeds], config: QConfig, target: str
) -> Iterator[str]:
    """Yield what is wrong with the result, or with the refusal."""
    config = config.with_(target=target, search=0, min_sqnr=None)
    try:
        result = quantize(model, data, config)
    except ConfigError as error:
        # A recipe for products has nothing to quantize in a model without one.
        if "has no operator of type" in str(error):
            return
        if target not in str(error) or not re.search("take |npu deploy", str(error)):
            yield f"it names no target or no way out: {error}"
    except ConstraintError as error:
        # Not "nothing was written", which ends a run that has done all the work.
        if target not in str(error) or "nothing was quantized" not in str(error):
            yield f"it is late, or names no target: {error}"
    else:
        findings = npu.check(result.model, target).findings
        yield from (str(each) for each in findings if each.severity == "error")


def test_targets_of_a_kind_have_the_same_rules() -> None:
    """The tests of this module run one target of each kind."""
    assert sorted(sum(KINDS.values(), ())) == sorted(npu_names())
    for name, others in KINDS.items():
        for other in map(TARGETS.__getitem__, others):
            row = TARGETS[name]
            assert (other.presets, other.integer_engine, other.opset) == (
                row.presets,
                row.integer_engine,
                row.opset,
            )
            assert (other.compiler == "X2") == (row.compiler == "X2")


@pytest.mark.parametrize("target", KINDS)
@pytest.mark.parametrize("net", NETS)
def test_every_recipe_and_optimizer_keeps_the_promise(net: str, target: str) -> None:
    """Whatever the recipe or the optimizer, no rule is broken, or nothing was begun."""
    model = NETS[net]()
    data = samples(model, 2)
    wrong: dict[str, list[str]] = {}
    for name, config in {**recipes(target), **optimizers(target)}.items():
        if found := [*broken(model, data, config, target)]:
            wrong[name] = found
    assert wrong == {}


def test_a_refusal_comes_before_the_data_is_read(tmp_path: Path) -> None:
    def unread() -> Iterator[Feeds]:
        raise AssertionError("the data is read")
        yield {}

    for preset, target, advice in (
        ("A8W8", "phx", "take --preset XINT8"),
        ("BF16", "stx", "npu deploy --preset BF16"),
        ("INT4", "stx", "take --preset XINT8"),
    ):
        path = tmp_path / "out.onnx"
        config = QConfig.of(preset).with_(target=target)
        with pytest.raises(ConfigError, match=f"{target} .*{advice}"):
            quantize(classifier(), unread, config, path)
        assert not path.exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"per_channel": True}, "one scale per tensor; per_channel is true"),
        ({"form": "operators"}, "takes Q/DQ pairs; form is operators"),
        (
            {"optimizers": "auto_mixed_precision"},
            "mixes in 16bit: take to=float",
        ),
        (
            {"overrides": [{"nodes": ["*"], "activation": "uint16"}]},
            "an override has uint16: take keep=true",
        ),
        ({"bias": "int16"}, "does not take biases of 16 bits"),
    ],
    ids=str,
)
def test_settings_that_break_the_format_are_refused(
    changes: dict[str, Any], message: str
) -> None:
    config = QConfig.of({"preset": "XINT8", "target": "phx", **changes})
    with pytest.raises(ConfigError, match=f"phx.*{message}"):
        quantize(classifier(), None, config)


def test_a_broken_rule_leaves_no_file(tmp_path: Path) -> None:
    """Without the passes of the target, its rules for attributes are broken."""
    config = QConfig.of("XINT8").with_(target="stx", prepare=False)
    path = tmp_path / "out.onnx"
    with pytest.raises(
        ConstraintError, match=r"stx .*; nothing was quantized:(\nerror G\d.*){2}$"
    ):
        quantize(classifier(), samples(classifier(), 2), config, path)
    assert [*tmp_path.iterdir()] == []


def test_a_model_that_is_not_final_is_not_refused() -> None:
    """Without fixed sizes, rules are advice: a dynamic batch breaks one."""
    config = QConfig.of("XINT8").with_(target="stx", fix_sizes=False, search=0)
    made = quantize(classifier(), samples(classifier(), 2), config)
    assert npu.check(made.model, "stx").errors
    assert any("rules of stx were not checked" in note for note in made.report.notes)


@pytest.mark.parametrize("target", npu_names())
def test_a_search_tries_what_the_target_takes(target: str) -> None:
    """Formats that fail in every candidate are no part of the space."""
    space = Space(target=target)
    assert set(space.presets or ()) == set(TARGETS[target].presets) - {"BF16"}
    with pytest.raises(ConfigError, match=f"presets: .*{target}"):
        Space(presets="BF16", target=target)


def test_both_front_doors_give_a_recipe_in_a_format_of_the_target(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``quantize`` and ``npu deploy`` write what ``npu check`` takes, or refuse."""
    from quark_onnx.cli import main

    monkeypatch.chdir(tmp_path)
    onnx.save(depthwise(), "net.onnx")
    Path("data").mkdir()
    for number, feeds in enumerate(samples(depthwise(), 2)):
        np.savez(f"data/{number}.npz", **feeds)
    for words in (
        ["quantize", "net.onnx", "-o", "out.onnx"],
        ["npu", "deploy", "net.onnx", "-o", "out"],
    ):
        chosen = [["--recipe", "detector"], ["--recipe", "auto"], []]
        for recipe in chosen:
            arguments = [*words, *recipe, "--target", "phx", "--data", "data"]
            assert main([*arguments, "--quiet"]) == 0
            assert main(["npu", "check", "out.onnx", "--target", "phx"]) == 0
