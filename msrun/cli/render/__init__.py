"""Plans, meshes and tables as text and pictures."""
