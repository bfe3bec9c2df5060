"""Define the contract of an engine."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from onnx import ModelProto

from calibrators.onnx_runtime.worker import EngineLayer, SessionSettings, Value


class Engine(ABC):
    """A model that is open in an engine.

    An engine is a subclass, registered in ``ENGINES`` under its name, also by a plug-in. Its
    objects live in a process of their own, which imports the class by its module and name: a
    crash ends that process alone.

    Attributes:
        name: name for ``--engine``, in lower case.
        package: module that the engine needs.
        install: command that installs the module.
    """

    name: ClassVar[str]
    package: ClassVar[str]
    install: ClassVar[str]

    @abstractmethod
    def __init__(self, source: str | bytes, settings: SessionSettings) -> None:
        """Open a model.

        Args:
            source: a file, or a serialized model.
            settings: number of threads (0 lets the engine choose), and the provider for engines
                that have several.
        """

    @abstractmethod
    def get_inputs(self) -> list[Value]:
        """Return the inputs of the model."""

    @abstractmethod
    def get_outputs(self) -> list[Value]:
        """Return the outputs of the model."""

    @abstractmethod
    def run(self, names: Sequence[str] | None, feeds: Mapping[str, Any]) -> list[Any]:
        """Compute outputs; several threads may call this at a time.

        Args:
            names: outputs to return; None for all.
            feeds: arrays by input name.
        """

    @abstractmethod
    def layers(self) -> list[EngineLayer]:
        """Return the convolutions, matrix products and recurrent layers as the engine runs them.

        Empty if the engine does not say how it runs them.
        """

    @classmethod
    def remarks(cls, model: ModelProto) -> list[str]:
        """Return what the engine is known to run slowly or wrongly in a quantized model.

        Each remark is a sentence with the command that avoids it.

        Args:
            model: the quantized model; the weights need not be loaded.
        """
        return []
