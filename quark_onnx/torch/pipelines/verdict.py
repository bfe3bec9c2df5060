"""judge: compare a quantized checkpoint with its float model on held-out text."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from math import isfinite, prod
from pathlib import Path
from typing import Any

import torch
from torch import nn

from calibrators.onnx_runtime.freed_memory import return_freed_memory
from quark_onnx.common.progress import Progress
from quark_onnx.dtypes import Integer
from quark_onnx.page.blocks import Action, Block, Facts, Judgement
from quark_onnx.page.reported import Reported
from quark_onnx.report.figures import near_limits
from quark_onnx.report.verdict.verdict import THRESHOLDS
from quark_onnx.torch.calibration.block_stream import inference
from quark_onnx.torch.calibration.text import sampled
from quark_onnx.torch.checkpoints.float_checkpoint import FloatCheckpoint
from quark_onnx.torch.checkpoints.layouts import Layout, read_layout
from quark_onnx.torch.checkpoints.layouts.oga import OgaLayout
from quark_onnx.torch.checkpoints.load import load_checkpoint
from quark_onnx.torch.checkpoints.safetensors_io import (
    CheckpointReader,
    read_json,
    size_of_files,
)
from quark_onnx.torch.config.algorithm_order import at_stage
from quark_onnx.torch.config.schemes import SCHEMES
from quark_onnx.torch.config.spec import LayerSpec
from quark_onnx.torch.config.torch_config import TorchConfig
from quark_onnx.torch.formats.quantized_tensor import is_finite
from quark_onnx.torch.models.fused_groups import experts_of, fused_group_of
from quark_onnx.torch.models.names import instances
from quark_onnx.torch.models.quantized_layer import QuantizedLayer
from quark_onnx.torch.runtime.memory import available
from quark_onnx.torch.runtime.reductions import total
from quark_onnx.torch.validate.checkpoint import read

#: Maximum number of held-out windows.
HELD_OUT = 8
#: Number of layers reported with the greatest errors.
_WORST = 3
#: Maximum size of a model that generates the text if there is none; larger models are too slow.
_WRITES = 300_000_000
#: Number of generated windows, and their length in tokens.
_WRITTEN, _LENGTH = 4, 64
#: Beginnings of the names of the tensors of a quantized weight, in all layouts.
#: Scales of inputs and outputs are no part of the weights.
_OF_WEIGHTS = ("weight", "qweight", "qzeros", "scales", "g_idx")
#: Tokens whose logits are compared at once.
_ROWS = 256
#: Divergence, in nats a token, up to which a loss is small, and up to which it is moderate. The
#: logarithm of perplexity grows by about as much, and has far more noise on a few windows.
SMALL = 0.01
_MODERATE = 0.05
#: Scheme of 8 bits that needs no data, for layers and models that lose much.
_EIGHT_BITS = "ptpc_fp8"


@dataclass(frozen=True, repr=False)
class CheckpointVerdict(Reported):
    """Comparison of a quantized checkpoint with the float model.

    Attributes:
        bytes_before: size of all float tensors.
        bytes_after: size of all tensors of the checkpoint.
        weights: number of weights of the float model.
        text: description of the held-out text; empty if the models were not compared.
        tokens: number of tokens of the text.
        divergence: the mean Kullback-Leibler divergence of the next token's probabilities from
            those of the float model, in nats per token.
        perplexity_before: perplexity of the float model on the text.
        perplexity_after: perplexity of the checkpoint on the text.
        worst: the layers with the greatest errors, and their relative errors: the mean square of
            the output error on inputs of the float model, divided by the mean square of the float
            output. Empty if an algorithm rewrote the inputs of layers.
        rewritten_by: names of the algorithms that rewrote the inputs of layers, so that layers
            cannot be compared one by one.
        skipped: the reason why the models were not compared; empty if they were.
        advice: the change to try, in words.
        options: options of ``llm ptq`` that make the change; empty for none.
        command: the complete command line, which the command line fills in; else empty.
        refused: what the client of the checkpoint does with it by its rules, if that is known
            before the run; empty for nothing. The verdict is then poor, whatever the divergence.
        quantized_bits: bits per weight of the quantized layers, with their scales and zero points;
            None if unknown.
    """

    bytes_before: int
    bytes_after: int
    weights: int
    text: str = ""
    tokens: int = 0
    divergence: float | None = None
    perplexity_before: float | None = None
    perplexity_after: float | None = None
    worst: tuple[tuple[str, float], ...] = ()
    rewritten_by: tuple[str, ...] = ()
    skipped: str = ""
    advice: str = ""
    options: str = ""
    command: str = ""
    refused: str = ""
    quantized_bits: float | None = None

    @property
    def bits(self) -> float:
        """Return the bits of the checkpoint per weight of the model."""
        return 8 * self.bytes_after / max(self.weights, 1)

    @property
    def bits_text(self) -> str:
        """The bits per weight, over all layers and over the quantized layers."""
        text = f"{self.bits:.2f} bits per weight of all layers"
        if self.quantized_bits is not None:
            text = f"{text}, {self.quantized_bits:.2f} of the quantized layers"
        return text

    def sentence(self) -> str:
        """Return the verdict in one sentence.

        >>> CheckpointVerdict(8 << 20, 2 << 20, 4 << 20).sentence()
        '8.0 MiB before, 2.0 MiB after: 4.00 bits per weight of all layers'
        """
        sizes = (
            f"{file_size(self.bytes_before)} before, {file_size(self.bytes_after)} after:"
            f" {self.bits_text}"
        )
        parts = [sizes]
        if self.divergence is not None:
            parts.append(loss_text(self.divergence))
        # last, as the reason of the band
        if self.refused:
            parts.append(self.refused)
        return "; ".join(parts)

    @property
    def band(self) -> str:
        """The band of the divergence; "poor" for a checkpoint that its client refuses.

        The band is "unknown" if the models were not compared.
        """
        if self.refused:
            return "poor"
        if self.divergence is None:
            return "unknown"
        return THRESHOLDS["language"][0].band(self.divergence)

    def facts(self) -> list[tuple[str, str, str]]:
        """Return sizes and the divergence as facts."""
        # No division by 0 for a model without weights.
        share = 100 * self.bytes_after / max(self.bytes_before, 1)
        before = f"{share:.0f} % of {file_size(self.bytes_before)}"
        rows = [
            ("Size", file_size(self.bytes_after), before),
            ("Bits per weight", f"{self.bits:.2f}", "of all layers"),
        ]
        if self.quantized_bits is not None:
            bits = f"{self.quantized_bits:.2f}"
            rows.append(("Bits per weight", bits, "of the quantized layers"))
        if self.divergence is not None:
            tokens = f"nats a token, on {self.tokens:,} tokens {self.text}"
            rows.append(("Divergence", f"{self.divergence:.4f}", tokens))
        return rows

    def judgement(self) -> Judgement:
        """Return the verdict with what explains it, and the change to try."""
        measured_on, details = "", list[str]()
        if self.divergence is not None:
            measured_on = f"{self.tokens} tokens {self.text}"
        if self.perplexity_before is not None:
            measured_on += (
                f": perplexity {self.perplexity_before:.3f} float,"
                f" {self.perplexity_after:.3f} quantized"
            )
        if self.skipped:
            details.append(f"not compared with the float model: {self.skipped}")
        if self.worst:
            named = ", ".join(
                f"{name} {100 * error:.2g} %" for name, error in self.worst
            )
            details.append(f"layers with the greatest errors: {named}")
        if self.rewritten_by:
            names = " and ".join(self.rewritten_by)
            details.append(
                f"layers are not compared one by one: {names} changed their inputs"
            )
        # The command line holds the options, where it is known.
        action = Action(self.advice, self.command or self.options)
        actions = (action,) if self.advice else ()
        return Judgement(
            self.band, self.sentence(), actions, measured_on, tuple(details)
        )

    def blocks(self) -> list[Block]:
        """Return the verdict and the sizes as blocks."""
        return [self.judgement(), Facts(self.facts())]

    def to_dict(self) -> dict[str, Any]:
        """Return the verdict as plain values."""
        return {
            "sentence": self.sentence(),
            "bytes": {"before": self.bytes_before, "after": self.bytes_after},
            "bits": self.bits,
            "quantized_bits": self.quantized_bits,
            "text": self.text,
            "tokens": self.tokens,
            "divergence": self.divergence,
            "perplexity": {
                "before": self.perplexity_before,
                "after": self.perplexity_after,
            },
            "worst": [{"layer": name, "error": error} for name, error in self.worst],
            "skipped": self.skipped,
            "refused": self.refused,
            "advice": self.advice,
            "options": self.options,
            "command": self.command,
        }


def judge(  # noqa: PLR0913
    source: FloatCheckpoint,
    checkpoint: Path | str,
    config: TorchConfig,
    windows: Sequence[Any],
    text: str,
    progress: bool | None = False,
    layout: Layout | None = None,
) -> CheckpointVerdict:
    """Compare a quantized checkpoint with its float model.

    Args:
        source: the float model.
        checkpoint: the quantized checkpoint.
        config: the quantization configuration.
        windows: held-out token ids, each of shape (length,). If there are none, a small model
            generates the text.
        text: the origin of the windows, in words.
        progress: whether to show progress.
        layout: the layout in which the checkpoint was written, for the advice; that of its
            config.json if None, which is the same for the layouts quark and oga.

    Returns:
        The verdict. It has the reason in ``skipped`` if the models cannot be compared.
    """
    before, after = source.reader, CheckpointReader(Path(checkpoint))
    sizes = CheckpointVerdict(
        size_of_files(before),
        size_of_files(after),
        weights_of(before),
        quantized_bits=_quantized_bits(source, Path(checkpoint)),
    )
    reason = _reason(sizes, windows)
    if reason:
        advice = "" if windows else "give text with --evaluate TEXT"
        return replace(sizes, skipped=reason, advice=advice)
    try:
        return _compared_models(
            source, checkpoint, config, windows, text, sizes, progress, layout
        )
    # the checkpoint is written; a model may not run by itself
    except Exception as error:
        # the first line: errors of torch and transformers have pages of hints
        reason = f"{type(error).__name__}: {error}".partition("\n")[0]
        return replace(sizes, skipped=reason)


def _compared_models(  # noqa: PLR0913
    source: FloatCheckpoint,
    checkpoint: Path | str,
    config: TorchConfig,
    windows: Sequence[Any],
    text: str,
    sizes: CheckpointVerdict,
    progress: bool | None,
    layout: Layout | None,
) -> CheckpointVerdict:
    """Load and compare both models, as ``judge`` does.

    Args:
        windows: held-out token ids.
        text: the origin of the windows, in words.
        sizes: the verdict without the comparison.
        progress: whether to show progress.
        layout: the layout of the checkpoint; that of its config.json if None.
    """
    model = source.load()
    # reported by name, where generation and logits would only show NaN
    for name, parameter in model.named_parameters():
        if not is_finite(parameter):
            reason = (
                f"{name} of the float model holds numbers that are infinite or none"
            )
            return replace(sizes, skipped=reason)
    if not windows:
        # a language model is its own source of plausible text
        windows, text = _written(model), "that the float model has written"
    if not windows or len(windows[0]) < 2:
        return replace(sizes, skipped="there is no text of two tokens or more")
    # not before the text exists: generating needs memory, too
    quantized = load_checkpoint(checkpoint, trust_code=source.trust_code)
    # a layer of a rotated or rescaled model reads other values than that of the float model
    rewritten_by = tuple(
        algorithm.name for algorithm in at_stage(config.algorithms, "model", "block")
    )
    errors = dict[str, float]()
    with inference(model), inference(quantized):
        scores = _scores(model, quantized, windows, progress)
        if not rewritten_by:
            errors = _errors(model, quantized, windows[0])
    specs = {
        name: layer.spec for name, layer in instances(quantized, QuantizedLayer).items()
    }
    # an evaluation that follows loads the models again, one after the other
    dtype = next(model.parameters()).dtype
    del model, quantized
    return_freed_memory()
    if not isfinite(scores[1]):
        tokens = sum(map(len, windows))
        reason = f"the float model overflows in {dtype} on {tokens} tokens {text}"
        return replace(sizes, skipped=reason)
    # the sort is stable: equal errors keep the order of the model
    worst = sorted(errors.items(), key=lambda item: -item[1])[:_WORST]
    verdict = replace(
        sizes,
        text=text,
        tokens=sum(map(len, windows)),
        divergence=scores[0],
        perplexity_before=scores[1],
        perplexity_after=scores[2],
        worst=tuple(worst),
        rewritten_by=rewritten_by,
    )
    advice, options = _advice(verdict, config, specs, layout or _layout(checkpoint))
    return replace(verdict, advice=advice, options=options)


def _layout(checkpoint: Path | str) -> Layout:
    """Return the layout of a quantized checkpoint."""
    content = read_json(Path(checkpoint) / "config.json")
    return read_layout(content["quantization_config"])[1]


def split_held_out(windows: Sequence[Any], count: int) -> tuple[list[Any], list[Any]]:
    """Split windows into calibration windows and held-out windows.

    Args:
        windows: ``count`` windows, and more if the text is long enough.
        count: the number of calibration windows. If there are no more windows, the last eighth is
            held out.

    >>> split_held_out([1, 2, 3], 2), split_held_out([1, 2], 2), split_held_out([1], 1)
    (([1, 2], [3]), ([1], [2]), ([1], []))
    """
    # the text is long enough: calibration keeps all of its windows
    spare = list(windows[count:])
    if not spare and len(windows) > 1:
        count = len(windows) - max(1, min(HELD_OUT, len(windows) // 8))
        spare = list(windows[count:])
    return list(windows[:count]), spare


def _reason(sizes: CheckpointVerdict, windows: Sequence[Any]) -> str:
    """Return why models cannot be compared; empty if they can."""
    # the quantized model counts as floats and codes, since its layers dequantize their weights
    needed, free = 2 * sizes.bytes_before + sizes.bytes_after, available()
    if needed > free:
        return f"the two models need {file_size(needed)} of memory, and {file_size(free)} are free"
    # token by token, a large model takes minutes on a CPU
    if not windows and sizes.weights > _WRITES:
        return "there is no text"
    return ""


def weights_of(reader: CheckpointReader) -> int:
    """Return the number of elements of all tensors of a float checkpoint."""
    return sum(torch.Size(tensor.shape).numel() for tensor in reader.tensors.values())


def _quantized_bits(source: FloatCheckpoint, checkpoint: Path) -> float | None:
    """Return the stored bits per weight of the quantized layers; None without such layers.

    Scales and zero points count, biases do not. Layers with other names in the checkpoint, as
    experts may have, are left out.

    Args:
        source: the float model. Of a quantized source, the decoded tensors count.
        checkpoint: folder of the quantized checkpoint.
    """
    # a tied head has no tensor of its own in the float files
    parameters = dict(source.model.named_parameters(remove_duplicate=False))
    size = weights = 0
    for name, module in read(checkpoint).modules.items():
        key = f"{name}.weight"
        before = source.reader.tensors.get(key, parameters.get(key))
        if before is None or not module.is_quantized:
            continue
        # values of the float weight: packed shapes do not tell how many there are
        weights += prod(before.shape)
        for end, tensor in module.tensors.items():
            if end.startswith(_OF_WEIGHTS):
                size += tensor.size
    return 8 * size / weights if weights else None


def _written(model: Any) -> list[Any]:
    """Sample token ids from a model; return an empty list if it cannot generate.

    Args:
        model: a model of transformers.

    Returns:
        ``_WRITTEN`` vectors of token ids, the same at each call; their length is ``_LENGTH``,
        or the model's number of positions if that is less.
    """
    if not hasattr(model, "generate"):
        return []
    # tiny test models have fewer positions than 64
    limit = int(getattr(model.config, "max_position_embeddings", 0) or _LENGTH)
    first_token = getattr(model.config, "bos_token_id", None)
    length = min(_LENGTH, limit)
    # 0 where the tokenizer has no first token
    start = torch.full(
        (_WRITTEN, 1), first_token if isinstance(first_token, int) else 0
    )
    # a fixed seed for the same text in every run, and the caller's generator stays as it is
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return list(sampled(model, start, length))


def _scores(
    model: Any, quantized: Any, windows: Sequence[Any], progress: bool | None
) -> tuple[float, ...]:
    """Return the divergence and the perplexities of both models.

    Args:
        windows: vectors of token ids.
        progress: whether to show a progress bar; None shows it if stderr is a terminal.

    Returns:
        The mean Kullback-Leibler divergence in nats per token, the perplexity of the float model,
        and that of the quantized model.
    """
    # sum of divergences, and of the negative log likelihoods of both models
    sums = torch.zeros(3, dtype=torch.float64)
    count = 0
    with Progress(progress, len(windows), "comparing models", "window") as bar:
        for done, window in enumerate(windows, 1):
            ids = torch.as_tensor(window).long()[None]
            # (tokens - 1, vocabulary): the last token has no successor to predict
            logits = [
                compared(input_ids=ids).logits[0, :-1]
                for compared in (model, quantized)
            ]
            wanted = ids[0, 1:]
            for start in range(0, len(wanted), _ROWS):
                rows = slice(start, start + _ROWS)
                # in parts, as float64 logits of a window take gigabytes with a large vocabulary
                before, after = (
                    values[rows].double().log_softmax(-1) for values in logits
                )
                token = wanted[rows, None]
                # KL(float || quantized) = sum of p (log p - log q)
                sums[0] += total(before.exp() * (before - after))
                sums[1] -= before.gather(1, token).sum()
                sums[2] -= after.gather(1, token).sum()
            count += len(wanted)
            bar.update(done)
    mean = sums / count
    # perplexity is the exponential of the mean negative log likelihood
    return float(mean[0]), float(mean[1].exp()), float(mean[2].exp())


def _errors(
    model: nn.Module, quantized: nn.Module, window: torch.Tensor
) -> dict[str, float]:
    """Return the relative output error of each quantized layer on float inputs.

    Args:
        window: a vector of token ids.

    Returns:
        The energy of the error by that of the float output, by layer name. Layers without a
        counterpart of the same name, or that the window does not reach, are missing.
    """
    floats = dict(model.named_modules())
    # names are equal, except for experts, which a checkpoint may split
    pairs = dict[str, tuple[nn.Module, QuantizedLayer]]()
    for name, module in quantized.named_modules():
        if isinstance(module, QuantizedLayer) and name in floats:
            pairs[name] = floats[name], module
    errors = dict[str, float]()
    with _compared(pairs, errors):
        model(input_ids=torch.as_tensor(window).long()[None])
    return errors


@contextmanager
def _compared(
    pairs: Mapping[str, tuple[nn.Module, QuantizedLayer]],
    errors: dict[str, float],
) -> Iterator[None]:
    """Run quantized layers on the inputs of the float layers, and record the errors.

    Args:
        pairs: float and quantized layers by name.
        errors: receives the relative errors by name.
    """

    def comparing(name: str, quantized: QuantizedLayer) -> Any:
        def hook(_: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
            exact = output.double()
            error = total((quantized(*inputs).double() - exact).square())
            # an output of zeros would divide by 0
            power = total(exact.square()).clamp(1e-30 * exact.numel())
            errors[name] = float(error / power)

        return hook

    with ExitStack() as stack:
        for name, (layer, quantized) in pairs.items():
            hook = comparing(name, quantized)
            stack.enter_context(layer.register_forward_hook(hook))
        yield


def _advice(
    verdict: CheckpointVerdict,
    config: TorchConfig,
    specs: Mapping[str, LayerSpec],
    layout: Layout,
) -> tuple[str, str]:
    """Return the change to try in words, and the options of ``llm ptq`` that make it.

    Args:
        verdict: the verdict, with a divergence.
        config: the quantization configuration.
        specs: how the layers of the checkpoint are quantized, by name.
        layout: the layout of the checkpoint, which the next run writes, too.

    Returns:
        The text, and the options, which may be empty.
    """
    assert verdict.divergence is not None
    # nothing to improve: the next step is to use the checkpoint
    if verdict.divergence <= SMALL:
        return "check that the runtime reads the checkpoint, with llm validate", ""
    advice = _activation_advice(config, layout) or _weight_advice(config)
    if advice is not None:
        return advice
    # no layer where an algorithm has rewritten the inputs, and none that may differ in this layout
    if not verdict.worst or layout.name == OgaLayout.name:
        return "more bits for all weights or a layer", ""
    return _layer_advice(verdict.worst[0][0], specs, layout)


def _layer_advice(
    worst: str, specs: Mapping[str, LayerSpec], layout: Layout
) -> tuple[str, str]:
    """Return the change for the layer with the greatest error.

    Args:
        worst: name of the layer.
        specs: how the layers of the checkpoint are quantized, by name.

    Returns:
        The text, and the options, which name all layers that runtimes fuse with the layer: these
        need a common scheme.
    """
    names = [f"{experts_of(worst)}.*"]
    if not experts_of(worst):
        names = fused_group_of(worst, specs)
    weight = specs[worst].weight
    more_bits = SCHEMES[_EIGHT_BITS]
    # a float layer is all that has more bits, and the layout may have nothing between
    if (weight is not None and weight.dtype.bits >= 8) or layout.refusal(more_bits):
        options = [f"--exclude {shlex.quote(name)}" for name in names]
        return "the layer with the greatest error in float", " ".join(options)
    options = [f"--layer {shlex.quote(f'{name}={_EIGHT_BITS}')}" for name in names]
    return "more bits for the layer with the greatest error", " ".join(options)


def _activation_advice(config: TorchConfig, layout: Layout) -> tuple[str, str] | None:
    """Return the change for activations with a calibrated per-tensor scale, or None.

    Returns:
        The text, and the options of ``llm ptq``; None for dynamic or float activations, and with
        SmoothQuant.
    """
    inputs = config.default.input
    is_smooth = "smoothquant" in [algorithm.name for algorithm in config.algorithms]
    # SmoothQuant has moved the outliers into the weights already
    if inputs is None or not inputs.measured or is_smooth:
        return None
    scheme = _EIGHT_BITS
    if isinstance(inputs.dtype, Integer):
        scheme = "int8_per_channel"
    if layout.refusal(SCHEMES[scheme]):
        return None
    return (
        "one activation scale for each token, not each tensor",
        f"--scheme {scheme}",
    )


def _weight_advice(config: TorchConfig) -> tuple[str, str] | None:
    """Return the change for weights of up to 4 bits, or None.

    Returns:
        The text, and the options of ``llm ptq``, which may be empty. None for
        float weights, for weights of more than 4 bits, and if the rounding is learned already and
        groups have at most 32 weights.
    """
    weight = config.default.weight
    names = {algorithm.name for algorithm in config.algorithms}
    # weights of 6 or 8 bits lose little; the loss has another cause
    if weight is None or weight.dtype.bits > 4:
        return None
    if not names:
        return "learn scales and rounding from data", "--algorithm awq gptq"
    # the next more expensive algorithm
    if not names & {"autoround", "distill"}:
        return (
            "learn the rounding, which takes longer",
            "--algorithm gptaq autoround",
        )
    if weight.group <= 32:
        return None
    smaller = f"{weight.dtype.name}_wo_32"
    options = f"--scheme {smaller}" if smaller in SCHEMES else ""
    return "a scale for each block of 32 weights", options


def loss_text(divergence: float) -> str:
    """Describe the size of a divergence in words.

    >>> loss_text(0.002), loss_text(0.2)
    ('next to nothing is lost (divergence 0.0020 nats a token)', 'much is lost (divergence 0.2000 nats a token)')
    >>> loss_text(0.01004)
    'little is lost (divergence 0.01004 nats a token)'
    """  # noqa: E501
    if not isfinite(divergence):
        return "the checkpoint overflows, and predicts nothing"
    words = "much is lost"
    if divergence <= SMALL:
        words = "next to nothing is lost"
    elif divergence <= _MODERATE:
        words = "little is lost"
    shown = near_limits(divergence, (SMALL, _MODERATE), 4)
    return f"{words} (divergence {shown} nats a token)"


def file_size(count: int) -> str:
    """Format a size in MiB or GiB, with enough digits to compare two files.

    >>> file_size(5 << 19)
    '2.5 MiB'
    """
    if count >= 1 << 30:
        return f"{count / 2**30:.2f} GiB"
    return f"{count / 2**20:.1f} MiB"
