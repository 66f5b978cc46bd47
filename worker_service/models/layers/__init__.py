"""Linear layers, dense and with experts."""
