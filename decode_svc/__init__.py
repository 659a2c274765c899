"""The decode worker: reads KV blocks and streams tokens."""
