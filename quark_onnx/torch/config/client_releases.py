"""Releases of the clients whose rules and results this package knows.

``quark_onnx.torch.validate`` names them as the sources of its rules, and benchmarks/llm_clients.py
installs them. tests/quark_onnx/torch/test_scheme_clients.py compares them with the results.
"""

from __future__ import annotations

RELEASES = {
    "vllm": "0.33.0",
    "transformers": "5.24.0",
    "amd-quark": "0.13",
    "compressed-tensors": "0.20.0",
    "gptqmodel": "7.7.0",
    "gguf": "0.19",
    "onnxruntime-genai": "0.18.0",
}


def release(package: str) -> str:
    """Return a package with its release.

    >>> release("amd-quark")
    'amd-quark 0.13'
    """
    return f"{package} {RELEASES[package]}"


def pinned(package: str) -> str:
    """Return what pip installs for a package.

    >>> pinned("amd-quark")
    'amd-quark==0.13'
    """
    return f"{package}=={RELEASES[package]}"
