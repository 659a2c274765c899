"""No body can take more time or memory than it may, and no lost process loses a request."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable

import psutil
import pytest
import pytest_asyncio
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from control_plane.generation import ModelDescription, ModelFacts, TokenIds
from control_plane.text.prepared import Asked, PreparedBody
from control_plane.text.tokenizer import TextTokenizer
from control_plane.text_processes.pool import SMALL_BODY_BYTES, TextLimits, TextProcesses
from control_plane.text_processes.text_process import TextProcess
from tandem_engine.demo import checkpoint_path
from tandem_runtime.errors import Aborted, ContextTooLong, InternalError, InvalidRequest, ModelNotFound
from tests.control_plane.api.gateway import serve
from tests.control_plane.api.model import description, ids_of
from tests.control_plane.api.scripted_dispatcher import Script, ScriptedDispatcher
from tests.control_plane.text_processes.pools import chat_body, model, padded, pool, prepare, resolved_as

HELLO = ids_of("<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n")


def ids(body: PreparedBody) -> list[int]:
    (prompt,) = body.prompts
    return list(TokenIds.unpack(prompt.token_ids))


async def until(is_true: Callable[[], bool]) -> None:
    """Wait until a condition holds; pytest's time limit is the deadline."""
    while True:
        if is_true():
            return
        await asyncio.sleep(0.01)


async def test_a_chat_goes_through_a_text_process_to_its_dispatcher_and_back() -> None:
    dispatcher = ScriptedDispatcher(Script([*ids_of("Hello 世界"), 3]))
    async with pool() as processes, serve(dispatcher, preparer=processes) as gateway:
        for path, body in (
            ("/v1/chat/completions", {"model": "demo", "messages": [{"role": "user", "content": "Hello"}]}),
            ("/client/v4/accounts/a/ai/run/demo", {"prompt": "Hello"}),
        ):
            answer = await gateway.client.post(path, json=body)
            assert answer.status_code == 200 and "Hello 世界" in answer.text
        answer = await gateway.client.post(
            "/v1/completions", json={"model": "demo", "prompt": ["Hi", "Ho"], "echo": True}
        )
        assert [choice["text"] for choice in answer.json()["choices"]] == ["HiHello 世界", "HoHello 世界"]
        answer = await gateway.client.post("/v1/chat/completions", json={"model": "demo", "messages": [1]})
        assert answer.status_code == 400 and "messages[0] must be an object, got 1" in answer.text
        answer = await gateway.client.post("/v1/chat/completions", content=b"{")
        assert answer.status_code == 400 and "not valid JSON" in answer.text
        body = {"model": "other", "messages": [{"role": "user", "content": "Hello"}]}
        answer = await gateway.client.post("/v1/chat/completions", json=body)
        assert answer.status_code == 404 and "no model 'other'" in answer.text
    assert [request.token_ids == HELLO for request in dispatcher.requests[:2]] == [True, True]


async def test_sixteen_first_requests_that_come_at_once_are_all_answered() -> None:
    """No text process runs and no tokenizer is loaded: the load replaces the processes that have just begun."""
    dispatcher = ScriptedDispatcher(Script([*ids_of("Hello"), 3]))
    bodies = [chat_body("Hello"), padded(chat_body("Hello"), SMALL_BODY_BYTES + 1)]
    async with pool(TextLimits(num_processes=2)) as processes, serve(dispatcher, preparer=processes) as gateway:
        answers = await asyncio.gather(
            *(gateway.client.post("/v1/chat/completions", content=bodies[index % 2]) for index in range(16))
        )
        assert [answer.status_code for answer in answers] == [200] * 16
        assert (processes.small.num_running, processes.large.num_running) == (0, 0)
    assert len(dispatcher.requests) == 16


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared() -> AsyncIterator[TextProcesses]:
    """A pool for the tests that leave it as it was."""
    async with pool() as processes:
        yield processes


@pytest.mark.asyncio(loop_scope="module")
async def test_a_prompt_comes_with_hashes_that_the_dispatcher_would_compute(shared: TextProcesses) -> None:
    body = await prepare(shared, chat_body("Hello"))
    (prompt,) = body.prompts
    assert ids(body) == HELLO and not prompt.wire.hash_root and prompt.text is None


