"""Shows where a step's time goes, from the scheduler to the kernels."""
