"""The processes of msrun: agent, scheduler, and the node's reaper and forkserver."""
