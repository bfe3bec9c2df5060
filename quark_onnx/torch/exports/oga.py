"""write_oga: build a model of onnxruntime-genai from a checkpoint, and verify it.

The model builder of onnxruntime-genai copies the integer codes of a checkpoint of the layout
``oga`` into MatMulNBits. By default it also quantizes a float head to 4 bits, and lets the CPU
round activations to int8. Both change the generated tokens, so both are turned off. The key-value
cache stays float unless int8 or int4 is asked for (``oga_cache``).
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from calibrators.scratch import ScratchFolder
from quark_onnx.common.errors import AccuracyError, ConfigError, ModelError
from quark_onnx.torch.checkpoints.load import load_checkpoint
from quark_onnx.torch.checkpoints.safetensors_io import check_no_adapter
from quark_onnx.torch.exports.oga_cache import (
    CacheScales,
    check_cache,
    measure_cache,
    rounded_cache,
)
from quark_onnx.torch.models.structure import vocabulary_of
from quark_onnx.torch.pipelines.ptq import Text, text_windows, tokenizer_of
from quark_onnx.torch.runtime.checkpoint_folder import (
    check_apart,
    check_free,
    check_links,
)
from quark_onnx.torch.runtime.model_builder import require_builder
from quark_onnx.torch.validate.checkpoint import read
from quark_onnx.torch.validate.genai import check_readable

#: Options of the model builder: a float head stays float, and activations are float32.
BUILDER_OPTIONS = ("nodes_to_exclude=/lm_head/MatMul", "accuracy_level=1")
#: Subfolder with a copy of the checkpoint, for flows that start from a checkpoint.
CHECKPOINT = "checkpoint"
#: File with the commands that prepare the model for the NPU.
FLOWS = "ryzen_ai.json"
#: Tolerance of logits, relative to the greatest logit; float32 sums depend on the order.
_TOLERANCE = 1e-3
#: Number and length of the prompts.
_PROMPTS, _PROMPT_TOKENS = 4, 8


@dataclass(frozen=True)
class OgaModel:
    """Model of onnxruntime-genai, with the result of its verification.

    Attributes:
        folder: folder with genai_config.json and model.onnx.
        bytes: size of the model's files.
        tokens: number of tokens generated for all prompts.
        equal: number of generated tokens that equal those of transformers, which rounds keys and
            values alike if the cache is quantized.
        difference: maximum difference of the prompts' logits from transformers, relative to the
            greatest logit. If the cache is quantized, transformers rounds keys and values alike.
        kv_cache: format of keys and values: "float", "int8" or "int4".
        cache_difference: the same difference in transformers between a rounded and a float cache.
        float_cache_equal: number of generated tokens that equal those of transformers with a float
            cache; ``equal`` if the cache is float.
        float_cache_tokens: number of tokens in that comparison.
    """

    folder: Path
    bytes: int
    tokens: int
    equal: int
    difference: float
    kv_cache: str = "float"
    cache_difference: float = 0.0
    float_cache_equal: int = 0
    float_cache_tokens: int = 0

    def __str__(self) -> str:
        logits = f"logits differ by {self.difference:.1g} of the greatest"
        if self.kv_cache == "float":
            return (
                f"onnxruntime-genai generates {self.equal} of {self.tokens} tokens as"
                f" transformers does with the same quantized weights; {logits}"
            )
        return (
            f"onnxruntime-genai generates {self.float_cache_equal} of"
            f" {self.float_cache_tokens} tokens as transformers does with a float KV cache,"
            f" and {self.equal} of {self.tokens} with the same {self.kv_cache} KV cache;"
            f" there {logits}. The cache changes logits by {self.cache_difference:.1g}"
        )


def write_oga(  # noqa: PLR0913
    checkpoint: Path | str,
    output: Path | str,
    *,
    new_tokens: int = 32,
    kv_cache: str | None = None,
    text: Text | None = None,
    trust_code: bool = False,
) -> OgaModel:
    """Build a model of onnxruntime-genai for the CPU, and verify its tokens.

    The folder also gets a copy of the checkpoint and ``ryzen_ai.json``. This file has the commands
    and settings with which AMD's tools convert the checkpoint for the NPU, or for NPU and GPU.

    Args:
        checkpoint: a checkpoint of the layout ``oga`` or ``awq``.
        output: the folder of the model; may exist only if it is empty.
        new_tokens: number of tokens per prompt that are compared with those of transformers.
        kv_cache: "int8" or "int4", with a static scale for each channel of each key head; None for
            a float cache.
        text: calibration data of the cache.
        trust_code: run Python files of the checkpoint.

    Returns:
        The model, and its agreement with transformers.

    Raises:
        ConfigError: the folder is not empty, the checkpoint has a different layout, or the cache
            has an unknown format or no data.
        MissingDependency: onnxruntime-genai is not installed.
        ModelError: the model builder does not support the model.
        AccuracyError: the model generates different tokens; nothing is written.
    """
    checkpoint, output = Path(checkpoint), Path(output)
    # Everything that can fail early is checked before the model is loaded.
    check_oga(output)
    check_apart(output, checkpoint)
    check_links(checkpoint)
    check_no_adapter(checkpoint)
    check_readable(read(checkpoint))
    if kv_cache is not None:
        check_cache(kv_cache)
        if text is None:
            raise ConfigError(
                f"an {kv_cache} KV cache has scales that only data can tell; give text",
            )
    output.parent.mkdir(parents=True, exist_ok=True)
    # In the parent of the output, so that the final renaming stays on one file system.
    with ScratchFolder(output.parent, output.name) as folder:
        built = folder / "model"
        # In float32, as the builder's model for the CPU computes.
        model: Any = load_checkpoint(
            checkpoint,
            dtype=torch.float32,
            trust_code=trust_code,
        )
        scales = None
        options: tuple[str, ...] = BUILDER_OPTIONS
        if kv_cache is not None and text is not None:
            tokenizer = tokenizer_of(checkpoint, trust_code)
            windows = text_windows(text, tokenizer, model)
            scales = measure_cache(model, windows, kv_cache)
            file = folder / "kv_scales.json"
            file.write_text(json.dumps(scales.document()), encoding="utf-8")
            options = (*options, *scales.options(str(file)))
        if trust_code:
            options = (*options, "hf_remote=true")
        run_builder(checkpoint, built, folder / "cache", options)
        # Before the copy of the checkpoint, which is no part of the model.
        size = sum(path.stat().st_size for path in built.iterdir())
        prompts = _prompts(model)
        generated = generated_tokens(built, prompts.tolist(), new_tokens)
        tokens, equal, difference = _compared(
            model, prompts, generated, new_tokens, scales
        )
        result = OgaModel(
            output,
            size,
            tokens,
            equal,
            difference,
            kv_cache or "float",
            float_cache_equal=equal,
            float_cache_tokens=tokens,
        )
        if scales is not None:
            tokens, equal, _ = _compared(model, prompts, generated, new_tokens, None)
            result = replace(
                result,
                cache_difference=_cache_difference(model, scales),
                float_cache_equal=equal,
                float_cache_tokens=tokens,
            )
        # Rounding may swap two almost equal logits: other tokens with equal logits are no error.
        if result.equal < result.tokens and result.difference > _TOLERANCE:
            raise AccuracyError(f"{output}: {result}. Nothing was written")
        shutil.copytree(checkpoint, built / CHECKPOINT)
        (built / FLOWS).write_text(
            json.dumps(ryzen_ai_flows(), indent=2) + "\n",
            encoding="utf-8",
        )
        # Windows cannot replace a folder, even an empty one.
        if output.exists():
            output.rmdir()
        built.rename(output)
    return result


def check_oga(output: Path) -> None:
    """Raise the errors of ``write_oga`` that are known in advance."""
    require_builder()
    check_free(output)


def ryzen_ai_flows() -> dict[str, Any]:
    """Return the commands of AMD's tools that convert the checkpoint for Ryzen AI 1.8.

    The source is "Preparing OGA Models" and "OnnxRuntime GenAI (OGA) Flow" of ryzenai.docs.amd.com.
    The commands are not run here, since the tools exist for Windows only.
    """
    model = {
        "external_data_file": "model_jit.pb.bin",
        "hybrid_opt_free_after_prefill": "1",
        "hybrid_opt_max_seq_length": "4096",
        "hybrid_opt_chunk_context": "1",
    }
    return {
        "release": "Ryzen AI 1.8, Windows, Strix Point or Krackan Point",
        # The fastest first; full fusion exists for the models that AMD lists (llm_list.rst).
        "npu, up to 4,096 tokens": {
            "command": _model_generate("npu", "full_fusion", "npu-4k"),
        },
        "npu, up to 16,384 tokens": {
            "command": _model_generate("npu", "token_fusion", "npu-16k")
            + " --extra_options max_seq_len=16384",
        },
        "npu, any model": {"command": _model_generate("npu", "basic", "npu-basic")},
        "hybrid": {
            "command": _model_generate("hybrid", "", "hybrid"),
            "genai_config.json for more than 4096 tokens": {
                "model": {
                    "decoder": {
                        "session_options": {
                            "provider_options": [{"RyzenAI": model}],
                        },
                    },
                },
                "search": {"chunk_size": 2048},
            },
        },
    }


def _model_generate(processor: str, form: str, folder: str) -> str:
    """Return the command line of AMD's tool that makes a folder of the checkpoint.

    Args:
        processor: "npu" or "hybrid".
        form: how the NPU's operators are fused; empty for hybrid.
    """
    mode = f"{processor} --{form}" if form else processor
    return f"model_generate --{mode} --input {CHECKPOINT} --output {folder}"


def run_builder(
    checkpoint: Path,
    folder: Path,
    cache: Path,
    options: tuple[str, ...],
) -> None:
    """Run the model builder in a subprocess, since it prints a line per node."""
    command = [
        sys.executable,
        "-m",
        "onnxruntime_genai.models.builder",
        *("-i", str(checkpoint.resolve())),
        *("-o", str(folder)),
        *("-c", str(cache)),
        *("-p", "int4"),
        *("-e", "cpu"),
        "--extra_options",
        *options,
    ]
    completed = subprocess.run(command, capture_output=True, text=True, check=False)
    if completed.returncode or not (folder / "genai_config.json").is_file():
        # The last line of a traceback names the error.
        last = [line for line in completed.stderr.splitlines() if line.strip()][-1:]
        raise ModelError(
            f"the model builder of onnxruntime-genai fails on {checkpoint}:"
            f" {''.join(last)[:300] or 'it says nothing'}",
        )


def _prompts(model: Any) -> Any:
    """Return random token ids of shape (prompts, tokens)."""
    generator = torch.Generator().manual_seed(0)
    size = (_PROMPTS, _PROMPT_TOKENS)
    return torch.randint(vocabulary_of(model), size, generator=generator)


def _cache_difference(model: Any, scales: CacheScales) -> float:
    """Return the maximum difference of the prompts' logits through the rounded cache."""
    prompts = _prompts(model)
    with torch.no_grad():
        # Logits of the next token, (prompts, vocabulary).
        exact = model(input_ids=prompts).logits[:, -1]
        with rounded_cache(model, scales):
            rounded = model(input_ids=prompts).logits[:, -1]
    return float((rounded - exact).abs().max() / exact.abs().max())


