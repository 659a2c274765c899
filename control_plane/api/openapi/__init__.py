"""The OpenAPI document, and the reference page made from it."""
