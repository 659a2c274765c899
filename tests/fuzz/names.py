"""The fuzzed parsers by name, each with the modules that coverage guides (prefixes of their names).

Imports nothing, so that a process can instrument these modules before it imports them.
"""

from __future__ import annotations

MODULES = {
    "link_requests": ("kv_transfer_svc.transport",),
    "link_replies": ("kv_transfer_svc.transport",),
    "links": ("kv_transfer_svc.transport",),
    "engine_socket": ("tandem_engine.channel",),
    "region_packets": ("tandem_runtime.kv", "kv_transfer_svc.region_table"),
    "region_answers": ("tandem_runtime.kv",),
    "disk_records": ("kv_transfer_svc.disk",),
    "handles": ("tandem_runtime.kv",),
    "kv_calls": ("kv_transfer_svc", "tandem_runtime.kv", "tandem_runtime.kv_handle"),
}
