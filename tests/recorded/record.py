"""Records the messages of release 0.2: `python -m tests.recorded.record FOLDER` (some minutes; see README.md there).

Runs the four services of that release's code and sends them some requests. In each process, `sitecustomize.py` wraps
gRPC's channels and writes the first messages of each call, in both directions, as they are on the wire; of requests
some more, as the first ones are probes.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import httpx

from tests.ports import free_ports
from tests.release import python_path, unpack

_SITE = """
import atexit, os, pathlib, threading
import grpc.aio._channel as _channel

_folder = pathlib.Path(os.environ["TANDEM_RECORD"])
_counts, _lock = {}, threading.Lock()

def _keep(method, direction, message, data):
    if len(data) > 20_000:
        return data
    kind = message.WhichOneof("kind") if "kind" in message.DESCRIPTOR.oneofs_by_name else None
    if message.DESCRIPTOR.name == "RegisterRequest" and message.info.card.model_id:
        kind = "loaded"
    name = ".".join(filter(None, (method.replace("/tandem.v1.", "").replace("/", "."), direction, kind)))
    with _lock:
        number = _counts[name] = _counts.get(name, -1) + 1
    if number < (12 if kind in ("submit", "step") else 2) and len(data) > 0:
        sender = os.environ["TANDEM_RECORD_NAME"]
        (_folder / f"{name}.{sender}.{number}.{message.DESCRIPTOR.name}.bin").write_bytes(data)
    return data

def _wrap(make):
    def made(self, method, request_serializer=None, response_deserializer=None, **rest):
        if not method.startswith("/tandem.v1."):
            return make(self, method, request_serializer, response_deserializer, **rest)
        def serialize(message):
            return _keep(method, "request", message, request_serializer(message))
        def parse(data):
            message = response_deserializer(data)
            _keep(method, "reply", message, data)
            return message
        return make(self, method, serialize, parse, **rest)
    return made

for _name in ("unary_unary", "unary_stream", "stream_unary", "stream_stream"):
    setattr(_channel.Channel, _name, _wrap(getattr(_channel.Channel, _name)))
"""
_SERVICES = {"kv": "kv_transfer_svc", "prefill": "prefill_svc", "decode": "decode_svc"}
_SMALL = ("--num-kv-blocks", "64", "--block-size", "16", "--num-threads", "1")
_PROMPTS = ("What is a KV cache? " * 8, "Explain prefill and decode. " * 8)


async def record(out: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="tandem-record-") as name:
        folder = Path(name)
        release = unpack(_made(folder / "release"))
        _made(folder / "site").joinpath("sitecustomize.py").write_text(_SITE)
        await _run(folder, release, _made(out))
        _describe(release, out)


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    return folder


async def _run(folder: Path, release: Path, out: Path) -> None:
    http_port, grpc_port = free_ports(2)
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join((str(folder / "site"), python_path(release))),
        "TANDEM_STATE_DIR": str(_made(folder / "state")),
        "TANDEM_RUNTIME_DIR": str(_made(folder / "run")),
        "TANDEM_RECORD": str(out),
        "OMP_NUM_THREADS": "1",
    }
    processes = []

    def start(name: str, module: str, *flags: str) -> None:
        with (folder / f"{name}.log").open("wb") as log:
            processes.append(
                subprocess.Popen(
                    [sys.executable, "-m", module, *flags],
                    cwd=release,
                    env={**environment, "TANDEM_RECORD_NAME": name},
                    stdout=log,
                    stderr=log,
                )
            )

    listen = ("--listen", f"127.0.0.1:{http_port}", "--grpc-listen", f"127.0.0.1:{grpc_port}")
    start("control", "control_plane", *listen, "--local-prefill", "never")
    for role, module in _SERVICES.items():
        small = () if role == "kv" else _SMALL
        common = ("--control", f"127.0.0.1:{grpc_port}", "--worker-id", f"{role}-0", "--host-id", "host-a")
        start(role, module, *common, *small)
    try:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{http_port}", timeout=60, trust_env=False) as http:
            await _until_ready(http, folder)
            for prompt in _PROMPTS:
                body = {"model": "@tandem/demo", "prompt": prompt, "max_tokens": 6, "logprobs": 1, "n": 2, "seed": 7}
                (await http.post("/v1/completions", json=body)).raise_for_status()
    finally:
        for process in reversed(processes):
            process.send_signal(signal.SIGTERM)
        for process in processes:
            await asyncio.to_thread(process.wait, 60)


async def _until_ready(http: httpx.AsyncClient, folder: Path) -> None:
    async with asyncio.timeout(180):
        while True:
            try:
                if (await http.get("/readyz")).is_success:
                    return
            except httpx.TransportError:
                pass
            await asyncio.sleep(0.2)


def _describe(release: Path, out: Path) -> None:
    """Write the release's FileDescriptorSet."""
    script = (
        "import sys\n"
        "from google.protobuf import descriptor_pb2\n"
        "from tandem.v1 import control_plane_pb2, kv_transfer_pb2, tables_pb2, types_pb2, worker_pb2\n"
        "found = descriptor_pb2.FileDescriptorSet()\n"
        "for module in (types_pb2, tables_pb2, control_plane_pb2, kv_transfer_pb2, worker_pb2):\n"
        "    module.DESCRIPTOR.CopyToProto(found.file.add())\n"
        "open(sys.argv[1], 'wb').write(found.SerializeToString(deterministic=True))\n"
    )
    environment = {**os.environ, "PYTHONPATH": python_path(release)}
    command = [sys.executable, "-c", script, str(out / "descriptors.binpb")]
    subprocess.run(command, env=environment, cwd=release, check=True)


if __name__ == "__main__":
    asyncio.run(record(Path(sys.argv[1]).resolve()))
