"""Tool calls: each model family writes them in its own form, and clients get them in one format."""
