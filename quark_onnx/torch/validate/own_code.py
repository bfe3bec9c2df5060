"""Check for models whose code is in the checkpoint alone."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from importlib.util import find_spec

from quark_onnx.torch.validate.checkpoint import CONFIG, Checkpoint
from quark_onnx.torch.validate.finding import WARNING, Finding
from quark_onnx.torch.validate.rules import broken

#: Types that vLLM has, and transformers lacks: ``_CONFIG_REGISTRY`` of
#: vllm/transformers_utils/config.py.
_IN_VLLM = frozenset(
    (
        "bagel",
        "bailing_moe_v3_vl",
        "chatglm",
        "modernvbert",
        "colpali",
        "colqwen3",
        "ops_colqwen3",
        "qwen3_vl_nemotron_embed",
        "cosmos3_edge",
        "deepseek_vl_v2",
        "deepseek_v32",
        "deepseek_v4",
        "deepseek_v41",
        "dots3_note",
        "k3_dspark",
        "funaudiochat",
        "hy_v4",
        "hyperclovax",
        "isaac",
        "kimi_k2",
        "kimi_linear",
        "kimi_vl",
        "kimi_k25",
        "kimi_k3",
        "muse_glimmer",
        "muse_glimmer_text",
        "muse_glimmer_vision",
        "muse_glimmer_assistant",
        "RefinedWeb",
        "RefinedWebModel",
        "mlp_speculator",
        "medusa",
        "midashenglm",
        "minimax_m3_vl",
        "minimax_m3_mtp",
        "moondream3",
        "moss_transcribe_diarize",
        "eagle",
        "speculators",
        "openvla",
        "ovis",
        "ultravox",
        "step3_vl",
        "step3_text",
        "step3p5",
        "qianfan_ocr",
        "qwen3_asr",
        "unlimited-ocr",
        "unlimited_ocr",
        "inkling_mm_model",
        "inkling_model",
    )
)


def code_findings_in_vllm(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Yield a finding if vLLM needs Python files of the checkpoint."""
    return _code_findings(checkpoint, _IN_VLLM)


def code_findings(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Yield a finding if transformers needs Python files of the checkpoint."""
    return _code_findings(checkpoint, ())


def _code_findings(checkpoint: Checkpoint, own: Collection[str]) -> Iterator[Finding]:
    """Yield a finding for a model type that is known to the files of the checkpoint alone.

    Args:
        checkpoint: configuration and headers.
        own: types that the client knows in addition to those of transformers.
    """
    kind = checkpoint.config.get("model_type")
    # With a class of its own, a client leaves the files of the checkpoint alone.
    if not checkpoint.config.get("auto_map") or kind in own:
        return
    place = f"{CONFIG}, auto_map"
    if find_spec("transformers") is None:
        text = f"transformers, which tells whether {kind!r} is known, is not installed"
        yield broken("own-code", place, text, WARNING)
        return
    from transformers import CONFIG_MAPPING

    if kind not in CONFIG_MAPPING:
        text = f"{kind!r} is a model whose code is in the checkpoint"
        yield broken("own-code", place, text)
