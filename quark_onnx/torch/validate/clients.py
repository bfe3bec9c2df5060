"""Table of the checks of a checkpoint by client, and the resulting verdict."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from quark_onnx.common.errors import ConfigError, nearest
from quark_onnx.torch.validate import (
    cache_in_vllm,
    compressed,
    genai,
    llama_cpp,
    model,
    native_fp8,
    packed,
    quark_transformers,
    quark_vllm,
    vllm_names,
)
from quark_onnx.torch.validate.checkpoint import Checkpoint, read
from quark_onnx.torch.validate.fields import NO_KEY, shown
from quark_onnx.torch.validate.finding import (
    SEVERITIES,
    WARNING,
    WRONG,
    Finding,
    Validation,
)
from quark_onnx.torch.validate.rules import GENAI, LLAMA_CPP, TRANSFORMERS, VLLM, broken

Check = Callable[[Checkpoint], Iterator[Finding]]


@dataclass(frozen=True)
class Layout:
    """Checks for a layout of weights in a client.

    Attributes:
        config: checks of the configuration; a refusal skips the checks of layers.
        layers: checks of the layers and their tensors.
        schemes: function that names the schemes of the quantized layers.
        needs: packages that must be installed in addition to the client.
    """

    config: tuple[Check, ...] = ()
    layers: tuple[Check, ...] = ()
    schemes: Callable[[Checkpoint], Iterator[str]] = lambda _: iter(())
    needs: tuple[str, ...] = ()


#: Checks for every layout: for all clients, and for a single client.
#: ``file_findings`` comes first: damage explains many of the findings that follow.
EVERY: tuple[Check, ...] = (
    model.file_findings,
    model.settings_findings,
    model.told_findings,
    model.layer_findings,
    model.head_findings,
    model.scale_findings,
    model.value_findings,
)
OWN: dict[str, tuple[Check, ...]] = {
    "vllm": (
        # vLLM raises where a float model lacks a tensor; transformers initializes it with a warning
        model.strict_findings,
        vllm_names.name_findings,
        vllm_names.order_findings,
        partial(model.code_findings, model.IN_VLLM),
    ),
    "transformers": (model.missing_findings, partial(model.code_findings, ())),
}

# transformers refuses amd-quark before 0.12; amd-quark compiles C++ kernels on import
_QUARK_NEEDS = (
    "amd-quark 0.12 or later with a C++ compiler, or quark_onnx.torch.transformers",
)
_GPTQMODEL = (packed.gptqmodel_config_findings,)

#: Layouts by the client's name and the configuration's quant_method.
LAYOUTS: dict[str, dict[str, Layout]] = {
    "vllm": {
        "float": Layout(layers=(model.float_findings,)),
        "quark": Layout(
            (quark_vllm.quark_config_findings,),
            (
                model.name_findings,
                model.quantized_head_findings,
                quark_vllm.quark_layer_findings,
            ),
            quark_vllm.quark_schemes_in_vllm,
        ),
        "compressed-tensors": Layout(
            (compressed.vllm_config_findings,),
            (
                compressed.vllm_findings,
                partial(compressed.layer_findings, compressed.GroupsInVllm),
                cache_in_vllm.static_cache_findings,
            ),
            partial(compressed.schemes, compressed.GroupsInVllm),
        ),
        "awq": Layout(
            (packed.awq_config_findings,),
            (
                packed.fused_findings,
                packed.awq_expert_findings,
                packed.vllm_awq_findings,
            ),
            packed.schemes,
        ),
        "gptq": Layout(
            (packed.gptq_config_findings,),
            (packed.fused_findings, packed.vllm_gptq_findings),
            packed.schemes,
        ),
        "fp8": Layout(
            (native_fp8.vllm_config_findings,),
            (
                model.name_findings,
                native_fp8.vllm_findings,
                cache_in_vllm.static_cache_findings,
            ),
            native_fp8.schemes,
        ),
    },
    "transformers": {
        "float": Layout(layers=(model.float_findings,)),
        "quark": Layout(
            (quark_transformers.quark_config_findings,),
            (quark_transformers.quark_layer_findings,),
            quark_transformers.quark_schemes,
            _QUARK_NEEDS,
        ),
        "compressed-tensors": Layout(
            (compressed.transformers_config_findings,),
            (
                compressed.transformers_findings,
                partial(compressed.layer_findings, compressed.GroupsInTransformers),
            ),
            partial(compressed.schemes, compressed.GroupsInTransformers),
            # quantizer_compressed_tensors.py of transformers refuses earlier releases
            ("compressed-tensors 0.15 or later",),
        ),
        "awq": Layout(
            _GPTQMODEL,
            (packed.transformers_awq_findings,),
            packed.schemes,
            ("gptqmodel",),
        ),
        "gptq": Layout(
            _GPTQMODEL,
            (packed.transformers_gptq_findings,),
            packed.schemes,
            ("gptqmodel",),
        ),
        "fp8": Layout(
            (native_fp8.transformers_config_findings,),
            (native_fp8.transformers_findings,),
            native_fp8.schemes,
            ("accelerate",),
        ),
    },
}
#: Layouts that clients support, without rules in this package: ``QUANTIZATION_METHODS`` in
#: vllm/model_executor/layers/quantization/__init__.py of vLLM 0.33, and
#: ``AUTO_QUANTIZER_MAPPING`` in quantizers/auto.py of transformers.
_UNCHECKED = {
    "vllm": (
        "modelopt",
        "modelopt_fp4",
        "modelopt_mxfp8",
        "modelopt_mixed",
        "torchao",
        "mxfp4",
        "mxfp8",
        "inc",
        "auto-round",
        "experts_int8",
        "humming",
        "deepseek_v4_fp8",
        "moe_wna16",
    ),
    "transformers": (
        "bitsandbytes",
        "aqlm",
        "quanto",
        "eetq",
        "higgs",
        "hqq",
        "fbgemm_fp8",
        "torchao",
        "bitnet",
        "vptq",
        "spqr",
        "fouroversix",
        "fp_quant",
        "nvfp4",
        "mxfp8",
        "auto-round",
        "mxfp4",
        "metal",
        "sinq",
        "gemma",
    ),
}
#: Exceptions for values of a type that no tool writes; clients fail with the same exceptions.
_MALFORMED = (
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
    re.error,
)
#: Clients by name, with the release whose sources the rules mirror.
RELEASES = {
    "vllm": VLLM,
    "transformers": TRANSFORMERS,
    "llama.cpp": LLAMA_CPP,
    "onnxruntime-genai": GENAI,
}


def validate(folder: Path, client: str) -> Validation:
    """Check by the rules of a client whether it would load a checkpoint correctly.

    Only headers and scales are read, and nothing is loaded.

    Args:
        folder: Hugging Face checkpoint of any tool; for "llama.cpp" a ``*.gguf`` file or its
            folder; for "onnxruntime-genai" the folder of ``genai_config.json``.
        client: "vllm", "transformers", "llama.cpp" or "onnxruntime-genai".

    Returns:
        The verdict with the findings.

    Raises:
        ConfigError: the client is unknown.
        ModelError: the folder contains no checkpoint.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as empty:
    ...     print(validate(Path(empty), "llama.cpp").word)
    refused
    """
    if client not in RELEASES:
        raise ConfigError(
            f"unknown client {client!r}{nearest(client, RELEASES)}; there are"
            f" {', '.join(RELEASES)}"
        )
    # callers may hand over a string, as ``validate("llama", "vllm")`` in a notebook
    folder = Path(folder)
    needs: tuple[str, ...] = ()
    if client in LAYOUTS and folder.suffix == ".gguf":
        raise ConfigError(
            f"{folder} is a GGUF file, whose rules are known for llama.cpp alone: give"
            " --for llama.cpp, or the folder of a checkpoint"
        )
    # neither a GGUF file nor a folder of onnxruntime-genai has a layout of Hugging Face
    if client == "llama.cpp":
        layout = "gguf"
        models = llama_cpp.read_models(folder)
        schemes = [scheme for model in models for scheme in llama_cpp.schemes(model)]
        findings = [
            finding for model in models for finding in llama_cpp.findings(model)
        ]
        if not models:
            findings.append(broken("gguf-none", str(folder), "there is no *.gguf"))
    elif client == "onnxruntime-genai":
        layout, schemes, findings = "onnx", [], [*genai.findings(folder)]
    else:
        checkpoint = read(folder)
        layout = checkpoint.method
        needs = LAYOUTS[client].get(layout, Layout()).needs
        findings, is_readable = _checked(checkpoint, client)
        schemes = _schemes(checkpoint, client) if is_readable else []
    ordered = sorted(
        # EVERY and a layout may look at the same key; a dictionary drops equal findings in order
        dict.fromkeys(findings),
        # the sort is stable: findings of a severity keep the order of the checks
        key=lambda finding: SEVERITIES.index(finding.severity),
    )
    return Validation(
        str(folder),
        client,
        RELEASES[client],
        layout,
        dict(Counter(schemes)),
        needs,
        tuple(ordered),
    )


def findings_of(checkpoint: Checkpoint, client: str) -> list[Finding]:
    """Return the rules of a client that a checkpoint breaks.

    Args:
        checkpoint: configuration and headers.
        client: "vllm" or "transformers".
    """
    return _checked(checkpoint, client)[0]


def _checked(checkpoint: Checkpoint, client: str) -> tuple[list[Finding], bool]:
    """Return the findings, and whether the configuration tells the formats of layers."""
    method = checkpoint.method
    layout = LAYOUTS[client].get(method, Layout())
    # the rules of files and sizes hold for layouts without rules of their own as well
    findings = _run((*EVERY, *OWN[client]), checkpoint)
    # "float" is a layout of both clients, so that a model without quantization passes here
    if method not in LAYOUTS[client]:
        findings.append(_unknown(checkpoint, client))
    config = _run(layout.config, checkpoint)
    findings += config
    is_readable = not _stops(config)
    if is_readable:
        findings += _run(layout.layers, checkpoint)
    return findings, is_readable


def _unknown(checkpoint: Checkpoint, client: str) -> Finding:
    """Return the finding of an unknown layout, or of a layout without rules."""
    place = "quantization_config.quant_method"
    method = NO_KEY
    if "quant_method" in checkpoint.quantization:
        method = shown(checkpoint.quantization["quant_method"])
    if checkpoint.method in _UNCHECKED[client]:
        return broken("method-unchecked", place, method)
    # transformers raises without a method, and skips an unknown one with a warning
    # (quantizers/auto.py, supports_quant_method)
    if client != "transformers" or not checkpoint.method:
        return broken("method", place, method)
    # transformers skips the configuration: float weights load correctly, codes become the weights
    quantized = any(module.is_quantized for module in checkpoint.modules.values())
    text = f"{method}, and the weights are read as floats"
    return broken("method", place, text, WRONG if quantized else WARNING)


#: Rules without which layers cannot be checked.
_FATAL = (
    "ct-groups",
    "ct-arguments",
    "ct-format",
    "awq-config",
    "gptq-config",
    "gptqmodel-config",
    "fp8-config",
    "malformed",
)


def _stops(findings: list[Finding]) -> bool:
    """Return whether findings in the configuration leave nothing to check layers by."""
    return any(
        finding.rule in _FATAL
        or finding.place == "quantization_config.global_quant_config"
        for finding in findings
    )


def _run(checks: Iterable[Check], checkpoint: Checkpoint) -> list[Finding]:
    """Return the findings of checks in their order; a check that fails becomes a finding."""
    findings = list[Finding]()
    for check in checks:
        try:
            # a list first, so that a check that fails has no other findings
            findings += [*check(checkpoint)]
        except _MALFORMED as error:
            text = f"{type(error).__name__}: {error}"
            findings.append(broken("malformed", "config.json", text))
    return findings


def _schemes(checkpoint: Checkpoint, client: str) -> list[str]:
    """Return the schemes of the layers; none if an entry has a type that no tool writes."""
    layout = LAYOUTS[client].get(checkpoint.method, Layout())
    try:
        return [*layout.schemes(checkpoint)]
    except _MALFORMED:
        return []
