"""export_decoder: write a language model as ONNX with a key-value cache.

Each attention becomes onnxruntime's GroupQueryAttention, which appends new keys and values to
past ones, as in models of onnxruntime-genai. Inputs are ``input_ids`` (batch, sequence),
``attention_mask`` (batch, past + sequence) and ``past_key_values.N.key`` and ``.value`` (batch,
key heads, past, head size). Outputs are ``logits`` and ``present.N.key`` and ``.value``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from onnx import TensorProto
from torch import nn

from calibrators.onnx_runtime.session import open_session
from quark_onnx.common.errors import ConfigError, ModelError
from quark_onnx.files.io import staged
from quark_onnx.graph import Graph
from quark_onnx.torch.calibration.block_stream import inference
from quark_onnx.torch.exports.onnx.export import Exported, checked, store_for
from quark_onnx.torch.exports.onnx.stand_in import standing_in
from quark_onnx.torch.exports.onnx.trace import Batch, Flat, trace
from quark_onnx.torch.exports.onnx.verify import DRAWS, TIMES, distance, noise
from quark_onnx.torch.exports.onnx.write import write
from quark_onnx.torch.models.attention import attention_function
from quark_onnx.torch.models.structure import vocabulary_of

#: Name of the traced attention in transformers.
_NAME = "quark_onnx_group_query"
_OPERATOR = "com.microsoft::GroupQueryAttention"
#: Tokens of the traced prompt and of its past, and tokens that the verification generates.
_SEQUENCE, _PAST, _GENERATED = 3, 2, 8
#: Tolerance of logits (relative L2 difference).
_TOLERANCE = 1e-3


@dataclass
class _Keys:
    """Past and present keys and values of all layers."""

    past: dict[int, tuple[Any, Any]] = field(default_factory=dict)
    present: dict[int, tuple[Any, Any]] = field(default_factory=dict)
    mask: Any = None


class _Decoder(nn.Module):
    """Language model as a function of tokens, a mask, and past keys and values."""

    def __init__(self, model: Any, keys: _Keys) -> None:
        super().__init__()
        self.model, self._keys = model, keys

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, **past: Any
    ) -> Any:
        """Return logits, present keys and present values by output name."""
        # The attention function of transformers has no parameter for past keys and values.
        keys = self._keys
        keys.past = {
            layer: (past[_past(layer, "key")], past[_past(layer, "value")])
            for layer in range(len(past) // 2)
        }
        keys.present, keys.mask = {}, attention_mask
        # Tokens in the cache.
        before = attention_mask.shape[1] - input_ids.shape[1]
        positions = torch.arange(input_ids.shape[1]) + before
        result = self.model(
            input_ids=input_ids,
            position_ids=positions[None],
            # The cache of transformers is not used: keys and values are inputs and outputs.
            use_cache=False,
        )
        outputs = {"logits": result.logits}
        for layer, (key, value) in sorted(keys.present.items()):
            outputs[f"present.{layer}.key"] = key
            outputs[f"present.{layer}.value"] = value
        return outputs


def _past(layer: int, side: str) -> str:
    """Return the name of the input for the past keys or values of a layer."""
    return f"past_key_values.{layer}.{side}"


def export_decoder(
    model: nn.Module,
    output: Path | str,
    *,
    form: str = "auto",
) -> Exported:
    """Write a language model as an ONNX model that generates with onnxruntime.

    Prompts of one batch have one length, or are padded on the right. The model computes in float32.

    Args:
        model: a causal language model, quantized or not; it is not changed.
        output: the file.
        form: the operators of weights, see ``write_onnx``.

    Returns:
        The written model, and its difference from torch.

    Raises:
        ConfigError: GroupQueryAttention does not support the attention.
        ModelError: torch cannot export the model, or onnxruntime generates other tokens than
            transformers. Nothing is written.
    """
    path = Path(output)
    copied, layers, between = standing_in(model, torch.float32)
    keys = _Keys()
    with (
        store_for(path, layers) as store,
        inference(copied),
        _group_query(copied, keys),
    ):
        # A run in torch tells the shapes of keys, layer by layer.
        shapes = _shapes(copied, keys)
        batch = _batch(copied, shapes)
        flat = Flat(_Decoder(copied, keys), batch)
        with trace(flat, batch, _axes(batch), path) as traced:
            graph = Graph.of(traced, store)
            became = write(graph, layers, between, form, int(TensorProto.FLOAT))
            with staged(graph.to_model(), path, external=False) as temporary:
                checked(temporary)
                difference = _generate(temporary, flat, shapes, copied)
    return Exported(path, became, difference)


def _shapes(model: Any, keys: _Keys) -> list[tuple[int, int]]:
    """Return the number and the size of key heads, by layer."""
    model(input_ids=torch.zeros(1, 2, dtype=torch.int64), use_cache=False)
    shapes = [
        (int(key.shape[1]), int(key.shape[3]))
        for _, (key, _) in sorted(keys.present.items())
    ]
    if not shapes or sorted(keys.present) != list(range(len(shapes))):
        raise ConfigError(
            f"a {type(model).__name__} computes attention by itself, and not by the"
            " attention functions of transformers, so that its keys and values cannot"
            " be kept; export it without a cache",
        )
    return shapes


def _batch(model: Any, shapes: Sequence[tuple[int, int]]) -> Batch:
    """Return the inputs with which the model is traced."""
    ids = torch.arange(2 * _SEQUENCE).reshape(2, _SEQUENCE) % vocabulary_of(model)
    tensors = {
        "input_ids": ids,
        # The mask covers past and new tokens.
        "attention_mask": torch.ones(2, _PAST + _SEQUENCE, dtype=torch.int64),
    }
    generator = torch.Generator().manual_seed(0)
    for layer, (heads, size) in enumerate(shapes):
        for side in ("key", "value"):
            tensors[_past(layer, side)] = torch.randn(
                (2, heads, _PAST, size),
                generator=generator,
            )
    return Batch(tensors, {})


def _axes(batch: Batch) -> dict[str, dict[int, str]]:
    """Return the dynamic axes of the inputs."""
    axes = {name: {0: "batch", 2: "past_sequence_length"} for name in batch.tensors}
    axes["input_ids"] = {0: "batch", 1: "sequence_length"}
    axes["attention_mask"] = {0: "batch", 1: "total_sequence_length"}
    return axes


def _generate(
    path: Path,
    flat: Flat,
    shapes: Sequence[tuple[int, int]],
    model: Any,
) -> float:
    """Generate with onnxruntime and its cache, and compare the logits of each step.

    Returns:
        The largest relative difference (L2) from torch without a cache.

    Raises:
        ModelError: the difference is more than noise.
    """
    session = open_session(path)
    tokens = torch.arange(_SEQUENCE)[None] % vocabulary_of(model)
    past = dict[str, NDArray[Any]]()
    for layer, (heads, size) in enumerate(shapes):
        for side in ("key", "value"):
            # Nothing is in the cache.
            past[_past(layer, side)] = np.zeros((1, heads, 0, size), np.float32)
    names = [output.name for output in session.get_outputs()]
    given, worst = tokens, 0.0
    empty = {name: torch.from_numpy(array) for name, array in past.items()}

    def expected() -> NDArray[np.float32]:
        """Compute the next token's logits in torch without a cache."""
        next_logits: NDArray[np.float32] = flat.model(
            # All tokens are new in each step.
            input_ids=tokens,
            attention_mask=torch.ones_like(tokens),
            **empty,
        )["logits"][0, -1].numpy()
        return next_logits

    for _ in range(_GENERATED):
        mask = np.ones((1, tokens.shape[1]), np.int64)
        inputs = {"input_ids": given.numpy(), "attention_mask": mask, **past}
        outputs = dict(zip(names, session.run(None, inputs), strict=True))
        # Logits of the last token.
        logits = outputs.pop("logits")[0, -1]
        past = {
            name.replace("present", "past_key_values"): value
            for name, value in outputs.items()
        }
        wanted = expected()
        difference, allowed = distance(logits, wanted), _TOLERANCE
        # Noise is drawn only if the plain tolerance is not enough.
        if difference > allowed:
            with noise(flat, torch.float32):
                allowed = max(distance(expected(), wanted) for _ in range(DRAWS))
        # Not ``>``, since NaN must fail, too.
        if not difference <= max(_TOLERANCE, TIMES * allowed):
            raise ModelError(
                f"logits of onnxruntime differ from torch's by {difference:.2g},"
                f" relative, behind {tokens.shape[1]} tokens; nothing was written",
            )
        worst = max(worst, difference)
        # Greedy: the next step reads the token of highest logit.
        given = torch.tensor([[int(logits.argmax())]])
        tokens = torch.cat([tokens, given], 1)
    return worst


