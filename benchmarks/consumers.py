"""Programs that load ONNX files, with files of ours: each loads, runs, and gives our own result.

    QUARK_ONNX_DATA=DIR python benchmarks/consumers.py --environments DIR
        [--consumers NAME ...] [--again] [--report] [--out DIR]

Each consumer runs in an environment of its own, which pip (for transformers.js npm) makes in DIR at
the first use. Nothing is downloaded but packages: models are those of QUARK_ONNX_DATA, those that a
package brings, and small ones that are built here.

The float model and its A8W8 file run through the consumer's own interface and in onnxruntime
directly, on the same inputs. The SQNR of the outputs (float model as reference) stands in the table
once as the consumer gives it and once as measured directly; the direct one includes the pooling of
embeddings. A consumer differs if both are more than half a decibel apart: it brings an onnxruntime
of its own, and values between two codes may round either way.

Rows are kept in DIR/consumers.json, the table is DIR/consumers.md. The exit code is 1 where a
consumer fails or differs.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import requires
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import onnx
import onnxruntime
from _data import load, root
from _environments import NotInstalled, environment, run_installer
from _results import Row, Store, add_arguments, table
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

ROOT = Path(__file__).parents[1]
WORKER = Path(__file__).with_name("_consumer_worker.py")
JAVASCRIPT = WORKER.with_suffix(".mjs")
Floats = NDArray[np.float32]
Feeds = dict[str, NDArray[Any]]

#: Greatest difference of both SQNR in dB.
TOLERANCE = 0.5
#: Samples that calibrate.
CALIBRATION = 16
#: Sizes of images and waveforms.
_IMAGE, _LINE_WIDTH, _SAMPLES, _FRAMES, _FEATURES = 320, 320, 16000, 100, 80

_SENTENCES = (
    "The river froze early that year.",
    "A small boat crosses the bay at noon.",
    "Prices of copper fell by two percent on Monday.",
    "She repairs old radios and gives them away.",
    "How do I change the battery of this clock?",
    "The committee has postponed its decision again.",
    "Rain is expected in the north, and strong wind near the coast.",
    "He plays the violin better than his teacher did.",
)
_LINES = (
    "Invoice 2041",
    "Total due 318.50",
    "Blue notebooks",
    "Delivery on Friday",
    "Paid in advance",
    "Room 12, second floor",
)


@dataclass(frozen=True)
class Consumer:
    """A program that loads ONNX files.

    Attributes:
        build: writes FOLDER/inputs.npz and what the consumer reads besides; returns the float model
            and the file to quantize into, whose names the consumer may expect.
        own: computes the outputs of a file in onnxruntime directly.
        packages: what pip installs; nothing for npm.
        quantizes: the consumer quantizes by itself.
    """

    build: Callable[[Path], tuple[Path, Path, list[Feeds]]]
    own: Callable[[Path, Path], list[Floats]]
    packages: tuple[str, ...] = ()
    quantizes: bool = False


def session_of(model: Path) -> onnxruntime.InferenceSession:
    """Return a session with one thread."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    return onnxruntime.InferenceSession(
        model, options, providers=["CPUExecutionProvider"]
    )


def stored(folder: Path) -> Feeds:
    """Return the inputs that the consumer gets, too."""
    with np.load(folder / "inputs.npz") as arrays:
        return dict(arrays)


# Sentences


