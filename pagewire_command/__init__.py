"""The command `pagewire`: every program of the project, and `doctor` and `completion`."""
