"""Quantization of a language model of 1.1 billion parameters file to file: time and memory, what
was foretold, floors.

    python benchmarks/llm_large.py [--schemes uint4_wo_128 fp8] [--layers 2 --hidden 256] [--folder
    DIR] [--busy]

The model is a Llama with random weights in bfloat16, made in a temporary folder; no data is needed
beside the disk space, about twice the size of the model. fp8 finds its scales on 4,096 random
tokens. Each run is a process of its own. The floor of a run is the time in which this machine reads
what it reads and writes what it writes, one file after the other; and, where activations are
measured, one pass of each token through the blocks at the rate of its matrix product. The exit code
is 1 where memory exceeds 6 GB, or where more than twice or less than half of what was foretold is
taken.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from _memory import peak_mb
from _results import Store, table

SCHEMES = ("uint4_wo_128", "fp8")
LAYERS, HIDDEN, VOCABULARY = 22, 2048, 32_000
WINDOWS, LENGTH = 8, 512
LIMIT_MB = 6000.0
CHUNK = 1 << 24


@dataclass(frozen=True)
class Run:
    """What quantizing took, and what it was foretold to take; sizes are bytes."""

    seconds: float
    peak_mb: float
    size: int
    said_seconds: float
    said_mb: float
    said_size: int


def add_arguments(
    parser: argparse.ArgumentParser, layers: int | None, hidden: int
) -> None:
    """Those of the model, and of where it and the results go."""
    parser.add_argument("--layers", type=int, default=layers, help="blocks")
    parser.add_argument(
        "--hidden",
        type=int,
        default=hidden,
        help=f"a multiple of 512, or 256 (default: {hidden})",
    )
    parser.add_argument(
        "--folder",
        type=Path,
        help="where the model is made (default: the temporary folder)",
    )
    parser.add_argument(
        "--busy",
        action="store_true",
        help="the machine does other work, too: judge no seconds",
    )
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")


def config_of(
    layers: int, hidden: int, vocabulary: int = VOCABULARY, dtype: str = "bfloat16"
) -> Any:
    """A Llama whose other sizes keep the proportions of the one of 1.1 billion parameters."""
    from transformers import AutoConfig

    heads = hidden // 64
    return AutoConfig.for_model(
        "llama",
        architectures=["LlamaForCausalLM"],
        dtype=dtype,
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=hidden * 11 // 4,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=max(1, heads // 8),
        max_position_embeddings=LENGTH,
    )


def write(folder: Path, config: Any) -> int:
    """The model with random weights, of which one tensor is in memory at a time.

    Returns the weights of its blocks.
    """
    import torch

    from quark_onnx.torch.checkpoints.meta_model import skeleton_of
    from quark_onnx.torch.checkpoints.safetensors_io import Writer
    from quark_onnx.torch.models.structure import blocks_of

    model, generator = skeleton_of(config), torch.Generator().manual_seed(0)
    with Writer(folder, shard=500_000_000) as writer:
        for name, parameter in model.named_parameters():
            values = torch.ones(parameter.shape)
            if parameter.ndim > 1:
                values.normal_(0, 0.02, generator=generator)
            writer.add(name, values.to(parameter.dtype))
        config.save_pretrained(writer.staging)
    np.save(
        folder / "tokens.npy",
        np.random.default_rng(0).integers(0, VOCABULARY, (WINDOWS, LENGTH)),
    )
    return sum(
        each.numel()
        for block in blocks_of(model).values()
        for each in block.parameters()
        if each.ndim > 1
    )


def child(folder: str, output: str, scheme: str) -> None:
    """Quantize in this process, and print what it took."""
    import transformers.models.llama.modeling_llama  # noqa: F401  - imports are not timed

    from quark_onnx.torch.pipelines.ptq import Text, config_for, ptq

    start = time.perf_counter()
    text = Text(str(Path(folder) / "tokens.npy"), WINDOWS, LENGTH)
    found = ptq(folder, output, config_for(scheme), text=text, progress=False).estimate
    seconds = time.perf_counter() - start
    print(
        json.dumps(
            asdict(
                Run(
                    seconds,
                    peak_mb(),
                    size_of(output),
                    found.seconds,
                    found.memory / 1e6,
                    found.disk,
                )
            )
        )
    )


def size_of(folder: Path | str) -> int:
    """Bytes of the tensors."""
    return sum(file.stat().st_size for file in Path(folder).glob("*.safetensors"))


def copied(folder: Path) -> tuple[float, float]:
    """Seconds of reading the tensors of a folder from their first byte to their last, and of
    writing as many.
    """
    read = written = 0.0
    buffer, copy = bytearray(CHUNK), folder / "copy"
    with copy.open("wb", buffering=0) as target:
        for file in sorted(folder.glob("*.safetensors")):
            with file.open("rb", buffering=0) as source:
                while True:
                    start = time.perf_counter()
                    count = source.readinto(buffer)
                    read += time.perf_counter() - start
                    if not count:
                        break
                    start = time.perf_counter()
                    target.write(memoryview(buffer)[:count])
                    written += time.perf_counter() - start
    copy.unlink()
    return read, written


def product_rate(hidden: int, dtype: str = "bfloat16") -> float:
    """Operations a second of the widest product of a block, the best of five."""
    import torch

    left = torch.ones(LENGTH, hidden, dtype=getattr(torch, dtype))
    right = torch.ones(hidden * 11 // 4, hidden, dtype=left.dtype)
    best = float("inf")
    for _ in range(5):
        start = time.perf_counter()
        torch.nn.functional.linear(left, right)
        best = min(best, time.perf_counter() - start)
    return 2 * left.numel() * len(right) / best


def complaints(run: Run, busy: bool) -> list[str]:
    """What is wrong with a run."""
    found = (
        [f"{run.peak_mb:.0f} MB are more than {LIMIT_MB:.0f}"]
        if run.peak_mb > LIMIT_MB
        else []
    )
    pairs = {"memory": (run.peak_mb, run.said_mb), "disk": (run.size, run.said_size)}
    pairs |= {} if busy else {"time": (run.seconds, run.said_seconds)}
    return found + [
        f"{name}: {was:.4g}, and {said:.4g} were foretold"
        for name, (was, said) in pairs.items()
        if not said / 2 <= was <= said * 2
    ]


def main() -> int:
    if sys.argv[1:2] == ["--child"]:
        child(*sys.argv[2:])
        return 0
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--schemes", nargs="+", choices=SCHEMES, default=list(SCHEMES), metavar="SCHEME"
    )
    add_arguments(parser, LAYERS, HIDDEN)
    arguments = parser.parse_args()
    rows, wrong = list[list[object]](), list[str]()
    store = Store(arguments.out / "llm_large.json")
    with TemporaryDirectory(dir=arguments.folder) as place:
        source = Path(place) / "in"
        weights = write(source, config_of(arguments.layers, arguments.hidden))
        size, (read, written) = size_of(source), copied(source)
        rate = product_rate(arguments.hidden)
        for scheme in arguments.schemes:
            output = Path(place) / scheme
            command = [
                sys.executable,
                __file__,
                "--child",
                str(source),
                str(output),
                scheme,
            ]
            done = subprocess.run(
                command, text=True, stdout=subprocess.PIPE, check=True
            )
            run = Run(**json.loads(done.stdout.splitlines()[-1]))
            floor = read + written * run.size / size
            if scheme == "fp8":
                floor += 2 * weights * WINDOWS * LENGTH / rate
            name = f"{arguments.layers} × {arguments.hidden}, {scheme}"
            store.put(
                name,
                asdict(run)
                | {
                    "source": size,
                    "read": read,
                    "written": written,
                    "rate": rate,
                },
            )
            wrong += [f"{name}: {each}" for each in complaints(run, arguments.busy)]
            rows.append(
                [name, *_cells(run), f"{floor:.1f}", f"{run.seconds / floor:.1f}"]
            )
            print(*rows[-1], file=sys.stderr, flush=True)
    head = [
        "model",
        "seconds",
        "foretold",
        "peak MB",
        "foretold",
        "result MB",
        "foretold",
        "floor, seconds",
        "times it",
    ]
    text = (
        f"{table(head, rows)}\n\nReading {size / read / 1e6:.0f} MB/s, writing"
        f" {size / written / 1e6:.0f} MB/s, "
    )
    text += f"products {rate / 1e9:.0f} GFLOP/s.\n"
    print("\n".join([text, *wrong]))
    if (
        arguments.layers == LAYERS
        and arguments.hidden == HIDDEN
        and arguments.schemes == list(SCHEMES)
    ):
        title = (
            "# Quantization of a language model of 1.1 billion parameters, file to file"
        )
        (arguments.out / "llm_large.md").write_text(
            f"{title}\n\n{text}", encoding="utf-8"
        )
    return int(bool(wrong))


def _cells(run: Run) -> list[object]:
    return [
        *(f"{run.seconds:.1f}", f"{run.said_seconds:.1f}"),
        *(f"{run.peak_mb:.0f}", f"{run.said_mb:.0f}"),
        *(f"{run.size / 1e6:.0f}", f"{run.said_size / 1e6:.0f}"),
    ]


if __name__ == "__main__":
    sys.exit(main())
