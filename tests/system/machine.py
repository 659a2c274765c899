"""The services of one machine as its operator starts them: subprocesses with one state directory and one log."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path


class Machine:
    """`environment` is for all processes of the machine, in addition to this process's own."""

    def __init__(self, folder: Path, **environment: str) -> None:
        (folder / "run").mkdir(mode=0o700, parents=True)
        self.state_dir = folder / "state"
        self.running: dict[str, subprocess.Popen[bytes]] = {}
        self._log = folder / "log"
        self._environment = {
            **os.environ,
            "TANDEM_STATE_DIR": str(self.state_dir),
            "TANDEM_RUNTIME_DIR": str(folder / "run"),
            "TANDEM_LOG_JSON": "false",
            "OMP_NUM_THREADS": "1",
            **environment,
        }

    def start(self, module: str, *flags: str, name: str = "") -> None:
        """Start a service, known as `name` or else by its module."""
        with self._log.open("ab") as out:
            self.running[name or module] = subprocess.Popen(
                [sys.executable, "-m", module, *flags], env=self._environment, stdout=out, stderr=subprocess.STDOUT
            )

    async def call(self, *arguments: str) -> str:
        """Run a command to its end and return what it printed."""
        command = [sys.executable, "-m", *arguments]
        done = await asyncio.to_thread(
            lambda: subprocess.run(command, env=self._environment, capture_output=True, text=True, check=False)
        )
        assert done.returncode == 0, f"{' '.join(arguments)}: {done.stdout}{done.stderr}"
        return done.stdout

    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def end_of_log(self) -> str:
        return self.log()[-8000:]

    async def stop(self, *names: str) -> None:
        """Let services drain, all of them if none is named, and wait for their ends."""
        stopping = [self.running.pop(name) for name in names or tuple(self.running)]
        for process in stopping:
            process.send_signal(signal.SIGTERM)
        for process in stopping:
            await asyncio.to_thread(process.wait, 30)
