"""What this process may use of its machine: cores, memory, NUMA nodes.

Standard library only: every package imports it.
"""
