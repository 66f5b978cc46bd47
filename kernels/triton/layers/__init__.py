"""The operations of a layer between attention and products."""
