"""Tools that show what the runtime does and where tensors lie."""

from dtckpt.dtensor.debug.visualize import sharding_grid, sharding_html, sharding_svg, visualize_sharding

__all__ = ["sharding_grid", "sharding_html", "sharding_svg", "visualize_sharding"]
