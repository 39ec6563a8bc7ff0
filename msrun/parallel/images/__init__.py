"""Images that ranks divide among each other: see `image_tensor`."""
