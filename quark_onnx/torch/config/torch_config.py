"""TorchConfig: how a PyTorch model is quantized, and which layer is quantized how."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any

from quark_onnx.config.spec import check_names
from quark_onnx.errors import ConfigError, nearest
from quark_onnx.torch.config.algorithm_order import in_order
from quark_onnx.torch.config.spec import LayerSpec, TensorSpec

#: Types of layers that the default applies to; embeddings are quantized where they are named.
DEFAULT_TYPES = ("Linear", "Conv1D", "Conv2d", "ConvTranspose2d")
#: All types of layers that can be quantized.
TYPES = (*DEFAULT_TYPES, "Embedding", "EmbeddingBag")
#: Operators between layers that can be quantized in exported graphs (``pipelines.graph``), by their
#: names in ATen.
OPERATORS = (
    *("add", "sub", "mul", "cat", "avg_pool2d", "adaptive_avg_pool2d", "max_pool2d"),
    *("relu", "relu6", "hardtanh"),
)


class DefaultExclude(str):
    """A glob that a model may lack: what its family usually has, and not what a user wrote."""

    __slots__ = ()


@dataclass(frozen=True)
class KVCache:
    """How the keys and values that attention keeps are quantized.

    Attributes:
        spec: how; one scale for each tensor, from data.
        layers: names of the projections whose outputs they are.
        least: the least scale.
        where: "projection" rounds what these layers compute; "rope" rounds keys after attention has
            rotated them, as clients do that keep them rounded.
    """

    spec: TensorSpec
    layers: tuple[str, ...] = ("*k_proj", "*v_proj")
    least: float = 0.0
    where: str = "projection"

    def __post_init__(self) -> None:
        if not self.spec.measured:
            raise ConfigError(
                f"kv_cache is {self.spec}; keys and values have a scale that data"
                " tells",
            )
        if not self.least >= 0:
            raise ConfigError(
                f"the least scale of the KV cache is {self.least!r}; it must be 0 or"
                " more",
            )
        if self.where not in ("projection", "rope"):
            raise ConfigError(
                f"where is {self.where!r}{nearest(self.where, ('projection', 'rope'))}",
            )


@dataclass(frozen=True)
class Attention:
    """How what attention computes is quantized, beside keys and values.

    Attributes:
        probabilities: how what softmax computes is; one scale for each attention, from data.
        queries: how what ``layers`` compute is; None leaves it as it is.
        layers: names of the projections that compute queries, one for each attention.

    >>> Attention(TensorSpec("fp8e4m3"), TensorSpec("fp8e4m3")).layers
    ('*q_proj',)
    """

    probabilities: TensorSpec
    queries: TensorSpec | None = None
    layers: tuple[str, ...] = ("*q_proj",)

    def __post_init__(self) -> None:
        for name in ("probabilities", "queries"):
            spec = getattr(self, name)
            if spec is not None and not spec.measured:
                raise ConfigError(
                    f"attention: {name} are {spec}; they have a scale that data tells",
                )


@dataclass(frozen=True)
class TorchConfig:
    """What a user wants of a PyTorch model; frozen, and composed with ``with_``.

    Attributes:
        default: for every Linear, Conv1D (transformers' own), Conv2d and ConvTranspose2d.
        layers: for layers by name: globs and what they get; the first that matches wins over all
            that follows.
        types: for layers by the name of their class; in exported graphs for operators by their
            names in ATen, too.
        exclude: globs of names that stay float.
        kv_cache: how keys and values are quantized; None leaves them as they are.
        attention: how queries and probabilities are quantized; None leaves them as they are.
        algorithms: what makes weights easier to round, or chooses better codes than the nearest, in
            this order; by name (``"gptq"``, ``"gptq:coordinate_descent_passes=2"``) or as values.

    A name or a glob that matches no layer of the model is an error, but for what is excluded by a
    ``DefaultExclude``.

    >>> config = TorchConfig(LayerSpec(TensorSpec("int8")), exclude=("lm_head",))
    >>> config.spec_of("lm_head", "Linear"), config.spec_of("model.layers.0.mlp.up_proj", "Linear").weight.dtype.name
    (None, 'int8')
    """  # noqa: E501

    default: LayerSpec = field(default_factory=LayerSpec)
    layers: tuple[tuple[str, LayerSpec], ...] = ()
    types: tuple[tuple[str, LayerSpec], ...] = ()
    exclude: tuple[str, ...] = ()
    kv_cache: KVCache | None = None
    attention: Attention | None = None
    algorithms: tuple[Any, ...] = ()

    def __post_init__(self) -> None:
        given_names: Any = self.exclude
        object.__setattr__(
            self,
            "exclude",
            (given_names,) if isinstance(given_names, str) else tuple(given_names),
        )
        own: Any = self.algorithms
        own = (own,) if isinstance(own, str) or hasattr(own, "stage") else tuple(own)
        object.__setattr__(self, "algorithms", in_order(own))
        for name in ("layers", "types"):
            given = getattr(self, name)
            items = tuple(given.items() if isinstance(given, Mapping) else given)
            object.__setattr__(self, name, items)
            for key, spec in items:
                if not isinstance(spec, LayerSpec):
                    raise ConfigError(
                        f"{name} has {spec!r} for {key!r}; it must be a LayerSpec",
                    )
        for key, _ in self.types:
            if key not in (*TYPES, *OPERATORS):
                raise ConfigError(
                    f"types names {key!r}, which cannot be"
                    f" quantized{nearest(key, (*TYPES, *OPERATORS))}",
                )
        if not isinstance(self.default, LayerSpec):
            raise ConfigError(f"default is {self.default!r}; it must be a LayerSpec")

    def with_(self, **changes: Any) -> TorchConfig:
        """A copy with some settings changed."""
        check_names(changes, type(self))
        return replace(self, **changes)

    def spec_of(self, name: str, kind: str) -> LayerSpec | None:
        """How the layer of this name and class is quantized; None if it stays float."""
        if self.excludes(name):
            return None
        found = self._own_spec(name, kind)
        if found is None:
            return None
        if self.kv_cache is not None and any(
            fnmatchcase(name, glob) for glob in self.kv_cache.layers
        ):
            rotated = self.kv_cache.where == "rope" and _side(name) == "k"
            found = found.with_(output=self.kv_cache.spec, rotated=rotated)
        if self.attention is not None and (
            probabilities := self.probabilities_of(name)
        ):
            found = found.with_(
                probabilities=probabilities,
                output=self.attention.queries or found.output,
            )
        return found if found != LayerSpec() else None

    def probabilities_of(self, name: str) -> TensorSpec | None:
        """How those of the attention that a layer computes queries for are quantized.

        None if they are not.
        """
        attention = self.attention
        named = attention is not None and any(
            fnmatchcase(name, glob) for glob in attention.layers
        )
        return attention.probabilities if named and attention else None

    @property
    def rounded(self) -> tuple[str, ...]:
        """Globs of the layers whose outputs are rounded for attention: those of keys and values,
        and of queries.
        """
        own = () if self.kv_cache is None else self.kv_cache.layers
        queries = (
            ()
            if self.attention is None or self.attention.queries is None
            else self.attention.layers
        )
        return tuple(dict.fromkeys((*own, *queries)))

    def own_spec(self, name: str, kind: str) -> LayerSpec | None:
        """How the layer of this name and class is quantized, but for what is rounded for attention."""  # noqa: E501
        return None if self.excludes(name) else self._own_spec(name, kind)

    def excludes(self, name: str) -> bool:
        """Return whether a glob of ``exclude`` matches a name."""
        return any(fnmatchcase(name, glob) for glob in self.exclude)

    def _own_spec(self, name: str, kind: str) -> LayerSpec | None:
        for glob, spec in self.layers:
            if fnmatchcase(name, glob):
                return spec
        for type_name, spec in self.types:
            if kind == type_name:
                return spec
        return self.default if kind in DEFAULT_TYPES or kind in OPERATORS else None

    def check(self, names: Iterable[str]) -> None:
        """Raise ConfigError for the first name or glob that matches none of ``names``, or only what
        is excluded.
        """
        names = list(names)
        globs = [
            ("exclude", glob)
            for glob in self.exclude
            if not isinstance(glob, DefaultExclude)
        ]
        globs += [("layers", glob) for glob, _ in self.layers]
        globs += [
            ("kv_cache", glob)
            for glob in (self.kv_cache.layers if self.kv_cache else ())
        ]
        globs += [
            ("attention", glob)
            for glob in (self.attention.layers if self.attention else ())
        ]
        for where, glob in globs:
            found = [name for name in names if fnmatchcase(name, glob)]
            if not found:
                ends = list(dict.fromkeys(name.rsplit(".", 1)[-1] for name in names))
                last = glob.rsplit(".", 1)[-1].strip("*")
                raise ConfigError(
                    f"{where} names {glob!r}, but no layer of the model is called"
                    f" so{nearest(last, ends)}",
                )
            if where in ("kv_cache", "attention") and all(map(self.excludes, found)):
                raise ConfigError(
                    f"{where} names {glob!r}, but these layers are excluded; exclude"
                    f" less, or no {where}",
                )
            if where == "kv_cache" and self.kv_cache and self.kv_cache.where == "rope":
                for name in (name for name in found if _side(name) not in ("k", "v")):
                    raise ConfigError(
                        f"kv_cache names {glob!r}, but {name} computes more than keys"
                        " or values, so that keys cannot be rounded after they are"
                        " rotated; round them where they are projected"
                        " (where='projection')",
                    )

    @property
    def specs(self) -> list[LayerSpec]:
        """All specs that a layer may get."""
        own = [self.default, *(spec for _, spec in (*self.layers, *self.types))]
        own += [] if self.kv_cache is None else [LayerSpec(output=self.kv_cache.spec)]
        return (
            own
            if self.attention is None
            else [*own, LayerSpec(probabilities=self.attention.probabilities)]
        )

    def least_of(self, name: str) -> float:
        """The least scale of what a layer computes."""
        cache = self.kv_cache
        return (
            cache.least
            if cache and any(fnmatchcase(name, glob) for glob in cache.layers)
            else 0.0
        )

    @property
    def measures(self) -> bool:
        """Whether there are scales that only data can tell."""
        return any(spec.measures for spec in self.specs)

    @property
    def needs_data(self) -> bool:
        """Whether the model has to be run: there are scales that only data can tell, or an
        algorithm learns from it.
        """
        return self.measures or any(
            algorithm.needs_data for algorithm in self.algorithms
        )


def _side(name: str) -> str:
    """Whether a layer computes keys ("k") or values ("v").

    Something else where it is called otherwise.

    >>> _side("layers.0.self_attn.k_proj"), _side("layers.0.attention.query_key_value")
    ('k', '')
    """
    found = re.fullmatch(r"([kv])(ey|alue)?(_proj)?", name.rpartition(".")[2])
    return found[1] if found else ""
