"""Reads devices in a process whose NVML is the stub, as workers of that machine do.

machine = StubMachine(folder)
machine.scene("process 0 4000 3072")
[card, _] = machine.read("prefill", pids=[17], engine=(UUID, 2 << 30))
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from google.protobuf import json_format

from tandem.v1 import types_pb2 as pb
from tests.tandem_runtime.test_memory import stub_folder

_READER = """
import json, os, sys, threading
from pathlib import Path
from google.protobuf import json_format
from tandem_runtime import device_reader, memory
from tandem_runtime.device_reader import EngineMemory
from tandem_runtime.host_workers import HostWorkers

class Worker:
    def __init__(self):
        self.probe = memory.MemoryProbe(lambda: self.pids, lambda: self.engine and EngineMemory(*self.engine))

workers = {}
while line := sys.stdin.readline():
    name, how, pids, engine, namespace, first_seconds, silent_seconds, environment = json.loads(line)
    for variable, value in environment.items():
        os.environ.pop(variable, None) if value is None else os.environ.update({variable: value})
    memory._FIRST_SECONDS, memory.SILENT_SECONDS, memory.FRESH_SECONDS = first_seconds, silent_seconds, 0.0
    device_reader.pid_namespace = lambda: namespace
    worker = workers.setdefault(name, Worker())
    worker.pids, worker.engine = pids, engine
    report = worker.probe.read() if how == "read" else worker.probe.report()
    num_threads = sum(each.name == "device-reader" for each in threading.enumerate())
    print(json.dumps([json_format.MessageToDict(report), num_threads]), flush=True)
"""


class StubMachine:
    """One process that plays any number of workers; each has notes of its own in the runtime folder."""

    def __init__(self, folder: Path, **variables: str) -> None:
        self._scene = folder / "scene"
        (folder / "runtime").mkdir()
        environment = {name: value for name, value in os.environ.items() if not name.startswith("CUDA_")}
        environment |= {
            "LD_LIBRARY_PATH": str(stub_folder()),
            "NVML_STUB_SCENE": str(self._scene),
            "NVML_STUB_THREADS": "1",
            "TANDEM_RUNTIME_DIR": str(folder / "runtime"),
            **variables,
        }
        self.num_reader_threads = 0
        self._process = subprocess.Popen(
            [sys.executable, "-c", _READER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )

    def scene(self, *lines: str) -> None:
        """Replace what the driver says from now on; see nvml_stub.c."""
        new = self._scene.with_suffix(".new")
        new.write_text("".join(f"{line}\n" for line in lines))
        new.rename(self._scene)

    def report(
        self,
        name: str,
        *,
        how: str = "read",
        pids: Sequence[int] = (),
        engine: tuple[str, int] | None = ("", 0),
        namespace: int = 1,
        first_seconds: float = 30.0,
        silent_seconds: float = 30.0,
        environment: Mapping[str, str | None] | None = None,
    ) -> pb.MemoryReport:
        """Return a worker's report. `how`: "read" waits `first_seconds` for the driver, "report" waits for nobody.

        `environment` is changed for all workers, and stays; None removes a variable.
        """
        assert self._process.stdin is not None and self._process.stdout is not None
        command = [name, how, list(pids), engine, namespace, first_seconds, silent_seconds, environment or {}]
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()
        report, self.num_reader_threads = json.loads(self._process.stdout.readline())
        return json_format.ParseDict(report, pb.MemoryReport())

    def read(self, name: str, **more: Any) -> list[pb.Device]:
        return list(self.report(name, **more).devices)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()
