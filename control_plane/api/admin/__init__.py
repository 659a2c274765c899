"""Endpoints for operators: accounts, usage, health and the fleet."""
