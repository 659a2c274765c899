"""Which KV blocks does this host keep by their content, and where in memory?

One writer, `BlockStore`; no I/O, no event loop, and times are arguments.
"""
