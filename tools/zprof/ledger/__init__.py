"""The ledger of bytes, its curves and samples, its reconciliation, and what only several ranks show."""
