"""Measures KV transfer between workers by each transport, beside a memcpy and a bare socket."""
