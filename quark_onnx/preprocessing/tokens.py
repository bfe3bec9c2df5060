"""Signs of a wrong tokenizer or mask in the inputs of a model of tokens."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import GraphProto, ModelProto, TensorProto

from calibrators.onnx_runtime.external_tensors import values
from quark_onnx.graph import constants_of, scopes_of
from quark_onnx.preprocessing.finding import Finding

Feeds = Mapping[str, NDArray[Any]]

#: Untrained embeddings: maximum norm of a row as a share of the median, and minimum number and
#: share of tokens with untrained rows.
_UNTRAINED, _LEAST_TOKENS, _LEAST_SHARE = 0.6, 5, 0.01
#: Share of a single token from which the data is suspicious.
_ONE_TOKEN = 0.4
#: Minimum samples and tokens for meaningful frequencies.
_SAMPLES, _TOKENS = 8, 64
#: Minimum rows of a vocabulary embedding, and its maximum size in bytes.
_VOCABULARY, _LARGEST = 1000, 1 << 30


def token_findings(model: ModelProto, feeds: Sequence[Feeds]) -> Iterator[Finding]:
    """Yield findings on token identifiers and masks.

    Args:
        model: the float model.
        feeds: samples.
    """
    # Without an embedding the inputs are no tokens.
    table = _embedding(model)
    if table is None:
        return
    identifiers, tensor = table
    masks = [name for name in feeds[0] if "mask" in name.lower()]
    for name in masks:
        # Over all samples: a single one may be padding alone.
        if not any(feed[name].any() for feed in feeds):
            yield Finding(
                "mask",
                f"input {name!r} is 0 throughout, so that no token counts",
                "set it to 1 where there are tokens",
            )
            return
    rows = list[NDArray[Any]]()
    for feed in feeds:
        rows += filter(len, _rows(feed, identifiers, masks))
    if len(rows) < _SAMPLES:
        return
    tokens = np.concatenate(rows)
    yield from _repeated(tokens)
    yield from _untrained(rows, tokens, tensor)
    # token_type_ids tell a model of BERT's family.
    if any("type" in name.lower() for name in feeds[0]):
        yield from _without_special(rows)


def _embedding(model: ModelProto) -> tuple[str, TensorProto] | None:
    """Return the input of token identifiers, and the embedding table.

    Returns:
        Input name and table, (tokens, channels); None without a vocabulary of a size that can be
        checked.
    """
    # Older files list constants among the inputs.
    inputs = {value.name for value in model.graph.input} - constants_of(model).keys()
    # Decoders with and without a KV cache, merged into one file, are the branches of an If.
    for graph, constants in scopes_of(model):
        embedding = _embedding_in(graph, constants, inputs)
        if embedding is not None:
            return embedding
    return None


def _embedding_in(
    graph: GraphProto, constants: Mapping[str, TensorProto], inputs: set[str]
) -> tuple[str, TensorProto] | None:
    """Return the input of token identifiers, and the embedding table, of a graph without bodies.

    Args:
        constants: constants that its nodes can read, by name.
        inputs: names of the inputs of the model.

    Returns:
        As ``_embedding``.
    """
    for node in graph.node:
        if node.op_type != "Gather" or node.input[1] not in inputs:
            continue
        table = constants.get(node.input[0])
        if table is None or len(table.dims) != 2 or table.dims[0] < _VOCABULARY:
            continue
        # The norms need the table as float32, 4 bytes a value.
        if table.dims[0] * table.dims[1] * 4 <= _LARGEST:
            return node.input[1], table
    return None


def _rows(feed: Feeds, identifiers: str, masks: list[str]) -> Iterator[NDArray[Any]]:
    """Yield the unmasked identifiers of every sequence.

    Args:
        identifiers: the input of token identifiers, (batch, tokens); of another rank, nothing is
            yielded.
        masks: inputs that may be masks.
    """
    tokens = feed[identifiers]
    if tokens.ndim != 2:
        return
    mask = _mask_of(tokens, feed, masks)
    for row, row_mask in zip(tokens, mask, strict=True):
        yield row[row_mask != 0]


def _mask_of(tokens: NDArray[Any], feed: Feeds, masks: list[str]) -> NDArray[Any]:
    """Return the first mask of the shape of the tokens; ones without such a mask."""
    for name in masks:
        if feed[name].shape == tokens.shape:
            return feed[name]
    return np.ones(tokens.shape, np.bool_)


def _repeated(tokens: NDArray[Any]) -> Iterator[Finding]:
    """Yield a finding on a token that stands for a large share of all tokens.

    Args:
        tokens: the unmasked identifiers of all sequences.
    """
    distinct, counts = np.unique(tokens, return_counts=True)
    share = counts.max() / len(tokens)
    if len(tokens) >= _TOKENS and share >= _ONE_TOKEN:
        token = int(distinct[counts.argmax()])
        yield Finding(
            "tokens",
            f"{100 * share:.0f} % of all tokens that count are {token}",
            "if it is the padding, mask it with attention_mask; if it stands for unknown"
            " words, the vocabulary or its case (lower, upper) is that of another model",
        )


def _untrained(
    rows: Sequence[NDArray[Any]], tokens: NDArray[Any], tensor: TensorProto
) -> Iterator[Finding]:
    """Yield a finding on tokens with untrained embeddings, such as reserved tokens.

    Args:
        rows: the unmasked identifiers of every sequence; not read.
        tokens: the same identifiers, of all sequences in one array.
        tensor: the embedding table, (tokens, channels).
    """
    if tokens.min() < 0 or tokens.max() >= tensor.dims[0]:
        return  # the model does not run on such identifiers
    # Rows of tokens that never occurred in training keep the small norm of the initialization.
    norms = np.linalg.norm(values(tensor).astype(np.float32), axis=1)
    weak = norms <= _UNTRAINED * np.median(norms)
    if weak.mean() > 0.25:  # such a table gives no evidence
        return
    count = int(weak[tokens].sum())
    if count >= max(_LEAST_TOKENS, _LEAST_SHARE * len(tokens)):
        yield Finding(
            "tokens",
            f"{count} of {len(tokens)} tokens have an embedding that looks untrained,"
            " as that of reserved tokens",
            "the vocabulary is another one, or identifiers are shifted: use the model's"
            " own tokenizer",
        )


def _without_special(rows: Sequence[NDArray[Any]]) -> Iterator[Finding]:
    """Yield a finding on sequences without a common first token (BERT's [CLS]).

    Args:
        rows: the unmasked identifiers of every sequence, none empty.
    """
    # A few sequences may be cut from the middle of a text.
    first, counts = np.unique([row[0] for row in rows], return_counts=True)
    if len(first) > 1 and counts.max() < 0.9 * len(rows):
        yield Finding(
            "tokens",
            f"{len(rows)} sequences begin with {len(first)} different tokens",
            "models with token types, as BERT, expect [CLS] first and [SEP] last: have"
            " the tokenizer add special tokens",
        )
