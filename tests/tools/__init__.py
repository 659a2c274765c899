"""Runs the field's own tools against Tandem, each unchanged and in an environment of its own: `make tools`."""
