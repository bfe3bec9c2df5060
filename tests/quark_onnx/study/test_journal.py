"""StudyJournal: processes that share it try each candidate once."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import pytest

pytest.importorskip("optuna")

from quark_onnx.study.journal import StudyJournal
from quark_onnx.study.record import Record
from quark_onnx.study.study import Study

AXES = {"size": [str(number) for number in range(6)]}
RECORD = Record(1.0, 0.5, 1000)


class Size(NamedTuple):
    """A candidate."""

    size: str

    @property
    def name(self) -> str:
        return f"size {self.size}"

    @property
    def key(self) -> str:
        return self.size

    @property
    def choices(self) -> dict[str, str]:
        return {"size": self.size}

    @property
    def document(self) -> dict[str, str]:
        return self.choices


CANDIDATES = [Size(size) for size in AXES["size"]]


def opened(path: Path) -> StudyJournal[Size]:
    def combine(choices: Mapping[str, str]) -> Size:
        return Size(choices["size"])

    return StudyJournal(path, {"model": "a"}, AXES, combine)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "study.journal"


def claim_as(
    number: int, path: Path, candidate: Size, monkeypatch: pytest.MonkeyPatch
) -> StudyJournal[Size]:
    """Claim a candidate as another process would."""
    with monkeypatch.context() as patch:
        patch.setattr("quark_onnx.study.journal.os.getpid", lambda: number)
        journal = opened(path)
        assert journal.claim(candidate)
    return journal


def test_a_candidate_of_another_process_is_left_to_it(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until it is finished, or given up."""
    journal = opened(path)
    other = claim_as(os.getppid(), path, CANDIDATES[0], monkeypatch)
    assert journal.running() == ["0"]
    # Both processes may have found it free before.
    assert not journal.claim(CANDIDATES[0])
    assert journal.claim(CANDIDATES[1])
    journal.keep(RECORD)
    other.keep(RECORD)
    assert [each for each, _ in journal.finished()] == CANDIDATES[:2]
    assert journal.running() == [] and not journal.claim(CANDIDATES[0])
    other = claim_as(os.getppid(), path, CANDIDATES[2], monkeypatch)
    other.drop()
    assert journal.claim(CANDIDATES[2])


@pytest.mark.skipif(os.name != "posix", reason="only the age tells on Windows")
def test_a_candidate_of_a_process_that_ended_is_free(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may end while the other search runs."""
    journal = opened(path)
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    claim_as(ended.pid, path, CANDIDATES[0], monkeypatch)
    assert journal.running() == []
    assert journal.claim(CANDIDATES[0])


def test_a_proposal_is_a_claim(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = opened(path)
    proposal = journal.propose()
    assert journal.claim(proposal)
    journal.keep(RECORD)
    assert [trial.params for trial in journal.optuna.trials] == [proposal.choices]
    journal.propose()
    journal.drop()
    journal.drop()
    assert [trial.state.name for trial in journal.optuna.trials] == ["COMPLETE", "FAIL"]


SCRIPT = """
import sys, time
from pathlib import Path
from tests.quark_onnx.study.test_journal import CANDIDATES, RECORD, opened
from quark_onnx.study.study import Study

def measure(candidate):
    with open(sys.argv[2], "a", encoding="utf-8") as file:
        file.write(candidate.size)
    time.sleep(0.05)
    return RECORD

journal = opened(Path(sys.argv[1]))
print("ready", flush=True)
input()
list(Study(measure, journal).run(CANDIDATES))
"""


def test_processes_that_begin_together_try_each_candidate_once(path: Path) -> None:
    tried = path.with_name("tried")
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT, str(path), str(tried)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[3],
        )
        for _ in range(2)
    ]
    for process in processes:
        assert process.stdout is not None and process.stdout.readline()
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    for process in processes:
        process.communicate()
        assert process.returncode == 0
    assert sorted(tried.read_text(encoding="utf-8")) == AXES["size"]
    study = Study(lambda _: pytest.fail("tried again"), opened(path))
    assert list(study.run(CANDIDATES)) == []
    assert len(study.finished()) == len(CANDIDATES)
