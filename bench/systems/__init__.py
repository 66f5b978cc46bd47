"""What loads are put on: our services and their peers."""
