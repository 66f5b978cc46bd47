"""Products with quantised weights and with experts' weights, in eager torch."""
