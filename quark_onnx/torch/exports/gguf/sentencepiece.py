"""Reader of sentencepiece's tokenizer.model, without the package sentencepiece.

Fields and field numbers are those of sentencepiece_model.proto.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from quark_onnx.common.errors import ModelError
from quark_onnx.files.model_file import MALFORMED

# TrainerSpec.ModelType; a file without the entry is a unigram model.
_BPE = 2
_FIELD = descriptor_pb2.FieldDescriptorProto
#: Message, field, number, type; a name in place of a type is a repeated or single message.
_FIELDS: tuple[tuple[str, str, int, int | str], ...] = (
    ("Piece", "piece", 1, _FIELD.TYPE_STRING),
    ("Piece", "score", 2, _FIELD.TYPE_FLOAT),
    ("Piece", "type", 3, _FIELD.TYPE_INT32),
    ("Trainer", "model_type", 3, _FIELD.TYPE_INT32),
    ("Normalizer", "add_dummy_prefix", 3, _FIELD.TYPE_BOOL),
    ("Model", "pieces", 1, "Piece"),
    ("Model", "trainer", 2, "Trainer"),
    ("Model", "normalizer", 3, "Normalizer"),
)


class SentencePiece(NamedTuple):
    """Content of the file.

    Attributes:
        pieces: text, score and type of each token; GGUF has sentencepiece's type numbers.
        space: whether a space is prepended to the text.
    """

    pieces: list[tuple[str, float, int]]
    space: bool


def read(path: Path) -> SentencePiece:
    """Read the pieces of a tokenizer.model.

    Raises:
        ModelError: the file is damaged, or the model is not BPE.
    """
    message = _message()()
    try:
        message.ParseFromString(path.read_bytes())
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}") from error
    except MALFORMED as error:
        raise ModelError(
            f"{path} is damaged or no model of sentencepiece: {error}",
        ) from error
    if not message.pieces:
        raise ModelError(
            f"{path} is damaged or no model of sentencepiece: it has no pieces",
        )
    if message.trainer.model_type != _BPE:
        raise ModelError(
            f"{path} is a unigram model of sentencepiece; those of type BPE can be written",
        )
    # 1 is a normal piece, the default of the field.
    pieces = [(piece.piece, piece.score, piece.type or 1) for piece in message.pieces]
    normalizer = message.normalizer
    # The default of the field is true, which this descriptor does not tell.
    return SentencePiece(
        pieces,
        normalizer.add_dummy_prefix
        if normalizer.HasField("add_dummy_prefix")
        else True,
    )


@cache
def _message() -> Any:
    """Return the protobuf class of a model, with the fields of ``_FIELDS`` alone."""
    file = descriptor_pb2.FileDescriptorProto(
        name="quark_onnx/sentencepiece.proto",
        package="quark_onnx.sentencepiece",
    )
    messages: dict[str, Any] = {}
    for owner, name, number, kind in _FIELDS:
        if owner not in messages:
            messages[owner] = file.message_type.add(name=owner)
        field = messages[owner].field.add(
            name=name,
            number=number,
            label=_FIELD.LABEL_OPTIONAL,
        )
        # A text in place of a type names a message.
        if isinstance(kind, str):
            field.type = _FIELD.TYPE_MESSAGE
            field.type_name = f".quark_onnx.sentencepiece.{kind}"
            if name == "pieces":
                field.label = _FIELD.LABEL_REPEATED
        else:
            field.type = kind
    # A pool of its own leaves the default pool of the process unchanged.
    pool = descriptor_pool.DescriptorPool()
    # Releases of protobuf differ in this method.
    if hasattr(pool, "Add"):
        pool.Add(file)
    else:
        pool.AddSerializedFile(file.SerializeToString())
    return message_factory.GetMessageClass(
        pool.FindMessageTypeByName("quark_onnx.sentencepiece.Model"),
    )
