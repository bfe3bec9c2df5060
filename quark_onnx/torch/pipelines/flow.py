"""The flow of a quantization: calibrate, quantize block by block, quantize the layers around.

A module in memory (``in_memory``) and checkpoint files (``file_run``) run the same steps. They
differ in where weights come from, and where quantized layers go: ``QuantizationRun``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from quark_onnx.common.progress import Progress
from quark_onnx.torch.calibration.block_stream import (
    BlockStream,
    NotWalkable,
    inference,
    run_whole,
)
from quark_onnx.torch.calibration.observers import ActivationObservers, Scales
from quark_onnx.torch.checkpoints.atomic_file import State
from quark_onnx.torch.config.spec import LayerSpec
from quark_onnx.torch.config.torch_config import TorchConfig
from quark_onnx.torch.models.names import outside_of, within_any
from quark_onnx.torch.models.quantized_layer import Layers
from quark_onnx.torch.models.structure import blocks_of
from quark_onnx.torch.pipelines.block import (
    check_unshared,
    finalizers,
    layers_in,
    needs_float_reference,
    quantize_block,
)
from quark_onnx.torch.pipelines.report import TorchReport


@dataclass
class QuantizationRun(ABC):
    """A model, with the source of its weights and the destination of its quantized layers.

    Handing over a module is to keep it for the model in memory, or to write it to the output
    checkpoint. Methods without a body are steps that a module in memory does not need.

    Attributes:
        model: the model.
        config: the quantization configuration.
        chosen: the layers to quantize with their specs, by name; layers outside of the blocks that
            the data does not reach are removed.
        report: the report on all layers.
    """

    model: Any
    config: TorchConfig
    chosen: dict[str, tuple[Any, LayerSpec]]
    report: TorchReport

    @abstractmethod
    def module_names(self) -> list[str]:
        """Return the names of the modules that ``hand_over`` gets, in order."""

    @abstractmethod
    def hand_over(self, name: str, scales: Scales) -> None:
        """Quantize a layer without samples and hand it over, or hand over a float module.

        Args:
            name: name of a module outside of the blocks, or of any module if no data is needed.
            scales: activation scales.
        """

    @abstractmethod
    def calibrating(self) -> AbstractContextManager[None]:
        """Prepare the model for runs on the data inside the context."""

    @abstractmethod
    def record(self, blocks: Mapping[str, Any], samples: list[Any]) -> BlockStream:
        """Return the hidden states at the input of the first block.

        Raises:
            NotWalkable: the model does not run its blocks one after the other.
        """

    @abstractmethod
    def load_whole(self, samples: list[Any], reason: str) -> list[Any]:
        """Load all weights, and return the batches on their device.

        Args:
            samples: the calibration batches.
            reason: reason against running block by block.
        """

    @abstractmethod
    def after_blocks(
        self,
        scales_before: Mapping[str, Scales],
        scales_after: Mapping[str, Scales],
        samples: list[Any],
        progress: bool | None,
    ) -> None:
        """Run the algorithms on the full model, and hand over the remaining modules.

        Args:
            scales_before: scales by module, as ``before_blocks`` got them.
            scales_after: scales of the modules that run after the blocks.
            samples: the calibration batches.
            progress: whether to show a progress bar; None decides by the terminal.
        """

    def check_blocks(self, blocks: Mapping[str, Any]) -> None:  # noqa: B027
        """Raise NotWalkable if the model cannot be quantized block by block, or need not be."""

    def outside_loaded(
        self, blocks: Iterable[str], *, heads: bool
    ) -> AbstractContextManager[None]:
        """Load the weights outside of the blocks inside the context.

        Args:
            blocks: names of the blocks.
            heads: whether float heads are needed, which run after the last block.
        """
        return nullcontext()

    def before_blocks(  # noqa: B027
        self, scales_before: Mapping[str, Scales], stream: BlockStream
    ) -> None:
        """Hand over modules outside of the blocks before the first block.

        Args:
            scales_before: scales by module.
            stream: the hidden states at the input of the first block.
        """

    def restore_block(
        self, index: int, name: str, layers: Layers, stream: BlockStream
    ) -> bool:
        """Restore a block that an earlier run has finished; return whether it was restored."""
        return False

    def load_block(self, name: str, layers: Layers) -> None:  # noqa: B027
        """Load the weights of a block."""

    def read_ahead(self, names: Iterable[str], *, recurse: bool = True) -> None:  # noqa: B027
        """Begin to read the weights of modules that come next, or only their own weights."""

    def store_block(  # noqa: B027
        self, index: int, name: str, layers: Layers, stream: BlockStream
    ) -> None:
        """Hand over a quantized block; its outputs are in the stream."""

    def place_layers(self) -> None:  # noqa: B027
        """Replace float layers of the model by those of ``hand_over``."""

    def state(self, index: int) -> State:
        """Return the storage of an algorithm on the full model, by its index."""
        return State()

    def run_finalizers(self, samples: list[Any], progress: bool | None) -> None:
        """Run the algorithms on the full model."""
        for index, finalizer in enumerate(finalizers(self.config)):
            self.report.outcomes += finalizer(
                self.model, self.chosen, samples, progress, self.state(index)
            )

    def stay_float(self, name: str) -> None:
        """Let a layer outside of the blocks that the data does not reach stay float."""
        self.report.stay_float(name)
        del self.chosen[name]


def quantize_without_data(run: QuantizationRun, progress: bool | None) -> None:
    """Quantize layer by layer, without running the model.

    Args:
        run: the model.
        progress: whether to show a progress bar; None decides by the terminal.
    """
    names = run.module_names()
    with Progress(progress, len(names), "quantizing", "layer") as bar:
        for done, name in enumerate(names, 1):
            # reading and quantizing overlap
            run.read_ahead(names[done : done + 1], recurse=False)
            run.hand_over(name, Scales())
            bar.update(done)
    # at the end: an error in a layer leaves the model float
    run.place_layers()


def quantize_with_data(
    run: QuantizationRun, samples: list[Any], progress: bool | None
) -> None:
    """Quantize block by block, with activation scales of the float model, as in AMD Quark.

    A model that cannot run block by block is calibrated as a whole; algorithms refuse it.

    Args:
        run: the model.
        samples: the calibration batches of this process.
        progress: whether to show a progress bar; None decides by the terminal.

    Raises:
        DataError: the model cannot be run on the data.
        NotWalkable: an algorithm works block by block, and the model does not.
        ModelError: a weight is missing.
    """
    config, report = run.config, run.report
    blocks = blocks_of(run.model)
    outside = outside_of(run.chosen, blocks)
    with inference(run.model), run.calibrating():
        try:
            stream, observers = _record(run, blocks, outside, samples)
        except NotWalkable as error:
            # algorithms work block by block
            if config.algorithms:
                raise
            _quantize_whole(run, blocks, samples, str(error))
            return
        scales = observers.scales(config.least_of)
        # layers that run after the last block, such as the head
        unseen = [name for name in outside if observers.unseen(name, scales)]
        scales_before = outside_of(
            dict.fromkeys(run.module_names(), scales), [*blocks, *unseen]
        )
        run.before_blocks(scales_before, stream)
        _quantize_blocks(run, blocks, stream, progress)
        scales_after = dict[str, Scales]()
        if unseen:
            layers_after = {name: outside[name] for name in unseen}
            scales_after = _calibrate_after(run, blocks, layers_after, stream, samples)
        stream.release()
        run.after_blocks(scales_before, scales_after, samples, progress)
    # layers that stay float have been removed from ``chosen``
    report.note_outside(
        [name for name in outside if name in run.chosen], config.algorithms
    )


def _record(
    run: QuantizationRun,
    blocks: Mapping[str, Any],
    outside: Layers,
    samples: list[Any],
) -> tuple[BlockStream, ActivationObservers]:
    """Run the modules before the blocks on the data, and observe their layers.

    Returns:
        The hidden states at the input of the first block, and the observers of the layers outside
        of the blocks. Observers of layers after the blocks are empty.
    """
    if not blocks:
        raise NotWalkable("the model has no list of blocks")
    run.check_blocks(blocks)
    check_unshared(run.model, blocks, run.config)
    # layers without measured scales need no hooks
    measured = {name: layer for name, layer in outside.items() if layer[1].measures}
    with run.outside_loaded(blocks, heads=False):
        with ActivationObservers(measured) as observers:
            stream = run.record(blocks, samples)
        stream.check_once(run.model)
    return stream, observers


def _quantize_blocks(
    run: QuantizationRun,
    blocks: Mapping[str, Any],
    stream: BlockStream,
    progress: bool | None,
) -> None:
    """Quantize the blocks in order, and advance the hidden states to after the last block."""
    if needs_float_reference(run.chosen, run.config):
        stream.split()
    names = list(blocks)
    with Progress(progress, len(names), "quantizing", "block") as bar:
        for index, name in enumerate(names):
            layers = layers_in(run.chosen, name)
            if run.restore_block(index, name, layers, stream):
                bar.update(index + 1, skipped=True)
                continue
            run.load_block(name, layers)
            run.read_ahead(names[index + 1 : index + 2])
            for done in quantize_block(
                run.model, name, layers, stream, run.config, run.report
            ):
                # one more than the samples: codes are chosen after the last of them
                bar.update(index + done / (len(stream) + 1))
            run.store_block(index, name, layers, stream)
            bar.update(index + 1)


def _calibrate_after(
    run: QuantizationRun,
    blocks: Mapping[str, Any],
    layers: Layers,
    stream: BlockStream,
    samples: list[Any],
) -> dict[str, Scales]:
    """Return the scales of layers after the blocks; unreached layers stay float."""
    # the modules before the blocks run again, up to the last head
    with (
        run.outside_loaded(blocks, heads=True),
        ActivationObservers(layers) as observers,
    ):
        stream.finish(run.model, samples)
    scales = observers.scales(run.config.least_of)
    for name in layers:
        if observers.unseen(name, scales):
            run.stay_float(name)
    return dict.fromkeys(layers, scales)


def _quantize_whole(
    run: QuantizationRun, blocks: Mapping[str, Any], samples: list[Any], reason: str
) -> None:
    """Calibrate and quantize the layers of a model that cannot run block by block.

    A layer outside of the blocks that the data does not reach stays float. Of other unreached
    layers, only the weights are quantized.
    """
    samples = run.load_whole(samples, reason)
    with ActivationObservers(run.chosen) as observers:
        run_whole(run.model, samples)
    scales = observers.scales(run.config.least_of)
    run.report.note_borrowing(observers.borrowing)
    unreached = [name for name in run.chosen if observers.unseen(name, scales)]
    for name in unreached:
        if blocks and not within_any(name, blocks):
            run.stay_float(name)
        else:
            run.chosen[name] = (run.chosen[name][0], run.report.weight_only(name))
    for name in run.module_names():
        run.hand_over(name, scales)
    run.place_layers()
