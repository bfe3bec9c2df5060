"""Layers that runtimes make one of: what they have in common must be told to each."""

from __future__ import annotations

from collections.abc import Container

#: The last parts of their names; they have a parent in common, and read the same.
FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


def siblings_of(name: str, names: Container[str]) -> list[str]:
    """The layers that runtimes make one of, this one among them.

    >>> siblings_of("0.q_proj", ["0.q_proj", "0.k_proj", "0.o_proj", "1.k_proj"])
    ['0.q_proj', '0.k_proj']
    >>> siblings_of("0.o_proj", ["0.q_proj", "0.k_proj", "0.o_proj"])
    ['0.o_proj']
    """
    parent, dot, last = name.rpartition(".")
    shards = next((shards for shards in FUSED if last in shards), (last,))
    return [each for shard in shards if (each := f"{parent}{dot}{shard}") in names]