@pytest.mark.parametrize("num_bytes", [0, SMALL_BODY_BYTES + 1])
async def test_a_body_that_takes_too_long_is_refused_and_its_process_replaced(num_bytes: int) -> None:
    async with pool(TextLimits(cpu_seconds=0.2, cpu_seconds_per_mb=0.0)) as processes:
        await prepare(processes, padded(chat_body("Hello"), num_bytes))
        before = processes.pids
        with pytest.raises(InvalidRequest, match=r"more than 0\.2 seconds of processor time.*--text-cpu-seconds"):
            await prepare(processes, padded(chat_body("spin"), num_bytes))
        assert ids(await prepare(processes, padded(chat_body("Hello"), num_bytes))) == HELLO
        assert len(processes.pids) == 1 and processes.pids != before


async def test_a_body_that_takes_too_much_memory_is_refused() -> None:
    async with pool(TextLimits(memory_mb=48)) as processes:
        for _ in range(2):
            with pytest.raises(
                InvalidRequest, match=r"more than 12 MiB of memory.*a body of 71 bytes.*--text-memory-mb"
            ):
                await prepare(processes, chat_body("grow"))
        bomb = b'{"model":"demo","metadata":[' + b",".join([b"{}"] * 2_000_000) + b"]}"
        with pytest.raises(InvalidRequest, match=r"more than 48 MiB of memory.*a body of 6,000,0"):
            await prepare(processes, bomb)
        assert ids(await prepare(processes, chat_body("Hello"))) == HELLO


@pytest.mark.parametrize(("num_bytes", "limit_mb"), [(0, 16), (100_000, 22), (1_000_000, 64)])
async def test_the_memory_of_a_job_is_bounded_by_the_length_of_its_body(num_bytes: int, limit_mb: int) -> None:
    async with pool(TextLimits(memory_mb=64)) as processes:
        for _ in range(2):
            with pytest.raises(InvalidRequest, match=f"more than {limit_mb} MiB of memory"):
                await prepare(processes, padded(chat_body("grow"), num_bytes))
            assert ids(await prepare(processes, padded(chat_body("Hello"), num_bytes))) == HELLO


async def test_the_bound_of_a_short_body_does_not_end_the_process_that_reads_a_long_one() -> None:
    async with pool(TextLimits(memory_mb=24)) as processes:
        assert ids(await prepare(processes, padded(chat_body("Hello"), SMALL_BODY_BYTES + 1))) == HELLO
        before = processes.pids
        assert ids(await prepare(processes, padded(chat_body("Hello"), 10_000_000))) == HELLO
        assert processes.pids == before


