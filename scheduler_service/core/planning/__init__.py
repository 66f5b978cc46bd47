"""Plans each step of one worker and applies its answers."""
