"""Pictures of meshes, layouts and tensors: SVG text, shardings, and what notebooks show."""
