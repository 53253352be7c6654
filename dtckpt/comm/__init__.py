"""Bytes between clients: process groups, messages, collectives, and the process that they run in."""
