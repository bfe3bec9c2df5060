"""Workers for the calibration of a command: processes of this machine, or a cluster of Dask."""

from __future__ import annotations

import argparse
import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import Executor, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing import connection, get_context, parent_process

from calibrators.onnx_runtime.interrupt import stop_all
from quark_onnx.cli.parsing import Parser, count
from quark_onnx.common.errors import ConfigError, MissingDependency, ModelError

#: Start of the address of a Dask scheduler.
_DASK = "dask://"
#: Seconds to wait for a scheduler.
CONNECT_SECONDS = 10


def add_workers_option(parser: Parser) -> None:
    parser.add_argument(
        "--workers",
        metavar="N",
        type=parse_workers,
        default=1,
        help="calibration processes, or dask://HOST:PORT; the result is the same",
    )


def parse_workers(text: str) -> int | str:
    """Parse a number of processes, or the address of a Dask scheduler."""
    if not text.startswith(_DASK):
        return count(text)
    host, _, port = text.removeprefix(_DASK).rpartition(":")
    if not (host and port.isascii() and port.isdecimal()):
        raise argparse.ArgumentTypeError(
            f"{text!r} is no address of a Dask scheduler, such as {_DASK}localhost:8786"
        )
    return text


@contextmanager
def workers(number: int | str) -> Iterator[Executor | None]:
    """Start worker processes for calibration, none for a single worker.

    Args:
        number: the number of processes; or the address of the scheduler of a Dask cluster, whose
            workers are used.

    Raises:
        MissingDependency: the package ``distributed`` is not installed.
        ConfigError: no scheduler answers at the address.
        ModelError: a process has died.
    """
    if isinstance(number, str):
        with _cluster(number) as executor:
            yield executor
        return
    if number == 1:
        yield None
        return
    # A forked process would have the locks of onnxruntime's threads, but not the threads.
    context = get_context("spawn")
    # The parent keeps "end" open; workers see an end of file when the parent closes it or dies.
    ended, end = context.Pipe(duplex=False)
    with (
        end,
        ended,
        ProcessPoolExecutor(
            number,
            context,
            initializer=_start_worker,
            initargs=(ended,),
        ) as pool,
    ):
        try:
            yield pool
        # The pool knows that a process died, and not why: often the system's out-of-memory killer.
        except BrokenProcessPool as error:
            raise ModelError(
                f"one of the {number} calibrating processes ended unexpectedly; if"
                " memory ran out, try fewer --workers",
            ) from error
        except BaseException as error:
            if not isinstance(error, Exception):
                end.close()  # signals the workers to end; the pool would wait for running tasks
            raise


@contextmanager
def _cluster(address: str) -> Iterator[Executor]:
    """Connect to the scheduler of a Dask cluster."""
    try:
        from distributed import Client
    except ImportError as error:
        raise MissingDependency(
            f"--workers {address} needs Dask: pip install distributed"
        ) from error
    try:
        client = Client(address.replace(_DASK, "tcp://"), timeout=CONNECT_SECONDS)
    except (OSError, TimeoutError) as error:
        raise ConfigError(
            f"--workers {address}: no Dask scheduler answers there; start one with 'dask"
            " scheduler', and 'dask worker HOST:PORT' on each machine"
        ) from error
    with client, client.get_executor() as executor:
        yield executor


def _start_worker(ended: connection.Connection) -> None:
    """Ignore Ctrl-C, which the parent process handles, and end with the parent.

    An end of file on ``ended`` says that the parent needs no results any more.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # A thread, because the worker itself is busy with onnxruntime; daemon, so that it never delays
    # the end.
    threading.Thread(target=_follow_parent, args=(ended,), daemon=True).start()


def _follow_parent(ended: connection.Connection) -> None:
    parent = parent_process()
    if parent is not None:
        # The parent lives, and needs no results: Ctrl-C, or a signal.
        if parent.sentinel not in connection.wait([parent.sentinel, ended]):
            stop_all()  # the pool ends the process once its work has ended
            connection.wait([parent.sentinel])
        # No clean-up: the other thread may be inside native code.
        os._exit(1)
