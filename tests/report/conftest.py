"""What the tests of pages share: a browser, and small runs of every protocol."""

import base64
import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from websockets.sync.client import ClientConnection, connect

from wheretolearn.config import from_dict, to_dict
from wheretolearn.continual import training as continual_training
from wheretolearn.continual.config import ContinualConfig
from wheretolearn.data import image_set
from wheretolearn.data.image_set import ImageSplit
from wheretolearn.fewshot import training as fewshot_training
from wheretolearn.fewshot.config import FewShotConfig
from wheretolearn.online import training as online_training
from wheretolearn.online.config import OnlineConfig
from wheretolearn.runs.folder import RunFolder

TIMEOUT = 60  # seconds; only a browser that hangs takes as long


class Tab:
    """A page in Chromium, driven through the DevTools protocol.

    ``complaints`` and ``requests`` collect what the page logs and what it asks for.
    """

    def __init__(self, socket: ClientConnection):
        self._socket, self._number, self._session = socket, 0, ""
        self._events: list[str] = []
        self.complaints: list[str] = []
        self.requests: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        self._socket.send(json.dumps(message | ({"sessionId": self._session} if self._session else {})))
        while True:
            answer = self._receive()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return dict(answer["result"])

    def open(self, path: Path) -> None:
        for seen in (self._events, self.complaints, self.requests):
            seen.clear()
        self.call("Page.navigate", url=path.resolve().as_uri())
        while "Page.loadEventFired" not in self._events:
            self._receive()

    def show(self, width: int, scheme: str, height: int = 900) -> None:
        """As a screen of this width shows the page, to a reader who prefers light or dark."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=True)
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def evaluate(self, expression: str) -> Any:
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def screenshot(self, path: Path) -> None:
        found = self.call("Page.captureScreenshot", format="png")
        path.write_bytes(base64.b64decode(found["data"]))

    def _receive(self) -> dict[str, Any]:
        message: dict[str, Any] = json.loads(self._socket.recv(timeout=TIMEOUT))
        method, about = message.get("method", ""), message.get("params", {})
        self._events.append(method)
        if method == "Network.requestWillBeSent":
            self.requests.append(about["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            self.complaints.append(str(about["exceptionDetails"]))
        elif method == "Log.entryAdded":
            self.complaints.append(str(about["entry"]["text"]))
        elif method == "Runtime.consoleAPICalled":
            self.complaints.append(str(about["args"]))
        return message


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tab]:
    """Chromium without a window, with one tab."""
    binary = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if binary is None:
        pytest.skip("no Chromium to open pages with: install the package chromium")
    options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"]
    options += ["--remote-debugging-port=0", f"--user-data-dir={tmp_path_factory.mktemp('profile')}", "about:blank"]
    process = subprocess.Popen([binary, *options], stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
    try:
        assert process.stderr is not None
        found = next(filter(None, (re.search(r"ws://\S+", line) for line in process.stderr)))
        with connect(found[0], max_size=None, open_timeout=TIMEOUT) as socket:
            yield Tab(socket)
    finally:
        process.terminate()
        process.communicate(timeout=TIMEOUT)


def _draw_stripes() -> ImageSplit:
    """Classes that differ in the place of a bright stripe: easy to learn, quick to draw."""
    classes, drawings = 10, 8
    images = np.random.default_rng(0).integers(0, 60, (classes * drawings, 16, 16, 1), dtype=np.uint8)
    for label in range(classes):
        images[label * drawings : (label + 1) * drawings, label : label + 3] += 150
    starts = np.arange(0, classes * drawings + 1, drawings)
    return ImageSplit("stripes/train", images, starts, tuple(map(str, range(classes))), ("",) * classes)


FEWSHOT = {
    "data": "stripes", "train_split": "train", "validation_split": "train", "queries": 3, "width": 4, "inner_steps": 2,
    "test_inner_steps": 2, "outer_steps": 6, "tasks_per_step": 2, "validate_every": 3, "validation_tasks": 4,
    "log_every": 2, "checkpoint_every": 2,
}  # fmt: skip
CONTINUAL = {
    "data": "stripes", "problem": "rotations", "tasks": 3, "examples": 40, "width": 12, "memory": 20, "mask_lr": 10.0,
    "matrix_images": 10, "log_every": 2, "checkpoint_every": 2,
}  # fmt: skip
ONLINE = {
    "sources": [{"data": "stripes"}], "width": 4, "steps": 24, "p": 0.8, "ways": 5, "shots": 2, "inner_steps": 1,
    "log_every": 6, "checkpoint_every": 6,
}  # fmt: skip


@pytest.fixture(scope="session")
def runs_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Small runs of every protocol: two seeds of a sparse method, one of another, and one that was cut short."""
    folder = tmp_path_factory.mktemp("runs")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WHERETOLEARN_DATA", str(tmp_path_factory.mktemp("data")))
        image_set.write("stripes", {"train": _draw_stripes()}, {})

        def new(name: str, config: Any, seed: int, protocol: str) -> RunFolder:
            return RunFolder.create(folder / f"{name}-seed{seed}", to_dict(config), seed, protocol)

        for mask, seeds in (("binary", (0, 1)), ("fixed", (0,))):
            for seed in seeds:
                with new(f"fewshot-{mask}", from_dict(FewShotConfig, FEWSHOT | {"mask": mask}), seed, "fewshot") as run:
                    fewshot_training.train(run)
        cut = from_dict(FewShotConfig, FEWSHOT | {"mask": "relu"})
        with new("fewshot-cut", cut, 0, "fewshot") as run, pytest.raises(_Killed):
            fewshot_training.train(run, lambda step, _: _kill_at(step, 4))
        for learner, seeds in (("sparse-la-maml", (0, 1)), ("sgd", (0,))):
            for seed in seeds:
                config = from_dict(ContinualConfig, CONTINUAL | {"learner": learner})
                with new(f"continual-{learner}", config, seed, "continual") as run:
                    continual_training.train_together([run])
        for learner, seeds in (("sparse-c-maml", (0, 1)), ("online-adam", (0,))):
            for seed in seeds:
                with new(
                    f"online-{learner}", from_dict(OnlineConfig, ONLINE | {"learner": learner}), seed, "online"
                ) as run:
                    online_training.train(run)
    return folder


class _Killed(Exception):
    pass


def _kill_at(step: int, last: int) -> None:
    if step == last:
        raise _Killed
