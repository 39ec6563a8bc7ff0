"""What runs in each process of ours: agent, scheduler, and the node's reaper and forkserver."""
