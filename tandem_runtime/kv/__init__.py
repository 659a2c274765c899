"""Shared by all parties of a KV hand-over: layouts, MACs, regions and the client of the KV service."""
