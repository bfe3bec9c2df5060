"""Findings: rules of a target that a model breaks, with the node and the fix."""

from __future__ import annotations

from dataclasses import dataclass

from quark_onnx.targets.constraints import NAMES, SOURCE

_VAIP = "zmaychek84/vaip ad80269 (2025-03), to_xir_ops_pass.cpp"
_DOCS = "Ryzen AI documentation 1.8 (2026-07-23)"
_ONNXSIM = "onnxsim/onnxsim#1404 (2026-09-13), measured on Strix Halo"
_QUARK = "amd-quark 0.13, quantizers and refine.py"


@dataclass(frozen=True)
class Rule:
    """A rule of a target.

    Attributes:
        title: the rule in words.
        source: publication with the rule, and its date.
        sure: True if all sources agree; otherwise a finding is a warning.
        fix: how to fix a model that breaks the rule; a command if there is one.
    """

    title: str
    source: str
    sure: bool
    fix: str


_AGAIN = "quark-onnx quantize FLOAT.onnx --preset XINT8 --target TARGET"
_LEGALIZE = "quark-onnx npu legalize"

#: Rules by name: C1 to C10 are positions, S scales, G the graph.
RULES: dict[str, Rule] = {
    **{
        # Alignments and the shifts of Conv are errors; C5, C6, C9 and C10 may not bind for X2.
        name: Rule(title, SOURCE, name in ("C1", "C2", "C3", "C4", "C7", "C8"), _AGAIN)
        for name, title in NAMES.items()
    },
    "S1": Rule(
        "scales are powers of two",
        f"{_DOCS}, model_quantization.rst",
        True,
        _AGAIN,
    ),
    "S2": Rule(
        "zero lies in the middle of the codes",
        f"{_QUARK}; {_VAIP}",
        True,
        _AGAIN,
    ),
    "S3": Rule(
        "a tensor has one scale",
        f"{_DOCS}, model_quantization.rst",
        True,
        _AGAIN,
    ),
    "S4": Rule(
        "scales and zero points are constants",
        _VAIP,
        True,
        f"{_AGAIN}, and not with --dynamic",
    ),
    "S5": Rule(
        "codes are read under the scale under which they were written",
        _QUARK,
        True,
        _AGAIN,
    ),
    "S6": Rule("codes have 8 bits", f"{_DOCS}, model_quantization.rst", True, _AGAIN),
    "S7": Rule(
        "nothing is rounded between an operator and the activation behind it",
        _QUARK,
        False,
        _AGAIN,
    ),
    "S8": Rule(
        "operators compute between pairs, not on codes",
        f"{_VAIP}; {_DOCS}, ops_support.rst",
        True,
        "quark-onnx convert --to qoperator-to-qdq",
    ),
    "S9": Rule(
        "16-bit tensors that a Concat joins have the scale of the result",
        "amd-quark 0.13, A16W8 (AlignConcat); its A8W8 does not align them",
        False,
        "quark-onnx quantize FLOAT.onnx --preset A16W8 --target TARGET",
    ),
    "S10": Rule(
        "codes of weights are symmetric around zero, without -128",
        "amd-quark 0.13, whose XINT8 weights are -127..127",
        False,
        _AGAIN,
    ),
    "G1": Rule(
        "shapes are static",
        f"{_VAIP}; amd/RyzenAI-SW#312",
        True,
        f"{_LEGALIZE} --shape INPUT=1,3,224,224",
    ),
    "G2": Rule(
        "the batch is 1",
        f"{_DOCS}; amd/RyzenAI-SW#401",
        True,
        f"export the model with a batch of 1, or of no size, which {_LEGALIZE} makes 1",
    ),
    "G3": Rule("attributes of convolutions are written out", _ONNXSIM, True, _LEGALIZE),
    "G4": Rule(
        "attributes of pools are written out, and none is padded automatically",
        f"{_VAIP}; amd/RyzenAI-SW#264",
        True,
        _LEGALIZE,
    ),
    "G5": Rule(
        "each Conv and Gemm has parameters of its own",
        f"{_QUARK}, CopySharedInit",
        False,
        _LEGALIZE,
    ),
    "G6": Rule(
        "there are at least two convolutions",
        f"{_VAIP}; amd/RyzenAI-SW#85, #126",
        True,
        "run this model on the CPU",
    ),
    "G7": Rule(
        "initializers are no inputs",
        f"{_QUARK}, RemoveInputInit",
        False,
        _LEGALIZE,
    ),
    "G8": Rule(
        "no LSTM, and no branch that depends on data",
        f"{_ONNXSIM}; onnxsim/onnxsim#1432",
        True,
        "cut the model in front of it (quark-onnx npu cut), or run this model on the CPU",
    ),
    "G9": Rule(
        "what a node reads is there, and computed once",
        "ONNX IR specification, graphs; amd/RyzenAI-SW#169",
        True,
        "make the model anew: no runtime loads it",
    ),
    "G10": Rule(
        "no tensor is bfloat16",
        f"{_ONNXSIM}; amd/RyzenAI-SW#390 has run some",
        False,
        "quark-onnx npu deploy FLOAT.onnx --preset BF16, or quark-onnx convert --to"
        " float32",
    ),
    "G11": Rule(
        "the opset is no higher than is advised",
        f"{_DOCS}, modelrun.rst",
        False,
        _LEGALIZE,
    ),
    "G12": Rule(
        "no shape depends on data",
        f"{_VAIP}; the nodes around it run on the CPU",
        False,
        "cut the model in front of it (quark-onnx npu cut)",
    ),
}


@dataclass(frozen=True)
class Finding:
    """A broken rule.

    Attributes:
        rule: name of the rule in ``RULES``.
        node: name of the node; empty for the model as a whole.
        figures: the values that break the rule.
    """

    rule: str
    node: str
    figures: str

    @property
    def severity(self) -> str:
        """Return "error", or "warning" if the sources disagree."""
        return "error" if RULES[self.rule].sure else "warning"

    def __str__(self) -> str:
        rule = RULES[self.rule]
        where = ""
        if self.node:
            where = f" at {self.node}"
        return (
            f"{self.severity} {self.rule}{where}: {self.figures} ({rule.title});"
            f" {rule.fix} [{rule.source}]"
        )
