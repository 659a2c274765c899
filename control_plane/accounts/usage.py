"""Sums the ledger by day, model and account, beside the requests and without delaying them."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, date, datetime
from typing import Any

import sqlalchemy as sa

from control_plane.accounts.prices import DOLLARS_PER_NEURON
from control_plane.storage.database import Database
from control_plane.storage.tables import ledger

_EPOCH = date(1970, 1, 1)
_COUNTS = ("prompt", "computed", "cached", "completion")


@dataclass(frozen=True)
class Period:
    """Days in UTC, both included."""

    first: date
    last: date


def today() -> date:
    return datetime.now(UTC).date()


class UsageReport:
    """Reads the ledger."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def page(
        self, period: Period, account: str | None, model: str | None, offset: int, count: int
    ) -> tuple[list[dict[str, Any]], int]:
        """Return a page of sums by day, account and model, oldest first, and the total number of sums.

        Only closed rows count. `account` None is for all accounts.
        """
        by = (ledger.c.day, ledger.c.account, ledger.c.model)
        is_wanted = [
            ledger.c.closed_ms.is_not(None),
            ledger.c.day.between((period.first - _EPOCH).days, (period.last - _EPOCH).days),
            *([ledger.c.account == account] if account is not None else ()),
            *([ledger.c.model == model] if model is not None else ()),
        ]
        sums = [sa.cast(sa.func.sum(column), sa.BigInteger).label(column.name) for column in _SUMMED]
        found = sa.select(*by, sa.func.count().label("num_requests"), *sums).where(*is_wanted).group_by(*by)

        def read(connection: sa.Connection) -> tuple[list[dict[str, Any]], int]:
            total = connection.scalar(sa.select(sa.func.count()).select_from(found.subquery()))
            rows = connection.execute(found.order_by(*by).offset(offset).limit(count))
            return [_json(row) for row in rows.mappings()], total or 0

        return await self._database.report(read)


_SUMMED = [*(ledger.c[f"num_{name}_tokens"] for name in _COUNTS), ledger.c.num_seams, ledger.c.microneurons]


def _json(row: Any) -> dict[str, Any]:
    day = date.fromordinal(_EPOCH.toordinal() + row["day"])
    neurons = row["microneurons"] / 1e6
    return {
        "date": day.isoformat(),
        "account": row["account"],
        "model": row["model"],
        "requests": row["num_requests"],
        **{f"{name}_tokens": row[f"num_{name}_tokens"] for name in _COUNTS},
        "seams": row["num_seams"],
        "neurons": neurons,
        "cost_usd": round(neurons * DOLLARS_PER_NEURON, 9),
    }
