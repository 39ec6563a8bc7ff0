"""Jobs that a Python program starts: `msrun.launch` and `msrun.Job`."""
