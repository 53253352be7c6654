"""Layouts of tensors: devices, meshes, placements, regions, and the text and proto forms of meshes and layouts."""
