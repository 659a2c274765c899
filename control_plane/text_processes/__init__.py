"""Text processes: bodies are checked, rendered and tokenized beside the gateway's event loop, within bounds."""
