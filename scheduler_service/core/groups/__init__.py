"""Requests and their outputs: what each asks for, has and has computed; which of them run is planning's to decide."""