def text(folder: Path) -> tuple[Path, Path, list[Feeds]]:
    """Write MiniLM-L6 as a folder of Hugging Face, with a tokenizer and settings for pooling."""
    from tokenizers.implementations import BertWordPieceTokenizer

    task = load("minilm-stsb")
    (folder / "onnx").mkdir()
    model = folder / "onnx/model.onnx"
    shutil.copy(task.path, model)
    vocabulary = root() / "text/vocab.txt"
    shutil.copy(vocabulary, folder / "vocab.txt")
    tokenizer = BertWordPieceTokenizer(str(vocabulary), lowercase=True)
    tokenizer.enable_padding()
    tokenizer.save(str(folder / "tokenizer.json"))
    special = {
        f"{name}_token": f"[{name.upper()}]"
        for name in ("pad", "unk", "cls", "sep", "mask")
    }
    _write(folder / "special_tokens_map.json", special)
    _write(
        folder / "tokenizer_config.json",
        special
        | {
            "tokenizer_class": "BertTokenizer",
            "do_lower_case": True,
            "model_max_length": 256,
            "max_length": 256,
        },
    )
    _write(
        folder / "config.json",
        {
            "architectures": ["BertModel"],
            "model_type": "bert",
            "hidden_size": 384,
            "intermediate_size": 1536,
            "num_hidden_layers": 6,
            "num_attention_heads": 12,
            "vocab_size": 30522,
            "max_position_embeddings": 512,
            "pad_token_id": 0,
        },
    )
    _write_modules(folder)
    (folder / "sentences.txt").write_text("\n".join(_SENTENCES), encoding="utf-8")
    encoded = tokenizer.encode_batch(list(_SENTENCES))
    ids = np.array([one.ids for one in encoded], np.int64)
    mask = np.array([one.attention_mask for one in encoded], np.int64)
    feeds = {"input_ids": ids, "attention_mask": mask, "token_type_ids": ids * 0}
    np.savez(folder / "inputs.npz", **feeds)
    samples = list(islice(task.calibration(CALIBRATION), CALIBRATION))
    return model, folder / "onnx/model_quantized.onnx", samples


def _write_modules(folder: Path) -> None:
    """Write the settings of sentence-transformers: mean of the tokens, and unit length."""
    modules = (
        ("", "Transformer"),
        ("1_Pooling", "Pooling"),
        ("2_Normalize", "Normalize"),
    )
    _write(
        folder / "modules.json",
        [
            {
                "idx": index,
                "name": str(index),
                "path": path,
                "type": f"sentence_transformers.models.{kind}",
            }
            for index, (path, kind) in enumerate(modules)
        ],
    )
    _write(folder / "sentence_bert_config.json", {"max_seq_length": 256})
    pooling = {"word_embedding_dimension": 384, "pooling_mode_mean_tokens": True}
    _write(folder / "1_Pooling/config.json", pooling)
    (folder / "2_Normalize").mkdir()


def _write(path: Path, content: object) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(content), encoding="utf-8")


def tokens_of(folder: Path, model: Path) -> list[Floats]:
    """Return the vectors of all tokens."""
    return [np.asarray(session_of(model).run(None, stored(folder))[0])]


def embeddings_of(folder: Path, model: Path) -> list[Floats]:
    """Return the means of the tokens' vectors, of unit length."""
    [vectors] = tokens_of(folder, model)
    mask = stored(folder)["attention_mask"][..., None]
    means = (vectors * mask).sum(1) / mask.sum(1)
    return [means / np.linalg.norm(means, axis=1, keepdims=True)]


# Lines of text, photos, sound


def _line(words: str) -> Floats:
    """Return an image of a line, (3, 48, width), from -1 to 1, as the recognizer reads it."""
    image = np.asarray(_drawn([words], (_LINE_WIDTH, 48)), np.float32)
    return (image / 255 - 0.5).transpose(2, 0, 1) / 0.5


def _drawn(lines: list[str] | tuple[str, ...], size: tuple[int, int]) -> Any:
    from PIL import Image, ImageDraw, ImageFont

    image = Image.new("RGB", size, "white")
    font = ImageFont.load_default(30)
    for index, words in enumerate(lines):
        ImageDraw.Draw(image).text((8, 5 + 60 * index), words, "black", font)
    return image


def lines(folder: Path) -> tuple[Path, Path, list[Feeds]]:
    """Draw lines of text for PP-OCRv4's recognizer, which rapidocr brings."""
    np.savez(folder / "inputs.npz", lines=np.stack([_line(one) for one in _LINES]))
    _drawn(_LINES, (480, 370)).save(folder / "page.png")
    model = folder / "float.onnx"
    name = _input(model)
    samples = [{name: _line(words[:24])[None]} for words in (*_SENTENCES, *_LINES[::2])]
    return model, folder / "quantized.onnx", samples


