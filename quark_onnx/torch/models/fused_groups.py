"""Layers that runtimes make one of: what they have in common must be told to each."""

from __future__ import annotations

import re
from collections.abc import Container, Iterable

#: The last parts of their names; they have a parent in common, and read the same.
FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
_EXPERT = re.compile(r"(?P<experts>(.*\.)?experts)\.\d+\.(?P<layer>\w+)")
#: Layers of an expert that read what the gate reads.
_BESIDE_GATES = {"up_proj": "gate_proj", "w1": "gate_proj", "w3": "gate_proj"}


def fused_group_of(name: str, names: Container[str]) -> list[str]:
    """The layers that runtimes make one of, this one among them.

    >>> fused_group_of("0.q_proj", ["0.q_proj", "0.k_proj", "0.o_proj", "1.k_proj"])
    ['0.q_proj', '0.k_proj']
    >>> fused_group_of("0.o_proj", ["0.q_proj", "0.k_proj", "0.o_proj"])
    ['0.o_proj']
    """
    parent, dot, last = name.rpartition(".")
    shards = next((shards for shards in FUSED if last in shards), (last,))
    return [each for shard in shards if (each := f"{parent}{dot}{shard}") in names]


def groups_across_experts(names: Iterable[str]) -> list[list[str]]:
    """The layers of all experts of one block that read alike: gates with what stands beside them,
    and the others.

    >>> groups_across_experts(["0.experts.0.up_proj", "0.experts.0.down_proj", "0.experts.1.gate_proj", "0.o_proj"])
    [['0.experts.0.up_proj', '0.experts.1.gate_proj'], ['0.experts.0.down_proj']]
    """  # noqa: E501
    groups = dict[tuple[str, str], list[str]]()
    for name in names:
        if found := _EXPERT.fullmatch(name):
            layer = found["layer"]
            groups.setdefault(
                (found["experts"], _BESIDE_GATES.get(layer, layer)),
                [],
            ).append(name)
    return list(groups.values())


def experts_of(name: str) -> str:
    """The module of all experts that a layer is one of; empty for others.

    >>> experts_of("0.mlp.experts.3.up_proj"), experts_of("0.mlp.up_proj")
    ('0.mlp.experts', '')
    """
    found = _EXPERT.fullmatch(name)
    return found["experts"] if found else ""
