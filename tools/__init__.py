"""Tools around the mesh; no service imports them."""
