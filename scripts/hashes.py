"""Print a hash for every file that presets and algorithms write, to compare two revisions of the
code.

Usage: ``python scripts/hashes.py OUT.json [onnx] [torch]``, then ``diff`` two such files. A
refactoring changes none.

The models are those of the test suite: all small ONNX models of ``tests/models.py`` at every
preset, four of them with every optimizer, and a two-block Llama with every scheme, algorithm,
layout and export.
"""

from __future__ import annotations

import hashlib
import json
import logging
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

#: Optimizers run on these models, as not every model has what they work on.
OPTIMIZED = ("conv_relu", "residual", "depthwise", "transformer_block")
#: Settings that keep trained rounding short.
SETTINGS = {"adaround": "adaround:iterations=20", "adaquant": "adaquant:iterations=20"}
#: Algorithms are run with one scheme of integers and one of blocks.
SCHEMES_OF_ALGORITHMS = ("uint4_wo_32", "mxfp4")
LAYOUTS = {
    "quark": "uint4_wo_32",
    "compressed-tensors": "fp8",
    "awq": "uint4_wo_32",
    "finegrained-fp8": "fp8",
    "oga": "uint4_wo_32",
}


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def digest_folder(folder: Path) -> str:
    """Hash the names and contents of the files of a folder."""
    state = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            state.update(path.relative_to(folder).as_posix().encode())
            state.update(path.read_bytes())
    return state.hexdigest()[:16]


def outcome(make: Callable[[], str]) -> str:
    """Return the hash, or the type of the error: a refusal must stay a refusal."""
    try:
        return make()
    except Exception as error:
        return type(error).__name__


def onnx_hashes() -> Iterator[tuple[str, str]]:
    """Yield a hash for each small model, preset and optimizer."""
    import quark_onnx
    from quark_onnx.common.registry import OPTIMIZERS, PRESETS
    from tests import models

    def quantized(name: str, config: Any) -> str:
        model = models.MODELS[name]()
        result = quark_onnx.quantize_static(
            model, models.samples(model, count=4), config
        )
        return digest(result.SerializeToString(deterministic=True))

    for name in models.MODELS:
        for preset in PRESETS:
            yield (
                f"onnx/{name}/{preset}",
                outcome(partial(quantized, name, PRESETS[preset])),
            )
    for name in OPTIMIZED:
        for optimizer in OPTIMIZERS:
            text = SETTINGS.get(optimizer, optimizer)
            config = PRESETS["A8W8"].with_(optimizers=(text,))
            yield f"onnx/{name}/A8W8+{text}", outcome(partial(quantized, name, config))


def torch_hashes() -> Iterator[tuple[str, str]]:
    """Yield a hash for each scheme, algorithm, layout and export of a small language model."""
    import torch

    from quark_onnx.common.registry import ALGORITHMS
    from quark_onnx.torch.checkpoints.export import write_checkpoint
    from quark_onnx.torch.config.schemes import SCHEMES
    from quark_onnx.torch.config.torch_config import TorchConfig
    from quark_onnx.torch.pipelines.in_memory import quantize_model
    from tests.torch_models import llama, made, tokens

    torch.set_num_threads(1)

    def exported(
        scheme: str, algorithms: tuple[str, ...] = (), layout: str = "quark"
    ) -> str:
        model = made(llama())
        config = TorchConfig(SCHEMES[scheme], algorithms=algorithms)
        quantize_model(model, tokens(), config)
        with tempfile.TemporaryDirectory() as folder:
            write_checkpoint(model, config, Path(folder) / "out", layout=layout)
            return digest_folder(Path(folder) / "out")

    for scheme in SCHEMES:
        yield f"torch/{scheme}", outcome(partial(exported, scheme))
    for name in ALGORITHMS:
        for scheme in SCHEMES_OF_ALGORITHMS:
            key = f"torch/{scheme}+{name}"
            yield key, outcome(partial(exported, scheme, (name,)))
    for layout, scheme in LAYOUTS.items():
        key = f"torch/layout/{layout}"
        yield key, outcome(partial(exported, scheme, layout=layout))


PARTS = {"onnx": onnx_hashes, "torch": torch_hashes}


def main() -> None:
    output, *parts = sys.argv[1:]
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    found: dict[str, str] = {}
    for part in parts or PARTS:
        for key, value in PARTS[part]():
            found[key] = value
    Path(output).write_text(
        json.dumps(found, indent=1, sort_keys=True) + "\n", encoding="utf-8"
    )
    print(f"{len(found)} hashes in {output}")


if __name__ == "__main__":
    main()
