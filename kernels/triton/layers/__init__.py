"""What a layer computes between attention and products."""
