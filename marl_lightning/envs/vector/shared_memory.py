"""Many instances of a Python game, stepped by a few worker processes that write into one block of shared memory."""

from __future__ import annotations

import multiprocessing
import os
import select
import signal
import sys
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import send_handle
from types import ModuleType
from typing import Any, Literal, NoReturn

import cloudpickle
import numpy as np
from torch import Tensor

from marl_lightning.envs.base import Observations, VectorStep
from marl_lightning.envs.validation import action_arrays, check_num_envs
from marl_lightning.envs.vector import worker as protocol
from marl_lightning.envs.vector.instances import Factory, check_equal_specs, check_factory
from marl_lightning.envs.vector.layout import Block
from marl_lightning.envs.vector.python_games import PythonVectorEnv

_CLOSE_GRACE = 5.0  # seconds that workers have to close their games before they are killed


class SharedMemoryVectorEnv(PythonVectorEnv):
    """``num_envs`` instances of a :class:`MultiAgentEnv`, shared out in contiguous blocks among a few processes.

    Plays exactly the episodes that :class:`SyncVectorEnv` plays. Workers write into memory that the returned tensors
    look at, so that a step copies nothing but the actions and costs two bytes of messages a worker. Workers import the
    game and numpy, but neither torch nor the script that is being run, which therefore needs no
    ``if __name__ == "__main__"``.

    ``step`` is :meth:`step_async` and :meth:`step_wait` in a row. Between the two, the caller may do something else,
    but must not read the tensors of earlier steps, which are being overwritten.

    **Errors.** What an instance raises is raised here, with its type if it can be pickled (else as ``RuntimeError``),
    the index of the instance and the traceback of the worker as notes. A worker that dies, or does not answer in time,
    gives a ``RuntimeError`` that says which instance it was busy with. Errors of ``reset`` and ``step`` close the
    environment, since the other instances have gone on; errors of ``render``, ``state_dict`` and ``load_state_dict``
    leave it open.

    No process or memory outlives the environment: workers end when it is closed or garbage, and when this process
    dies, whatever it dies of. The tensors stay valid after that. Ctrl-C does not reach the workers. Needs a POSIX
    system.

    Args:
        factory: returns a new instance at every call, in a worker; or a list of one such function for each instance.
            May be a lambda or a local function. All instances must have equal specs.
        num_envs: number of instances.
        seed: instance ``i`` is seeded with ``seed + i`` at the first reset.
        num_workers: processes, at most ``num_envs``; by default one for every core that this process may use.
        context: how processes are started. ``"fork"`` is the fastest, but copies whatever this process holds and may
            deadlock if it runs threads.
        timeout: seconds within which workers must start, and finish a call or go on to their next instance.
        autoreset: see :class:`PythonVectorEnv`.

    Raises:
        ValueError: if ``num_envs`` or ``num_workers`` is less than 1, ``timeout`` is not positive, the specs of the
            instances differ, or the list is of another length.
        RuntimeError: if a worker dies or does not answer in time.
    """

    def __init__(
        self,
        *,
        factory: Factory,
        num_envs: int,
        seed: int,
        num_workers: int | None = None,
        context: Literal["spawn", "fork", "forkserver"] = "spawn",
        timeout: float = 60.0,
        autoreset: bool = True,
    ) -> None:
        check_num_envs(num_envs)
        check_factory(factory, num_envs)
        if num_workers is not None and num_workers < 1:
            raise ValueError(f"num_workers must be at least 1, got {num_workers}")
        if timeout <= 0:
            raise ValueError(f"timeout must be positive, got {timeout}")
        self._factory = factory
        self._settings = {"num_workers": num_workers, "context": context, "timeout": timeout, "autoreset": autoreset}
        self._timeout = timeout
        self._workers: list[_Worker] = []
        self._by_channel: dict[int, _Worker] = {}
        self._busy: dict[int, _Worker] = {}  # those of them that have not answered yet
        self._poll = select.poll()
        self._finalizer = weakref.finalize(self, _stop_workers, self._workers, os.getpid())
        self.num_envs = num_envs
        try:
            self._start_workers(min(num_workers or usable_cores(), num_envs), context, autoreset=autoreset)
            specs = list(self._wait().values())
            for worker, spec in zip(self._workers, specs, strict=True):
                check_equal_specs(specs[0], spec, first=0, second=worker.indices.start)
            self.spec = specs[0]
            self._block = self._share_block()
            super().__init__(spec=self.spec, num_envs=num_envs, seed=seed, arrays=self._block.step, autoreset=autoreset)
        except BaseException:
            self.close()
            raise

    def reset(self, *, seed: int | None = None, mask: np.ndarray | None = None) -> Observations[Tensor]:
        """See :meth:`PythonVectorEnv.reset`. A step that was begun is finished first, and its outcome is lost."""
        self._settle()
        return super().reset(seed=seed, mask=mask)

    def step(self, actions: Mapping[str, Tensor]) -> VectorStep[Tensor]:
        """See :meth:`VectorEnv.step`. Raises ``ValueError`` if an action has a wrong shape or is not legal."""
        self.step_async(actions)
        return self.step_wait()

    def step_async(self, actions: Mapping[str, Tensor]) -> None:
        """Begins a step; arguments as for :meth:`step`. The actions may be changed afterwards.

        Raises:
            RuntimeError: before the first ``reset``, or if a step has been begun already.
            ValueError: if an array of actions has a wrong shape or kind.
        """
        self._check_open()
        self._check_started()
        if self._busy:
            raise RuntimeError("a step has been begun already: call step_wait or reset first")
        for name, array in action_arrays(self.spec, actions, (self.num_envs,)).items():
            np.copyto(self._block.actions[name], array)
        for worker in self._workers:
            self._send(worker, protocol.STEP)

    def step_wait(self) -> VectorStep[Tensor]:
        """Waits for the step that :meth:`step_async` began and returns its outcome.

        Raises:
            RuntimeError: if no step has been begun.
            ValueError: if an action is not legal.
        """
        self._check_open()
        if not self._busy:
            raise RuntimeError("no step has been begun: call step_async first")
        self._wait()
        return self._tensors

    def replicate(self, *, num_envs: int, seed: int) -> SharedMemoryVectorEnv:
        """See :meth:`VectorEnv.replicate`."""
        other = SharedMemoryVectorEnv(factory=self._factory, num_envs=num_envs, seed=seed, **self._settings)
        other.recipe = self.recipe
        return other

    def close(self) -> None:
        """See :meth:`VectorEnv.close`. Games have a few seconds to close; a step that was begun is abandoned."""
        self._busy = {}
        self._finalizer()

    # ---------------------------------------------------------------------------------------- what the base asks for

    def _reset_instances(self, *, seed: int | None, mask: np.ndarray | None) -> None:
        if seed is not None:
            self._call_all("reset", [{"seed": seed} for _ in self._workers], close_on_error=True)
            return
        self._block.reset_mask[:] = True if mask is None else mask
        for worker in self._workers:
            if self._block.reset_mask[worker.indices.start : worker.indices.stop].any():
                self._send(worker, protocol.RESET)
        self._wait()

    def _render_instance(self, index: int) -> np.ndarray:
        self._settle()
        worker = next(worker for worker in self._workers if index in worker.indices)
        self._send(worker, protocol.CALL, ("render", {"index": index}))
        return self._wait(close_on_error=False)[worker.channel]

    def _save_instances(self) -> list[dict[str, Any]]:
        self._settle()
        return [state for states in self._call_all("state_dicts", [{} for _ in self._workers]) for state in states]

    def _load_instances(self, states: Sequence[Mapping[str, Any]]) -> None:
        self._settle()
        shares = [states[worker.indices.start : worker.indices.stop] for worker in self._workers]
        self._call_all("load_state_dicts", [{"states": share} for share in shares])

    # ---------------------------------------------------------------------------------------------------- processes

    def _start_workers(self, num_workers: int, method: str, *, autoreset: bool) -> None:
        context = multiprocessing.get_context(method)
        forked = method == "fork"
        factory = self._factory if forked else cloudpickle.dumps(self._factory)
        bounds = [index * self.num_envs // num_workers for index in range(num_workers + 1)]
        with _worker_surroundings(method):
            for indices in map(range, bounds[:-1], bounds[1:]):
                ours, theirs = context.Pipe()
                inherited = [ours, *(worker.connection for worker in self._workers)] if forked else []
                process = context.Process(
                    target=protocol.run_worker,
                    args=(theirs, factory, indices, self.num_envs, autoreset, inherited),
                    name=f"environments-{indices.start}-{indices.stop - 1}",
                    daemon=True,
                )
                process.start()
                theirs.close()
                worker = _Worker(number=len(self._workers), process=process, connection=ours, indices=indices)
                self._workers.append(worker)
                self._poll.register(worker.channel, select.POLLIN)
                self._by_channel[worker.channel] = self._busy[worker.channel] = worker
        for worker in self._workers:
            with suppress(OSError):  # of a worker that has died already, which is found when its answer is awaited
                send_handle(worker.connection, worker.trace, worker.process.pid)

    def _share_block(self) -> Block:
        file = protocol.anonymous_file()
        try:
            num_workers = len(self._workers)
            block = protocol.map_block(file, spec=self.spec, num_envs=self.num_envs, num_workers=num_workers)
            for worker in self._workers:
                self._send(worker, protocol.ATTACH, (worker.number, num_workers), file=file)
            self._wait()
        finally:
            os.close(file)
        for worker in self._workers:
            worker.progress = block.progress[worker.number]
        return block

    # ----------------------------------------------------------------------------------------------------- messages

    def _send(self, worker: _Worker, command: bytes, value: Any = None, *, file: int | None = None) -> None:
        """Sends a command, with an object and the descriptor of a file if it is of a kind that carries them."""
        try:
            if value is None:
                os.write(worker.channel, command)
            else:
                protocol.send_object(worker.connection, command, value)
            if file is not None:
                send_handle(worker.connection, file, worker.process.pid)
        except OSError:
            self._fail(worker.death())
        self._busy[worker.channel] = worker

    def _wait(self, *, close_on_error: bool = True) -> dict[int, Any]:
        """Waits until no worker is busy.

        Returns:
            what methods returned, by the channel of the worker and in the order of the workers.
        """
        results: dict[int, Any] = dict.fromkeys(self._busy)
        first_error: Exception | None = None
        places, deadline = self._places(), time.monotonic() + self._timeout
        while self._busy:
            ready = self._poll.poll(max(0.0, deadline - time.monotonic()) * 1000)
            if not ready and places != (now := self._places()):
                # Each instance may take long, as one that has to start StarCraft II first.
                places, deadline = now, time.monotonic() + self._timeout
                continue
            if not ready:
                error = next(iter(self._busy.values())).hang(self._timeout)
                for worker in self._busy.values():
                    worker.process.kill()
                self._fail(error)
            for channel, _ in ready:
                worker = self._by_channel[channel]
                try:
                    kind = os.read(channel, 1)
                    value = None if kind in (b"", protocol.DONE) else protocol.receive_object(worker.connection)
                except (OSError, EOFError):
                    kind = b""
                if not kind:
                    self._fail(worker.death())
                if kind == protocol.ERROR:
                    error = _rebuild_error(*value)
                    if close_on_error:
                        self._fail(error)
                    first_error = first_error or error
                results[channel] = value
                del self._busy[channel]
        if first_error is not None:
            raise first_error
        return results

    def _places(self) -> list[int]:
        """Returns which instances the busy workers are at."""
        return [int(worker.progress[0]) for worker in self._busy.values() if worker.progress is not None]

    def _call_all(self, method: str, arguments: list[dict[str, Any]], *, close_on_error: bool = False) -> list[Any]:
        """Calls a method of :class:`Instances` in every worker, with arguments for each."""
        for worker, own_arguments in zip(self._workers, arguments, strict=True):
            self._send(worker, protocol.CALL, (method, own_arguments))
        return list(self._wait(close_on_error=close_on_error).values())

    def _settle(self) -> None:
        """Finishes a step that was begun, say because waiting for it was interrupted."""
        self._check_open()
        self._wait()

    def _check_open(self) -> None:
        if not self._finalizer.alive:
            raise RuntimeError("the vector environment is closed")

    def _fail(self, error: Exception) -> NoReturn:
        self.close()
        raise error


class _Worker:
    """A worker process as its parent sees it.

    Args:
        number: place among the workers.
        process: has been started.
        connection: to the process.
        indices: the instances that it steps.

    Attributes:
        channel: file descriptor of the connection.
        trace: file descriptor of the file to which the worker writes what it was doing when it crashed or hung.
        progress: see :class:`Block`; ``None`` until the worker uses the block.
    """

    def __init__(self, *, number: int, process: BaseProcess, connection: Connection, indices: range) -> None:
        self.number = number
        self.process = process
        self.connection = connection
        self.indices = indices
        self.channel = connection.fileno()
        self.trace = protocol.anonymous_file()
        self.progress: np.ndarray | None = None

    def death(self) -> RuntimeError:
        """Returns the error that tells how the process, which has ended, ended."""
        self.process.join(1.0)
        code = self.process.exitcode
        if code is None:
            how = "closed its connection"
        elif code < 0:
            how = f"was killed by {signal.Signals(-code).name}"
        else:
            how = f"ended with exit code {code}"
        return RuntimeError(f"worker {self.number} {how} ({self._whereabouts()}){self._read_trace()}")

    def hang(self, timeout: float) -> RuntimeError:
        """Returns the error that tells what the process, which has not answered, is doing."""
        with suppress(ProcessLookupError):
            os.kill(self.process.pid, protocol.TRACE_SIGNAL)
        deadline = time.monotonic() + 1.0
        while not (trace := self._read_trace()) and time.monotonic() < deadline:
            time.sleep(0.01)
        return RuntimeError(f"worker {self.number} did not answer within {timeout} s ({self._whereabouts()}){trace}")

    def release(self) -> None:
        """Frees what this process holds; the worker has ended."""
        self.process.join()
        self.process.close()
        self.connection.close()
        os.close(self.trace)

    def _whereabouts(self) -> str:
        if self.progress is None:
            return f"making the environments {self.indices.start} to {self.indices.stop - 1}"
        return f"the environment that it used last is {self.progress[0]}"

    def _read_trace(self) -> str:
        text = os.pread(self.trace, 1 << 20, 0).decode(errors="replace")
        return f"\n{text}" if text else ""


def _rebuild_error(data: bytes, text: str) -> Exception:
    """Returns the error of a worker from its pickle and the text of its traceback."""
    try:
        error = cloudpickle.loads(data)
        error.add_note(f"traceback of the worker:\n{text}")
    except Exception:
        # It could not be pickled, or not be unpickled here.
        return RuntimeError(f"a worker failed:\n{text}")
    return error


def _stop_workers(workers: list[_Worker], owner: int) -> None:
    """Lets the workers close their games, kills those that take too long, and frees what this process holds of them."""
    if os.getpid() != owner:
        return  # a forked copy of the environment has become garbage
    try:
        for worker in workers:
            with suppress(OSError):
                os.write(worker.channel, protocol.CLOSE)
        deadline = time.monotonic() + _CLOSE_GRACE
        for worker in workers:
            worker.process.join(max(0.0, deadline - time.monotonic()))
    finally:
        for worker in workers:
            worker.process.kill()
            worker.release()
        workers.clear()


def usable_cores() -> int:
    """Returns the number of cores that this process may use; ``LOCAL_WORLD_SIZE`` training processes share them."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // int(os.environ.get("LOCAL_WORLD_SIZE", 1)))


@contextmanager
def _worker_surroundings(method: str) -> Iterator[None]:
    """Changes what processes that are started meanwhile inherit, and restores it.

    They get one thread for linear algebra, which must be known before they import numpy, and no Ctrl-C, not even while
    they start. They do not import the main module anew: functions defined there travel by value.
    """
    main = sys.modules["__main__"]
    variables = {name: os.environ.get(name) for name in protocol.SINGLE_THREAD}
    # The fork server, which ignores Ctrl-C anyway, would pass a blocked signal on to processes that are not ours.
    blocked = [] if method == "forkserver" else [signal.SIGINT]
    signals = signal.pthread_sigmask(signal.SIG_BLOCK, blocked)
    try:
        os.environ.update(protocol.SINGLE_THREAD)
        if method != "fork":
            sys.modules["__main__"] = ModuleType("__main__")
        yield
    finally:
        sys.modules["__main__"] = main
        for name, value in variables.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        signal.pthread_sigmask(signal.SIG_SETMASK, signals)
