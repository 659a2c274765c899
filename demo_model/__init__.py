"""Makes the built-in model: corpus, trainer, packaging and grading. The checkpoint ships in tandem_engine/demo."""
