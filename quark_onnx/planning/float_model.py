"""The float model of a run: checked, without functions, in float32, with the sizes of a target."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from numpy.typing import NDArray
from onnx import ModelProto

from quark_onnx.check.inlined import inlined
from quark_onnx.check.static_shapes import fixed
from quark_onnx.config import QConfig
from quark_onnx.files.half_precision import OriginalDtypes, upcast_to_float32
from quark_onnx.files.io import open_model
from quark_onnx.files.unchanged import ModelFiles
from quark_onnx.graph import Graph, gather_constants, store_for
from quark_onnx.graph.shapes import without_all_parameters
from quark_onnx.patterns.coded_constants import (
    coded_constants,
    take_dequantized_weights,
)
from quark_onnx.planning.nothing_to_quantize import has_nothing_to_quantize
from quark_onnx.rules import WEIGHTED
from quark_onnx.running.run import Reference


@dataclass(frozen=True)
class UserModel:
    """A checked model as its user gave it.

    Attributes:
        model: the model.
        inlined: the model without functions; the same object if it has none.
        graph: the graph of ``inlined``.
        source: the file; None for a model in memory, and if declared shapes were corrected.
        files: the files that the model was read from.
        arrays: values of held tensors, which last as long as these arrays.
        notes: notes for the report.
    """

    model: ModelProto
    inlined: ModelProto
    graph: Graph
    source: Path | None
    files: ModelFiles
    arrays: list[NDArray[Any]]
    notes: list[str]

    @classmethod
    def open(cls, model: str | Path | ModelProto, config: QConfig) -> UserModel:
        """Read and check a model.

        Args:
            model: path of the float model, or a ModelProto, which is not changed.
            config: the settings.

        Raises:
            ModelError: see ``check_model``.
        """
        files = ModelFiles.of(model)
        opened = open_model(model, hold=True)
        plain = inlined(opened.model)
        source = None
        if isinstance(model, str | Path) and not opened.notes:
            source = Path(model)
        graph = _graph_to_plan(plain, config)
        return cls(
            opened.model, plain, graph, source, files, opened.arrays, opened.notes
        )


def _graph_to_plan(model: ModelProto, config: QConfig) -> Graph:
    """Return the graph of a model, without parameters of trees if nothing else can be quantized."""
    light = without_all_parameters(model)
    graph = Graph.of(light)
    if light is model or has_nothing_to_quantize(graph, config):
        return graph
    return Graph.of(model)


@dataclass(frozen=True)
class FloatModel:
    """The float model of a run.

    Attributes:
        original: the model as its user gave it.
        graph: the graph to quantize.
        reference: the float model that results are compared with.
        narrowing: the original types of tensors that were widened to float32.
        source: the file of ``original``, as for ``UserModel``.
        files: as for ``UserModel``.
        closed: inputs that become constants of the result, because they are initializers.
        arrays: as for ``UserModel``.
        notes: notes for the report.
    """

    original: ModelProto
    graph: Graph
    reference: Reference
    narrowing: OriginalDtypes
    source: Path | None
    files: ModelFiles
    closed: list[str]
    arrays: list[NDArray[Any]]
    notes: list[str]

    @classmethod
    def of(cls, user: UserModel, config: QConfig, output: Path | None) -> FloatModel:
        """Return the float model of a run.

        Args:
            user: the model, whose graph is changed.
            config: the settings.
            output: the file to write, next to which weights of a large model are stored; None to
                store them in the temporary folder.

        Raises:
            ModelError: a tensor exceeds the size limit with the sizes of the target.
        """
        weights_only = config.activation is None
        store = store_for(user.model, output, weights_only=weights_only)
        plain, narrowing = upcast_to_float32(user.inlined, store)
        graph = user.graph if plain is user.inlined else Graph.of(plain)
        graph.store = store
        # The file itself, if the model is unchanged: onnxruntime opens it instead of a copy in
        # memory.
        reference = Reference(plain, user.source if plain is user.model else None)
        closed = list(
            gather_constants(graph, keep_inputs=config.keep_initializer_inputs)
        )
        # A constant has no type at the interface to restore.
        narrowing.forget_inputs(closed)
        narrowing.coded = coded_constants(graph)
        if config.all_pairs and config.keep_existing and config.activation is not None:
            narrowing.coded |= take_dequantized_weights(graph, WEIGHTED)
        notes = [*user.notes]
        if config.fixes_sizes:
            graph, sized = fixed(graph)
            notes += sized
        return cls(
            user.model,
            graph,
            reference,
            narrowing,
            user.source,
            user.files,
            closed,
            user.arrays,
            notes,
        )

    def close(self) -> None:
        """Delete temporary files."""
        if self.graph.store is not None:
            self.graph.store.close()
