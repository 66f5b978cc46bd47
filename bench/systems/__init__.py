"""The systems under load: pagewire's services and their peers."""
