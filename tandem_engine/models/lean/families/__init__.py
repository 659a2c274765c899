"""One file per family: its configuration and its weights' names, by the decoder's names."""
