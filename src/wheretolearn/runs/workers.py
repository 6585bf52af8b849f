"""Several runs at once on one machine, each in a process of its own that tells its parent how far it is.

A worker process ends by itself, after saving, when its parent is gone, however that ended.
"""

import os
import queue
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import IO, Any

import torch

from wheretolearn.cpu import keep_freed_memory
from wheretolearn.errors import NonFiniteError, Stopped, UserError
from wheretolearn.runs.folder import RunFolder
from wheretolearn.runs.shortages import shortages_told
from wheretolearn.runs.signals import StopRequest
from wheretolearn.storage import from_json, to_json

_SECONDS_BETWEEN_REPORTS = 0.2
# A worker that is told to stop before it has begun has nothing to save and does not handle the signal.
_STOPPED = (Stopped.exit_code, -signal.SIGTERM)


@dataclass(frozen=True)
class Outcome:
    """How the workers ended, by name; those that a stop kept from starting count as stopped."""

    finished: tuple[str, ...]
    stopped: tuple[str, ...]
    failed: dict[str, UserError]


def train_in_workers(
    module: str,
    shares: Sequence[Sequence[RunFolder]],
    report: Callable[[RunFolder, int, Mapping[str, Any]], None],
    *,
    finished: Callable[[RunFolder], bool],
    options: Sequence[str] = (),
    at_once: int,
    threads: int,
    notify: Callable[[str], None] | None = None,
    on_stop: Callable[[], None] | None = None,
    failed: Mapping[RunFolder, UserError] | None = None,
) -> None:
    """Take runs to their ends, those of each share in a process of ``module``, which gets options and run folders.

    A process tells about one of several runs by its path in the values, as ``run``; without it, about all it has.
    What fails does not keep the others from their ends; the error comes last, with the runs that ``failed`` before.
    Runs of which their process told through ``tell_failure`` have that error; others that a process left, its own.
    A process has the threads of its runs, or ``threads`` where they have no number.
    """
    names = {", ".join(str(run.path) for run in share): share for share in shares}
    by_path = {str(run.path): run for share in shares for run in share}
    for run in by_path.values():
        run.lock()  # until its worker takes over: nobody else shall train a run that waits

    def update(name: str, step: int, values: Mapping[str, Any]) -> None:
        told = dict(values)
        one = told.pop("run", None)
        for run in names[name] if one is None else [by_path[one]]:
            report(run, step, told)

    errors = dict(failed or {})

    def fail(name: str, told: Sequence[str], error: UserError) -> None:
        of = [by_path[path] for path in told] or [run for run in names[name] if run not in errors and not finished(run)]
        if not of and any(run in errors for run in names[name]):
            return
        errors.update(dict.fromkeys(of, error))
        if notify is not None:
            notify(failure_of(of or names[name], error, " failed"))

    def let_go(name: str) -> None:
        for run in names[name]:
            run.close()

    outcome = run_workers(
        {name: [module, *options, *(str(run.path) for run in share)] for name, share in names.items()},
        at_once=at_once,
        threads={name: share[0].threads or threads for name, share in names.items()},
        update=update,
        notify=notify,
        on_stop=on_stop,
        on_start=let_go,
        on_failure=fail,
    )
    for run in by_path.values():
        run.close()
    # A worker that was about to end when it was told to stop may have finished all the same.
    left = [run for name in outcome.stopped for run in names[name] if not finished(run) and run not in errors]
    if left:
        raise stopped(f"stopped {len(left)} runs and saved them", left, errors)
    if errors:
        raise failure(errors, of=len(by_path) + len(failed or {}))


def failure(errors: Mapping[RunFolder, UserError], of: int) -> UserError:
    """One error for all the runs that failed, with the exit code of the first."""
    first = next(iter(errors.values()))
    if of == 1:
        return first
    return type(first)("\n".join([f"{len(errors)} of {of} runs failed:", *_by_error(errors)]))


def stopped(what: str, left: Sequence[RunFolder], errors: Mapping[RunFolder, UserError] | None = None) -> Stopped:
    """Tells the command that resumes the runs that are left, and the runs that failed."""
    command = shlex.join(["wheretolearn", "resume", *(str(run.path) for run in left)])
    return Stopped("\n".join([f"{what}; go on with `{command}`", *_by_error(errors or {}, " failed")]))


def _by_error(errors: Mapping[RunFolder, UserError], words: str = "") -> list[str]:
    """Each error with its run, or with all runs that share it: lanes of one process, or one pre-training."""
    runs: dict[UserError, list[RunFolder]] = {}  # by identity, as errors compare
    for run, error in errors.items():
        runs.setdefault(error, []).append(run)
    return [failure_of(own, error, words) for error, own in runs.items()]


def failure_of(runs: Sequence[RunFolder], error: UserError, words: str = "") -> str:
    """An error with the runs that it is about, which it may name already."""
    paths = ", ".join(str(run.path) for run in runs)
    return f"{paths}{words}: {str(error).removeprefix(f'{paths}: ')}"


