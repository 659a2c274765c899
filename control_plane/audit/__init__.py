"""Compares the tables of all services, and reports memory that is kept without need."""
