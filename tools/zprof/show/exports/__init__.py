"""Other tools' formats, one module each."""
