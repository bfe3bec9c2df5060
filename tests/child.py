"""One process in place of many: it answers questions, or runs programs in forks of itself."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

#: Run a Python program, given as the interpreter's arguments, in a folder.
Run = Callable[..., "subprocess.CompletedProcess[str]"]

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


#: Forks for each request. The fork leaves the loop and ends as the program does: with its traceback
#: and exit code.
_FORKS = """
import json, os, runpy, sys
requests, answers = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
for line in requests:
    request = json.loads(line)
    fork = os.fork()
    if not fork:
        break
    _, status = os.waitpid(fork, 0)
    print(os.waitstatus_to_exitcode(status), file=answers, flush=True)
else:
    sys.exit()
for number, path in enumerate((os.devnull, *request["streams"])):
    os.dup2(os.open(path, os.O_RDWR), number)
os.chdir(request["folder"])
os.environ.clear()
os.environ.update(request["environment"])
program, *arguments = request["arguments"]
if program == "-c":
    code, *arguments = arguments
    sys.argv[:], sys.path[0] = ["-c", *arguments], ""
    exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})
else:
    sys.argv[:], sys.path[0] = [program, *arguments], os.path.dirname(os.path.abspath(program))
    runpy.run_path(program, run_name="__main__")
"""


@contextmanager
def forks(imports: str) -> Iterator[Run]:
    """Yield a function that runs Python programs, as ``run(folder, "program.py", "argument")``.

    Each program is a fork of one process, so that modules are imported once. Where there are no
    forks, as on Windows, each is a process of its own.

    Args:
        imports: the code by which the process imports what the programs need.
    """
    python = [sys.executable, "-B"]
    if not hasattr(os, "fork"):
        yield lambda folder, *arguments: subprocess.run(
            [*python, *arguments], cwd=folder, capture_output=True, text=True
        )
        return
    with (
        tempfile.TemporaryDirectory() as streams,
        subprocess.Popen(
            [*python, "-c", imports + _FORKS],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as process,
    ):
        questions, answers = process.stdin, process.stdout
        assert questions is not None and answers is not None
        paths = [Path(streams, name) for name in ("stdout", "stderr")]

        def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
            for path in paths:
                path.write_bytes(b"")
            request = {
                "arguments": arguments,
                "folder": str(folder),
                "environment": dict(os.environ),
                "streams": list(map(str, paths)),
            }
            print(json.dumps(request), file=questions, flush=True)
            code = int(answers.readline())
            return subprocess.CompletedProcess(
                arguments, code, *(path.read_text() for path in paths)
            )

        yield run