def photos(folder: Path) -> tuple[Path, Path, list[Feeds]]:
    """Cut squares out of COCO's photos for ultralytics, from 0 to 1."""
    from PIL import Image

    feeds = load("yolox_nano").calibration(CALIBRATION + 2)
    images = [
        next(iter(feed.values()))[:, :, :_IMAGE, :_IMAGE] / np.float32(255)
        for feed in feeds
    ]
    np.savez(folder / "inputs.npz", images=np.concatenate(images[:2]))
    pixels = (images[0][0] * 255).astype(np.uint8).transpose(1, 2, 0)
    Image.fromarray(pixels).save(folder / "photo.png")
    model = folder / "float.onnx"
    name = _input(model)
    return model, folder / "quantized.onnx", [{name: image} for image in images[2:]]


def waves(folder: Path) -> tuple[Path, Path, list[Feeds]]:
    """Build a small extractor for speakers, and a model that returns the features it gets."""
    random = np.random.default_rng(0)
    time = np.arange(_SAMPLES) / _SAMPLES
    tones = random.uniform(100, 3000, (4, 5, 1))
    sound = np.sin(2 * np.pi * tones * time).mean(1) * 0.3
    sound += random.normal(0, 0.02, sound.shape)
    np.savez(folder / "inputs.npz", waves=sound.astype(np.float32))
    model = folder / "float.onnx"
    onnx.save(speaker_extractor(random), model)
    onnx.save(features_model(), folder / "features.onnx")
    # Log energies of mel bands, as they come from waveforms of this kind.
    samples = [
        {"x": random.normal(-8, 4, (1, _FRAMES, _FEATURES)).astype(np.float32)}
        for _ in range(CALIBRATION)
    ]
    return model, folder / "quantized.onnx", samples


def speaker_extractor(random: np.random.Generator) -> onnx.ModelProto:
    """Return two convolutions over time and their mean, as networks for speakers have them."""
    shapes = {"first": (64, _FEATURES, 3), "second": (64, 64, 3)}
    constants = [
        numpy_helper.from_array(
            random.normal(0, 0.06, shape).astype(np.float32), f"{name}_weight"
        )
        for name, shape in shapes.items()
    ]
    nodes = [
        helper.make_node("Transpose", ["x"], ["moved"], "moved", perm=[0, 2, 1]),
        helper.make_node("Conv", ["moved", "first_weight"], ["a"], "first"),
        helper.make_node("Relu", ["a"], ["b"], "relu"),
        helper.make_node("Conv", ["b", "second_weight"], ["c"], "second"),
        helper.make_node("ReduceMean", ["c"], ["embedding"], axes=[2], keepdims=0),
    ]
    return _with_metadata(nodes, constants, 64)


def features_model() -> onnx.ModelProto:
    """Return a model that returns its input."""
    size = _FRAMES * _FEATURES
    shape = numpy_helper.from_array(np.array([1, size]), "shape")
    nodes = [helper.make_node("Reshape", ["x", "shape"], ["embedding"], "flat")]
    return _with_metadata(nodes, [shape], size)


def _with_metadata(
    nodes: list[onnx.NodeProto], constants: list[TensorProto], size: int
) -> onnx.ModelProto:
    """Return a model with the metadata that sherpa-onnx reads."""
    value = helper.make_tensor_value_info
    graph = helper.make_graph(
        nodes,
        "extractor",
        [value("x", TensorProto.FLOAT, [1, "frames", _FEATURES])],
        [value("embedding", TensorProto.FLOAT, [1, size])],
        constants,
    )
    model = helper.make_model(
        graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8
    )
    metadata = {
        "framework": "wespeaker",
        "language": "English",
        "sample_rate": "16000",
        "output_dim": str(size),
        "normalize_samples": "1",
        "feature_normalize_type": "",
    }
    helper.set_model_props(model, metadata)
    return model


