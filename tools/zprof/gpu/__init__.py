"""GPUs through NVML: which call answers what, and every answer in one unit."""
