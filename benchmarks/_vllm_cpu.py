"""Run checkpoints in vLLM on a CPU.

vLLM selects the scheme and the kernel, loads, fuses and repacks the tensors, and quantizes
activations. Two products of its x86 build do not compute the right sums on every processor, and are
replaced there:

- ``cpu_gemm_wna16`` (weights of 4 bits) is built for AVX-512 alone.
- oneDNN's product of int8 adds pairs in 16 bits, which saturate, where there is no VNNI.

The replacement dequantizes the repacked weights and multiplies in float32.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

#: Bits of a weight, and columns that the kernel's blocks have.
_BITS, _BLOCK = 4, 16
#: What is subtracted from weights without zero points.
_MIDDLE = 8.0

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
# One process: the products are replaced in it, and it ends with the worker.
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")


def replaced() -> list[str]:
    """Return the names of the products that are replaced on this processor."""
    import torch

    capability = torch.backends.cpu.get_cpu_capability()
    if capability == "AVX512":
        return []
    return ["cpu_gemm_wna16", "onednn_scaled_mm"]


@contextmanager
def products() -> Iterator[None]:
    """Replace the products that this processor does not compute."""
    if not replaced():
        yield
        return
    import torch
    import vllm._custom_ops as operators
    from vllm.platforms import current_platform

    current_platform.import_kernels()
    library = torch.library.Library("_C", "FRAGMENT")
    if not hasattr(torch.ops._C, "cpu_gemm_wna16"):
        library.define(
            "cpu_gemm_wna16(Tensor input, Tensor q_weight, Tensor(a2!) output,"
            " Tensor scales, Tensor? zeros, Tensor? bias, SymInt pack_factor,"
            " str isa_hint) -> ()"
        )
        library.impl("cpu_gemm_wna16", _product_of_4_bits, "CPU")
    create = operators.create_onednn_scaled_mm

    def create_with_weights(weight: Any, weight_scales: Any, *arguments: Any) -> Any:
        handler = create(weight, weight_scales, *arguments)
        handler.weight, handler.weight_scales = weight.clone(), weight_scales.clone()
        return handler

    operators.create_onednn_scaled_mm = create_with_weights
    operators.onednn_scaled_mm = _product_of_int8
    yield


def _unpacked(packed: Any) -> Any:
    """Return the 4-bit values of int32 words, lowest bits first, along the last axis."""
    import torch

    shifts = torch.arange(0, 32, _BITS, dtype=torch.int32)
    return ((packed[..., None] >> shifts) & 15).flatten(-2).float()


def _product_of_4_bits(
    input: Any,
    q_weight: Any,
    output: Any,
    scales: Any,
    zeros: Any,
    bias: Any,
    pack_factor: int,
    isa_hint: str,
) -> None:
    """Compute vLLM's product of activations (M, K) and weights of 4 bits (K, N) in groups."""
    groups, columns = scales.shape
    rows = input.shape[1]
    # blocks of 16 columns one after the other, each with all rows
    words = q_weight.view(columns // _BLOCK, rows, -1).permute(1, 0, 2)
    codes = _unpacked(words.reshape(rows, -1)).view(groups, -1, columns)
    zero_points = _MIDDLE if zeros is None else _unpacked(zeros)[:, None]
    weight = (codes - zero_points) * scales[:, None].float()
    product = input.float() @ weight.view(rows, columns)
    output.copy_(product if bias is None else product + bias.float())


def _product_of_int8(
    handler: Any,
    x: Any,
    output: Any,
    input_scale: Any,
    input_zp: Any,
    input_zp_adj: Any,
    bias: Any,
) -> Any:
    """Compute vLLM's product of int8 activations (M, K) and weights (K, N)."""
    codes = x.float()
    if input_zp is not None:
        codes = codes - input_zp.float()
    product = (codes @ handler.weight.float()) * handler.weight_scales.view(1, -1)
    product = product * input_scale.float()
    output.copy_(product if bias is None else product + bias.float())
    return output


def logits(model: Path, tokens: Any) -> Any:
    """Return log-probabilities of all tokens, or the scores of a classifier.

    Args:
        model: folder of a checkpoint.
        tokens: ids, int64, batch by length.

    Returns:
        float32, batch by length by vocabulary; batch by classes for a classifier. vLLM computes in
        float32, or in float16 where the layout or its kernel has no float32; both are options of
        vLLM, whose own choice is bfloat16.
    """
    try:
        return _logits(model, tokens, "float32")
    except (ValueError, NotImplementedError) as error:
        # The layout has no float32, or the kernel for AVX-512 has none.
        reasons = ("float32 is not supported", "not implemented for 'Float'")
        if not any(reason in str(error) for reason in reasons):
            raise
    return _logits(model, tokens, "float16")


def _logits(model: Path, tokens: Any, dtype: str) -> Any:
    from transformers import AutoConfig
    from vllm import LLM, SamplingParams

    names = AutoConfig.from_pretrained(model).architectures or [""]
    classifies = names[0].endswith("SequenceClassification")
    loaded = LLM(
        str(model),
        dtype=dtype,
        enforce_eager=True,
        max_model_len=tokens.shape[1] + 1,
        max_logprobs=-1,
        skip_tokenizer_init=True,
        runner="pooling" if classifies else "generate",
    )
    prompts = [{"prompt_token_ids": row.tolist()} for row in tokens]
    try:
        if classifies:
            return _scores(loaded, prompts)
        every = SamplingParams(
            max_tokens=1,
            prompt_logprobs=-1,
            logprobs=-1,
            detokenize=False,
            flat_logprobs=True,
        )
        answers = loaded.generate(prompts, every, use_tqdm=False)
        return np.stack([_log_probabilities(answer) for answer in answers])
    finally:
        loaded.llm_engine.engine_core.shutdown()


def _scores(loaded: Any, prompts: Any) -> Any:
    """Return the scores of a classifier, before the activation."""
    from vllm import PoolingParams

    answers = loaded.classify(
        prompts, pooling_params=PoolingParams(use_activation=False), use_tqdm=False
    )
    return np.array([answer.outputs.probs for answer in answers], np.float32)


def _log_probabilities(answer: Any) -> Any:
    """Return the log-probabilities behind each token of a prompt, length by vocabulary."""
    rows = []
    for flat in (answer.prompt_logprobs, answer.outputs[0].logprobs):
        for start, end in zip(flat.start_indices, flat.end_indices, strict=True):
            if start == end:  # nothing is known before the first token
                continue
            row = np.full(max(flat.token_ids[start:end]) + 1, np.nan, np.float32)
            row[flat.token_ids[start:end]] = flat.logprobs[start:end]
            rows.append(row)
    return np.stack(rows)
