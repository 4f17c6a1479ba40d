"""Fragmentation: allocator snapshots, and a compiled model of torch's allocator that replays recorded allocations."""
