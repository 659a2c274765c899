"""Shared by the benchmarks: commands, conditions, statistics, reports, random models and served fleets."""
