"""The gateway's figures follow from its readings, and a short run completes."""

from __future__ import annotations

import json
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gateway import __main__
from benchmarks.gateway.processes import Processes, native_request
from benchmarks.gateway.sse_readers import Stream
from benchmarks.gateway.stand_in_worker import GatewayStream, Words
from benchmarks.gateway.stats import Flat, Paced, Rate, Results, Slow, Two, enter, line
from benchmarks.lib.command import Outcome
from tandem.v1 import types_pb2 as pb
from tandem_engine.demo import checkpoint_path

_TINY = __main__._Size(
    num_rounds=1,
    seconds=0.3,
    num_idle=20,
    idle_token_seconds=0.2,
    max_unread_tokens=64,
    stalled_seconds=4.0,
    flat_seconds=0.5,
    flat_warm_seconds=0.1,
)


def _rate(num_events: int, cpu_seconds: float = 2.0) -> Rate:
    return Rate(num_events, 4.0, cpu_seconds, 1.0, 1.0)


def _results() -> Results:
    return Results(
        rates={"bare": [_rate(400_000)], "native": [_rate(160_000)], "chat": [_rate(300_000)]},
        two=Two([[_rate(90_000, 1.0), _rate(90_000, 1.0)]], [_rate(200_000)], [_rate(210_000)], 0.5, has_cores=False),
        paced=[Paced(2000, 4.0, 500.0, 300_000_000, 100_000_000, 0.1), Paced(256, 0.05, 5000.0, 1, 0, 0.4)],
        slow=Slow(8, 1 << 20, 4, 9000, 3, 30.0, _rate(100), _rate(100)),
        flat=Flat([(0.0, 100.0), (300.0, 101.0), (600.0, 102.0)], 9, _rate(100)),
    )


def test_each_target_is_met_or_missed_by_its_own_figure() -> None:
    outcome = Outcome()
    enter(outcome, _results())
    met = {target.text.split(",")[0]: target.is_met for target in outcome.targets}
    assert met == {
        "gateway": True,
        "two on one port: 1.80 times one (per CPU second of each": True,
        "2": True,
        "a client that does not read costs 1.0 MiB": True,
        "4 of 4 received the reason": False,
        "memory grows by +2.0% in ten minutes": True,
    }
    rates = [target for target in outcome.targets if "bare app's rate" in target.text]
    assert [(target.is_met, "0.40" in target.text) for target in rates] == [(False, True), (True, False)]
    assert outcome.figures["native.per_cpu_second"] == 80_000 and outcome.figures["native.per_second"] == 40_000
    assert outcome.figures["idle.bytes_per_stream"] == 100_000


def test_a_run_that_breaks_off_keeps_what_it_has() -> None:
    outcome = Outcome()
    enter(outcome, Results(rates=_results().rates))
    assert len(outcome.sheets) == 1 and len(outcome.targets) == 4


def test_the_line_of_least_squares() -> None:
    assert line([(0.0, 1.0), (1.0, 3.0), (2.0, 5.0)]) == (2.0, 1.0)
    assert line([(5.0, 7.0)]) == (0.0, 7.0)


def test_each_gateway_has_a_port_for_workers_however_many_there_are(tmp_path: Path) -> None:
    with Processes(tmp_path / "processes") as processes:
        assert processes.control_addresses == []
        for _ in range(4):
            processes.gateway()
        assert len(set(processes.control_addresses)) == 4


_ANSWER = (
    b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
    b'10\r\ndata: {"a":"x"}\n\n\r\n20\r\ndata: {"a":"y"}\n\ndata: {"a":"z"}\n\n\r\n0\r\n\r\n'
)


