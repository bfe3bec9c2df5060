"""Settings of AutoAWQ and GPTQ in files of their own, compared with those of config.json."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from quark_onnx.common.containers import subset
from quark_onnx.torch.validate.checkpoint import CONFIG, Checkpoint
from quark_onnx.torch.validate.fields import QUANTIZATION, shown
from quark_onnx.torch.validate.finding import Finding
from quark_onnx.torch.validate.rules import broken

#: Settings, under the names of both tools.
_NAMES = (
    ("quant_method",),
    ("bits", "w_bit"),
    ("group_size", "q_group_size"),
    ("sym",),
    ("zero_point",),
    ("desc_act",),
    ("dynamic",),
    ("modules_to_not_convert",),
)


def settings_findings(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Yield settings of other files that differ from those of config.json.

    vLLM and transformers read config.json alone. ``QuantizeConfig.from_pretrained`` of GPTQModel
    reads the first file that is there: ``QUANT_CONFIG_FILENAME_COMPAT`` has config.json last.
    """
    for file, settings in checkpoint.settings.items():
        yield from _file_findings(file, settings, checkpoint.quantization)


def _file_findings(
    file: str,
    settings: Mapping[str, Any],
    entries: Mapping[str, Any],
) -> Iterator[Finding]:
    """Yield the settings of a file that differ.

    Args:
        file: name of the file.
        settings: its content.
        entries: the quantization_config of config.json.
    """
    for names in _NAMES:
        here, there = subset(settings, names), subset(entries, names)
        if here and not entries:
            yield broken("settings-differ", file, f"{CONFIG} has no {QUANTIZATION}")
            return
        if here and there:
            name, value = next(iter(here.items()))
            other = next(iter(there.values()))
            # null, false and an empty list are equal to all readers
            if (value or None) != (other or None):
                text = f"{shown(value)}; {CONFIG} says {shown(other)}"
                yield broken("settings-differ", f"{file}, {name}", text)
