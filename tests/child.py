"""One process that answers many questions, where each would start a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

#: Reads a question from each line, and prints the answer of ``answer``, which the script defines.
_LOOP = """
import json, sys
for line in sys.stdin:
    print(json.dumps(answer(json.loads(line))), flush=True)
"""


@contextmanager
def child(script: str) -> Iterator[Callable[[Any], Any]]:
    """Start a process with a script that defines ``answer``; yield a function that calls it."""
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(
            [sys.executable, "-c", script + _LOOP],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        ) as process,
    ):
        questions, answers = process.stdin, process.stdout
        assert questions is not None and answers is not None

        def ask(question: Any) -> Any:
            print(json.dumps(question), file=questions, flush=True)
            if not (line := answers.readline()):
                errors.seek(0)
                raise AssertionError(f"the process died: {errors.read()[-3000:]}")
            return json.loads(line)

        yield ask