@pytest.mark.parametrize("cuts", [[60], [63, 64, 65], [76, 82], list(range(55, len(_ANSWER)))])
def test_events_are_counted_however_they_are_cut_and_what_has_ended_is_asked_again(cuts: list[int]) -> None:
    with _server() as (address, accept):
        stream = Stream(address, b"ask")
        server = accept()
        for start, end in pairwise([0, *cuts, len(_ANSWER)]):
            server.sendall(_ANSWER[start:end])
            stream.sock.setblocking(True)
            stream.receive()
        assert (stream.num_events, stream.num_answers) == (3, 1)
        assert stream.tail == _ANSWER
        assert server.recv(100) == b"askask"
        server.close()
        stream.receive()
        assert stream.is_cut
        stream.sock.close()


def test_an_answer_that_is_an_error_ends_the_measurement() -> None:
    with _server() as (address, accept):
        stream = Stream(address, b"ask")
        accept().sendall(b"HTTP/1.1 429 Too Many Requests\r\n\r\nbusy")
        stream.sock.setblocking(True)
        with pytest.raises(RuntimeError, match="busy"):
            stream.receive()
        stream.sock.close()


def test_through_the_gateway_the_stand_ins_words_are_the_answer(tmp_path: Path) -> None:
    words, num_tokens = Words(checkpoint_path()), 700
    with Processes(tmp_path / "processes") as processes:
        processes.gateway()
        processes.stand_in()
        with socket.create_connection(processes.address) as client:
            client.sendall(native_request(num_tokens))
            answer = b""
            while not answer.endswith(b"\r\n0\r\n\r\n"):
                answer += client.recv(1 << 16)
    events = [json.loads(line[6:]) for line in answer.split(b"\n") if line.startswith(b"data: {")]
    assert len(events) == num_tokens + 1  # an event for each token, and one for the usage
    num_prompt_tokens = events[-1]["usage"]["prompt_tokens"]
    assert "".join(event["response"] for event in events) == words.text(num_prompt_tokens, num_tokens)
    assert events[-1]["usage"]["completion_tokens"] == num_tokens and events[-1]["finish_reason"] == "length"


@pytest.mark.timeout(180)
async def test_the_stand_in_answers_choices_from_the_end_of_their_shared_prompt() -> None:
    gateway = GatewayStream(Words(checkpoint_path()), token_seconds=0.0)
    sampling = pb.SamplingParams(max_tokens=2)
    choices = [
        pb.Submit(request_id=f"r-{index}", choice_index=index, num_prompt_tokens=40, sampling=sampling)
        for index in range(3)
    ]

    async def commands() -> AsyncIterator[pb.Command]:
        yield pb.Command(choices=pb.SubmitChoices(shared=pb.Submit(token_ids=range(40)), choices=choices))

    await gateway.read(commands())
    outputs = []
    async for event in gateway.events():
        for output in event.step.outputs:
            is_last = output.finish_reason == pb.FINISH_REASON_LENGTH
            outputs.append((output.request_id, output.position, is_last, output.ledger.num_prompt_tokens))
        if len(outputs) == 6:
            break
    firsts = [(f"r-{index}", 40, False, 0) for index in range(3)]
    assert outputs == [*firsts, *((f"r-{index}", 41, True, 40) for index in range(3))]


def test_a_quick_run_writes_its_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(__main__, "_QUICK", _TINY)
    monkeypatch.setattr(__main__, "NUM_STREAMS", 16)
    monkeypatch.setattr(__main__, "_WARM_SECONDS", 0.1)
    file = tmp_path / "figures.json"
    assert __main__.main(["--quick", "--json", str(file)]) == 0
    figures: dict[str, Any] = json.loads(file.read_text())["figures"]
    assert figures["native.per_second"] > 0 and figures["chat.of_ceiling"] > 0 and figures["two.ratio"] > 0
    assert figures["idle.num_streams"] == 20 and figures["flat.resident_bytes"] > 0
    assert (figures["slow.num_explained"], figures["slow.num_cut"]) == (4, 4)


@contextmanager
def _server() -> Iterator[tuple[tuple[str, int], Callable[[], socket.socket]]]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname(), lambda: listener.accept()[0]
