"""Configuration of a PyTorch model: which layer is quantized, and how."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any

from quark_onnx.common.errors import ConfigError, nearest
from quark_onnx.config.checks import require, require_known
from quark_onnx.config.spec import check_names
from quark_onnx.torch.config.algorithm_order import in_order
from quark_onnx.torch.config.spec import LayerSpec, TensorSpec

#: Classes of layers with the default specification; embeddings are quantized if a user names them.
DEFAULT_TYPES = ("Linear", "Conv1D", "Conv2d", "ConvTranspose2d")
#: All types of layers that can be quantized.
TYPES = (*DEFAULT_TYPES, "Embedding", "EmbeddingBag")
#: Layers that compute keys and values together with each other or with queries, by family.
_KEYS_AND_MORE = frozenset(
    {
        "qkv_proj",
        "query_key_value",
        "c_attn",
        "Wqkv",
        "qkv",
        "kv_proj",
        "attn_qkv",
        "in_proj_qkv",
        "kv",
    }
)
#: Layers of multi-head latent attention, as in DeepSeek V2 to V3.2.
_LATENT = re.compile(r"kv_[ab]_proj")
#: Operators between layers that can be quantized in exported graphs (``pipelines.graph``), by their
#: names in ATen.
OPERATORS = (
    "add",
    "sub",
    "mul",
    "cat",
    "avg_pool2d",
    "adaptive_avg_pool2d",
    "max_pool2d",
    "relu",
    "relu6",
    "hardtanh",
)


def matching(names: Iterable[str], glob: str) -> list[str]:
    """Return the names that a glob matches."""
    # Unlike fnmatch, fnmatchcase tells k_proj from K_proj on Windows, too.
    return [name for name in names if fnmatchcase(name, glob)]


def matches(name: str, globs: Iterable[str]) -> bool:
    """Return whether a name matches any of the globs."""
    return any(fnmatchcase(name, glob) for glob in globs)


def no_such_layer(where: str, glob: str, names: Iterable[str]) -> ConfigError:
    """Return the error for a glob that matches nothing, with similar names.

    Args:
        where: name of the setting with the glob.
        glob: the glob.
        names: names that the glob could have matched.
    """
    names = list(names)
    # Names are compared by their last part: the prefixes of all layers are alike.
    ends = list(dict.fromkeys(name.rsplit(".", 1)[-1] for name in names))
    last = glob.rsplit(".", 1)[-1].strip("*")
    hint = nearest(last, ends) if last else ""
    # Without a similar name, a whole name shows what a glob has to match.
    if "did you mean" not in hint and any("." in name for name in names):
        layers = [name.removesuffix(".weight").removesuffix(".bias") for name in names]
        example = max(layers, key=lambda name: name.count("."))
        hint = f"; names are such as {example!r}"
        numbers = [
            int(part) for name in names for part in name.split(".") if part.isdigit()
        ]
        if numbers:
            hint += f", with numbers from 0 to {max(numbers)}"
    return ConfigError(
        f"{where} names {glob!r}, but no layer of the model is called so{hint}",
    )


class DefaultExclude(str):
    """Glob of a model family's usual names; a model may lack such a layer."""

    __slots__ = ()


#: The heads of a model, whatever their names.
HEADS = DefaultExclude("lm_head")


@dataclass(frozen=True)
class KVCache:
    """Quantization of the keys and values that attention caches.

    Attributes:
        spec: specification, with a calibrated per-tensor scale.
        layers: globs of the projections that compute keys and values.
        least: lower bound of the scales of keys and values.
        where: "projection" rounds the output of the projections; "rope" rounds keys after the
            rotation, as clients with a rounded cache of rotated keys do.
    """

    spec: TensorSpec
    layers: tuple[str, ...] = ("*k_proj", "*v_proj")
    least: float = 0.0
    where: str = "projection"

    def __post_init__(self) -> None:
        # Clients read one static scale for keys and one for values.
        if not self.spec.measured:
            raise ConfigError(
                f"kv_cache is {self.spec}; keys and values have a scale that data"
                " tells",
            )
        require(
            self.least >= 0, "the least scale of the KV cache", self.least, "0 or more"
        )
        require_known(self.where, ("projection", "rope"), "where is")


