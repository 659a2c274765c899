"""Measures what is answered, and to whom, if more is asked than there is capacity for."""
