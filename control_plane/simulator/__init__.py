"""A fleet on virtual time: the real router, simulated workers, and the rules of other routers to compare it with."""
