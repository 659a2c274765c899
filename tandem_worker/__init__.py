"""What the prefill and the decode worker share: an engine process behind a gRPC front. No torch."""
