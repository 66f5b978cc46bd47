"""Child processes and their temporary folders."""
