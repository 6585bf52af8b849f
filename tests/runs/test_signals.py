import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from wheretolearn.runs.signals import StopRequest

LOOP = """
import sys, time
from wheretolearn.errors import Stopped, UserError
from wheretolearn.runs.signals import StopRequest

def train():
    with StopRequest() as stop:
        for step in range(1000):
            print("begin", step, flush=True)
            sys.stdin.readline()  # the step's work, as long as the test wants it to be
            print("end", step, flush=True)
            if stop.requested:
                print("saved", step, flush=True)
                raise Stopped("stopped; resume it")
try:
    train()
except UserError as error:
    sys.exit(error.exit_code)
"""


ENDLESS_STEP = """
import time
from wheretolearn.runs.signals import StopRequest

with StopRequest() as stop:
    print("begin", flush=True)
    while not stop.requested:
        time.sleep(0.01)
    print("requested", flush=True)
    time.sleep(600)
"""


@contextmanager
def running(script: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def read_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_lets_the_step_finish_and_exits_with_75(number: signal.Signals) -> None:
    with running(LOOP) as process:
        assert read_line(process) == "begin 0"
        process.send_signal(number)
        output, _ = process.communicate("\n\n\n")
    assert output.splitlines() == ["end 0", "saved 0"]
    assert process.returncode == 75


@pytest.mark.parametrize(
    ("first", "second", "code"),
    [
        (signal.SIGINT, signal.SIGINT, 130),
        (signal.SIGTERM, signal.SIGTERM, 143),
        (signal.SIGINT, signal.SIGTERM, 143),
    ],
)
def test_the_second_signal_exits_at_once(first: signal.Signals, second: signal.Signals, code: int) -> None:
    with running(ENDLESS_STEP) as process:
        assert read_line(process) == "begin"
        process.send_signal(first)
        assert read_line(process) == "requested"
        process.send_signal(second)
        assert process.wait() == code


def test_old_handlers_come_back_even_after_an_error() -> None:
    def handlers() -> list[object]:
        return [signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)]

    before = handlers()
    inside = []

    def work() -> None:
        with StopRequest():
            inside.extend(handlers())
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        work()
    assert handlers() == before
    assert not set(inside) & set(before)


def test_a_request_is_seen_here_and_a_new_one_starts_clear() -> None:
    stop = StopRequest()
    with stop:
        assert not stop.requested
        signal.raise_signal(signal.SIGTERM)
        assert stop.requested
    with stop:
        assert not stop.requested


def test_the_first_request_is_told_once() -> None:
    told: list[str] = []
    with StopRequest(lambda: told.append("stop")) as stop:
        assert told == []
        signal.raise_signal(signal.SIGINT)
        assert stop.requested
    assert told == ["stop"]


def test_in_another_thread_it_does_nothing() -> None:
    before = signal.getsignal(signal.SIGINT)
    seen: list[object] = []

    def work() -> None:
        with StopRequest() as stop:
            seen.extend([stop.requested, signal.getsignal(signal.SIGINT)])

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [False, before]
