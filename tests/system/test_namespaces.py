"""Two hosts that joined by token as README.md says: a capture of the cable between them shows nothing of a request.

The model is made so that what must not be seen can be recognized in plain text: its token ids are the bytes of the
text, and its values are one marked number. A fleet in plain text shows all of it, so the test can fail.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import struct
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from google.protobuf.message import DecodeError
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from benchmarks.lib.namespaces import NetworkHost
from tandem.v1 import types_pb2 as pb
from tests.system.fleet import until
from tests.system.namespaces import Capture, Captured, two_hosts

ROOT = Path(__file__).parents[2]
START_SECONDS = 90.0
WORD = "xylophone-marmalade"
MARKED_VALUE = b"KV!?"
"""A float32 of 0.63. All values in the KV cache are this one, so a row of a block is these bytes again and again."""
_MODEL_ID = "clear"
_NUM_TOKENS = 24
_IN_CLEAR: dict[str, Any] = {"trust_env": False, "verify": False}
"""Without TLS a client needs no list of authorities, which takes longer to read than the request."""
_GATEWAY = "http://127.0.0.1:8642"
_FOUR_COMMANDS = re.compile(r"^host-([ab])\$ ([^#\n]+)", re.MULTILINE)
_LARGER_FLEET = """
host-a$ python -m kv_transfer_svc --control host-a:8643 --listen 0.0.0.0:8650 --advertise host-a:8650
host-a$ python -m prefill_svc --control host-a:8643 --listen 0.0.0.0:8651 --advertise host-a:8651
host-a$ tandem fleet token --role kv
host-b$ export TANDEM_KV_JOIN=tdj1...
host-b$ python -m kv_transfer_svc --control host-a:8643 --listen 0.0.0.0:8650 --advertise host-b:8650
"""
"""So that prefill runs on the first host, and its KV cache goes to the other one."""


@dataclass
class _Seen:
    """What one run put on the cable, and what it was asked."""

    captured: Captured
    join_secrets: tuple[str, ...]
    request_ids: list[str] = field(default_factory=list)
    answers: list[str] = field(default_factory=list)
    num_bytes_pulled: int = 0


@pytest.mark.timeout(300)
async def test_the_cable_between_two_hosts_shows_no_prompt_no_token_and_no_kv(tmp_path: Path) -> None:
    checkpoint = _clear_checkpoint(tmp_path / _MODEL_ID)
    with two_hosts() as one, two_hosts() as other:  # side by side: each pair of hosts is a network of its own
        async with asyncio.TaskGroup() as group:
            in_clear = group.create_task(_run(*one, tmp_path / "plain", checkpoint, is_plain=True))
            over_tls = group.create_task(_run(*other, tmp_path / "encrypted", checkpoint, is_plain=False))
    plain, encrypted = in_clear.result(), over_tls.result()
    word, row = WORD.encode(), MARKED_VALUE * 8

    # 1. In plain text everybody at the cable reads along: the test finds what it looks for.
    assert plain.captured.count(word) >= len(plain.request_ids)
    assert plain.captured.count(row) * len(row) > plain.num_bytes_pulled // 4  # half of the bytes are values
    read_along = [_tokens_in(plain.captured, request_id) for request_id in plain.request_ids]
    assert [len(tokens) for tokens in read_along] == [_NUM_TOKENS] * len(plain.answers)

    # 2. With certificates, not even that there is a request.
    for needle in (word, row, *(text.encode() for text in (*encrypted.join_secrets, *encrypted.request_ids))):
        assert encrypted.captured.count(needle) == 0, f"{needle!r} passed the cable in clear"

    # 3. The same went over it.
    assert all(one == other for one, other in zip(encrypted.answers, plain.answers, strict=False))
    assert encrypted.captured.num_bytes > encrypted.num_bytes_pulled > 0


async def _run(a: NetworkHost, b: NetworkHost, folder: Path, checkpoint: Path, *, is_plain: bool) -> _Seen:
    """Start the fleet of the README and some more, send marked prompts, and return what passed the cable."""
    capture = Capture(a)
    async with _machines((a, b), folder, checkpoint, is_plain=is_plain) as machines:
        for name, command in (*_four_commands(), *_FOUR_COMMANDS.findall(_LARGER_FLEET)):
            await machines[f"host-{name}"].type(command.strip(), machines)
        seen = _Seen(Captured([]), tuple(token.split(".")[2] for token in machines["host-b"].tokens.values()))
        await until(lambda: _roles(a) == ["decode", "kv", "kv", "prefill"], START_SECONDS, lambda: _tails(folder))

        async def has_crossed() -> bool:
            await asyncio.to_thread(_ask, a, seen)
            seen.num_bytes_pulled = sum(
                worker["load"]["counters"].get("bytes_pulled", 0) for worker in _workers(a) if worker["role"] == "kv"
            )
            return seen.num_bytes_pulled > 0

        await until(has_crossed, 30, lambda: _tails(folder))
    seen.captured = capture.close()
    return seen


def _four_commands() -> list[tuple[str, str]]:
    """Return host and command of each line of the README's example."""
    section = (ROOT / "README.md").read_text().split("A second machine joins in four commands.")[1]
    commands = _FOUR_COMMANDS.findall(section.split("```")[1])
    assert len(commands) == 4, commands
    return commands


