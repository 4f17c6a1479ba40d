"""Spans, steps, stalls, bandwidths and their mends, and the measures that a run is held to."""
