"""Runs one more host of a worker whose engine is vLLM: `python -m tandem_worker.vllm_follower --leader HOST:PORT`.

The worker's own host has the worker, and waits for the others (`--engine-args='--nnodes 2 --master-addr ADDRESS ...'`).
This command becomes `tandem_vllm.follower` in vLLM's environment. It ends when the leader's engine ends, and is to be
started again, by Kubernetes or systemd.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from tandem_runtime.errors import InvalidRequest
from tandem_runtime.paths import state_dir
from tandem_runtime.server import split_address
from tandem_worker.vllm_program import vllm_program


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Replace this process by the follower; exit with 2 if a flag is wrong."""
    flags = parser().parse_args(argv)
    try:
        split_address(flags.leader)
    except InvalidRequest as error:
        parser().error(f"--leader: {error.message}")
    if not Path(flags.vllm_python).is_file():
        parser().error(f"--vllm-python {flags.vllm_python!r} is no file; name the interpreter of vLLM's environment")
    folder = state_dir(flags.state_dir, "--state-dir")
    program = vllm_program(flags.vllm_python, folder, "tandem_vllm.follower")
    command = [*program.command, "--leader", flags.leader, "--state-dir", str(folder)]
    environment = {**os.environ, "PYTHONPATH": program.python_path, "PYTHONUNBUFFERED": "1"}
    os.execve(command[0], command, environment)


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="python -m tandem_worker.vllm_follower", description=(__doc__ or "").partition("\n")[0]
    )
    made.add_argument(
        "--leader", required=True, metavar="HOST:PORT", help="the leader's --master-addr and --master-port"
    )
    made.add_argument(
        "--vllm-python",
        default=os.environ.get("TANDEM_VLLM_PYTHON", ""),
        metavar="FILE",
        help="interpreter of vLLM's virtual environment; default: TANDEM_VLLM_PYTHON",
    )
    made.add_argument("--state-dir", metavar="FOLDER", help="default: TANDEM_STATE_DIR, as for a worker")
    return made


if __name__ == "__main__":
    main()