@contextmanager
def _group_query(model: Any, keys: _Keys) -> Iterator[None]:
    """Let all attention of a model use the cache, and become one node in an export."""
    from transformers import AttentionInterface

    def attention(  # noqa: PLR0913  # the signature of transformers
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor,
        scaling: float | None = None,
        **settings: Any,
    ) -> tuple[Any, None]:
        layer: Any = module.layer_idx
        operator = _Attention.of(module, query, key, scaling, settings)
        past = keys.past.get(layer)
        # The run that measures shapes has no past.
        if past is None:
            empty = key.new_zeros(key.shape[0], key.shape[1], 0, key.shape[3])
            past = (empty, empty)
        run = operator.node if torch.compiler.is_exporting() else operator.compute
        output, present = run(query, key, value, past, keys.mask)
        keys.present[layer] = present
        return output, None

    AttentionInterface.register(_NAME, attention)
    with attention_function(model, _NAME):
        yield


@dataclass(frozen=True)
class _Attention:
    """Settings of an attention.

    Attributes:
        heads: number of query heads.
        key_heads: number of key and value heads.
        scale: scale of the products of queries and keys.
        window: size of the sliding window with the token itself; -1 for no window.
        softcap: bound of the products; 0 for none.
    """

    heads: int
    key_heads: int
    scale: float
    window: int
    softcap: float

    @classmethod
    def of(
        cls,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        scaling: float | None,
        settings: dict[str, Any],
    ) -> _Attention:
        """Read the settings from the arguments of transformers."""
        if settings.get("s_aux") is not None:
            raise ConfigError(
                "attention has sinks, for which this export has no input; export"
                " without a cache",
            )
        if not getattr(module, "is_causal", True):
            raise ConfigError(
                f"{type(module).__name__} is not causal, and GroupQueryAttention is;"
                " export without a cache",
            )
        return cls(
            query.shape[1],
            key.shape[1],
            query.shape[3] ** -0.5 if scaling is None else float(scaling),
            # transformers has None for no window, and for no cap.
            int(settings.get("sliding_window") or -1),
            float(settings.get("softcap") or 0.0),
        )

    def node(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        past: tuple[Any, Any],
        mask: torch.Tensor,
    ) -> tuple[Any, tuple[Any, Any]]:
        """Compute with onnxruntime's operator; shapes as of ``compute``."""
        batch, _, length, size = query.shape
        total = past[0].shape[2] + length
        # The operator's ``seqlens_k``: the index of the last token of each sample.
        last_index = (mask.sum(1) - 1).to(torch.int32)
        # The operator's ``total_sequence_length``.
        count = torch.full((1,), mask.shape[1], dtype=torch.int32)
        # (batch, tokens, heads * size).
        flat = [tensor.transpose(1, 2).flatten(2) for tensor in (query, key, value)]
        kept = (batch, self.key_heads, total, size)
        attributes: dict[str, Any] = {
            "num_heads": self.heads,
            "kv_num_heads": self.key_heads,
            "scale": self.scale,
            "local_window_size": self.window,
            "softcap": self.softcap,
            # transformers has rotated queries and keys.
            "do_rotary": 0,
        }
        output, keys, values = torch.onnx.ops.symbolic_multi_out(
            _OPERATOR,
            (*flat, *past, last_index, count),
            attributes,
            dtypes=(query.dtype,) * 3,
            shapes=((batch, length, self.heads * size), kept, kept),
            version=1,
        )
        return output.reshape(batch, length, self.heads, size), (keys, values)

    def compute(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        past: tuple[Any, Any],
        mask: torch.Tensor,
    ) -> tuple[Any, tuple[Any, Any]]:
        """Compute the attention in torch.

        Args:
            query: (batch, heads, tokens, size).
            key: (batch, key heads, tokens, size).
            value: (batch, key heads, tokens, size).
            past: keys and values of earlier tokens.
            mask: ignored, since padding follows the tokens.

        Returns:
            The output, (batch, tokens, heads, size), and all keys and values.
        """
        keys = torch.cat((past[0], key), 2)
        values = torch.cat((past[1], value), 2)
        # Each key head serves several query heads.
        share = self.heads // self.key_heads
        wide_keys = keys.repeat_interleave(share, 1)
        wide_values = values.repeat_interleave(share, 1)
        products = query @ wide_keys.transpose(2, 3) * self.scale
        if self.softcap:
            products = self.softcap * torch.tanh(products / self.softcap)
        length, total = query.shape[2], keys.shape[2]
        # Distance of each new token from each token, (tokens, total).
        distances = torch.arange(total - length, total)[:, None] - torch.arange(total)
        seen = distances >= 0
        # The window includes the token itself.
        if self.window > 0:
            seen &= distances < self.window
        products = products.masked_fill(~seen, -math.inf)
        output = products.softmax(-1) @ wide_values
        return output.transpose(1, 2), (keys, values)
