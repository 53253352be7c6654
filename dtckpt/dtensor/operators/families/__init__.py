"""The rules, by family. Importing this package fills the table."""

from dtckpt.dtensor.operators.families import batches, convolutions, copies, elements, products, reductions, shapes

__all__ = ["batches", "convolutions", "copies", "elements", "products", "reductions", "shapes"]
