"""The prefill worker: a prompt in, sealed KV blocks and the first token out."""
