"""The store of a generation: torch's TCPStore protocol, served to nobody but the job itself."""
