"""Segment-wise inference over all samples, so that later segments may still change.

Between two segments, the tensors that later segments read are kept: in memory up to a limit,
and in files beyond. The segments together cost one inference of the graph. Sessions have one
thread each and the samples run in parallel, so values do not depend on the number of cores.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from calibrators.onnx_runtime.session import open_session
from calibrators.readers.spool import Spool
from quark_onnx.common.errors import ModelError
from quark_onnx.graph import Graph, Node
from quark_onnx.graph.segment import segment
from quark_onnx.graph.traversal import reach
from quark_onnx.kernels.parallel import side_by_side, slabs
from quark_onnx.optimizers import Samples

#: Maximum samples, and maximum input bytes, per task of a thread: for small samples, switching
#: threads takes longer than inference.
_BLOCK, _SMALL = 8, 1 << 21


class LayerStream:
    """A graph in segment-wise inference over the samples."""

    def __init__(self, graph: Graph, samples: Samples, *, memory: int) -> None:
        """Start at the inputs of the graph.

        Args:
            graph: the graph.
            samples: the samples.
            memory: maximum bytes of tensors kept in memory between two segments.
        """
        self.graph = graph
        self._memory = memory
        self._done: set[Node] = set()
        # Samples may have more entries than the graph has inputs.
        first = samples[0]
        self._at_hand = list(filter(graph.is_input, first))
        self._values: Samples = samples
        self._shapes = dict[str, list[tuple[int, ...]]]()
        self._own = False

    def __len__(self) -> int:
        return len(self._values)

    def reach(self, *tensors: str) -> None:
        """Compute tensors, and drop tensors without further consumers.

        Args:
            *tensors: names of the tensors. Tensors of earlier calls stay stored only while a node
                that has not run reads them.

        Raises:
            ModelError: onnxruntime does not run the segment on its own.
        """
        wanted = [tensor for tensor in tensors if tensor not in self._at_hand]
        producers = [self.graph.producer(tensor) for tensor in wanted]
        # Upstream as far as nodes have not run.
        needed = reach(
            [node for node in producers if node is not None], self._leaders_to_run
        )
        # In the order of the graph, which is topological.
        piece = [
            node
            for node in self.graph.nodes
            if node not in self._done and node in needed
        ]
        self._done |= set(piece)

        def is_needed(name: str) -> bool:
            return name in tensors or self._awaited(name)

        # Inputs of the segment that no later node reads are dropped after it.
        kept = list(filter(is_needed, self._at_hand))
        computed = dict.fromkeys(result for node in piece for result in node.results)
        results = list(filter(is_needed, computed))
        if not piece and len(kept) == len(self._at_hand):
            return
        try:
            self._advance(piece, kept, results)
        except Exception as error:  # onnxruntime raises several unrelated types
            raise ModelError(
                f"the graph does not run piece by piece, up to {', '.join(tensors)}: {error}",
            ) from error
        self._at_hand = [*kept, *results]

    def known(self, tensor: str) -> bool:
        """Return whether a tensor has been computed and is still stored."""
        return tensor in self._at_hand

    def values(
        self, tensor: str, which: Sequence[int] | None = None
    ) -> Iterator[NDArray[Any]]:
        """Yield a computed tensor, for every sample or for the samples in ``which``.

        Args:
            tensor: name of a tensor that is known.
            which: indices of the samples, in the order of the result; None for all.
        """
        indices = range(len(self._values)) if which is None else which
        if isinstance(self._values, Spool):
            # A Spool reads one tensor of a sample from its file, without the others.
            spool = self._values
            return (spool.value(index, tensor) for index in indices)
        samples = self._values
        return (samples[index][tensor] for index in indices)

    def shapes(self, tensor: str) -> list[tuple[int, ...]]:
        """Return the shape of a computed tensor, for every sample."""
        return self._shapes[tensor]

    def close(self) -> None:
        """Drop every stored tensor."""
        if self._own and isinstance(self._values, Spool):
            self._values.close()

    def _leaders_to_run(self, node: Node) -> list[Node]:
        return [
            leader for leader in self.graph.leaders(node) if leader not in self._done
        ]

    def _awaited(self, tensor: str) -> bool:
        """Return whether a node that has not run reads a tensor."""
        return any(node not in self._done for node in self.graph.consumers(tensor))

    def _advance(self, piece: list[Node], kept: list[str], results: list[str]) -> None:
        """Run a segment on every sample, and replace the stored tensors.

        Args:
            piece: the nodes to run, in topological order; empty to drop tensors only.
            kept: stored tensors that stay.
            results: tensors that the segment computes and that are stored.
        """
        # Bodies read captured tensors, which are inputs of the segment, too.
        read = {name for node in piece for name in (*node.inputs, *node.captures)}
        inputs = [name for name in self._at_hand if name in read]
        before = self._values
        example = {name: before[0][name] for name in inputs}
        model = segment(self.graph, piece, example, results)
        # Q/DQ pairs as ONNX defines them: the values that optimizers see do not depend on the
        # processor.
        session = open_session(model, threads=1, integers=False) if results else None

        def run(index: int) -> dict[str, Any]:
            values = before[index]
            stored = {name: values[name] for name in kept}
            if session is not None:
                outputs = session.run(results, {name: values[name] for name in inputs})
                stored |= zip(results, outputs, strict=True)
            return stored

        after = Spool(memory=self._memory)
        self._shapes = {
            name: self._shapes[name] for name in kept if name in self._shapes
        }
        self._shapes |= {name: [] for name in results}
        size = sum(
            value.nbytes for value in example.values() if isinstance(value, np.ndarray)
        )
        blocks = slabs(len(before), max(1, min(_BLOCK, _SMALL // max(1, size))))
        for block in side_by_side(
            lambda block: list(map(run, range(block.start, block.stop))), blocks
        ):
            for values in block:
                after.append(values)
                for name in results:
                    self._shapes[name].append(values[name].shape)
        # The old values are read until here. Only a Spool of this object is closed, not the
        # caller's samples.
        self.close()
        self._values, self._own = after, True
