"""The control plane: gateway, router, dispatcher and registry. No torch, no transformers."""
