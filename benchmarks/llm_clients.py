"""The matrix of schemes and clients: which program loads a checkpoint of which scheme, and whether
it computes what this package computes.

    python benchmarks/llm_clients.py [--schemes NAME ...] [--clients NAME ...] [--environments DIR]
    [--out DIR] [--again]

Each client runs in an environment of its own, which is made in DIR with pip at the first use. A
tiny random Llama is quantized by each scheme and written in the first layout that the table of
schemes names for the client. A cell is

    loads      the client has run the model, and its logits are those of ``load_checkpoint``
    refused    the package or the client refuses the scheme, with the reason in the JSON file
    differs    the client runs the model, and computes something else
    fails      anything else

vLLM is not run: its column is the verdict of ``quark-onnx llm validate``, whose rules are held
against vLLM's own selection of schemes in the tests. Rows are kept in DIR/llm_clients.json, the
table is DIR/llm_clients.md. The exit code is 1 where a cell differs or fails.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import venv
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from _results import Row, Store, table

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).with_name("results")
_TORCH = ("torch", "transformers", "safetensors", "accelerate")
_OWN = ("onnx", "onnxruntime", "numpy", "tqdm", "pyyaml", "gguf", "onnxscript")
#: The packages of each client's environment; none for the environment of this script.
PACKAGES: dict[str, tuple[str, ...]] = {
    "vLLM (rules)": (),
    "transformers, our loader": (),
    "transformers + amd-quark": (*_TORCH, "amd-quark==0.13"),
    "transformers + compressed-tensors": (*_TORCH, "compressed-tensors"),
    "llama.cpp": ("llama-cpp-python",),
    "onnxruntime": (),
    "onnxruntime-genai": (*_TORCH, *_OWN, "onnxruntime-genai", "onnx_ir"),
}
#: Relative differences of logits (L2) up to which a client computes the same.
TOLERANCE = 1e-3
#: Load a folder, run tokens, and write the logits.
_TRANSFORMERS = """
import sys, numpy, torch
from transformers import AutoModelForCausalLM
{extra}
folder, tokens, out = sys.argv[1:]
model = AutoModelForCausalLM.from_pretrained(folder, device_map="cpu").eval()
with torch.no_grad():
    ids = torch.from_numpy(numpy.load(tokens))
    numpy.save(out, model(ids).logits.float().numpy())
"""
_LLAMA_CPP = """
import sys, numpy, llama_cpp
path, tokens, out = sys.argv[1:]
model = llama_cpp.Llama(path, logits_all=True, verbose=False, n_ctx=64)
rows = []
for ids in numpy.load(tokens):
    model.reset()
    model.eval(ids.tolist())
    rows.append(numpy.array(model.scores[: len(ids)]))
numpy.save(out, numpy.stack(rows))
"""


class Refused(Exception):
    """A scheme is refused by the package or by a client."""


def environment(client: str, folder: Path) -> str:
    """The Python of a client's environment, which is made if it is not there."""
    packages = PACKAGES[client]
    if not packages:
        return sys.executable
    place = folder / client.replace(" ", "-").replace("+", "and").replace(",", "")
    python = place / ("Scripts/python.exe" if sys.platform == "win32" else "bin/python")
    if not python.exists():
        venv.create(place, with_pip=True)
        command = [str(python), "-m", "pip", "install", "-q", *packages]
        subprocess.run(command, check=True)
    return str(python)


def _run(python: str, program: str, *arguments: Path) -> None:
    """Run a program in an environment.

    Raises:
        Refused: it ends with an error, whose last line is the reason.
    """
    command = [python, "-c", program, *map(str, arguments)]
    environment = {"PYTHONPATH": str(ROOT), "QUARK_DISABLE_COMPILE": "1"}
    done = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, **environment}
    )
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        raise Refused(lines[-1][:300] if lines else "it ended without a message")


class Model:
    """A tiny model that is quantized by a scheme, in memory and in folders."""

    def __init__(self, scheme: str, folder: Path) -> None:
        import numpy as np
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM

        from quark_onnx.torch.config.language import config_for
        from quark_onnx.torch.pipelines.in_memory import quantize_model

        torch.manual_seed(0)
        config = AutoConfig.for_model(
            "llama",
            vocab_size=96,
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=64,
        )
        self.folder, self.config = folder, config_for(scheme)
        self.model = AutoModelForCausalLM.from_config(config).eval()
        tokens = torch.randint(0, 96, (2, 12))
        self.tokens = folder / "tokens.npy"
        np.save(self.tokens, tokens.numpy())
        quantize_model(self.model, self.config, [tokens], progress=False)
        with torch.no_grad():
            self.logits = self.model(tokens).logits.float().numpy()

    def checkpoint(self, layout: str) -> Path:
        """The folder of a checkpoint in a layout."""
        from quark_onnx.errors import QuarkError
        from quark_onnx.torch.checkpoints.export import write_checkpoint

        folder = self.folder / layout
        try:
            write_checkpoint(self.model, folder, self.config, layout=layout)
        except QuarkError as error:
            raise Refused(str(error)) from error
        return folder

    def difference(self, path: Path) -> float:
        """Of logits in a file, relative (L2)."""
        import numpy as np

        found = np.load(path)
        norm = float(np.linalg.norm(self.logits))
        return float(np.linalg.norm(found - self.logits)) / norm


