"""Fused layers: layers that vLLM fuses (QKV, gate-up) need a common scale."""

from __future__ import annotations

import re
from collections.abc import Container, Iterable

#: Last parts of the names of fused layers, which have a common parent and a common input, by the
#: last part of the name of their fused layer in vLLM (``packed_modules_mapping`` of its models).
FUSED_NAMES = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
FUSED = tuple(FUSED_NAMES.values())
# "model.layers.0.mlp.experts.3.up_proj": the prefix up to "experts", a number, the layer.
_EXPERT = re.compile(r"(?P<experts>(.*\.)?experts)\.\d+\.(?P<layer>\w+)")
#: Layers of an expert with the same input as the gate.
# Mixtral's files call the gate w1 and the up projection w3.
_BESIDE_GATES = {"up_proj": "gate_proj", "w1": "gate_proj", "w3": "gate_proj"}


def fused_group_of(name: str, names: Container[str]) -> list[str]:
    """Return the names of a layer and of the layers that runtimes fuse with it.

    Args:
        name: name of the layer.
        names: names of all layers.

    Returns:
        Names in the order of ``FUSED``; the layer alone if nothing is fused with it.

    >>> fused_group_of("0.q_proj", ["0.q_proj", "0.k_proj", "0.o_proj", "1.k_proj"])
    ['0.q_proj', '0.k_proj']
    >>> fused_group_of("0.o_proj", ["0.q_proj", "0.k_proj", "0.o_proj"])
    ['0.o_proj']
    """
    parent, dot, last = name.rpartition(".")
    fused = (f"{parent}{dot}{shard}" for shard in _shards_of(last))
    return [layer for layer in fused if layer in names]


def _shards_of(last: str) -> tuple[str, ...]:
    """Return the last parts of the names of layers that are fused with a layer."""
    for shards in FUSED:
        if last in shards:
            return shards
    return (last,)


def groups_across_experts(names: Iterable[str]) -> list[list[str]]:
    """Return groups of layers with a common input across all experts of a block.

    Gate layers and up layers are in one group. Down layers are in another group.

    Args:
        names: names of layers; layers outside of experts are left out.

    >>> groups_across_experts(["0.experts.0.up_proj", "0.experts.0.down_proj", "0.experts.1.gate_proj", "0.o_proj"])
    [['0.experts.0.up_proj', '0.experts.1.gate_proj'], ['0.experts.0.down_proj']]
    """  # noqa: E501
    groups = dict[tuple[str, str], list[str]]()
    for name in names:
        if match := _EXPERT.fullmatch(name):
            layer = _BESIDE_GATES.get(match["layer"], match["layer"])
            groups.setdefault((match["experts"], layer), []).append(name)
    return list(groups.values())


def experts_of(name: str) -> str:
    """Return the name of the module of all experts around a layer; empty if none.

    >>> experts_of("0.mlp.experts.3.up_proj"), experts_of("0.mlp.up_proj")
    ('0.mlp.experts', '')
    """
    match = _EXPERT.fullmatch(name)
    return match["experts"] if match else ""
