"""Plans that ship, as data, and modules as plans see them."""
