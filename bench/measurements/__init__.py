"""Sends loads to several systems in turn, and makes tables and charts of the measured figures."""
