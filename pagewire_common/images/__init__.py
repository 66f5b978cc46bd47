"""Images in prompts: the tokens of an image, computed from its size and the files of a model."""
