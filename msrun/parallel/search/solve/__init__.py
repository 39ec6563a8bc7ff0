"""The best plan of one program on one mesh."""
