"""Progress: a bar on stderr if asked for, and only for a person by default."""

from __future__ import annotations

import sys
from io import StringIO
from pathlib import Path
from types import SimpleNamespace

import pytest

from quark_onnx import QConfig, quantize
from quark_onnx.common.errors import TimeLimitError
from quark_onnx.common.progress import Progress, check_time, time_limit
from quark_onnx.common.progress_bars import plain_progress, progress_callback
from tests.models import conv_relu, residual, samples
from tests.quark_onnx.optimizers.networks import attentive


@pytest.mark.parametrize(
    ("show", "seen"), [(True, True), (False, False), (None, False)]
)
def test_it_is_shown_when_asked_for(
    capsys: pytest.CaptureFixture[str], show: bool | None, seen: bool
) -> None:
    with Progress(show, 3, "counting", "sheep") as bar:
        for done in (1, 2, 3):
            bar.update(done)
    printed = capsys.readouterr()
    assert printed.out == "" and ("counting" in printed.err) == seen


class Terminal(StringIO):
    """A stream that says that it is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("show", [True, None])
def test_bars_within_each_other_share_a_terminal(
    monkeypatch: pytest.MonkeyPatch, show: bool | None
) -> None:
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    for _ in range(2):  # the display of the first round has ended
        with Progress(show, 2, "outer", "herd") as outer:
            with Progress(show, None, "inner", "sheep") as inner:
                inner.update(5)
            outer.update(1)
    printed = terminal.getvalue()
    assert "outer" in printed and "inner" in printed and "ETA" in printed
    shown = "\x1b[?25l", "\x1b[?25h"  # the cursor is hidden, and comes back
    assert printed.count(shown[0]) == printed.count(shown[1]) == 2


def test_an_error_gives_the_terminal_back(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    with pytest.raises(KeyboardInterrupt), Progress(True, 2, "outer", "herd"):
        raise KeyboardInterrupt
    assert terminal.getvalue().rstrip("\r\n").count("\x1b[?25h") == 1


def test_without_a_stderr_there_is_no_bar(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stderr", None)
    with Progress(True, 3, "counting", "sheep") as bar:
        bar.update(1)
    assert capsys.readouterr().out == ""


def test_nobody_prints_on_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    model = conv_relu()
    quantize(model, samples(model), "XINT8")
    printed = capsys.readouterr()
    assert (printed.out, printed.err) == ("", "")
    quantize(model, samples(model), "XINT8", progress=True)
    printed = capsys.readouterr()
    assert (
        printed.out == ""
        and "calibrating" in printed.err
        and "searching scales" in printed.err
    )


@pytest.mark.parametrize(
    "name", ["cle", "smoothquant:insert=true", "gptq", "auto_mixed_precision:target=99"]
)
def test_every_pass_of_an_optimizer_over_the_data_is_shown(
    capsys: pytest.CaptureFixture[str], name: str
) -> None:
    bars = {"gptq": "optimizing layers", "auto_mixed_precision": "measuring nodes"}
    model = attentive() if name.startswith("smooth") else residual()
    quantize(
        model, samples(model), QConfig.of("A8W8").with_(optimizers=name), progress=True
    )
    optimizer = name.split(":")[0]
    assert bars.get(optimizer, optimizer) in capsys.readouterr().err


def test_work_ends_with_the_first_step_behind_its_time_limit() -> None:
    steps = []
    with (
        pytest.raises(TimeLimitError, match="its time is over"),
        time_limit(3600),
        time_limit(0),
        time_limit(3600),  # of limits within each other the shortest counts
        Progress(False, 3, "counting", "sheep") as bar,
    ):
        for done in (1, 2, 3):
            steps.append(done)
            bar.update(done)
    assert steps == [1]
    check_time()  # outside there is none


@pytest.mark.parametrize("call", [1, 2])
@pytest.mark.parametrize("name", ["calibrating", "searching scales", "measuring"])
def test_an_exception_of_the_function_ends_the_run(
    name: str, call: int, tmp_path: Path
) -> None:
    model = conv_relu()
    calls = 0

    def progress(work: str, done: float, total: int | None) -> None:
        nonlocal calls
        calls += work == name
        if calls == call:
            raise RuntimeError("enough")

    with pytest.raises(RuntimeError, match=r"^enough$"):
        quantize(model, samples(model), "XINT8", tmp_path / "q.onnx", progress=progress)
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("optimizers", ["", "adaround", "cle"])
def test_quantizing_ends_at_its_time_limit(optimizers: str) -> None:
    model = residual()
    config = QConfig.of("A8W8").with_(optimizers=tuple(filter(None, [optimizers])))
    with pytest.raises(TimeLimitError), time_limit(0):
        quantize(model, samples(model), config)
    quantize(model, samples(model), config)


@pytest.fixture
def seconds(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A clock that shows the last element."""
    shown = [0.0]
    monkeypatch.setattr("quark_onnx.common.progress_bars.monotonic", lambda: shown[-1])
    return shown


