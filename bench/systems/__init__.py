"""The systems under load: our services and their peers."""
