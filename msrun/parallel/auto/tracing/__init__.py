"""The trace of a forward: what it computes, as a graph that any rank may run in parts."""
