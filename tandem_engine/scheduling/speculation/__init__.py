"""Which tokens are guessed ahead of an answer? A wrong guess costs a row of a step, never a token."""
