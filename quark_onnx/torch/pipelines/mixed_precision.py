"""Mixed precision: assign schemes to layers within a budget of bits per weight.

Each group of layers is quantized alone by each scheme. Its sensitivity is the Kullback-Leibler
divergence of the predictions from those of the float model. Divergences of groups are assumed to
add up. The choice starts with the fewest bits, and spends the remaining budget where a bit
reduces the divergence most.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from operator import attrgetter
from typing import Any

import torch
from torch import nn

from calibrators.onnx_runtime.freed_memory import return_freed_memory
from quark_onnx.common.errors import ConfigError, DataError, ModelError
from quark_onnx.common.progress import Progress
from quark_onnx.torch.algorithms.scheduling.stages import stages_of
from quark_onnx.torch.calibration.block_stream import (
    BlockStream,
    batches,
    call,
    inference,
)
from quark_onnx.torch.calibration.observers import ActivationObservers, Scales
from quark_onnx.torch.checkpoints.float_checkpoint import FloatCheckpoint
from quark_onnx.torch.checkpoints.quark_tensors import stored
from quark_onnx.torch.config.schemes import scheme
from quark_onnx.torch.config.spec import LayerSpec
from quark_onnx.torch.config.torch_config import TorchConfig, matches
from quark_onnx.torch.models.experts import UNFUSED, unfuse_experts
from quark_onnx.torch.models.heads import usually_float
from quark_onnx.torch.models.layer_patterns import LayerPatterns, with_layer_names
from quark_onnx.torch.models.names import instances
from quark_onnx.torch.models.quantized_layer import QuantizedLayer
from quark_onnx.torch.models.structure import blocks_of, layers_of, put_modules
from quark_onnx.torch.pipelines.block import layers_in, rounded_weight
from quark_onnx.torch.pipelines.in_memory import chosen_layers
from quark_onnx.torch.pipelines.mixture import Group, Mixture, Option
from quark_onnx.torch.pipelines.ptq import Text, text_windows, tokenizer_of
from quark_onnx.torch.runtime.reductions import total


def mix(  # noqa: PLR0913
    model: nn.Module,
    data: Iterable[Any],
    schemes: Sequence[str],
    bits: float,
    *,
    config: TorchConfig | None = None,
    progress: bool | None = None,
) -> Mixture:
    """Choose a scheme for each group of layers.

    The model is unchanged, except that stacked experts are split into layers.

    Args:
        model: a float language model in memory.
        data: batches of token ids; a few are enough.
        schemes: names of the candidate schemes.
        bits: the maximum of bits per weight of the quantized layers, with scales.
        config: further settings; the default and the types are replaced. Layers that it names keep
            their specs. None leaves heads float, and all modules outside of the language part.
        progress: whether to show a progress bar; None shows it if stderr is a terminal.

    Returns:
        The configuration and the options of all groups.

    Raises:
        ConfigError: a scheme is unknown, or the budget is below the cheapest choice.
        DataError: there is no data.
        ModelError: the model has no list of blocks, or cannot be run block by block.
    """
    # raises for an unknown name before anything is computed
    specs = {name: scheme(name) for name in schemes}
    if not specs:
        raise ConfigError("there are no schemes to choose from")
    config = config or TorchConfig(exclude=usually_float(model))
    # a list: every group and scheme runs on the same samples
    samples = list(batches(data))
    if not samples:
        raise DataError("the data is empty; sensitivities are measured on it")
    unfuse_experts(model)
    # any spec will do: only the choice of layers counts
    wanted = config.with_(default=next(iter(specs.values())), types=())
    chosen, _ = chosen_layers(model, wanted)
    chosen = {
        # layers with a spec of the user's are not part of the budget
        name: entry
        for name, entry in chosen.items()
        if not matches(name, config.named)
    }
    with inference(model):
        groups = _groups(model, chosen, samples)
        measured = _measured(model, chosen, groups, specs, samples, progress)
    picked = spend(measured, bits)
    layers = dict[str, LayerSpec]()
    for group in picked:
        layers |= dict.fromkeys(group.layers, specs[group.chosen.scheme])
    return Mixture(
        config.with_(
            # the default quantizes nothing, so that layers outside of the groups stay float
            default=LayerSpec(),
            types=(),
            layers=(*config.layers, *layers.items()),
        ),
        picked,
    )


def mix_checkpoint(  # noqa: PLR0913
    source: FloatCheckpoint,
    schemes: Sequence[str],
    bits: float,
    text: Text,
    *,
    config: TorchConfig,
    progress: bool | None = None,
) -> Mixture:
    """Run ``mix`` on a checkpoint, with the float model in memory.

    Args:
        source: the checkpoint.
        schemes: names of the candidate schemes.
        bits: the maximum of bits per weight of the quantized layers, with scales.
        text: the text on which sensitivities are measured.
        config: further settings, as in ``mix``.
        progress: whether to show a progress bar; None shows it if stderr is a terminal.

    Returns:
        The configuration and the options of all groups.

    Raises:
        QuarkError: as ``mix``, or the checkpoint or the text cannot be read.
    """
    tokenizer = tokenizer_of(source.folder, source.trust_code)
    windows = text_windows(text, tokenizer, source.model)
    # globs may name parts of the files that the model does not have
    patterns = LayerPatterns(source.model, layers_of(source.model), source.reader)
    config = with_layer_names(config, patterns, source.model)
    model = source.load()
    samples = [window[None] for window in windows]
    try:
        return mix(model, samples, schemes, bits, config=config, progress=progress)
    finally:
        del model
        return_freed_memory()


def _groups(
    model: nn.Module,
    chosen: Mapping[str, tuple[Any, LayerSpec]],
    samples: list[Any],
) -> list[tuple[str, ...]]:
    """Group layers by input tensor; the experts of a block form one group.

    Args:
        chosen: the layers to group, with their specs.
        samples: batches of token ids, of which the first is run.

    Returns:
        Names of the layers of each group, in the order of the blocks. Layers outside of the blocks
        and layers that the sample did not reach are groups of their own at the end.

    Raises:
        ModelError: the model has no list of blocks, or cannot be run block by block.
    """
    blocks = blocks_of(model)
    if not blocks:
        raise ModelError(
            "the model has no list of blocks; mixed precision is for language models",
        )
    # one sample is enough to see which layers read the same tensor
    walk = BlockStream(model, blocks, samples[:1])
    walk.check_once(model)
    experts = [f"{name}." for name in instances(model, UNFUSED)]
    members: dict[Any, list[str]] = {}
    for name, block in blocks.items():
        block_layers = layers_in(chosen, name)
        calls = walk.calls(name)
        if not block_layers or not calls:
            continue
        stages = stages_of(block, block_layers, calls[0])
        groups = list(chain.from_iterable(map(attrgetter("groups"), stages)))
        for index, group in enumerate(groups):
            for layer in group:
                # experts have different inputs, and one scheme in clients
                key = next(filter(layer.startswith, experts), (name, index))
                members.setdefault(key, []).append(layer)
    together = list(map(tuple, members.values()))
    # layers outside of the blocks, and those that the sample did not reach
    grouped = set(chain.from_iterable(together))
    alone = [name for name in chosen if name not in grouped]
    return together + [(name,) for name in alone]


Measured = list[tuple[tuple[str, ...], int, tuple[Option, ...]]]


def _measured(  # noqa: PLR0913
    model: nn.Module,
    chosen: Mapping[str, tuple[Any, LayerSpec]],
    groups: list[tuple[str, ...]],
    specs: Mapping[str, LayerSpec],
    samples: list[Any],
    progress: bool | None,
) -> Measured:
    """Measure the size and the sensitivity of every group with every scheme.

    Args:
        model: the float model; layers are replaced only during a run.
        chosen: the float layers by name.
        groups: names of the layers of each group.
        specs: the candidate schemes by name.
        samples: batches of token ids.
        progress: whether to show a progress bar; None shows it if stderr is a terminal.

    Returns:
        For each group the names of its layers, the number of weights, and an option for each
        scheme, by ascending bits.
    """
    # log probabilities of the float model, once for all groups and schemes
    wanted = [_predicted(call(model, batch)) for batch in samples]
    options: dict[tuple[str, ...], list[Option]] = {names: [] for names in groups}
    with Progress(progress, len(specs) * len(groups), "measuring", "group") as bar:
        for done, (name, spec) in enumerate(specs.items()):
            layers = {layer: (module, spec) for layer, (module, _) in chosen.items()}
            with ActivationObservers(layers) as watching:
                # scales of a scheme are measured in one run for all layers
                for batch in samples if spec.measures else ():
                    call(model, batch)
            scales = watching.scales()
            # one group at a time is quantized, all others are float
            for count, names in enumerate(groups, 1):
                made = {layer: _quantized(layer, layers, scales) for layer in names}
                divergence = _divergence(model, made, samples, wanted)
                options[names].append(Option(name, _bits(made), divergence))
                bar.update(done * len(groups) + count)
    measured: Measured = []
    for names, of_group in options.items():
        # weights alone, as the budget is in bits per weight
        weights = sum(chosen[layer][0].weight.numel() for layer in names)
        measured.append((names, weights, tuple(sorted(of_group, key=_size))))
    return measured


def _quantized(
    name: str,
    layers: Mapping[str, tuple[Any, LayerSpec]],
    scales: Scales,
) -> QuantizedLayer:
    """Return a quantized layer; weight-only for layers without calibration.

    Args:
        layers: float layers by name, with their specs.
        scales: calibrated scales of the layers.
    """
    module, spec = layers[name]
    is_reached = name in scales.inputs or name in scales.outputs
    if spec.measures and not is_reached:
        # as in a run: without a scale the activations stay float
        spec = LayerSpec(spec.weight)
    return QuantizedLayer(module, rounded_weight(name, layers), spec, **scales.of(name))


def _size(option: Option) -> tuple[int, float]:
    """Return the sort key of an option: bits, then divergence."""
    return option.bits, option.divergence


def _bits(layers: Mapping[str, QuantizedLayer]) -> int:
    """Return the bits of weights and their scales in a checkpoint."""
    tensors = list[Any]()
    for layer in layers.values():
        if layer.quantized is None:
            # the weight stays float, with its size in the model's dtype
            tensors.append(layer.weight)
        else:
            tensors += stored(layer.quantized).values()
    return sum(8 * tensor.nbytes for tensor in tensors)


def _predicted(result: Any) -> Any:
    """Return the log probabilities in float32, (samples, tokens, vocabulary)."""
    # models of transformers return an object, others the logits themselves
    logits = getattr(result, "logits", result)
    # float32: bfloat16 has 8 bits of precision, less than the divergences of single groups need
    return torch.log_softmax(logits.float(), -1)


def _divergence(
    model: nn.Module,
    layers: Mapping[str, Any],
    samples: list[Any],
    wanted: list[Any],
) -> float:
    """Return the mean Kullback-Leibler divergence over all tokens, in nats.

    Args:
        model: the float model; it is unchanged afterwards.
        layers: quantized layers by name, which replace the float layers during the runs.
        samples: batches of token ids.
        wanted: log probabilities of the float model on each batch.
    """
    own = {name: model.get_submodule(name) for name in layers}
    put_modules(model, layers)
    try:
        divergence, count = 0.0, 0
        for batch, before in zip(samples, wanted, strict=True):
            after = _predicted(call(model, batch))
            # KL(float || quantized), as in ``verdict``
            divergence += float(total(before.exp() * (before - after)))
            # tokens of the batch: (samples, tokens, vocabulary) without the last axis
            count += before[..., 0].numel()
    finally:
        put_modules(model, own)
    return divergence / count


def spend(measured: Measured, bits: float) -> tuple[Group, ...]:
    """Choose options greedily within the budget.

    The search starts with the fewest bits. Each step takes the largest decrease of divergence per
    bit.

    Args:
        measured: the groups: names of layers, number of weights, and options by ascending bits.
        bits: the maximum of bits per weight over all groups, with scales.

    Returns:
        The groups in the given order, each with its chosen option.

    Raises:
        ConfigError: the budget is below the cheapest choice.
    """
    count = sum(weights for _, weights, _ in measured)
    budget = bits * count
    # on the convex hull, greedy steps by gain per bit are optimal for every budget that they
    # exhaust
    ways = [_hull(options) for _, _, options in measured]
    choices = [0] * len(ways)
    spent = sum(way[0].bits for way in ways)
    # every group has its cheapest option by now
    if spent > budget:
        raise ConfigError(
            f"a budget of {bits} bits is too small: the schemes need"
            f" {spent / count:.3f} at least",
        )
    while steps := _steps(ways, choices, budget - spent):
        # ties go to the first group, so that results do not depend on anything else
        _, index, cost = max(steps)
        # the index is negative, see ``_steps``
        choices[-index] += 1
        spent += cost
    groups = list[Group]()
    for (names, weights, options), way, chosen in zip(
        measured, ways, choices, strict=True
    ):
        groups.append(Group(names, weights, options, way[chosen]))
    return tuple(groups)


def _steps(
    ways: Sequence[Sequence[Option]],
    choices: Sequence[int],
    left: float,
) -> list[tuple[float, int, int]]:
    """Return the affordable steps to the next option of a group.

    Args:
        ways: options of each group by ascending bits.
        choices: index of the option that each group has now.
        left: bits that are left.

    Returns:
        For each step the decrease of divergence per bit, the negative index of its group (so that
        the first group has the greatest), and the additional bits.
    """
    steps = []
    for index, (way, chosen) in enumerate(zip(ways, choices, strict=True)):
        if chosen + 1 < len(way):
            now, following = way[chosen], way[chosen + 1]
            cost = following.bits - now.bits
            # later steps of a group wait for this one: gains on the hull decrease
            if cost <= left:
                gain = now.divergence - following.divergence
                steps.append((gain / cost, -index, cost))
    return steps


def _hull(options: Sequence[Option]) -> list[Option]:
    """Return the lower convex hull of options, by ascending bits.

    Args:
        options: options of a group by ascending bits, then divergence.

    Returns:
        Options with falling divergence, in which the decrease per bit falls, too.
    """
    hull: list[Option] = []
    for option in options:
        # more bits without a gain
        if hull and option.divergence >= hull[-1].divergence:
            continue
        if hull and option.bits == hull[-1].bits:
            hull.pop()
        while len(hull) > 1 and _slope(hull[-2], option) >= _slope(
            hull[-2],
            hull[-1],
        ):
            hull.pop()
        hull.append(option)
    return hull


def _slope(one: Option, other: Option) -> float:
    """Return the decrease of divergence per bit from one option to another."""
    return (one.divergence - other.divergence) / (other.bits - one.bits)
