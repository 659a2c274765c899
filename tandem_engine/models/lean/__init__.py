"""Our own decoder for the families that most people serve: one model, driven by the checkpoint's configuration."""