@dataclass(frozen=True)
class Attention:
    """Quantization of queries and softmax probabilities of attention.

    Attributes:
        probabilities: specification of softmax probabilities, with a calibrated scale per attention
            module.
        queries: specification of the output of ``layers``; None for float queries.
        layers: globs of the projections that compute queries, one per attention module.

    >>> Attention(TensorSpec("fp8e4m3"), TensorSpec("fp8e4m3")).layers
    ('*q_proj',)
    """

    probabilities: TensorSpec
    queries: TensorSpec | None = None
    layers: tuple[str, ...] = ("*q_proj",)

    def __post_init__(self) -> None:
        specs = {"probabilities": self.probabilities, "queries": self.queries}
        for name, spec in specs.items():
            if spec is not None and not spec.measured:
                raise ConfigError(
                    f"attention: {name} are {spec}; they have a scale that data tells",
                )


@dataclass(frozen=True)
class TorchConfig:
    """Configuration of a PyTorch model; frozen, and changed by ``with_``.

    Attributes:
        default: formats of weights and inputs. It is the specification of Linear, Conv1D (of
            transformers), Conv2d and ConvTranspose2d layers.
        layers: formats of layers by a glob of their names; the first match wins. They are pairs of
            a glob and a specification, and have priority over types and default.
        types: pairs of a class name and a specification; in exported graphs also ATen names of
            operators.
        exclude: layers that stay float. They are globs of names.
        kv_cache: quantization of the KV cache. None for float keys and values.
        attention: quantization of queries and attention probabilities. None for float.
        algorithms: algorithms, in this order. They are names (``"gptq"``,
            ``"gptq:coordinate_descent_passes=2"``) or objects, and make weights easier to round, or
            choose better codes than round to nearest.

    A name or a glob that matches no layer of the model is an error, except for a
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
        # A single name or algorithm stands for a tuple of one. Fields are set through object, as
        # the dataclass is frozen.
        object.__setattr__(self, "exclude", _several(self.exclude))
        object.__setattr__(self, "algorithms", in_order(_several(self.algorithms)))
        for name in ("layers", "types"):
            object.__setattr__(self, name, _specs_by_name(name, getattr(self, name)))
        # A class name of the model, or an ATen operator in an exported graph.
        for kind, _ in self.types:
            if kind not in (*TYPES, *OPERATORS):
                raise ConfigError(
                    f"types names {kind!r}, which cannot be"
                    f" quantized{nearest(kind, (*TYPES, *OPERATORS))}",
                )
        require(
            isinstance(self.default, LayerSpec), "default", self.default, "a LayerSpec"
        )

    def with_(self, **changes: Any) -> TorchConfig:
        """Return a copy with changed settings."""
        check_names(changes, type(self))
        return replace(self, **changes)

    def each(self, change: Callable[[LayerSpec], LayerSpec]) -> TorchConfig:
        """Return a copy with a change of the default, and of all layers and types."""
        return self.with_(
            default=change(self.default),
            layers=tuple((glob, change(spec)) for glob, spec in self.layers),
            types=tuple((kind, change(spec)) for kind, spec in self.types),
        )

    def spec_of(self, name: str, kind: str) -> LayerSpec | None:
        """Return the specification of a layer; None if the layer stays float.

        Args:
            name: name of the layer.
            kind: class name of the layer.
        """
        spec = self.own_spec(name, kind)
        if spec is None:
            return None
        # A layer may compute keys and queries at once. Its output has one specification: that of
        # queries.
        spec = self._with_attention(name, self._with_cache(name, spec))
        # An empty specification leaves the layer as it is.
        return None if spec == LayerSpec() else spec

    def _with_cache(self, name: str, spec: LayerSpec) -> LayerSpec:
        """Add the rounding of keys or values, if the layer computes these."""
        if not matches(name, self.cached):
            return spec
        assert self.kv_cache is not None  # it has the globs
        # RoPE rotates queries and keys, and leaves values unchanged.
        rotated = self.kv_cache.where == "rope" and _side(name) == "k"
        return spec.with_(output=self.kv_cache.spec, rotated=rotated)

    def _with_attention(self, name: str, spec: LayerSpec) -> LayerSpec:
        """Add the rounding of queries and probabilities, if the layer computes queries."""
        if not matches(name, self.attending):
            return spec
        assert self.attention is not None  # it has the globs
        return spec.with_(
            probabilities=self.attention.probabilities,
            output=self.attention.queries or spec.output,
        )

    def probabilities_of(self, name: str) -> TensorSpec | None:
        """Return the specification of probabilities for a layer that computes queries.

        None if the probabilities stay float.
        """
        if not matches(name, self.attending):
            return None
        assert self.attention is not None  # it has the globs
        return self.attention.probabilities

    @property
    def named(self) -> list[str]:
        """Globs of the layers with a specification of their own."""
        return [glob for glob, _ in self.layers]

    @property
    def cached(self) -> tuple[str, ...]:
        """Globs of the layers that compute quantized keys and values."""
        return self.kv_cache.layers if self.kv_cache else ()

    @property
    def attending(self) -> tuple[str, ...]:
        """Globs of the layers that compute queries of quantized attention."""
        return self.attention.layers if self.attention else ()

    @property
    def rounded(self) -> tuple[str, ...]:
        """Globs of the layers that compute rounded keys, values and queries."""
        if self.attention is None or self.attention.queries is None:
            return tuple(dict.fromkeys(self.cached))
        # A glob may be in both lists; the order of the first mention stays.
        return tuple(dict.fromkeys((*self.cached, *self.attending)))

    def own_spec(self, name: str, kind: str) -> LayerSpec | None:
        """Return the specification of a layer without the rounding for attention.

        Args:
            name: name of the layer.
            kind: class name of the layer.

        Returns:
            The first specification for the layer or its class, or the default; None if the layer
            stays float.
        """
        if self.excludes(name):
            return None
        for glob, spec in self.layers:
            if fnmatchcase(name, glob):
                return spec
        for type_name, spec in self.types:
            if kind == type_name:
                return spec
        # Other classes stay float unless a user names them.
        if kind in (*DEFAULT_TYPES, *OPERATORS):
            return self.default
        return None

    def excludes(self, name: str) -> bool:
        """Return whether a glob of ``exclude`` matches a name."""
        return matches(name, self.exclude)

    def check(self, names: Iterable[str]) -> None:
        """Raise ConfigError for a glob that matches no layer, or excluded layers only.

        Args:
            names: names of the layers of the model.
        """
        # The names are read once for each glob.
        names = list(names)
        # A default of a model family may match nothing: not every member of the family has the
        # layer.
        own_excludes = [
            glob for glob in self.exclude if not isinstance(glob, DefaultExclude)
        ]
        globs = {
            "exclude": own_excludes,
            "layers": self.named,
            "kv_cache": self.cached,
            "attention": self.attending,
        }
        for where, patterns in globs.items():
            for glob in patterns:
                self._check_glob(where, glob, names)

    def _check_glob(self, where: str, glob: str, names: list[str]) -> None:
        """Raise ConfigError if a glob of a setting matches no layer, or excluded layers only."""
        layers = matching(names, glob)
        if not layers and where == "kv_cache":
            raise _no_cache_layer(glob, names)
        if not layers:
            raise no_such_layer(where, glob, names)
        # With all its layers excluded, the setting would have no effect.
        excluded = all(self.excludes(name) for name in layers)
        if where in ("kv_cache", "attention") and excluded:
            raise ConfigError(
                f"{where} names {glob!r}, but these layers are excluded; exclude"
                f" less, or no {where}",
            )
        if where == "kv_cache":
            self._check_rotated(glob, layers)

    def _check_rotated(self, glob: str, names: Iterable[str]) -> None:
        """Raise ConfigError if keys that are rounded after the rotation have no layer alone."""
        if self.kv_cache is None or self.kv_cache.where != "rope":
            return
        for name in names:
            if not _side(name):
                raise ConfigError(
                    f"kv_cache names {glob!r}, but {name} computes more than keys"
                    " or values, so that keys cannot be rounded after they are"
                    " rotated; round them where they are projected"
                    " (where='projection')",
                )

    @property
    def specs(self) -> list[LayerSpec]:
        """The specifications of the configuration."""
        specs = [self.default, *(spec for _, spec in (*self.layers, *self.types))]
        # Keys, values and queries are outputs of layers in the configuration.
        if self.kv_cache is not None:
            specs.append(LayerSpec(output=self.kv_cache.spec))
        if self.attention is not None:
            specs.append(LayerSpec(probabilities=self.attention.probabilities))
        return specs

    def least_of(self, name: str) -> float:
        """Return the lower bound of the scale of a layer's output."""
        if not matches(name, self.cached):
            return 0.0
        assert self.kv_cache is not None  # it has the globs
        return self.kv_cache.least

    @property
    def measures(self) -> bool:
        """Whether a scale needs calibration data."""
        return any(spec.measures for spec in self.specs)

    @property
    def needs_data(self) -> bool:
        """Whether quantization runs the model: for calibration, or for an algorithm."""
        return self.measures or any(
            algorithm.needs_data for algorithm in self.algorithms
        )


