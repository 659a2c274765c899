"""Compares routers on a simulated fleet."""
