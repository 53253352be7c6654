"""Pictures of meshes, layouts and tensors: SVG text, shardings, tables in the terminal, displays in notebooks."""
