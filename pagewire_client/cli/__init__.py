"""The command line: its flags, and what each command does."""
