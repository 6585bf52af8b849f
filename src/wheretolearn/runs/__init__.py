"""Run folders: settings, metrics, checkpoints, and the records of results."""

from wheretolearn.runs.checkpoint import (
    Checkpoint,
    load_latest,
    model_signature,
    random_state,
    restore_random_state,
)
from wheretolearn.runs.checkpoint import save as save_checkpoint
from wheretolearn.runs.folder import RunFolder
from wheretolearn.runs.results import ResultRecord, confidence_interval
from wheretolearn.runs.signals import StopRequest

__all__ = [
    "Checkpoint",
    "ResultRecord",
    "RunFolder",
    "StopRequest",
    "confidence_interval",
    "load_latest",
    "model_signature",
    "random_state",
    "restore_random_state",
    "save_checkpoint",
]
