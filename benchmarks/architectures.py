"""Accuracy and runtime on architectures that nobody tuned for, as torch exports them.

    python benchmarks/architectures.py [--families vit bert ...] [--exporters 14 20] [--draws 3]
        [--repeats 24] [--seconds 3] [--clock cpu] [--again] [--report]

Models of transformers with seeded random weights are exported by torch: at opset 14 by tracing,
where LayerNormalization and Gelu come in parts, and at opset 20 by the present exporter. Each is
quantized by ours at its defaults (`A8W8`, `XINT8`) and by onnxruntime (uint8 activations, int8
weights with a scale per channel, minmax, after its pre-processing) on the same random samples.

The SQNR is that of the worst output on samples held out, the mean over `--draws` draws of the
samples. Runtimes are those of default sessions with one thread, in turns. Random weights say how
much of a signal survives, not how good a trained model is; networks without a normalization amplify
rounding errors until nothing is left, for every tool. The exit code is 1 when a mark is missed:
ours at `A8W8` has at most half a decibel less than onnxruntime, and takes at most 1.02 times as
long. Needs the extra `llm`, and no data.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import logging
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import mean
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import onnx
from _data import Samples
from _results import Row, Store, add_arguments, add_turn_arguments, table
from _tools import Ours
from judging import sqnr
from runtime import figures, run_in_turn, write_ours, write_theirs

Feeds = dict[str, np.ndarray[Any, Any]]

CALIBRATION, HELD_OUT = 12, 6
#: A loss in decibels, and a ratio of runtimes, that count as chance.
LEAST_LOSS, MOST = 0.5, 1.02
OLD, PRESENT = 14, 20
#: Sizes that most configurations of transformers have.
SIZES = {
    "hidden_size": 192,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "intermediate_size": 768,
}
WORDS = {"vocab_size": 2000}


@dataclass(frozen=True)
class Family:
    """An architecture of transformers.

    Attributes:
        model: name of the class of the model.
        config: name of the class of its configuration.
        settings: of the configuration.
        shape: of the input; of two axes for tokens, or of a sound.
        tokens: whether the input are token ids.
        exporters: opsets to export at.
    """

    model: str
    config: str
    settings: dict[str, Any]
    shape: tuple[int, ...]
    tokens: bool = False
    exporters: tuple[int, ...] = (OLD, PRESENT)


IMAGE = (1, 3, 128, 128)
TEXT = partial(Family, shape=(1, 64), tokens=True)
FAMILIES = {
    "vit": Family("ViTModel", "ViTConfig", {**SIZES, "image_size": 128}, IMAGE),
    "dinov2": Family(
        "Dinov2Model",
        "Dinov2Config",
        {"hidden_size": 192, "num_hidden_layers": 4, "num_attention_heads": 6}
        | {"image_size": 126},
        (1, 3, 126, 126),
    ),
    "yolos": Family(
        "YolosModel", "YolosConfig", {**SIZES, "image_size": [128, 128]}, IMAGE
    ),
    "clip": Family(
        "CLIPVisionModel",
        "CLIPVisionConfig",
        {**SIZES, "image_size": 128, "patch_size": 16},
        IMAGE,
    ),
    "swinv2": Family(
        "Swinv2Model",
        "Swinv2Config",
        {"embed_dim": 48, "image_size": 128, "depths": [2, 2], "num_heads": [3, 6]},
        IMAGE,
    ),
    "convnext": Family(
        "ConvNextModel",
        "ConvNextConfig",
        {
            "depths": [2, 2, 2, 2],
            "hidden_sizes": [48, 96, 192, 384],
            "layer_scale_init_value": 1.0,
        },
        IMAGE,
    ),
    "segformer": Family(
        "SegformerForSemanticSegmentation", "SegformerConfig", {}, IMAGE
    ),
    "focalnet": Family(
        "FocalNetModel",
        "FocalNetConfig",
        {"image_size": 128, "embed_dim": 48, "depths": [2, 2, 2, 2]},
        IMAGE,
    ),
    "bert": TEXT("BertModel", "BertConfig", {**SIZES, **WORDS}),
    "electra": TEXT(
        "ElectraModel", "ElectraConfig", {**SIZES, **WORDS, "embedding_size": 64}
    ),
    "mobilebert": TEXT(
        "MobileBertModel",
        "MobileBertConfig",
        {**WORDS, "hidden_size": 128, "num_hidden_layers": 4, "embedding_size": 64},
    ),
    "t5": TEXT(
        "T5EncoderModel",
        "T5Config",
        {
            **WORDS,
            "d_model": 192,
            "d_kv": 32,
            "num_heads": 6,
            "num_layers": 4,
            "d_ff": 768,
        },
    ),
    "llama": TEXT(
        "LlamaModel",
        "LlamaConfig",
        {**SIZES, **WORDS, "use_cache": False},
        exporters=(PRESENT,),
    ),
    "gpt2": TEXT(
        "GPT2Model",
        "GPT2Config",
        {**WORDS, "n_embd": 192, "n_layer": 4, "n_head": 6, "use_cache": False},
        exporters=(PRESENT,),
    ),
    "wav2vec2": Family(
        "Wav2Vec2Model", "Wav2Vec2Config", SIZES, (1, 8000), exporters=(OLD,)
    ),
}


def export(family: Family, opset: int, path: Path) -> None:
    """Write a model with seeded weights."""
    import torch
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, family.config)(
        **family.settings, attn_implementation="eager"
    )
    model = _plain(getattr(transformers, family.model)(config)).eval()
    example = torch.from_numpy(sample(family, np.random.default_rng(0))["x"])
    silent = io.StringIO()
    with contextlib.redirect_stdout(silent), contextlib.redirect_stderr(silent):
        torch.onnx.export(
            model,
            (example,),
            str(path),
            input_names=["x"],
            opset_version=opset,
            dynamo=opset == PRESENT,
            external_data=False,
        )


def _plain(model: Any) -> Any:
    """Return a module with one input and one output."""
    import torch

    class Plain(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, x: Any) -> Any:
            found = self.model(x, return_dict=True)
            return found.logits if hasattr(found, "logits") else found.last_hidden_state

    return Plain()


def sample(family: Family, random: np.random.Generator) -> Feeds:
    """Return one random sample: noise of two resolutions for images, uniform token ids."""
    if family.tokens:
        return {"x": random.integers(3, WORDS["vocab_size"], family.shape)}
    noise = random.normal(size=family.shape)
    if len(family.shape) == 4:
        coarse = random.normal(size=(*family.shape[:2], 16, 16))
        rows = np.arange(family.shape[2]) * 16 // family.shape[2]
        noise = coarse[:, :, rows][..., rows] + 0.3 * noise
    return {"x": noise.astype(np.float32)}


def write(path: Path, data: list[Feeds], folder: Path) -> dict[str, Path]:
    """Return the files of ours at two presets, and onnxruntime's."""
    samples = Samples.write(iter(data), folder / "samples")
    files = {name: folder / f"{name}.onnx" for name in ("ours", "XINT8", "onnxruntime")}
    write_ours(path, samples, "A8W8", files["ours"])
    write_ours(path, samples, "XINT8", files["XINT8"])
    write_theirs(path, samples, "A8W8", files["onnxruntime"])
    return files


