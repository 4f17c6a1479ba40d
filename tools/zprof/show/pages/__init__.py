"""The pages of `zprof timeline` and `zprof flamegraph`: data made here, drawn by plotly in the browser."""
