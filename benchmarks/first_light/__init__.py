"""Measures one request step by step: disaggregated beside aggregated."""
