"""Repair of the headers and configuration of a checkpoint, in a copy."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from calibrators.scratch import ScratchFolder
from quark_onnx.containers import names_of, of_type, without
from quark_onnx.errors import ConfigError
from quark_onnx.torch.validate.checkpoint import CONFIG, INDEX, Checkpoint, read
from quark_onnx.torch.validate.clients import validate
from quark_onnx.torch.validate.finding import Validation
from quark_onnx.torch.validate.header import Header
from quark_onnx.torch.validate.json_values import object_of
from quark_onnx.torch.validate.modules import today
from quark_onnx.torch.validate.quark_config import QuarkConfig, is_glob, stages
from quark_onnx.torch.validate.quark_transformers import (
    EXPORT_KEYS,
    INTEGERS,
    LAYER_KEYS,
    OBSERVERS,
)

_CHUNK = 1 << 24


@dataclass(frozen=True)
class Mended:
    """Result of a repair.

    Attributes:
        folder: folder of the copy; None if nothing could be fixed, and nothing was written.
        notes: changes.
        verdict: verdict on the copy, or on the checkpoint itself without a copy.
    """

    folder: Path | None
    notes: tuple[str, ...]
    verdict: Validation

    def __str__(self) -> str:
        written = "nothing could be mended, nothing is written"
        if self.folder is not None:
            written = f"written: {self.folder}"
        return "\n".join(
            [*(f"mended: {note}" for note in self.notes), written, str(self.verdict)],
        )


def repair(folder: Path, client: str, output: Path | None = None) -> Mended:
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
    if client == "llama.cpp":
        raise ConfigError("a GGUF file cannot be mended; convert the model again")
    if client == "onnxruntime-genai":
        raise ConfigError(
            "a folder of onnxruntime-genai cannot be mended; write it again with"
            " 'quark-onnx llm oga'",
        )
    before = validate(folder, client)
    folder = Path(folder)
    if output is None:
        output = folder.absolute().with_name(f"{folder.absolute().name}-fixed")
    output = Path(output)
    if output.exists():
        raise ConfigError(
            f"{output} exists; remove it, or name another folder with --output (on the"
            " command line, --overwrite replaces an earlier copy)",
        )
    checkpoint = read(folder)
    config, notes = mended_config(checkpoint)
    renamed = sum(today(name) != name for name in checkpoint.tensors)
    if renamed:
        notes.append(f"{renamed} scales have the names of today")
    index = _index_of(checkpoint)
    if index is not None:
        notes.append("the index says where each tensor is")
    if not notes:
        return Mended(None, (), before)
    output.parent.mkdir(parents=True, exist_ok=True)
    with ScratchFolder(output.parent, output.name) as folder:
        scratch = (
            folder / output.name
        )  # the temporary folder itself is readable by its owner only
        scratch.mkdir()
        _write(checkpoint, config, index, scratch)
        validate(
            scratch, client
        )  # check that the copy is readable before it is published
        scratch.replace(output)
    return Mended(output, tuple(notes), validate(output, client))


def mended_config(checkpoint: Checkpoint) -> tuple[dict[str, Any], list[str]]:
    """Return the configuration with fixed derived keys, and the changes.

    Values follow from other keys and from the tensors.
    """
    config, notes = deepcopy(checkpoint.config), list[str]()
    if checkpoint.method != "quark":
        return config, notes
    holder = config["text_config"] if "quantization_config" not in config else config
    entries = holder.get("quantization_config")
    if isinstance(entries, dict):
        for step in (_mend_export, _mend_plain_keys, _mend_layers, _mend_exclude):
            step(entries, checkpoint, notes)
    return config, notes


#: What export says where it says nothing; the layers of the cache follow from the layers.
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


def _mend_export(
    entries: dict[str, Any],
    checkpoint: Checkpoint,
    notes: list[str],
) -> None:
    kv = [
        name
        for name, layer in QuarkConfig(entries).overrides.items()
        if stages(layer.get("output_tensors")) and name.endswith(("k_proj", "v_proj"))
    ]
    found = entries.get("export")
    export = object_of(found)
    given = {key: export[key] for key in EXPORT_KEYS if export.get(key) is not None}
    whole = {"kv_cache_group": kv, **_PLAIN_EXPORT, **given}
    if whole == found:
        return
    entries["export"] = whole
    gone = without(export, EXPORT_KEYS)
    new = [key for key in ("kv_cache_group", "pack_method") if key not in given]
    parts = []
    if new:
        parts.append(f"gets {', '.join(new)}")
    if gone:
        parts.append(f"loses {', '.join(gone)}")
    notes.append(f"export {' and '.join(parts) or 'is whole'}")


def _mend_plain_keys(
    entries: dict[str, Any],
    checkpoint: Checkpoint,
    notes: list[str],
) -> None:
    for key, plain in _PLAIN_KEYS.items():
        if entries.get(key) is None:
            entries[key] = deepcopy(plain)
            notes.append(f"{key} is {json.dumps(plain)}")


def _mend_layers(
    entries: dict[str, Any],
    checkpoint: Checkpoint,
    notes: list[str],
) -> None:
    layers = [entries.get("global_quant_config")]
    for key in ("layer_quant_config", "kv_cache_quant_config"):
        layers += object_of(entries.get(key)).values()
    added = list[str]()
    for layer in of_type(layers, dict):
        if "weight" in layer:
            added += _mend_layer(layer)
    if added:
        notes.append(f"layers have {', '.join(dict.fromkeys(added))}")


def _mend_layer(layer: dict[str, Any]) -> list[str]:
    """Add the keys that a layer's configuration lacks; return their names."""
    missing = [key for key in LAYER_KEYS[2:] if key not in layer]
    layer |= dict.fromkeys(missing)
    changed = missing
    for key in LAYER_KEYS:
        for spec in stages(layer.get(key)):
            changed += _mend_spec(spec)
    return changed