def _several(given: Any) -> tuple[Any, ...]:
    """Return a tuple of names or algorithms; accept a single value."""
    # A string and an algorithm are no collections here: a string would fall into its letters.
    if isinstance(given, str) or hasattr(given, "stage"):
        return (given,)
    return tuple(given)


def _specs_by_name(setting: str, given: Any) -> tuple[tuple[str, LayerSpec], ...]:
    """Return the pairs of a mapping or a sequence; raise ConfigError for another value."""
    pairs = tuple(given.items() if isinstance(given, Mapping) else given)
    for key, spec in pairs:
        if not isinstance(spec, LayerSpec):
            raise ConfigError(
                f"{setting} has {spec!r} for {key!r}; it must be a LayerSpec",
            )
    return pairs


def require_config(config: object) -> None:
    """Raise ConfigError unless a value is a TorchConfig: it follows the data in every call.

    >>> require_config(TorchConfig(LayerSpec()))
    """
    if not isinstance(config, TorchConfig):
        raise ConfigError(
            f"config is a {type(config).__name__}; it must be a TorchConfig. The order"
            " of arguments is model, data, config, output",
        )


def _no_cache_layer(glob: str, names: Iterable[str]) -> ConfigError:
    """Return the error for a glob of the KV cache that matches nothing.

    Only layers that compute keys or values are suggested, whatever the spelling.
    """
    ends = list(dict.fromkeys(name.rpartition(".")[2] for name in names))
    latent = [end for end in ends if _LATENT.match(end)]
    computing = [end for end in ends if _side(end) or end in _KEYS_AND_MORE]
    if computing:
        reason = f"keys and values are computed by {', '.join(computing)}; name these"
    elif latent:
        reason = (
            f"its cache holds the latent of {latent[0]} (multi-head latent attention),"
            " for which rounding is not supported; leave kv_cache out"
        )
    else:
        reason = (
            "no layer computes keys or values (a state-space model caches its state),"
            " so that there is nothing to round; leave kv_cache out"
        )
    return ConfigError(
        f"kv_cache names {glob!r}, but no layer of the model is called so: {reason}"
    )


def _side(name: str) -> str:
    """Return "k" for a layer that computes keys, "v" for values, and "" otherwise.

    >>> _side("layers.0.self_attn.k_proj"), _side("layers.0.attention.query_key_value")
    ('k', '')
    """
    # A fused projection such as query_key_value computes more than one side, and has none.
    match = re.fullmatch(r"([kv])(ey|alue)?(_proj)?", name.rpartition(".")[2])
    return match[1] if match else ""
