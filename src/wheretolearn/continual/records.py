"""What finished continual runs measured, for result records."""

from collections.abc import Sequence

from wheretolearn.continual.config import INCIDENTAL, LOOK_AHEAD, ContinualConfig
from wheretolearn.continual.training import RESULT, result, settings_of
from wheretolearn.errors import UserError
from wheretolearn.runs.folder import RunFolder
from wheretolearn.runs.records import Measured, Protocol

TRANSFER = "forward transfer"


def measured_by(runs: Sequence[RunFolder]) -> list[Measured]:
    """What each of several finished runs left; all of them have the measures of the first."""
    found = [_read(run) for run in runs]
    for run, own in zip(runs, found, strict=True):
        if own.values.keys() != found[0].values.keys():
            raise UserError(
                f"{run.path / RESULT} or {runs[0].path / RESULT} is damaged: they do not hold the same measures"
            )
    return found


def measures(run: RunFolder) -> dict[str, float]:
    """Every number of a finished run, in percent."""
    return _read(run).values


def _read(run: RunFolder) -> Measured:
    found, is_masked = result(run), settings_of(run).learner in LOOK_AHEAD
    try:
        shares = {"RA": found["ra"], "BTI": found["bti"]}
        if is_masked:
            shares["sparsity"] = found["sparsity"]
            shares |= {f"sparsity of {name}": share for name, share in found["sparsity_by_tensor"].items()}
        shares[TRANSFER] = found["forward_transfer"]
        percent = {name: 100 * float(share) for name, share in shares.items()}
        return Measured(percent, float(found["seconds"]), int(found["runs_at_once"]))
    except (KeyError, TypeError, ValueError, OverflowError, AttributeError):
        raise UserError(f"{run.path / RESULT} is damaged: it lacks what was measured") from None


def _notes(config: ContinualConfig, measure: str) -> list[str]:
    return [f"on the first {config.matrix_images} test images of each task"] if measure == TRANSFER else []


CONTINUAL = Protocol(
    name="continual",
    settings=ContinualConfig,
    measure="RA",
    incidental=INCIDENTAL,
    measured_by=measured_by,
    notes=_notes,
    together="at once in one process",
    alone="alone in its process",
)
