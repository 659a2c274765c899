"""Every process of a fleet exports what docs/operate/metrics.md lists, as Prometheus finds and reads it."""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import Any

import httpx

from tandem_runtime import metrics
from tandem_runtime.certificates.names import METRICS_NAME
from tests import metrics_page
from tests.scrape import Scrape
from tests.system.conftest import SMALL
from tests.system.fleet import Fleet, until
from tests.system.streams import MODEL, stream
from tests.tandem_engine.encoder.checkpoints import make, write_sentence_files
from tests.tandem_runtime.test_memory import stub_folder

MARK = "zqsecretqz"
ASKED = {"prompt": f"{MARK} What is a KV cache? " * 10, "max_tokens": 70}
EXPORTED_LATER = {"tandem_cache_predicted_tokens_total", "tandem_inter_token_latency_seconds"}
NEEDS_A_FAULT = {
    "tandem_admission_predicted_wait_seconds",  # nobody waits
    "tandem_admission_refusals_total",
    "tandem_admission_waiting",
    "tandem_background_failures_total",
    "tandem_class_seams_total",
    "tandem_fleet_ejections_total",
    "tandem_http_refusals_total",
    "tandem_migrations_total",
    "tandem_text_kills_total",
    "tandem_queue_length",
    "tandem_requests_running",
    "tandem_device_energy_per_token_joules",
    "tandem_kv_link_bytes_per_second",
    "tandem_kv_link_latency_seconds",
    "tandem_kv_link_is_impaired",
    "tandem_kv_link_bytes_total",
    "tandem_kv_link_transfers_total",
    "tandem_kv_link_errors_total",
    "tandem_kv_link_fallbacks_total",
}
"""Metrics without a series in a small fleet where nothing fails; tests of their own have them."""


class Prometheus:
    """Finds the processes of a fleet as Prometheus does, and scrapes them."""

    def __init__(self, fleet: Fleet, http: httpx.AsyncClient, authority: bytes) -> None:
        self._fleet = fleet
        self._http = http
        self._context = ssl.create_default_context(cadata=authority.decode())

    async def targets(self) -> dict[str, dict[str, Any]]:
        """Return the target groups by the name that the worker was started with."""
        groups = (await self._http.get("/v1/metrics/targets")).json()
        ids = {name: worker.worker_id for name in self._fleet.services if (worker := self._fleet.worker(name))}
        return {name: group for name, id in ids.items() for group in groups if group["labels"]["worker"] == id}

    async def scrape(self, group: dict[str, Any]) -> Scrape:
        [target] = group["targets"]
        async with httpx.AsyncClient(verify=self._context, trust_env=False) as http:
            url = f"{group['labels']['__scheme__']}://{target}/metrics"
            answer = await http.get(url, extensions={"sni_hostname": METRICS_NAME})
        assert answer.status_code == 200 and MARK not in answer.text
        return Scrape(answer.content)

    async def gateway(self) -> Scrape:
        answer = await self._http.get("/metrics")
        assert answer.status_code == 200 and MARK not in answer.text
        return Scrape(answer.content)


async def test_the_page_has_every_metric_that_real_processes_export_and_no_other(tmp_path: Path) -> None:
    metrics.configure("tandem-control", None)
    page = metrics_page.rows()
    encoder = tmp_path / "tiny-bert"
    make("bert", encoder)
    write_sentence_files(encoder, "pooling_mode_mean_tokens")
    cards = {"LD_LIBRARY_PATH": str(stub_folder()), "NVML_STUB_XIDS": "0:79"}
    try:
        async with Fleet(tmp_path, certificates=True) as fleet:
            fleet.start("kv", "kv-0", "--disk-bytes", str(256 << 20))
            fleet.start("prefill", "prefill-0", *SMALL, env=cards)
            fleet.start("decode", "decode-0", *SMALL, "--metrics-listen", "0.0.0.0:0")
            fleet.start("encode", "encode-0", "--model", str(encoder), "--num-threads", "1")
            await fleet.ready()
            async with httpx.AsyncClient(base_url=fleet.base_url, timeout=60, trust_env=False) as http:
                found = await _scrapes(fleet, http)
    finally:
        metrics.shutdown()

    assert {name: metrics_page.differences(scrape, page) for name, scrape in found.items()} == {
        name: [] for name in found
    }
    exported = {name for scrape in found.values() for name in scrape.types}
    assert set(page) - exported - NEEDS_A_FAULT == set(), "on the page, and exported by nobody"
    _agree(found)


