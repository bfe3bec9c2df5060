"""Dumps of a model's tensors, for comparison with a device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from onnx import ModelProto, ValueInfoProto

from quark_onnx.common.errors import ConfigError, DataError
from quark_onnx.files.io import load
from quark_onnx.onnx.calibration.data_readers import RandomDataReader
from quark_onnx.running.run import run


def dump_model(
    model_input: str | Path | ModelProto,
    dump_data_reader: Any = None,
    random_data_reader_input_shape: Mapping[str, Sequence[int]] | None = None,
    dump_float: bool = False,
    output_dir: str | Path = "./dump_results",
) -> None:
    """Write the results of all nodes on one sample.

    Integers, such as the codes of QuantizeLinear, go to ``TENSOR.bin`` (raw) and ``TENSOR.txt``;
    floats to ``TENSOR_float.bin`` and ``TENSOR_float.txt``.

    Args:
        model_input: path of a model, or a ModelProto.
        dump_data_reader: reader, whose next sample is used; a random sample if None.
        random_data_reader_input_shape: shapes of the random sample by input.
        dump_float: write floats, too.
        output_dir: the folder.

    Raises:
        ConfigError: the model has no quantized tensors and ``dump_float`` is False, or two tensors
            have the same file name.
        DataError: the reader has no sample.
    """
    model = load(model_input)
    quantized = any(node.op_type == "QuantizeLinear" for node in model.graph.node)
    if not quantized and not dump_float:
        raise ConfigError(
            "the model has no QuantizeLinear, so that there are no codes to write; set"
            " dump_float=True for the floats"
        )
    reader = dump_data_reader or RandomDataReader(model, random_data_reader_input_shape)
    sample = reader.get_next()
    if sample is None:
        raise DataError("dump_data_reader has no sample; rewind it")
    names = [name for node in model.graph.node for name in node.output if name]
    files = {name.replace("/", "_"): name for name in names}
    if len(files) != len(names):
        lost = sorted(set(names) - set(files.values()))
        raise ConfigError(
            f"two tensors are written to the file of {lost[0]!r}; rename one"
        )
    observed = ModelProto()
    observed.CopyFrom(model)
    del observed.graph.output[:]
    observed.graph.output.extend(ValueInfoProto(name=name) for name in names)
    results = run(observed, sample)
    folder = Path(output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    for file, name in files.items():
        values = np.asarray(results[name]).reshape(-1)
        if values.dtype.kind in "iu":
            _write(folder / file, values)
        elif values.dtype.kind == "f" and dump_float:
            _write(folder / f"{file}_float", values)


def _write(path: Path, values: Any) -> None:
    Path(f"{path}.bin").write_bytes(values.tobytes())
    np.savetxt(f"{path}.txt", values, fmt="%s", delimiter=",")