def _input(model: Path) -> str:
    """Return the name of the first input."""
    name: str = session_of(model).get_inputs()[0].name
    return name


def single_images(folder: Path, model: Path) -> list[Floats]:
    """Return the first output for each image of the only input."""
    session = session_of(model)
    [images] = stored(folder).values()
    name = session.get_inputs()[0].name
    return [np.asarray(session.run(None, {name: one[None]})[0]) for one in images]


def speakers_of(folder: Path, model: Path) -> list[Floats]:
    """Return the embeddings of the features that sherpa-onnx has computed."""
    session = session_of(model)
    with np.load(folder / "features.npz") as features:
        return [
            np.asarray(session.run(None, {"x": one.reshape(1, -1, _FEATURES)})[0][0])
            for one in features.values()
        ]


#: What this package needs where a consumer imports it.
_OWN = [name for name in requires("quark-onnx-core") or () if "extra ==" not in name]
_OPTIMUM = ("torch", "optimum-onnx[onnxruntime]", *_OWN)
CONSUMERS = {
    "optimum": Consumer(text, tokens_of, _OPTIMUM),
    "optimum-quantizer": Consumer(text, tokens_of, _OPTIMUM, quantizes=True),
    "sentence-transformers": Consumer(
        text, embeddings_of, (*_OPTIMUM, "sentence-transformers")
    ),
    "fastembed": Consumer(text, embeddings_of, ("fastembed",)),
    "transformers.js": Consumer(text, embeddings_of),
    "rapidocr": Consumer(lines, single_images, ("rapidocr-onnxruntime", "setuptools")),
    "ultralytics": Consumer(
        photos,
        single_images,
        ("torch", "torchvision", "ultralytics", "onnx", "onnxruntime"),
    ),
    "sherpa-onnx": Consumer(waves, speakers_of, ("sherpa-onnx", "numpy")),
}
#: Consumers that bring or build their model in their environment.
_PREPARED = ("rapidocr", "ultralytics")


def command(name: str, environments: Path) -> list[str]:
    """Return the command of a consumer's worker; make its environment at the first use.

    Raises:
        NotInstalled: pip or npm cannot install the consumer.
    """
    packages = CONSUMERS[name].packages
    if packages:
        # Both uses of optimum share an environment.
        place = environments / name.removesuffix("-quantizer")
        return [environment(place, packages), str(WORKER)]
    place = environments / name
    if not (place / "node_modules").is_dir():
        npm = shutil.which("npm")
        if npm is None:
            raise NotInstalled("npm is not installed")
        place.mkdir(parents=True, exist_ok=True)
        # onnxruntime-node's script loads libraries for GPUs; those for the CPU are in the package.
        command = [npm, "install", "--ignore-scripts", "@huggingface/transformers"]
        run_installer(command, place)
    shutil.copy(JAVASCRIPT, place)
    return ["node", str(place / JAVASCRIPT.name)]


class Failed(Exception):
    """A consumer does not load or run a model."""


def run(worker: list[str], *arguments: str | Path) -> Row:
    """Run a step of a worker; return its answer.

    Raises:
        Failed: the process fails; the message is its last line.
    """
    done = subprocess.run(
        [*worker, *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "HF_HUB_OFFLINE": "1",
            "YOLO_AUTOINSTALL": "false",
            "YOLO_OFFLINE": "true",
            "CUDA_VISIBLE_DEVICES": "",
        },
    )
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        raise Failed(lines[-1][:300] if lines else "it ends without a message")
    line = done.stdout.strip().rpartition("\n")[2]
    return Row(json.loads(line)) if line.startswith("{") else Row()


def outputs_of(path: Path) -> list[Floats]:
    """Return the outputs that a worker has written."""
    if path.suffix == ".json":
        return [np.array(json.loads(path.read_text("utf-8")), np.float32)]
    with np.load(path) as arrays:
        return list(arrays.values())


