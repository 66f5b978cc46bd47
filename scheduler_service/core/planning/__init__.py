"""Plans each step of one worker and applies its answers. Order, blocks and placement are decided in other packages."""
