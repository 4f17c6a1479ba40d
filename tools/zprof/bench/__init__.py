"""What a machine can do: the trials, and where their figures are kept."""
