"""The prefill worker: reads a prompt, seals its KV blocks and samples the first token."""
