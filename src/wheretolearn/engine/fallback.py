"""Several arithmetics as one: where the fastest cannot run, the next one takes over.

Whether it can shows only when it runs: kernels may need more memory on the chip than a GPU has, and compiling needs
Triton and a C compiler on the machine.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from wheretolearn.engine.graphed import Adaptation, Arithmetic, Job, JobGradient, T
from wheretolearn.errors import UserError


class FirstThatRuns:
    """``makers`` go by name, the fastest first."""

    def __init__(self, makers: Mapping[str, Callable[[], Arithmetic]], notify: Callable[[str], None] | None = None):
        self._makers, self._notify = dict(makers), notify
        self._made: Arithmetic | None = None

    def meta_gradients(self, jobs: Sequence[Job], steps: int) -> list[JobGradient]:
        return self._run(lambda arithmetic: arithmetic.meta_gradients(jobs, steps))

    def adaptations(self, jobs: Sequence[Job], steps: int) -> list[Adaptation]:
        return self._run(lambda arithmetic: arithmetic.adaptations(jobs, steps))

    def probabilities(self, jobs: Sequence[Job], steps: int) -> Tensor:
        return self._run(lambda arithmetic: arithmetic.probabilities(jobs, steps))

    def settings(self) -> AbstractContextManager[None]:
        return nullcontext()  # whichever runs has its own

    def _run(self, work: Callable[[Arithmetic], T]) -> T:
        while True:
            try:
                if self._made is None:
                    self._made = next(iter(self._makers.values()))()
                with self._made.settings():
                    return work(self._made)
            except (UserError, torch.OutOfMemoryError):
                raise
            except Exception as error:
                if len(self._makers) == 1 or _recording():
                    raise
                failed = next(iter(self._makers))
                del self._makers[failed]
                self._made = None
                if self._notify is not None:
                    self._notify(f"{failed} cannot run here, a slower way is tried: {first_line(error)}")


def _recording() -> bool:
    """A graph is then lost: who records it has to begin again."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
