"""Mirror of ``quark.torch.utils.llm``: models, tokenizers and calibration data."""

from __future__ import annotations

import logging
import random
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
import transformers
from torch import nn
from torch.utils.data import DataLoader, Dataset

from quark_onnx.common.absent import (  # noqa: F401  names of AMD Quark
    get_per_block_calib_batch_size,
    get_trainer_dataset,
    move_model_to_device_if_it_fits,
)
from quark_onnx.config.checks import require_known
from quark_onnx.torch.calibration.text import read_windows
from quark_onnx.torch.models.experts import unfuse_experts

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin

__all__ = [
    "check_compatibility_before_quantization",
    "create_model_skeleton",
    "get_calib_dataloader",
    "get_loader",
    "get_model",
    "get_tokenizer",
    "get_wikitext2",
    "maybe_save_preprocessors",
    "prepare_for_moe_quant",
    "preprocess_for_quantization",
    "save_model",
    "set_seed",
]

logger = logging.getLogger(__name__)

#: Element types by their names in scripts.
_TYPES = {
    "auto": "auto",
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
}
#: Files of processors and tokenizers.
_PREPROCESSORS = (
    "preprocessor_config.json",
    "processor_config.json",
    "chat_template.json",
    "chat_template.jinja",
)


def get_model(  # noqa: PLR0913
    ckpt_path: Path | str,
    data_type: str = "auto",
    device: str = "cuda",
    multi_gpu: str | bool | None = False,
    multi_device: bool = False,
    attn_implementation: str = "eager",
    trust_remote_code: bool = False,
) -> tuple[Any, torch.dtype]:
    """Return the float model of a Hugging Face folder, and its element type.

    Args:
        ckpt_path: the folder.
        data_type: "auto", "float16", "bfloat16" or "float32".
        device: the device of the model; the CPU if there is no GPU.
        multi_gpu: whether accelerate distributes the model over all devices.
        multi_device: the same as ``multi_gpu``.
        attn_implementation: transformers' name of the attention implementation.
        trust_remote_code: run Python files of the folder. AMD Quark runs them by default.

    Raises:
        ConfigError: the type is unknown.
    """
    require_known(data_type, _TYPES, "data_type is")
    spread: dict[str, Any] = {"device_map": "auto"} if multi_gpu or multi_device else {}
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(
        ckpt_path,
        dtype=_TYPES[data_type],
        attn_implementation=attn_implementation,
        trust_remote_code=trust_remote_code,
        **spread,
    )
    # accelerate has placed the parts on devices already.
    if not spread:
        model = model.to(device_or_cpu(device))
    return model.eval(), model.dtype


def device_or_cpu(device: str | torch.device | None) -> str | torch.device:
    """Return the device; the CPU, with a warning, if the device is a missing GPU."""
    if device is None:
        return "cpu"
    if str(device).startswith("cuda") and not torch.cuda.is_available():
        logger.warning("device is %s, but torch sees no GPU; the CPU is used", device)
        return "cpu"
    return device


