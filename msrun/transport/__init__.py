"""ZeroMQ, the clock and the poll loop: the only package that knows them."""
