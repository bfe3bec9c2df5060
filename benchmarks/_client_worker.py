"""Load models in the environment of a client, and write their logits.

    python _client_worker.py CLIENT

The standard input has a JSON object a line: ``model`` (a folder or a file), ``tokens`` (.npy, batch
by length) and ``logits`` (.npy, to be written). The answer to each is a JSON object a line with
``reason``, which is empty where the client has run the model, and ``option``, which is empty where
the client needs none. The first line of the output has the ``versions`` of the client's packages.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

#: Tokens of the models of this benchmark.
VOCABULARY = 96


class Refused(Exception):
    """The client does not load the model as it is."""


def transformers_logits(model: Path, tokens: Any) -> Any:
    """Return the logits of a checkpoint in transformers."""
    import torch
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(model, device_map="cpu").eval()
    with torch.no_grad():
        return loaded(torch.from_numpy(tokens)).logits.float().numpy()


def compressed_tensors_logits(model: Path, tokens: Any) -> Any:
    """Return the logits of a checkpoint in transformers with compressed-tensors.

    compressed-tensors 0.20 has the wrong shape for packed zero points, unless it dequantizes.
    """
    import torch
    from transformers import AutoModelForCausalLM, CompressedTensorsConfig

    try:
        return transformers_logits(model, tokens)
    except RuntimeError as error:
        if "mismatched_sizes" not in str(error):
            raise
    loaded = AutoModelForCausalLM.from_pretrained(
        model,
        device_map="cpu",
        quantization_config=CompressedTensorsConfig(dequantize=True),
    ).eval()
    with torch.no_grad():
        logits = loaded(torch.from_numpy(tokens)).logits.float().numpy()
    return logits, "quantization_config=CompressedTensorsConfig(dequantize=True)"


def gptqmodel_logits(model: Path, tokens: Any) -> Any:
    """Return the logits of an AWQ checkpoint in transformers, by gptqmodel's torch kernel."""
    import torch
    from transformers import AutoModelForCausalLM, AwqConfig

    loaded = AutoModelForCausalLM.from_pretrained(
        model,
        device_map="cpu",
        quantization_config=AwqConfig(backend="torch_awq"),
    ).eval()
    with torch.no_grad():
        return loaded(torch.from_numpy(tokens)).logits.float().numpy()


def our_loader_logits(model: Path, tokens: Any) -> Any:
    """Return the logits of a checkpoint in transformers with this package's loader."""
    import_module("quark_onnx.torch.transformers")
    return transformers_logits(model, tokens)


