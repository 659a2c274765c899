"""A real process drains, ends with the right status and logs what happened."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tandem_runtime.lifecycle import run

PRELUDE = """
import asyncio, logging, sys
from tandem_runtime import errors, lifecycle, log
log.configure("decode", True)
logger = log.get_logger("tests")
def say(word): print(word, flush=True)
"""


@contextmanager
def process(body: str) -> Iterator[subprocess.Popen[str]]:
    code = PRELUDE + textwrap.dedent(body) + "\nsys.exit(lifecycle.run(main))"
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        yield child
    finally:
        child.kill()
        child.communicate()


def line(child: subprocess.Popen[str]) -> str:
    assert child.stdout is not None
    return child.stdout.readline().strip()


def end(child: subprocess.Popen[str]) -> tuple[int, list[dict[str, object]]]:
    _, errors = child.communicate(timeout=60)
    return child.returncode, [json.loads(text) for text in errors.splitlines()]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_first_signal_drains(number: signal.Signals) -> None:
    body = """
        async def main(drain):
            say("up")
            await drain.wait()
            say("drained")
            return 7
    """
    with process(body) as child:
        assert line(child) == "up"
        child.send_signal(number)
        assert line(child) == "drained"
        status, lines = end(child)
    assert status == 7
    assert [(entry["event"], entry["action"]) for entry in lines] == [("signal_received", "drain")]


def test_the_second_signal_cancels_and_what_was_acquired_is_given_back() -> None:
    body = """
        async def main(drain):
            say("up")
            try:
                await drain.wait()
                say("draining")
                await asyncio.Event().wait()
            finally:
                say("given back")
            return 0
    """
    with process(body) as child:
        assert line(child) == "up"
        child.send_signal(signal.SIGTERM)
        assert line(child) == "draining"
        child.send_signal(signal.SIGTERM)
        assert line(child) == "given back"
        assert end(child)[0] == 128 + signal.SIGTERM


def test_the_third_signal_ends_a_process_that_will_not() -> None:
    body = """
        async def main(drain):
            say("up")
            await drain.wait()
            say("draining")
            try:
                await asyncio.Event().wait()
            finally:
                say("stuck")
                await asyncio.Event().wait()
    """
    with process(body) as child:
        for word in ("up", "draining", "stuck"):
            assert line(child) == word
            child.send_signal(signal.SIGTERM)
        assert end(child)[0] == -signal.SIGTERM


def test_a_failure_is_status_one_and_logged_with_its_traceback() -> None:
    body = """
        async def main(drain):
            raise KeyError("lost")  # at the start, no request is the cause
    """
    with process(body) as child:
        status, [entry] = end(child)
    assert status == 1
    assert entry["event"] == "process_failed"
    assert entry["error"] == "'lost'"
    assert "raise KeyError" not in str(entry["error"]) and "KeyError (message withheld" in str(entry["exception"])


def test_exceptions_that_nobody_catches_are_logged_without_what_they_quote() -> None:
    body = """
        import gc, threading
        hidden = "MY SEC" + "RET PROMPT"  # tracebacks of Python 3.13 show the lines of this text
        async def fails():
            raise ValueError(hidden)
        def in_callback(prompt):
            raise ValueError(prompt)
        class Closes:
            def __del__(self):
                raise ValueError(hidden)
        async def main(drain):
            task = asyncio.ensure_future(fails())
            await asyncio.wait([task])
            del task
            gc.collect()
            asyncio.get_running_loop().call_soon(in_callback, hidden)
            await asyncio.sleep(0)
            thread = threading.Thread(target=in_callback, args=[hidden], name="helper")
            thread.start()
            await asyncio.to_thread(thread.join)
            Closes()
            return 0
    """
    with process(body) as child:
        status, lines = end(child)
    assert status == 0
    assert [entry["event"] for entry in lines] == [
        *["event_loop_exception"] * 2,
        "thread_failed",
        "exception_ignored",
    ]
    assert [entry.get("what") for entry in lines[:2]] == ["Task exception was never retrieved", "Exception in callback"]
    assert "SECRET" not in json.dumps(lines)
    assert all("ValueError" in str(entry["exception"]) for entry in lines)


def test_a_stalled_loop_is_logged() -> None:
    body = """
        import time
        async def main(drain):
            asyncio.current_task().set_name("POST /run")
            await asyncio.sleep(0)
            until = time.monotonic() + 0.5
            while time.monotonic() < until:
                pass
            return 0
    """
    with process(body) as child:
        status, lines = end(child)
    assert status == 0
    stalls = [entry for entry in lines if entry["event"] == "loop_stalled" and entry["task"] == "POST /run"]
    assert stalls and max(float(str(entry["seconds"])) for entry in stalls) > 0.05


def test_a_refused_setting_is_status_two_and_a_sentence() -> None:
    body = """
        async def main(drain):
            raise errors.InvalidRequest("--listen x is no address")
    """
    with process(body) as child:
        status, [entry] = end(child)
    assert status == 2
    assert entry["reason"] == "--listen x is no address"
    assert "exception" not in entry


def test_the_garbage_collector_leaves_out_what_was_loaded_and_nothing_else() -> None:
    body = """
        import gc, weakref
        class Thing: pass
        loaded = Thing()
        async def main(drain):
            gc.collect()  # the first one only excludes what the process has begun with
            made = Thing()
            made.itself = made
            is_there = weakref.ref(made)
            seen = {id(each) for each in gc.get_objects()}
            say(f"{id(loaded) in seen} {id(made) in seen}")
            del made
            gc.collect()
            say(is_there())
            return 0
    """
    with process(body) as child:
        assert line(child) == "False True"
        assert line(child) == "None"
        assert end(child)[0] == 0


def test_lines_carry_service_request_and_fields_from_our_loggers_and_the_standard_one() -> None:
    body = """
        async def main(drain):
            with log.bound(request_id="r-1"):
                logger.info("kv_pulled", num_blocks=12)
                logging.getLogger("library").warning("took %d s", 3)
            logger.debug("not shown")
            logger.info("after")
            return 0
    """
    with process(body) as child:
        status, [ours, theirs, after] = end(child)
    assert status == 0
    assert (ours["event"], ours["num_blocks"], ours["level"], ours["logger"]) == ("kv_pulled", 12, "info", "tests")
    assert (theirs["event"], theirs["level"], theirs["logger"]) == ("took 3 s", "warning", "library")
    assert [entry.get("request_id") for entry in (ours, theirs, after)] == ["r-1", "r-1", None]
    assert {entry["service"] for entry in (ours, theirs, after)} == {"decode"}


def test_for_people_lines_are_text() -> None:
    code = (
        "from tandem_runtime import log\nlog.configure('kv', False)\nlog.get_logger('x').info('offered', num_bytes=5)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert "offered" in done.stderr
    assert "num_bytes=5" in done.stderr
    assert not done.stderr.startswith("{")


def test_the_status_is_what_main_returns() -> None:
    async def main(_: object) -> int:
        return 5

    assert run(main) == 5
