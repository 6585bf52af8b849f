"""Stopping a run from outside without losing work."""

import os
import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopRequest:
    """Turns the first SIGINT or SIGTERM into a request; the second one ends the process at once.

    >>> with StopRequest() as stop:
    ...     for step in range(steps):
    ...         train_step()
    ...         if stop.requested:
    ...             save()
    ...             raise Stopped("...")

    ``on_request`` is called with the first signal, inside the handler: it must be short and must not raise.
    Only the main thread can receive signals; elsewhere this does nothing.
    """

    def __init__(self, on_request: Callable[[], None] | None = None) -> None:
        self.requested = False
        self._on_request = on_request
        self._previous: dict[signal.Signals, Callable[[int, FrameType | None], Any] | int | None] = {}

    def __enter__(self) -> "StopRequest":
        self.requested = False
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                self._previous[number] = signal.signal(number, self._receive)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        while self._previous:
            number, handler = self._previous.popitem()
            # None: the old handler was not set from Python and cannot be put back.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            os._exit(128 + number)
        self.requested = True
        if self._on_request is not None:
            self._on_request()