def get_tokenizer(
    ckpt_path: Path | str,
    max_seq_len: int = 2048,
    model_type: str | None = None,
    trust_remote_code: bool = False,
) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a Hugging Face folder.

    Args:
        ckpt_path: the folder.
        max_seq_len: maximum length of an input in tokens.
        model_type: without effect; the folder has the type.
        trust_remote_code: run Python files of the folder. AMD Quark runs them by default.
    """
    tokenizer = transformers.AutoTokenizer.from_pretrained(
        ckpt_path,
        model_max_length=max_seq_len,
        trust_remote_code=trust_remote_code,
    )
    # Batches of texts need padding; models of the Llama family define no token for it.
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def get_calib_dataloader(  # noqa: PLR0913
    dataset_name: str,
    tokenizer: PreTrainedTokenizerBase | None = None,
    batch_size: int = 1,
    num_calib_data: int = 512,
    seqlen: int = 512,
    device: str | torch.device | None = None,
    drop_last: bool = True,
    shuffle: bool = False,
    processor: ProcessorMixin | None = None,
) -> DataLoader[Any]:
    """Return windows of tokens as batches of shape (batch, seqlen).

    Texts are concatenated and cut into windows without overlap for all names. AMD Quark pads single
    texts for some names.

    Args:
        dataset_name: a file or folder of text or token ids, or the name of a data set; see
            ``read_windows``.
        tokenizer: a transformers tokenizer.
        batch_size: windows per batch.
        num_calib_data: the maximum number of windows.
        seqlen: tokens of a window.
        device: the device of the batches; the CPU if None.
        drop_last: drop an incomplete last batch.
        shuffle: shuffle the batches in each pass.
        processor: replaces a missing tokenizer.

    Raises:
        DataError: the data cannot be read, or has not enough text for a window.
        MissingDependency: a data set is named, and ``datasets`` is not installed.
    """
    if tokenizer is None:
        # A processor of a multimodal model holds the tokenizer of its texts.
        tokenizer = getattr(processor, "tokenizer", None)
    windows = read_windows(dataset_name, tokenizer, seqlen, num_calib_data)
    target = device_or_cpu(device)
    return DataLoader(
        cast("Dataset[Any]", [window.to(target) for window in windows]),
        # A partial batch is kept if it is the only one.
        batch_size=min(batch_size, len(windows)),
        drop_last=drop_last,
        shuffle=shuffle,
    )


def get_wikitext2(
    tokenizer: PreTrainedTokenizerBase,
    nsamples: int,
    seqlen: int,
    device: str | None,
    seed: int = 0,
) -> DataLoader[Any]:
    """Return windows of WikiText-2; see ``get_calib_dataloader``."""
    return get_calib_dataloader("wikitext", tokenizer, 1, nsamples, seqlen, device)


def get_loader(  # noqa: PLR0913
    path: str,
    subset: str,
    tokenizer: PreTrainedTokenizerBase,
    seqlen: int = 1024,
    num_batch: int = -1,
    batch_size: int = 1,
    shuffle: bool = False,
) -> DataLoader[Any]:
    """Return windows of tokens for evaluation.

    Args:
        path: see ``dataset_name`` of ``get_calib_dataloader``.
        subset: without effect; the split of a data set is that of calibration.
        tokenizer: a transformers tokenizer.
        seqlen: tokens of a window.
        num_batch: the maximum number of batches; -1 for all.
        batch_size: windows per batch.
        shuffle: shuffle the batches in each pass.
    """
    # None reads all windows.
    count = num_batch * batch_size if num_batch > 0 else None
    windows = read_windows(path, tokenizer, seqlen, count)
    dataset = cast("Dataset[Any]", windows)
    return DataLoader(dataset, batch_size=batch_size, shuffle=shuffle)


def prepare_for_moe_quant(model: nn.Module, reload: bool = False) -> None:
    """Split stacked experts into linear layers, in place.

    Quantization does so automatically.
    """
    unfuse_experts(model)


def preprocess_for_quantization(model: nn.Module, reload: bool = False) -> None:
    """Split stacked experts into linear layers, in place.

    Quantization does so automatically.
    """
    unfuse_experts(model)


def check_compatibility_before_quantization(
    model: nn.Module,
    raise_on_error: bool = False,
) -> bool:
    """Return True, since quantization reports incompatible layers."""
    return True


def create_model_skeleton(
    model_dir: Path | str,
    trust_remote_code: bool = False,
    attn_implementation: str = "eager",
) -> PreTrainedModel:
    """Return the model of a folder without weights, on torch's device ``meta``."""
    config = transformers.AutoConfig.from_pretrained(
        model_dir,
        trust_remote_code=trust_remote_code,
    )
    # Shapes without memory: the weights come from a checkpoint later.
    with torch.device("meta"):
        model: PreTrainedModel = transformers.AutoModelForCausalLM.from_config(
            config,
            attn_implementation=attn_implementation,
            trust_remote_code=trust_remote_code,
        )
    return model


def save_model(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    save_dir: Path | str,
) -> None:
    """Write a float model and its tokenizer as a Hugging Face folder."""
    model.save_pretrained(save_dir)
    if tokenizer is not None:
        tokenizer.save_pretrained(save_dir)


def maybe_save_preprocessors(
    src_name_or_path: Path | str,
    dest_dir: Path | str,
    src_subfolder: str = "",
    trust_remote_code: bool = False,
) -> None:
    """Copy the existing files of a processor from one folder to another."""
    for name in _PREPROCESSORS:
        # Each model has some of the files alone.
        source = Path(src_name_or_path) / src_subfolder / name
        if source.is_file():
            Path(dest_dir, name).write_bytes(source.read_bytes())


def set_seed(seed: int) -> None:
    """Set the seeds of Python, numpy and torch."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
