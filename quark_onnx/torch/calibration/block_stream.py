"""BlockStream: run the blocks of a model in order over all calibration data.

Each block reads the output of the preceding one. Only hidden states are kept, in the dtype of the
model; logits are never computed. Further arguments of blocks (masks, rotary embeddings) are
recorded while all blocks are skipped.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import nn

from quark_onnx.common.errors import DataError, ModelError, QuarkError
from quark_onnx.torch.calibration.hidden_states import HiddenStates
from quark_onnx.torch.calibration.padding import unpadded
from quark_onnx.torch.models.names import configs_of, replaced_forwards

#: Arguments of a model: a tensor, keywords, or positional arguments.
Sample = torch.Tensor | Mapping[str, Any] | Sequence[Any]

_NO_WALK = "the model cannot be walked block by block"


# Callers catch this error and calibrate on runs of the whole model instead.
class NotWalkable(ModelError):  # noqa: N818
    """Error: a model cannot run block by block, but possibly as a whole."""


class _Enough(Exception):  # noqa: N818
    """Exception to stop a run of the model at the last block."""


def call(model: Callable[..., Any], batch: Sample) -> Any:
    """Run a model on a batch.

    Args:
        model: the model.
        batch: a tensor, a mapping of keywords, or a sequence of arguments.

    Raises:
        DataError: the batch has a different type.
    """
    if isinstance(batch, Mapping):
        return model(**batch)
    if isinstance(batch, torch.Tensor):
        return model(batch)
    if isinstance(batch, Sequence) and not isinstance(batch, str):  # type: ignore[redundant-expr]
        return model(*batch)
    raise DataError(
        f"the data yields a {type(batch).__name__}; a tensor, a dict or a list of"
        " tensors is needed",
    )


def run_whole(model: nn.Module, data: Iterable[Any]) -> None:
    """Run a model on all batches.

    Args:
        model: the model.
        data: the batches.

    Raises:
        DataError: there is no batch, or the model cannot be run on a batch.
    """
    count = 0
    for count, batch in enumerate(data, 1):
        _run_sample(model, batch, count - 1)
    # A generator that was read before yields nothing, too.
    if not count:
        raise DataError("the calibration data is empty")


def _run_sample(model: nn.Module, batch: Any, sample: int) -> None:
    """Run a model on a batch; errors of the model are DataErrors with the number of the sample."""
    try:
        call(model, batch)
    # Also of a batch of a wrong type, and of a disk that has no room for hidden states.
    except (QuarkError, _Enough):
        raise
    except Exception as error:
        raise DataError(
            f"the model cannot be run on sample {sample}: {type(error).__name__}: {error}",
        ) from error


def batches(data: Iterable[Sample]) -> Iterator[Any]:
    """Yield the batches of calibration data, without padding.

    Raises:
        DataError: the data is not iterable.
    """
    if not isinstance(data, Iterable):
        raise DataError(
            f"the calibration data is a {type(data).__name__}; a list of batches, or a"
            " loader, is needed",
        )
    return chain.from_iterable(map(unpadded, data))


@contextlib.contextmanager
def inference(model: nn.Module) -> Iterator[None]:
    """Disable gradients, dropout and key-value caches inside the context."""
    # Module by module: model.train() at the end would also switch modules that were in eval mode.
    training = [module for module in model.modules() if module.training]
    # With a cache, each run would keep keys and values that nobody reads again. Submodules may have
    # their own configurations.
    cached = [
        config for config in configs_of(model) if getattr(config, "use_cache", None)
    ]
    model.eval()
    for config in cached:
        config.use_cache = False
    try:
        with torch.no_grad():
            yield
    finally:
        for module in training:
            module.training = True
        for config in cached:
            config.use_cache = True


@dataclass(frozen=True)
class BlockArguments:
    """Block arguments for a sample.

    Attributes:
        hidden: the hidden states, (samples, tokens, features).
        args: further positional arguments.
        kwargs: further keywords: masks, rotary embeddings.
    """

    hidden: torch.Tensor
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)

    def run(self, block: nn.Module) -> Any:
        """Run a block, and return the output hidden states.

        The block gets a copy of the input, since blocks may work in place.
        """
        # Blocks return hidden states alone, or a tuple that starts with them.
        output = block(self.hidden.clone(), *self.args, **self.kwargs)
        return output if isinstance(output, torch.Tensor) else output[0]


class BlockStream:
    """Hidden states of all samples at the input of a block.

    Attributes:
        hidden: the hidden states of the float model.
        quantized: the hidden states of the quantized model; None until ``split`` is called.
        known: cached findings on blocks, for blocks of the same kind.

    Args:
        model: the model.
        blocks: the blocks by name, in order.
        data: the calibration samples; read once.
        folder: the folder for hidden states; None keeps them in memory.
        room: bytes of hidden states that stay on the model's device. The remaining ones are in host
            memory while they are not in use. None for no limit.

    Raises:
        DataError: there is no data, or the model cannot be run on it.
        NotWalkable: the model does not run its blocks in sequence.
    """

    def __init__(
        self,
        model: nn.Module,
        blocks: Mapping[str, Any],
        data: Iterable[Any],
        folder: Path | None = None,
        room: int | None = None,
    ) -> None:
        # From file to file, the weights of blocks are on "meta" until their turn; the other
        # parameters tell where the model runs.
        devices = (parameter.device for parameter in model.parameters())
        self._device = next(
            (device for device in devices if device.type != "meta"), torch.device("cpu")
        )
        recorder = _Recorder(blocks, HiddenStates(folder, room=room))
        self._first: Any = None
        # The data is read once, a batch at a time: it may be a loader that cannot start again.
        for batch in batches(data):
            if self._first is None:
                self._first = batch
            recorder.run(model, moved(batch, self._device))
        self.hidden = recorder.hidden
        if not self.hidden:
            raise DataError("the calibration data is empty")
        self.quantized: HiddenStates | None = None
        self.known: dict[Any, Any] = {}
        self._arguments = recorder.arguments
        self._recorder = recorder

    def __len__(self) -> int:
        return len(self.hidden)

    def tensors(self) -> Iterator[Any]:
        """Return the hidden states and the further tensors of the blocks' arguments.

        A shared tensor is returned once.
        """
        tensors = _tensors(([*self.hidden], self._arguments))
        return iter({id(tensor): tensor for tensor in tensors}.values())

    def check_once(self, model: nn.Module) -> None:
        """Raise NotWalkable if the model runs a block again after the last block.

        Recurrent models do so. Blocks are skipped, and modules after them may lack weights, such as
        heads that are not run otherwise.
        """
        self._recorder.check_once(model, moved(self._first, self._device))

    def finish(self, model: nn.Module, data: Iterable[Any]) -> None:
        """Run the model on all samples once more, to run the modules after the blocks.

        Blocks are skipped and return the stored hidden states. Call this method after the float
        model's hidden states have passed the last block.

        Args:
            model: the same model, with all parameters outside of the blocks.
            data: the same batches.
        """
        for index, batch in enumerate(batches(data)):
            self._recorder.finish(model, moved(batch, self._device), index)

    def release(self) -> None:
        """Free the memory of the hidden states and of the further arguments of the blocks.

        Call this method when no block and no module after them has to run on the samples any more.
        """
        self.hidden = self._recorder.hidden = HiddenStates()
        self.quantized = None
        self._arguments = self._recorder.arguments = {}

    @property
    def states(self) -> list[Any]:
        """Return the float and the quantized hidden states in a list.

        The property may be set to a list of the same length.
        """
        return [*self.hidden, *(self.quantized or ())]

    @states.setter
    def states(self, states: Sequence[Any]) -> None:
        count = len(self.hidden)
        # Float states come first, one per sample, and then the quantized ones in the same order.
        for index, state in enumerate(states):
            hidden = self._hidden(quantized=index >= count)
            hidden[index % count] = state

    def split(self) -> None:
        """Keep quantized hidden states in addition to float ones from now on."""
        if self.quantized is None:
            # Both lists share tensors until a block writes the outputs of one model over its
            # inputs.
            self.quantized = self.hidden.copy()

    def calls(self, name: str, quantized: bool = False) -> list[BlockArguments]:
        """Return the arguments of a block for the samples that reach it.

        Args:
            name: the name of the block.
            quantized: whether to use the hidden states of the quantized model.
        """
        hidden = self._hidden(quantized)
        # Not strict: a block that is skipped has no arguments at all, and thereby no calls.
        return [
            BlockArguments(state, *arguments)
            for state, arguments in zip(hidden, self._arguments[name], strict=False)
        ]

    def _hidden(self, quantized: bool) -> HiddenStates:
        """Return hidden states; before ``split``, the float ones are the quantized ones, too."""
        if quantized and self.quantized is not None:
            return self.quantized
        return self.hidden

    def run(
        self,
        name: str,
        block: nn.Module,
        quantized: bool = False,
        run: Callable[[int, BlockArguments], Any] | None = None,
    ) -> Iterator[int]:
        """Run a block on the samples, and replace inputs by outputs.

        Samples that skip the block are not run.

        Args:
            name: the name of the block.
            block: the module that runs in its place.
            quantized: whether to use the hidden states of the quantized model.
            run: runs the block on a sample with a given index; None calls the block.

        Yields:
            The number of finished samples.
        """
        hidden = self._hidden(quantized)
        for index, arguments in enumerate(self._arguments[name]):
            call = BlockArguments(hidden[index], *arguments)
            # In place of the input, so that no more than one set of hidden states is in memory.
            hidden[index] = call.run(block) if run is None else run(index, call)
            yield index + 1


def _tensors(parts: Any) -> Iterator[Any]:
    """Yield the tensors in nested mappings, lists and tuples."""
    if isinstance(parts, torch.Tensor):
        yield parts
    elif isinstance(parts, Mapping):
        yield from _tensors(list(parts.values()))
    elif isinstance(parts, list | tuple):
        for part in parts:
            yield from _tensors(part)


def moved(batch: Sample, device: torch.device | str) -> Sample:
    """Return a batch on a device.

    Args:
        batch: tensors, in mappings, lists and tuples of any depth. Lists and tuples become lists;
            other values stay.
        device: the device.
    """
    if isinstance(batch, torch.Tensor):
        return batch.to(device)
    if isinstance(batch, Mapping):
        return {key: moved(value, device) for key, value in batch.items()}
    if isinstance(batch, list | tuple):
        return [moved(value, device) for value in batch]
    return batch


class _Recorder:
    """Recorder of the arguments of each block.

    Blocks are skipped: they return their input in the form that the first block returns. Only the
    first block is run once.
    """

    def __init__(self, blocks: Mapping[str, Any], hidden: HiddenStates) -> None:
        self._blocks = blocks
        self._last = list(blocks)[-1]
        # The output of the first block: a tensor, or a tuple whose further parts are passed on by
        # all others.
        self._form: Any = None
        self.hidden = hidden
        self.arguments: dict[str, list[tuple[tuple[Any, ...], dict[str, Any]]]] = {
            name: [] for name in blocks
        }

    def run(self, model: nn.Module, batch: Sample) -> None:
        """Record one batch."""
        before = len(self.hidden)
        self._handed: Any = None
        # One iterator for all stand-ins: each continues where the block that ran before it has
        # stopped.
        names = iter(self._blocks)
        forwards = {
            name: self._standing_in(name, block.forward, names)
            for name, block in self._blocks.items()
        }
        self._call(model, batch, before, forwards)
        for name, calls in self.arguments.items():
            # A block runs on all samples, or on none (blocks that text skips): hidden states are
            # aligned with samples by their index.
            if len(calls) not in (0, before + 1):
                raise NotWalkable(f"{name} is not run on all samples; {_NO_WALK}")
        if not any(self.arguments.values()):
            raise NotWalkable(
                f"the model runs none of its blocks, {next(iter(self._blocks))} and so"
                f" on; {_NO_WALK}",
            )

    def check_once(self, model: nn.Module, batch: Sample) -> None:
        """Raise NotWalkable if a batch returns to a block after the last one."""
        hidden, form = self.hidden[0], self._form
        count = Counter[str]()

        def counting(name: str) -> Any:
            def hand_on(*args: Any, **kwargs: Any) -> Any:
                count[name] += 1
                if count[name] > 1:
                    raise NotWalkable(
                        f"the model runs {name} more than once for a sample;"
                        f" {_NO_WALK}",
                    )
                return in_form(hidden, form)

            return hand_on

        try:
            self._call(model, batch, 0, {name: counting(name) for name in self._blocks})
        except DataError:  # raised after the blocks, where weights may be missing
            if not count[self._last]:
                raise

    def finish(self, model: nn.Module, batch: Sample, index: int) -> None:
        """Run the modules outside of the blocks on a batch with stored states."""
        hidden, form = self.hidden[index], self._form

        def hand_on(*args: Any, **kwargs: Any) -> Any:
            return in_form(hidden, form)

        self._call(model, batch, index, dict.fromkeys(self._blocks, hand_on))

    def _call(
        self,
        model: nn.Module,
        batch: Any,
        sample: int,
        forwards: Mapping[str, Any],
    ) -> None:
        """Run the model with replaced forward methods of its blocks."""
        with contextlib.suppress(_Enough), replaced_forwards(self._blocks, forwards):
            _run_sample(model, batch, sample)

    def _standing_in(self, name: str, forward: Any, names: Iterator[str]) -> Any:
        def stand_in(*args: Any, **kwargs: Any) -> Any:
            hidden, further = _hidden_states(name, args, kwargs)
            _drop_cache(kwargs)
            if name not in names:  # the iterator continues after the name
                raise NotWalkable(
                    f"the model does not run {name} once for a sample, in its turn;"
                    f" {_NO_WALK}",
                )
            self._receive(name, hidden)
            self.arguments[name].append((further, dict(kwargs)))
            if self._lacks_form(name):
                form = forward(hidden.clone(), *further, **kwargs)
                self._form = form if isinstance(form, torch.Tensor) else tuple(form)
            # Logits are never needed: the last norm and the head do not run.
            if name == self._last:
                raise _Enough
            self._handed = hidden
            return in_form(hidden, self._form)

        return stand_in

    def _receive(self, name: str, hidden: torch.Tensor) -> None:
        """Keep the input of the first block, (samples, tokens, features), and check all others.

        Further blocks must get the very tensor of the first one, since any operation between two
        blocks would be lost.
        """
        if self._handed is None:
            self.hidden.append(hidden.detach())
        elif hidden is not self._handed:
            raise NotWalkable(f"something happens in front of {name}; {_NO_WALK}")

    def _lacks_form(self, name: str) -> bool:
        """Return whether a block must run to show the form of its output.

        A single tensor needs one run. A tuple needs one per sample, as further outputs of the first
        block may differ from sample to sample.
        """
        if self._handed is not None:
            return False
        if self._form is None:
            return True
        return not isinstance(self._form, torch.Tensor) and name != self._last


def _drop_cache(kwargs: dict[str, Any]) -> None:
    """Remove an empty cache from the arguments of a block, in place."""
    cache: Any = kwargs.get("past_key_values")
    # An object without get_seq_length is no class of transformers, and may hold anything.
    is_empty = hasattr(cache, "get_seq_length") and not cache.get_seq_length()
    # Keys of earlier tokens change the outputs of a block, and belong to one sample.
    if cache is not None and not is_empty:
        raise NotWalkable(f"the data brings keys and values along; {_NO_WALK}")
    # An empty cache would fill during the recorded calls, which run many times.
    if "past_key_values" in kwargs:
        kwargs["past_key_values"] = None


def _hidden_states(
    name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, tuple[Any, ...]]:
    """Return the hidden states of a block, taken out of ``kwargs``, and further arguments."""
    if args:
        return args[0], args[1:]
    if "hidden_states" not in kwargs:
        raise NotWalkable(
            f"{name} is called with {', '.join(kwargs) or 'nothing'} and no"
            f" hidden states; {_NO_WALK}",
        )
    return kwargs.pop("hidden_states"), ()


def in_form(hidden: Any, form: Any) -> Any:
    """Return hidden states in the form of a block's output: alone, or the first of several."""
    if isinstance(form, torch.Tensor):
        return hidden
    return (hidden, *form[1:])
