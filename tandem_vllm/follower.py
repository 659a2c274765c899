"""Runs the ranks of one more host of an engine: `python -m tandem_vllm.follower --leader HOST:PORT`.

    call the leader -> its settings -> load, with the leader -> the ranks compute -> the leader, or a rank, is gone

`tandem_worker.vllm_follower` starts it in vLLM's environment. It computes nothing itself: its ranks are processes of
vLLM. While they serve, the first SIGTERM only makes it end with code 0 once its leader has ended, because a leader
drains; another SIGTERM, or SIGINT, ends it at once. Else its exit code is 1: it is to be started again.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import signal
import sys
import threading
import traceback
from collections.abc import Sequence
from typing import NoReturn

from msgspec.structs import replace

from tandem_engine.errors import ModelUnusable
from tandem_vllm.__main__ import set_environment
from tandem_vllm.hosts import JOIN_SECONDS, Fit, HostFailed, Loading, identity_of, join, use_network


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--leader", required=True, help="the leader's --master-addr and --master-port, HOST:PORT")
    parser.add_argument("--state-dir", default="", help="where digests of checkpoints are kept")
    parser.add_argument("--seconds", type=float, default=JOIN_SECONDS, help="how long to wait for the leader")
    asked = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: _drain())
    signal.signal(signal.SIGINT, lambda *_: end("", 0))
    try:
        _serve(asked)
    except (HostFailed, ModelUnusable) as error:
        end(str(error))
    except Exception:  # noqa: BLE001 - ranks that wait for others would keep an interpreter from its end
        traceback.print_exc()
        end("it cannot load the ranks of this host")


_serves = threading.Event()
_drains = threading.Event()


def _drain() -> None:
    """End after the leader, or now, if the ranks do not serve yet or this was asked before."""
    if not _serves.is_set() or _drains.is_set():
        end("", 0)
    _drains.set()
    _say("serving until the leader has ended", 1.0)


def _serve(asked: argparse.Namespace) -> None:
    from vllm.v1.executor.multiproc_executor import MultiprocExecutor

    from tandem_vllm.assembly import VERSIONS, prepare

    host, _, port = asked.leader.rpartition(":")
    link, assigned = join(host.strip("[]"), int(port), VERSIONS, asked.seconds)
    use_network(link.own_address)
    config = replace(assigned.config, state_dir=asked.state_dir)
    if config.num_threads is not None:
        os.environ |= {"OMP_NUM_THREADS": str(config.num_threads), "MKL_NUM_THREADS": str(config.num_threads)}
    prepared = prepare(config, _say, assigned.place)
    link.send(Loading(identity_of(prepared.model)))
    link.receive(Fit, asked.seconds)
    link.watch(lambda: end("the leader is gone", 0 if _drains.is_set() else 1))
    _say("loading the ranks of this host", 0.3)
    executor = MultiprocExecutor(prepared.config, monitor_workers=False)
    _serves.set()
    _say("the ranks of this host serve", 1.0)
    executor.start_worker_monitor(inline=True)  # returns when a rank has ended
    end("a rank of this host has ended")


def end(reason: str, code: int = 1) -> NoReturn:
    """End this process and its ranks; callable on any thread."""
    if reason:
        _say(reason, 0.0)
    for rank in multiprocessing.active_children():
        rank.kill()
    sys.stderr.flush()
    os._exit(code)


def _say(what: str, _: float) -> None:
    print(f"vLLM follower: {what}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    set_environment()
    main()
