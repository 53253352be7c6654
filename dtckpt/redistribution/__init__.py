"""Redistribution: bring tensors from any layout on any mesh to any other one.

Plans are pure (`path_plan`, `exchange_plan`). `execute` compiles and runs them, exchange by exchange.
"""
