"""Language models of several kinds, quantized file to file, for clients that compute."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from _results import Row, table

#: Sizes of the random models.
_SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_EXPERTS: dict[str, Any] = _SIZES | {
    "moe_intermediate_size": 64,
    "num_experts_per_tok": 2,
}
#: Relative difference of logits (L2) up to which a client computes the same, unless a relative
#: noise of ``_NOISE`` in the embeddings changes the logits by half of it: an activation between two
#: codes becomes a step.
_TOLERANCE, _NOISE = 5e-3, 1e-6


class Skipped(Exception):
    """A model is not there."""


@dataclass(frozen=True)
class ClientModel:
    """A model, and how it is quantized.

    Attributes:
        type: its type in transformers, or "mixtext" for the model of QUARK_ONNX_DATA.
        settings: settings of a random model.
        task: the class of transformers that has its head, after "AutoModelFor".
        scheme: name of the scheme.
        layout: layout of the checkpoint.
        exclude: further globs of layers that stay float.
        mtp: whether a layer for multi-token prediction is appended to the files.
    """

    type: str
    settings: dict[str, Any] = field(default_factory=dict)
    task: str = "CausalLM"
    scheme: str = "int4_wo_32"
    layout: str = "compressed-tensors"
    exclude: tuple[str, ...] = ()
    mtp: bool = False


_CLASSES = {"num_labels": 3}
#: On a processor without AVX-512 vLLM has no kernel for experts of 4 bits.
_FLOAT_EXPERTS = ("*.experts.*",)
_GLM = _EXPERTS | {
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "num_nextn_predict_layers": 1,
}
MODELS: dict[str, ClientModel] = {
    "classifier, Llama": ClientModel(
        "llama", _SIZES | _CLASSES, "SequenceClassification"
    ),
    "classifier, Llama, int8": ClientModel(
        "llama", _SIZES | _CLASSES, "SequenceClassification", scheme="int8"
    ),
    "classifier, Qwen 3, AWQ": ClientModel(
        "qwen3", _SIZES | _CLASSES, "SequenceClassification", "uint4_wo_32", "awq"
    ),
    "experts, Qwen 3": ClientModel(
        "qwen3_moe", _EXPERTS | {"num_experts": 4}, exclude=_FLOAT_EXPERTS
    ),
    "experts, Mixtral": ClientModel(
        "mixtral", _SIZES | {"num_local_experts": 4}, exclude=_FLOAT_EXPERTS
    ),
    "multi-token prediction, GLM 4": ClientModel(
        "glm4_moe", _GLM, exclude=_FLOAT_EXPERTS, mtp=True
    ),
    "mixtext": ClientModel("mixtext", scheme="int4_wo_128"),
    "mixtext, zero points": ClientModel("mixtext", scheme="uint4_wo_128", layout="awq"),
    "mixtext, int8": ClientModel("mixtext", scheme="int8"),
}


def compared(model: ClientModel, run: Callable[..., str], folder: Path) -> Row:
    """Return what a client computes next to ``load_checkpoint``.

    Args:
        model: the model.
        run: runs a client, with the paths of a model, of tokens, and of logits to write.
        folder: a temporary folder.

    Raises:
        Skipped: the model is not there.
    """
    from quark_onnx.torch.config.language import config_for
    from quark_onnx.torch.pipelines.file_to_file import Writing, quantize_checkpoint

    source, calibration, tokens = _source(model, folder)
    config = config_for(model.scheme)
    config = config.with_(exclude=(*config.exclude, *model.exclude))
    target = folder / "quantized"
    writing = Writing(layout=model.layout)
    quantize_checkpoint(
        source, calibration, config, target, writing=writing, progress=False
    )
    wanted, noise = _reference(target, tokens)
    paths = {"tokens": folder / "tokens.npy", "logits": folder / "logits.npy"}
    np.save(paths["tokens"], tokens)
    run(model=str(target), **{name: str(path) for name, path in paths.items()})
    computed = np.load(paths["logits"])
    difference = _distance(computed, wanted)
    row: Row = {
        "scheme": model.scheme,
        "layout": model.layout,
        "cell": "loads" if difference <= max(_TOLERANCE, 2 * noise) else "differs",
        "difference": difference,
        "noise": noise,
        "same": int((computed.argmax(-1) == wanted.argmax(-1)).sum()),
        "of": wanted[..., 0].size,
    }
    if model.task == "CausalLM":
        row["perplexity"] = _perplexity(computed, tokens)
        row["ours"] = _perplexity(wanted, tokens)
    return row


def _source(model: ClientModel, folder: Path) -> tuple[Path, list[Any], Any]:
    """Return a float checkpoint, calibration batches, and the tokens that are compared."""
    import torch

    if model.type == "mixtext":
        data = os.environ.get("QUARK_ONNX_DATA")
        if data is None:
            raise Skipped("QUARK_ONNX_DATA names no folder")
        llm = Path(data) / "llm"
        return llm / "mixtext", *_mixtext_tokens(llm)
    source = folder / "float"
    _write_random(model, source)
    generator = torch.Generator().manual_seed(0)
    calibration = list(torch.randint(3, 96, (8, 1, 24), generator=generator))
    return (
        source,
        calibration,
        torch.randint(3, 96, (4, 24), generator=generator).numpy(),
    )


def _mixtext_tokens(llm: Path) -> tuple[list[Any], Any]:
    """Return windows of 256 tokens: for calibration, and of held-out text."""
    import torch
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(llm / "mixtext")
    windows = []
    for name, count in (("calib", 16), ("eval_wikitext", 8)):
        text = (llm / f"mixtext_{name}.txt").read_text(encoding="utf-8")
        ids = tokenizer(text, add_special_tokens=False)["input_ids"][: 256 * count]
        windows.append(torch.tensor(ids).view(count, 1, 256))
    return list(windows[0]), windows[1].squeeze(1).numpy()


def _write_random(model: ClientModel, folder: Path) -> None:
    """Write a random model in float32, with a layer for multi-token prediction if asked for."""
    import torch
    import transformers

    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(model.type, **model.settings)
    build = getattr(transformers, f"AutoModelFor{model.task}").from_config
    built = build(config).eval()
    with torch.no_grad():
        for parameter in built.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.1)
    built.config.dtype = torch.float32
    built.save_pretrained(folder)
    if model.mtp:
        _append_mtp(folder, config.num_hidden_layers, config.hidden_size)


def _append_mtp(folder: Path, layer: int, hidden: int) -> None:
    """Append a layer for multi-token prediction, as DeepSeek V3 and GLM 4 store theirs."""
    import torch
    from safetensors.torch import load_file, save_file

    file = folder / "model.safetensors"
    tensors = load_file(file)
    last, new = f"model.layers.{layer - 1}.", f"model.layers.{layer}."
    copies = {
        new + name.removeprefix(last): tensor.clone()
        for name, tensor in tensors.items()
        if name.startswith(last)
    }
    own = {
        "embed_tokens.weight": tensors["model.embed_tokens.weight"].clone(),
        "shared_head.head.weight": tensors["lm_head.weight"].clone(),
        "shared_head.norm.weight": torch.ones(hidden),
        "enorm.weight": torch.ones(hidden),
        "hnorm.weight": torch.ones(hidden),
        "eh_proj.weight": torch.randn(hidden, 2 * hidden) / 10,
    }
    own = {new + name: tensor for name, tensor in own.items()}
    save_file({**tensors, **copies, **own}, file, metadata={"format": "pt"})


def _reference(folder: Path, tokens: Any) -> tuple[Any, float]:
    """Return what ``load_checkpoint`` computes, and how much of it noise changes.

    Returns:
        Logits, or the scores of classes; and their relative change by noise in the embeddings.
    """
    import torch

    from quark_onnx.torch.checkpoints.load import load_checkpoint

    model = load_checkpoint(folder).float()  # as the client computes
    ids = torch.from_numpy(tokens)
    with torch.no_grad():
        exact = model(input_ids=ids).logits.float().numpy()
        embedded = model.get_input_embeddings()(ids)
        noise = torch.randn(embedded.shape, generator=torch.Generator().manual_seed(0))
        embedded = embedded * (1 + _NOISE * noise)
        changed = model(inputs_embeds=embedded).logits.float().numpy()
    return exact, _distance(changed, exact)


def _distance(computed: Any, wanted: Any) -> float:
    """Return the relative difference (L2), up to a constant for each token."""
    computed = computed - computed.mean(-1, keepdims=True)
    wanted = wanted - wanted.mean(-1, keepdims=True)
    return float(np.linalg.norm(computed - wanted) / np.linalg.norm(wanted))


def _perplexity(logits: Any, tokens: Any) -> float:
    """Return the perplexity of the tokens after the first of each window, in float64."""
    logits = logits[:, :-1].astype(np.float64)
    highest = logits.max(-1, keepdims=True)
    normalizers = highest[..., 0] + np.log(np.exp(logits - highest).sum(-1))
    chosen = np.take_along_axis(logits, tokens[:, 1:, None], -1)[..., 0]
    return math.exp((normalizers - chosen).mean())


def page(rows: dict[str, Row], versions: str) -> str:
    """Return the page of results."""
    header = ["model", "scheme", "layout", "result", "difference of logits"]
    header += ["same token or class", "perplexity", "of load_checkpoint"]
    lines = []
    for name in MODELS:
        row = rows[name]
        if "difference" not in row:
            model = MODELS[name]
            lines.append([name, model.scheme, model.layout, row["cell"], *[None] * 4])
            continue
        same = f"{row['same']} of {row['of']}"
        lines.append(
            [
                *(name, row["scheme"], row["layout"], row["cell"]),
                *(f"{row['difference']:.1e}", same),
                *(row.get("perplexity"), row.get("ours")),
            ]
        )
    return (
        "# Models in vLLM on a CPU\n\nMade by `python benchmarks/llm_clients.py --models`:"
        " quantized file to file, run by vLLM, and next to it what `load_checkpoint`"
        " computes on the same tokens. Experts stay float, since vLLM's kernel for experts"
        f" of 4 bits needs AVX-512.\n\n{table(header, lines)}\n\n- {versions}\n"
    )
