"""The rules, by family. Importing this package fills the table."""

from dtckpt.dtensor.operators.families import copies, elements, products, reductions, shapes

__all__ = ["copies", "elements", "products", "reductions", "shapes"]
