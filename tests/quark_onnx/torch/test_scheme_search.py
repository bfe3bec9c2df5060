"""Recipes, and the search for schemes within a budget."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

optuna = pytest.importorskip("optuna")

from quark_onnx.cli.dispatch import main
from quark_onnx.common.errors import ConfigError, MissingDependency, QuarkError
from quark_onnx.study.record import Record
from quark_onnx.torch.checkpoints.float_checkpoint import FloatCheckpoint
from quark_onnx.torch.config.algorithm_names import check_algorithm
from quark_onnx.torch.config.language_recipes import EFFORTS, RECIPES, recipe_for
from quark_onnx.torch.config.scheme_clients import SCHEME_CLIENTS
from quark_onnx.torch.pipelines import scheme_search
from quark_onnx.torch.pipelines.ptq import Text, ptq
from quark_onnx.torch.pipelines.scheme_search import (
    SchemeCombination,
    SchemeSearchResult,
    TriedScheme,
    search_schemes,
)
from tests.answers import check_described
from tests.browser import check_alone, laid_out
from tests.torch_models import llama, made, saved, tokens

#: The client of each target of the recipes.
CLIENTS = {
    "vllm-mi300": "vllm",
    "vllm-cuda": "vllm",
    "llama.cpp": "llama.cpp",
    "ryzen-ai": "onnxruntime-genai",
    "cpu": "onnxruntime",
}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    np.save(tmp_path / "tokens.npy", torch.cat(tokens(10)).numpy())
    return saved(made(llama()), tmp_path / "float")


def test_recipes_are_for_clients_that_load_them() -> None:
    assert list(RECIPES) == list(CLIENTS)
    for target, efforts in RECIPES.items():
        assert tuple(efforts) == EFFORTS
        assert not efforts["fast"].algorithms and efforts["fast"].kv_cache is None
        for recipe in efforts.values():
            forms = SCHEME_CLIENTS[recipe.scheme][CLIENTS[target]]
            kinds = [each for each in recipe.exports if each != "hf_format"]
            assert (kinds[0] if kinds else recipe.layout) in forms
            assert recipe.reason
            for text in recipe.algorithms:
                check_algorithm(text)
    with pytest.raises(ConfigError, match="did you mean 'vllm-cuda'"):
        recipe_for("vllm-cudda", "fast")


def test_a_recipe_says_what_it_picked(
    source: Path, tmp_path: Path, capsys: Any
) -> None:
    command = ["llm", "ptq", str(source), "-o", str(tmp_path / "out")]
    assert main([*command, "--recipe", "fast", "--target", "vllm-mi300"]) == 0
    printed = capsys.readouterr().out
    assert "\nrecipe    fast for vllm-mi300: --scheme ptpc_fp8 (MI300" in printed
    config = json.loads((tmp_path / "out" / "config.json").read_text(encoding="utf-8"))
    weight = config["quantization_config"]["global_quant_config"]["weight"]
    assert weight["dtype"] == "fp8_e4m3" and weight["qscheme"] == "per_channel"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "name a scheme with --scheme"),
        (["--recipe", "fast"], "--recipe and --target belong together"),
        (
            ["--target", "cpu", "--recipe", "fast", "--scheme", "fp8"],
            "--scheme is part",
        ),
        (
            ["--target", "ryzen-ai", "--recipe", "balanced"],
            "--recipe balanced for ryzen-ai learns from data",
        ),
        (
            ["--target", "vllm-mi300", "--recipe", "balanced"],
            "--recipe balanced for vllm-mi300 learns from data",
        ),
    ],
)
def test_wrong_recipes(
    options: list[str], message: str, source: Path, tmp_path: Path, capsys: Any
) -> None:
    command = ["llm", "ptq", str(source), "-o", str(tmp_path / "out"), *options]
    assert main(command) == 2
    assert message in capsys.readouterr().err


def test_a_search_goes_on_and_finds_the_best(source: Path, tmp_path: Path) -> None:
    candidates = [
        SchemeCombination("uint2_wo_32"),
        SchemeCombination("int8_per_channel"),
        SchemeCombination("uint4_wo_32"),
        SchemeCombination("uint4_wo_32", ("gptq",)),
    ]
    text = Text(str(tmp_path / "tokens.npy"), 6, 12)
    told: list[TriedScheme] = []

    def search(**settings: Any) -> Any:
        return search_schemes(
            FloatCheckpoint(source),
            candidates,
            text,
            tmp_path / "search.journal",
            tell=told.append,
            **settings,
        )

    found = search(bits=32, seconds=1e-9)
    assert found.trials == () and found.untried == tuple(candidates)
    found = search(bits=32)
    assert found.untried == () and len(told) == 4
    assert [trial.candidate for trial in found.trials] == candidates
    assert [trial.record.error for trial in found.trials] == [""] * 4
    by_name = {trial.candidate.name: trial for trial in found.trials}
    assert by_name["uint2_wo_32"].bits < by_name["uint4_wo_32"].bits
    within = [trial for trial in found.trials if trial.bits <= 12]
    assert search(bits=12).best == min(within, key=lambda t: t.divergence).candidate
    sizes = [trial.bits for trial in found.front]
    losses = [trial.divergence for trial in found.front]
    assert sizes == sorted(sizes) and losses == sorted(losses, reverse=True)
    # trials of a search with more bits are known, and none is run again
    least = by_name["uint2_wo_32"].bits
    again = search(bits=least + 0.1)
    assert again.trials == found.trials and len(told) == 4
    assert again.best == SchemeCombination("uint2_wo_32")
    # those of a search for another client are known, too
    more = [*candidates[:2], SchemeCombination("int4_wo_32", layout="oga")]
    found = search_schemes(
        FloatCheckpoint(source),
        more,
        text,
        tmp_path / "search.journal",
        bits=32,
        seconds=1e-9,
    )
    records = [by_name[each.name].record for each in candidates[:2]]
    assert [trial.record for trial in found.trials] == records
    assert found.untried == (more[2],)


def test_another_text_is_another_study(
    source: Path, tmp_path: Path, caplog: Any
) -> None:
    """Of the same file: as for ``search``, a journal holds any number of them."""
    text = Text(str(tmp_path / "tokens.npy"), 6, 12)
    for other, lengths in ((text, 1), (replace(text, count=5), 1), (text, 0)):
        told: list[TriedScheme] = []
        with caplog.at_level("INFO", "quark_onnx"):
            found = search_schemes(
                FloatCheckpoint(source),
                [SchemeCombination("uint4_wo_32")],
                other,
                tmp_path / "search.journal",
                bits=32,
                tell=told.append,
            )
        assert len(told) == lengths and len(found.trials) == 1
    assert "a new study, as those in it have another" in caplog.text


class Interrupted(BaseException):
    pass


def test_an_interrupted_trial_is_the_only_one_lost(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    candidates = [SchemeCombination("uint4_wo_32"), SchemeCombination("uint2_wo_32")]
    journal, told = tmp_path / "search.journal", list[str]()

    def search() -> Any:
        text = Text(str(tmp_path / "tokens.npy"), 6, 12)
        return search_schemes(
            FloatCheckpoint(source),
            candidates,
            text,
            journal,
            bits=32,
            tell=lambda trial: told.append(trial.candidate.name),
        )

    def interrupted(*arguments: Any, **settings: Any) -> Any:
        if told:
            raise Interrupted
        return ptq(*arguments, **settings)

    with monkeypatch.context() as patch:
        patch.setattr(scheme_search, "ptq", interrupted)
        with pytest.raises(Interrupted):
            search()
    assert [trial.candidate for trial in search().trials] == candidates
    assert told == ["uint4_wo_32", "uint2_wo_32"]


def test_a_process_that_is_killed_before_a_trial_leaves_no_other_one_behind(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Optuna's queue has the first candidate by then; it is not taken for the second one."""
    candidates = [SchemeCombination("uint4_wo_32"), SchemeCombination("uint2_wo_32")]

    def search(journal: str, bits: float) -> Any:
        text = Text(str(tmp_path / "tokens.npy"), 6, 12)
        path = tmp_path / journal
        return search_schemes(
            FloatCheckpoint(source), candidates, text, path, bits=bits
        )

    first, second = search("other.journal", 32).trials
    with monkeypatch.context() as patch:

        def killed(*_: object) -> None:
            raise Interrupted

        patch.setattr("optuna.Study.ask", killed)
        with pytest.raises(Interrupted):
            search("search.journal", 32)
    # The first candidate has more bits.
    (trial,) = search("search.journal", (first.bits + second.bits) / 2).trials
    assert (trial.candidate, trial.bits) == (second.candidate, second.bits)


