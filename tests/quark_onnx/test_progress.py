"""Progress: a bar on stderr if asked for, and only for a person by default."""

from __future__ import annotations

import pytest

from quark_onnx import QConfig, quantize
from quark_onnx.errors import TimeLimitError
from quark_onnx.progress import Progress, check_time, time_limit
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


@pytest.mark.parametrize("optimizers", ["", "adaround", "cle"])
def test_quantizing_ends_at_its_time_limit(optimizers: str) -> None:
    model = residual()
    config = QConfig.of("A8W8").with_(optimizers=tuple(filter(None, [optimizers])))
    with pytest.raises(TimeLimitError), time_limit(0):
        quantize(model, samples(model), config)
    quantize(model, samples(model), config)
