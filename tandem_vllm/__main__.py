"""Runs vLLM as the engine process of a worker: `python -m tandem_vllm --fd N`.

The interpreter is that of vLLM's own virtual environment, which needs no package of ours: `tandem_engine.client` puts
this repository, or the installed wheel, on its path. The process has the loop of `tandem_engine.process`.
"""

from __future__ import annotations

import os
import sys

from tandem_engine.process import Core, Report, main
from tandem_engine.settings import EngineConfig

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the steps run in this process
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # the worker's settings choose the cores
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",
}
"""vLLM reads these variables when it is imported; an operator's own values are replaced."""


def set_environment() -> None:
    """Set what vLLM reads when it is imported, here and in the processes of its ranks."""
    os.environ.update(ENVIRONMENT)
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")


def _assemble(config: EngineConfig, report: Report, numa_node: int | None) -> tuple[Core, object, list[int]]:
    report("importing vLLM", 0.0)
    from tandem_vllm.assembly import assemble  # imports torch: after the affinity is set

    return assemble(config, report, numa_node)


if __name__ == "__main__":
    set_environment()
    code = main(assemble=_assemble)
    sys.stderr.flush()
    os._exit(code)  # the libraries that vLLM loads print pages about objects that an interpreter's end leaves behind
