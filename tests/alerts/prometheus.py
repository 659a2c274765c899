"""A real Prometheus for tests: it scrapes and evaluates every 0.2 s."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx

from infra.observability.files import as_yaml
from infra.observability.pace import PRODUCTION, SHORT
from infra.observability.rules import groups
from infra.observability.scraping import Scraping
from tests.alerts.promtool import promtool, require_prometheus
from tests.ports import free_port
from tests.system.fleet import until

INTERVAL = "200ms"
_START_SECONDS = 30.0
_QUERY_SECONDS = 20.0


class Prometheus:
    """One process with its own database in `folder`. Its alerts have the short pace; recording rules have both."""

    def __init__(self, folder: Path, gateways: Sequence[str], *, token: str = "", ca_file: Path | None = None) -> None:
        folder.mkdir()
        token_file = folder / "operator-token"
        token_file.write_text(token)
        scraping = Scraping(
            gateways=gateways,
            rule_files=[str(folder / "rules.yml")],
            token_file=str(token_file) if token else "",
            ca_file=str(ca_file or ""),
            interval=INTERVAL,
            discovery_interval=INTERVAL,
        )
        recording = [group for group in groups(PRODUCTION) if group["name"] != "tandem-alerts"]
        short = [{**group, "name": f"{group['name']}-short"} for group in groups(SHORT)[1:]]  # one set of objectives
        (folder / "rules.yml").write_text(as_yaml({"groups": [*recording, *short]}))
        (folder / "prometheus.yml").write_text(as_yaml(scraping.config()))
        promtool(["check", "config", "prometheus.yml"], folder)
        self._folder = folder
        self._log = folder / "prometheus.log"

    async def __aenter__(self) -> Prometheus:
        address = f"127.0.0.1:{free_port()}"
        command = [
            require_prometheus("prometheus"),
            f"--config.file={self._folder / 'prometheus.yml'}",
            f"--storage.tsdb.path={self._folder / 'data'}",
            f"--web.listen-address={address}",
            "--log.level=warn",
        ]
        self._process = await asyncio.to_thread(self._start, command)
        self.base_url = f"http://{address}"
        self._http = httpx.AsyncClient(base_url=self.base_url, timeout=_QUERY_SECONDS)
        await until(self._is_ready, _START_SECONDS, self._log.read_text)
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self._http.aclose()
        self._process.terminate()
        await asyncio.to_thread(self._process.wait, 20)

    def _start(self, command: Sequence[str]) -> subprocess.Popen[bytes]:
        with self._log.open("wb") as log:
            return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)

    async def _is_ready(self) -> bool:
        assert self._process.poll() is None, self._log.read_text()
        try:
            return (await self._http.get("/-/ready")).status_code == 200
        except httpx.TransportError:
            return False

    async def query(self, expression: str) -> list[dict[str, Any]]:
        """Return the series of an instant query. Fails, with Prometheus' words, if it does not take the expression."""
        reply = await self._http.post("/api/v1/query", data={"query": expression})
        body = reply.json()
        assert body["status"] == "success", f"{expression}: {body}"
        assert not body.get("warnings"), f"{expression}: {body['warnings']}"
        found: list[dict[str, Any]] = body["data"]["result"]
        return found

    async def query_range(self, expression: str, seconds: int = 60) -> list[dict[str, Any]]:
        """Return the series of the last `seconds`, as a panel asks for them."""
        [(now, _)] = [each["value"] for each in await self.query("vector(0)")]
        ask = {"query": expression, "start": now - seconds, "end": now, "step": 1}
        body = (await self._http.post("/api/v1/query_range", data=ask)).json()
        assert body["status"] == "success", f"{expression}: {body}"
        found: list[dict[str, Any]] = body["data"]["result"]
        return found

    async def names(self) -> set[str]:
        """Return the names of all series so far."""
        return set((await self._http.get("/api/v1/label/__name__/values")).json()["data"])

    async def alerts(self) -> list[dict[str, Any]]:
        """Return the alerts that fire or are pending, with their annotations."""
        found: list[dict[str, Any]] = (await self._http.get("/api/v1/alerts")).json()["data"]["alerts"]
        return found

    async def rule_errors(self) -> dict[str, str]:
        """Return the last error of each rule that has one."""
        groups = (await self._http.get("/api/v1/rules")).json()["data"]["groups"]
        return {rule["name"]: rule["lastError"] for group in groups for rule in group["rules"] if rule.get("lastError")}

    async def fires(self, alert: str, labels: Mapping[str, str] | None = None, seconds: float = 15.0) -> dict[str, Any]:
        """Wait until an alert with these labels fires; return it. Its texts are rendered without an error."""
        wanted = {"alertname": alert, **(labels or {})}
        found: list[dict[str, Any]] = []

        async def is_firing() -> bool:
            alerts = await self.alerts()
            found[:] = [
                each for each in alerts if each["state"] == "firing" and wanted.items() <= each["labels"].items()
            ]
            return bool(found)

        await until(is_firing, seconds, lambda: f"{alert} {labels} does not fire")
        for text in found[0]["annotations"].values():
            assert "error expanding template" not in text and "<no value>" not in text, text
        return found[0]

    async def is_quiet(self, alert: str, labels: Mapping[str, str] | None = None, seconds: float = 15.0) -> None:
        """Wait until no alert with these labels fires or is pending."""
        wanted = {"alertname": alert, **(labels or {})}

        async def has_ended() -> bool:
            return not [each for each in await self.alerts() if wanted.items() <= each["labels"].items()]

        await until(has_ended, seconds, lambda: f"{alert} {labels} does not end")

    async def has_fired_and_ended(self, alert: str, labels: Mapping[str, str], seconds: float) -> None:
        """Wait until an alert has fired at some time, and did not at a later time."""
        matchers = ", ".join(f'{name}="{value}"' for name, value in labels.items())
        firing = f'ALERTS{{alertname="{alert}", alertstate="firing", {matchers}}}'

        async def is_over() -> bool:
            [(now, _)] = [each["value"] for each in await self.query("vector(0)")]
            series = await self.query_range(firing, 300)
            times = [float(moment) for each in series for moment, _ in each["values"]]
            return bool(times) and len(set(times)) < now - min(times)  # one a second, while it fires

        await until(is_over, seconds, lambda: f"{firing} has not begun and ended")

    async def has_series(self, name: str, seconds: float = 15.0) -> None:
        """Wait until there is a series of this name."""

        async def is_there() -> bool:
            return bool(await self.query(name))

        await until(is_there, seconds, lambda: f"there is no series {name}")

    async def targets(self) -> list[dict[str, Any]]:
        """Return the processes that are scraped."""
        found: list[dict[str, Any]] = (await self._http.get("/api/v1/targets?state=active")).json()["data"][
            "activeTargets"
        ]
        return found
