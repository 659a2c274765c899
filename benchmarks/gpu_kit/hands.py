"""Runs parts in a process of its own, as it is told: one JSON object per line.

    python -m benchmarks.gpu_kit.hands MODULE DEVICE FORM FOLDER
    {part}  ->  {figures}, {left_out} or {failed}

MODULE has `RUNS` and `open_rig(settings)`, an asynchronous context manager. What libraries print goes to standard
error. The end of standard input closes the rig. SIGTERM does so too if the module `HAS_CHILDREN`; else it ends the
process, whatever the part computes.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import signal
import sys
import traceback
from pathlib import Path
from typing import Any, TextIO

from benchmarks.gpu_kit.part import LeftOut, Runs, Settings


async def _serve(module: Any, settings: Settings, answers: TextIO) -> None:
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None, "runs in a task"
    if module.HAS_CHILDREN:
        loop.add_signal_handler(signal.SIGTERM, task.cancel)
    orders = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(orders), sys.stdin)
    runs: Runs = module.RUNS
    async with module.open_rig(settings) as rig:
        while line := await orders.readline():
            answer = await _answer(runs, rig, json.loads(line)["part"])
            answers.write(json.dumps(answer) + "\n")


async def _answer(runs: Runs, rig: Any, name: str) -> dict[str, Any]:
    try:
        return {"figures": await runs[name](rig)}
    except LeftOut as reason:
        return {"left_out": str(reason)}
    except Exception as error:  # noqa: BLE001 - the kit records every error of a part
        traceback.print_exc()
        return {"failed": f"{type(error).__name__}: {error}"}


def main() -> None:
    """Serve until standard input ends."""
    module, device, form, folder = sys.argv[1:]
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    try:
        asyncio.run(_serve(importlib.import_module(module), Settings(device, form, Path(folder)), answers))
    except asyncio.CancelledError:
        sys.stderr.write("ended by SIGTERM\n")
    answers.flush()
    os._exit(0)  # some libraries' threads do not end by themselves


if __name__ == "__main__":
    main()