def test_the_journal_is_one_of_optuna(source: Path, tmp_path: Path) -> None:
    """The score is the negated divergence: higher is better, as in every study."""
    journal = tmp_path / "search.journal"
    found = search_schemes(
        FloatCheckpoint(source),
        [SchemeCombination("uint4_wo_32", ("gptq", "clip:steps=2"))],
        Text(str(tmp_path / "tokens.npy"), 6, 12),
        journal,
        bits=32,
    )
    storage = optuna.storages.JournalStorage(
        optuna.storages.journal.JournalFileBackend(str(journal))
    )
    (name,) = optuna.get_all_study_names(storage)
    study = optuna.load_study(study_name=name, storage=storage)
    assert study.best_params == found.trials[0].candidate.choices
    assert study.best_value == -found.trials[0].divergence
    assert study.best_trial.user_attrs["name"] == "uint4_wo_32 gptq clip:steps=2"


def test_without_optuna_it_says_what_to_install(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(
        MissingDependency,
        match=r"a search needs Optuna: pip install '.*\[search\]'",
    ):
        search_schemes(
            FloatCheckpoint(source),
            [SchemeCombination("uint4_wo_32")],
            Text(str(tmp_path / "tokens.npy"), 6, 12),
            tmp_path / "search.journal",
            bits=32,
        )


def test_what_does_not_fit_takes_no_time_of_others(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model has fewer inputs than groups of 128, as its shapes tell."""
    seconds = [0.0]

    def slow(*arguments: Any, **settings: Any) -> Any:
        seconds[0] += 10.0
        return ptq(*arguments, **settings)

    clock = SimpleNamespace(monotonic=lambda: seconds[0])
    monkeypatch.setattr(scheme_search, "time", clock)
    monkeypatch.setattr(scheme_search, "ptq", slow)
    found = search_schemes(
        FloatCheckpoint(source),
        [SchemeCombination("uint4_wo_128"), SchemeCombination("uint4_wo_32")],
        Text(str(tmp_path / "tokens.npy"), 6, 12),
        tmp_path / "search.journal",
        bits=32,
        seconds=1.0,
    )
    assert [(trial.candidate.name, trial.record.error) for trial in found.trials] == [
        ("uint4_wo_32", "")
    ]
    assert found.best is not None
    assert [each.scheme for each in found.untried] == ["uint4_wo_128"]


def test_what_cannot_fit_is_not_tried(source: Path, tmp_path: Path) -> None:
    """Bits are those of the whole file, with float layers, and known before the first trial."""
    candidates = [SchemeCombination(f"uint{bits}_wo_32") for bits in (4, 3, 2)]
    candidates += [SchemeCombination("uint4_wo_32", ("gptq",))]
    journal, told = tmp_path / "search.journal", list[TriedScheme]()

    def search(bits: float) -> Any:
        text = Text(str(tmp_path / "tokens.npy"), 6, 12)
        opened = FloatCheckpoint(source)
        return search_schemes(
            opened, candidates, text, journal, bits=bits, tell=told.append
        )

    with pytest.raises(ConfigError, match="smallest is uint2_wo_32 with ") as caught:
        search(5)
    assert not journal.exists()
    least = re.search(r"--bits ([\d.]+) or more", str(caught.value))
    assert least is not None
    found = search(float(least[1]))
    assert [trial.candidate.name for trial in told] == ["uint2_wo_32"]
    assert found.untried == () and found.best == SchemeCombination("uint2_wo_32")
    assert float(least[1]) - 0.01 < found.trials[0].bits <= float(least[1])


@pytest.mark.parametrize(
    ("divergence", "error", "leaves_out", "band", "sentence", "actions"),
    [
        (0.3, "", True, "poor", "the best is fp8: 4.00 bits", ["raise --bits"]),
        (0.3, "", False, "poor", "the best is fp8: 4.00 bits", []),
        (0.01, "", True, "good", "the best is fp8: 4.00 bits", []),
        (None, "too wide", True, "unknown", "all trials failed; the first: too", []),
        (None, "", True, "unknown", "no candidate was tried", ["run the same"]),
    ],
)
def test_verdict(
    divergence: float | None,
    error: str,
    leaves_out: bool,
    band: str,
    sentence: str,
    actions: list[str],
) -> None:
    """The sentence says what happened, and each action can change it."""
    candidate = SchemeCombination("fp8")
    score = None if divergence is None else -divergence
    record = Record(score, 1.0, 500, error)
    was_tried = divergence is not None or bool(error)
    verdict = SchemeSearchResult(
        (TriedScheme(candidate, record, 4.0),) if was_tried else (),
        candidate if divergence is not None else None,
        () if was_tried else (candidate,),
        5.0,
        leaves_out,
    ).judgement()
    assert verdict.band == band and verdict.sentence.startswith(sentence)
    found = [action.text for action in verdict.actions]
    assert len(found) == len(actions)
    assert all(map(str.startswith, found, actions))


@pytest.mark.parametrize(
    ("change", "device", "message"),
    [
        ({"source": "missing.npy"}, "cpu", "missing.npy"),
        ({"length": 10**6}, "cpu", "not enough for one window"),
        ({}, "nowhere", "device is 'nowhere'"),
    ],
)
def test_wrong_input_is_no_trial(
    change: dict[str, Any], device: str, message: str, source: Path, tmp_path: Path
) -> None:
    """The journal would keep the candidates as failed after the input is corrected."""
    text = replace(Text(str(tmp_path / "tokens.npy"), 6, 12), **change)
    journal = tmp_path / "search.journal"
    with pytest.raises(QuarkError, match=message):
        search_schemes(
            FloatCheckpoint(source),
            [SchemeCombination("fp8")],
            text,
            journal,
            bits=12,
            device=device,
        )
    assert not journal.exists()


def test_command(source: Path, tmp_path: Path, capsys: Any) -> None:
    command = ["llm", "search", str(source), "-o", str(tmp_path / "out")]
    command += ["--for", "onnxruntime-genai", "--data", str(tmp_path / "tokens.npy")]
    command += ["--samples", "6", "--length", "12", "--journal", str(tmp_path / "kept")]
    assert main([*command, "--bits", "5", "--quiet"]) == 2  # the head stays float
    assert "the smallest is" in capsys.readouterr().err
    assert main([*command, "--bits", "14", "--budget", "1/1000000"]) == 1
    assert "no candidate was tried" in capsys.readouterr().err
    assert main([*command, "--bits", "14", "--budget", "1s", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    check_described(document)
    assert document["best"] in document["pareto"]
    verdict = document["verdict"]
    (best,) = (t for t in document["trials"] if t["candidate"] == document["best"])
    lost = best["divergence"]
    band = "good" if lost <= 0.05 else "risky" if lost <= 0.20 else "poor"
    assert verdict["band"] == band and best["candidate"] in verdict["sentence"]
    proposed = [action["text"] for action in verdict["actions"]]
    # The output of the first run is there.
    again = "run the same command again with --overwrite"
    assert any(again in text for text in proposed) == bool(document["untried"])
    assert main([*command, "--bits", "14", "--budget", "1s", "--overwrite"]) == 0
    capsys.readouterr()
    page = tmp_path / "kept" / "search.html"
    check_alone(page.read_text(encoding="utf-8"))
    for width in (1280, 390):
        assert len(laid_out(page, width)["plots"]) == 1
    config = json.loads((tmp_path / "out" / "config.json").read_text(encoding="utf-8"))
    assert config["quantization_config"]["quant_method"] == "quark"


@pytest.mark.parametrize(
    "text", ["[" * 100_000 + "\n", "[]\n", "{}\n", '{"op_code": 9}\n']
)
def test_a_file_that_is_no_journal_is_left_alone(
    text: str, source: Path, tmp_path: Path
) -> None:
    journal = tmp_path / "search.journal"
    journal.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=r"search\.journal exists and is no journal"):
        search_schemes(
            FloatCheckpoint(source),
            [SchemeCombination("fp8")],
            Text(str(tmp_path / "tokens.npy"), 6, 12),
            journal,
            bits=32,
        )
    assert journal.read_text(encoding="utf-8") == text


def test_a_journal_of_an_earlier_version(
    source: Path, tmp_path: Path, capsys: Any
) -> None:
    """A JSON object with the trials: the error says what to do, and the file stays."""
    journal = tmp_path / "kept" / "search.json"
    journal.parent.mkdir()
    journal.write_text('{"trials": []}', encoding="utf-8")
    command = ["llm", "search", str(source), "-o", str(tmp_path / "out")]
    command += ["--for", "vllm", "--data", str(tmp_path / "tokens.npy"), "--bits", "9"]
    assert main([*command, "--journal", str(journal.parent)]) == 2
    message = capsys.readouterr().err
    assert "name another folder with --journal, or remove the file" in message
    assert list(journal.parent.iterdir()) == [journal]
