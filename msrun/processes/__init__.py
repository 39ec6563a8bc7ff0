"""What runs in each process of msrun: agent, scheduler, and the node's reaper and forkserver."""
