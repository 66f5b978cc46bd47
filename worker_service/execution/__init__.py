"""Computes steps on the device, and allocates its memory. The package `serving` determines the order of steps."""