def _compared(
    model: Any,
    prompts: Any,
    generated: Sequence[tuple[list[int], list[float]]],
    new_tokens: int,
    scales: CacheScales | None,
) -> tuple[int, int, float]:
    """Compare generated tokens with those that transformers generates greedily.

    Args:
        prompts: token ids of shape (prompts, tokens).
        generated: tokens of onnxruntime-genai and logits of the first of them, per prompt.
        scales: scales by which transformers rounds keys and values; None for a float cache.

    Returns:
        The number of tokens, the number of equal tokens, and the difference of logits.
    """
    total, equal, difference = 0, 0, 0.0
    for prompt, (tokens, logits) in zip(prompts, generated, strict=True):
        with torch.no_grad(), rounded_cache(model, scales):
            wanted = model(input_ids=prompt[None]).logits[0, -1]
            expected = model.generate(
                prompt[None],
                max_new_tokens=new_tokens,
                do_sample=False,
                num_beams=1,
            )[0, _PROMPT_TOKENS:].tolist()
        error = (torch.tensor(logits) - wanted).abs().max() / wanted.abs().max()
        difference = max(difference, float(error))
        # onnxruntime-genai omits the end-of-text token
        expected = _before_end(expected, model)
        tokens = _before_end(tokens, model)
        # Tokens beyond the end of the other text are different tokens.
        total += max(len(expected), len(tokens))
        equal += _agreeing(expected, tokens)
    return total, equal, difference


