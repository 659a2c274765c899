"""Accounts, tokens, limits, the ledger and prices."""
