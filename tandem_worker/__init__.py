"""What prefill and decode workers share: an engine process behind a gRPC front. Imports no torch."""
