"""The trace file: frames, columns, its writer and reader, and what bounds it."""
