"""The KV blocks that this host keeps by content, in memory.

One writer, `BlockStore`; no I/O, no event loop, and times are arguments.
"""
