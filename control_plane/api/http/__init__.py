"""Shared by all endpoints: bodies, errors, server-sent events, request context and authentication."""