class _Machine:
    """The shell of one host."""

    def __init__(self, host: NetworkHost, folder: Path, environment: Mapping[str, str], tokens: dict[str, str]) -> None:
        """`tokens`: the join tokens that were made, by role; both machines' operators know them."""
        (folder / "run").mkdir(mode=0o700, parents=True)
        self.environment = {
            **environment,
            "TANDEM_STATE_DIR": str(folder / "state"),
            "TANDEM_RUNTIME_DIR": str(folder / "run"),
            "TANDEM_HOST_ID": host.name,
        }
        self.tokens = tokens
        self._host = host
        self._log = folder / "log"
        self._running: list[subprocess.Popen[bytes]] = []

    async def type(self, command: str, machines: Mapping[str, _Machine]) -> None:
        """Do what one line of the README does; a service goes on in the background."""
        is_plain = "TANDEM_INSECURE_PLAINTEXT" in self.environment
        if (exported := re.fullmatch(r"export (TANDEM_(\w+)_JOIN)=tdj1\.\.\.", command)) is not None:
            if not is_plain:
                self.environment[exported[1]] = self.tokens[exported[2].lower()]
            return
        for name, machine in machines.items():
            command = command.replace(f"{name}:", f"{machine._host.address}:")
        if command.startswith("tandem"):
            if not is_plain:
                await self._keep_token(command)
        else:
            await asyncio.to_thread(self._host.run, lambda: self._start(command))

    def _start(self, command: str) -> None:
        with self._log.open("ab") as out:
            self._running.append(
                subprocess.Popen(
                    ["bash", "-c", f"exec {command}"], env=self.environment, stdout=out, stderr=subprocess.STDOUT
                )
            )

    async def _keep_token(self, command: str) -> None:
        """Make a join token, once the gateway has started: it writes its addresses."""
        addresses = Path(self.environment["TANDEM_STATE_DIR"], "join", "addresses")
        await until(addresses.exists, START_SECONDS, self._log.read_text)
        done = await asyncio.to_thread(
            lambda: subprocess.run(
                ["bash", "-c", command], env=self.environment, capture_output=True, text=True, check=False
            )
        )
        found = re.search(r"^token +(tdj1\.\S+)$", done.stdout, re.MULTILINE)
        assert found, f"{command}: {done.stdout}{done.stderr}"
        self.tokens[command.split()[-1]] = found[1]

    async def stop(self) -> None:
        for process in self._running:
            process.send_signal(signal.SIGTERM)
        for process in self._running:
            await asyncio.to_thread(process.wait, 30)


