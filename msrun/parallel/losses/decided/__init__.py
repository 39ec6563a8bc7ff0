"""What a model decides by values of its part of the batch, and what it takes from another part."""
