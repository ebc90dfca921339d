"""What a worker process of :class:`SharedMemoryVectorEnv` does, and the messages between it and its parent.

A message is one byte, followed by a pickle for the few kinds that carry an object. The usual step is one byte each way.
Everything here needs numpy only, so that workers start fast and stay small.
"""

from __future__ import annotations

import faulthandler
import mmap
import os
import signal
import tempfile
import threading
import time
import traceback
from collections.abc import Sequence
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle
from typing import Any

import cloudpickle

from marl_lightning.envs.spec import EnvSpec
from marl_lightning.envs.vector.instances import Factory, Instances
from marl_lightning.envs.vector.layout import Block, Carver

STEP = b"s"
"""To a worker: step all instances with the actions of the block."""
RESET = b"r"
"""To a worker: reset the instances of the block's mask."""
CALL = b"c"
"""To a worker, with an object: name and keyword arguments of a method of :class:`Instances`."""
ATTACH = b"a"
"""To a worker, with an object (its number, the number of workers) and a file descriptor: use this block."""
CLOSE = b"x"
"""To a worker: end."""
DONE = b"d"
"""From a worker: the command is done."""
RESULT = b"v"
"""From a worker, with an object: what the method returned; first of all the spec of its instances."""
ERROR = b"e"
"""From a worker, with an object: the pickled error, empty if that is impossible, and the text of its traceback."""

SINGLE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
"""Environment variables of workers: cores are shared out by processes already."""

TRACE_SIGNAL = signal.SIGUSR1
"""Makes a worker write what it is doing to its trace file."""

_ORPHAN_GRACE = 5.0  # seconds that a worker has to end by itself when its parent is gone


def anonymous_file() -> int:
    """Returns the descriptor of a new file that has no name and vanishes with its last user, however that one ends."""
    if hasattr(os, "memfd_create"):  # Linux: not limited by the size of /dev/shm, which is small in containers
        return os.memfd_create("marl_lightning")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def map_block(file: int, *, spec: EnvSpec, num_envs: int, num_workers: int) -> Block:
    """Returns the arrays in the shared file, which grows to the size that they need. ``file`` may be closed then."""
    counter = Carver()
    Block.build(spec=spec, num_envs=num_envs, num_workers=num_workers, make=counter)
    os.ftruncate(file, counter.size)
    carver = Carver(mmap.mmap(file, counter.size))
    return Block.build(spec=spec, num_envs=num_envs, num_workers=num_workers, make=carver)


def send_object(connection: Connection, kind: bytes, value: Any) -> None:
    """Sends a message that carries an object."""
    # Pickled first: an object that cannot be pickled must not leave half a message behind.
    data = cloudpickle.dumps(value)
    os.write(connection.fileno(), kind)
    connection.send_bytes(data)


def receive_object(connection: Connection) -> Any:
    """Returns the object of a message whose first byte has been read."""
    return cloudpickle.loads(connection.recv_bytes())


def run_worker(
    connection: Connection,
    factory: Factory | bytes,
    indices: range,
    num_envs: int,
    autoreset: bool,
    inherited: Sequence[Connection],
) -> None:
    """Serves some of the instances of a vector environment until the parent closes the connection or dies.

    Args:
        connection: to the parent; the first thing to come is the descriptor of the trace file.
        factory: makes instances, or a pickle of it.
        indices: the instances of this worker.
        num_envs: number of instances of all workers.
        autoreset: whether instances that ended are reset.
        inherited: connections of the parent that a forked worker must not keep open.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to all processes; the parent decides what it means
    for other in inherited:
        other.close()
    os.environ.update(SINGLE_THREAD)
    threading.Thread(target=_end_with_parent, args=(os.getppid(),), daemon=True).start()
    try:
        trace = recv_handle(connection)
        _trace_crashes(trace)
        faulthandler.register(TRACE_SIGNAL, trace, all_threads=False)
        try:
            if isinstance(factory, bytes):
                factory = cloudpickle.loads(factory)
            instances = Instances(factory=factory, indices=indices, num_envs=num_envs, autoreset=autoreset)
        except BaseException as error:
            _send_error(connection, error)
            return
        _trace_crashes(trace)  # games may have put their own handlers in place
        try:
            send_object(connection, RESULT, instances.spec)
            _serve(connection, instances, num_envs=num_envs)
        finally:
            instances.close()
    except (EOFError, BrokenPipeError, ConnectionResetError):
        pass  # nobody is left to be told


def _trace_crashes(trace: int) -> None:
    """Lets a crash write the Python stack to a file."""
    # Where it counts as enabled, enabling it does not touch the signal handlers, which pygame replaces when it starts
    # and again when it ends: a forked worker may have inherited such a state.
    faulthandler.disable()
    faulthandler.enable(trace)


def _serve(connection: Connection, instances: Instances, *, num_envs: int) -> None:
    channel = connection.fileno()
    block: Block | None = None
    while (command := os.read(channel, 1)) not in (b"", CLOSE):
        try:
            if command == STEP:
                instances.step(block.actions)
            elif command == RESET:
                instances.reset(mask=block.reset_mask)
            elif command == CALL:
                method, arguments = receive_object(connection)
                send_object(connection, RESULT, getattr(instances, method)(**arguments))
                continue
            else:
                worker, num_workers = receive_object(connection)
                file = recv_handle(connection)
                block = map_block(file, spec=instances.spec, num_envs=num_envs, num_workers=num_workers)
                os.close(file)
                instances.attach(block.step, progress=block.progress[worker])
        except BaseException as error:
            _send_error(connection, error)
        else:
            os.write(channel, DONE)


def _send_error(connection: Connection, error: BaseException) -> None:
    try:
        # Errors that would end the parent, such as SystemExit, are not for it.
        data = cloudpickle.dumps(error) if isinstance(error, Exception) else b""
    except Exception:
        data = b""
    send_object(connection, ERROR, (data, "".join(traceback.format_exception(error))))


def _end_with_parent(parent: int) -> None:
    """Ends this process when its parent is gone and a game that does not return keeps it from seeing that."""
    while os.getppid() == parent:
        time.sleep(1.0)
    time.sleep(_ORPHAN_GRACE)
    os._exit(1)
