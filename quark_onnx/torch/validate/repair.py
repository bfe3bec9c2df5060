"""Repair of the headers and configuration of a checkpoint, in a copy."""

from __future__ import annotations

import json
import shutil
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from calibrators.json_file import parse_json
from calibrators.limits import read_text
from calibrators.scratch import ScratchFolder
from quark_onnx.common.errors import ConfigError
from quark_onnx.page.blocks import Block, Facts, Notes
from quark_onnx.page.reported import Reported
from quark_onnx.torch.runtime.checkpoint_folder import check_apart
from quark_onnx.torch.runtime.safetensors_header import Header, header_bytes
from quark_onnx.torch.validate.checkpoint import CONFIG, INDEX, Checkpoint, read
from quark_onnx.torch.validate.clients import validate
from quark_onnx.torch.validate.fields import object_of
from quark_onnx.torch.validate.finding import Validation
from quark_onnx.torch.validate.modules import today
from quark_onnx.torch.validate.name_patterns import is_glob
from quark_onnx.torch.validate.quark_config import QuarkConfig, stages
from quark_onnx.torch.validate.quark_transformers import (
    EXPORT_KEYS,
    INTEGERS,
    LAYER_KEYS,
    OBSERVERS,
)

#: Bytes that are copied at once: 16 MiB, so that a file of any size needs little memory.
_CHUNK = 1 << 24
#: Clients of other files, with the error for them.
_NOT_REPAIRABLE = {
    "llama.cpp": "a GGUF file cannot be repaired; convert the model again",
    "onnxruntime-genai": (
        "a folder of onnxruntime-genai cannot be repaired; write it again with"
        " 'quark-onnx llm oga'"
    ),
}


@dataclass(frozen=True, repr=False)
class Repair(Reported):
    """Result of a repair.

    Attributes:
        folder: folder of the copy; None if nothing could be fixed, and nothing was written.
        notes: changes.
        verdict: verdict on the copy, or on the checkpoint itself without a copy.
    """

    folder: Path | None
    notes: tuple[str, ...]
    verdict: Validation

    def blocks(self) -> list[Block]:
        """Return the changes and the verdict as blocks."""
        written = "nothing can be repaired; nothing is written"
        if self.folder is not None:
            written = str(self.folder)
        lines = {"repaired": self.notes, "written": [written]}
        return [
            *self.verdict.blocks(),
            Facts((), lines),
            Notes("Repaired", self.notes),
        ]

    def to_dict(self) -> dict[str, Any]:
        """Return the changes and the verdict as plain values."""
        return {
            "output": self.folder,
            "repaired": list(self.notes),
            **self.verdict.to_dict(),
        }


def repair(folder: Path, client: str, output: Path | None = None) -> Repair:
    """Write a copy with fixed scale names, derived keys of AMD Quark, and index.

    Args:
        folder: Hugging Face checkpoint.
        client: "vllm" or "transformers".
        output: folder of the copy, which must not exist; by default next to the original, with the
            suffix ``-fixed``.

    Returns:
        The changes and the verdict on the copy.

    Raises:
        ConfigError: the client does not read such folders, or the output folder exists.
        ModelError: the folder contains no checkpoint.
    """
    if client in _NOT_REPAIRABLE:
        raise ConfigError(_NOT_REPAIRABLE[client])
    # before the output is looked at: an unreadable folder is the first error to report
    before = validate(folder, client)
    folder = Path(folder)
    if output is None:
        # absolute, as "." has no name to which a suffix could be added
        output = folder.absolute().with_name(f"{folder.absolute().name}-fixed")
    output = Path(output)
    check_apart(output, folder)
    if output.exists():
        raise ConfigError(
            f"{output} exists; remove it, or name another folder with --output (on the"
            " command line, --overwrite replaces an earlier copy)"
        )
    checkpoint = read(folder)
    config, notes = repaired_config(checkpoint)
    renamed = sum(today(name) != name for name in checkpoint.tensors)
    if renamed:
        notes.append(f"{renamed} scales have the names of today")
    index = _index_of(checkpoint)
    if index is not None:
        # the index is derived from the headers, whatever it said before
        notes.append("the index says where each tensor is")
    if not notes:
        return Repair(None, (), before)
    output.parent.mkdir(parents=True, exist_ok=True)
    with ScratchFolder(output.parent, output.name) as folder:
        # the temporary folder itself is readable by its owner only
        scratch = folder / output.name
        scratch.mkdir()
        _write(checkpoint, config, index, scratch)
        # check that the copy is readable before it is published
        validate(scratch, client)
        # atomic: another process sees no half-written copy
        scratch.replace(output)
    return Repair(output, tuple(notes), validate(output, client))


