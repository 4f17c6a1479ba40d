"""What a recording says: the ledger of bytes, spans and steps, stalls and remedies, and what only several ranks show."""
