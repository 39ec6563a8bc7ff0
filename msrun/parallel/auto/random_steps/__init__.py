"""Random numbers of steps that a plan runs: those of one process, on whichever ranks."""