@pytest.mark.parametrize("text", ["The quick brown fox jumps over the lazy dog. ", "x = [1, 2];\n", "你好，世界！"])
async def test_a_megabyte_of_text_is_prepared_in_a_few_megabytes(text: str) -> None:
    async with pool(TextLimits(memory_mb=48)) as processes:
        long = model(context_length=2_000_000)
        raw = chat_body((text * 100_000)[: 1_000_000 // len(text.encode()) * len(text)])
        body = await prepare(processes, raw, resolve=resolved_as(long))
        assert len(ids(body)) > 100_000


async def test_a_text_that_must_be_encoded_whole_is_bounded_too() -> None:
    demo = (checkpoint_path() / "tokenizer.json").read_bytes()
    long = model(context_length=20_000_000, tokenizer_json=demo, vocab_size=3072)
    async with pool(TextLimits(memory_mb=100)) as processes:
        for _ in range(2):
            with pytest.raises(InvalidRequest, match="more than 100 MiB of memory"):
                await prepare(processes, chat_body("abcdefgh" * 400_000), resolve=resolved_as(long))


@pytest.mark.asyncio(loop_scope="module")
async def test_deep_nesting_is_refused_by_name(shared: TextProcesses) -> None:
    deep = b"[" * 100_000 + b"]" * 100_000
    with pytest.raises(InvalidRequest, match=r"not valid JSON|nested too deeply"):
        await prepare(shared, b'{"model":"demo","metadata":' + deep + b"}")
    assert ids(await prepare(shared, chat_body("Hello"))) == HELLO


async def test_a_prompt_longer_than_the_context_can_be_is_refused_before_it_is_tokenized() -> None:
    async with pool(TextLimits(cpu_seconds=5, cpu_seconds_per_mb=0)) as processes:
        with pytest.raises(ContextTooLong, match=r"prompt has 5,0\d\d,\d{3} bytes of text.*takes 2,048 tokens"):
            await prepare(processes, chat_body("Hello you " * 500_000))


async def test_a_job_whose_process_is_killed_runs_again_on_another() -> None:
    async with pool() as processes:
        killed: list[int] = []

        async def resolve(asked: Asked) -> ModelDescription:
            if processes.zygote._generation and processes.zygote._generation.keys and len(killed) < 1:
                killed.extend(processes.pids)
                os.kill(killed[0], signal.SIGKILL)
            return model()

        assert ids(await prepare(processes, chat_body("Hello"), resolve=resolve)) == HELLO
        assert len(killed) == 1 and killed[0] not in processes.pids


async def test_a_job_that_loses_two_processes_is_aborted_once() -> None:
    async with pool() as processes:

        async def resolve(asked: Asked) -> ModelDescription:
            for pid in processes.pids:
                os.kill(pid, signal.SIGKILL)
            return model()

        with pytest.raises(Aborted, match="ended unexpectedly, and so did the next one"):
            await prepare(processes, chat_body("Hello"), resolve=resolve)
        assert ids(await prepare(processes, chat_body("Hello"))) == HELLO


async def test_a_process_asks_for_a_name_only_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    tell = TextProcess.tell

    def noted(self: TextProcess, name: str, facts: ModelFacts) -> None:
        asked.append(name)
        tell(self, name, facts)

    monkeypatch.setattr(TextProcess, "tell", noted)
    async with pool() as processes:
        for _ in range(3):
            assert ids(await prepare(processes, chat_body("Hello"))) == HELLO
        with pytest.raises(InvalidRequest, match="max_tokens"):
            await prepare(processes, chat_body("Hello", max_tokens=-1))
        assert asked == ["demo"]
        large = padded(chat_body("Hello"), SMALL_BODY_BYTES + 1)
        for _ in range(2):
            assert ids(await prepare(processes, large)) == HELLO
        assert asked == ["demo"] * 3, "the large lane asks before it renders"


async def test_a_name_that_means_another_model_now_is_noticed_by_an_answer_and_by_an_error() -> None:
    async with pool() as processes:
        small = resolved_as(model(context_length=32))
        assert ids(await prepare(processes, chat_body("Hello"), resolve=small)) == HELLO
        long = "Hello you " * 20
        with pytest.raises(ContextTooLong, match="takes 32"):
            await prepare(processes, chat_body(long), resolve=small)
        assert len(ids(await prepare(processes, chat_body(long)))) > 32
        with pytest.raises(ContextTooLong, match="takes 32"):
            await prepare(processes, chat_body(long), resolve=small)

        shouts = model(chat_template="HEY {{ messages[0].content }}")
        assert ids(await prepare(processes, chat_body("Hello"), resolve=resolved_as(shouts))) == ids_of("HEY Hello")

        async def gone(asked: Asked) -> ModelDescription:
            raise ModelNotFound(f"no model {asked.model!r}")

        for body in (chat_body("Hello"), chat_body(long * 1000)):
            with pytest.raises(ModelNotFound, match="no model 'demo'"):
                await prepare(processes, body, resolve=gone)
        assert ids(await prepare(processes, chat_body("Hello"))) == HELLO


async def test_a_killed_zygote_and_a_killed_generation_are_replaced() -> None:
    async with pool() as processes:
        await prepare(processes, chat_body("Hello"))
        root = processes.zygote.pid
        assert root is not None
        await until(lambda: len(psutil.Process(root).children()) == 1)  # the first generation has ended
        (generation,) = psutil.Process(root).children()
        generation.kill()
        await until(lambda: processes.zygote._generation is not None and not processes.zygote._generation.keys)
        assert ids(await prepare(processes, chat_body("Hello"))) == HELLO
        os.kill(root, signal.SIGKILL)
        await until(lambda: processes.zygote.pid not in (None, root))
        assert ids(await prepare(processes, chat_body("Hello"))) == HELLO


async def test_a_client_that_leaves_frees_its_process_and_a_long_job_ends_with_it() -> None:
    async with pool(TextLimits(num_processes=1, cpu_seconds=60)) as processes:
        await prepare(processes, padded(chat_body("Hello"), SMALL_BODY_BYTES + 1))
        (pid,) = processes.pids
        leaving = asyncio.ensure_future(prepare(processes, padded(chat_body("spin"), SMALL_BODY_BYTES + 1)))
        seconds = psutil.Process(pid).cpu_times().user
        await until(lambda: psutil.Process(pid).cpu_times().user > seconds + 0.1)
        leaving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leaving
        assert processes.large.num_running == 1, "the slot is held until the process is free"
        assert ids(await prepare(processes, padded(chat_body("Hello"), SMALL_BODY_BYTES + 1))) == HELLO
        assert processes.pids != [pid] and processes.large.num_running == 0


async def test_one_account_cannot_keep_another_from_its_text_process() -> None:
    async with pool(TextLimits(num_processes=2, cpu_seconds=60)) as processes:
        spin = padded(chat_body("spin"), SMALL_BODY_BYTES + 1)
        await prepare(processes, padded(chat_body("Hello"), SMALL_BODY_BYTES + 1))
        hostile = [asyncio.ensure_future(prepare(processes, spin, account="hostile")) for _ in range(6)]
        await until(lambda: processes.large.num_waiting == 5)
        assert ids(await prepare(processes, padded(chat_body("Hello"), SMALL_BODY_BYTES + 1))) == HELLO
        assert not any(task.done() for task in hostile)
        for task in hostile:
            task.cancel()
        await asyncio.gather(*hostile, return_exceptions=True)


@pytest.mark.asyncio(loop_scope="module")
async def test_a_tokenizer_that_cannot_be_loaded_is_an_error_of_its_model_alone(shared: TextProcesses) -> None:
    broken = description(identity="cd" * 16, tokenizer_json=b"{}")
    with pytest.raises(InternalError, match=r"tokenizer\.json of @tandem/demo cannot be read"):
        await prepare(shared, chat_body("Hello"), resolve=resolved_as(broken))
    assert ids(await prepare(shared, chat_body("Hello"))) == HELLO


@pytest.mark.asyncio(loop_scope="module")
async def test_a_model_that_is_not_found_leaves_the_process_free(shared: TextProcesses) -> None:
    await prepare(shared, chat_body("Hello"))
    before = shared.pids
    with pytest.raises(ModelNotFound):
        await prepare(shared, chat_body("Hello", model="other"))
    assert ids(await prepare(shared, chat_body("Hello"))) == HELLO and shared.pids == before


def large_tokenizer(num_tokens: int) -> bytes:
    """Build a byte-level BPE of random merges."""
    drawn, tokens = random.Random(0), pre_tokenizers.ByteLevel.alphabet()
    merges, known = [], set(tokens)
    while len(tokens) < num_tokens:
        left, right = tokens[int(len(tokens) * drawn.random() ** 3)], tokens[drawn.randrange(256)]
        if left + right not in known:
            known.add(left + right)
            tokens.append(left + right)
            merges.append((left, right))
    tokenizer = Tokenizer(models.BPE({token: at for at, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer.to_str().encode()


async def test_requests_go_on_while_a_tokenizer_of_128_000_tokens_is_loaded() -> None:
    tokenizer_json = large_tokenizer(128_000)
    large = description(identity="ef" * 16, tokenizer_json=tokenizer_json, vocab_size=128_000)
    async with pool() as processes:
        await prepare(processes, chat_body("Hello"))
        loading = asyncio.ensure_future(prepare(processes, chat_body("Hello"), resolve=resolved_as(large)))
        await until(lambda: bool(processes.zygote._loads))
        for _ in range(3):
            assert ids(await prepare(processes, chat_body("Hello"))) == HELLO
        assert not loading.done()
        loaded = await loading
        expected = TextTokenizer(tokenizer_json, {}).encode_prompt("user\nHello")
        assert set(expected) & set(ids(loaded))
        assert ids(await prepare(processes, chat_body("Hello"))) == HELLO


_GATEWAY = """
import asyncio, sys
from tests.control_plane.text_processes.pools import chat_body, pool, prepare

async def main():
    async with pool() as processes:
        await prepare(processes, chat_body("Hello"))

        async def resolve(asked):
            print("root", processes.zygote.pid, flush=True)
            await asyncio.Event().wait()

        await prepare(processes, chat_body("Hello"), resolve=resolve)

asyncio.run(main())
"""


def test_nothing_is_left_behind_by_a_gateway_that_is_killed() -> None:
    with subprocess.Popen([sys.executable, "-c", _GATEWAY], stdout=subprocess.PIPE, text=True) as gateway:
        assert gateway.stdout is not None
        line = next(line for line in gateway.stdout if line.startswith("root "))
        root = int(line.split()[1])
        family = [psutil.Process(root), *psutil.Process(root).children(recursive=True)]
        assert len(family) >= 3, "the root, a generation, a text process"
        gateway.kill()
    _, alive = psutil.wait_procs(family, timeout=20)
    assert alive == []
