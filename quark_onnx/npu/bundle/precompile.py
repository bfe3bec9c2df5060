"""Compile the model of this folder for the NPU of this machine, so that applications need not.

    python precompile.py

The engine that applications ship cannot compile BF16 models; for other formats the first start is faster. The compiled
model (an EP-context file) lies in compiled/, with the cache key of the engine, driver and overlay that it is for, and with
the engine's report of operators; npu_session.py takes it where the key fits. Run this once on each kind of processor, with the whole Ryzen AI installed, and ship the folder.

Source: Ryzen AI documentation 1.8 (2026-07-23), app_development.rst and modelrun.rst.
"""  # noqa: E501

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path

from npu_engine import REPORT, REPORT_VARIABLE, report_of
from npu_session import HERE, PROVIDER, provider_options, session_of


def precompile(folder: Path = HERE) -> Path:
    """Compile the model, and return the file.

    Raises:
        RuntimeError: there is no provider or processor, or the provider has written no file.
    """
    import onnxruntime as ort

    settings = json.loads(
        (folder / "provider_options.json").read_text(encoding="utf-8")
    )
    device, options = provider_options(ort, settings, folder)
    path = folder / "compiled" / f"{device}.onnx"
    path.parent.mkdir(exist_ok=True)
    path.unlink(missing_ok=True)
    session_options = ort.SessionOptions()
    for name, value in (
        ("ep.context_enable", "1"),
        ("ep.context_file_path", str(path)),
        ("ep.context_embed_mode", "1"),
    ):
        session_options.add_session_config_entry(name, value)
    os.environ.setdefault(REPORT_VARIABLE, REPORT)
    session_of(ort, str(folder / settings["model"]), session_options, options)
    if not path.is_file():
        raise RuntimeError(f"{PROVIDER} compiled nothing for {device}; see its log")
    record = json.dumps({"cache_key": options["cache_key"]}, indent=2) + "\n"
    path.with_suffix(".json").write_text(record, encoding="utf-8")
    report = report_of(options)
    if report is not None:
        shutil.copyfile(report, path.with_suffix(".report.json"))
    return path


def main() -> int:
    try:
        print(f"compiled: {precompile()}")
    except Exception as error:  # onnxruntime raises many unrelated types
        print(f"precompile: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
