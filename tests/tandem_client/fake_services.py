"""Replaces the four services in tests of the `tandem` command.

The fakes are real processes with the real module names. Their folder comes first in PYTHONPATH. The fake workers write
files, and the fake control plane answers HTTP requests from them.
"""

from __future__ import annotations

import os
from pathlib import Path

_SHARED = """
import argparse, json, os, pathlib, signal, sys
parser = argparse.ArgumentParser()
for name in ("control", "listen", "grpc-listen", "worker-id", "model", "served-model-name", "cpus", "num-threads",
             "kv-memory-limit-bytes", "device-memory-share"):
    parser.add_argument("--" + name)
flags = parser.parse_args()
folder = pathlib.Path(os.environ["FAKE_FLEET"])
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
"""

_CONTROL_PLANE = (
    _SHARED
    + """
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        entries = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
        ready = entries and all(entry["state"] == "ready" for entry in entries)
        self.send_response(503 if self.path == "/readyz?model=%40tandem%2Fdemo" and not ready else 200)
        self.end_headers()
        self.wfile.write(json.dumps({"object": "list", "data": entries}).encode())
    def log_message(self, *_):
        pass
host, port = flags.listen.rsplit(":", 1)
ThreadingHTTPServer((host, int(port)), Handler).serve_forever()
"""
)

_WORKER = (
    _SHARED
    + """
role = pathlib.Path(sys.argv[0]).stem.removesuffix("_svc").removesuffix("_transfer")
if flags.model == "bad":
    print("model bad: no config.json there", flush=True)
    sys.exit(78)
entry = {"id": flags.worker_id or role, "role": role, "address": "127.0.0.1:1",
         "model": None if role == "kv" else "@tandem/demo", "load": {}}
def report(state, **load):
    path = folder / (entry["id"] + ".json")
    path.with_suffix(".tmp").write_text(json.dumps(entry | {"state": state, "load": load}))
    path.with_suffix(".tmp").replace(path)
report("loading", load_stage="reading_weights", load_progress=0.5)
if role != "kv":
    entry["kv"] = {"total_blocks": 1024}
report("ready")
print("up", flush=True)
while True:
    signal.pause()
"""
)


def make_fake_services(folder: Path) -> dict[str, str]:
    """Write the four services into `folder`; return the environment in which `tandem up` finds them."""
    (folder / "fleet").mkdir()
    (folder / "control_plane.py").write_text(_CONTROL_PLANE)
    for name in ("kv_transfer_svc", "prefill_svc", "decode_svc"):
        (folder / f"{name}.py").write_text(_WORKER)
    ours = Path(__file__).parents[2]
    return os.environ | {
        "PYTHONPATH": f"{folder}{os.pathsep}{ours}",
        "FAKE_FLEET": str(folder / "fleet"),
        "TANDEM_STATE_DIR": str(folder / "state"),
        "NO_COLOR": "1",
    }
