"""The alerts: rules, faults, queries and runbooks, with one fleet and one Prometheus for all of them."""
