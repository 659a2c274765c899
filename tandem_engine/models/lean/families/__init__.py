"""One file per family: its configuration and its weights' names, in the decoder's words."""
