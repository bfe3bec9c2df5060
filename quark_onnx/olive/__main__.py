"""Command for Olive's package configuration: ``python -m quark_onnx.olive FILE``."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from quark_onnx.olive.package import package_config


def main() -> None:
    """Write the package configuration to the file on the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m quark_onnx.olive",
        description="Write Olive's package configuration with the passes of quark_onnx added.",
    )
    parser.add_argument(
        "output",
        help="path of the JSON file, for olive run --package-config",
    )
    # The file is Olive's configuration with the passes added: an existing one is replaced.
    output = Path(parser.parse_args().output)
    output.write_text(json.dumps(package_config(), indent=4) + "\n", encoding="utf-8")
    print(f"{output}: use it as olive run --config WORKFLOW --package-config {output}")


if __name__ == "__main__":
    main()