def _before_end(tokens: list[int], model: Any) -> list[int]:
    """Return tokens without the end-of-text token."""
    # A model has one end, several or none.
    ends = model.generation_config.eos_token_id
    if not isinstance(ends, list):
        ends = [ends]
    if tokens and tokens[-1] in ends:
        return tokens[:-1]
    return tokens


def _agreeing(expected: list[int], tokens: list[int]) -> int:
    """Return the length of the common prefix of two token lists."""
    count = 0
    for wanted, token in zip(expected, tokens, strict=False):
        if wanted != token:
            return count
        count += 1
    return count


def generated_tokens(
    folder: Path,
    prompts: list[list[int]],
    new_tokens: int,
) -> list[tuple[list[int], list[float]]]:
    """Generate greedily with onnxruntime-genai; return tokens and logits per prompt."""
    import onnxruntime_genai as genai

    model = genai.Model(str(folder))
    results = []
    for prompt in prompts:
        settings = genai.GeneratorParams(model)
        settings.set_search_options(
            max_length=len(prompt) + new_tokens,
            do_sample=False,
            num_beams=1,
        )
        generator = genai.Generator(model, settings)
        generator.append_tokens(prompt)
        # After the prompt, the logits belong to its last token.
        logits = generator.get_logits().reshape(-1).tolist()
        while not generator.is_done():
            generator.generate_next_token()
        # The sequence begins with the prompt.
        results.append((list(generator.get_sequence(0))[len(prompt) :], logits))
    return results