def repaired_config(checkpoint: Checkpoint) -> tuple[dict[str, Any], list[str]]:
    """Return the configuration with fixed derived keys, and the changes.

    Values follow from other keys and from the tensors.

    Args:
        checkpoint: the checkpoint; its own configuration is not changed.

    Returns:
        A copy of the content of config.json, and a note on each change. The configuration of
        another method than AMD Quark's is copied without a change.
    """
    # the steps change nested objects, and the original is needed to see a difference
    config = deepcopy(checkpoint.config)
    if checkpoint.method != "quark":
        return config, []
    # the configuration of the language model may hold the settings (``Checkpoint.quantization``)
    holder = config["text_config"] if "quantization_config" not in config else config
    entries = holder.get("quantization_config")
    if not isinstance(entries, dict):
        return config, []
    notes = _repair_export(entries)
    # the keys of amd-quark's QConfig that are missing or null; copies, or all configurations would
    # share the lists and objects of the table
    missing = {
        key: deepcopy(plain)
        for key, plain in _PLAIN_KEYS.items()
        if entries.get(key) is None
    }
    entries |= missing
    notes += [f"{key} is {json.dumps(plain)}" for key, plain in missing.items()]
    notes += _repair_layers(entries)
    # last, as the list of exclude may have been missing
    notes += _repair_exclude(entries, checkpoint)
    return config, notes


#: Defaults of the key ``export``, but for kv_cache_group, which follows from the layers.
_PLAIN_EXPORT = {
    "min_kv_scale": 0.0,
    "pack_method": "reorder",
    "weight_format": "real_quantized",
    "weight_merge_groups": None,
}
#: Plain values of the keys that amd-quark's QConfig demands.
_PLAIN_KEYS: dict[str, Any] = {
    "exclude": [],
    "layer_quant_config": {},
    "layer_type_quant_config": {},
}


def _repair_export(entries: dict[str, Any]) -> list[str]:
    """Add missing export settings, and remove unknown ones; return a note on the change."""
    # queries may have quantized outputs, too, but are no part of the cache
    kv = [
        name
        for name, layer in QuarkConfig(entries).overrides.items()
        if name.endswith(("k_proj", "v_proj")) and stages(layer.get("output_tensors"))
    ]
    stored = entries.get("export")
    export = object_of(stored)
    # null counts as missing: vLLM fails for a kv_cache_group of null as for none
    given = {key: export[key] for key in EXPORT_KEYS if export.get(key) is not None}
    whole = {"kv_cache_group": kv, **_PLAIN_EXPORT, **given}
    if whole == stored:
        return []
    entries["export"] = whole
    changes = {
        "gets": [key for key in ("kv_cache_group", "pack_method") if key not in given],
        "loses": [key for key in export if key not in EXPORT_KEYS],
    }
    parts = [f"{verb} {', '.join(keys)}" for verb, keys in changes.items() if keys]
    # no parts: only keys were added that need no words
    return [f"export {' and '.join(parts) or 'is whole'}"]


def _repair_layers(entries: dict[str, Any]) -> list[str]:
    """Add missing keys to the configurations of layers, and return one note for all layers."""
    layers = [entries.get("global_quant_config")]
    for key in ("layer_quant_config", "kv_cache_quant_config"):
        layers += object_of(entries.get(key)).values()
    changed = list[str]()
    # malformed entries stay as they are, and have findings
    for layer in layers:
        # an object without a weight is no configuration of a layer
        if not isinstance(layer, dict) or "weight" not in layer:
            continue
        # weight and input_tensors are left out: no plain value follows for them
        missing = [value for value in LAYER_KEYS[2:] if value not in layer]
        layer |= dict.fromkeys(missing)
        changed += missing
        for key in LAYER_KEYS:
            for spec in stages(layer.get(key)):
                changed += _repair_spec(spec)
    # each name once, in the order of the layers
    return [f"layers have {', '.join(dict.fromkeys(changed))}"] if changed else []


def _repair_spec(spec: dict[str, Any]) -> list[str]:
    """Add the missing keys of a specification; return the names of changed keys."""
    qscheme, dtype = spec.get("qscheme"), str(spec.get("dtype"))
    observers = OBSERVERS.get(str(qscheme), ())
    # what follows from the qscheme and the dtype
    plain: dict[str, Any] = {}
    if observers:
        plain["observer_cls"] = observers[0]
    # amd-quark 0.13 writes this observer for MX formats and NVFP4
    if qscheme == "per_group" and dtype.startswith(("fp4", "fp6")):
        plain["observer_cls"] = "PerBlockMXObserver"
    if dtype in INTEGERS:
        # the values that amd-quark writes for all of its integer schemes
        plain |= {"round_method": "half_even", "scale_type": "float"}
    # keys that are missing or null
    changed = [key for key in plain if spec.get(key) is None]
    if observers and spec.get("observer_cls") not in observers:
        changed.append("observer_cls")
    spec |= {key: plain[key] for key in changed if key in plain}
    # amd-quark demands the keys, though they mean nothing for one scale
    if qscheme == "per_tensor":
        missing = [value for value in ("ch_axis", "group_size") if value not in spec]
        spec |= dict.fromkeys(missing)
        changed += missing
    return changed