@asynccontextmanager
async def _machines(
    hosts: tuple[NetworkHost, NetworkHost], folder: Path, checkpoint: Path, *, is_plain: bool
) -> AsyncIterator[dict[str, _Machine]]:
    path = (str(Path(sys.executable).parent), os.environ["PATH"])
    environment = {
        **{name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")},
        "PATH": os.pathsep.join(path),
        "PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "protos" / "gen"))),
        "OMP_NUM_THREADS": "1",
        "TANDEM_LOG_JSON": "false",
        "TANDEM_MODEL": str(checkpoint),
        "TANDEM_CONTROL_LOCAL_PREFILL": "never",
        **{f"TANDEM_{role}_{name}": value for role in ("PREFILL", "DECODE") for name, value in _SMALL.items()},
        **({"TANDEM_INSECURE_PLAINTEXT": "true"} if is_plain else {}),
    }
    tokens = dict[str, str]()
    machines = {f"host-{host.name}": _Machine(host, folder / host.name, environment, tokens) for host in hosts}
    try:
        yield machines
    finally:
        for machine in reversed(machines.values()):
            await machine.stop()


_SMALL = {"NUM_THREADS": "1", "NUM_KV_BLOCKS": "256", "DTYPE": "float32"}


def _workers(gateway: NetworkHost) -> list[dict[str, Any]]:
    try:
        reply = gateway.run(lambda: httpx.get(f"{_GATEWAY}/v1/workers", **_IN_CLEAR))
    except httpx.TransportError:
        return []
    workers: list[dict[str, Any]] = reply.json()["data"]
    return workers


def _roles(gateway: NetworkHost) -> list[str]:
    return sorted(worker["role"] for worker in _workers(gateway) if worker["state"] == "ready")


def _ask(gateway: NetworkHost, seen: _Seen) -> None:
    """Send a marked prompt that begins like no other one: nothing of it is cached."""
    number = len(seen.request_ids)
    body = {
        "model": _MODEL_ID,
        "prompt": f"{number} " + f"{WORD} " * 12,
        "max_tokens": _NUM_TOKENS,
        "ignore_eos": True,
        "seed": number,
    }
    reply = gateway.run(lambda: httpx.post(f"{_GATEWAY}/v1/completions", json=body, timeout=60, **_IN_CLEAR))
    assert reply.status_code == 200, reply.text
    answer = reply.json()
    seen.request_ids.append(reply.headers["x-request-id"])
    seen.answers.append(answer["choices"][0]["text"])


def _tokens_in(captured: Captured, request_id: str) -> dict[int, int]:
    """Return the answer's token ids by their positions, as whoever reads along can put them together."""
    name, found = f"{request_id}-0".encode(), dict[int, int]()  # the first choice
    for stream in captured.streams.values():
        for match in re.finditer(_OUTPUT % re.escape(name), stream, re.DOTALL):
            short, low, high, _ = match.groups()
            num_bytes = short[0] if short else low[0] & 0x7F | high[0] << 7
            try:
                output = pb.TokenOutput.FromString(stream[match.start(4) : match.start(4) + num_bytes])
            except DecodeError:  # another message with this request's id
                continue
            found |= {output.position + index: token for index, token in enumerate(output.token_ids)}
    return found


_OUTPUT = rb"\x12(?:([\x00-\x7f])|([\x80-\xff])(.))(\x0a.%s)"
"""A field of StepBatch: its number, its length as a varint of one or two bytes, and in it the request's id."""


def _tails(folder: Path) -> str:
    return "\n".join(f"--- {log}\n{log.read_text(errors='replace')[-4000:]}" for log in sorted(folder.glob("*/log")))


def _clear_checkpoint(folder: Path) -> Path:
    """Write a small model whose token ids are the bytes of the text, and whose values are all MARKED_VALUE."""
    torch.manual_seed(9)
    config = Qwen2Config(
        vocab_size=258,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.2,
        bos_token_id=256,
        eos_token_id=257,
        pad_token_id=256,
        tie_word_embeddings=False,
    )
    model: Any = Qwen2ForCausalLM(config)
    model.to(torch.float32)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.v_proj.weight.zero_()
            layer.self_attn.v_proj.bias.fill_(struct.unpack("<f", MARKED_VALUE)[0])
    model.save_pretrained(folder)
    _byte_tokenizer().save_pretrained(folder)
    return folder


def _byte_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer without merges: the id of a token is its byte."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in shown]  # byte-level BPE writes these as U+0100 and further
    vocabulary = {chr(byte): byte for byte in shown} | {chr(256 + place): byte for place, byte in enumerate(hidden)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary | {"<s>": 256, "</s>": 257}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
