"""Signals that ask a training to stop."""

from __future__ import annotations

import logging
import signal
import threading
from types import FrameType
from typing import Any

log = logging.getLogger(__name__)


class TrainingInterrupted(SystemExit):
    """Ends ``Trainer.fit`` after a signal, once everything is saved.

    A ``SystemExit``, so that a script that does not catch it ends with the status that shells expect, 128 plus the
    number of the signal (130 for Ctrl-C, 143 for SIGTERM), and never looks as if it had finished.

    Args:
        signum: the signal.
        code: exit status of this process.
    """

    def __init__(self, signum: int, code: int):
        super().__init__(code)
        self.signum = signum


class SignalTrap:
    """Remembers SIGINT and SIGTERM until a moment at which the state of a training is consistent.

    An update that is cut in the middle could not be resumed exactly. Who does not want to wait presses Ctrl-C again:
    that interrupts at once. While it is installed it stands in for Lightning's handler of SIGTERM, which communicates
    with the other processes from inside the handler, where they may be in the middle of something else. Does nothing
    outside of the main thread, where Python does not allow handlers, and leaves ignored signals ignored.

    Attributes:
        received: number of the last signal since :meth:`install`, 0 if there was none.
    """

    def __init__(self) -> None:
        self.received = 0
        self._previous: dict[int, Any] = {}

    def install(self) -> None:
        """Takes over the handlers and forgets earlier signals."""
        self.received = 0
        if threading.current_thread() is not threading.main_thread():
            return
        for signum in (signal.SIGINT, signal.SIGTERM):
            if signal.getsignal(signum) is not signal.SIG_IGN:
                self._previous[signum] = signal.signal(signum, self._handle)

    def remove(self) -> None:
        """Puts the previous handlers back. May be called repeatedly."""
        for signum, handler in self._previous.items():
            signal.signal(signum, signal.SIG_DFL if handler is None else handler)
        self._previous.clear()

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        self.received = signum
        log.warning("received %s: saving and stopping after this rollout", signal.Signals(signum).name)
        if signum == signal.SIGINT:
            signal.signal(signum, signal.default_int_handler)
