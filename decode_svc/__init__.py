"""The decode worker: KV blocks in, a stream of tokens out."""
