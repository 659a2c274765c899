"""`make upgrade-test`: the release before, in an environment of its own, beside this one."""
