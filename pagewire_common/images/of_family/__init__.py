"""How each family writes an image into a prompt."""
