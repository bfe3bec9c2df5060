"""judge: compare a quantized checkpoint with its float model on held-out text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from quark_onnx.torch.calibration.block_stream import inference
from quark_onnx.torch.checkpoints.float_checkpoint import FloatCheckpoint
from quark_onnx.torch.checkpoints.load import load_checkpoint
from quark_onnx.torch.checkpoints.safetensors_io import Reader
from quark_onnx.torch.config.torch_config import TorchConfig
from quark_onnx.torch.models.quantized_layer import QuantizedLayer
from quark_onnx.torch.runtime.memory import available, release_memory

#: Windows that a verdict is made on, at most.
HELD_OUT = 8
#: Layers that are named as the worst.
_WORST = 3
#: Weights of a model that writes its own text where there is none; a greater one takes too long.
_WRITES = 300_000_000
#: Windows, and tokens of each, that a model writes.
_WRITTEN, _LENGTH = 4, 64
#: Tokens whose logits are compared at once.
_ROWS = 256
#: Divergence, in nats a token, up to which a loss is small, and up to which it is moderate. The
#: logarithm of perplexity grows by about as much, and has far more noise on a few windows.
_SMALL, _MODERATE = 0.01, 0.05


@dataclass(frozen=True)
class Verdict:
    """How a quantized checkpoint compares with the float model.

    Attributes:
        bytes_before, bytes_after: of all tensors.
        weights: of the float model.
        text: what the models were compared on, in words; empty where they were not.
        tokens: of that text.
        divergence: the mean Kullback-Leibler divergence of the next token's probabilities from
            those of the float model, in nats for each token.
        perplexity_before, perplexity_after: of that text.
        worst: the layers with the greatest errors, and the error of each: the mean square of what
            it computes otherwise on inputs of the float model, as a share of the mean square of
            what the float layer computes.
        skipped: why the models were not compared; empty where they were.
        advice: the next thing to try.
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
    skipped: str = ""
    advice: str = ""

    @property
    def bits(self) -> float:
        """Bits of the checkpoint for each weight of the model."""
        return 8 * self.bytes_after / max(self.weights, 1)

    def sentence(self) -> str:
        """The verdict in one sentence.

        >>> Verdict(8 << 20, 2 << 20, 4 << 20).sentence()
        '8.0 MiB before, 2.0 MiB after: 4.00 bits for each weight'
        """
        sizes = (
            f"{file_size(self.bytes_before)} before, {file_size(self.bytes_after)} after:"
            f" {self.bits:.2f} bits for each weight"
        )
        if self.divergence is None:
            return sizes
        return f"{sizes}; {_loss(self.divergence)}"

    def lines(self) -> list[str]:
        """The verdict, for a person to read."""
        found = [f"verdict: {self.sentence()}"]
        if self.divergence is not None:
            found.append(
                f"  on {self.tokens} tokens {self.text}: perplexity"
                f" {self.perplexity_before:.3f} float, {self.perplexity_after:.3f}"
                " quantized",
            )
        if self.skipped:
            found.append(f"  not compared with the float model: {self.skipped}")
        if self.worst:
            named = ", ".join(
                f"{name} {100 * error:.2g} %" for name, error in self.worst
            )
            found.append(f"  layers with the greatest errors: {named}")
        if self.advice:
            found.append(f"  next: {self.advice}")
        return found


def judge(
    source: FloatCheckpoint,
    checkpoint: Path | str,
    config: TorchConfig,
    windows: Sequence[Any],
    text: str,
) -> Verdict:
    """Compare a quantized checkpoint with its float model.

    Args:
        source: the float model.
        checkpoint: the quantized one.
        config: how it was quantized.
        windows: token ids that calibration has not seen, each of shape (length,). Where there are
            none, a small model writes text itself.
        text: where they come from, in words.
    """
    before, after = source.reader, Reader(Path(checkpoint))
    sizes = (_bytes(before), _bytes(after), _weights(before))
    reason = _reason(sizes, windows)
    if reason:
        advice = "" if windows else "give text with --evaluate TEXT"
        return Verdict(*sizes, skipped=reason, advice=advice)
    try:
        return _compared_models(source, checkpoint, config, windows, text, sizes)
    except (
        Exception
    ) as error:  # the checkpoint is written; a model may not run by itself
        reason = f"{type(error).__name__}: {error}".partition("\n")[0]
        return Verdict(*sizes, skipped=reason)


