"""Plans that ship, as data."""
