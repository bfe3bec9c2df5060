"""The folder of a float language model."""

from __future__ import annotations

from collections.abc import Iterable
from copy import deepcopy
from pathlib import Path
from typing import TYPE_CHECKING

from quark_onnx.torch.checkpoints.adapter import merge_adapter as merge_adapter_into
from quark_onnx.torch.checkpoints.decoded import DecodedTensor, decoded_reader
from quark_onnx.torch.checkpoints.meta_model import config_of, dtype_of, skeleton_of
from quark_onnx.torch.checkpoints.parameter_sources import (
    Sources,
    compute_unsaved,
    fill_whole,
)
from quark_onnx.torch.checkpoints.recast import narrow_doubles
from quark_onnx.torch.checkpoints.safetensors_io import (
    CheckpointReader,
    check_no_adapter,
    read_json,
)
from quark_onnx.torch.formats.quantized_tensor import Quantized
from quark_onnx.torch.models.heads import heads_of, usually_float
from quark_onnx.torch.runtime.checkpoint_folder import check_links
from quark_onnx.torch.runtime.memory import set_large_apart

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class FloatCheckpoint:
    """Tensors of a float language model, and the model with empty parameters.

    The constructor lets glibc return large arrays as soon as they are freed, in the whole process
    (``set_large_apart``).

    Args:
        folder: Hugging Face folder with safetensors. A checkpoint that is quantized by a method of
            ``decoded.METHODS`` is decoded tensor by tensor.
        trust_code: whether to run Python files of the checkpoint.
        merge_adapter: whether to merge the LoRA adapter in the folder into the weights; without
            it, a folder with an adapter is refused.

    Attributes:
        folder: folder of the checkpoint.
        trust_code: whether to run Python files of the checkpoint.
        reader: reader of the tensors. float64 tensors are read in the dtype of the model.
        decoded: whether the tensors are decoded from a quantized checkpoint.
        merged: whether an adapter is merged into the tensors.

    Raises:
        ConfigError: there is no adapter to merge.
        ModelError: a file is missing or damaged, a link leaves the folder, there is an adapter,
            transformers does not know the model, or the quantization method is not supported.
        MissingDependency: transformers is not installed.
    """

    def __init__(
        self,
        folder: Path | str,
        *,
        trust_code: bool = False,
        merge_adapter: bool = False,
    ) -> None:
        # Before the first large array, since glibc changes its threshold when one is freed.
        set_large_apart()
        self.folder, self.trust_code = Path(folder), trust_code
        self.merged = merge_adapter
        # Before transformers reads files of the folder.
        check_links(self.folder)
        if not merge_adapter:
            check_no_adapter(self.folder)
        content = read_json(self.folder / "config.json")
        self.decoded = content.get("quantization_config") is not None
        self._config = config_of(self.folder, trust_code=trust_code)
        self._model: PreTrainedModel | None = None
        dtype = dtype_of(self._config)
        if self.decoded:
            self.reader = decoded_reader(
                self.folder, dtype, lambda: self.model, adapter=merge_adapter
            )
        else:
            self.reader = CheckpointReader(self.folder, adapter=merge_adapter)
        narrow_doubles(self.reader, dtype, lambda: self.model)
        if merge_adapter:
            merge_adapter_into(self.reader, self.model)

    @classmethod
    def of(
        cls,
        source: FloatCheckpoint | Path | str,
        trust_code: bool = False,
    ) -> FloatCheckpoint:
        """Open a folder; an open checkpoint is returned unchanged."""
        if isinstance(source, FloatCheckpoint):
            return source
        return cls(source, trust_code=trust_code)

    @property
    def model(self) -> PreTrainedModel:
        """The model with empty parameters and unfused experts, for reading only."""
        if self._model is None:
            self._model = self._skeleton()
        return self._model

    def take_model(self) -> PreTrainedModel:
        """Return the model for modification; later calls get a new model."""
        # A modified model serves no other caller.
        model, self._model = self.model, None
        return model

    def load(self) -> PreTrainedModel:
        """Load the whole float model into memory.

        Raises:
            ModelError: a tensor is missing.
        """
        # A model of its own, since others may read the shapes of the empty one.
        model = self._skeleton()
        sources = Sources(self.reader, model)
        # Before ``fill_whole``, which takes stored tensors alone.
        compute_unsaved(model, sources)
        fill_whole(model, sources)
        return model

    def _skeleton(self) -> PreTrainedModel:
        """Return a new model with empty parameters.

        Its configuration is a copy, as rotations untie the head.
        """
        return skeleton_of(deepcopy(self._config), trust_code=self.trust_code)

    def codes_of(self, key: str) -> Quantized | None:
        """Return the integer codes from which a tensor is decoded.

        None if the tensor is stored as float, or has a format of another package.

        Args:
            key: name of the tensor in the reader.
        """
        tensor = self.reader.tensors.get(key)
        if not isinstance(tensor, DecodedTensor) or tensor.codes is None:
            return None
        return tensor.codes()

    @property
    def heads(self) -> tuple[str, ...]:
        """Names of the heads, which stay float unless a user selects them."""
        return heads_of(self.model)

    def usually_float(self, asked: Iterable[str] = ()) -> tuple[str, ...]:
        """Return the names of layers that stay float unless a user selects them.

        They are heads, and layers outside of the language part.

        Args:
            asked: globs of layer names. A glob selects such layers if it matches no other layer.
        """
        return usually_float(self.model, asked)
