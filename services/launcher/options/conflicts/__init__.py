"""Which options exclude each other, as tables by subject."""
