"""Checks before a run whether clients refuse the checkpoint that it would write.

The rules of ``quark_onnx.torch.validate`` need the configuration, and names, types and shapes of
tensors. All are known before the weights are read.
"""

from __future__ import annotations

from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path

from quark_onnx.common.containers import grouped_by
from quark_onnx.common.errors import ConfigError
from quark_onnx.common.wording import first_of
from quark_onnx.torch.checkpoints.export import described
from quark_onnx.torch.checkpoints.float_checkpoint import FloatCheckpoint
from quark_onnx.torch.checkpoints.layouts import LAYOUTS, Layout, check_config
from quark_onnx.torch.checkpoints.safetensors_io import read_json
from quark_onnx.torch.checkpoints.safetensors_writer import TYPES
from quark_onnx.torch.config.scheme_clients import SCHEME_CLIENTS
from quark_onnx.torch.config.schemes import groupings
from quark_onnx.torch.config.torch_config import TorchConfig
from quark_onnx.torch.models.checkpoint_names import float_matrices
from quark_onnx.torch.pipelines.block import specs_of
from quark_onnx.torch.pipelines.in_memory import chosen_layers
from quark_onnx.torch.pipelines.written_size import written_tensors
from quark_onnx.torch.runtime.safetensors_header import Header, StoredTensor
from quark_onnx.torch.validate.checkpoint import SINGLE, Checkpoint, read
from quark_onnx.torch.validate.clients import RELEASES, findings_of
from quark_onnx.torch.validate.finding import WARNING, Finding

#: Names of findings in a message.
_SHOWN = 3


@dataclass(frozen=True)
class ClientRefusal:
    """A client that refuses the checkpoint of a run, or would load wrong values from it.

    Attributes:
        release: the client with its release.
        findings: broken rules of one kind, by layer.
        alternatives: options of ``llm ptq`` with which the client breaks no rule, such as
            "--layout awq". Each was tried by the same rules.
    """

    release: str
    findings: tuple[Finding, ...]
    alternatives: tuple[str, ...]

    @property
    def consequence(self) -> str:
        """Refusal or wrong values of the client, and the rule."""
        return self._sentence("it")

    def _sentence(self, what: str) -> str:
        """Return what the client does with a checkpoint, and the rule."""
        first = self.findings[0]
        verb = "refuses" if first.severity != "wrong" else "loads wrong values of"
        return f"{self.release} {verb} {what} (rule {first.rule}: {first.broken.title})"

    def __str__(self) -> str:
        first = self.findings[0]
        names = first_of([finding.place for finding in self.findings], _SHOWN)
        text = self._sentence(
            f"the checkpoint that this writes: {names}: {first.found}"
        )
        if self.alternatives:
            return f"{text}; use {' or '.join(self.alternatives)}"
        return (
            f"{text}; {first.broken.fix}; 'quark-onnx list schemes' names the schemes of"
            " each client"
        )


def refusals(
    source: FloatCheckpoint, config: TorchConfig, layout: Layout
) -> list[ClientRefusal]:
    """Return why the clients of a layout would refuse a checkpoint that is not written yet.

    Rules that the float model breaks by itself are left out.

    Args:
        source: the float model.
        config: the configuration by which it will be quantized.
        layout: the layout of the checkpoint.

    Raises:
        ConfigError: the layout does not support the configuration.
    """
    refused = list[ClientRefusal]()
    for client in _clients(layout):
        findings = _findings(source, config, layout, client)
        # others are tried only where they could help: each plans the whole checkpoint
        if not findings:
            continue
        alternatives = _alternatives(source, config, layout, client)
        # one message for a rule, whatever the number of layers
        for group in grouped_by(findings, attrgetter("rule")).values():
            refused.append(ClientRefusal(RELEASES[client], tuple(group), alternatives))
    return refused


def _alternatives(
    source: FloatCheckpoint, config: TorchConfig, layout: Layout, client: str
) -> tuple[str, ...]:
    """Return options of ``llm ptq`` with which a client breaks no rule.

    Layouts for the same numbers come first, then the greatest group that fits in the same layout;
    where neither helps, a layout with another group.
    """
    layouts = [LAYOUTS[name]() for name in LAYOUTS if name != layout.name]
    layouts = [candidate for candidate in layouts if client in _clients(candidate)]
    regrouped = {
        f"--scheme {name}": config.with_(default=spec)
        for name, spec in groupings(config.default).items()
        if spec != config.default
    }

    def accepted(changed: TorchConfig, candidate: Layout) -> bool:
        return _is_accepted(source, changed, candidate, client)

    options = [
        f"--layout {candidate.name}"
        for candidate in layouts
        if accepted(config, candidate)
    ]
    options += [
        words for words, changed in regrouped.items() if accepted(changed, layout)
    ][:1]
    if options:
        return tuple(options)
    return tuple(
        f"{words} --layout {candidate.name}"
        for candidate in layouts
        for words, changed in regrouped.items()
        if accepted(changed, candidate)
    )[:1]


def _clients(layout: Layout) -> list[str]:
    """Return the clients for which a layout is written.

    vLLM comes first. transformers counts only where vLLM does not read the layout, because the
    schemes of the two differ; onnxruntime-genai's layout is written for that alone.
    """
    if layout.name == "oga":
        return []
    for client in ("vllm", "transformers"):
        # layouts of which vLLM reads no scheme are checked for transformers
        if any(layout.name in row.get(client, ()) for row in SCHEME_CLIENTS.values()):
            return [client]
    return []


def _is_accepted(
    source: FloatCheckpoint, config: TorchConfig, layout: Layout, client: str
) -> bool:
    """Return whether a layout supports a configuration, and a client loads it."""
    try:
        return not _findings(source, config, layout, client)
    except ConfigError:
        return False


def _findings(
    source: FloatCheckpoint, config: TorchConfig, layout: Layout, client: str
) -> list[Finding]:
    """Return the rules of a client that the checkpoint breaks, and the float model does not."""
    # a float model with an odd head, for example, is the user's own
    before = {finding.rule for finding in findings_of(read(source.folder), client)}
    planned = planned_checkpoint(source, config, layout)
    return [
        finding
        for finding in findings_of(planned, client)
        # warnings do not keep a client from loading
        if finding.severity != WARNING and finding.rule not in before
    ]


def planned_checkpoint(
    source: FloatCheckpoint, config: TorchConfig, layout: Layout
) -> Checkpoint:
    """Return configuration and headers of a checkpoint that is not written yet.

    Args:
        source: the float model.
        config: the configuration by which it will be quantized.
        layout: the layout of the checkpoint.

    Raises:
        ConfigError: the layout does not support the configuration.
    """
    check_config(layout, config)
    tensors = dict[str, StoredTensor]()
    for name, tensor in written_tensors(source, config, layout).items():
        type_name, shape = TYPES[tensor.dtype], tuple(tensor.shape)
        tensors[name] = StoredTensor(name, shape, type_name, Path(SINGLE))
    config = layout.adapted(config)
    chosen, _ = chosen_layers(source.model, config, source.reader)
    content = described(
        read_json(source.folder / "config.json"),
        source.model,
        config,
        layout,
        specs_of(chosen),
        float_matrices(tensors),
    )
    # all in one file: no rule depends on how tensors are divided among files
    headers = {SINGLE: Header(tensors, {}, 0)}
    return Checkpoint(source.folder, content, None, headers, ())
