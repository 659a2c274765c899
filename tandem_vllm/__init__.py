"""vLLM as a worker's engine: a program that speaks the messages of `tandem_engine.messages`, in vLLM's environment."""
