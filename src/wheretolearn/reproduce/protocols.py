"""What reproducing needs to know of each protocol."""

from collections.abc import Callable, Set
from dataclasses import dataclass
from typing import Any

from wheretolearn.config import from_dict
from wheretolearn.continual import training as continual_training
from wheretolearn.continual.records import CONTINUAL
from wheretolearn.fewshot import training as fewshot_training
from wheretolearn.fewshot.config import INCIDENTAL, FewShotConfig
from wheretolearn.online import training as online_training
from wheretolearn.online.records import ONLINE
from wheretolearn.presets import Preset
from wheretolearn.runs.folder import RunFolder


@dataclass(frozen=True)
class Protocol:
    settings: type[Any]
    incidental: Set[str]  # settings that make no other experiment
    finished: Callable[[RunFolder], bool]
    worker: str  # the module whose process trains runs on a CPU
    lanes: bool  # whether runs of several seeds are one program there
    image_sets: Callable[[Any], list[str]]


PROTOCOLS = {
    "fewshot": Protocol(
        FewShotConfig,
        INCIDENTAL,
        fewshot_training.finished,
        "wheretolearn.fewshot.worker",
        lanes=False,
        image_sets=lambda config: [config.data],
    ),
    "continual": Protocol(
        CONTINUAL.settings,
        CONTINUAL.incidental,
        continual_training.finished,
        "wheretolearn.continual.worker",
        lanes=True,
        image_sets=lambda config: [config.data],
    ),
    "online": Protocol(
        ONLINE.settings,
        ONLINE.incidental,
        online_training.finished,
        "wheretolearn.online.worker",
        lanes=False,
        image_sets=lambda config: [source.data for source in config.sources],
    ),
}


def config_of(preset: Preset) -> Any:
    return from_dict(PROTOCOLS[preset.protocol].settings, preset.settings, where=f"preset {preset.name}")
