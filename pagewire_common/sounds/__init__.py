"""How models read the sounds of prompts."""
