"""What `zprof report` finds out, says, and advises."""
