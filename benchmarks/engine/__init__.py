"""Compares the engine with its peers and with the limits of the machine."""
