"""Access to the PyTorch modules; other commands do not need torch."""

from __future__ import annotations

import os
from importlib import import_module
from typing import Any

from quark_onnx.common.errors import MissingDependency
from quark_onnx.common.extras import pip_install

#: Turns for which a thread of torch waits actively for the others (GNU OpenMP). By default a thread
#: waits for milliseconds before it sleeps. If other programs have the processors, the threads wait
#: for each other in vain: a product and two elementwise operators on 2 busy processors (load 20)
#: ran 10 times a second, and 80 times with this number.
_SPINS = "5000"


def torch_side(name: str) -> Any:
    """Import a module that needs torch.

    Raises:
        MissingDependency: torch, or another dependency of the module, is not installed.
    """
    # A user's own choice of the policy stays.
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", _SPINS)  # read when torch is imported
    try:
        return import_module(name)
    # The missing package may be one that the module imports, such as transformers.
    except ImportError as error:
        raise MissingDependency(
            f"{error.name or error} is not installed; language models need it:"
            f" {pip_install('llm')}",
        ) from error