def _by_transformers(extra: str) -> Callable[[Model, str, str], float | None]:
    def cell(model: Model, python: str, form: str) -> float | None:
        out = model.folder / "logits.npy"
        program = _TRANSFORMERS.format(extra=extra)
        _run(python, program, model.checkpoint(form), model.tokens, out)
        return model.difference(out)

    return cell


def _vllm(model: Model, python: str, form: str) -> float | None:
    from quark_onnx.torch.validate import validate

    verdict = validate(model.checkpoint(form), "vllm")
    if verdict.word != "loads":
        raise Refused(verdict.word)
    return None


def _llama_cpp(model: Model, python: str, form: str) -> float | None:
    from quark_onnx.errors import QuarkError
    from quark_onnx.torch.exports.gguf import write_quantized_gguf

    path, out = model.folder / "model.gguf", model.folder / "logits.npy"
    source = model.folder / "float"
    model.model.config.save_pretrained(source)
    try:
        write_quantized_gguf(model.model, source, path)
    except QuarkError as error:
        raise Refused(str(error)) from error
    _run(python, _LLAMA_CPP, path, model.tokens, out)
    return model.difference(out)


def _onnxruntime(model: Model, python: str, form: str) -> float | None:
    from quark_onnx.errors import QuarkError
    from quark_onnx.torch.exports.onnx import export_decoder

    try:
        return export_decoder(model.model, model.folder / "model.onnx").difference
    except QuarkError as error:
        raise Refused(str(error)) from error


def _genai(model: Model, python: str, form: str) -> float | None:
    program = (
        "import sys; from quark_onnx.torch.exports.oga import write_oga;"
        " found = write_oga(*sys.argv[1:3]);"
        " open(sys.argv[3], 'w').write(str(found.difference))"
    )
    folder = model.checkpoint(form)
    _tokenizer(folder)
    out = model.folder / "difference.txt"
    _run(python, program, folder, model.folder / "genai", out)
    return float(out.read_text(encoding="utf-8"))


def _tokenizer(folder: Path) -> None:
    """Write a tokenizer of single characters, which the model builder asks for."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    vocabulary = {chr(33 + place): place for place in range(94)} | {"<s>": 94}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<s>"))
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="<s>"
    ).save_pretrained(folder)


#: The client in the table of schemes, the layout where it is not the first of that table, and what
#: runs the model.
CELLS: dict[str, tuple[str, str, Callable[[Model, str, str], float | None]]] = {
    "vLLM (rules)": ("vllm", "", _vllm),
    "transformers, our loader": (
        "transformers",
        "quark",
        _by_transformers("import quark_onnx.torch.transformers"),
    ),
    "transformers + amd-quark": ("transformers", "quark", _by_transformers("")),
    "transformers + compressed-tensors": (
        "transformers",
        "compressed-tensors",
        _by_transformers(""),
    ),
    "llama.cpp": ("llama.cpp", "", _llama_cpp),
    "onnxruntime": ("onnxruntime", "", _onnxruntime),
    "onnxruntime-genai": ("onnxruntime-genai", "", _genai),
}


def cell(scheme: str, client: str, environments: Path) -> Row:
    """What a client does with a scheme."""
    from quark_onnx.torch.config.scheme_clients import SCHEME_CLIENTS

    name, layout, run = CELLS[client]
    forms = SCHEME_CLIENTS[scheme].get(name, ())
    if name != "transformers" and not forms:
        return {"cell": "refused", "reason": "no layout, or the client has no scheme"}
    with TemporaryDirectory() as folder:
        try:
            python = environment(client, environments)
            difference = run(Model(scheme, Path(folder)), python, layout or forms[0])
        except Refused as error:
            return {"cell": "refused", "reason": str(error)}
        except Exception as error:
            return {"cell": "fails", "reason": f"{type(error).__name__}: {error}"[:300]}
    same = difference is None or difference <= TOLERANCE
    return {"cell": "loads" if same else "differs", "difference": difference}


def written(store: Store, out: Path) -> bool:
    """Write the table, and say whether no cell differs or fails."""
    rows = store.rows()
    clients = list(CELLS)
    lines = [
        [scheme, *(row.get(client, {}).get("cell", "") for client in clients)]
        for scheme, row in rows.items()
    ]
    text = (
        "# Schemes and clients\n\nMade by `python benchmarks/llm_clients.py`, which says"
        " what the words mean. An empty cell was not run.\n\n"
        + table(["scheme", *clients], lines)
    )
    (out / "llm_clients.md").write_text(text + "\n", encoding="utf-8")
    words = {each["cell"] for row in rows.values() for each in row.values()}
    return not words & {"differs", "fails"}


def main(arguments: list[str] | None = None) -> int:
    """Run the cells that are asked for and not known yet."""
    from quark_onnx.torch.config.schemes import SCHEMES

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--schemes", nargs="+", choices=list(SCHEMES), metavar="NAME")
    parser.add_argument("--clients", nargs="+", choices=list(CELLS), metavar="NAME")
    parser.add_argument(
        "--environments", type=Path, default=Path("client-environments")
    )
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--again", action="store_true")
    options = parser.parse_args(arguments)
    store = Store(options.out / "llm_clients.json")
    for scheme in options.schemes or SCHEMES:
        row: dict[str, Any] = dict(store.rows().get(scheme, {}))
        for client in options.clients or CELLS:
            if client in row and not options.again:
                continue
            row[client] = cell(scheme, client, options.environments.resolve())
            print(f"{scheme}, {client}: {row[client]['cell']}", flush=True)
            store.put(scheme, row)
    return 0 if written(store, options.out) else 1


if __name__ == "__main__":
    raise SystemExit(main())
