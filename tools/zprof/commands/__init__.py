"""The commands of `zprof`, one file each, and what only commands share."""
