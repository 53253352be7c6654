"""What lies where: regions, placements, meshes and layouts, and their text forms."""
