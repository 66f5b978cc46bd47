"""The page at / of the HTTP port: its files, its feed, and operators' commands. See docs/page.md."""
