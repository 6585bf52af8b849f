"""What finished online runs measured, for result records."""

from collections.abc import Sequence
from dataclasses import replace

from wheretolearn.errors import UserError
from wheretolearn.online.config import INCIDENTAL, OnlineConfig
from wheretolearn.online.training import RESULT, result
from wheretolearn.runs.folder import RunFolder
from wheretolearn.runs.records import Measured, Protocol

DELAY = "switch delay"


def measured_by(runs: Sequence[RunFolder]) -> list[Measured]:
    """What each of several finished runs left, less what not all of them have: sources may not occur in all streams."""
    found = [_read(run) for run in runs]
    common = [measure for measure in found[0].values if all(measure in own.values for own in found)]
    return [replace(own, values={measure: own.values[measure] for measure in common}) for own in found]


def measures(run: RunFolder) -> dict[str, float]:
    """Every number of a finished run, in the unit that ``ONLINE`` tells."""
    return _read(run).values


def _read(run: RunFolder) -> Measured:
    found = result(run)
    try:
        shares = {"accuracy": found["accuracy"]}
        shares |= {f"accuracy on {name}": share for name, share in found["accuracy_by_source"].items()}
        if "sparsity" in found:
            shares["sparsity"] = found["sparsity"]
            shares |= {f"sparsity of {name}": share for name, share in found["sparsity_by_tensor"].items()}
        seen = found.get("detection", {})
        shares |= {f"switch {name}": seen.get(name) for name in ("precision", "recall")}
        values = {name: 100 * float(share) for name, share in shares.items() if share is not None}
        if seen.get("delay") is not None:
            values[DELAY] = float(seen["delay"])
        return Measured(values, float(found["seconds"]), int(found["runs_at_once"]))
    except (KeyError, TypeError, ValueError, OverflowError, AttributeError):
        raise UserError(f"{run.path / RESULT} is damaged: it lacks what was measured") from None


def _notes(config: OnlineConfig, measure: str) -> list[str]:
    return ["one pre-training, whose time is not counted, for all seeds"] if config.pretrain else []


ONLINE = Protocol(
    name="online",
    settings=OnlineConfig,
    measure="accuracy",
    incidental=INCIDENTAL,
    measured_by=measured_by,
    notes=_notes,
    together="runs at once",
    alone="alone on the machine",
    unit_of=lambda measure: "steps" if measure == DELAY else "%",
)
