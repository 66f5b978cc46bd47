"""Shows what the core does: what has changed since the last look, and why, for a page. See docs/page.md."""
