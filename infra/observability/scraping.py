"""Prometheus' own configuration: how it finds a fleet, and how it checks the fleet's certificates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tandem_runtime.certificates.names import METRICS_NAME

GATEWAY_JOB = "tandem-gateway"
FLEET_JOB = "tandem-fleet"


@dataclass(frozen=True)
class Scraping:
    """Where the fleet is, and how often Prometheus reads it. Files are named as Prometheus sees them."""

    gateways: Sequence[str]
    rule_files: Sequence[str]
    token_file: str = ""
    """The operator's token; "" where no account exists."""
    ca_file: str = ""
    """The fleet's authorities (bundle.pem); "" where all metrics are on loopback or in plain text."""
    interval: str = "15s"
    discovery_interval: str = "15s"

    def config(self) -> dict[str, Any]:
        """Return the contents of prometheus.yml."""
        return {
            "global": {
                "scrape_interval": self.interval,
                "scrape_timeout": self.interval if self.interval.endswith("ms") else "10s",
                "evaluation_interval": self.interval,
            },
            "rule_files": list(self.rule_files),
            "scrape_configs": [self._gateway_job(), self._fleet_job()],
        }

    def _gateway_job(self) -> dict[str, Any]:
        targets = [{"targets": list(self.gateways), "labels": {"role": "gateway"}}]
        # A gateway counts workers by `role`: its own label wins over the target's.
        job = {"job_name": GATEWAY_JOB, "honor_labels": True, "static_configs": targets}
        return {**job, **self._authorization()}

    def _fleet_job(self) -> dict[str, Any]:
        """One gateway is enough to find the fleet; each is asked, so that any may be away."""
        discovery = [
            {
                "url": f"http://{gateway}/v1/metrics/targets",
                "refresh_interval": self.discovery_interval,
                **self._authorization(),
            }
            for gateway in self.gateways
        ]
        job: dict[str, Any] = {"job_name": FLEET_JOB, "http_sd_configs": discovery}
        if self.ca_file:
            job["tls_config"] = {"ca_file": self.ca_file, "server_name": METRICS_NAME}
        return job

    def _authorization(self) -> dict[str, Any]:
        return {"authorization": {"credentials_file": self.token_file}} if self.token_file else {}
