"""Operators on DTensors: a table of rules, what follows from them, and what is done where there is none."""
