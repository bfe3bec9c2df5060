"""Run a model in a consumer of ONNX files, in the consumer's own environment.

    python _consumer_worker.py prepare CONSUMER FOLDER
    python _consumer_worker.py run CONSUMER FOLDER MODEL OUTPUT

``prepare`` writes FOLDER/float.onnx, for consumers that bring a model. ``run`` runs MODEL through
the consumer's own interface on FOLDER/inputs.npz, writes the outputs to OUTPUT, an .npz file, and
prints JSON as its last line: the version, and a note of what the consumer made of the outputs.
Nothing of quark_onnx is imported, but for optimum's quantizer, which gets the quantizers of
``quark_onnx.compat_onnxruntime``.
"""

import json
import shutil
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

Arrays = dict[str, Any]
#: What a consumer answers: its outputs, and a note.
Answer = tuple[list[Any], str]


def sentences(folder: Path) -> list[str]:
    """Return the sentences that embed, one a line."""
    return (folder / "sentences.txt").read_text("utf-8").splitlines()


def optimum(folder: Path, model: Path, inputs: Arrays) -> Answer:
    """Run ORTModelForFeatureExtraction."""
    import torch
    from optimum.onnxruntime import ORTModelForFeatureExtraction

    loaded = ORTModelForFeatureExtraction.from_pretrained(
        folder, subfolder="onnx", file_name=model.name
    )
    feeds = {name: torch.from_numpy(array) for name, array in inputs.items()}
    return [loaded(**feeds).last_hidden_state.numpy()], type(loaded).__name__


def optimum_quantizer(folder: Path, model: Path, inputs: Arrays) -> Answer:
    """Quantize the float model with ORTQuantizer and this package's quantizers; run the result."""
    import onnx
    import optimum.onnxruntime.quantization as module
    from optimum.onnxruntime.configuration import AutoQuantizationConfig

    from quark_onnx.compat_onnxruntime import onnx_quantizer, qdq_quantizer

    note = ""
    if not model.exists():
        module.ONNXQuantizer = onnx_quantizer.ONNXQuantizer
        module.QDQQuantizer = qdq_quantizer.QDQQuantizer
        quantizer = module.ORTQuantizer.from_pretrained(
            folder / "onnx", file_name="model.onnx"
        )
        config = AutoQuantizationConfig.avx512_vnni(is_static=False, per_channel=True)
        with_codes = folder / "ort_quantizer"
        quantizer.quantize(quantization_config=config, save_dir=with_codes)
        shutil.copy(with_codes / "model_quantized.onnx", model)
        nodes = onnx.load(model).graph.node
        count = sum(node.op_type == "MatMulInteger" for node in nodes)
        note = f"{count} MatMulInteger"
    outputs, name = optimum(folder, model, inputs)
    return outputs, f"{note}, {name}" if note else name


def sentence_transformers(folder: Path, model: Path, inputs: Arrays) -> Answer:
    """Embed sentences with the backend "onnx"."""
    from sentence_transformers import SentenceTransformer

    loaded = SentenceTransformer(
        str(folder),
        backend="onnx",
        device="cpu",
        model_kwargs={"file_name": f"onnx/{model.name}"},
    )
    return [loaded.encode(sentences(folder))], 'SentenceTransformer(backend="onnx")'


def fastembed(folder: Path, model: Path, inputs: Arrays) -> Answer:
    """Embed sentences with a custom model."""
    from fastembed import TextEmbedding
    from fastembed.common.model_description import ModelSource, PoolingType

    name = f"local/{model.stem}"
    TextEmbedding.add_custom_model(
        model=name,
        pooling=PoolingType.MEAN,
        normalization=True,
        sources=ModelSource(hf=name),
        dim=384,
        model_file=f"onnx/{model.name}",
    )
    loaded = TextEmbedding(name, specific_model_path=str(folder), threads=1)
    embeddings = np.stack(list(loaded.embed(sentences(folder))))
    return [embeddings], "TextEmbedding with a custom model"


def rapidocr(folder: Path, model: Path, inputs: Arrays) -> Answer:
    """Read lines of text; the outputs are those of the recognizer's own session."""
    from rapidocr_onnxruntime import RapidOCR

    engine = RapidOCR(rec_model_path=str(model))
    lines, _ = engine(str(folder / "page.png"))
    outputs = [
        engine.text_rec.session(image[None])[0] for image in inputs["lines"].copy()
    ]
    return outputs, " / ".join(line[1] for line in lines)