def _repair_exclude(entries: dict[str, Any], checkpoint: Checkpoint) -> list[str]:
    """Replace shell patterns by names, which vLLM reads, and name all float layers.

    Returns a note on each kind of change.
    """
    config, notes = QuarkConfig(entries), list[str]()
    patterns = [pattern for pattern in config.exclude if is_glob(pattern)]
    names = [value for value in config.exclude if value not in patterns]
    matrices = checkpoint.matrices
    if patterns:
        # the patterns alone, so that the names in the list are not repeated
        meant = QuarkConfig({"exclude": patterns})
        matched = filter(meant.excludes, [matrix.name for matrix in matrices])
        expanded = [value for value in matched if value not in names]
        names += expanded
        notes.append(
            f"exclude has {len(expanded)} names in place of {', '.join(patterns)}"
        )
    wanted = QuarkConfig({"exclude": names})
    # vLLM quantizes every layer that exclude does not name
    floats = [module.name for module in matrices if not module.is_quantized]
    unnamed = [name for name in floats if not wanted.excludes(name)]
    # nothing is known of a checkpoint whose layers are all float
    if unnamed and len(floats) < len(matrices) and not config.is_fake:
        names += unnamed
        notes.append(f"exclude names {len(unnamed)} float layers, as {unnamed[0]}")
    if names != config.exclude:
        entries["exclude"] = names
    return notes


def _index_of(checkpoint: Checkpoint) -> dict[str, Any] | None:
    """Return the index that matches the files; None if no new index is needed.

    None also if files are missing or damaged, since the index of the complete checkpoint is
    unknown, and has to come with the files.
    """
    file_names = checkpoint.file_names
    rules = {finding.rule for finding in checkpoint.damage}
    missing = {*object_of(checkpoint.index).values()} - {*checkpoint.headers}
    if missing or "file-damaged" in rules:
        return None
    if "index-json" not in rules and checkpoint.index in (None, file_names):
        return None
    # total_size counts the bytes of values, without headers
    size = sum(tensor.size for tensor in checkpoint.tensors.values())
    return {
        "metadata": {"total_size": size},
        "weight_map": dict(sorted(file_names.items())),
    }


def _write(
    checkpoint: Checkpoint,
    config: dict[str, Any],
    index: dict[str, Any] | None,
    folder: Path,
) -> None:
    """Copy a checkpoint into a folder, with another configuration and index.

    Args:
        checkpoint: the checkpoint, as read before the repair.
        config: content of config.json after the repair.
        index: content of the new index, with the stored names; None to keep the present one.
        folder: an empty folder.
    """
    if index is None and checkpoint.index is not None:
        index_file = checkpoint.folder / INDEX
        index = parse_json(read_text(index_file), INDEX, ConfigError).value
    # sorted: a folder comes before its files
    for source in sorted(checkpoint.folder.rglob("*")):
        name = source.relative_to(checkpoint.folder).as_posix()
        header = checkpoint.headers.get(name)
        target = folder / name
        if source.is_dir():
            target.mkdir(parents=True, exist_ok=True)
        elif header is not None and any(today(old) != old for old in header.tensors):
            _rename(source, header, target)
        elif name == CONFIG and config != checkpoint.config:
            _write_json(target, config)
        # other files are copied byte for byte
        elif name != INDEX or index is None:
            shutil.copyfile(source, target)
    if index is not None:
        # the names in the index have to follow those in the files
        files = index["weight_map"].items()
        weight_map = {today(tensor): file for tensor, file in files}
        _write_json(folder / INDEX, {**index, "weight_map": weight_map})


def _write_json(target: Path, value: dict[str, Any]) -> None:
    """Write a JSON object in lines, as transformers does."""
    target.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def _rename(source: Path, header: Header, target: Path) -> None:
    """Copy a safetensors file under the tensor names of today; values keep their order."""
    entries = dict[str, Any]()
    if header.metadata:
        entries["__metadata__"] = header.metadata
    for name, tensor in header.tensors.items():
        # offsets of the format count from the end of the header, whose length changes
        start = tensor.start - header.start
        entries[today(name)] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [start, start + tensor.size],
        }
    with source.open("rb") as values, target.open("wb") as stream:
        stream.write(header_bytes(entries))
        values.seek(header.start)
        shutil.copyfileobj(values, stream, _CHUNK)