def sqnr(reference: list[Floats], outputs: list[Floats]) -> float:
    """Return the SQNR over all outputs in dB."""
    pairs = list(zip(reference, outputs, strict=True))
    signal = sum(float(np.square(one, dtype=np.float64).sum()) for one, _ in pairs)
    noise = sum(
        float(np.square(one.astype(np.float64) - other).sum()) for one, other in pairs
    )
    return 10 * float(np.log10(signal / noise)) if noise else float("inf")


def measure(name: str, worker: list[str], folder: Path) -> Row:
    """Return the figures of a consumer.

    Raises:
        Failed: the consumer does not load or run a model.
    """
    from quark_onnx import quantize

    consumer = CONSUMERS[name]
    if name in _PREPARED:
        run(worker, "prepare", name, folder)
    model, quantized, samples = consumer.build(folder)
    if not consumer.quantizes:
        quantize(model, samples, "A8W8", quantized)
    suffix = ".npz" if consumer.packages else ".json"
    if consumer.own is speakers_of:
        features = folder / "features.npz"
        run(worker, "run", name, folder, folder / "features.onnx", features)
    found = {}
    for file in (quantized, model):
        output = folder / f"{file.stem}_outputs{suffix}"
        answer = run(worker, "run", name, folder, file, output)
        found[file] = answer | {"outputs": outputs_of(output)}
    own = {file: consumer.own(folder, file) for file in (quantized, model)}
    theirs = sqnr(found[model]["outputs"], found[quantized]["outputs"])
    ours = sqnr(own[model], own[quantized])
    row = {
        "version": found[quantized]["version"],
        "note": found[quantized]["note"],
        "float note": found[model]["note"],
        "consumer dB": round(theirs, 2),
        "own dB": round(ours, 2),
        "float dB": round(sqnr(own[model], found[model]["outputs"]), 1),
        "file": "by the consumer" if consumer.quantizes else "A8W8",
    }
    return Row(row) | {"same": abs(theirs - ours) <= TOLERANCE}


def report(rows: dict[str, Row]) -> Iterator[str]:
    """Yield the lines of the page."""
    yield "# Consumers of our files\n"
    yield (
        "By `benchmarks/consumers.py`: the SQNR of the outputs against those of the float model,"
        " in the consumer and in onnxruntime directly.\n"
    )
    cells = []
    for name, row in rows.items():
        if "error" in row:
            cells.append([name, "", row["error"], None, None, "fails"])
        else:
            verdict = "same" if row["same"] else "differs"
            cells.append(
                [
                    name,
                    row["version"],
                    row["note"],
                    row["consumer dB"],
                    row["own dB"],
                    verdict,
                ]
            )
    head = ["consumer", "version", "what ran", "dB there", "dB here", "verdict"]
    yield table(head, cells)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--environments", type=Path, default=Path.home() / ".cache/quark_onnx_consumers"
    )
    parser.add_argument(
        "--consumers", nargs="+", choices=CONSUMERS, default=list(CONSUMERS)
    )
    add_arguments(parser, "again", "report", "out")
    options = parser.parse_args()
    store = Store(options.out / "consumers.json")
    for name in [] if options.report else options.consumers:
        known = store.rows().get(name)
        if known and "error" not in known and not options.again:
            continue
        try:
            worker = command(name, options.environments.resolve())
            with TemporaryDirectory() as place:
                folder = Path(place) / "model"
                folder.mkdir()
                row = measure(name, worker, folder)
        except (Failed, NotInstalled) as error:
            row = Row(error=str(error), model="")
        store.put(name, row)
        print(name, row, flush=True)
    rows = store.rows()
    text = "\n".join(report(rows))
    (options.out / "consumers.md").write_text(f"{text}\n", encoding="utf-8")
    wrong = [name for name, row in rows.items() if not row.get("same")]
    print(f"{len(rows) - len(wrong)} of {len(rows)} consumers give our own result")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