def test_a_log_has_lines_now_and_then(
    capsys: pytest.CaptureFixture[str], seconds: list[float]
) -> None:
    """At most one in ten seconds, with the remaining time by the steps that are complete."""
    with plain_progress(), Progress(None, 6, "quantizing", "block") as bar:
        for now, done in ((4, 0.5), (9, 1), (12, 1.5), (13, 1.8), (27, 3), (54, 6)):
            seconds.append(now)
            bar.update(done)
    assert capsys.readouterr().err.splitlines() == [
        "quark-onnx: quantizing: block 1 of 6, 0:12 elapsed, about 0:42 remaining",
        "quark-onnx: quantizing: block 3 of 6, 0:27 elapsed, about 0:27 remaining",
        "quark-onnx: quantizing: block 6 of 6, 0:54 elapsed, about 0:00 remaining",
    ]
    with Progress(None, 6, "quantizing", "block") as bar:  # not in the command line
        seconds.append(100)
        bar.update(3)
    assert capsys.readouterr().err == ""


def test_steps_of_an_earlier_run_have_no_part_in_the_speed(
    capsys: pytest.CaptureFixture[str], seconds: list[float]
) -> None:
    """A loop within the loop, which shows lines of its own, has no part in it either."""
    with plain_progress(), Progress(None, 6, "quantizing", "block") as bar:
        seconds.append(11)
        bar.update(2, skipped=True)
        for now, done in ((25, 2.5), (31, 3), (41, 3.2)):
            seconds.append(now)
            bar.update(done)
            if done == 3:
                with Progress(None, None, "inner", "step") as inner:
                    seconds.append(41)
                    inner.update(5)
    assert capsys.readouterr().err.splitlines() == [
        "quark-onnx: quantizing: block 2 of 6, 0:11 elapsed",
        "quark-onnx: quantizing: block 2 of 6, 0:25 elapsed",
        "quark-onnx: inner: step 5, 0:10 elapsed",
        "quark-onnx: quantizing: block 3 of 6, 0:41 elapsed, about 0:50 remaining",
    ]


def test_a_terminal_shows_the_remaining_time_by_complete_steps(
    monkeypatch: pytest.MonkeyPatch, seconds: list[float]
) -> None:
    """Half of a step says nothing; then a third of six blocks have taken a minute."""
    shown = list[str]()
    for done in (0.5, 2):
        terminal = Terminal()
        monkeypatch.setattr("sys.stderr", terminal)
        monkeypatch.setenv("TERM", "xterm")
        seconds.append(0)
        with Progress(True, 6, "quantizing", "block") as bar:
            seconds.append(60)
            bar.update(done)
            with Progress(True, None, "inner", "step"):  # a new bar draws all of them
                pass
        shown.append(terminal.getvalue())
    assert "-:--" in shown[0] and "2:00" not in shown[0]
    assert "2:00" in shown[1]


def test_a_closed_log_ends_no_work(
    monkeypatch: pytest.MonkeyPatch, seconds: list[float]
) -> None:
    log = StringIO()
    log.close()
    monkeypatch.setattr("sys.stderr", log)
    monkeypatch.setattr(log, "isatty", lambda: False, raising=False)
    with Progress(True, 3, "counting", "sheep") as bar:
        seconds.append(20)
        bar.update(1)


def test_a_function_receives_the_progress() -> None:
    calls = list[tuple[str, float, int | None]]()
    with (
        progress_callback(lambda *call: calls.append(call)),
        Progress(None, 3, "reading", "sample") as bar,
    ):
        bar.update(1)
        bar.update(2.5)
    assert calls == [("reading", 0, 3), ("reading", 1, 3), ("reading", 2.5, 3)]


def test_a_notebook_has_bars_of_tqdm(monkeypatch: pytest.MonkeyPatch) -> None:
    """IPython's kernel is recognized by the class of its shell; scripts and terminals are not."""
    tqdm = pytest.importorskip("tqdm.auto")
    counts = list[float]()

    class Bar:
        n = 0.0

        def __init__(self, **options: object) -> None:
            assert options == {
                "total": 3,
                "desc": "reading",
                "unit": "sample",
                "leave": False,
            }

        def update(self, steps: float) -> None:
            self.n += steps
            counts.append(self.n)

        def close(self) -> None:
            counts.append(-1)

    monkeypatch.setattr(tqdm, "tqdm", Bar)
    shell = type("ZMQInteractiveShell", (), {})()
    module = SimpleNamespace(get_ipython=lambda: shell)
    monkeypatch.setitem(sys.modules, "IPython", module)
    with Progress(None, 3, "reading", "sample") as bar:
        bar.update(1)
        bar.update(2.5)
    assert counts == [1, 2.5, -1]
    with Progress(False, 3, "reading", "sample") as bar:
        bar.update(1)
    assert counts == [1, 2.5, -1]