def measure(family: Family, opset: int, options: argparse.Namespace) -> Row:
    """One row: SQNR of each file over draws, and runtimes in turns."""
    import onnxruntime

    row: Row = {"opset": opset}
    with TemporaryDirectory() as name:
        folder = Path(name)
        path = folder / "float.onnx"
        export(family, opset, path)
        row["nodes"] = len(onnx.load(path).graph.node)
        found = dict[str, list[float]]()
        for draw in range(options.draws):
            random = np.random.default_rng(draw)
            data = [sample(family, random) for _ in range(CALIBRATION + HELD_OUT)]
            files = write(path, data[:CALIBRATION], folder)
            held = data[CALIBRATION:]
            expected = outputs(path, held)
            for tool, file in files.items():
                found.setdefault(tool, []).append(sqnr(expected, outputs(file, held)))
        row |= {f"{tool} dB": mean(each) for tool, each in found.items()}
        del files["XINT8"]
        for times in (1, 3):
            turns = (times * options.repeats, times * options.seconds)
            timed = {"float": path} | files
            row |= figures(run_in_turn(timed, data[0], *turns, options.clock))
            if row["ours/onnxruntime"] <= MOST:
                break
    return row | {"runtime": onnxruntime.__version__}


def outputs(path: Path, data: list[Feeds]) -> np.ndarray[Any, Any]:
    """Return the outputs of a model on all samples, concatenated."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(
        str(path), options, providers=["CPUExecutionProvider"]
    )
    return np.concatenate([np.ravel(session.run(None, feeds)[0]) for feeds in data])


def verdict(row: Row) -> tuple[str, bool]:
    """What a row says, and whether both marks are met.

    >>> verdict({"ours dB": 20.0, "onnxruntime dB": 20.6, "ours/onnxruntime": 1.0})
    ('less accurate', False)
    >>> verdict({"ours dB": 20.0, "onnxruntime dB": 20.4, "ours/onnxruntime": 1.02})
    ('met', True)
    """
    if "error" in row or not row:
        return row.get("error", "not measured"), False
    words = list[str]()
    if row["ours dB"] < row["onnxruntime dB"] - LEAST_LOSS:
        words.append("less accurate")
    if row["ours/onnxruntime"] > MOST:
        words.append("slower")
    return ", ".join(words) or "met", not words


HEADER = (
    "model",
    "opset",
    "ours dB",
    "onnxruntime dB",
    "ours XINT8 dB",
    "float ms",
    "ours ms",
    "onnxruntime ms",
    "ours/onnxruntime",
    "verdict",
)
COLUMNS = (
    "ours dB",
    "onnxruntime dB",
    "XINT8 dB",
    "float",
    "ours",
    "onnxruntime",
    "ours/onnxruntime",
)


def keys(options: argparse.Namespace) -> Iterator[tuple[str, str, int]]:
    """Yield the key of each row, its family and its opset."""
    for name in options.families:
        for opset in FAMILIES[name].exporters:
            if opset in options.exporters:
                yield f"{name}/{opset}", name, opset


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--families", nargs="+", choices=FAMILIES, default=list(FAMILIES)
    )
    parser.add_argument(
        "--exporters", nargs="+", type=int, default=[OLD, PRESENT], metavar="OPSET"
    )
    parser.add_argument("--draws", type=int, default=3)
    add_turn_arguments(parser, 24)
    add_arguments(parser, "again", "report", "out")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)

    store, source = Store(options.out / "architectures.json"), Ours().source
    for key, name, opset in keys(options):
        known = store.rows().get(key, {})
        if options.report or (known.get("source") == source and not options.again):
            continue
        try:
            row = measure(FAMILIES[name], opset, options)
        except Exception as error:  # whatever a tool raises is its result
            row = {
                "error": f"{type(error).__name__}: {str(error).splitlines()[0]}"[:200]
            }
        store.put(key, row | {"source": source, "draws": options.draws})
        print(f"{key} {verdict(row)[0]}", file=sys.stderr)
    rows = store.rows()
    lines, met = list[list[object]](), True
    for key, name, opset in keys(options):
        row = rows.get(key, {})
        words, good = verdict(row)
        met &= good
        lines.append([name, opset, *(row.get(column) for column in COLUMNS), words])
    text = table(HEADER, lines)
    print(text)
    if options.families == list(FAMILIES):
        (options.out / "architectures.md").write_text(
            f"# Architectures that nobody tuned for\n\n{text}\n"
        )
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