def run_workers(
    commands: Mapping[str, Sequence[str]],
    *,
    at_once: int,
    threads: Mapping[str, int],
    update: Callable[[str, int, Mapping[str, Any]], None],
    notify: Callable[[str], None] | None = None,
    on_stop: Callable[[], None] | None = None,
    on_start: Callable[[str], None] | None = None,
    on_failure: Callable[[str, Sequence[str], UserError], None] | None = None,
    stop_on_failure: bool = False,
) -> Outcome:
    """Run each command, a Python module with its arguments, in a process of its threads; ``at_once`` at a time.

    ``update`` gets the name of a worker and what it told through ``tell_step``, ``notify`` what through ``tell_note``.
    SIGINT and SIGTERM are passed on to the workers once; ``on_stop`` is called first. ``on_start`` gets the name of
    each worker just before it starts. ``on_failure`` gets the name of a worker with what it told through
    ``tell_failure``, and, with no runs, that of one whose process failed.
    """
    waiting = dict(commands)
    working: dict[str, _Worker] = {}
    finished, stopped, failed = [], [], {}
    stopping = False
    messages: queue.SimpleQueue[tuple[str, dict[str, Any]]] = queue.SimpleQueue()

    def pass_on() -> None:
        with suppress(queue.Empty):
            while True:
                name, message = messages.get_nowait()
                if "note" in message:
                    if notify is not None:
                        notify(message["note"])
                elif "failed" in message:
                    if on_failure is not None:
                        on_failure(name, message["failed"], _error(message["code"], message["words"]))
                else:
                    update(name, message["step"], message["values"])

    with StopRequest(on_stop) as stop:
        try:
            while working or (waiting and not stopping):
                while waiting and len(working) < at_once and not stopping:
                    name = next(iter(waiting))
                    if on_start is not None:
                        on_start(name)
                    working[name] = _Worker(waiting.pop(name), threads[name], name, messages)
                time.sleep(0.05)
                ended = [name for name, worker in working.items() if worker.ended()]
                pass_on()
                for name in ended:
                    code, words = working.pop(name).end()
                    if code == 0:
                        finished.append(name)
                    elif code in _STOPPED and stopping:
                        stopped.append(name)
                    else:
                        failed[name] = _error(code, words)
                        if on_failure is not None:
                            on_failure(name, (), failed[name])
                if not stopping and (stop.requested or (stop_on_failure and failed)):
                    stopping = True
                    for worker in working.values():
                        worker.stop()
        finally:
            for worker in working.values():  # only where something here went wrong
                worker.stop()
    return Outcome(tuple(finished), (*stopped, *waiting), failed)


class _Worker:
    def __init__(
        self,
        command: Sequence[str],
        threads: int,
        name: str,
        messages: "queue.SimpleQueue[tuple[str, dict[str, Any]]]",
    ):
        self._words: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - open for as long as the worker lives
        self._process = subprocess.Popen(
            [sys.executable, "-m", *command],
            env={**os.environ, "OMP_NUM_THREADS": str(threads)},
            stdin=subprocess.PIPE,  # never written to: it closes when this process ends, however it ends
            stdout=subprocess.PIPE,
            stderr=self._words,
            start_new_session=True,  # Ctrl-C reaches this process alone, which passes it on once
        )
        self._reader = threading.Thread(target=self._read, args=(name, messages), daemon=True)
        self._reader.start()

    def _read(self, name: str, messages: "queue.SimpleQueue[tuple[str, dict[str, Any]]]") -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            with suppress(ValueError):  # a stranger's print, or a line that a kill cut short
                message = from_json(line)
                known = ({"note"}, {"failed", "code", "words"}, {"step", "values"})
                if isinstance(message, dict) and any(kind <= message.keys() for kind in known):
                    messages.put((name, message))

    def ended(self) -> bool:
        """Whether the process is gone and all it said is in the queue."""
        return self._process.poll() is not None and not self._reader.is_alive()

    def stop(self) -> None:
        self._process.send_signal(signal.SIGTERM)

    def end(self) -> tuple[int, str]:
        """Exit code, and what was written to standard error."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()
        self._words.seek(0)
        words = self._words.read().decode(errors="replace").strip()
        self._words.close()
        return self._process.wait(), words


def _error(code: int, words: str) -> UserError:
    if code < 0:
        return UserError(f"its process was ended by {signal.Signals(-code).name}" + (f": {words}" if words else ""))
    if code == NonFiniteError.exit_code:
        return NonFiniteError(words)
    return UserError(words or f"its process ended with exit code {code}")


class Teller:
    """The worker's side: tells the parent about steps, though not more often than it can use."""

    def __init__(self) -> None:
        self._last = 0.0

    def tell_step(self, step: int, values: Mapping[str, Any]) -> None:
        """Steps without news (a loss, an accuracy) may be left out."""
        now = time.monotonic()
        if values.keys() - {"elapsed_seconds"} or now - self._last > _SECONDS_BETWEEN_REPORTS:
            self._last = now
            self._tell({"step": step, "values": dict(values)})

    def tell_note(self, text: str) -> None:
        self._tell({"note": text})

    def tell_failure(self, runs: Sequence[RunFolder], error: UserError) -> None:
        """Of some of this process's runs, where the others go on."""
        self._tell({"failed": [str(run.path) for run in runs], "code": error.exit_code, "words": str(error)})

    def _tell(self, message: Mapping[str, Any]) -> None:
        with suppress(OSError):  # the parent is gone; saving matters more
            sys.stdout.write(to_json(message) + "\n")
            sys.stdout.flush()


def work(job: Callable[[Teller], None]) -> None:
    """What a worker's module does as its main program: the job, then an exit code that the parent understands."""
    keep_freed_memory()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))  # as the parent wants
    threading.Thread(target=_stop_with_parent, daemon=True).start()
    try:
        with shortages_told():
            job(Teller())
    except UserError as error:
        sys.stderr.write(f"{error}\n")
        sys.stderr.flush()
        # Not sys.exit: at its end Python would try again to write what the parent no longer reads.
        os._exit(error.exit_code)


def _stop_with_parent() -> None:
    os.read(0, 1)  # returns at the end of standard input
    os.kill(os.getpid(), signal.SIGTERM)
