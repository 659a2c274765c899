"""How a process gets its certificate from a gateway and keeps it valid."""
