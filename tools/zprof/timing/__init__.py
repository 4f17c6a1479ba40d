"""Spans, steps, stalls, bandwidths and their remedies, and the measures that a run is held to."""
