"""model_key: a hash that tells a model from every other one."""

from __future__ import annotations

import hashlib

import numpy as np
from onnx import ModelProto

from calibrators.onnx_runtime.external_tensors import is_stored, values
from calibrators.onnx_runtime.session import initializers


def model_key(model: ModelProto) -> str:
    """Return the hash of a model's bytes, those in other files included.

    What says nothing of the computation (producer, metadata, documentation of the model) does not
    count.
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
    parts += [tensor for tensor in graph.initializer if not is_stored(tensor)]
    # not the model as a whole, which may be larger than a message can be
    for part in parts:
        data = part.SerializeToString(deterministic=True)
        digest.update(f"{len(data)} ".encode())
        digest.update(data)
    for tensor in filter(is_stored, initializers(graph)):
        digest.update(f"{tensor.name} {tensor.data_type} {list(tensor.dims)} ".encode())
        array = np.ascontiguousarray(values(tensor))
        digest.update(array.reshape(-1).view(np.uint8).data)
    return digest.hexdigest()