def llama_cpp_logits(model: Path, tokens: Any) -> Any:
    """Return log-probabilities behind the last tokens in llama.cpp, with a float32 cache.

    xllamacpp has wheels; it contains llama.cpp's server, which gives log-probabilities.
    """
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = str(model)
    params.n_ctx, params.n_parallel, params.cpuparams.n_threads = 64, 1, 1
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    # the repacked kernels need matrix units, which not every virtual machine has
    params.no_extra_bufts = True
    server = xllamacpp.Server(params)
    size = VOCABULARY
    rows = []
    for ids in tokens:
        request = {"prompt": ids.tolist(), "n_predict": 1, "n_probs": size}
        answered = server.handle_completions(request)
        found = answered["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
        by_token = {entry["id"]: entry["logprob"] for entry in found}
        rows.append([[by_token[token] for token in range(size)]])
    return np.array(rows)


def onnxruntime_logits(model: Path, tokens: Any) -> Any:
    """Return the logits of a decoder in onnxruntime, without past keys and values."""
    import onnxruntime as ort

    session = ort.InferenceSession(str(model), providers=["CPUExecutionProvider"])
    feeds = {"input_ids": tokens, "attention_mask": np.ones_like(tokens)}
    for each in session.get_inputs():
        if each.name not in feeds:
            heads, size = each.shape[1], each.shape[3]
            feeds[each.name] = np.zeros((len(tokens), heads, 0, size), np.float32)
    return session.run(["logits"], feeds)[0]


def genai_logits(model: Path, tokens: Any) -> Any:
    """Return the logits of the last tokens in onnxruntime-genai, from a built model."""
    import onnxruntime_genai as genai

    from quark_onnx.torch.exports.oga import write_oga

    output = model.with_name(f"{model.name}-genai")
    write_oga(model, output)
    loaded = genai.Model(str(output))
    rows = []
    for ids in tokens:
        settings = genai.GeneratorParams(loaded)
        settings.set_search_options(max_length=len(ids) + 1, do_sample=False)
        generator = genai.Generator(loaded, settings)
        generator.append_tokens(ids.tolist())
        rows.append(np.array(generator.get_logits()).reshape(1, -1))
    return np.stack(rows)


def vllm_model(model: Path, tokens: Any) -> None:
    """Build vLLM's model and load all tensors, without kernels."""
    from tests.quark_onnx.torch.validate.vllm_model import built, load

    wrong = load(built(model), model)
    if wrong:
        raise Refused("; ".join(wrong[:3]))


def vllm_context() -> AbstractContextManager[None]:
    """Return the context in which vLLM's platform is the CPU."""
    from tests.quark_onnx.torch.validate.vllm_model import on_the_cpu

    return on_the_cpu()


def vllm_cpu_logits(model: Path, tokens: Any) -> Any:
    """Return log-probabilities in vLLM on a CPU, or the scores of a classifier."""
    import _vllm_cpu

    return _vllm_cpu.logits(model, tokens)


def vllm_cpu_context() -> AbstractContextManager[None]:
    """Return the context in which products are replaced that this processor does not compute."""
    import _vllm_cpu

    return _vllm_cpu.products()


#: By client: the function that runs a model, its context, and the packages with a version.
PROGRAMS: dict[str, tuple[Callable[[Path, Any], Any], Any, tuple[str, ...]]] = {
    "vLLM": (vllm_model, vllm_context, ("vllm", "torch")),
    "vLLM on a CPU": (vllm_cpu_logits, vllm_cpu_context, ("vllm-cpu", "torch")),
    "transformers and amd-quark": (
        transformers_logits,
        nullcontext,
        ("transformers", "amd-quark"),
    ),
    "transformers and our loader": (
        our_loader_logits,
        nullcontext,
        ("transformers",),
    ),
    "transformers and compressed-tensors": (
        compressed_tensors_logits,
        nullcontext,
        ("transformers", "compressed-tensors"),
    ),
    "transformers and gptqmodel": (
        gptqmodel_logits,
        nullcontext,
        ("transformers", "gptqmodel"),
    ),
    "llama.cpp": (llama_cpp_logits, nullcontext, ("xllamacpp",)),
    "onnxruntime": (onnxruntime_logits, nullcontext, ("onnxruntime",)),
    "onnxruntime-genai": (genai_logits, nullcontext, ("onnxruntime-genai",)),
}


def answer(run: Callable[[Path, Any], Any], request: dict[str, str]) -> dict[str, str]:
    """Run a model and write its logits; return the reason where the client refuses."""
    option = ""
    try:
        found = run(Path(request["model"]), np.load(request["tokens"]))
        logits, option = found if isinstance(found, tuple) else (found, "")
        if logits is not None:
            np.save(request["logits"], logits)
    except Exception as error:  # whatever a client raises is its refusal
        lines = [line for line in str(error).splitlines() if line.strip()]
        kind = type(error).__name__
        return {
            "reason": f"{kind}: {lines[0][:300] if lines else 'no message'}",
            "option": "",
        }
    return {"reason": "", "option": option}


def main() -> None:
    """Answer all requests."""
    # clients print what they like; answers have a descriptor of their own
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    run, context, packages = PROGRAMS[sys.argv[1]]
    versions = ", ".join(f"{name} {version(name)}" for name in packages)
    if "vllm-cpu" in packages:
        from _vllm_cpu import replaced

        versions += "".join(f", {name} in float32 by torch" for name in replaced())
    with context():
        print(json.dumps({"versions": versions}), file=out, flush=True)
        for line in sys.stdin:
            print(json.dumps(answer(run, json.loads(line))), file=out, flush=True)


if __name__ == "__main__":
    main()
