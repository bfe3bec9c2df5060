"""Arguments of tensors are accepted exactly where compressed-tensors' own class accepts them."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest

from quark_onnx.torch.validate.compressed_arguments import argument_findings

Arguments = dict[str, Any]
STARTS: dict[str, Arguments] = {
    "defaults": {},
    "int4 group": {"num_bits": 4, "strategy": "group", "group_size": 32},
    "fp8 tensor": {"type": "float", "strategy": "tensor"},
    "fp8 token": {"type": "float", "strategy": "token", "dynamic": True},
    "int8 channel": {"strategy": "channel"},
    "fp8 block": {
        "type": "float",
        "strategy": "block",
        "block_structure": [128, 128],
    },
    "fp4 tensor_group": {
        "num_bits": 4,
        "type": "float",
        "strategy": "tensor_group",
        "group_size": 16,
        "dynamic": "local",
    },
}
#: Values for each argument, right and wrong.
VALUES: dict[str, list[Any]] = {
    "num_bits": [4, 6, 8, 3, 0, None, "4", "x", 8.0, 8.5, True],
    "type": ["int", "float", "INT", None, "uint", 3],
    "symmetric": [True, False, None, "yes", "x", 0, 2],
    "group_size": [None, -1, 0, 1, 32, -2, "32", 32.0, True],
    "strategy": [
        None,
        "tensor",
        "channel",
        "group",
        "block",
        "token",
        "tensor_group",
        "attn_head",
        "local",
        "TENSOR",
    ],
    "block_structure": [
        None,
        [64, 64],
        "64x64",
        [64],
        [1, 2, 3],
        "ax1",
        [0, 1],
        ["1", "1"],
    ],
    "dynamic": [None, True, False, "local", "Local", "x", 1, 2],
    "actorder": [None, "static", "group", "weight", "Weight", True, False, "x", 1],
    "scale_dtype": [None, "torch.float8_e4m3fn", "float16", "x", 3],
    "zp_dtype": [None, "torch.int8", "x"],
    "observer": [None, "minmax", True],
    "observer_kwargs": [None, {}, {"a": 1}, [], "x"],
    "extra": [1, None],
}


def cases() -> Iterator[Arguments]:
    """Yield arguments with one change, and with several at random."""
    draw = random.Random(0)
    for start in STARTS.values():
        yield start
        for name, values in VALUES.items():
            for value in values:
                yield {**start, name: value}
        for _ in range(300):
            names = draw.sample(list(VALUES), draw.choice([2, 3]))
            yield {**start, **{name: draw.choice(VALUES[name]) for name in names}}


def accepted(arguments: Arguments) -> bool:
    """Return whether compressed-tensors reads the arguments."""
    args = pytest.importorskip("compressed_tensors.quantization.quant_args")
    try:
        args.QuantizationArgs.model_validate(arguments)
    except Exception:  # pydantic's, and others of the class's own code
        return False
    return True


def test_arguments_are_judged_as_by_compressed_tensors() -> None:
    counts = {True: 0, False: 0}
    for arguments in cases():
        expected = accepted(arguments)
        found = [str(each) for each in argument_findings("weights", arguments)]
        assert (not found) == expected, (arguments, found)
        counts[expected] += 1
    assert min(counts.values()) > 300


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"extra": 1}, "weights.extra"),
        ({"strategy": "local"}, "weights.strategy: 'local'"),
        ({"group_size": "32"}, "weights.group_size: '32', with channel"),
        ({"block_structure": [64, 64]}, "weights.block_structure"),
        ({"dynamic": "local"}, "weights.dynamic: 'local', with tensor"),
        ({"num_bits": 3, "type": "float"}, "floats of 3 bits"),
    ],
)
def test_findings_name_the_argument(changes: Arguments, text: str) -> None:
    (finding,) = argument_findings("weights", changes)
    assert text in str(finding)
