"""What this process may use of its machine: cores, memory. Standard library only: every package imports it."""