def _mend_spec(spec: dict[str, Any]) -> list[str]:
    qscheme, dtype = spec.get("qscheme"), str(spec.get("dtype"))
    observers = OBSERVERS.get(str(qscheme), ())
    plain: dict[str, Any] = {}
    if observers:
        plain["observer_cls"] = observers[0]
    if qscheme == "per_group" and dtype.startswith(("fp4", "fp6")):
        plain["observer_cls"] = "PerBlockMXObserver"
    if dtype in INTEGERS:
        plain |= {"round_method": "half_even", "scale_type": "float"}
    changed = [key for key in plain if spec.get(key) is None]
    if observers and spec.get("observer_cls") not in observers:
        changed.append("observer_cls")
    spec |= {key: plain[key] for key in changed}
    if qscheme == "per_tensor":
        missing = [key for key in ("ch_axis", "group_size") if key not in spec]
        spec |= dict.fromkeys(missing)
        changed += missing
    return changed


def _mend_exclude(
    entries: dict[str, Any],
    checkpoint: Checkpoint,
    notes: list[str],
) -> None:
    config = QuarkConfig(entries)
    patterns = [pattern for pattern in config.exclude if is_glob(pattern)]
    names = [pattern for pattern in config.exclude if not is_glob(pattern)]
    matrices = [
        module
        for module in checkpoint.modules.values()
        if module.is_linear or module.is_head
    ]
    if patterns:
        meant = QuarkConfig({"exclude": patterns})
        matched = [name for name in names_of(matrices) if meant.excludes(name)]
        expanded = [name for name in matched if name not in names]
        names += expanded
        notes.append(
            f"exclude has {len(expanded)} names in place of {', '.join(patterns)}",
        )
    wanted = QuarkConfig({"exclude": names})
    floats = [module.name for module in matrices if not module.is_quantized]
    unnamed = [name for name in floats if not wanted.excludes(name)]
    # nothing is known of a checkpoint whose layers are all float
    if unnamed and len(floats) < len(matrices) and not config.is_fake:
        names += unnamed
        notes.append(f"exclude names {len(unnamed)} float layers, as {unnamed[0]}")
    if names != config.exclude:
        entries["exclude"] = names


def _index_of(checkpoint: Checkpoint) -> dict[str, Any] | None:
    """Return the index that matches the files; None if no new index is needed."""
    found = {
        name: file
        for file, header in checkpoint.headers.items()
        for name in header.tensors
    }
    rules = {finding.rule for finding in checkpoint.damage}
    missing = {*(checkpoint.index or {}).values()} - {*checkpoint.headers}
    # an index of the files that can be read would hide those that are lost
    if missing or "file-damaged" in rules:
        return None
    if "index-json" not in rules and checkpoint.index in (None, found):
        return None
    size = sum(tensor.size for tensor in checkpoint.tensors.values())
    return {"metadata": {"total_size": size}, "weight_map": dict(sorted(found.items()))}


def _write(
    checkpoint: Checkpoint,
    config: dict[str, Any],
    index: dict[str, Any] | None,
    folder: Path,
) -> None:
    rewritten: dict[str, Callable[[Path], None]] = {}
    for name, header in checkpoint.headers.items():
        if any(today(tensor) != tensor for tensor in header.tensors):
            rewritten[name] = lambda target, name=name, header=header: _rename(  # type: ignore[misc]
                checkpoint.folder / name,
                header,
                target,
            )
    if config != checkpoint.config:
        rewritten[CONFIG] = lambda target: _write_json(target, config)
    names = index
    if not names and checkpoint.index is not None:
        names = json.loads((checkpoint.folder / INDEX).read_text(encoding="utf-8"))
    if names is not None:
        mapped = {today(name): file for name, file in names["weight_map"].items()}
        rewritten[INDEX] = lambda target: _write_json(
            target,
            {**names, "weight_map": mapped},
        )
    for source in sorted(checkpoint.folder.rglob("*")):
        target = folder / source.relative_to(checkpoint.folder)
        if source.is_dir():
            target.mkdir(parents=True, exist_ok=True)
        elif source.relative_to(checkpoint.folder).as_posix() in rewritten:
            rewritten[source.relative_to(checkpoint.folder).as_posix()](target)
        else:
            shutil.copyfile(source, target)


def _write_json(target: Path, value: dict[str, Any]) -> None:
    target.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def _rename(source: Path, header: Header, target: Path) -> None:
    """Copy a safetensors file under other tensor names; values keep their order."""
    entries = dict[str, Any]()
    if header.metadata:
        entries["__metadata__"] = header.metadata
    for name, tensor in header.tensors.items():
        start = tensor.start - header.start
        entries[today(name)] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [start, start + tensor.size],
        }
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with source.open("rb") as values, target.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        values.seek(header.start)
        shutil.copyfileobj(values, stream, _CHUNK)
