"""Regions, placements, meshes and layouts, and their text forms."""
