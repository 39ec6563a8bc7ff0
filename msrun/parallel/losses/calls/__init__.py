"""What functions of torch do with samples: products, reductions, maxima, orders, and others."""
