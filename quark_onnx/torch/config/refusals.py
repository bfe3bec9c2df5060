"""Features of other tools for language models that this package refuses, with the reasons."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Refusal:
    """Refusal of an algorithm, a setting or a format.

    Attributes:
        source: where the name comes from.
        reason: why it is refused.
        instead: what to do instead, as an imperative.
    """

    source: str
    reason: str
    instead: str

    def __str__(self) -> str:
        return f"{self.reason}; {self.instead}"


#: By the name of the algorithm.
REFUSED_ALGORITHMS = {
    "svdquant": Refusal(
        "AMD Quark, nunchaku",
        "neither vLLM nor transformers has layers with a low-rank branch beside the"
        " codes, and amd-quark exports none",
        "choose awq or gptaq",
    ),
    "ostquant": Refusal(
        "AMD Quark (train_smooth)",
        "no scales are learned beside rotations in this package, though clients would load"
        " them within the weights",
        "choose rotation:trained=true, and autosmoothquant after it",
    ),
    "twobitscalar": Refusal(
        "AMD Quark",
        "no client loads its codes",
        "choose the scheme uint2_wo_32 with gptaq",
    ),
}
#: By the name of the algorithm and of its setting.
REFUSED_SETTINGS = {
    ("rotation", "online_r1"): Refusal(
        "AMD Quark (online_r1_rotation)",
        "R1 in the weights does the same, costs nothing at runtime and runs in every"
        " client; inputs are rotated at runtime by amd-quark, and by vLLM in the layout"
        " of compressed-tensors",
        "choose r1=true",
    ),
    ("rotation", "train_smooth"): Refusal(
        "AMD Quark",
        "no scales are learned beside rotations in this package, though clients would load"
        " them within the weights",
        "add autosmoothquant",
    ),
}
#: Formats of the KV cache of a checkpoint.
REFUSED_CACHES = {
    name: Refusal(
        "vLLM, onnxruntime-genai",
        f"a checkpoint has no scales for it, since vLLM computes {name} scales for each"
        " token and head itself",
        f"serve any checkpoint with --kv-cache-dtype {name}_per_token_head, or use"
        f" 'quark-onnx llm oga --kv-cache {name}'",
    )
    for name in ("int8", "int4")
}
