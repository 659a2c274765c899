"""open-webui's backend: the list of models, a chat, a stream, and a document that is embedded and found again."""

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx

with socket.create_server(("127.0.0.1", 0)) as free:
    port = free.getsockname()[1]
tandem, model = os.environ["TANDEM_URL"] + "/v1", os.environ["TANDEM_MODEL"]
environment = {
    **os.environ,
    "DATA_DIR": str(Path.cwd() / "data"), "WEBUI_AUTH": "False", "WEBUI_SECRET_KEY": "none", "OFFLINE_MODE": "True",
    "ENABLE_OLLAMA_API": "False", "OPENAI_API_BASE_URL": tandem, "OPENAI_API_KEY": "none",
    "RAG_EMBEDDING_ENGINE": "openai", "RAG_OPENAI_API_BASE_URL": tandem, "RAG_OPENAI_API_KEY": "none",
    "RAG_EMBEDDING_MODEL": os.environ["TANDEM_EMBEDDER"], "ANONYMIZED_TELEMETRY": "false", "DO_NOT_TRACK": "true",
}  # fmt: skip
serve = [str(Path(sys.executable).parent / "open-webui"), "serve", "--host", "127.0.0.1", "--port", str(port)]
http = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60, trust_env=False)


def is_up() -> bool:
    try:
        return http.get("/health").status_code == 200
    except httpx.TransportError:
        return False


with subprocess.Popen(serve, env=environment) as process:
    try:
        while not is_up():
            assert process.poll() is None, "open-webui ended"
            time.sleep(0.5)
        token = http.post("/api/v1/auths/signin", json={"email": "", "password": ""}).json()["token"]
        http.headers["Authorization"] = f"Bearer {token}"
        assert model in [each["id"] for each in http.get("/api/models").json()["data"]]
        chat = {"model": model, "messages": [{"role": "user", "content": "What is 17 + 25?"}], "max_tokens": 32}
        answer = http.post("/api/chat/completions", json={**chat, "stream": False})
        assert answer.json()["choices"][0]["message"]["content"], answer.text
        streamed = http.post("/api/chat/completions", json={**chat, "stream": True})
        assert "data: [DONE]" in streamed.text and "error" not in streamed.text, streamed.text
        text = {"name": "notes", "content": "A KV cache keeps keys and values.", "collection_name": "notes"}
        added = http.post("/api/v1/retrieval/process/text", json=text)
        assert added.status_code == 200 and added.json()["status"], added.text
        asked = {"collection_names": ["notes"], "query": "What does a KV cache keep?", "k": 1}
        found = http.post("/api/v1/retrieval/query/collection", json=asked)
        assert "keys and values" in found.text, found.text
    finally:
        process.terminate()
