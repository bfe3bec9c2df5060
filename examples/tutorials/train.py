"""Train the small models of the tutorials, and write them with their data to data/.

The files are in the repository; run this script only to change them:

    pip install '.[llm]' && python examples/tutorials/train.py

detector.onnx finds bright rectangles in noisy images of 32 x 32 pixels: three convolutions with
SiLU, a head per cell of a 4 x 4 grid, and the decoding of boxes. bert.onnx tells whether a sentence
of a small grammar is positive: a BERT of two layers.
"""

from pathlib import Path

import numpy as np
import onnx
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from transformers import BertConfig, BertForSequenceClassification

DATA = Path(__file__).parent / "data"
SIZE, STRIDE, GRID = 32, 8, 4
#: Boxes are in pixels of the camera's image of 640 x 640, of which the model sees a reduced copy.
CAMERA = 640 / SIZE
_TEXT = (
    "[PAD] [CLS] [SEP] the a this that film book song meal was is really very quite not never"
    " good great lovely superb fine bad awful dull poor sad and but i found it we thought"
)
WORDS = _TEXT.split()
POSITIVE, NEGATIVE = WORDS[18:23], WORDS[23:28]
LENGTH = 16


def draw(generator: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Return an image with one to three rectangles, and their corners; absent ones are zero."""
    image = generator.normal(40, 20, (SIZE, SIZE))
    boxes = np.zeros((3, 4), np.float32)
    cells: set[tuple[int, int]] = set()
    for index in range(generator.integers(1, 4)):
        width, height = generator.integers(4, 12, 2)
        x = generator.integers(0, SIZE - width)
        y = generator.integers(0, SIZE - height)
        cell = ((x + width // 2) // STRIDE, (y + height // 2) // STRIDE)
        if cell in cells:
            continue
        cells.add(cell)
        image[y : y + height, x : x + width] += generator.uniform(90, 180)
        boxes[index] = x, y, x + width, y + height
    return image.clip(0, 255).astype(np.uint8), boxes


class Detector(nn.Module):
    """Convolutions and the decoding of boxes: (left, top, right, bottom, score) per cell."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        channels = 1
        for width in (16, 24, 32):
            layers.append(nn.Conv2d(channels, width, 3, stride=2, padding=1))
            layers.append(nn.SiLU())
            layers += [nn.Conv2d(width, width, 3, padding=1), nn.SiLU()]
            channels = width
        self.body = nn.Sequential(*layers)
        self.head = nn.Conv2d(channels, 5, 1)
        steps = torch.arange(GRID) * STRIDE + STRIDE / 2
        y, x = torch.meshgrid(steps, steps, indexing="ij")
        self.register_buffer("centers", torch.stack([x.flatten(), y.flatten()], 1))

    def raw(self, image: Tensor) -> Tensor:
        return self.head(self.body(image)).flatten(2).transpose(1, 2)

    def decode(self, raw: Tensor) -> Tensor:
        center = raw[..., 0:2] * STRIDE + self.centers
        size = torch.exp(raw[..., 2:4]) * STRIDE
        corners = torch.cat([center - size / 2, center + size / 2], -1) * CAMERA
        return torch.cat([corners, torch.sigmoid(raw[..., 4:5])], -1)

    def forward(self, image: Tensor) -> Tensor:
        return self.decode(self.raw(image))


def loss_of(model: Detector, images: Tensor, boxes: Tensor) -> Tensor:
    """Return the loss: binary cross entropy of cells, and L1 distance of corners."""
    raw = model.raw(images)
    there = boxes[..., 2] > 0
    centers = (boxes[..., :2] + boxes[..., 2:]) / 2
    cells = (centers // STRIDE).long()
    index = (cells[..., 1] * GRID + cells[..., 0]).clamp(0, GRID * GRID - 1)
    target = torch.zeros(raw.shape[:2])
    batch = torch.arange(len(images))[:, None].expand_as(index)
    target[batch[there], index[there]] = 1
    corners = model.decode(raw)[batch[there], index[there], :4]
    return (
        F.binary_cross_entropy_with_logits(raw[..., 4], target)
        + 0.05 * (corners / CAMERA - boxes[there]).abs().mean()
    )


def train_detector() -> None:
    torch.manual_seed(0)
    generator = np.random.default_rng(0)
    drawn = [draw(generator) for _ in range(4000)]
    images = torch.tensor(np.stack([image for image, _ in drawn]))[:, None] / 255.0
    boxes = torch.tensor(np.stack([corners for _, corners in drawn]))
    model = Detector()
    steps = 2500
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=steps)
    for _ in range(steps):
        chosen = torch.randint(0, len(images) - 200, (64,))
        loss = loss_of(model, images[chosen], boxes[chosen])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    print(f"detector: loss {loss.item():.3f}")
    held_out = np.stack([image for image, _ in drawn[-200:]])
    np.savez_compressed(
        DATA / "detector.npz",
        calibration=held_out[:64],
        test=held_out[64:],
        boxes=boxes[-136:].numpy() * np.float32(CAMERA),
    )
    export(model, (images[:2],), ["image"], "predictions", "detector.onnx")


def sentence(generator: np.random.Generator) -> tuple[list[str], int]:
    """Return a sentence and whether it is positive; "not" and "never" turn a word around."""
    positive = bool(generator.integers(2))
    turned = generator.random() < 0.4
    word = str(generator.choice(POSITIVE if positive != turned else NEGATIVE))
    words = [str(generator.choice(["the", "a", "this", "that"]))]
    words += [str(generator.choice(["film", "book", "song", "meal"]))]
    words += [str(generator.choice(["was", "is"]))]
    words += [str(generator.choice(["not", "never"]))] if turned else []
    if generator.random() < 0.5:
        words.append(str(generator.choice(["really", "very", "quite"])))
    start = ["i", "thought"] if generator.random() < 0.3 else []
    return ["[CLS]", *start, *words, word, "[SEP]"], int(positive)


def token_arrays(count: int, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return token ids, masks and labels of generated sentences."""
    generator = np.random.default_rng(seed)
    ids = np.zeros((count, LENGTH), np.int64)
    mask = np.zeros((count, LENGTH), np.int64)
    labels = np.zeros(count, np.int64)
    for row in range(count):
        words, labels[row] = sentence(generator)
        ids[row, : len(words)] = [WORDS.index(word) for word in words]
        mask[row, : len(words)] = 1
    return ids, mask, labels


class Classifier(nn.Module):
    """BERT with two named inputs and the logits as its output."""

    def __init__(self) -> None:
        super().__init__()
        config = BertConfig(
            vocab_size=len(WORDS),
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=64,
            max_position_embeddings=LENGTH,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            attn_implementation="eager",
        )
        self.bert = BertForSequenceClassification(config)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        return self.bert(input_ids, attention_mask).logits


def train_bert() -> None:
    torch.manual_seed(0)
    model = Classifier()
    arrays = token_arrays(4000, 0)
    ids, mask, labels = (torch.tensor(array) for array in arrays)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for _ in range(400):
        chosen = torch.randint(0, len(ids), (64,))
        logits = model(ids[chosen], mask[chosen])
        loss = F.cross_entropy(logits, labels[chosen])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"bert: loss {loss.item():.4f}")
    ids, mask, labels = token_arrays(600, 1)
    np.savez_compressed(DATA / "bert.npz", input_ids=ids, mask=mask, labels=labels)
    inputs = (torch.tensor(ids[:2]), torch.tensor(mask[:2]))
    names = ["input_ids", "attention_mask"]
    export(model.eval(), inputs, names, "logits", "bert.onnx")


def export(
    model: nn.Module,
    inputs: tuple[Tensor, ...],
    names: list[str],
    output: str,
    file: str,
) -> None:
    """Write an ONNX model with a free batch."""
    batch = torch.export.Dim("batch", min=1, max=1024)
    torch.onnx.export(
        model.eval(),
        inputs,
        DATA / file,
        input_names=names,
        output_names=[output],
        dynamic_shapes=tuple({0: batch} for _ in inputs),
        opset_version=18,
        dynamo=True,
        external_data=False,
    )
    model_proto = onnx.load(DATA / file)
    for node in (*model_proto.graph.node, *model_proto.graph.value_info):
        del node.metadata_props[:]  # stack traces of the exporter
    del model_proto.graph.metadata_props[:]
    onnx.save(model_proto, DATA / file)


if __name__ == "__main__":
    DATA.mkdir(exist_ok=True)
    train_detector()
    train_bert()
