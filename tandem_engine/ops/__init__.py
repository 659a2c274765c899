"""The op layer: the arithmetic of models, by backend."""