async def _scrapes(fleet: Fleet, http: httpx.AsyncClient) -> dict[str, Scrape]:
    """Send requests of several kinds, then scrape all processes."""
    assert fleet.gateway.member is not None, "the fleet has certificates"
    prometheus = Prometheus(fleet, http, fleet.gateway.member.certificate.current.files.bundle)
    await fleet.proven()
    await stream(http, ASKED)

    async def is_expected() -> bool:
        """The gateway hears of cached blocks twice a second, and of a stream it measures one gap in 32."""
        await stream(http, ASKED)
        return (await prometheus.gateway()).types.keys() >= EXPORTED_LATER

    await until(is_expected, 20)
    chat = {"model": MODEL, "messages": [{"role": "user", "content": MARK}], "max_tokens": 4, "user": MARK}
    assert (await http.post("/v1/chat/completions", json=chat)).status_code == 200
    embedding = await http.post("/v1/embeddings", json={"model": "tiny-bert", "input": [MARK, "two"]})
    assert embedding.status_code == 200
    unknown = await http.post("/v1/chat/completions", json={**chat, "model": f"model-{MARK}"})
    assert unknown.status_code == 404
    targets = await prometheus.targets()
    assert {name: group["labels"]["__scheme__"] for name, group in targets.items()} == {
        "kv-0": "http",
        "prefill-0": "http",
        "decode-0": "https",
        "encode-0": "http",
    }
    assert {name: group["labels"]["role"] for name, group in targets.items()} == {
        name: service.role for name, service in fleet.services.items()
    }

    async def has_stored() -> bool:
        """The KV service reports once a second."""
        return (await prometheus.scrape(targets["kv-0"])).value("tandem_kv_store_stored_total") > 0

    await until(has_stored, 20)
    found = {name: await prometheus.scrape(group) for name, group in targets.items()}
    return {**found, "gateway": await prometheus.gateway()}


def _agree(found: dict[str, Scrape]) -> None:
    """Check figures of one process with those of another."""
    gateway, prefill, decode = found["gateway"], found["prefill-0"], found["decode-0"]
    assert gateway.value("tandem_fleet_workers", state="ready") == 4
    assert gateway.value("tandem_fleet_models", state="ready") == 2
    assert gateway.value("tandem_refusals_total", cause="ModelNotFound") == 1
    computed = prefill.value("tandem_worker_prompt_tokens_computed_total")
    assert computed >= gateway.value("tandem_tokens_total", model=MODEL, type="input") > 0, "probes count there only"
    imported = decode.value("tandem_worker_import_size_bytes_total")
    assert imported >= gateway.value("tandem_hand_over_size_bytes_total", transport="shm") > 0
    assert gateway.value("tandem_cache_hit_tokens_total", tier="pool") > 0
    assert found["encode-0"].value("tandem_worker_encoded_inputs_total") >= 2
    assert prefill.value("tandem_device_xid_errors_total", device="0", xid="79") == 1
    assert prefill.value("tandem_certificate_expiration_time_seconds") > 1.7e9
    workers = {name: scrape for name, scrape in found.items() if name != "gateway"}
    of_a_worker = {name for scrape in workers.values() for name in scrape.types} - set(_OF_EVERY_PROCESS)
    assert of_a_worker & set(gateway.types) == set(), "a worker's series are exported by the worker alone"


_OF_EVERY_PROCESS = (
    "target_info",
    "tandem_loop_lag_seconds",
    "tandem_certificate_expiration_time_seconds",
    "process_cpu_time_seconds_total",
    "process_memory_usage_bytes",
    "tandem_process_start_time_seconds",
)
