"""Recipes for language models: scheme, algorithms and layout by target and effort.

``fast`` rounds to nearest and needs no data. ``balanced`` optimizes codes on calibration data.
``best`` trains codes. The scheme of a target has kernels in the target's client.
"""

from __future__ import annotations

from dataclasses import dataclass

from quark_onnx.config.checks import require_known

#: Names of efforts, in the order of runtime.
EFFORTS = ("fast", "balanced", "best")


@dataclass(frozen=True)
class LanguageRecipe:
    """Settings by which a language model is quantized.

    Attributes:
        scheme: option ``--scheme`` of ``llm ptq``.
        algorithms: option ``--algorithm``.
        layout: option ``--layout``.
        exports: option ``--export``.
        kv_cache: option ``--kv-cache``.
        reason: reason for the choice, in a sentence.
    """

    scheme: str
    algorithms: tuple[str, ...] = ()
    layout: str = "quark"
    exports: tuple[str, ...] = ("hf_format",)
    kv_cache: str | None = None
    reason: str = ""

    @property
    def options(self) -> str:
        """The equivalent options of ``llm ptq``.

        >>> LanguageRecipe("int4_wo_128", ("gptq",)).options
        '--scheme int4_wo_128 --algorithm gptq'
        """
        parts = [f"--scheme {self.scheme}"]
        if self.algorithms:
            parts.append(f"--algorithm {' '.join(self.algorithms)}")
        if self.kv_cache is not None:
            parts.append(f"--kv-cache {self.kv_cache}")
        if self.layout != "quark":
            parts.append(f"--layout {self.layout}")
        if self.exports != ("hf_format",):
            parts.append(f"--export {' '.join(self.exports)}")
        return " ".join(parts)


_FP8 = "MI300 multiplies in fp8; a scale for each output and token needs no data"
_FP8_CACHE = f"{_FP8}, and keys and values in fp8 halve the cache"
_MARLIN = "vLLM's kernels for 4-bit weights read blocks of 128, 64 and 32"
_GGUF = "blocks of 32 with an offset are llama.cpp's Q4_1, with the same codes"
_OGA = "AMD's recipe for Ryzen AI: unsigned 4 bits in blocks of 128"
_CPU = "onnxruntime's MatMulNBits multiplies 4-bit weights with float activations"
_AWQ_GPTQ = ("awq", "gptq")
_TRAINED = ("awq", "gptaq", "autoround")

#: By target and effort.
RECIPES: dict[str, dict[str, LanguageRecipe]] = {
    "vllm-mi300": {
        "fast": LanguageRecipe("ptpc_fp8", reason=_FP8),
        "balanced": LanguageRecipe("ptpc_fp8", kv_cache="fp8", reason=_FP8_CACHE),
        "best": LanguageRecipe(
            "ptpc_fp8",
            ("autosmoothquant",),
            kv_cache="fp8",
            reason=f"{_FP8_CACHE}; outliers of activations move into weights",
        ),
    },
    "vllm-cuda": {
        "fast": LanguageRecipe(
            "int4_wo_128", layout="compressed-tensors", reason=_MARLIN
        ),
        "balanced": LanguageRecipe(
            "int4_wo_128", _AWQ_GPTQ, "compressed-tensors", reason=_MARLIN
        ),
        "best": LanguageRecipe(
            "int4_wo_32", _TRAINED, "compressed-tensors", reason=_MARLIN
        ),
    },
    "llama.cpp": {
        "fast": LanguageRecipe("uint4_wo_32", exports=("gguf",), reason=_GGUF),
        "balanced": LanguageRecipe(
            "uint4_wo_32", _AWQ_GPTQ, exports=("gguf",), reason=_GGUF
        ),
        "best": LanguageRecipe(
            "uint4_wo_32", _TRAINED, exports=("gguf",), reason=_GGUF
        ),
    },
    "ryzen-ai": {
        "fast": LanguageRecipe("uint4_wo_128", layout="oga", reason=_OGA),
        "balanced": LanguageRecipe("uint4_wo_128", ("awq",), "oga", reason=_OGA),
        "best": LanguageRecipe("uint4_wo_128", _TRAINED, "oga", reason=_OGA),
    },
    "cpu": {
        "fast": LanguageRecipe("uint4_wo_32", exports=("onnx",), reason=_CPU),
        "balanced": LanguageRecipe(
            "uint4_wo_32", _AWQ_GPTQ, exports=("onnx",), reason=_CPU
        ),
        "best": LanguageRecipe("uint4_wo_32", _TRAINED, exports=("onnx",), reason=_CPU),
    },
}


def recipe_for(target: str, effort: str) -> LanguageRecipe:
    """Return the recipe of a target.

    Args:
        target: key of ``RECIPES``.
        effort: element of ``EFFORTS``.

    Raises:
        ConfigError: the target or the effort is unknown.

    >>> recipe_for("ryzen-ai", "balanced").options
    '--scheme uint4_wo_128 --algorithm awq --layout oga'
    """
    require_known(target, RECIPES, "unknown target")
    require_known(effort, EFFORTS, "unknown recipe")
    return RECIPES[target][effort]
