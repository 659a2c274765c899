"""What all endpoints share: bodies, errors, server-sent events, request ids and authentication."""
