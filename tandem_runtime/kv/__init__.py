"""Shared by all parties of a KV hand-over: layouts, keys, signatures, regions and the client of the KV service."""
