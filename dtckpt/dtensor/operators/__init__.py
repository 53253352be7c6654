"""Operators on DTensors: how PyTorch's operators run on the components of devices.

The way of a call: `dispatch` looks for a plan (`plans`). For a new kind of call it makes one: it asks `registry` for
the operator's rule (`rule`; `rules` has them all) and `strategy` for the cheapest layouts. The plan redistributes the
operands (`operands`), runs the operator on components, and wraps the results (`tensor_spec`).
"""
