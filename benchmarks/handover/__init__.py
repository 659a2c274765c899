"""Measures the gap between token one and token two: disaggregated beside aggregated."""
