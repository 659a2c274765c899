"""The op layer: what a model asks of a machine, by backend."""
