"""Tasks of lm-evaluation-harness from a local folder, float and quantized, against logits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from quark_onnx.cli import main
from quark_onnx.common.errors import ConfigError, DataError, MissingDependency
from quark_onnx.torch.calibration import eval_tasks
from quark_onnx.torch.calibration.eval_tasks import Tasks
from quark_onnx.torch.checkpoints.load import load_checkpoint
from tests.quark_onnx.torch.names.test_documented_scripts import command

ROWS = [
    {
        "question": "the capital of france is",
        "choices": ["united", "a president"],
        "answer": 0,
    },
    {
        "question": "hello how are you",
        "choices": ["ai", "my name is", "future"],
        "answer": 1,
    },
    {
        "question": "the president of the united states is",
        "choices": ["france", "future"],
        "answer": 1,
    },
    {"question": "my name is", "choices": ["capital of the future", "ai"], "answer": 0},
    {
        "question": "the future of ai is",
        "choices": ["hello", "a", "the", "you"],
        "answer": 3,
    },
]
DEFINITION = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: words/{name}.jsonl}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: choices
doc_to_target: answer
metric_list: [{{metric: acc, aggregation: mean, higher_is_better: true}}]
"""


@pytest.fixture
def words(hub: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of two tasks beside the model, in the current folder."""
    pytest.importorskip(
        "lm_eval.models.huggingface",
        reason="lm-eval is not installed: pip install 'quark-onnx[eval]'",
    )
    monkeypatch.setenv("HF_DATASETS_CACHE", str(Path("cache").absolute()))
    folder = Path("words")
    folder.mkdir()
    for name, rows in (("capitals", ROWS), ("backwards", ROWS[::-1][:3])):
        (folder / f"{name}.yaml").write_text(
            DEFINITION.format(name=name), encoding="utf-8"
        )
        (folder / f"{name}.jsonl").write_text(
            "\n".join(map(json.dumps, rows)), encoding="utf-8"
        )
    return folder


def accuracy(folder: str | Path, rows: list[dict[str, Any]]) -> float:
    """How often the right choice has the greatest likelihood."""
    from transformers import AutoTokenizer

    model, tokenizer, right = (
        load_checkpoint(folder),
        AutoTokenizer.from_pretrained(str(folder)),
        0,
    )
    for row in rows:
        likelihood = []
        for choice in row["choices"]:
            start = len(tokenizer(row["question"])["input_ids"])
            ids = torch.tensor(tokenizer(f"{row['question']} {choice}")["input_ids"])
            with torch.no_grad():
                found = model(input_ids=ids[None]).logits[0].float().log_softmax(-1)
            likelihood.append(
                float(found[torch.arange(start - 1, len(ids) - 1), ids[start:]].sum())
            )
        right += likelihood.index(max(likelihood)) == row["answer"]
    return right / len(rows)


def test_a_folder_of_tasks(
    hub: str, words: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = [
        "llm",
        "ptq",
        hub,
        "-o",
        "out",
        "--scheme",
        "int3_wo_32",
        "--tasks",
        str(words),
        "--quiet",
        "--json",
    ]
    assert main(line) == 0
    found = json.loads(capsys.readouterr().out)["tasks"]
    assert found == {
        name: {"acc": {"before": accuracy(hub, rows), "after": accuracy("out", rows)}}
        for name, rows in (("capitals", ROWS), ("backwards", ROWS[::-1][:3]))
    }
    found = Tasks([str(words)], limit=2).scores(hub)
    assert found["capitals"]["acc"] == accuracy(hub, ROWS[:2])


def test_the_script(
    hub: str,
    words: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    line = [
        "--model_dir",
        hub,
        "--output_dir",
        "out",
        "--quant_scheme",
        "uint4_wo_32",
        "--tasks",
        str(words),
    ]
    command(monkeypatch, *line, "--num_eval_data", "3")
    expected = (
        f"capitals: acc {accuracy(hub, ROWS[:3]):.4f} before,"
        f" {accuracy('out', ROWS[:3]):.4f} after"
    )
    assert expected in capsys.readouterr().out.splitlines()


def test_what_is_wrong_with_tasks(hub: str, words: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"'arc_eazy' is no task of lm-eval; did you mean 'arc_easy'"
    ):
        Tasks(["arc_eazy"])
    (words / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"empty' has no definition of a task"):
        Tasks([str(words / "empty")])
    (words / "capitals.jsonl").unlink()
    with pytest.raises(DataError, match=r"cannot be run on .*Llama-tiny: "):
        Tasks([str(words)]).scores(hub)


def test_without_the_library(
    hub: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def missing(name: str) -> Any:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    monkeypatch.setattr(eval_tasks.importlib, "import_module", missing)
    with pytest.raises(
        MissingDependency,
        match=r"lm_eval.evaluator is not installed; .*\[eval\]'",
    ):
        Tasks(["arc_easy"])
    assert not Path("out").exists()
