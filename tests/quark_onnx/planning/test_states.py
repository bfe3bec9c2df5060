"""Recurrent states through the interface: found, kept float where rounding accumulates, measured in
a loop.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from onnx import AttributeProto, GraphProto, ModelProto

from calibrators.onnx_runtime.session import open_session
from quark_onnx import QConfig, quantize
from quark_onnx.common.errors import AccuracyError
from quark_onnx.graph import Graph
from quark_onnx.graph.states import State, states
from quark_onnx.measuring.held_out import HoldOut, consecutive_positions
from tests.models import Array, Factory, Feeds, normal, parse, weight

STEPS = 150
#: Slow waves, so that what a state is updated by is small beside it.
SIGNAL = np.sin(
    np.arange(2 * STEPS)[:, None] * np.linspace(0.05, 0.2, 8) + normal(8, seed=7)
)


def integrator() -> ModelProto:
    """A leaky sum: each update is smaller than a step of eight bits."""
    return parse(
        """g (float[1,8] x, float[1,16] state) => (float[1,4] y, float[1,16] stateN) {
            u = MatMul (x, w) a = Mul (u, little) b = Mul (state, most) stateN = Add (a, b) y = MatMul (stateN, v)
        }""",  # noqa: E501
        w=weight(8, 16),
        v=weight(16, 4),
        little=np.float32(0.01),
        most=np.float32(0.99),
    )


def gru_cell() -> ModelProto:
    return parse(
        """g (float[1,8] x, float[1,16] h) => (float[1,4] y, float[1,16] hn) {
            zx = MatMul (x, wz) zh = MatMul (h, uz) za = Add (zx, zh) zb = Add (za, bz) z = Sigmoid (zb)
            rx = MatMul (x, wr) rh = MatMul (h, ur) ra = Add (rx, rh) r = Sigmoid (ra) q = Mul (r, h)
            nx = MatMul (x, wn) nh = MatMul (q, un) na = Add (nx, nh) n = Tanh (na)
            k = Sub (one, z) kn = Mul (k, n) zs = Mul (z, h) hn = Add (kn, zs) y = MatMul (hn, v)
        }""",  # noqa: E501
        **{f"w{name}": weight(8, 16, seed=place) for place, name in enumerate("zrn")},
        **{f"u{name}": weight(16, 16, seed=place) for place, name in enumerate("zrn")},
        bz=np.full(16, 4, np.float32),
        v=weight(16, 4),
        one=np.float32(1),
    )


def lstm_cell() -> ModelProto:
    """Its two states are told apart by their places, as the outputs have the names that an exporter
    made up.
    """
    return parse(
        """g (float[1,8] x, float[1,16] h0, float[1,16] c0) => (float[1,4] y, float[1,16] t23, float[1,16] t22) {
            gx = MatMul (x, w) gh = MatMul (h0, u) ga = Add (gx, gh) gates = Add (ga, b)
            i0, f0, o0, g0 = Split <axis = 1, num_outputs = 4> (gates)
            i = Sigmoid (i0) f = Sigmoid (f0) o = Sigmoid (o0) g = Tanh (g0)
            fc = Mul (f, c0) ig = Mul (i, g) t22 = Add (fc, ig) tc = Tanh (t22) t23 = Mul (o, tc) y = MatMul (t23, v)
        }""",  # noqa: E501
        opset=18,
        w=weight(8, 64),
        u=weight(16, 64),
        b=np.repeat(np.float32([-2, 4, 0, 0]), 16),
        v=weight(16, 4),
    )


def branching() -> ModelProto:
    """The integrator inside both branches of an If."""
    body = (
        "u = MatMul (x, w) a = Mul (u, little) b = Mul (state, most) s{0} = Add (a, b)"
    )
    return parse(
        f"""g (float[1,8] x, float[1,16] state, bool fast) => (float[1,4] y, float[1,16] stateN) {{
            s = If (fast) <
                then_branch = then_g () => (float[1,16] s1) {{ {body.format(1)} }},
                else_branch = else_g () => (float[1,16] s2) {{ {body.format(2)} }}
            >
            stateN = Identity (s) y = MatMul (stateN, v)
        }}""",
        w=weight(8, 16),
        v=weight(16, 4),
        little=np.float32(0.01),
        most=np.float32(0.99),
    )


def buffer() -> ModelProto:
    """The last four inputs: values move, and nothing is added to them."""
    return parse(
        """g (float[1,8,1] x, float[1,8,4] cache) => (float[1,4,1] y, float[1,8,4] new_cache) {
            all = Concat <axis = 2> (cache, x) y0 = Conv <kernel_shape = [5]> (all, w) y = Relu (y0)
            new_cache = Slice (all, start, end, axes)
        }""",
        w=weight(4, 8, 5),
        start=np.int64([1]),
        end=np.int64([5]),
        axes=np.int64([2]),
    )


def key_values() -> ModelProto:
    """Attention to a cache that grows by a row at each step."""
    return parse(
        """g (float[1,1,8] x, float[1,P,8] past_key_values.0.key) => (float[1,1,8] y, float[1,T,8] present.0.key) {
            k = MatMul (x, w) present.0.key = Concat <axis = 1> (past_key_values.0.key, k)
            t = Transpose <perm = [0,2,1]> (present.0.key) s = MatMul (x, t) p = Softmax <axis = -1> (s)
            y = MatMul (p, present.0.key)
        }""".replace("past_key_values.0.key", "past_key_values_0_key").replace(  # noqa: E501
            "present.0.key", "present_0_key"
        ),
        w=weight(8, 8),
    )


CELLS: dict[str, Factory] = {
    each.__name__: each for each in (integrator, gru_cell, lstm_cell, branching)
}
FOUND = {
    "integrator": [State("state", "stateN")],
    "gru_cell": [State("h", "hn")],
    "lstm_cell": [State("h0", "t23"), State("c0", "t22")],
    "branching": [State("state", "stateN")],
}


def loop(
    model: ModelProto,
    found: list[State],
    start: int,
    count: int,
    shape: tuple[int, ...] = (1, 8),
) -> list[Feeds]:
    """Run a model with its own states; the feeds of each step with the outputs of that step."""
    session = open_session(model)
    names = [value.name for value in session.get_outputs()]
    inputs = {value.name: value for value in session.get_inputs()}
    feeds: dict[str, Any] = {
        state.input: np.zeros(inputs[state.input].shape, np.float32) for state in found
    }
    steps = []
    for place in range(start, start + count):
        feeds["x"] = SIGNAL[place].reshape(shape).astype(np.float32)
        if "fast" in inputs:
            feeds["fast"] = np.array(place % 2 == 0)
        results = dict(zip(names, session.run(names, feeds), strict=True))
        steps.append({**feeds, **results})
        feeds = {**feeds, **{state.input: results[state.output] for state in found}}
    return steps


def data(model: ModelProto, steps: list[Feeds]) -> list[Feeds]:
    names = {value.name for value in model.graph.input}
    return [
        {name: value for name, value in step.items() if name in names} for step in steps
    ]


def read_by(graph: GraphProto, op_type: str) -> Iterator[str]:
    """The first inputs of operators of a type, those in bodies included."""
    for node in graph.node:
        if node.op_type == op_type:
            yield node.input[0]
        for attribute in node.attribute:
            if attribute.type == AttributeProto.GRAPH:
                yield from read_by(attribute.g, op_type)


def sqnr(expected: Array, found: Array) -> float:
    signal, noise = (
        np.square(expected.astype(np.float64)).sum(),
        np.square(expected - found.astype(np.float64)).sum(),
    )
    return float(10 * np.log10(signal / max(noise, 1e-30)))


#: Inputs and outputs with their dimensions, and which of them are states.
INTERFACES = {
    "a word behind": ("x:1,4 state:1,8", "y:1,4 stateN:1,8", "state>stateN"),
    "numbered": ("x:1,4 h0:1,8 c0:1,8", "y:1,4 hn:1,8 cn:1,8", "h0>hn c0>cn"),
    "in and out": (
        "x:1,4 hidden_in:1,8",
        "y:1,4 hidden_out:1,8",
        "hidden_in>hidden_out",
    ),
    "short ones": ("x:1,4 r1i:1,8 r2i:1,8", "y:1,4 r1o:1,8 r2o:1,8", "r1i>r1o r2i>r2o"),
    "cases": ("x:1,4 prevState:1,8", "y:1,4 nextState:1,8", "prevState>nextState"),
    "swapped": ("h:1,8 c:1,8 x:1,4", "c_out:1,8 h_out:1,8 y:1,4", "h>h_out c>c_out"),
    "a fixed cache": (
        "x:1,4 past_k:1,8 past_v:1,8",
        "y:1,4 present_k:1,8 present_v:1,8",
        "past_k>present_k past_v>present_v",
    ),
    "by place": ("x:1,4 h:1,8 c:1,8", "y:1,4 t7:1,8 t9:1,8", "h>t7 c>t9"),
    "a new cache": ("x:1,4 cache:1,8 ", "y:1,4 new_cache:1,8", "cache>new_cache"),
    "unknown sizes": ("x:1,4 state:2,N,8", "y:1,4 stateN:a,N,b", "state>stateN"),
    "a cache that grows": ("x:1,4 past_k:1,P,8", "y:1,4 present_k:1,T,8", ""),
    "a cache that grows by one": ("x:1,4 past_k:1,5,8", "y:1,4 present_k:1,6,8", ""),
    "an image": ("image:1,8", "image_out:1,8", ""),
    "input and output": ("input:1,8 scale:1,8", "output:1,8", ""),
    "numbers alone": ("input_0:1,8 input_1:1,8", "output_0:1,8 output_1:1,8", ""),
    "a sampler": ("sample:1,8 time:1,8", "out_sample:1,8", ""),
    "a block of a transformer": (
        "hidden_states:1,8 mask:1,8",
        "last_hidden_state:1,8",
        "",
    ),
    "a decoder": ("x:1,8 encoder_hidden_states:1,8", "logits:1,8", ""),
    "another size": ("x:1,4 state:1,8", "y:1,4 stateN:1,9", ""),
    "another rank": ("x:1,4 state:1,8", "y:1,4 stateN:1,1,8", ""),
    "only states": ("state:1,8", "stateN:1,8", ""),
}


@pytest.mark.parametrize("name", INTERFACES)
def test_states_are_found_by_name_shape_and_place(name: str) -> None:
    """An output feeds a like-shaped input of the next step: by its name but for the side, or by its
    place.
    """
    sides = [
        [entry.split(":") for entry in side.split()] for side in INTERFACES[name][:2]
    ]
    declared = [
        ", ".join(f"float[{shape}] {tensor}" for tensor, shape in side)
        for side in sides
    ]
    names = [[tensor for tensor, _ in side] for side in sides]
    lines = " ".join(
        f"{output} = Custom.Step ({', '.join(names[0])})" for output in names[1]
    )
    model = parse(
        f'<ir_version: 8, opset_import: ["" : 17, "Custom" : 1]> g ({declared[0]}) =>'
        f" ({declared[1]}) {{ {lines} }}"
    )
    expected = [State(*pair.split(">")) for pair in INTERFACES[name][2].split()]
    assert states(Graph(model)) == expected


def test_an_output_that_does_not_depend_on_the_input_is_no_state() -> None:
    model = parse("g (float[1,8] x, float[1,8] state) => (float[1,8] y, float[1,8] stateN) "
                  "{ y = Relu (state) stateN = Relu (x) }")  # fmt: skip
    assert states(Graph.of(model)) == []


@pytest.mark.parametrize("preset", ["A8W8", "S8S8", "XINT8"])
@pytest.mark.parametrize("name", CELLS)
def test_what_updates_a_state_stays_float(name: str, preset: str) -> None:
    """Fed with its own state for 150 new samples, a quantized model stays as near as its weights
    alone allow.
    """
    model, found = CELLS[name](), FOUND[name]
    assert states(Graph.of(model)) == found
    calibration = data(model, loop(model, found, 0, STEPS))
    config = QConfig.of(preset).with_(search=0)
    quantized = quantize(model, calibration, config).model
    weights = quantize(
        model, calibration, config.with_(activation=None, form="qdq")
    ).model
    runs = [loop(each, found, STEPS, STEPS) for each in (model, quantized, weights)]
    for state in found:
        expected, got, bound = (
            np.stack([step[state.output] for step in run]) for run in runs
        )
        assert sqnr(expected, got) > min(30.0, sqnr(expected, bound) - 6)
    rounded = set(read_by(quantized.graph, "QuantizeLinear"))
    assert not rounded & {
        name
        for state in found
        for name in (state.input, state.output, f"{state.output}_float")
    }
    assert "x" in rounded or name == "branching", "the rest is quantized"


@pytest.mark.parametrize("name", CELLS)
def test_the_loop_is_measured(name: str) -> None:
    """The report has the error of each state behind the held-out samples, as a loop of our own
    finds it.
    """
    model, found = CELLS[name](), FOUND[name]
    calibration = data(model, loop(model, found, 0, STEPS))
    result = quantize(model, calibration, QConfig.of("A8W8"))
    rows = {error.name: error for error in result.report.outputs if error.steps}
    assert set(rows) == {"y", *(state.output for state in found)}
    [steps] = {error.steps for error in rows.values()}
    assert steps >= 20
    own: list[list[Array]] = []
    held = calibration[10 : 10 + steps]
    for each in (model, result.model):
        session, feeds = open_session(each), dict(held[0])
        names = [value.name for value in session.get_outputs()]
        for sample in held:
            feeds = {**sample, **{state.input: feeds[state.input] for state in found}}
            outputs = dict(zip(names, session.run(names, feeds), strict=True))
            feeds |= {state.input: outputs[state.output] for state in found}
        own.append([outputs[state.output] for state in found])
    for state, expected, got in zip(found, *own, strict=True):
        assert rows[state.output].sqnr == pytest.approx(sqnr(expected, got), abs=0.1)
    assert sum("with its own state" in note for note in result.report.notes) == len(
        rows
    )


def test_what_accumulates_is_told_and_fails_the_gate() -> None:
    """Without safe the state is rounded; a single step does not show what becomes of it."""
    model, found = integrator(), FOUND["integrator"]
    calibration = data(model, loop(model, found, 0, STEPS))
    config = QConfig.of("A8W8").with_(safe=False, calibrator="minmax")
    report = quantize(model, calibration, config).report
    single, after = (
        [e for e in report.outputs if e.name == "y" and bool(e.steps) == looped]
        for looped in (0, 1)
    )
    assert (
        single[0].sqnr is not None
        and after[0].sqnr is not None
        and after[0].sqnr < 10 < 12 < single[0].sqnr
    )
    assert any("errors accumulate" in note and "'y'" in note for note in report.notes)
    with pytest.raises(
        AccuracyError,
        match=r"'y' reaches .* after \d+ samples with its own state, the minimum is 12 dB",
    ):
        quantize(model, calibration, config.with_(min_sqnr=12.0))


def test_a_buffer_is_quantized_all_the_same() -> None:
    """Values that only move are rounded once: the codes of the cache are those of what has entered
    it.
    """
    model, found = buffer(), [State("cache", "new_cache")]
    assert states(Graph.of(model)) == found
    calibration = data(model, loop(model, found, 0, STEPS, (1, 8, 1)))
    quantized = quantize(
        model, calibration, QConfig.of("A8W8").with_(calibrator="minmax")
    ).model
    assert "cache" in {
        node.input[0]
        for node in quantized.graph.node
        if node.op_type == "QuantizeLinear"
    }
    expected, got = (
        loop(each, found, 0, STEPS, (1, 8, 1)) for each in (model, quantized)
    )
    assert (
        sqnr(np.stack([s["y"] for s in expected]), np.stack([s["y"] for s in got])) > 30
    )


def test_a_cache_that_grows_is_no_state_and_works() -> None:
    """Against the float model, at lengths that calibration has not seen."""
    model = key_values()
    assert states(Graph.of(model)) == []
    name, samples = "past_key_values_0_key", list[Feeds]()
    for place in range(120):
        past = np.tanh(normal(1, 3 + place % 6, 8, seed=place)) @ weight(8, 8)
        samples.append({"x": np.tanh(normal(1, 1, 8, seed=1000 + place)), name: past})
    result = quantize(model, samples, "A8W8")
    assert not any(error.steps for error in result.report.outputs)
    sessions = [open_session(each) for each in (model, result.model)]
    own, signal, noise = [np.tanh(normal(1, 2, 8)) @ weight(8, 8)] * 2, 0.0, 0.0
    for place in range(12):
        x = np.tanh(normal(1, 1, 8, seed=100 + place))
        found = [
            session.run(None, {"x": x, name: cache})
            for session, cache in zip(sessions, own, strict=True)
        ]
        own = [outputs[1] for outputs in found]
        assert own[0].shape == own[1].shape == (1, 3 + place, 8)
        signal, noise = (
            signal + np.square(found[0][0]).sum(),
            noise + np.square(found[0][0] - found[1][0]).sum(),
        )
    assert signal > 100 * noise


def test_a_state_that_was_not_measured_is_told() -> None:
    """Without data there are no steps to run."""
    notes = quantize(integrator(), None, "DYNAMIC").report.notes
    assert any(
        "'stateN' to 'state'" in note and "no consecutive samples" in note
        for note in notes
    )


@pytest.mark.parametrize(
    ("length", "places"),
    [
        (None, (10, 26)),
        (200, (10, 42)),
        (64, (10, 26)),
        (20, (10, 14)),
        (12, (6, 8)),
        (5, (0, 0)),
    ],
)
def test_consecutive_samples_are_held_out(
    length: int | None, places: tuple[int, int]
) -> None:
    """One sample in five and 16 of 64, in one stretch; none of data too short for two."""
    assert list(consecutive_positions(length)) == list(range(*places))
    held = HoldOut(range(length or 100), consecutive=consecutive_positions(length))
    rest = list(held)
    if places != (0, 0):
        assert held.samples == list(range(*places)) and set(rest).isdisjoint(
            held.samples
        )
