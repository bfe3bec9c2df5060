"""Hash a model, to recognize a model that was measured before."""

from __future__ import annotations

import hashlib

from onnx import ModelProto, TensorProto

from calibrators.onnx_runtime.external_tensors import (
    is_held,
    is_on_disk,
    load_values,
    raw_bytes,
    values,
)
from calibrators.onnx_runtime.tensors import initializers


def model_key(model: ModelProto) -> str:
    """Return the hash of a model's bytes and of its external data.

    Fields that do not change the computation (producer, metadata, documentation) do not count.
    """
    digest = hashlib.blake2b(digest_size=16)
    graph = model.graph
    parts = [
        *model.opset_import,
        *model.functions,
        *graph.input,
        *graph.output,
        *graph.node,
        *graph.sparse_initializer,
    ]
    # Values in files are hashed in place below, without a copy into a message.
    parts += [tensor for tensor in graph.initializer if not is_on_disk(tensor)]
    # part by part: protobuf serializes no message larger than 2 GiB
    for part in parts:
        if isinstance(part, TensorProto) and is_held(part):
            part = _embedded(part)
        data = part.SerializeToString(deterministic=True)
        digest.update(f"{len(data)} ".encode())
        digest.update(data)
    for tensor in filter(is_on_disk, initializers(graph)):
        digest.update(f"{tensor.name} {tensor.data_type} {list(tensor.dims)} ".encode())
        digest.update(raw_bytes(values(tensor)))
    return digest.hexdigest()


def _embedded(tensor: TensorProto) -> TensorProto:
    """Return a copy with the values of a held tensor: the key does not depend on their place."""
    result = TensorProto()
    result.CopyFrom(tensor)
    load_values(result)
    return result