def prepare_rapidocr(folder: Path) -> None:
    """Copy the recognizer that the package brings."""
    import rapidocr_onnxruntime

    place = Path(rapidocr_onnxruntime.__file__).parent / "models"
    shutil.copy(next(place.glob("*_rec_*.onnx")), folder / "float.onnx")


def ultralytics(folder: Path, model: Path, inputs: Arrays) -> Answer:
    """Predict with YOLO; the outputs are those of its backend before the selection of boxes."""
    import torch
    from ultralytics import YOLO

    loaded = YOLO(model, task="detect")
    results = loaded.predict(
        folder / "photo.png", imgsz=320, conf=0.001, device="cpu", verbose=False
    )
    backend = loaded.predictor.model
    outputs = []
    for image in inputs["images"]:
        found = backend(torch.from_numpy(image[None]))
        first = found[0] if isinstance(found, list | tuple) else found
        outputs.append(np.asarray(first))
    return outputs, f"YOLO(file).predict: {len(results[0].boxes)} boxes"


def prepare_ultralytics(folder: Path) -> None:
    """Export a YOLOv8 nano with random weights, as the package brings none.

    With the statistics of its first images, each BatchNormalization passes on what it reads; as it
    is built, the outputs would not depend on the image. Wide weights of the last layers spread
    boxes and scores.
    """
    import torch
    from ultralytics import YOLO

    torch.manual_seed(0)
    detector = YOLO("yolov8n.yaml")
    for module in detector.model.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            module.momentum = None
    head = detector.model.model[-1]
    for branch in (*head.cv2, *head.cv3):
        torch.nn.init.normal_(branch[-1].weight, 0, 0.2)
    for branch in head.cv3:
        torch.nn.init.constant_(branch[-1].bias, -2)
    detector.model.train()
    with torch.no_grad():
        for _ in range(4):
            patches = torch.rand(4, 3, 20, 20)
            detector.model(torch.nn.functional.interpolate(patches, size=320))
    detector.model.eval()
    exported = detector.export(
        format="onnx", imgsz=320, simplify=False, opset=17, device="cpu"
    )
    shutil.move(exported, folder / "float.onnx")


def sherpa_onnx(folder: Path, model: Path, inputs: Arrays) -> Answer:
    """Embed a waveform with the extractor for speakers."""
    import sherpa_onnx as package

    config = package.SpeakerEmbeddingExtractorConfig(model=str(model), num_threads=1)
    extractor = package.SpeakerEmbeddingExtractor(config)
    outputs = []
    for wave in inputs["waves"]:
        stream = extractor.create_stream()
        stream.accept_waveform(sample_rate=16000, waveform=wave)
        stream.input_finished()
        outputs.append(np.asarray(extractor.compute(stream), np.float32))
    return outputs, "SpeakerEmbeddingExtractor"


RUN: dict[str, Callable[[Path, Path, Arrays], Answer]] = {
    "optimum": optimum,
    "optimum-quantizer": optimum_quantizer,
    "sentence-transformers": sentence_transformers,
    "fastembed": fastembed,
    "rapidocr": rapidocr,
    "ultralytics": ultralytics,
    "sherpa-onnx": sherpa_onnx,
}
PREPARE: dict[str, Callable[[Path], None]] = {
    "rapidocr": prepare_rapidocr,
    "ultralytics": prepare_ultralytics,
}
#: Names of the packages whose version is reported, where they differ.
PACKAGES = {
    "optimum": "optimum-onnx",
    "optimum-quantizer": "optimum-onnx",
    "rapidocr": "rapidocr-onnxruntime",
}


def main(step: str, consumer: str, folder: Path, *files: str) -> None:
    """Run a step of a consumer."""
    if step == "prepare":
        PREPARE[consumer](folder)
        return
    model, output = map(Path, files)
    with np.load(folder / "inputs.npz") as stored:
        inputs = dict(stored)
    outputs, note = RUN[consumer](folder, model, inputs)
    np.savez(output, *outputs)
    package = PACKAGES.get(consumer, consumer)
    print("\n" + json.dumps({"version": version(package), "note": note}))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]), *sys.argv[4:])
