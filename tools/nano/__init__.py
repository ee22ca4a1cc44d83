"""Builds, trains and judges glm-nano, the small checkpoint that the repository ships."""
