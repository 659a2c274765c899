"""Reads bytes from other KV services: one interface, three transports, negotiated and measured per pair."""