def _compared_models(  # noqa: PLR0913
    source: FloatCheckpoint,
    checkpoint: Path | str,
    config: TorchConfig,
    windows: Sequence[Any],
    text: str,
    sizes: tuple[int, int, int],
) -> Verdict:
    """Load both models and compare them; arguments as of ``judge``.

    Args:
        sizes: bytes before and after, and the weights of the float model.
    """
    model = source.load()
    if not windows:
        windows, text = _written(model), "that the float model has written"
    if not windows or len(windows[0]) < 2:
        return Verdict(*sizes, skipped="there is no text of two tokens or more")
    quantized = load_checkpoint(checkpoint, trust_code=source.trust_code)
    with inference(model), inference(quantized):
        scores = _scores(model, quantized, windows)
        errors = _errors(model, quantized, windows[0])
    del model, quantized
    release_memory()
    worst = sorted(errors.items(), key=lambda item: -item[1])[:_WORST]
    found = Verdict(
        *sizes,
        text=text,
        tokens=sum(map(len, windows)),
        divergence=scores[0],
        perplexity_before=scores[1],
        perplexity_after=scores[2],
        worst=tuple(worst),
    )
    return replace(found, advice=_advice(found, config, checkpoint))


def split_held_out(windows: Sequence[Any], count: int) -> tuple[list[Any], list[Any]]:
    """Split windows into those to calibrate on and those to judge by.

    Args:
        windows: ``count`` and some more, if the text has them.
        count: to calibrate on. Where the text has no more, the last eighth is held out.

    >>> split_held_out([1, 2, 3], 2), split_held_out([1, 2], 2), split_held_out([1], 1)
    (([1, 2], [3]), ([1], [2]), ([1], []))
    """
    spare = list(windows[count:])
    if not spare and len(windows) > 1:
        count = len(windows) - max(1, min(HELD_OUT, len(windows) // 8))
        spare = list(windows[count:])
    return list(windows[:count]), spare


def _reason(sizes: tuple[int, int, int], windows: Sequence[Any]) -> str:
    """Why models cannot be compared; empty if they can."""
    before, after, weights = sizes
    needed, free = 2 * before + after, available()
    if needed > free:
        return f"the two models need {file_size(needed)} of memory, and {file_size(free)} are free"
    if not windows and weights > _WRITES:
        return "there is no text"
    return ""


def _bytes(reader: Reader) -> int:
    """Bytes of all files of a checkpoint's tensors."""
    files = {tensor.path for tensor in reader.tensors.values()}
    return sum(file.stat().st_size for file in files)


def _weights(reader: Reader) -> int:
    """Numbers in all tensors of a float checkpoint."""
    return sum(torch.Size(tensor.shape).numel() for tensor in reader.tensors.values())


def _written(model: Any) -> list[Any]:
    """Token ids that a model writes at its own probabilities; none if it cannot."""
    if not hasattr(model, "generate"):
        return []
    from transformers import GenerationConfig

    limit = int(getattr(model.config, "max_position_embeddings", 0) or _LENGTH)
    first = getattr(model.config, "bos_token_id", None)
    length = min(_LENGTH, limit)
    start = torch.full((_WRITTEN, 1), first if isinstance(first, int) else 0)
    settings = GenerationConfig(
        do_sample=True,
        top_k=0,
        max_length=length,
        min_length=length,
        pad_token_id=0,
    )
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        found = model.generate(
            start,
            attention_mask=torch.ones_like(start),
            generation_config=settings,
        )
    return list(found[:, :length])


def _scores(model: Any, quantized: Any, windows: Sequence[Any]) -> tuple[float, ...]:
    """Divergence, and perplexities of the float and the quantized model."""
    sums = torch.zeros(3, dtype=torch.float64)
    count = 0
    for window in windows:
        ids = torch.as_tensor(window).long()[None]
        pair = [each(input_ids=ids).logits[0, :-1] for each in (model, quantized)]
        wanted = ids[0, 1:]
        for start in range(0, len(wanted), _ROWS):
            part = slice(start, start + _ROWS)
            before, after = (each[part].double().log_softmax(-1) for each in pair)
            token = wanted[part, None]
            sums[0] += (before.exp() * (before - after)).sum()
            sums[1] -= before.gather(1, token).sum()
            sums[2] -= after.gather(1, token).sum()
        count += len(wanted)
    mean = sums / count
    return float(mean[0]), float(mean[1].exp()), float(mean[2].exp())


def _errors(model: Any, quantized: Any, window: Any) -> dict[str, float]:
    """The relative error of what each quantized layer computes on inputs of the float model."""
    layers = {
        name: module
        for name, module in quantized.named_modules()
        if isinstance(module, QuantizedLayer)
    }
    floats = dict(model.named_modules())
    found = dict[str, float]()
    with _compared(
        {name: floats[name] for name in layers if name in floats}, layers, found
    ):
        model(input_ids=torch.as_tensor(window).long()[None])
    return found


@contextmanager
def _compared(
    floats: Mapping[str, Any],
    layers: Mapping[str, Any],
    found: dict[str, float],
) -> Iterator[None]:
    """While float layers run, run the quantized ones on the same inputs, and keep the errors."""

    def comparing(name: str) -> Any:
        def hook(_: Any, inputs: tuple[Any, ...], output: Any) -> None:
            error = (layers[name](*inputs).double() - output.double()).square().mean()
            found[name] = float(error / output.double().square().mean().clamp(1e-30))

        return hook

    handles = [
        module.register_forward_hook(comparing(name)) for name, module in floats.items()
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _advice(found: Verdict, config: TorchConfig, checkpoint: Path | str) -> str:
    """The next thing to try."""
    assert found.divergence is not None
    if found.divergence <= _SMALL:
        return f"quark-onnx llm validate {checkpoint} --for vllm (or transformers)"
    names = {each.name for each in config.algorithms}
    weight, inputs = config.default.weight, config.default.input
    if inputs is not None and inputs.measured and not names & {"smoothquant"}:
        return (
            "activations have one scale for a tensor; try one for each token: --scheme"
            " ptpc_fp8 or int8_per_channel"
        )
    if weight is not None and weight.dtype.bits <= 4:
        if not names:
            return "--algorithm awq gptq --data TEXT"
        if not names & {"autoround", "distill"}:
            return "--algorithm gptaq autoround, which takes longer"
        if weight.group > 32:
            return "blocks of 32, as int4_wo_32 has"
    worst = " ".join(f"--layer '{name}=ptpc_fp8'" for name, _ in found.worst[:1])
    return f"more bits for the layers with the greatest errors: {worst}"


def _loss(divergence: float) -> str:
    """How much is lost, in words.

    >>> _loss(0.002), _loss(0.2)
    ('next to nothing is lost (divergence 0.0020 nats a token)', 'much is lost (divergence 0.2000 nats a token)')
    """  # noqa: E501
    words = "much is lost"
    if divergence <= _SMALL:
        words = "next to nothing is lost"
    elif divergence <= _MODERATE:
        words = "little is lost"
    return f"{words} (divergence {divergence:.4f} nats a token)"


def file_size(count: int) -> str:
    """Bytes in MiB or GiB, with enough digits to compare two files.

    >>> file_size(5 << 19)
    '2.5 MiB'
    """
    return (
        f"{count / 2**30:.2f} GiB" if count >= 1 << 30 else f"{count / 2**20:.1f} MiB"
    )
